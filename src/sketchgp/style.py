"""The style of all figures, drawn by matplotlib without pyplot; it is imported when the first is drawn."""

from __future__ import annotations

from typing import Any

from .checks import found
from .errors import InputError

COLORS = ("#1f5aa6", "#c8501e", "#3c7d3c", "#7a4fa0", "#8a6d1a", "#4d4d4d")
RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 8,
    "markerfacecolor": "white",
    "markeredgewidth": 2,
    "linestyle": "none",
}  # around a value that counts


def new_figure(size: tuple[float, float], dpi: int = 120) -> Any:
    """Return a figure that no window system and no global state knows of.

    :raises InputError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("matplotlib draws pictures: python -m pip install 'sketchgp[plot]'") from error
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def axes_for(owner: str, ax: Any, size: tuple[float, float] = (7.5, 4.2)) -> Any:
    """Return the given axes, or those of a new figure; ``axes.figure`` has ``savefig``, and a notebook shows it.

    :raises InputError: if ``ax`` is something else than axes.
    """
    if ax is None:
        return new_figure(size).subplots()
    if not all(hasattr(ax, name) for name in ("plot", "set_xlabel", "figure")):
        raise InputError(f"{owner}: ax expects matplotlib axes, or None, got {found(ax)}.")
    return ax


def finish(ax: Any, title: str = "", x: str = "", y: str = "", grid: str = "both", legend: bool = True) -> Any:
    """Add labels, a light grid and a legend, remove the frame above and on the right, and return the axes."""
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(True, which="major", axis=grid, color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=9)
    return ax


def below_axes(ax: Any, handles: Any) -> None:
    """Add a legend below the axes, where no curve is."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15), "ncols": 3}
    ax.legend(handles=handles, frameon=False, fontsize=9, **place)


def level(ax: Any, value: float, text: str) -> None:
    """Draw a dotted line across, with its name at the right end."""
    ax.axhline(value, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    where = {"xy": (1.0, value), "xycoords": ("axes fraction", "data"), "annotation_clip": False}
    shifted = {"xytext": (-2, 3), "textcoords": "offset points"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}  # curves may run below
    ax.annotate(text, **where, **shifted, ha="right", va="bottom", color="0.35", fontsize=8.5, bbox=box)

"""Pictures. They need matplotlib, the extra ``plot``; nothing else in the package does."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError

__all__ = ["Curve", "matplotlib_hint", "plot_convergence"]


@dataclass(frozen=True)
class Curve:
    """The course of one solve.

    :param label: what it is, with its n.
    :param residuals: relative residual after 0, 1, 2, ... iterations.
    :param seconds: time at each of them, from the start, set-up included; same length.
    :param color: any matplotlib colour.
    :param style: line style, ``"-"`` or ``"--"``.
    :param true_residual: the residual measured at the end, drawn as a ring where it belongs.
    """

    label: str
    residuals: Sequence[float]
    seconds: Sequence[float]
    color: str
    style: str = "-"
    true_residual: float | None = None


def matplotlib_hint() -> str | None:
    """What to do to get pictures, or None where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return 'no picture: matplotlib is missing; python -m pip install "sketchgp[plot]"'


def plot_convergence(path: str | Path, curves: Sequence[Curve], title: str, tolerances: dict[str, float]) -> Path:
    """Draws relative residuals against iterations and against seconds, and writes a PNG.

    :param path: the PNG to write.
    :param curves: the solves, in the order of the legend.
    :param title: says which data and which model.
    :param tolerances: name -> residual, drawn as horizontal lines.
    :returns: ``path``.
    :raises InputError: matplotlib is missing, or the folder cannot be written.
    """
    hint = matplotlib_hint()
    if hint is not None:
        raise InputError(hint)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator

    # A Figure of its own, without pyplot: no window system, no state left behind.
    figure = Figure(figsize=(11, 5.4), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    lowest = min([*tolerances.values(), *(min(curve.residuals) for curve in curves)])
    highest = max(max(curve.residuals) for curve in curves)
    for axis, by_time in zip(axes, (False, True), strict=True):
        for name, tolerance in tolerances.items():
            axis.axhline(tolerance, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
            axis.annotate(
                name,
                (0.01, tolerance),
                xycoords=("axes fraction", "data"),
                xytext=(0, -3),
                textcoords="offset points",
                va="top",
                color="0.35",
                fontsize=8.5,
            )
        for curve in curves:
            x = curve.seconds if by_time else range(len(curve.residuals))
            # A logarithmic axis has no zero: iteration 0 is left out of the left panel.
            points = [(a, r) for a, r in zip(x, curve.residuals, strict=True) if a > 0 and r > 0]
            if not points:
                continue
            horizontal, vertical = zip(*points, strict=True)
            axis.plot(
                horizontal,
                vertical,
                color=curve.color,
                linestyle=curve.style,
                linewidth=2,
                label=curve.label,
                zorder=3,
            )
            if curve.true_residual is not None:
                axis.plot(
                    horizontal[-1:],
                    [curve.true_residual],
                    marker="o",
                    markersize=8,
                    markerfacecolor="white",
                    markeredgecolor=curve.color,
                    markeredgewidth=2,
                    linestyle="none",
                    zorder=4,
                )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(lowest / 2.5, highest * 2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_locator(LogLocator(subs=range(2, 10)))
        axis.grid(True, which="major", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_xlabel("iterations of conjugate gradients")
    axes[1].set_xlabel("seconds, building the preconditioner included")
    axes[0].set_ylabel("relative residual  ||(K + noise I) w - y|| / ||y||")
    figure.suptitle(title, fontsize=12, x=0.012, ha="left")
    handles, labels = axes[0].get_legend_handles_labels()
    if any(curve.true_residual is not None for curve in curves):
        ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": "0.25", "markeredgewidth": 2}
        handles.append(Line2D([], [], linestyle="none", marker="o", markersize=8, **ring))
        labels.append("true residual at the end, in float64")
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.04, 0.0), ncols=2, frameon=False, fontsize=9.5)
    figure.tight_layout(rect=(0, 0.01 + 0.042 * ((len(labels) + 1) // 2), 1, 0.98))
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error
    return Path(path)

"""Pictures, by matplotlib (imported when the first is drawn)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checks
from .errors import InputError
from .pictures import calibration, convergence, hyperparameters, posterior, solvers, spectrum
from .tensor_file import replacing

__all__ = [
    "Curve",
    "calibration",
    "convergence",
    "hyperparameters",
    "plot_convergence",
    "posterior",
    "solvers",
    "spectrum",
]

_LINE = 0.05  # of the height of the axes, that a line of text takes
_RING: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 2}


@dataclass(frozen=True)
class Curve:
    """The course of one solve.

    :param label: what it is, with its n.
    :param residuals: relative residual after ``start``, ``start + 1``, ... iterations.
    :param seconds: time at each of them, from the start, set-up included; same length.
    :param color: any matplotlib colour.
    :param style: line style, ``"-"`` or ``"--"``.
    :param true_residual: the residual measured at the end, drawn as a ring.
    :param note: an index into ``residuals`` and a short text to write beside it.
    :param start: iterations before the first residual, for the continuation of another curve.
    :param caption: a short text above the curve in the panel of seconds, for one that is not to be compared
        with the others.
    """

    label: str
    residuals: Sequence[float]
    seconds: Sequence[float]
    color: str
    style: str = "-"
    true_residual: float | None = None
    note: tuple[int, str] | None = None
    start: int = 0
    caption: str | None = None

    def __post_init__(self) -> None:
        checks.settle(self, checks.instance, "label", "style", classes=str, kind="a text")
        checks.settle(self, checks.numbers, "residuals", "seconds")
        checks.settle(self, checks.number, "true_residual", optional=True)
        checks.settle(self, checks.count, "start", least=0)
        if self.caption is not None:
            checks.settle(self, checks.instance, "caption", classes=str, kind="a text")
        if len(self.residuals) != len(self.seconds):
            raise InputError(
                f"Curve: residuals and seconds expect one length, got {len(self.residuals)} and {len(self.seconds)}."
            )
        if self.note is not None:
            if not isinstance(self.note, tuple) or len(self.note) != 2 or not isinstance(self.note[1], str):
                raise checks.refusal("Curve", "note", "an index and a text", self.note, optional=True)
            checks.count("Curve", "note", self.note[0], least=0)


def plot_convergence(
    path: str | Path, curves: Sequence[Curve], title: str, tolerances: dict[str, float], overwrite: bool = True
) -> Path:
    """Draws relative residuals against iterations and against seconds, and writes a PNG.

    :param path: the PNG to write.
    :param curves: the solves, in the order of the legend.
    :param title: says which data and which model.
    :param tolerances: name -> residual, drawn as horizontal lines.
    :returns: ``path``.
    :raises InputError: arguments that do not fit, or a folder that cannot be written.
    """
    checks.path("plot_convergence", "path", path)
    checks.instance("plot_convergence", "title", title, str, "a text")
    checks.flag("plot_convergence", "overwrite", overwrite)
    right = isinstance(curves, Sequence) and all(isinstance(curve, Curve) for curve in curves)
    if not right or not any(len(curve.residuals) for curve in curves):
        raise checks.refusal("plot_convergence", "curves", "a sequence of Curve, at least one with residuals", curves)
    checks.instance("plot_convergence", "tolerances", tolerances, dict, "a dictionary of names and residuals")
    for name, tolerance in tolerances.items():
        checks.number("plot_convergence", f"tolerances[{name!r}]", tolerance, above=0, finite=True)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator

    # A Figure of its own, without pyplot: no window system, no state left behind.
    figure = Figure(figsize=(11.5, 5.4), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, by_time in zip(axes, (False, True), strict=True):
        for tolerance in tolerances.values():
            axis.axhline(tolerance, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        for order, curve in enumerate(reversed(curves)):  # the first curve ends up on top
            _draw(axis, curve, by_time, order + 2)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_locator(LogLocator(subs=range(2, 10)))
        axis.grid(True, which="major", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    lowest = min([*tolerances.values(), *(min(curve.residuals) for curve in curves)])
    axes[0].set_ylim(lowest / 2, max(max(curve.residuals) for curve in curves) * 2)
    low, high = (math.log(end) for end in axes[0].get_ylim())
    free = -math.inf  # from where on no label is written yet: those of like tolerances lie above one another
    for name, tolerance in sorted(tolerances.items(), key=lambda item: item[1]):
        half = _LINE * (name.count("\n") + 1) / 2
        middle = max(free + half, (math.log(tolerance) - low) / (high - low))
        axes[1].text(1.01, middle, name, transform=axes[1].transAxes, va="center", color="0.35", fontsize=9)
        free = middle + half
    axes[0].set_xlabel("iterations of conjugate gradients")
    axes[1].set_xlabel("seconds, building the preconditioner included")
    axes[0].set_ylabel("relative residual  ||(K + noise I) w - y|| / ||y||")
    figure.suptitle(title, fontsize=12, x=0.012, ha="left")
    handles, labels = axes[0].get_legend_handles_labels()
    handles, labels = handles[::-1], labels[::-1]
    if any(curve.true_residual is not None for curve in curves):
        handles.append(Line2D([], [], linestyle="none", marker="o", markersize=8, color="0.25", **_RING))
        labels.append("true residual at the end, in float64")
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.04, 0.0), ncols=2, frameon=False, fontsize=9.5)
    figure.tight_layout(rect=(0, 0.01 + 0.042 * ((len(labels) + 1) // 2), 1, 0.98))
    try:
        with replacing(path, "wb", overwrite) as file:
            figure.savefig(file, format="png")
    except FileExistsError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error
    return Path(path)


def _draw(axis: Any, curve: Curve, by_time: bool, order: int) -> None:
    """One curve, from the state before the first iteration on where the logarithmic axis can show it."""
    iterations = range(curve.start, curve.start + len(curve.residuals))
    x = list(curve.seconds) if by_time else [float(iteration) for iteration in iterations]
    first = 1 if x and (x[0] <= 0 or (len(x) > 1 and x[0] < x[1] / 10)) else 0
    x, y = x[first:], list(curve.residuals[first:])
    if not x:
        return
    few = len(x) <= 40 and curve.start == 0 and curve.caption is None
    line = {"linestyle": curve.style, "color": curve.color, "label": curve.label, "zorder": order}
    axis.plot(x, y, linewidth=2 if few else 1.2, marker="." if few else "", markersize=7, **line)
    if curve.true_residual is not None:
        ring = {"marker": "o", "markersize": 8, "color": curve.color, "linestyle": "none", "zorder": 100 + order}
        axis.plot(x[-1:], [curve.true_residual], **ring, **_RING)
    if curve.caption is not None and by_time:  # above the axes, where no curve is
        above = {"xycoords": ("data", "axes fraction"), "annotation_clip": False, "ha": "center", "va": "bottom"}
        axis.annotate(curve.caption, (x[0], 1.01), color=curve.color, fontsize=8.5, **above)
    if curve.note is not None and not by_time and 0 < curve.note[0] < len(curve.residuals):
        at, text = curve.note
        axis.annotate(
            text,
            (curve.start + at, curve.residuals[at]),
            xytext=(14, 2),
            textcoords="offset points",
            color=curve.color,
            fontsize=8.5,
            va="center",
        )

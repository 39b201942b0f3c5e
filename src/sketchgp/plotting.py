"""Pictures, drawn by matplotlib, which is imported when the first is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checks
from .errors import InputError
from .pictures import calibration, convergence, hyperparameters, posterior, solvers, spectrum
from .style import RING, finish, new_figure, residuals
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


@dataclass(frozen=True)
class Curve:
    """Residuals of one solve.

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
    """Draw relative residuals against iterations and against seconds, and write a PNG.

    :param path: the PNG to write.
    :param curves: the solves, in the order of the legend.
    :param title: says which data and which model.
    :param tolerances: name -> residual, drawn as horizontal lines.
    :returns: ``path``.
    :raises InputError: arguments that do not fit, or a folder that cannot be written.
    """
    owner = "plot_convergence"
    checks.path(owner, "path", path)
    checks.instance(owner, "title", title, str, "a text")
    checks.flag(owner, "overwrite", overwrite)
    right = isinstance(curves, Sequence) and all(isinstance(curve, Curve) for curve in curves)
    if not right or not any(len(curve.residuals) for curve in curves):
        raise checks.refusal(owner, "curves", "a sequence of Curve, at least one with residuals", curves)
    checks.instance(owner, "tolerances", tolerances, dict, "a dictionary of names and residuals")
    for name, tolerance in tolerances.items():
        checks.number(owner, f"tolerances[{name!r}]", tolerance, above=0, finite=True)
    figure = new_figure((11.5, 5.4), 150)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, label in zip(axes, ("iterations", "seconds, building the preconditioner included"), strict=True):
        for tolerance in tolerances.values():
            ax.axhline(tolerance, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        for order, curve in enumerate(reversed(curves)):  # the first curve ends up on top
            _draw(ax, curve, ax is axes[1], order + 2)
        ax.set_xscale("log")
        ax.set_yscale("log")
        finish(ax, x=label, legend=False)
    axes[0].set_ylabel("relative residual  ||(K + noise I) w - y|| / ||y||")
    _name_tolerances(axes[1], tolerances)
    figure.suptitle(title, fontsize=12, x=0.012, ha="left")
    handles, labels = axes[0].get_legend_handles_labels()
    if any(curve.true_residual is not None for curve in curves):
        handles = [*axes[0].plot([], [], color="0.25", **RING), *handles]
        labels = ["true residual at the end, in float64", *labels]
    figure.legend(handles[::-1], labels[::-1], loc="outside lower left", ncols=2, frameon=False, fontsize=9.5)
    try:
        with replacing(path, "wb", overwrite) as file:
            figure.savefig(file, format="png")
    except FileExistsError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error
    return Path(path)


def _name_tolerances(ax: Any, tolerances: dict[str, float]) -> None:
    """Write the names of the tolerances on the right; those of like tolerances lie above one another."""
    low, high = (math.log(end) for end in ax.get_ylim())
    free = -math.inf
    for name, tolerance in sorted(tolerances.items(), key=lambda item: item[1]):
        half = _LINE * (name.count("\n") + 1) / 2
        middle = max(free + half, (math.log(tolerance) - low) / (high - low))
        ax.text(1.01, middle, name, transform=ax.transAxes, va="center", color="0.35", fontsize=9)
        free = middle + half


def _draw(ax: Any, curve: Curve, by_time: bool, order: int) -> None:
    """Draw one curve, from the first point that the logarithmic axis can show."""
    x = list(curve.seconds) if by_time else [float(curve.start + step) for step in range(len(curve.residuals))]
    first = 1 if x and (x[0] <= 0 or (len(x) > 1 and x[0] < x[1] / 10)) else 0
    x, y = x[first:], list(curve.residuals[first:])
    residuals(ax, x, y, curve.color, curve.label, curve.true_residual, linestyle=curve.style, zorder=order)
    if x and curve.caption is not None and by_time:  # above the axes, where no curve is
        above = {"xycoords": ("data", "axes fraction"), "annotation_clip": False, "ha": "center", "va": "bottom"}
        ax.annotate(curve.caption, (x[0], 1.01), color=curve.color, fontsize=8.5, **above)
    if curve.note is not None and not by_time and 0 < curve.note[0] < len(curve.residuals):
        at, text = curve.note
        where = {"xytext": (14, 2), "textcoords": "offset points", "va": "center"}
        ax.annotate(text, (curve.start + at, curve.residuals[at]), color=curve.color, fontsize=8.5, **where)

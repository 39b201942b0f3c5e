"""The course of a fit, by matplotlib (imported when it is drawn)."""

from __future__ import annotations

import math
from typing import Any

from ..errors import InputError
from ..style import COLORS, RING, axes_for, finish

_LOSS, _GRADIENT = COLORS[0], "0.55"


def draw(history: Any, ax: Any, by: str) -> Any:
    """What :meth:`FitHistory.plot` says.

    :param by: ``"steps"`` or ``"seconds"``.
    """
    if not history.losses:
        raise InputError("FitHistory.plot expects a fit with at least one step.")
    ax = axes_for("FitHistory.plot", ax)
    x = history.seconds if by == "seconds" else list(range(len(history.losses)))
    other = ax.twinx()
    norms = [norm if norm > 0 else math.nan for norm in history.gradients]
    other.plot(x, norms, color=_GRADIENT, linewidth=1.2, linestyle="--", marker=".", markersize=4)
    other.set_yscale("log" if any(norm > 0 for norm in history.gradients) else "linear")
    other.set_ylabel("norm of the gradient (dashed)", color="0.35")
    other.spines["top"].set_visible(False)
    errors = history.standard_errors
    if any(errors) and all(map(math.isfinite, errors)):
        lower, upper = ([v + side * e for v, e in zip(history.losses, errors, strict=True)] for side in (-1, 1))
        ax.fill_between(x, lower, upper, color=_LOSS, alpha=0.15, linewidth=0, label="one standard error")
    ax.plot(x, history.losses, color=_LOSS, linewidth=2, marker=".", markersize=7, label="loss")
    best = history.best_step
    ax.plot([x[best]], [history.losses[best]], color=_LOSS, label="parameters kept", **RING)
    time, loss = "seconds since the fit began", "loss: negative log marginal likelihood per row"
    title = f"{history.optimizer}, {history.objective}; {history.reason}"
    finish(ax, title, time if by == "seconds" else "step", loss, grid="y")
    ax.spines["right"].set_visible(True)  # the axis of the gradient
    ax.set_zorder(other.get_zorder() + 1)
    ax.patch.set_visible(False)
    return ax

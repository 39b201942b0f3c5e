"""The course of a fit, by matplotlib (imported when it is drawn)."""

from __future__ import annotations

import math
from typing import Any

from ..errors import InputError

_LOSS, _GRADIENT = "#1f5aa6", "0.55"


def draw(history: Any, ax: Any, by: str) -> Any:
    """What :meth:`FitHistory.plot` says.

    :param by: ``"steps"`` or ``"seconds"``.
    """
    if not history.losses:
        raise InputError("FitHistory.plot expects a fit with at least one step.")
    if ax is None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.subplots()
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
    ring = {"marker": "o", "markersize": 8, "markerfacecolor": "white", "markeredgewidth": 2, "linestyle": "none"}
    best = history.best_step
    ax.plot([x[best]], [history.losses[best]], color=_LOSS, label="parameters kept", **ring)
    ax.set_xlabel("seconds since the fit began" if by == "seconds" else "step")
    ax.set_ylabel("loss: negative log marginal likelihood per row")
    ax.set_title(f"{history.optimizer}, {history.objective}; {history.reason}", loc="left", fontsize=10)
    ax.grid(True, axis="y", color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_zorder(other.get_zorder() + 1)
    ax.patch.set_visible(False)
    ax.spines["top"].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    return ax

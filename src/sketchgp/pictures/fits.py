"""Pictures of fits."""

from __future__ import annotations

from typing import Any, Literal

from .. import checks
from ..errors import InputError
from ..fitting.history import FitHistory
from ..style import COLORS, RING, axes_for, below_axes, finish

_STYLES = ("-", "--", "-.")


def hyperparameters(history: Any, ax: Any = None, by: Literal["steps", "seconds"] = "steps", names: Any = None) -> Any:
    """Draw the hyperparameters during a fit, with rings at those that the model keeps.

    A hyperparameter of several numbers, such as lengthscales, has several lines of one colour.  The axis is
    logarithmic; values that are not all positive, such as constants of means, are dotted, with an axis on the right.

    :param history: what :func:`sketchgp.fit` returned.
    :param ax: matplotlib axes; None makes a figure.
    :param by: ``"steps"`` or ``"seconds"``.
    :param names: which, keys of ``history.hyperparameters`` or ends of them, such as ``["lengthscale"]``; None for all.
    :returns: the axes.
    :raises InputError: for a history without a step, or an unknown name.
    """
    owner = "hyperparameters"
    checks.instance(owner, "history", history, FitHistory, "a FitHistory")
    checks.word(owner, "by", by, ("steps", "seconds"))
    if not history.losses:
        raise InputError(f"{owner}: history expects at least one step.")
    kept = _chosen(owner, history.hyperparameters, names)
    ax = axes_for(owner, ax)
    x = history.seconds if by == "seconds" else list(range(len(history.losses)))
    best = history.best_step
    handles: list[Any] = []
    other: Any = None
    for number, (name, course) in enumerate(kept.items()):
        positive, color = all(value > 0 for values in course for value in values), COLORS[number % len(COLORS)]
        if not positive and other is None:
            other = ax.twinx()
            other.spines["top"].set_visible(False)
            other.set_ylabel("value of what is dotted", color="0.35")
        on, style = (ax, _STYLES[number // len(COLORS) % len(_STYLES)]) if positive else (other, ":")
        short = _short(name, kept)
        for which, values in enumerate(zip(*course, strict=True)):
            many = f" (each of {len(course[0])})" if len(course[0]) > 1 else ""
            lines = on.plot(x, values, color=color, linestyle=style, linewidth=1.1 if many else 1.8, label=short + many)
            on.plot([x[best]], [values[best]], color=color, **{**RING, "markersize": 6 if many else 8})
            handles += [] if which else lines
    ax.set_yscale("log")
    title = f"{history.optimizer}, {history.objective}; ring: parameters kept"
    finish(ax, title, "seconds since the fit began" if by == "seconds" else "step", "value", legend=False)
    ax.spines["right"].set_visible(other is not None)
    below_axes(ax, handles)
    return ax


def _chosen(owner: str, known: dict[str, Any], names: Any) -> dict[str, Any]:
    """Return the hyperparameters of these names, or ends of names."""
    if names is None:
        kept = known
    else:
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if not isinstance(name, str) or not any(key.endswith(name) for key in known):
                raise checks.refusal(owner, "names", f"names of {', '.join(known) or 'no hyperparameter'}", name, True)
        kept = {key: value for key, value in known.items() if any(key.endswith(name) for name in wanted)}
    if not kept:
        raise InputError(f"{owner}: history expects hyperparameters of at most 100 numbers, got none.")
    return kept


def _short(name: str, among: dict[str, Any]) -> str:
    """Return the shortest end of a name that no other name has."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        short = ".".join(parts[-count:])
        if sum(other == short or other.endswith(f".{short}") for other in among) == 1:
            return short
    return name

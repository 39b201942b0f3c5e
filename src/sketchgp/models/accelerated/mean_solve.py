"""What a solve is for: the one that a model's posterior mean needs is told apart from all others.

GPyTorch's prediction strategy solves for the mean once and keeps the result.  An accelerated model's strategy marks
that solve, so that it can go to a solver that only serves means (ASkotch, Skotch, EigenPro 2); solves for variances and
gradients, of other right-hand sides, and for the means of fantasies, of other systems, stay with conjugate gradients.
Solves of a posterior go to the tolerance of evaluation.  All are context variables: another thread's are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from gpytorch import settings
from torch import Tensor

Elsewhere = tuple[Tensor, Tensor] | None
Purpose = Literal["mean", "fantasies", "other"]
_purpose: ContextVar[Purpose] = ContextVar("sketchgp_solving_for", default="other")
_evaluating: ContextVar[bool] = ContextVar("sketchgp_evaluating", default=False)
_elsewhere: ContextVar[Callable[[], Elsewhere] | None] = ContextVar("sketchgp_predicted_points", default=None)


@contextmanager
def held(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """A context variable has that value inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def solving_for() -> Purpose:
    """Whether the solve under way is that of a posterior mean, of the mean of a model's fantasies, or another."""
    return _purpose.get()


def solve_for(purpose: Purpose) -> AbstractContextManager[None]:
    """The solve inside is for that."""
    return held(_purpose, purpose)


def evaluating() -> AbstractContextManager[None]:
    """Solves inside go to GPyTorch's ``eval_cg_tolerance``."""
    return held(_evaluating, True)


def predicting(points: Callable[[], Elsewhere]) -> AbstractContextManager[None]:
    """A mean that is solved for inside is wanted at these points.

    :param points: gives k(X, x) ``(n, p)`` and k(x, x) ``(p,)`` of some of them, float64, or None where they are not to
        be had; called if a solve asks.
    """
    return held(_elsewhere, points)


def predicted_points(n: int) -> Elsewhere:
    """What :func:`predicting` was told, if the system under way is that of the mean, of n training points."""
    points = _elsewhere.get()
    found = None if points is None or solving_for() != "mean" else points()
    return found if found is not None and found[0].shape[-2] == n else None


def gpytorch_tolerance() -> float:
    """``eval_cg_tolerance`` while a posterior is computed, ``cg_tolerance`` otherwise."""
    return (settings.eval_cg_tolerance if _evaluating.get() else settings.cg_tolerance).value()

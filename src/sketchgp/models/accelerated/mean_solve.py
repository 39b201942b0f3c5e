"""What a solve is for: the one that a model's posterior mean needs is told apart from all others.

GPyTorch's prediction strategy solves for the mean once and keeps the result.  An accelerated model's strategy marks
that solve, so that it can go to a solver that only serves means (ASkotch, Skotch, EigenPro 2); solves for variances,
fantasies and gradients, of other right-hand sides, stay with conjugate gradients.  Solves of a posterior go to the
tolerance of evaluation.  Both are context variables: another thread's are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from gpytorch import settings

_solving: ContextVar[bool] = ContextVar("sketchgp_solving_mean", default=False)
_evaluating: ContextVar[bool] = ContextVar("sketchgp_evaluating", default=False)


def solving_mean() -> bool:
    """Whether the solve under way is that of a posterior mean."""
    return _solving.get()


@contextmanager
def held(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    """A context variable has that value inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def mean_solve() -> AbstractContextManager[None]:
    """The solve inside is that of a posterior mean."""
    return held(_solving, True)


def other_solves() -> AbstractContextManager[None]:
    """What is solved inside is not the mean's own system."""
    return held(_solving, False)


def evaluating() -> AbstractContextManager[None]:
    """Solves inside go to GPyTorch's ``eval_cg_tolerance``."""
    return held(_evaluating, True)


def gpytorch_tolerance() -> float:
    """``eval_cg_tolerance`` while a posterior is computed, ``cg_tolerance`` otherwise."""
    return (settings.eval_cg_tolerance if _evaluating.get() else settings.cg_tolerance).value()

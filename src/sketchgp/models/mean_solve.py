"""The one solve that a model's posterior mean needs, told apart from all others.

GPyTorch's prediction strategy solves for the mean once and keeps the result.  An accelerated model's strategy marks
that solve, so that it can go to a solver that only serves means (ASkotch, Skotch, EigenPro 2); solves for variances,
fantasies and gradients, of other right-hand sides, stay with conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_solving: ContextVar[bool] = ContextVar("sketchgp_solving_mean", default=False)


def solving_mean() -> bool:
    """Whether the solve under way is that of a posterior mean."""
    return _solving.get()


@contextmanager
def mean_solve() -> Iterator[None]:
    """The solve inside is that of a posterior mean."""
    token = _solving.set(True)
    try:
        yield
    finally:
        _solving.reset(token)


@contextmanager
def other_solves() -> Iterator[None]:
    """What is solved inside is not the mean's own system."""
    token = _solving.set(False)
    try:
        yield
    finally:
        _solving.reset(token)

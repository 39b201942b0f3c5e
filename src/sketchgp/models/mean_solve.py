"""The one solve that a model's posterior mean needs, told apart from all others.

GPyTorch's prediction strategy solves for the mean once and keeps the result.  An accelerated model's strategy marks
that solve, so that it can go to a solver that only serves means (ASkotch, Skotch, EigenPro 2); solves for variances,
fantasies and gradients, of other right-hand sides, stay with conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy

_solving: ContextVar[bool] = ContextVar("sketchgp_solving_mean", default=False)


def solving_mean() -> bool:
    """Whether the solve under way is that of a posterior mean."""
    return _solving.get()


@contextmanager
def other_solves() -> Iterator[None]:
    """What is solved inside is not the mean's own system."""
    token = _solving.set(False)
    try:
        yield
    finally:
        _solving.reset(token)


class AcceleratedPredictionStrategy(DefaultPredictionStrategy):
    """GPyTorch's strategy, with the solve for the mean marked."""

    @property
    def mean_cache(self) -> Any:
        token = _solving.set(True)
        try:
            return super().mean_cache
        finally:
            _solving.reset(token)

    def get_fantasy_strategy(self, *args: Any, **kwargs: Any) -> Any:
        """A strategy whose mean is solved for like everything else: it is of another problem."""
        strategy = super().get_fantasy_strategy(*args, **kwargs)
        strategy.__class__ = FantasyPredictionStrategy
        return strategy


class FantasyPredictionStrategy(DefaultPredictionStrategy):
    """GPyTorch's strategy, of a model's fantasies."""


def adopt(strategy: Any) -> Any:
    """Make a plain prediction strategy an accelerated one, in place; others (structured kernels) are left alone."""
    if type(strategy) is DefaultPredictionStrategy:
        strategy.__class__ = AcceleratedPredictionStrategy
    return strategy

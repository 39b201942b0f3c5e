"""The prediction strategy of an accelerated model: GPyTorch's, with the mean's own solve marked."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gpytorch import settings
from gpytorch.models.exact_prediction_strategies import (
    DefaultPredictionStrategy,
    InterpolatedPredictionStrategy,
    LinearPredictionStrategy,
    SGPRPredictionStrategy,
    clear_cache_hook,
)
from gpytorch.utils.memoize import cached

from .acceleration import choices_of
from .mean_solve import mean_solve
from .missing import observed_part, observed_targets

_STRUCTURED = (InterpolatedPredictionStrategy, LinearPredictionStrategy, SGPRPredictionStrategy)


class AcceleratedPredictionStrategy(DefaultPredictionStrategy):
    """GPyTorch's strategy, with the solve for the mean marked, and missing targets left out of it by sketchgp."""

    @property
    def mean_cache(self) -> Any:
        with mean_solve():
            return super().mean_cache

    @cached(name="mean_cache")
    def _mean_cache(self, nan_policy: str) -> Any:
        missing = torch.isnan(self.train_labels)
        if not bool(missing.any()):
            return super()._mean_cache("ignore")
        alike = bool((missing == missing.reshape(-1, missing.shape[-1])[0]).all())
        if nan_policy == "ignore" or (nan_policy == "fill" and not alike):  # elements of a batch miss different ones
            return super()._mean_cache(nan_policy)
        marginal = self.likelihood(self.train_prior_dist, self.train_inputs)
        acceleration = choices_of(self.train_prior_dist.lazy_covariance_matrix, self.likelihood)
        assert acceleration is not None  # the strategy is an accelerated model's
        observed = observed_targets(self.train_labels, self.train_labels.shape[-1:])
        residual = (self.train_labels - marginal.loc)[..., observed].unsqueeze(-1)
        part = observed_part(marginal.lazy_covariance_matrix, observed, acceleration)
        weights = torch.full_like(self.train_labels, torch.nan)
        weights[..., observed] = part.solve(residual).squeeze(-1)
        if settings.detach_test_caches.on():
            return weights.detach()
        if weights.grad_fn is not None:  # as GPyTorch has it: a backward pass makes the cache useless
            weights.grad_fn.register_hook(partial(clear_cache_hook, self))
        return weights

    def get_fantasy_strategy(self, *args: Any, **kwargs: Any) -> Any:
        """A strategy whose mean is solved for like everything else: it is of another problem."""
        strategy = super().get_fantasy_strategy(*args, **kwargs)
        strategy.__class__ = FantasyPredictionStrategy
        return strategy


class FantasyPredictionStrategy(DefaultPredictionStrategy):
    """GPyTorch's strategy, of a model's fantasies."""


def adopt(strategy: Any) -> Any:
    """What an accelerated model uses as its prediction strategy: a plain one becomes an accelerated one, in place.

    Those of structured kernels are left alone, unless targets are missing, which they do not know of (a mean would be
    NaN, or as if they had been observed).
    """
    if type(strategy) is DefaultPredictionStrategy:
        strategy.__class__ = AcceleratedPredictionStrategy
    elif type(strategy) in _STRUCTURED and bool(torch.isnan(strategy.train_labels).any()):
        return AcceleratedPredictionStrategy(
            strategy.train_inputs, strategy.train_prior_dist, strategy.train_labels, strategy.likelihood
        )
    return strategy

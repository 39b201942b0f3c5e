"""The prediction strategy of an accelerated model: GPyTorch's, with solves by sketchgp."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import (
    DefaultPredictionStrategy,
    InterpolatedPredictionStrategy,
    LinearPredictionStrategy,
    SGPRPredictionStrategy,
    clear_cache_hook,
)
from gpytorch.utils.errors import CachingError
from gpytorch.utils.memoize import add_to_cache, cached, get_from_cache
from linear_operator import to_linear_operator
from torch import Tensor

from ...operators.access import accurate_matmul, columns, evaluated_accurately, float64
from ...operators.generic_tiles import parameters_as
from ...operators.lazies import forward, parameters_of
from ...operators.substitution import cholesky_solve
from ...random_streams import generator
from ...report import SolveReport, merged, own_solves, warn_of
from ..lazy_covariance import LazyCovariance
from .acceleration import Acceleration, Purpose, choices_of
from .added_diag import AcceleratedAddedDiagLinearOperator, Points, solved_by_us
from .posterior_covariance import Solved, conditioned
from .targets import observed_part, observed_rows
from .threshold import cholesky_points
from .training import Training, remembered_by

_WEIGHTS, _ROOT = "sketchgp_weights", "sketchgp_root"
_FOLLOWED = 16  # predicted points that a solve for the mean follows
_STRUCTURED = (InterpolatedPredictionStrategy, LinearPredictionStrategy, SGPRPredictionStrategy)


class AcceleratedPredictionStrategy(DefaultPredictionStrategy):
    """GPyTorch's strategy with means and posterior covariances that sketchgp solves for, without missing targets.

    The solution behind the mean is kept in float64.

    The weights of neighbouring points cancel in a mean where the noise is small: rounded to float32, or multiplied by
    the kernel in float32, they lose as many digits as the solve has won.

    :ivar report: of the solve for the mean; None before it, and where there was none.
    :ivar purpose: ``"mean"``, or ``"fantasies"`` for a model with fantasies.
    """

    report: SolveReport | None = None
    purpose: Purpose = "mean"

    @property
    def mean_cache(self) -> Any:
        """Weights in the model's dtype, as GPyTorch's code uses them."""
        return self.weights.to(self.train_labels.dtype)

    @property
    def weights(self) -> Any:
        """Weights ``(K + noise)^-1 (y - mean)`` of the training points, ``(..., n)``; see :meth:`solve_mean`."""
        return self.solve_mean()

    def solve_mean(self, points: Points | None = None) -> Any:
        """Return the weights behind the mean, and keep them; NaN where targets are missing.

        They are in float64 where sketchgp solved for them, or for few points, and else in the model's dtype.

        :param points: as in :meth:`AcceleratedAddedDiagLinearOperator.solve_for`; asked if there is something to solve.
        """
        kind, acceleration = _kind(), self._acceleration
        # of two threads, the second waits for the solution of the first
        with nullcontext() if acceleration is None else acceleration.lock, own_solves() as solves:
            try:
                weights = get_from_cache(self, _WEIGHTS, *kind)
            except CachingError:
                weights = add_to_cache(self, _WEIGHTS, self._solved_weights(kind[0], points), *kind)
        if solves:
            self.report = merged(solves)
        return weights

    @property
    def _acceleration(self) -> Acceleration | None:
        """The choices of the model."""
        return choices_of(self.train_prior_dist.lazy_covariance_matrix, self.likelihood)

    def set_weights(self, weights: Tensor) -> None:
        """Put a solution where :attr:`weights` looks for it."""
        add_to_cache(self, _WEIGHTS, weights, *_kind())

    def _solved_weights(self, nan_policy: str, points: Points | None) -> Any:
        observed = observed_rows(self.train_labels)
        if observed is None and nan_policy == "fill" and bool(torch.isnan(self.train_labels).any()):
            return super()._mean_cache(nan_policy)
        root = self._root()
        marginal = self.likelihood(self.train_prior_dist, self.train_inputs)
        if root is None:
            covariance = marginal.lazy_covariance_matrix.evaluate_kernel()
            covariance = covariance if observed is None else self._of_observed(covariance, observed)
        ours = root is None and solved_by_us(covariance)
        dtype = torch.float64 if ours or root is not None else self.train_labels.dtype
        residual = self.train_labels.to(dtype) - marginal.loc.to(dtype)
        kept = (residual if observed is None else residual[..., observed]).unsqueeze(-1)
        if root is not None:
            solution = cholesky_solve(kept, root)
        elif ours:
            solution = covariance.solve_for(self.purpose, kept, points if self.purpose == "mean" else None)
        else:
            solution = covariance.solve(kept)
        solution = solution.squeeze(-1)
        weights = solution if observed is None else torch.full_like(residual, torch.nan)
        if observed is not None:
            weights[..., observed] = solution
        return self._as_cached(weights)

    def _as_cached(self, value: Tensor) -> Tensor:
        """Return a value as GPyTorch caches it: detached, or dropped by the backward pass that frees its graph."""
        if settings.detach_test_caches.on():
            return value.detach()
        if value.grad_fn is not None:
            value.grad_fn.register_hook(partial(clear_cache_hook, self))
        return value

    def _root(self) -> Tensor | None:
        """Return the Cholesky factor of ``K + noise`` of few observed targets in float64."""
        return self._root_of(*_kind(), cholesky_points())

    @cached(name=_ROOT)
    def _root_of(self, nan_policy: str, live: bool, few: int) -> Tensor | None:
        """Return :meth:`_root`, which the arguments decide about."""
        noisy, observed = self._unevaluated(), observed_rows(self.train_labels)
        if observed is not None and not isinstance(noisy, AcceleratedAddedDiagLinearOperator):
            noisy, observed = self._of_observed(noisy, observed), None
        if not isinstance(noisy, AcceleratedAddedDiagLinearOperator):
            return None
        with torch.set_grad_enabled(live):
            root = noisy.accurate_root(settings.fast_computations.solves, observed)
        return None if root is None else self._as_cached(root)

    def exact_prediction(self, test_mean: Tensor, test_test_covar: Any, test_train_covar: Any) -> tuple[Tensor, Any]:
        """Return posterior mean and covariance, without evaluating those of few points in their own dtype.

        A solution that fell short of its tolerance warns each time it is used.
        """
        ours, before = self._root() is not None or solved_by_us(self._noisy()), self.report
        weights = self.solve_mean(partial(followed_points, test_test_covar, test_train_covar))
        if before is not None and self.report is before:
            warn_of(before)
        if not ours and weights.dtype == self.train_labels.dtype:
            return super().exact_prediction(test_mean, test_test_covar, test_train_covar)
        mean = self.exact_predictive_mean(test_mean, test_train_covar)
        return mean, self.exact_predictive_covar(test_test_covar, test_train_covar)

    def exact_predictive_mean(self, test_mean: Tensor, test_train_covar: Any) -> Tensor:
        """Return the posterior mean ``(..., m)``, computed in float64 where the weights are, in the model's dtype.

        :param test_mean: the prior's; :param test_train_covar: covariance with the training points.
        """
        weights = self.weights
        missing = settings.observation_nan_policy.value() != "ignore" and bool(weights.isnan().any())
        if weights.dtype == self.train_labels.dtype and not missing:
            return super().exact_predictive_mean(test_mean, test_train_covar)
        weights = weights.squeeze(1) if weights.dim() == 4 else weights  # GPyTorch squeezes it, too
        weights = torch.where(weights.isnan(), 0, weights) if missing else weights
        cross, weights = to_linear_operator(test_train_covar), weights.to(torch.float64).unsqueeze(-1)
        few = cross.shape[-1] <= cholesky_points()
        product = float64(cross) @ weights if few else accurate_matmul(cross, weights)
        return (product.squeeze(-1) + test_mean.to(torch.float64)).to(self.train_labels.dtype)

    def exact_predictive_covar(self, test_test_covar: Any, test_train_covar: Any) -> Any:
        """Return the posterior covariance ``(..., m, m)``, which is exact, and solved for when it is looked at.

        ``fast_pred_var`` has no effect: its root of rank 100 is off by many times where the noise is small.
        """
        if settings.skip_posterior_variances.on():
            return super().exact_predictive_covar(test_test_covar, test_train_covar)
        prior, cross = (to_linear_operator(part) for part in (test_test_covar, test_train_covar))
        observed = observed_rows(self.train_labels)
        if observed is not None:
            cross = cross[..., :, observed.nonzero().squeeze(-1)]
        root = self._root()
        if root is not None:
            return conditioned(prior, cross, root)
        noisy = self._noisy() if observed is None else self._of_observed(self._noisy(), observed)
        if solved_by_us(noisy):
            return LazyCovariance(Solved(prior, cross, Training(noisy, noisy.acceleration, remembered_by(self))))
        if observed is None:
            return super().exact_predictive_covar(test_test_covar, test_train_covar)
        dense, noisy = cross.to_dense(), noisy.detach() if settings.detach_test_caches.on() else noisy
        return to_linear_operator(prior.to_dense() - dense @ noisy.solve(dense.mT))

    def _of_observed(self, noisy: Any, observed: Tensor) -> Any:
        """Return ``K + noise`` of the observed targets."""
        assert self._acceleration is not None  # the strategy is an accelerated model's
        return observed_part(noisy, observed, self._acceleration)

    def _noisy(self) -> Any:
        """Return ``K + noise`` of the training data, evaluated."""
        return self._unevaluated().evaluate_kernel()

    def _unevaluated(self) -> Any:
        prior = self.train_prior_dist
        zero = prior.__class__(torch.zeros_like(prior.mean), prior.lazy_covariance_matrix)
        return self.likelihood(zero, self.train_inputs).lazy_covariance_matrix

    def get_fantasy_strategy(
        self, inputs: Any, targets: Tensor, full_inputs: Any, full_targets: Tensor, full_output: Any, **kwargs: Any
    ) -> Any:
        """Return the strategy of the model with fantasies, whose mean is solved for anew, as another problem.

        GPyTorch updates a root of the inverse, which for many points is approximate: where sketchgp solves, no root is
        needed.
        """
        if isinstance(full_output, MultitaskMultivariateNormal) or not solved_by_us(self._noisy()):
            strategy = super().get_fantasy_strategy(inputs, targets, full_inputs, full_targets, full_output, **kwargs)
        else:
            mean, covariance = full_output.mean, full_output.lazy_covariance_matrix
            if full_inputs[0].dim() <= full_targets.dim():  # several sets of targets at the same points
                batch = full_targets.shape[:1]
                full_inputs = [x.expand(*batch, *x.shape) for x in full_inputs]
                mean, covariance = mean.expand(*batch, *mean.shape), covariance.expand(*batch, *covariance.shape)
            prior = self.train_prior_dist.__class__(mean, covariance)
            likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
            strategy = self.__class__(full_inputs, prior, full_targets, likelihood)
        strategy.purpose = "fantasies"
        return strategy


def _kind() -> tuple[str, bool]:
    """Return what tells cached values apart beside data and parameters: the policy for NaN, and whether they are live.

    A live value has the graph of its derivative.
    """
    return settings.observation_nan_policy.value(), torch.is_grad_enabled() and settings.detach_test_caches.off()


def some_rows(m: int) -> Tensor:
    """Return indices of at most 16 of m predicted points, the same ones each time."""
    return torch.randperm(m, generator=generator(0, "points that are predicted"))[:_FOLLOWED]


@torch.no_grad()
def followed_points(covariance: Any, cross: Any) -> tuple[Tensor, Tensor] | None:
    """Return covariances of the training points with at most 16 predicted points ``(n, p)``, and prior variances of
    these ``(p,)``, in float64; None for batches.

    :param covariance: the prior covariance of the predicted points ``(m, m)``.
    :param cross: their covariance with the training points ``(m, n)``.
    """
    if cross.dim() != 2:
        return None
    rows = some_rows(cross.shape[0]).to(cross.device)
    selected = columns(evaluated_accurately(to_linear_operator(cross).mT), rows)
    return selected.to(torch.float64), float64(covariance, diagonal=True)[rows]


class FeaturePredictionStrategy(LinearPredictionStrategy):
    """GPyTorch's strategy for kernels of few features, in float64: its normal equations square a condition number.

    :param train_prior_dist: whose features are evaluated in float64, too, where they are not evaluated yet.
    """

    def __init__(self, train_inputs: Any, train_prior_dist: Any, train_labels: Tensor, likelihood: Any) -> None:
        covariance, mean = train_prior_dist.lazy_covariance_matrix, train_prior_dist.mean.to(torch.float64)
        if isinstance(covariance, LazyEvaluatedKernelTensor):
            kernel, named = covariance.kernel, parameters_of(covariance.kernel)
            with parameters_as(kernel, tuple(named), [value.to(torch.float64) for value in named.values()]):
                covariance = forward(kernel, *[covariance.x1.to(torch.float64)] * 2)
        doubled = type(train_prior_dist)(mean, covariance.to(torch.float64))
        super().__init__(train_inputs, doubled, train_labels.to(torch.float64), likelihood)

    def exact_prediction(self, test_mean: Tensor, test_test_covar: Any, test_train_covar: Any) -> tuple[Tensor, Any]:
        mean, covariance = super().exact_prediction(
            test_mean.to(torch.float64), test_test_covar.evaluate_kernel().to(torch.float64), test_train_covar
        )
        return mean.to(test_mean.dtype), covariance.to(test_mean.dtype)


def adopt(strategy: Any, prior: Any = None) -> Any:
    """Return the strategy that an accelerated model uses: a plain one becomes an accelerated one, in place.

    Those of structured kernels are left alone, unless targets are missing, which they do not know of (a mean would be
    NaN, or as if they had been observed), or a few features are solved for in float32.

    :param prior: that it was made of; None where that is not known.
    """
    if type(strategy) is DefaultPredictionStrategy:
        strategy.__class__ = AcceleratedPredictionStrategy
    elif type(strategy) in _STRUCTURED and bool(torch.isnan(strategy.train_labels).any()):
        return AcceleratedPredictionStrategy(
            strategy.train_inputs, strategy.train_prior_dist, strategy.train_labels, strategy.likelihood
        )
    elif type(strategy) is LinearPredictionStrategy and strategy.train_labels.dtype != torch.float64:
        prior = prior or strategy.train_prior_dist
        return FeaturePredictionStrategy(strategy.train_inputs, prior, strategy.train_labels, strategy.likelihood)
    return strategy

"""Marginal likelihoods of accelerated models: with missing targets, and the leave-one-out pseudo-likelihood."""

from __future__ import annotations

import itertools
from typing import Any

import gpytorch
import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import InducingPointKernelAddedLossTerm
from torch import Tensor

from ...errors import InputError
from ...inference.leave_one_out import expected_log_density, fitted, signs
from ...operators import KernelMatrix
from ...operators.access import Access
from ...preconditioners.full_scale import FullScaleFactor
from .acceleration import choices_of
from .added_diag import AcceleratedAddedDiagLinearOperator, solved_by_us
from .mixins import AcceleratedDistribution, accelerated_class
from .targets import check_value, marginal_of_all, observed_part, observed_targets, refuse_missing


class ExactMarginalLogLikelihood(gpytorch.mlls.ExactMarginalLogLikelihood):
    """GPyTorch's ``ExactMarginalLogLikelihood``, for training on targets of which some are NaN.

    With an accelerated model under ``gpytorch.settings.observation_nan_policy("mask")`` it solves, by sketchgp, for
    what was observed, where GPyTorch's class would iterate without a preconditioner.  It is GPyTorch's in everything
    else.  :func:`sketchgp.fit` takes it by itself.

    :param likelihood: of the model.
    :param model: the model.
    """

    def forward(self, function_dist: Any, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """Return the marginal log likelihood divided by the number of all targets, as GPyTorch does, missing or not.

        :raises InputError: if no target was observed, the noise is correlated between outputs, or the kernel is an
            ``InducingPointKernel`` and targets are missing.
        """
        acceleration = None
        if settings.observation_nan_policy.value() == "mask" and isinstance(function_dist, MultivariateNormal):
            acceleration = choices_of(function_dist.lazy_covariance_matrix, self.likelihood)
        if acceleration is None:
            return super().forward(function_dist, target, *params, **kwargs)
        output = marginal_of_all(self.likelihood, function_dist, *params, **kwargs)
        observed = observed_targets(target, output.event_shape)
        if not bool(observed.all()):
            covariance = observed_part(output.lazy_covariance_matrix, observed.reshape(-1), acceleration)
            terms = self.model.added_loss_terms()  # added terms of the covariance that was just evaluated
            if any(isinstance(term, InducingPointKernelAddedLossTerm) for term in terms):
                raise InputError(
                    "The bound of an InducingPointKernel has a term for every training input, missing target or not; "
                    "give the model the observed rows by set_train_data."
                )
            marginal = accelerated_class(MultivariateNormal, AcceleratedDistribution)
            output = marginal(output.mean[..., observed], covariance)
            target = target[..., observed]
        density = self._add_other_terms(output.log_prob(target), params)
        return density.div_(function_dist.event_shape.numel())


class LeaveOneOutPseudoLikelihood(gpytorch.mlls.LeaveOneOutPseudoLikelihood):
    """GPyTorch's ``LeaveOneOutPseudoLikelihood``, the mean of ``log p(y_i | y_-i)``, for many points.

    GPyTorch's class factorizes the matrix and solves for all columns of an identity: ``n^3`` operations, and five or
    so arrays of n x n.  This one, with an accelerated model beyond the 800 points that GPyTorch factorizes, solves for
    the targets and a few probes together (:func:`sketchgp.leave_one_out` has the formulas), and once more for the
    gradient.  The value is an estimate without bias but for what is of third order; the gradient is that of the
    estimate.  Probes stay the same, unless the model was accelerated with ``probe_seed=None``; there are as many as
    GPyTorch's ``num_trace_samples`` says.  :func:`sketchgp.fit` takes this class in place of GPyTorch's by itself.

    :param likelihood: of the model.
    :param model: the model.
    """

    def forward(self, function_dist: Any, target: Tensor, *params: Any) -> Tensor:
        """Return the pseudo-likelihood divided by the number of targets, ``(...)`` for targets ``(..., n)``.

        :raises InputError: for several outputs, targets that are NaN, or fewer than two probes.
        """
        if not isinstance(function_dist, MultivariateNormal):
            return super().forward(function_dist, target, *params)
        output = self.likelihood(function_dist, *params)
        operator = output.lazy_covariance_matrix.evaluate_kernel()
        if not solved_by_us(operator):
            return super().forward(function_dist, target, *params)
        if isinstance(output, MultitaskMultivariateNormal):
            raise InputError("LeaveOneOutPseudoLikelihood expects a model of one output.")
        check_value(target, output.event_shape)
        refuse_missing("LeaveOneOutPseudoLikelihood", target)
        residual = target.to(torch.float64) - output.mean.to(torch.float64)
        weights, samples = _solved(operator, residual)
        density = expected_log_density(samples, _fit(operator, samples.detach().mean(dim=-1)), weights)
        density = self._add_other_terms(density.to(target.dtype), params)
        return density.div_(target.shape[-1])


def _solved(operator: AcceleratedAddedDiagLinearOperator, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``A^-1 residual`` and unbiased samples ``(..., n, S)`` of the diagonal of ``A^-1``, differentiable."""
    seed, count = operator.acceleration.probe_choice()
    if count < 2:
        raise InputError(f"LeaveOneOutPseudoLikelihood expects at least two probes, got {count}.")
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    n = residual.shape[-1]
    z = signs(n, count, seed, residual.device).expand(*operator.batch_shape, n, count)
    columns = residual.unsqueeze(-1).expand(*z.shape[:-1], 1)
    solved = operator.solve(torch.cat([columns, z], dim=-1))
    return solved[..., 0], z * solved[..., 1:]


@torch.no_grad()
def _fit(operator: AcceleratedAddedDiagLinearOperator, values: Tensor) -> Tensor:
    """Return a fit to estimates of the diagonal of ``A^-1``, by what neighbours say of it."""
    system, batch = operator.system(), values.shape[:-1]
    known = torch.empty_like(values)
    for index in itertools.product(*(range(size) for size in batch)):
        one = system.element(index, batch) if batch else system
        noise = one.noise.to(torch.float64)
        if isinstance(one.operator, KernelMatrix):
            known[index] = FullScaleFactor.of(one.operator, noise, noise.new_zeros(one.n, 0)).local_diagonal
        else:
            known[index] = Access(one.operator).diagonal() + noise
    return fitted(values, known)

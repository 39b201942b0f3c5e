"""The marginal likelihood of a model some of whose targets are missing."""

from __future__ import annotations

from typing import Any

import gpytorch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import InducingPointKernelAddedLossTerm
from torch import Tensor

from ...errors import InputError
from .acceleration import choices_of
from .missing import marginal_of_all, observed_part, observed_targets
from .mixins import AcceleratedDistribution, accelerated_class


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
        if bool(observed.all()):
            density = self._add_other_terms(output.log_prob(target), params)
            return density.div_(function_dist.event_shape.numel())
        covariance = observed_part(output.lazy_covariance_matrix, observed.reshape(-1), acceleration)
        terms = self.model.added_loss_terms()  # added terms of the covariance that was just evaluated
        if any(isinstance(term, InducingPointKernelAddedLossTerm) for term in terms):
            raise InputError(
                "The bound of an InducingPointKernel has a term for every training input, missing target or not; give "
                "the model the observed rows by set_train_data."
            )
        marginal = accelerated_class(MultivariateNormal, AcceleratedDistribution)(
            output.mean[..., observed], covariance
        )
        density = self._add_other_terms(marginal.log_prob(target[..., observed]), params)
        return density.div_(function_dist.event_shape.numel())

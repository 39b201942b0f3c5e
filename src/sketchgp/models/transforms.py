"""BoTorch's transforms of inputs and outcomes: points as a model sees them, predictions in units of the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..checks import tensor
from ..errors import InputError

_NAMES = ("input_transform", "outcome_transform")


class Transforms:
    """Transforms of one of BoTorch's models, which make predictions agree with its ``posterior``.

    Outcomes that are shifted and scaled (``Standardize``, and chains of such) are so by the transform's own
    ``untransform``, in float64, and error bounds with them.  Of others (``Log``) mean and variance are those that
    BoTorch's posterior has in closed form, and bounds are not known; those without a closed form are refused.

    :param model: an accelerated one.
    :param owner: who asks.
    """

    def __init__(self, owner: str, model: Any) -> None:
        self.owner, self.model = owner, model
        self.outcome: Any = getattr(model, "outcome_transform", None)
        self.outputs = getattr(model, "_num_outputs", 1)
        self.batched = self.outputs > 1 and hasattr(model, "_aug_batch_shape")  # a batch of outputs, (..., t, p)

    @classmethod
    def of(cls, owner: str, model: Any) -> Transforms | None:
        """Return the transforms of a model, or None if it has none and no independent outputs of BoTorch's.

        :raises InputError: for a model that has attributes of such names and is not BoTorch's.
        """
        transformed = any(getattr(model, name, None) is not None for name in _NAMES)
        if transformed and not (hasattr(model, "posterior") and hasattr(model, "transform_inputs")):
            raise InputError(
                f"{owner}: model has an {' or '.join(_NAMES)} and is no model of BoTorch's, whose transforms are known."
            )
        transforms = cls(owner, model)
        return transforms if transformed or transforms.batched else None

    @property
    def raw(self) -> Tensor:
        """The training inputs before they were transformed."""
        given = self.model.train_inputs[0]
        kept = getattr(self.model, "_original_train_inputs", None)
        return kept if kept is not None and getattr(self.model, "_has_transformed_inputs", False) else given

    def training(self) -> tuple[Tensor, Tensor]:
        """Return training targets ``(n,)`` float64 in units of the data, and the size ``(n,)`` of the model's unit.

        :raises InputError: for outcomes that are not shifted and scaled, and for inputs that a transform treats in
            another way in training than in predictions.
        """
        kept, targets = self.model.train_inputs[0], self.model.train_targets.to(torch.float64)
        z = self.inputs(self.raw)
        if z.shape != kept.shape or not torch.allclose(z, kept):
            raise InputError(
                f"{self.owner}: input_transform expects to do the same in training and in predictions, got one that "
                "does not (transform_on_train, transform_on_eval)."
            )
        if self.outcome is None:
            return targets, torch.ones_like(targets)
        if not self._linear:
            raise InputError(
                f"{self.owner}: outcome_transform expects to shift and scale (Standardize, chains of it), got "
                f"{type(self.outcome).__name__}; build the model on outcomes that are transformed already."
            )
        values, squares = self._moments(self.raw, z, targets.unsqueeze(-1), torch.ones_like(targets).unsqueeze(-1))
        assert squares is not None
        return values.squeeze(-1), squares.squeeze(-1).sqrt()

    def inputs(self, x: Tensor) -> Tensor:
        """Return points ``(m, d)`` as the model in eval mode sees them, ``(m, d')``.

        :raises InputError: for a transform that makes other points, or no finite ones.
        """
        with torch.no_grad():
            z = self.model.transform_inputs(x)
        if z.shape[:-1] != x.shape[:-1]:
            raise InputError(
                f"{self.owner}: input_transform expects to make one point of each, got {tuple(z.shape)} of "
                f"{tuple(x.shape)}; use model.posterior(x)."
            )
        return tensor(self.owner, "x after input_transform", z, (2,))

    def check(self, x: Tensor, z: Tensor, variance: bool) -> None:
        """Check, before anything is computed, that moments of outcomes are known.

        :raises InputError: for outcomes without a mean and variance of their own.
        """
        if self.outcome is not None:
            one = torch.ones(1, self.outputs if self.batched else 1, dtype=torch.float64, device=x.device)
            self._moments(x[:1], z[:1], one, one if variance else None)

    def in_units(self, prediction: Any, x: Tensor, z: Tensor) -> Any:
        """Return a :class:`sketchgp.Prediction` in units of the data, of shape ``(m,)``, or ``(m, t)`` of t outputs.

        :param x: its points; :param z: these as the model sees them.
        """

        def columns(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            values = values.to(torch.float64)
            if self.batched:
                return values.mT
            return values if self.outputs > 1 and values.dim() > 1 else values.unsqueeze(-1)

        mean, variance = columns(prediction.mean), columns(prediction.variance)
        observed = columns(prediction.observation_variance)
        assert mean is not None
        one_column = mean.dim() > prediction.mean.dim()

        def plain(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return (values.squeeze(-1) if one_column else values).to(prediction.mean.dtype)

        if self.outcome is None:
            return replace(prediction, mean=plain(mean), variance=plain(variance), observation_variance=plain(observed))
        new_mean, new_variance = self._moments(x, z, mean, variance)
        new_observed = None if observed is None else self._moments(x, z, mean, observed)[1]
        final_mean = plain(new_mean)
        changed = replace(
            prediction, mean=final_mean, variance=plain(new_variance), observation_variance=plain(new_observed),
            mean_error_bound=None, variance_error_bound=None,
        )  # fmt: skip
        if not self._linear:
            changed.variance_standard_error = None
        bound, off = prediction.mean_error_bound, prediction.variance_error_bound
        if not self._linear or not one_column or bound is None:
            return changed
        scale = self._moments(x, z, torch.zeros_like(mean), torch.ones_like(mean))[1]
        assert scale is not None and final_mean is not None
        squares = scale.squeeze(-1)
        eps, sizes = torch.finfo(final_mean.dtype).eps, final_mean.abs().to(torch.float64)
        scaled = squares.sqrt() * prediction.mean.abs().to(torch.float64)
        rounding = eps * sizes + 4 * torch.finfo(torch.float64).eps * (sizes + scaled)
        changed.mean_error_bound = bound * squares.sqrt() + rounding
        if off is not None:
            changed.variance_error_bound = off * squares + 2 * eps * changed.variance.to(torch.float64)
        return changed

    @property
    def _linear(self) -> bool:
        """True if outcomes are shifted and scaled only."""
        return bool(getattr(self.outcome, "_is_linear", False))

    def _moments(self, x: Tensor, z: Tensor, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return mean and variance ``(..., m, t)`` float64 of outcomes, from those of transformed outcomes."""
        points = x if hasattr(self.model, "_output_tasks") else z  # as in BoTorch's posteriors
        with torch.no_grad():
            if self._linear:
                return self.outcome.untransform(mean, variance, X=points)
            kind = type(self.outcome).__name__
            if variance is None:
                raise InputError(
                    f"{self.owner}: variance expects 'auto', 'exact', 'low_rank' or 'samples' for a model with the "
                    f"outcome_transform {kind}, whose mean depends on it; got None."
                )
            from botorch.posteriors.gpytorch import GPyTorchPosterior  # BoTorch is installed, as its transform is used

            if mean.shape[-1] == 1:
                normal = MultivariateNormal(mean.squeeze(-1), DiagLinearOperator(variance.squeeze(-1)))
            else:
                normal = MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten(-2)))
            try:
                posterior = self.outcome.untransform_posterior(GPyTorchPosterior(normal), X=points)
                return posterior.mean, posterior.variance
            except NotImplementedError as error:
                raise InputError(
                    f"{self.owner}: outcome_transform expects to have mean and variance in closed form (Standardize, "
                    f"Log, chains of Standardize), got {kind}; draw from model.posterior(x)."
                ) from error

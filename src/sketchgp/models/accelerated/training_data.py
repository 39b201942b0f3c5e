"""The training data of one output, with ``A = K + noise``: for leave-one-out predictions and paths of noises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpytorch import settings
from torch import Tensor

from ...errors import InputError
from ..transforms import Transforms
from .posterior import calls_its_own_way
from .prediction import Conditioned
from .training import Training


@dataclass
class TrainingData:
    """The observed rows of a model's training data.

    :ivar training: A, without batch.
    :ivar residual: targets less prior means, ``(n,)`` float64.
    :ivar observed: of all rows, whether they are observed.
    :ivar targets: of all rows, float64, in units of the data.
    :ivar scale: ``(n,)`` float64, the unit of the model (of A and residual) in units of the data: 1, or what
        BoTorch's ``Standardize`` divided by.
    """

    training: Training
    residual: Tensor
    observed: Tensor
    targets: Tensor
    scale: Tensor

    @classmethod
    def of(cls, owner: str, model: Any) -> TrainingData:
        """Return the training data of an accelerated model.

        :param owner: name of the function that asks.
        :param model: is put into eval mode.

        :raises InputError: for a model without data, with several tensors of inputs, several outputs or a batch, with
            a ``__call__`` of its own, whose matrix is inverted by its structure, or with BoTorch's transforms that have
            no way back.
        """
        check_inputs(owner, model)
        if calls_its_own_way(model):
            raise InputError(
                f"{owner}: model expects a __call__ that is GPyTorch's; {type(model).__name__} has its own."
            )
        inputs, targets = model.train_inputs[0], model.train_targets
        if inputs.dim() != 2 or targets.dim() != 1:
            raise InputError(
                f"{owner}: model expects one output and no batch, training inputs (n, d) and targets (n,); got "
                f"{tuple(inputs.shape)} and {tuple(targets.shape)}. Take one model for each."
            )
        observed = ~torch.isnan(targets)
        if not bool(observed.all()) and settings.observation_nan_policy.value() != "mask":
            raise InputError('The training targets hold NaN; wrap the call in observation_nan_policy("mask").')
        if not bool(observed.any()):
            raise InputError("The targets expect at least one that is not NaN.")
        model.eval()
        with torch.no_grad():
            transforms = Transforms.of(owner, model)
            known, scale = (targets.to(torch.float64), None) if transforms is None else transforms.training()
            conditioned, rows = Conditioned.of(model), int(observed.sum())
            training = None if conditioned is None else conditioned.training
            if training is None or not training.ours or training.noisy.shape != (rows, rows):
                raise InputError(
                    f"{owner}: model expects a covariance that is solved for; that of {type(model).__name__} is "
                    "inverted by its structure (a linear, inducing-point or Kronecker kernel)."
                )
            mean = model.forward(*model.train_inputs).mean  # the strategy may hold a mean of earlier parameters
            residual = (targets.to(torch.float64) - mean.to(torch.float64))[observed]
            scale = torch.ones_like(residual) if scale is None else scale[observed]
            return cls(training, residual, observed, known, scale)

    def spread(self, values: Tensor) -> Tensor:
        """Return values ``(n,)`` of the observed rows among all rows, NaN elsewhere."""
        full = torch.full(self.observed.shape, torch.nan, dtype=values.dtype, device=values.device)
        full[self.observed] = values
        return full


def check_inputs(owner: str, model: Any) -> None:
    """:raises InputError: for a model without data, or with several tensors of inputs."""
    if model.train_inputs is None or model.train_targets is None:
        raise InputError(f"{owner}: model expects training data, got none.")
    if len(model.train_inputs) != 1:
        raise InputError(f"{owner}: model expects to have one tensor of inputs, got {len(model.train_inputs)}.")

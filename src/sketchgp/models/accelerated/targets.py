"""Checks that training targets have the shape of the model's prior at its inputs.

GPyTorch's marginal likelihood subtracts the prior mean ``(n,)`` from the targets whatever their shape is: with targets
``(n, 1)`` the difference is ``(n, n)``, a batch of n residuals that nobody meant.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from torch import Tensor

from ...errors import InputError


def check_targets(model: Any, built: bool) -> None:
    """Refuse targets that are not ``(..., n)``, or ``(..., n, t)`` of a model of t outputs.

    The likelihood tells which of the two is right, and where it does not, the model's prior at the training inputs.

    :param built: False inside a constructor: there is no prior yet.
    :raises InputError: naming both shapes.
    """
    if model.train_targets is None or not model.train_inputs:
        return
    targets, inputs = model.train_targets, model.train_inputs[0]
    n, batch, shape = inputs.shape[-2], inputs.shape[:-2], targets.shape
    if shape[-1:] == (n,) and _broadcast(shape[:-1], batch):
        return
    several = isinstance(model.likelihood, _MultitaskGaussianLikelihoodBase)
    outputs = getattr(model.likelihood, "num_tasks", None) or shape[-1]
    if several and shape[-2:] == (n, outputs) and _broadcast(shape[:-2], batch):
        return
    event = _event_shape(model) if built else None
    if event is None and len(shape) > 1 and shape[-2] == n and shape[-1] > 1:
        return  # several outputs of another likelihood, which log densities check again
    if event is not None and shape[-len(event) :] == event and _broadcast(shape[: -len(event)], batch):
        return
    if event is not None and event.numel() > n and targets.numel() % event.numel() == 0:
        return  # several outputs that the model's distribution has flattened
    raise InputError(_message(shape, torch.Size([*batch, n]), n))


def check_noise(likelihood: Any, targets: Tensor | None) -> None:
    """Refuse a fixed noise that is not one number for each target ``(..., n)``: GPyTorch adds none then.

    :raises InputError: naming both shapes.
    """
    noise_model = getattr(likelihood, "noise_covar", None)
    if targets is None or not isinstance(noise_model, FixedGaussianNoise):
        return
    noise = noise_model.noise
    if noise.shape[-1:] != targets.shape[-1:] or not _broadcast(noise.shape[:-1], targets.shape[:-1]):
        raise InputError(
            f"The likelihood's fixed noise has shape {tuple(noise.shape)} where the training targets have "
            f"{tuple(targets.shape)}; set one noise for each target with likelihood.noise = noise (or give the model a "
            "new FixedNoiseGaussianLikelihood)."
        )


def check_value(value: Tensor, event: torch.Size) -> None:
    """Refuse values of a log density that do not end in the shape of its distribution's event.

    :raises InputError: naming both shapes.
    """
    if value.shape[-len(event) :] != event:
        raise InputError(_message(value.shape, event, event[0]))


def _message(shape: torch.Size, expected: torch.Size, n: int) -> str:
    what = f"The training targets have shape {tuple(shape)} where the model expects {tuple(expected)}"
    if shape[-1:] == (1,) and shape[-2:-1] == (n,):
        return f"{what}, one number a point; use train_y.squeeze(-1)."
    return f"{what}; give it one target for each of the {n} points (and of its outputs, if it has several)."


def _broadcast(shape: torch.Size, batch: torch.Size) -> bool:
    try:
        torch.broadcast_shapes(shape, batch)
    except RuntimeError:
        return False
    return True


def _event_shape(model: Any) -> torch.Size | None:
    """Return the event shape of the prior at the training inputs; None where the model's forward gives none."""
    with torch.no_grad():
        try:
            prior = model.forward(*model.train_inputs)
        except Exception:  # a forward of the user's: it will say what it lacks when the model is called
            return None
    return prior.event_shape if isinstance(prior, MultivariateNormal) else None

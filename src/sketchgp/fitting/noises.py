"""Noises of hardly anything, which few rows may find and more rows then do not leave."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.means import ConstantMean, LinearMean
from torch import Tensor

from .objective import Objective
from .scales import buffers_kept, inside, prior_variance, set_scale

_NONE = 1e-3  # of the targets' variance: noises below it are hardly any
_TRIED = (1e-3, 1e-2)  # of it, one after the other while the loss falls
_OTHER_UNIT = 10.0  # times the mean square of the targets, or its inverse: they are in another unit than the prior
_NAMES = ("raw_noise", "raw_task_noises")
_ABOVE = 9.0  # times its limit that a noise is above it, to begin with: next to it no gradient leads away;
_WITHIN = 0.1  # but no more of the targets' variance


@torch.no_grad()
def raise_noise(objective: Objective) -> str:
    """Where a fit to fewer rows ended with hardly any noise, and the loss of more rows is lower with more of it, give
    the model that noise.  What was done, in words; "" for nothing.

    Lengthscales that pass through all of the few rows without noise may miss those between them, and with the noise at
    its limit the gradient does not tell.  It takes one loss without gradient where there is no noise, two or three
    where there is some.
    """
    model = objective.model
    variance, noises = targets_variance(model), _noises(model)
    if not variance or not noises or any(bool((c.transform(p) >= _NONE * variance).any()) for p, c in noises):
        return ""
    first = least = _loss(objective)
    best, said, rows = objective.state(), "", len(model.train_targets)
    for share in _TRIED:
        set_noise(model, share)
        loss = _loss(objective)
        if not loss < least:
            break
        least, best = loss, objective.state()
        of_what = f"the noise was raised to {share:g} of the targets' variance"
        said = f"{of_what}: with {rows} rows the loss was {first:.4f}, and {loss:.4f} then"
    objective.restore(best)
    return said


@torch.no_grad()
def set_noise(model: Any, share: float) -> None:
    """Noises that a fit may change become such a share of the targets' variance, or more next to their limit."""
    variance = targets_variance(model)
    for parameter, constraint in _noises(model) if variance else ():
        limit = max(float(constraint.lower_bound.max()), 0.0)
        wanted = max(share * variance, limit + min(_ABOVE * limit, _WITHIN * variance))
        parameter.copy_(constraint.inverse_transform(inside(torch.full_like(parameter, wanted), constraint)))


def targets_variance(model: Any) -> float:
    """Of the targets; 0 where there are none to tell it."""
    targets = model.train_targets.detach().double()
    targets = targets[~torch.isnan(targets)]
    return float(targets.var()) if len(targets) > 1 else 0.0


@torch.no_grad()
def mean_square(model: Any) -> float:
    """Mean square of the targets about the mean of the model; 0 where that is not known."""
    residual = _residual(model)
    return 0.0 if residual is None else float(residual.square().mean())


@torch.no_grad()
def centre_mean(model: Any) -> None:
    """Move a constant that a fit may change, of the mean of a model, to where the targets are about zero."""
    residual = _residual(model)
    if residual is None or model.train_targets.dim() != 1:
        return
    for part in model.modules():
        if isinstance(part, ConstantMean):
            free, constant = not hasattr(part, "raw_constant_constraint"), part.raw_constant
        elif isinstance(part, LinearMean) and part.bias is not None:
            free, constant = True, part.bias
        else:
            continue
        if free and constant.requires_grad and constant.numel() == 1:
            constant.add_(residual.mean())
            return


def _residual(model: Any) -> Tensor | None:
    """Targets less the prior mean, float64, missing ones left out; None where a forward does not tell."""
    try:
        with buffers_kept(model):
            mean = model.forward(*model.train_inputs).mean
            residual = (model.train_targets - mean).double() if mean.shape == model.train_targets.shape else None
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return None
    residual = None if residual is None else residual[~torch.isnan(residual)]
    return None if residual is None or not len(residual) else residual


@torch.no_grad()
def to_unit(objective: Objective) -> str:
    """Where the prior variance is ten times another one than the mean square of the targets about the mean, give the
    output scale and the noise the targets' unit, if the loss is lower then.  What was done, in words; "" for nothing.
    """
    model, before, prior = objective.model, objective.state(), prior_variance(objective.model)
    if not set_scale(model, mean_square(model), _OTHER_UNIT):
        return ""
    noise = max((float(c.transform(p).max()) for p, c in _noises(model)), default=0.0)
    set_noise(model, min(max(noise / prior, _NONE), 1.0))
    scaled, loss = objective.state(), _loss(objective)
    objective.restore(before)
    first = _loss(objective)
    if not loss < first:
        return ""
    objective.restore(scaled)
    return f"the output scale and the noise got the targets' unit: the loss was {first:.4g}, and {loss:.4g} then"


def _noises(model: Any) -> list[tuple[Any, Any]]:
    """The parameters, and their constraints."""
    found = model.likelihood.named_parameters_and_constraints()
    return [(p, c) for name, p, c in found if name.rpartition(".")[-1] in _NAMES and c is not None and p.requires_grad]


def _loss(objective: Objective) -> float:
    """Infinite where it cannot be computed."""
    value = objective.evaluate(gradient=False).value
    return value if math.isfinite(value) else math.inf

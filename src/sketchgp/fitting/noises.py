"""Noise and output scale where a fit starts.

Few rows may be fitted best by hardly any noise, which a fit to more rows then does not leave.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.means import ConstantMean, LinearMean
from torch import Tensor

from .objective import Objective
from .scales import buffers_kept, inside, prior_variance, set_scale

_NONE = 1e-3  # share of the targets' variance below which there is hardly any noise
_TRIED = (1e-3, 1e-2)  # shares of it, tried one after the other while the loss falls
_OTHER_UNIT = 10.0  # ratio of prior variance and mean square of the targets that tells of different units
_NAMES = ("raw_noise", "raw_task_noises")
_ABOVE = 9.0  # distance of a noise to its limit at the start, in limits: next to it no gradient leads away;
_WITHIN = 0.1  # but no more than this share of the targets' variance


@torch.no_grad()
def raise_noise(objective: Objective) -> str:
    """Raise the noise of a model that a fit to fewer rows left with hardly any, where that lowers the loss.

    A posterior mean without noise that passes through few rows may miss those between them, and next to the limit of
    the noise the gradient does not tell.  This takes up to three losses without gradient.

    :returns: what was done, in words; "" for nothing.
    """
    model = objective.model
    variance, noises = targets_variance(model), _noises(model)
    if not variance or not noises or any(bool((c.transform(p) >= _NONE * variance).any()) for p, c in noises):
        return ""
    first = least = _loss(objective)
    best, note, rows = objective.state(), "", len(model.train_targets)
    for share in _TRIED:
        set_noise(model, share)
        loss = _loss(objective)
        if not loss < least:
            break
        least, best = loss, objective.state()
        of_what = f"the noise was raised to {share:g} of the targets' variance"
        note = f"{of_what}: with {rows} rows the loss was {first:.4f}, and {loss:.4f} then"
    objective.restore(best)
    return note


@torch.no_grad()
def set_noise(model: Any, share: float) -> None:
    """Set the noises that a fit may change to a share of the targets' variance, or more next to their limit."""
    variance = targets_variance(model)
    for parameter, constraint in _noises(model) if variance else ():
        limit = max(float(constraint.lower_bound.max()), 0.0)
        wanted = max(share * variance, limit + min(_ABOVE * limit, _WITHIN * variance))
        parameter.copy_(constraint.inverse_transform(inside(torch.full_like(parameter, wanted), constraint)))


def targets_variance(model: Any) -> float:
    """Return the variance of the targets; 0 where there are fewer than two."""
    targets = model.train_targets.detach().double()
    targets = targets[~torch.isnan(targets)]
    return float(targets.var()) if len(targets) > 1 else 0.0


@torch.no_grad()
def mean_square(model: Any) -> float:
    """Return the mean square of the targets about the mean of the model; 0 where that is not known."""
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
    """Return targets less the prior mean, float64, without missing ones; None where ``forward`` does not tell."""
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
    """Give output scale and noise the unit of the targets where the prior variance is of another, if the loss falls.

    :returns: what was done, in words; "" for nothing.
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
    """Return the noises that a fit may change, and their constraints."""
    named = model.likelihood.named_parameters_and_constraints()
    return [(p, c) for name, p, c in named if name.rpartition(".")[-1] in _NAMES and c is not None and p.requires_grad]


def _loss(objective: Objective) -> float:
    """Return the loss; infinity where it cannot be computed."""
    value = objective.evaluate(gradient=False).value
    return value if math.isfinite(value) else math.inf

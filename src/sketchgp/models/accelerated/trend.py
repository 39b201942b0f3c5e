"""Coefficients of a prior mean that is linear in them, and the variance that they add where data alone tell them.

With H and h the derivatives of the prior means at training points X and at x by the coefficients, and a flat prior of
these, the variance at x grows by ``q^T (H^T A^-1 H)^-1 q`` with ``q = h - H^T A^-1 k(X, x)``: universal kriging.
Rasmussen and Williams, "Gaussian processes for machine learning" (2006), equation 2.42.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.means import ConstantMean, LinearMean
from torch import Tensor

from ...errors import InputError
from ...operators.access import accurate_matmul
from ..copies import copied
from ..prediction import in_chunks
from .conditioned import MEAN_ROWS, Conditioned

NARROW = 100  # roundings of the largest direction of H, below which another one may be made of rounding
_LINEAR = 1e3  # roundings by which a mean may differ from a linear one


def coefficients(model: Any) -> list[Tensor]:
    """Return the free parameters of constant and linear means, but those with a prior or a constraint."""
    means = [m for m in model.modules() if isinstance(m, ConstantMean | LinearMean)]
    means = [m for m in means if not any(True for _ in (*m.named_priors(), *m.named_constraints()))]
    return [p for m in means for p in m.parameters(recurse=False) if p.requires_grad]


@torch.no_grad()
def set_coefficients(parameters: list[Tensor], values: Tensor) -> None:
    """Give parameters the numbers of a vector ``(p,)``."""
    for p, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
        p.copy_(part.reshape(p.shape))


def design_of(mean: Callable[[Tensor], Tensor], now: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """Return the derivatives H ``(n, p)`` of a prior mean by its coefficients; None where it is not linear in them.

    :param mean: gives the means ``(n,)`` for coefficients ``(p,)``, :param now: of which these are the present ones.
    :param residual: targets less the present means; the mean is tried at their least squares as well.
    """
    zero, eps, count = mean(torch.zeros_like(now)), torch.finfo(now.dtype).eps, len(now)
    design = torch.stack([mean(one) - zero for one in torch.eye(count).to(now)], dim=1)
    mixed = torch.linspace(-1, 2, count).to(now)
    tried = [mixed, -mixed]  # means that are linear in parts, as positive ones, differ at one
    if residual is not None:
        tried.append(now + (torch.linalg.pinv(design.double(), rtol=NARROW * eps) @ residual.double()).to(now))
    points = torch.stack(tried).to(design)
    off = torch.stack([mean(one) - zero for one in tried], dim=1) - design @ points.mT
    allowed = _LINEAR * eps * (design.abs() @ points.abs().mT).clamp(min=float(zero.abs().max()))
    return design if bool((off.abs() <= allowed).all()) else None


def added_variance(conditioned: Conditioned, x: Tensor, batch_size: int | None, show: bool) -> Tensor:
    """Return what the coefficients add to latent variances at x ``(m, d)``, ``(m,)`` float64.

    :raises InputError: for a model without free coefficients in which its mean is linear, for data that do not tell
        them apart, and for all but one plain kernel without batch.
    """
    twin, training, given = copied(conditioned.model), conditioned.training, conditioned.model.train_inputs[0]
    parameters = coefficients(twin)
    if not parameters or not conditioned.plain:
        raise InputError(
            "predict: trend=True expects a model of one plain kernel without batch, whose mean is a ConstantMean or a "
            "LinearMean with parameters that require a gradient and have neither prior nor constraint."
        )
    now = torch.cat([p.detach().reshape(-1) for p in parameters])

    def derivatives(some: Tensor) -> Tensor:
        def mean(values: Tensor) -> Tensor:
            set_coefficients(parameters, values)
            return twin.prior_at(some).mean.to(torch.float64, copy=True)  # a constant may be a view of its parameter

        design = design_of(mean, now)
        if design is None:
            raise InputError("predict: trend=True expects a mean that is linear in its coefficients.")
        return design

    design = derivatives(given if conditioned.observed is None else given[conditioned.observed])
    weights = training.noisy.solve_for("columns", design).to(torch.float64)
    root, failed = torch.linalg.cholesky_ex((design.mT @ weights + weights.mT @ design) / 2)
    if int(failed):
        raise InputError("predict: trend=True expects data that tell the coefficients of the mean apart.")

    def added(some: Tensor) -> Tensor:
        cross = training.matrix.at(conditioned.inputs(some), training.matrix.x1, centre=training.matrix.pairs.centre)
        q = derivatives(some) - accurate_matmul(cross, weights)
        return torch.linalg.solve_triangular(root, q.mT, upper=False).square().sum(dim=0)

    return torch.cat(in_chunks(added, [x], batch_size or MEAN_ROWS, "trend", show))

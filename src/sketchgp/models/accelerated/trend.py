"""What the coefficients of a prior mean add to variances where data alone tell them.

With H and h the derivatives of the prior means at training points X and at x by the coefficients, and a flat prior of
these, the variance at x grows by ``q^T (H^T A^-1 H)^-1 q`` with ``q = h - H^T A^-1 k(X, x)``: universal kriging.
Rasmussen and Williams, "Gaussian processes for machine learning" (2006), equation 2.42.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.means import ConstantMean, LinearMean
from torch import Tensor

from ...errors import InputError
from ...operators.access import accurate_matmul
from ..copies import copied
from ..prediction import in_chunks
from .conditioned import MEAN_ROWS, Conditioned


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
    mixed = torch.linspace(-1, 2, sum(p.numel() for p in parameters)).to(parameters[0])

    def mean(values: Tensor, some: Tensor) -> Tensor:
        set_coefficients(parameters, values)
        return twin.prior_at(some).mean.to(torch.float64, copy=True)  # a constant may be a view of its parameter

    def derivatives(some: Tensor) -> Tensor:
        zero = mean(torch.zeros_like(mixed), some)
        found = torch.stack([mean(one, some) - zero for one in torch.eye(len(mixed)).to(mixed)], dim=1)
        if not torch.allclose(mean(mixed, some) - zero, found @ mixed.double(), 1e-3, 1e-3 * float(found.abs().max())):
            raise InputError("predict: trend=True expects a mean that is linear in its coefficients.")
        return found

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

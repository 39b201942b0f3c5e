"""Rounding errors of the entries of a kernel matrix in float64."""

from __future__ import annotations

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator
from torch import Tensor

from ..row_sources import blocks
from .access import terms
from .kernel_matrix import KernelMatrix
from .profiles import MATERN

_EPS = torch.finfo(torch.float64).eps
_PLAIN = 8.0  # roundoffs of a profile, its scale and the distance of two points near the centre, by each of them
_SPREAD = 4.0  # roundoffs of a distance, over the squared distance from the centre
_PHASE = 32.0  # roundoffs of an angle, over the input that it is made of
_KINK = 5e-13  # of a profile with a kink at 0, whose distances near it are made from the differences


@torch.no_grad()
def entry_rounding(operator: LinearOperator) -> tuple[Tensor, Tensor] | None:
    """Bounds a ``(..., n)`` and b ``(..., m)`` for the errors of the entries of K ``(..., n, m)`` in a float64 product:
    that of K_ij is at most ``(a_i + b_j) (k(x_i, x_i) k(z_j, z_j))^1/2``.

    None where that is not known: for entries that were rounded to less than float64 when they were made, and for
    kernels that are called, which may lose any number of digits.
    """
    left = right = torch.zeros((), dtype=torch.float64, device=operator.device)
    for _, part in terms(operator):
        if isinstance(part, KernelMatrix) and part.expression is not None:
            errors = _of_kernel(part.type(torch.float64))
        elif isinstance(part, DenseLinearOperator) and operator.dtype == torch.float64:
            errors = left.new_zeros(()), left.new_zeros(())
        else:
            return None
        left, right = (torch.maximum(found, error) for found, error in zip((left, right), errors, strict=True))
    return (_EPS * left).expand(operator.shape[:-1]), (_EPS * right).expand(*operator.batch_shape, operator.shape[-1])


def _of_kernel(matrix: KernelMatrix) -> tuple[Tensor, Tensor]:
    """Return bounds of the errors in roundoffs, by rows and by columns."""
    assert matrix.expression is not None
    if matrix.pairs.sources:
        sides = [
            torch.cat([_of_kernel(matrix.at(rows, rows, True, matrix.pairs.centre))[0] for _, rows in blocks(x)])
            for x in (matrix.x1, matrix.x2)
        ]
        return sides[0], sides[1]
    found = []
    prepared = matrix.pairs.prepared().features
    batch = matrix.batch_shape
    for side, x in enumerate((matrix.x1, matrix.x2)):
        roundoffs = torch.full_like(x[..., 0], _PLAIN)
        for atom, features in zip(matrix.expression.atoms, prepared, strict=True):
            rows = features.right if side else features.left
            squares = rows.square().sum(dim=-1)
            squares = squares.reshape(*batch, -1) if squares.dim() > 1 and len(batch) > 1 else squares
            error = _PLAIN + _SPREAD * (1 + rows.shape[-1] ** 0.5 / 4) * squares
            if features.weight is None:
                error = error + _PHASE * (1 + x.abs().amax(dim=-1))
            if atom.profile is MATERN[0.5] or atom.profile.l1:
                error = error + _KINK / _EPS
            roundoffs = roundoffs + error
        found.append(roundoffs)
    return found[0], found[1]

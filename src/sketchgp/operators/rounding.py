"""How exact the entries of a kernel matrix are where it is evaluated in float64."""

from __future__ import annotations

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator

from .access import terms
from .kernel_matrix import KernelMatrix
from .profiles import MATERN

_PLAIN = 16.0  # roundoffs of a profile, its scale and the distance of two points near the centre
_UNKNOWN = 500.0  # roundoffs of a kernel that is called as it is
_SPREAD = 4.0  # roundoffs of a distance, over the squared distance from the centre
_PHASE = 64.0  # roundoffs of an angle, over the input that it is made of
_KINK = 1e-12  # of a profile with a kink at 0, whose distances near it are made from the differences


@torch.no_grad()
def entry_rounding(operator: LinearOperator) -> float | None:
    """A bound for the errors of the entries of K in a float64 product, over ``(k(x, x) k(z, z))^1/2``.

    None where the entries were rounded to less than float64 when they were made: they are then no kernel's.
    """
    errors = []
    for _, part in terms(operator):
        if isinstance(part, KernelMatrix):
            errors.append(_of_kernel(part.type(torch.float64)))
        elif part.dtype != torch.float64 or operator.dtype != torch.float64:
            return None
        else:
            errors.append(0.0 if isinstance(part, DenseLinearOperator) else _UNKNOWN)
    return max(errors, default=0.0) * torch.finfo(torch.float64).eps


def _of_kernel(matrix: KernelMatrix) -> float:
    if matrix.expression is None:
        return _UNKNOWN
    roundoffs = _PLAIN
    for atom, features in zip(matrix.expression.atoms, matrix.prepared().features, strict=True):
        squares = max(float(side.square().sum(dim=-1).amax()) for side in (features.left, features.right))
        error = _PLAIN + _SPREAD * squares
        if features.weight is None:
            error += _PHASE * (1 + float(matrix.x1.abs().amax()))
        if atom.profile is MATERN[0.5] or atom.profile.l1:
            error += _KINK / torch.finfo(torch.float64).eps
        roundoffs += error
    return roundoffs

"""A preconditioner that is a product of triangular factors, as the inducing-point problem has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NumericalError


@dataclass
class TriangularFactors:
    """``P = (A T)^T (A T)`` for upper triangular factors, applied as ``P^-1 = T^-1 A^-1 A^-T T^-T``.

    :ivar factors: ``(m, m)`` upper triangular, the outermost last: [T] or [A, T].
    :ivar rank: m.
    """

    factors: list[Tensor]

    @property
    def rank(self) -> int:
        return len(self.factors[0])

    def apply_inverse(self, vectors: Tensor) -> Tensor:
        """``P^-1 v``, ``(m, t)`` float64."""
        for factor in reversed(self.factors):
            vectors = torch.linalg.solve_triangular(factor.mT, vectors, upper=False)
        for factor in self.factors:
            vectors = torch.linalg.solve_triangular(factor, vectors, upper=True)
        return vectors


def shifted_cholesky(matrix: Tensor, shift: float, what: str) -> tuple[Tensor, float]:
    """Upper Cholesky factor of ``matrix + shift I``, the shift raised tenfold until there is one; and the shift.

    :raises NumericalError: where none helps: the matrix holds NaN, or is far from positive semidefinite.
    """
    least = torch.finfo(torch.float64).eps * float(matrix.diagonal().mean())
    for _ in range(10):
        shifted = matrix.clone()
        shifted.diagonal().add_(shift)
        root, failed = torch.linalg.cholesky_ex(shifted, upper=True)
        if not int(failed) and bool(torch.isfinite(root.diagonal()).all()):
            return root, shift
        shift = max(10 * shift, least)
    raise NumericalError(f"{what} has no Cholesky factor: it holds NaN or is not positive definite; check the inputs.")

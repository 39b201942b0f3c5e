"""A preconditioner that is a product of triangular factors, as the inducing-point problem has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..lowrank import shifted_cholesky
from ..operators.normal_matrix import NormalMatrix


@dataclass
class TriangularFactors:
    """``P = (A T)^T (A T)`` for upper triangular factors, applied as ``P^-1 = T^-1 A^-1 A^-T T^-T``.

    :ivar factors: ``(m, m)`` upper triangular, the outermost last: [T] or [A, T].
    :ivar sketched: ``(m, t)``, the least-squares solution of the sketch that P was made from; None where there is none.
    :ivar rank: m.
    """

    factors: list[Tensor]
    sketched: Tensor | None = None

    @property
    def rank(self) -> int:
        return len(self.factors[0])

    def inverse(self, vectors: Tensor) -> Tensor:
        """``R^-1 v`` for the root ``R = A T``, ``(m, t)`` float64."""
        for factor in self.factors:
            vectors = torch.linalg.solve_triangular(factor, vectors, upper=True)
        return vectors

    def inverse_t(self, vectors: Tensor) -> Tensor:
        """``R^-T v``."""
        for factor in reversed(self.factors):
            vectors = torch.linalg.solve_triangular(factor.mT, vectors, upper=False)
        return vectors

    def multiply_t(self, vectors: Tensor) -> Tensor:
        """``R^T v``."""
        for factor in self.factors:
            vectors = factor.mT @ vectors
        return vectors

    def apply_inverse(self, vectors: Tensor) -> Tensor:
        """``P^-1 v``, ``(m, t)`` float64."""
        return self.inverse(self.inverse_t(vectors))


def root_of(matrix: NormalMatrix) -> Tensor:
    """L ``(m, m)``, upper triangular: ``L^T L`` is Kzz with the unit roundoff times its trace added to the diagonal."""
    eps = torch.finfo(torch.float64).eps
    return matrix.memory.remember("root of Kzz", lambda: shifted_cholesky(matrix.kzz, eps).mT)

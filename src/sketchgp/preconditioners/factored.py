"""A preconditioner that is a product of triangular factors, as the inducing-point problem has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

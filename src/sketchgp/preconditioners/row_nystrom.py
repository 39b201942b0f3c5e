"""A Nystrom approximation of the normal matrix of the inducing-point problem, from some rows: no m x m matrix.

Reference: Frangella, Tropp, Udell, "Randomized Nystrom preconditioning" (arXiv:2110.02820).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..lowrank.factor import nystrom_factor
from ..lowrank.nystrom import gaussian_test_matrix
from ..operators import KernelMatrix
from ..operators.tall import TallMatrix
from ..operators.tiles import spans

_COLUMNS = 2**22  # entries of a tile


@dataclass
class NystromRoot:
    """``P = U diag(S) U^T + damping`` as ``R R`` with its symmetric root R; O(m r) memory and work.

    :ivar vectors: U ``(m, r)``, orthonormal.
    :ivar values: S ``(r,)``.
    """

    vectors: Tensor
    values: Tensor
    damping: float

    @property
    def rank(self) -> int:
        return len(self.values)

    def _power(self, vectors: Tensor, power: float) -> Tensor:
        rest = self.damping**power
        scales = (self.values + self.damping).pow(power) - rest
        inner = scales.unsqueeze(1) * (self.vectors.mT @ vectors)
        return torch.addmm(vectors, self.vectors, inner, beta=rest)

    def inverse(self, vectors: Tensor) -> Tensor:
        """``R^-1 v``, ``(m, t)``."""
        return self._power(vectors, -0.5)

    def inverse_t(self, vectors: Tensor) -> Tensor:
        """``R^-T v``, the same."""
        return self._power(vectors, -0.5)

    def multiply_t(self, vectors: Tensor) -> Tensor:
        """``R^T v``."""
        return self._power(vectors, 0.5)


@torch.no_grad()
def row_nystrom(
    tall: TallMatrix, kzz: KernelMatrix, level: float, rank: int, rows: Tensor, stream: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Randomized Nystrom approximation ``U diag(S) U^T`` of ``(n / h) T_H^T T_H + level Kzz``, for h rows H.

    ``h m + m^2 / 2`` kernel evaluations, ``O((h + m + r) m r)`` operations, O(m r) memory.

    :param kzz: ``k(z, z)``, by tiles.
    :returns: U ``(m, r)`` and S ``(r,)``, falling; r is at most ``rank``.
    """
    n, m = tall.shape
    test = gaussian_test_matrix(m, rank, stream, tall.device)
    sketch = kzz._matmul(test.to(kzz.dtype)).to(torch.float64) * level
    for span in spans(len(rows), max(16, _COLUMNS // m)):
        part = tall.part(rows[span])
        sketch.addmm_(part.mT, part @ test, alpha=n / len(rows))
    factor = nystrom_factor(sketch, test.mT @ sketch, torch.finfo(kzz.dtype).eps)
    vectors, roots, _ = torch.linalg.svd(factor, full_matrices=False)
    return vectors, roots.square()


def damped(vectors: Tensor, values: Tensor) -> NystromRoot:
    """With the least eigenvalue that was found for damping: what P misses is about as large, or smaller."""
    least = float(values[-1]) if len(values) else 0.0
    scale = float(values[0]) if len(values) else 1.0
    return NystromRoot(vectors, values, max(least, torch.finfo(torch.float64).eps * scale, math.ulp(0.0)))

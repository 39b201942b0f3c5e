"""The preconditioner of SketchySAGA: a damped Nystrom approximation from some rows, and the damping that suits it.

References: Frangella, Rathore, Zhao, Udell, "PROMISE" (arXiv:2309.02014), for preconditioned SAGA; Rathore, Frangella,
Udell (arXiv:2407.10070), Algorithm 5, which leaves the damping to a grid search; Gazagnadou, Gower, Salmon
(ICML 2019), for how the smoothness of mini-batches depends on their size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.tall import TallMatrix
from ..operators.tiles import spans
from .row_nystrom import row_nystrom

_COLUMNS = 2**22  # entries of a tile of the second sample
_BISECTIONS = 24
_LEAST = 1e-10  # damping over the largest eigenvalue: U U^T v cancels v to rounding, which 1 / damping multiplies


@dataclass
class DampedNystrom:
    """``P = U diag(S) U^T`` close to ``M = T^T T + level Kzz``, for use as ``P + damping``; and a second sample of rows
    of T on which to see how close.

    With the rows G (s, m) of the second sample times ``(n / s)^1/2``, it keeps ``G U`` and ``G G^T``, from which
    ``C = G (P + damping)^-1 G^T`` follows for every damping without another look at the kernel.

    :ivar vectors: U ``(m, r)``, orthonormal.
    :ivar values: S ``(r,)``, falling.
    :ivar basis: ``G U`` ``(s, r)``.
    :ivar gram: ``G G^T`` ``(s, s)``.
    :ivar n: rows of T.
    :ivar damping: added to P; set by :meth:`choose_damping` or by the user.
    """

    vectors: Tensor
    values: Tensor
    basis: Tensor
    gram: Tensor
    n: int
    damping: float = 0.0

    @property
    def rank(self) -> int:
        return len(self.values)

    def apply_inverse(self, vectors: Tensor) -> Tensor:
        """``(P + damping)^-1 v``, ``(m, t)``."""
        scales = 1 / (self.values + self.damping) - 1 / self.damping
        return torch.addmm(
            vectors, self.vectors, scales.unsqueeze(1) * (self.vectors.mT @ vectors), beta=1 / self.damping
        )

    def batch_smoothness(self, damping: float, block_size: int) -> float:
        """Return the bound of the step of batches of this size: the largest eigenvalue of ``E[H P^-1 H] P^-1`` over
        that of ``H P^-1``, where H is the Hessian of a batch without the part of the noise.

        With ``h_i = (P + damping)^-1/2 k_i`` for the rows k_i of T that is the largest eigenvalue of
        ``sum_i (1 + n |h_i|^2 / b) h_i h_i^T``, here over the second sample: at b = n the smoothness of all rows, at
        b = 1 near the largest of one row, and falling with the damping.
        """
        scales = 1 / (self.values + damping) - 1 / damping
        inner = torch.addmm(self.gram, self.basis * scales, self.basis.mT, beta=1 / damping)
        squares = inner.diagonal().clamp(min=0) * len(inner)  # n |h_i|^2
        share = (self.n - block_size) / max(1, self.n - 1) / block_size
        weights = (1 + share * squares).sqrt()
        return float(torch.linalg.eigvalsh(weights.unsqueeze(1) * inner * weights)[-1].clamp(min=0))

    def least_damping(self) -> float:
        """Return the damping below which rounding decides."""
        return max(_LEAST * max(float(self.values[:1].sum()), float(self.gram.diagonal().mean())), 1e-300)

    def choose_damping(self, block_size: int, target: float) -> float:
        """The least damping whose :meth:`batch_smoothness` is at most ``target``, by bisection of its logarithm.

        A direction that P misses moves by ``step / damping`` times its gradient, a captured one by ``step``, and
        ``step`` is inverse to the smoothness.  ``damping * smoothness`` grows with the damping: less of it is better
        for what P misses, until the steps become too short for what it has.
        """
        low = self.least_damping()
        if self.batch_smoothness(low, block_size) <= target:
            return low
        high = max(low, float(self.gram.diagonal().max()))
        while self.batch_smoothness(high, block_size) > target:
            low, high = high, high * 100
        for _ in range(_BISECTIONS):
            if high / low < 1.1:
                break
            middle = math.sqrt(low * high)
            if self.batch_smoothness(middle, block_size) > target:
                low = middle
            else:
                high = middle
        return high


@torch.no_grad()
def damped_nystrom(
    tall: TallMatrix,
    kzz: KernelMatrix,
    level: float,
    rank: int,
    rows: int,
    sample: int,
    generator: torch.Generator,
) -> DampedNystrom:
    """Randomized Nystrom approximation of ``(n / rows) T_H^T T_H + level Kzz`` for random rows H, and a second sample.

    ``(rows + sample) m + m^2 / 2`` kernel evaluations, O(m rank) memory.

    :param kzz: ``k(z, z)``, by tiles.
    :param rows: of T that P is made of.
    :param sample: rows of T, other ones as far as there are, that smoothness is estimated on.
    """
    (n, m), device = tall.shape, tall.device
    order = torch.randperm(n, generator=generator).to(device)
    first = order[:rows]
    second = order[rows : rows + sample] if rows + sample <= n else order[-sample:]
    vectors, values = row_nystrom(tall, kzz, level, rank, first, generator)
    basis = values.new_zeros(len(second), len(values))
    gram = values.new_zeros(len(second), len(second))
    weights = None if tall.weights is None else tall.weights[second]
    for span in spans(m, max(16, _COLUMNS // len(second))):
        narrow = TallMatrix(tall.kernel, tall.x[second], tall.z[span], weights)
        part = narrow.part(torch.arange(len(second), device=device))
        basis.addmm_(part, vectors[span])
        gram.addmm_(part, part.mT)
    tall.entries += len(second) * m
    scale = n / len(second)
    return DampedNystrom(vectors, values, basis * math.sqrt(scale), gram * scale, n)

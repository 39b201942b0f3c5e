"""The greedy partial Cholesky preconditioner (GPyTorch's own method, at any rank)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..lowrank import LowRank, greedy_cholesky
from ..operators.access import Access
from ..space import Space
from .base import Preconditioner


@dataclass(frozen=True)
class GreedyCholesky(Preconditioner):
    """``P = F F^T + noise`` with F from Cholesky with diagonal pivoting.  Deterministic; for comparison.

    The next pivot is the point with the largest residual over its noise.

    Choose it when runs must not depend on a seed; :class:`RPCholesky` is faster to build and fails less often
    (arXiv:2304.12465, Figure 2).  References: Harbrecht, Peters, Schneider (2012); Gardner et al.
    (arXiv:1809.11165).

    :param rank: columns of F, or None (automatic, see :class:`Preconditioner`).
    """

    pivoted = below = True

    def approximate(self, matrix: Access, noise: Tensor) -> LowRank:
        rank, enough = self.rank_for(matrix.n, matrix.device), self.stopping_rule(matrix, one_by_one=True)
        return greedy_cholesky(matrix, rank, weights=1 / noise, enough=enough, space=Space.of(matrix.n))

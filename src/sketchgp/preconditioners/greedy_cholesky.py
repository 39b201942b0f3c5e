"""The greedy partial Cholesky preconditioner (GPyTorch's own method, at any rank)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..operators.access import Access
from ..random_streams import generator
from ..space import Space
from .base import Preconditioner
from .low_rank import LowRank
from .rpcholesky import rpcholesky


def greedy_cholesky(
    matrix: Access,
    rank: int,
    *,
    weights: Tensor | None = None,
    tol: float = 0.0,
    enough: Callable[[int, float], bool] | None = None,
    space: Space | None = None,
) -> LowRank:
    """Partial Cholesky factor of one matrix with diagonal (complete) pivoting.

    Deterministic.  Good when the residual is spread evenly; it chases outliers otherwise, and is slower than
    :func:`~sketchgp.preconditioners.rpcholesky` because pivots come one at a time.  O(n rank^2) operations.

    :param matrix: the symmetric positive semidefinite matrix.
    :param rank: the most columns to take.
    :param weights: ``(n,)``, not negative, of each point (for noise D, ``1 / D``); None is 1.
    :param tol: stop when ``sum(weights * residual) <= tol``.
    :param enough: asked before each column with the number of columns and ``sum(weights * residual)``: whether to stop.
        With it memory is taken as columns come.
    :param space: of F; None makes all rows here.  P ranks that make their own rows evaluate ``n rank / P`` entries of K
        each; a column sends the row of its pivot, and n numbers.
    :returns: the factor in float64 with its pivots.
    """
    unused = generator(0, "greedy pivots")  # nothing is drawn from it
    return rpcholesky(
        matrix, rank, generator=unused, method="greedy", block_size=1, weights=weights, tol=tol, enough=enough,
        space=space,
    )  # fmt: skip


@dataclass(frozen=True)
class GreedyCholesky(Preconditioner):
    """``P = F F^T + noise`` with F from Cholesky with diagonal pivoting.  Deterministic; for comparison.

    The next pivot is the point with the largest residual over its noise.

    Choose it when runs must not depend on a seed; :class:`RPCholesky` is faster to build and fails less often
    (arXiv:2304.12465, Figure 2).  References: Harbrecht, Peters, Schneider (2012); Gardner et al.
    (arXiv:1809.11165).

    :param rank: columns of F, or None (automatic, see :class:`Preconditioner`).
    """

    pivoted = True

    def approximate(self, matrix: Access, noise: Tensor) -> LowRank:
        rank, enough = self.rank_for(matrix.n, matrix.device), self.stopping_rule(matrix, one_by_one=True)
        return greedy_cholesky(matrix, rank, weights=1 / noise, enough=enough, space=Space.of(matrix.n))

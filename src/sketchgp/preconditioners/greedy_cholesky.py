"""The greedy partial Cholesky preconditioner (GPyTorch's own method, at any rank)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices import fetched
from ..fingerprint import parameters_held
from ..operators.access import Access
from ..space import Space
from .base import Preconditioner
from .low_rank import LowRank, PartialCholesky


@torch.no_grad()
@parameters_held()
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
    state = PartialCholesky(matrix, rank, weights, tol, enough, space)
    space, columns = state.space, state.columns
    while columns.count < state.rank:
        wanted = state.scores()
        best = wanted.argmax()[None]
        row = space.rows(columns.factor, best)[0]
        new = space.columns(matrix, best)[:, 0] - columns.factor @ row
        height = space.rows(new[:, None], best)[0]
        # The column is made before it is known whether it is needed, so that a device is waited for once.
        sums, pivot = fetched(state.sums(wanted), height)
        if state.ends(sums) or not pivot > 0:
            break
        state.add((new / height.sqrt()).unsqueeze(0), best)
    return state.low_rank(sequential=True)


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

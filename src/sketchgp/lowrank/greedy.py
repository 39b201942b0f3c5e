"""Greedily pivoted partial Cholesky: always the column whose diagonal has most left (GPyTorch's default)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..operators.access import Access
from .factor import Columns, LowRank, Scores


@torch.no_grad()
def greedy_cholesky(
    matrix: Access,
    rank: int,
    *,
    weights: Tensor | None = None,
    tol: float = 0.0,
    enough: Callable[[int, float], bool] | None = None,
) -> LowRank:
    """Partial Cholesky factor of one matrix with diagonal (complete) pivoting.

    Deterministic.  Good when the residual is spread evenly; it chases outliers otherwise, and is slower than
    :func:`~sketchgp.lowrank.rpcholesky` because pivots come one at a time.  O(n rank^2) operations.

    :param matrix: the symmetric positive semidefinite matrix.
    :param rank: the most columns to take.
    :param weights: ``(n,)``, not negative, of each point (for noise D, ``1 / D``); None is 1.
    :param tol: stop when ``sum(weights * residual) <= tol``.
    :param enough: asked before each column with the number of columns and ``sum(weights * residual)``: whether to stop.
        With it memory is taken as columns come.
    :returns: the factor in float64 with its pivots.
    """
    diagonal = matrix.diagonal()
    residual, scores = diagonal.clone(), Scores(matrix, diagonal, weights)
    n, device = matrix.n, matrix.device
    floor = matrix.resolution * float(residual.sum())
    rank = min(rank, n)
    found = Columns(n, rank, device, surely=enough is None)
    pivots = torch.zeros(rank, dtype=torch.long, device=device)
    done = 0
    while done < rank:
        wanted = scores.of(residual)
        left, total, _ = scores.sums(residual, wanted).tolist()
        if left <= floor or total <= tol or (enough is not None and enough(done, total)):
            break
        best = wanted.argmax()
        new = matrix.columns(best[None])[:, 0] - found.factor @ found.factor[best]
        if not (new[best] > 0 and wanted[best] > 0):
            break
        new = new / new[best].sqrt()
        found.add(new.unsqueeze(0))
        pivots[done] = best
        residual = (residual - new.square()).clamp_(min=0)
        residual[best] = 0
        done += 1
    return LowRank(found.all(), pivots[:done], residual)

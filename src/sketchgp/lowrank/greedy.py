"""Greedily pivoted partial Cholesky: always the column whose diagonal has most left (GPyTorch's default)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..distributed import ShardedRows, Shards
from ..operators.access import Access
from .factor import BEGIN, LowRank, Scores, widened


@torch.no_grad()
def greedy_cholesky(
    matrix: Access,
    rank: int,
    *,
    weights: Tensor | None = None,
    tol: float = 0.0,
    enough: Callable[[int, float], bool] | None = None,
    shards: Shards | None = None,
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
    :param shards: P ranks that each make their own rows of F: ``n rank / P`` entries of K and memory; a column sends
        the row of its pivot, and n numbers.
    :returns: the factor in float64 with its pivots.
    """
    diagonal = matrix.diagonal()
    residual, scores = diagonal.clone(), Scores(matrix, diagonal, weights)
    n, device = matrix.n, matrix.device
    floor = matrix.resolution * float(residual.sum())
    rank = min(rank, n)
    held = slice(0, n) if shards is None else shards.span(n)
    rows, columns = held.stop - held.start, rank if enough is None else min(rank, BEGIN)
    own = None if shards is None else torch.arange(held.start, held.stop, device=device)
    factor = torch.zeros(rows, columns, dtype=torch.float64, device=device)
    pivots = torch.zeros(rank, dtype=torch.long, device=device)
    done = 0
    while done < rank:
        if float(residual.sum()) <= floor or scores.total(residual) <= tol:
            break
        if enough is not None and enough(done, scores.total(residual)):
            break
        if done == factor.shape[1]:
            factor = widened(factor, min(rank, 2 * done))
        wanted = scores.of(residual)
        best = wanted.argmax()
        row = factor[best, :done] if shards is None else shards.rows(factor[:, :done], best[None], n)[0]
        column = matrix.columns(best[None]) if own is None else matrix.block(own, best[None])
        new = column[:, 0] - factor[:, :done] @ row
        height = new[best] if shards is None else shards.rows(new[:, None], best[None], n)[0, 0]
        if not (height > 0 and wanted[best] > 0):
            break
        new = new / height.sqrt()
        factor[:, done], pivots[done] = new, best
        fallen = new.square() if shards is None else shards.gather(new.square(), n, dim=-1)
        residual = (residual - fallen).clamp_(min=0)
        residual[best] = 0
        done += 1
    found = factor if done == factor.shape[1] else factor[:, :done].contiguous()
    return LowRank(found if shards is None else ShardedRows(found, n, shards), pivots[:done], residual)

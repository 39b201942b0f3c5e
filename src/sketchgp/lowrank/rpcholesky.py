"""Randomly pivoted Cholesky (RPCholesky): columns of K drawn with probability proportional to what is left.

References: Chen, Epperly, Tropp, Webber, "Randomly pivoted Cholesky" (arXiv:2207.06503), Algorithms 1 and 2 (block);
Epperly, Tropp, Webber, "Embrace rejection" (arXiv:2410.03969), Algorithm 2.1 (accelerated).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..devices import fetched, queued, sent
from ..operators.access import Access
from ..operators.unchanged import parameters_held
from ..space import Space
from .factor import Columns, LowRank, Scores, shifted_cholesky


@torch.no_grad()
@parameters_held()
def rpcholesky(
    matrix: Access,
    rank: int,
    *,
    generator: torch.Generator,
    method: str = "accelerated",
    block_size: int | None = None,
    weights: Tensor | None = None,
    tol: float = 0.0,
    enough: Callable[[int, float], bool] | None = None,
    space: Space | None = None,
) -> LowRank:
    """Partial Cholesky factor of one matrix with random pivots.

    ``"accelerated"`` proposes a block of pivots and thins it by rejection, which gives the law of choosing pivots
    one at a time (the law of the papers' theorems) at block speed.  ``"block"`` keeps the whole block; it is as
    fast, but wastes columns where points cluster.  Reads ``(rank + 1) n`` entries of K, O(n rank) memory,
    O(n rank^2) operations.

    With weights w the pivots are those of ``W^1/2 K W^1/2``: drawn with probability proportional to ``w * residual``.
    F is still a factor of K itself.

    :param matrix: the symmetric positive semidefinite matrix.
    :param rank: the most columns to take; fewer are taken when the rest of the trace is negligible.  Memory is taken
        for all of them at once, unless ``enough`` is given: then as they come.
    :param generator: CPU generator that all random choices come from.
    :param block_size: proposals a round (default ``min(100, rank / 10)``, at least 1), at most the rank; with
        ``enough`` the rank of the default is the number of columns so far, and it is at least 8.
    :param weights: ``(n,)``, not negative, of each point (for noise D, ``1 / D``); None is 1.
    :param tol: stop when ``sum(weights * residual) <= tol``.
    :param enough: asked before each round with the number of columns and ``sum(weights * residual)``: whether to stop.
    :param space: of F; None makes all rows here.  P ranks that make their own rows evaluate (rank + 1) n / P entries of
        K each; a round sends the fall of the residual, n numbers, and the rows of F of the proposals.
    :returns: the factor in float64 with its pivots, in the order of their choice.
    """
    diagonal = matrix.diagonal()
    n, device = matrix.n, matrix.device
    space = space or Space(n)
    floor = matrix.resolution * float(diagonal.sum())
    rank = min(rank, n)
    block = min(block_size or max(1, min(100, rank // 10)), max(1, rank))  # more could not all be kept
    found = Columns.of(space.height, rank, device, surely=enough is None)
    pivots: list[Tensor] = []
    residual, done, failures = diagonal.clone(), 0, 0
    scores = Scores(matrix, diagonal, weights)
    while done < rank and failures < 50:
        wanted = scores.of(residual)
        size = block if enough is None or block_size else min(block, max(8, done // 4))
        size = min(size, rank - done) if method == "block" else size
        before = generator.get_state()
        # Drawn before it is known whether they are needed, so that a device is waited for once a round.
        proposals = _draw(wanted, size, generator)
        sums = scores.sums(residual, wanted)
        if method == "block" and device.type == "cpu":  # a device would have to tell how many are left
            proposals = torch.unique(proposals)
        rows = space.rows(found.factor, proposals)
        schur, bounds = matrix.block(proposals, proposals) - rows @ rows.mT, residual[proposals]
        sums, small, bounds, drawn = fetched(sums, schur, bounds, proposals)
        small = small.reshape(schur.shape)
        left, total, score = sums.tolist()
        if left <= floor or total <= tol or not score > 0 or (enough is not None and enough(done, total)):
            generator.set_state(before)  # what is not used is not drawn
            break
        if method == "block":
            kept = _distinct(drawn)
            root = shifted_cholesky(small[kept][:, kept], matrix.resolution, limit=10.0)
        else:
            kept, root = _reject(small, bounds, rank - done, generator)
        if not len(kept):
            failures += 1
            continue
        failures = 0
        chosen = sent(drawn[kept].long(), device)
        kept, root = queued(kept, device), queued(root, device)
        # transposed: a product of few rows with F^T takes two thirds of the time of one of F with few columns (MKL)
        new = space.columns(matrix, chosen).mT - rows[kept] @ found.factor.mT
        new = torch.linalg.solve_triangular(root, new, upper=False)
        found.add(new)
        residual = (residual - space.numbers(new.square().sum(dim=0))).clamp_(min=0)
        residual[chosen] = 0
        pivots.append(chosen)
        done += len(chosen)
    chosen_all = torch.cat(pivots) if pivots else torch.empty(0, dtype=torch.long, device=device)
    return LowRank(space.factor(found.all()), chosen_all, residual)


def _draw(scores: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Indices drawn independently with probability proportional to ``scores``, by inverting the cumulative sum."""
    cumulative = scores.cumsum(0)
    points = queued(torch.rand(size, dtype=torch.float64, generator=generator), scores.device) * cumulative[-1]
    return torch.searchsorted(cumulative, points, right=True).clamp_(max=len(scores) - 1)


def _distinct(drawn: Tensor) -> Tensor:
    """The places of different numbers in a list of them, ``(b,)`` on the CPU, in the numbers' order."""
    ordered, places = drawn.sort(stable=True)
    first = torch.ones(len(drawn), dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return places[first]


def _reject(schur: Tensor, bounds: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rejection-sampled Cholesky of the proposals' residual block.

    Proposal j is kept with probability (its diagonal after eliminating the kept ones before it) / (its diagonal
    when it was drawn); its weight is in both and cancels.  Returns the kept positions and the Cholesky factor of
    their block; everything on the CPU.
    """
    uniform = torch.rand(len(bounds), dtype=torch.float64, generator=generator)
    kept: list[int] = []
    factor = torch.zeros_like(schur)
    current = schur.diagonal().clone()
    for j in range(len(bounds)):
        if len(kept) == most:
            break
        if current[j] > 0 and uniform[j] * bounds[j] < current[j]:
            column = (schur[:, j] - factor[:, : len(kept)] @ factor[j, : len(kept)]) / current[j].sqrt()
            factor[:, len(kept)] = column
            current = current - column.square()
            current[j] = 0
            kept.append(j)
    positions = torch.tensor(kept, dtype=torch.long)
    root = factor[positions, : len(kept)].tril()
    return positions, root

"""Randomly pivoted Cholesky (RPCholesky): columns of K drawn with probability proportional to what is left.

References: Chen, Epperly, Tropp, Webber, "Randomly pivoted Cholesky" (arXiv:2207.06503), Algorithms 1 and 2 (block);
Epperly, Tropp, Webber, "Embrace rejection" (arXiv:2410.03969), Algorithm 2.1 (accelerated).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..checks import count, seed, settle, word
from ..devices import fetched, queued, sent
from ..errors import InputError
from ..fingerprint import parameters_held
from ..operators.access import Access
from ..random_streams import generator
from ..space import Space
from .base import Preconditioner
from .low_rank import LowRank, PartialCholesky, shifted_cholesky

_FAILURES = 50  # rounds without a pivot after which no more are proposed


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
    """Partial Cholesky factor of one matrix, in float64, with random pivots in the order of their choice.

    ``"accelerated"`` proposes a block of pivots and thins it by rejection: the law of choosing pivots one at a time
    (that of the papers' theorems) at block speed.  ``"block"`` keeps the whole block; it wastes columns where points
    cluster.  Reads ``(rank + 1) n`` entries of K, O(n rank) memory, O(n rank^2) operations.

    With weights w the pivots are those of ``W^1/2 K W^1/2``, drawn by ``w * residual``; F is still a factor of K.

    :param rank: the most columns; fewer are taken when the rest of the trace is negligible.  With ``enough``, memory
        grows with the columns.
    :param generator: CPU generator of all random choices.
    :param block_size: proposals a round (default ``min(100, rank / 10)``, at least 1), at most the rank; with
        ``enough`` at most a quarter of the columns so far, and at least 8.
    :param weights: ``(n,)``, not negative, of each point (for noise D, ``1 / D``); None is 1.
    :param tol: stop when ``sum(weights * residual) <= tol``.
    :param enough: told the number of columns and ``sum(weights * residual)`` before each round; returns True to stop.
    :param space: of F; None makes all rows.  Each of P ranks evaluates (rank + 1) n / P entries of K; a round sends the
        fall of the residual, n numbers, and the rows of F of the proposals.
    """
    state = PartialCholesky(matrix, rank, weights, tol, enough, space)
    rank, columns, failures = state.rank, state.columns, 0
    block = min(block_size or max(1, min(100, rank // 10)), max(1, rank))  # more could not all be kept
    while columns.count < rank and failures < _FAILURES:
        size = block if enough is None or block_size else min(block, max(8, columns.count // 4))
        size = min(size, rank - columns.count) if method == "block" else size
        before = generator.get_state()
        draw = partial(_draw, size=size, generator=generator, distinct=method == "block")
        rows, sums, schur, bounds, drawn = _proposed(state, draw)
        if state.ends(sums):
            generator.set_state(before)  # unused proposals leave no trace in the stream
            break
        if method == "block":
            kept, root = _distinct(schur, drawn, matrix.resolution)
        else:
            kept, root = _reject(schur, bounds, rank - columns.count, generator)
        failures = 0 if len(kept) else failures + 1
        if len(kept):
            chosen = sent(drawn[kept].long(), matrix.device)
            state.add(_eliminated(state.space.columns(matrix, chosen), columns.factor, rows, kept, root), chosen)
    return LowRank(state.space.factor(columns.all()), state.pivots, state.residual, sequential=method == "accelerated")


def _proposed(
    state: PartialCholesky, draw: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw pivots before it is known whether they are needed, so that a device is waited for once a round.

    :returns: the rows of F at the proposals, on the device; and on the CPU the sums of the scores, the block of
        ``K - F F^T`` at the proposals, their residuals, and the proposals.
    """
    wanted = state.scores()
    proposals = draw(wanted)
    rows = state.space.rows(state.columns.factor, proposals)
    schur = state.matrix.block(proposals, proposals) - rows @ rows.mT
    sums, small, bounds, drawn = fetched(state.sums(wanted), schur, state.residual[proposals], proposals)
    return rows, sums, small.reshape(schur.shape), bounds, drawn


def _eliminated(columns: Tensor, factor: Tensor, rows: Tensor, kept: Tensor, root: Tensor) -> Tensor:
    """Return new columns of F as rows ``(k, h)``, from columns of K.

    :param columns: ``(h, k)``; :param factor: F so far, ``(h, r)``; :param rows: its rows at all proposals.
    :param kept: the places of the columns among the proposals; :param root: the Cholesky factor of their block.
    """
    kept, root = queued(kept, columns.device), queued(root, columns.device)
    # transposed: a product of few rows with F^T takes two thirds of the time of one of F with few columns (MKL)
    new = columns.mT - rows[kept] @ factor.mT
    return torch.linalg.solve_triangular(root, new, upper=False)


def _draw(scores: Tensor, size: int, generator: torch.Generator, distinct: bool) -> Tensor:
    """Draw indices independently with probability proportional to ``scores``, by inverting the cumulative sum.

    :param distinct: drop repeated ones, but on a device, which would have to tell how many are left.
    """
    cumulative = scores.cumsum(0)
    points = queued(torch.rand(size, dtype=torch.float64, generator=generator), scores.device) * cumulative[-1]
    drawn = torch.searchsorted(cumulative, points, right=True).clamp_(max=len(scores) - 1)
    return torch.unique(drawn) if distinct and drawn.device.type == "cpu" else drawn


def _distinct(schur: Tensor, drawn: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    """Keep the first place of each proposal, in the order of the proposals' numbers.

    :returns: the places, and the Cholesky factor of their block; everything on the CPU.
    """
    ordered, places = drawn.sort(stable=True)
    first = torch.ones(len(drawn), dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    kept = places[first]
    return kept, shifted_cholesky(schur[kept][:, kept], resolution, limit=10.0)


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


@dataclass(frozen=True)
class RPCholesky(Preconditioner):
    """``P = F F^T + noise`` with F from randomly pivoted Cholesky.  The default: robust, and it reads few entries.

    Cost ``n r^2`` operations and ``n r`` float64 numbers for rank r; with enough rank for the kernel's spectrum,
    conjugate gradients then converge in a number of steps that does not depend on the conditioning of K.
    Where the noise D differs between points the pivots are those of ``D^-1/2 K D^-1/2``: drawn by residual over noise.

    Reference: Diaz, Epperly, Frangella, Tropp, Webber, "Robust, randomized preconditioning for kernel ridge
    regression" (arXiv:2304.12465), Algorithm 1 and Theorem 2.2.

    :param rank: columns of F, or None (automatic, see :class:`Preconditioner`).
    :param method: ``"accelerated"`` (rejection sampling, the law of one pivot at a time) or ``"block"``.
    :param block_size: pivots proposed a round, at most n; None is ``min(100, rank / 10)``.
    :param seed: seed of all random choices.
    """

    method: Literal["accelerated", "block"] = "accelerated"
    block_size: int | None = None
    seed: int = 0
    pivoted = True

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, word, "method", allowed=("accelerated", "block"))
        settle(self, count, "block_size", optional=True)
        settle(self, seed, "seed")

    def validate(self, n: int) -> None:
        """Check the block size.

        :raises InputError: if it exceeds n.
        """
        super().validate(n)
        if self.block_size is not None and self.block_size > n:
            raise InputError(
                f"RPCholesky(block_size={self.block_size}) exceeds the {n} training points; choose at most {n}."
            )

    def approximate(self, matrix: Access, noise: Tensor) -> LowRank:
        return rpcholesky(
            matrix,
            self.rank_for(matrix.n, matrix.device),
            generator=generator(self.seed, "RPCholesky preconditioner"),
            method=self.method,
            block_size=self.block_size,
            weights=1 / noise,
            enough=self.stopping_rule(matrix),
            space=Space.of(matrix.n),
        )

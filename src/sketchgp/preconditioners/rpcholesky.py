"""Randomly pivoted Cholesky (RPCholesky): columns of K drawn with probability proportional to what is left.

References: Chen, Epperly, Tropp, Webber, "Randomly pivoted Cholesky" (arXiv:2207.06503), Algorithms 1 and 2 (block);
Epperly, Tropp, Webber, "Embrace rejection" (arXiv:2410.03969), Algorithm 2.1 (accelerated).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from .low_rank import Columns, LowRank, shifted_cholesky

Enough = Callable[[int, float], bool]
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
    enough: Enough | None = None,
    space: Space | None = None,
) -> LowRank:
    """Return a partial Cholesky factor of one matrix, in float64, with random pivots in the order of their choice.

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
    :param enough: told the number of columns and ``sum(weights * residual)`` before each round; returns True to stop.
    :param space: of F; None makes all rows.  Each of P ranks evaluates (rank + 1) n / P entries of K; a round sends the
        fall of the residual, n numbers, and the rows of F of the proposals.
    """
    state = PartialCholesky(matrix, rank, weights, enough, space)
    rank, columns, failures = state.rank, state.columns, 0
    block = min(block_size or max(1, min(100, rank // 10)), max(1, rank))  # more could not all be kept
    while columns.count < rank and failures < _FAILURES:
        size = block if enough is None or block_size else min(block, max(8, columns.count // 4))
        size = min(size, rank - columns.count) if method == "block" else size
        before = generator.get_state()
        rows, sums, schur, bounds, drawn = state.propose(size, generator)
        if state.ends(sums):
            generator.set_state(before)  # unused proposals leave no trace in the stream
            break
        if method == "block":
            kept, root = _distinct(schur, drawn, matrix.resolution)
        else:
            kept, root = _reject(schur, bounds, rank - columns.count, generator)
        failures = 0 if len(kept) else failures + 1
        if len(kept):
            state.add(sent(drawn[kept].long(), matrix.device), rows[queued(kept, matrix.device)], root)
    return LowRank(state.space.factor(columns.all()), state.pivots, state.residual, sequential=method == "accelerated")


class PartialCholesky:
    """A partial Cholesky factor of one matrix as its columns come, and what they leave of its diagonal.

    Pivots are chosen by scores, residual times weight.  Where weights differ, residuals at the level of rounding count
    as zero: a large weight would lift them above the true residuals.  Equal weights change neither the order nor the
    law of the pivots.

    Parameters are those of :func:`rpcholesky`.

    :ivar columns: of F so far; :ivar pivots: theirs; :ivar residual: ``(n,)``; :ivar rank: the most columns.
    """

    def __init__(
        self, matrix: Access, rank: int, weights: Tensor | None, enough: Enough | None, space: Space | None
    ) -> None:
        diagonal = matrix.diagonal()
        self.matrix, self.space, self.rank = matrix, space or Space(matrix.n), min(rank, matrix.n)
        self.columns = Columns(self.space.height, self.rank, matrix.device, surely=enough is None)
        self.residual, self.pivots = diagonal.clone(), torch.empty(0, dtype=torch.long, device=matrix.device)
        self._weights, self._enough = weights, enough
        self._relative = None if weights is None or bool((weights == weights[0]).all()) else weights / weights.max()
        self._rounding = matrix.resolution * diagonal
        self._floor = matrix.resolution * float(diagonal.sum())

    def propose(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Draw pivots before it is known whether they are needed, so that a device is waited for once a round.

        :returns: the rows of F at the proposals, on the device; and on the CPU the sums of the residual, of
            ``weights * residual`` and of the scores, the block of ``K - F F^T`` at the proposals, their residuals, and
            the proposals.
        """
        scores = self.residual
        if self._relative is not None:
            scores = torch.where(scores > self._rounding, scores * self._relative, 0)
        proposals = _draw(scores, size, generator)
        rows = self.space.rows(self.columns.factor, proposals)
        schur = self.matrix.block(proposals, proposals) - rows @ rows.mT
        weighted = self.residual if self._weights is None else self.residual * self._weights
        sums = torch.stack([self.residual.sum(), weighted.sum(), scores.sum()])
        sums, small, bounds, drawn = fetched(sums, schur, self.residual[proposals], proposals)
        return rows, sums, small.reshape(schur.shape), bounds, drawn

    def ends(self, sums: Tensor) -> bool:
        """Return whether the columns so far are enough, from the sums on the CPU."""
        left, total, score = sums.tolist()
        if left <= self._floor or not score > 0:
            return True
        return self._enough is not None and self._enough(self.columns.count, total)

    def add(self, pivots: Tensor, rows: Tensor, root: Tensor) -> None:
        """Add the columns of K at pivots ``(k,)``, after what F has of them is taken away.

        :param rows: of F at the pivots, ``(k, r)``; :param root: the Cholesky factor of their block, on the CPU.
        """
        # transposed: a product of few rows with F^T takes two thirds of the time of one of F with few columns (MKL)
        new = self.space.columns(self.matrix, pivots).mT - rows @ self.columns.factor.mT
        new = torch.linalg.solve_triangular(queued(root, new.device), new, upper=False)
        self.columns.add(new)
        left = self.residual - self.space.whole(new.square().sum(dim=0).unsqueeze(1)).squeeze(1)
        self.residual = left.clamp_(min=0).index_fill_(0, pivots, 0)
        self.pivots = torch.cat([self.pivots, pivots])


def _draw(scores: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw indices independently with probability proportional to ``scores``, by inverting the cumulative sum."""
    cumulative = scores.cumsum(0)
    points = queued(torch.rand(size, dtype=torch.float64, generator=generator), scores.device) * cumulative[-1]
    return torch.searchsorted(cumulative, points, right=True).clamp_(max=len(scores) - 1)


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
    """Eliminate the proposals' residual block by rejection-sampled Cholesky.

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

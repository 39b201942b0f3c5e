"""The RPCholesky preconditioner: a randomly pivoted Cholesky factor plus the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..checks import count, seed, settle, word
from ..errors import InputError
from ..lowrank import LowRank, rpcholesky
from ..operators.access import Access
from ..random_streams import generator
from ..space import Space
from .base import Preconditioner


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
    pivoted = below = True

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, word, "method", allowed=("accelerated", "block"))
        settle(self, count, "block_size", optional=True)
        settle(self, seed, "seed")

    def validate(self, n: int) -> None:
        """:raises InputError: if the block size exceeds n."""
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

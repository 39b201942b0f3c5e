"""Skotch: block coordinate descent with inverted or Nystrom-preconditioned blocks, without acceleration.

Reference: Rathore, Frangella, Udell, "Have ASkotch: fast methods for large-scale, memory-constrained kernel ridge
regression" (arXiv:2407.10070), Algorithm 4 (version 1).  With blocks solved exactly it is randomized block
Gauss-Seidel (Tu et al., arXiv:1602.05310).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blockwise import (
    BlockMethod,
    BlockSolver,
    BlockSystem,
    Partition,
    block_inverse,
    describe_blocks,
    next_block,
    nystrom_rank,
    settle_blocks,
)


@dataclass(frozen=True, kw_only=True)
class Skotch(BlockSolver):
    """Block coordinate descent on ``(K + noise) W = Y``: ``n b`` entries of K and O(n + b^2) memory a step.

    A step takes a block of b rows, evaluates their residual g and moves their weights by ``P^-1 g / L``, where P is
    the block itself (``rank=None``; L = 1) or its rank-r Nystrom approximation, and L the smoothness found by
    powering.  The error in the norm of ``K + noise`` never grows.  :class:`ASkotch` needs fewer steps nearly always;
    choose this one to compare with.

    :param rank: of the Nystrom approximation of a block; None solves blocks exactly, 0 takes no preconditioner.
    :param version: 1 as in the paper, a fixed partition whose blocks are drawn with probability proportional to the
        square root of their smoothness; 2 draws blocks afresh.
    :param sampling: of version 2: ``"shuffled"``, parts of a random partition that is drawn anew every pass, or
        ``"uniform"``, independent blocks.

    The other parameters are those of :class:`sketchgp.solvers.BlockSolver`: ``tol``, ``max_passes``,
    ``max_seconds``, ``block_size``, ``seed``, ``checkpoint``, ``every``.
    """

    rank: int | None = None
    version: int = 2
    sampling: str = "shuffled"

    def __post_init__(self) -> None:
        super().__post_init__()
        settle_blocks(self)

    def method(self, system: BlockSystem, block_size: int) -> BlockMethod:
        return _Skotch(self, system, block_size)


class _Skotch(BlockMethod):
    """``w_b -= P^-1 ((A w)_b - r_b) / L``."""

    name = "Skotch"

    def __init__(self, choices: Skotch, system: BlockSystem, block_size: int) -> None:
        super().__init__()
        self.choices, self.system, self.rank = choices, system, nystrom_rank(block_size, choices.rank)
        self.partition = Partition(system, block_size, choices.rank, choices.seed) if choices.version == 1 else None
        self.name = "Skotch" if self.partition is None else "Skotch v1"
        self.numbers["block_size"] = block_size

    def describe(self) -> str:
        return describe_blocks(int(self.numbers["block_size"]), self.choices.rank)

    def begin(self, width: int) -> None:
        self.tensors["w"] = self.system.noise.new_zeros(self.system.n, width)
        self.tensors["rest"] = torch.empty(0, dtype=torch.long)
        if self.partition is not None:
            self.partition.prepare(self.tensors)

    @property
    def value(self) -> Tensor:
        return self.tensors["w"]

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        system, w = self.system, self.tensors["w"]
        if self.partition is not None:
            rows, inverse, _ = self.partition.draw(self.tensors, generator)
        else:
            size, rest = int(self.numbers["block_size"]), self.tensors["rest"].cpu()
            sampling = self.choices.sampling
            rows, self.tensors["rest"] = next_block(sampling, system.n, size, rest, generator, system.device)
            inverse = block_inverse(system.square_block(rows), system.noise[rows], self.choices.rank, generator)
        g = system.rows(rows, w) - r[rows]
        w[rows] -= inverse.apply(g) / inverse.smoothness
        return rows, g

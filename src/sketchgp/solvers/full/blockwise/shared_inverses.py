"""The inverses of the next blocks of a shuffled order, one on each rank: the part of a step that knows no iterate."""

from __future__ import annotations

import torch
from torch import Tensor

from ....space import SharedSpace
from .inverse import BlockInverse, block_inverse
from .system import BlockSystem


class SharedInverses:
    """Exact inverses of blocks of b rows: of the next P blocks each of P ranks factorizes one, and keeps it.

    A step then takes ``b^3 / (3 P)`` operations for its block, and to apply the inverse its rank sends ``b t`` numbers.
    The last blocks of an order, where fewer than P are left, are factorized by some ranks while the others wait.
    """

    def __init__(self, system: BlockSystem, space: SharedSpace) -> None:
        self.system, self.shards = system, space.shards
        self.ahead: list[tuple[Tensor, int]] = []  # rows of blocks, and the rank that has the inverse
        self.own: BlockInverse | None = None

    def of(self, rows: Tensor, following: list[Tensor], generator: torch.Generator) -> BlockInverse:
        """The inverse of the block of ``rows`` ``(b,)``, plus noise; a collective, as applying it is.

        :param following: the rows of the next blocks, if they are known.
        :param generator: that of the solve, of which exact inverses draw nothing.
        :raises NumericalError: if a block plus noise is not positive definite.
        """
        if not self.ahead or not torch.equal(self.ahead[0][0], rows):
            self._factorize([rows, *following], generator)
        _, owner = self.ahead.pop(0)
        self.system.entries += len(rows) ** 2
        return BlockInverse(lambda g: self._apply(g, owner), 1.0)

    def _factorize(self, blocks: list[Tensor], generator: torch.Generator) -> None:
        self.ahead, self.own = [(rows, rank) for rank, rows in enumerate(blocks[: self.shards.count])], None
        entries = self.system.entries  # counted by all ranks, once a block is used
        if self.shards.rank < len(self.ahead):
            rows = self.ahead[self.shards.rank][0]
            block = self.system.square_block(rows)
            self.own = block_inverse(block, self.system.noise[rows], None, generator).checked()
        self.system.entries = entries

    def _apply(self, g: Tensor, owner: int) -> Tensor:
        """Straight after g was added up, and so without words; where the owner of the inverse fails it sends NaN first,
        and the others hear of it with the next words."""
        if owner != self.shards.rank:
            return self.shards.same(g, owner, words=False)
        assert self.own is not None
        try:
            d = self.own.apply(g)
        except BaseException:
            self.shards.same(torch.full_like(g, torch.nan), owner, words=False)
            raise
        return self.shards.same(d, owner, words=False)

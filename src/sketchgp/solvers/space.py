"""Vectors of a system of n unknowns as an iterative method has them: whole, or the rows of one of several ranks.

A method that asks this for inner products, products with the matrix and inverses of the preconditioner need not know
how many ranks there are.  Where there are several, each holds its own rows, as :class:`~sketchgp.distributed.Shards`
deals them out.  A product takes all rows of what is multiplied, which are gathered for it, n t numbers; ``P^-1 v``
takes r t numbers of every rank, an inner product t.  Sums are the same to the last bit on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..distributed import Shards, in_force
from ..operators import LowRankPlusDiagonal
from ..operators.thin import thin_product


class Space:
    """Vectors ``(..., n, t)`` of one process, whole."""

    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def of(cls, n: int) -> Space:
        """That of the ranks that work together now, or of this process alone."""
        shards = in_force()
        return Space(n) if shards is None else SharedSpace(n, shards)

    @property
    def height(self) -> int:
        """h, how many rows are held here."""
        return self.n

    def own(self, whole: Tensor) -> Tensor:
        """The rows held here of a vector, ``(..., h, t)``."""
        return whole

    def held(self, indices: Tensor) -> tuple[slice | Tensor, Tensor]:
        """Which of the rows at ``indices`` ``(k,)`` are held here, as an index of them, and where among those held."""
        return slice(None), indices

    def whole(self, own: Tensor) -> Tensor:
        """All rows, of those that each rank holds."""
        return own

    def to_write(self, own: Tensor) -> Tensor:
        """All rows where a checkpoint is written; what is given elsewhere."""
        return own

    def rows(self, own: Tensor, indices: Tensor) -> Tensor:
        """Some of all rows, ``(..., k, t)`` for indices ``(k,)``."""
        return own[..., indices, :]

    def total(self, part: Tensor) -> Tensor:
        """The sum over the rows, of what those held here come to."""
        return part

    def largest(self, own: Tensor) -> Tensor:
        """Over the rows, of numbers that are not negative, ``(..., t)``."""
        return own.amax(dim=-2)

    def all(self, here: bool) -> bool:
        """Whether it holds of all rows."""
        return here

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Inner products column by column, ``(..., t)``."""
        return (a * b).sum(dim=-2)

    def norm(self, a: Tensor) -> Tensor:
        """Of each column, ``(..., t)``."""
        return a.norm(dim=-2)

    def norm_and_dot(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`norm` of a, and :meth:`dot` of both; of several ranks, in one message."""
        return self.norm(a), self.dot(a, b)

    def product(self, of: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
        """:param of: ``(..., n, t)`` to ``(..., n, t)``, which several ranks work out together."""
        return self.own(of(self.whole(vectors)))

    def apply_inverse(self, preconditioner: Any, vectors: Tensor) -> Tensor:
        """``P^-1 vectors``."""
        found: Tensor = preconditioner.apply_inverse(vectors)
        return found

    def down(self, preconditioner: LowRankPlusDiagonal, vectors: Tensor) -> Tensor:
        """``F^T vectors``, ``(..., r, t)``, for its factor F."""
        return thin_product(preconditioner.factor.mT, vectors)

    def up(self, preconditioner: LowRankPlusDiagonal, inner: Tensor) -> Tensor:
        """``F inner`` for ``(..., r, t)``."""
        return thin_product(preconditioner.factor, inner)


class SharedSpace(Space):
    """The rows of this rank."""

    def __init__(self, n: int, shards: Shards) -> None:
        super().__init__(n)
        self.shards = shards
        self._asked: tuple[Tensor, int, tuple[Tensor, Tensor]] | None = None  # of held: indices, as they were, and what

    @property
    def span(self) -> slice:
        return self.shards.span(self.n)

    @property
    def height(self) -> int:
        return self.span.stop - self.span.start

    def held(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self._asked is not None and self._asked[0] is indices and self._asked[1] == indices._version:
            return self._asked[2]  # several parts of a step ask it of the same rows; on a device each would wait
        here = ((indices >= self.span.start) & (indices < self.span.stop)).nonzero().squeeze(-1)
        found = here, indices[here] - self.span.start
        self._asked = None if indices.is_inference() else (indices, indices._version, found)
        return found

    def own(self, whole: Tensor) -> Tensor:
        part = whole[..., self.span, :]
        return part.mT.clone(memory_format=torch.contiguous_format).mT if _in_columns(whole) else part.clone()

    def whole(self, own: Tensor) -> Tensor:
        found = self.shards.gather(own, self.n)
        return found.mT.contiguous().mT if _in_columns(own) else found

    def to_write(self, own: Tensor) -> Tensor:
        whole = self.whole(own)
        return whole if self.shards.rank == 0 else own

    def rows(self, own: Tensor, indices: Tensor) -> Tensor:
        return self.shards.rows(own.movedim(-2, 0), indices, self.n).movedim(0, -2)

    def total(self, part: Tensor) -> Tensor:
        return self.shards.sum(part)

    def largest(self, own: Tensor) -> Tensor:
        most = own.amax(dim=-2, keepdim=True) if own.shape[-2] else own.new_zeros(*own.shape[:-2], 1, own.shape[-1])
        return self.shards.gather(most, self.shards.count).amax(dim=-2)

    def all(self, here: bool) -> bool:
        return bool(self.shards.agree(here, min))

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return self.total(super().dot(a, b))

    def norm(self, a: Tensor) -> Tensor:
        return self.dot(a, a).sqrt()

    def norm_and_dot(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        squares, dots = self.total(torch.stack([super().dot(a, a), super().dot(a, b)]))
        return squares.sqrt(), dots

    def apply_inverse(self, preconditioner: LowRankPlusDiagonal, vectors: Tensor) -> Tensor:
        return preconditioner.apply_inverse_to_rows(vectors, self.shards)

    def down(self, preconditioner: LowRankPlusDiagonal, vectors: Tensor) -> Tensor:
        return self.total(thin_product(preconditioner.rows(self.span).mT, vectors))

    def up(self, preconditioner: LowRankPlusDiagonal, inner: Tensor) -> Tensor:
        return thin_product(preconditioner.rows(self.span), inner)


def _in_columns(a: Tensor) -> bool:
    """How a vector lies in memory, which products of it are rounded by: a solve that is gone on with keeps it."""
    return a.mT.is_contiguous() and not a.is_contiguous()

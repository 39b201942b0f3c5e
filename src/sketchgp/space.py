"""Arrays of n rows: whole in one process, or of several ranks each with its own rows.

Numerics that ask a :class:`Space` for inner products, sums over the rows and products with the matrix need not know
how many ranks there are.  :class:`~sketchgp.distributed.Shards` says which rows a rank holds.  A product gathers all
rows of what is multiplied, n t numbers; ``P^-1 v`` sends r t numbers of every rank, an inner product t.  Sums have the
same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .devices import version
from .distributed import Shards, in_force

_TOGETHER = 64  # columns whose squares are held at once


class Space:
    """Vectors ``(..., n, t)`` of one process, with all rows.

    :cvar shared: whether several ranks hold the rows.
    """

    shared = False

    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def of(cls, n: int) -> Space:
        """Return the space of the ranks that work together now, or of this process alone."""
        shards = in_force()
        return Space(n) if shards is None else SharedSpace(n, shards)

    @property
    def span(self) -> slice:
        """Rows that this process holds."""
        return slice(0, self.n)

    @property
    def height(self) -> int:
        """h, the number of rows that this process holds."""
        return self.span.stop - self.span.start

    @property
    def most_rows(self) -> int:
        """Largest number of rows that any rank holds."""
        return self.n

    def own(self, whole: Tensor) -> Tensor:
        """Return the rows of a vector that this process holds, ``(..., h, t)``."""
        return whole

    def held(self, indices: Tensor) -> tuple[slice | Tensor, Tensor]:
        """Return which entries of ``indices`` ``(k,)`` are rows of this process, and their places among its rows."""
        return slice(None), indices

    def whole(self, own: Tensor) -> Tensor:
        """Gather all rows ``(..., n, t)``."""
        return own

    def to_write(self, own: Tensor) -> Tensor:
        """Return all rows on the rank that writes checkpoints, and the argument elsewhere."""
        return own

    def rows(self, own: Tensor, indices: Tensor) -> Tensor:
        """Fetch rows ``(..., k, t)`` at ``indices`` ``(k,)`` of all n rows."""
        return own[..., indices, :]

    def columns(self, matrix: Any, indices: Tensor) -> Tensor:
        """Evaluate the rows of this process of the columns at ``indices``, ``(h, k)``.

        :param matrix: :class:`~sketchgp.operators.access.Access` to an n x n matrix.
        """
        return matrix.columns(indices)

    def factor(self, own: Tensor) -> Factor:
        """Return the array of n rows whose rows on this process are ``own`` ``(h, r)``."""
        return own

    def total(self, part: Tensor) -> Tensor:
        """Sum over all ranks what each has summed over its rows."""
        return part

    def largest(self, own: Tensor) -> Tensor:
        """Return the maximum over all rows of numbers that are not negative, ``(..., t)``."""
        return own.amax(dim=-2)

    def all(self, here: bool) -> bool:
        """Return whether a condition holds on all ranks."""
        return here

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Inner products column by column, ``(..., t)``."""
        return self.total((a * b).sum(dim=-2))

    def norm(self, a: Tensor) -> Tensor:
        """Norm of each column, ``(..., t)``."""
        return a.norm(dim=-2)

    def norm_and_dot(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`norm` of a and :meth:`dot` of both, by one message between ranks."""
        return self.norm(a), self.dot(a, b)

    def product(self, of: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
        """Multiply by a matrix.

        :param of: ``(..., n, t)`` to ``(..., n, t)``; several ranks compute it together.
        """
        return self.own(of(self.whole(vectors)))

    def apply_inverse(self, preconditioner: Any, vectors: Tensor) -> Tensor:
        """Apply the inverse of a preconditioner, ``P^-1 vectors``."""
        return preconditioner.apply_inverse(vectors)


class SharedSpace(Space):
    """Vectors of which this process holds the rows of its rank."""

    shared = True

    def __init__(self, n: int, shards: Shards) -> None:
        super().__init__(n)
        self.shards = shards
        # the last argument of held, its version and the answer
        self._held: tuple[Tensor, int, tuple[Tensor, Tensor]] | None = None

    @property
    def span(self) -> slice:
        return self.shards.span(self.n)

    @property
    def most_rows(self) -> int:
        return -(-self.n // self.shards.count)

    def held(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self._held is not None and self._held[0] is indices and self._held[1] == version(indices):
            return self._held[2]  # several parts of a step ask for the same rows; each would wait for a device
        here = ((indices >= self.span.start) & (indices < self.span.stop)).nonzero().squeeze(-1)
        answer = here, indices[here] - self.span.start
        self._held = None if indices.is_inference() else (indices, version(indices), answer)
        return answer

    def own(self, whole: Tensor) -> Tensor:
        part = whole[..., self.span, :]
        return part.mT.clone(memory_format=torch.contiguous_format).mT if _in_columns(whole) else part.clone()

    def whole(self, own: Tensor) -> Tensor:
        gathered = self.shards.gather(own, self.n)
        return gathered.mT.contiguous().mT if _in_columns(own) else gathered

    def to_write(self, own: Tensor) -> Tensor:
        whole = self.whole(own)
        return whole if self.shards.rank == 0 else own

    def rows(self, own: Tensor, indices: Tensor) -> Tensor:
        return self.shards.rows(own.movedim(-2, 0), indices, self.n).movedim(0, -2)

    def columns(self, matrix: Any, indices: Tensor) -> Tensor:
        own = torch.arange(self.span.start, self.span.stop, device=indices.device)
        return matrix.block(own, indices)

    def factor(self, own: Tensor) -> Factor:
        return ShardedRows(own, self.n, self.shards)

    def total(self, part: Tensor) -> Tensor:
        return self.shards.sum(part)

    def largest(self, own: Tensor) -> Tensor:
        most = own.amax(dim=-2, keepdim=True) if own.shape[-2] else own.new_zeros(*own.shape[:-2], 1, own.shape[-1])
        return self.shards.gather(most, self.shards.count).amax(dim=-2)

    def all(self, here: bool) -> bool:
        return bool(self.shards.agree(here, min))

    def norm(self, a: Tensor) -> Tensor:
        return self.dot(a, a).sqrt()

    def norm_and_dot(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        squares, dots = self.total(torch.stack([(a * a).sum(dim=-2), (a * b).sum(dim=-2)]))
        return squares.sqrt(), dots

    def apply_inverse(self, preconditioner: Any, vectors: Tensor) -> Tensor:
        return preconditioner.apply_inverse_to_rows(vectors, self)


class ShardedRows:
    """F ``(n, r)`` without gradients, of which each rank holds its rows.

    ``F @ c`` and ``F.mT @ v`` are whole on every rank, ``(n, t)`` and ``(r, t)``; the first sends n t numbers, the
    second r t.  Leading dimensions of c and v are kept.

    :param own: ``(h, r)``, the rows of this rank.
    :ivar span: which these are.
    """

    requires_grad = False

    def __init__(self, own: Tensor, n: int, shards: Shards) -> None:
        self.own, self.n, self.shards, self.span = own, n, shards, shards.span(n)
        self.shape, self.dtype, self.device = torch.Size((n, own.shape[1])), own.dtype, own.device

    @property
    def mT(self) -> Transposed:
        return Transposed(self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.shards.gather(self.own @ other, self.n)

    def detach(self) -> ShardedRows:
        return self


class Transposed:
    """``F.mT`` of :class:`ShardedRows`."""

    def __init__(self, rows: ShardedRows) -> None:
        self.rows = rows

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.rows.shards.sum(self.rows.own.mT @ other[..., self.rows.span, :])


Factor = Tensor | ShardedRows


def space_of(factor: Factor | None) -> Space:
    """Return the space whose rows those of F are."""
    if isinstance(factor, ShardedRows):
        return SharedSpace(factor.n, factor.shards)
    return Space(0 if factor is None else factor.shape[-2])


def square_norms(factor: Factor) -> Tensor:
    """Squared norm of each row, ``(..., n)``."""
    own = held_rows(factor)
    total = own.new_zeros(own.shape[:-1])
    for some in own.split(_TOGETHER, dim=-1):
        total += some.square().sum(dim=-1)
    return space_of(factor).whole(total.unsqueeze(-1)).squeeze(-1)


def held_rows(factor: Factor) -> Tensor:
    """Return the rows of F that this process holds, ``(h, r)``."""
    return factor.own if isinstance(factor, ShardedRows) else factor


def whole(factor: Factor) -> Tensor:
    """Gather all rows of F on every rank, n r numbers."""
    return space_of(factor).whole(held_rows(factor))


def _in_columns(a: Tensor) -> bool:
    """Return whether a vector lies in memory by columns; a resumed solve keeps that, since products round by it."""
    return a.mT.is_contiguous() and not a.is_contiguous()

"""An n x r array of which every rank holds its own rows, and what is asked of one whether it is shared out or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shards import Shards

_TOGETHER = 64  # columns whose squares are held at once


class ShardedRows:
    """F ``(n, r)``, without gradients: ``F @ c`` and ``F.mT @ v`` are whole on every rank, ``(n, t)`` and ``(r, t)``.

    The first sends n t numbers, the second r t; leading dimensions of c and v are kept.

    :param own: ``(h, r)``, the rows of this rank, ``shards.span(n)``.
    """

    requires_grad = False

    def __init__(self, own: Tensor, n: int, shards: Shards) -> None:
        self.own, self.n, self.shards = own, n, shards

    @property
    def span(self) -> slice:
        """The rows that this rank holds."""
        return self.shards.span(self.n)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.n, self.own.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def mT(self) -> Transposed:
        return Transposed(self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.shards.gather(self.own @ other, self.n)

    def detach(self) -> ShardedRows:
        return self

    def to(self, *args: Any) -> ShardedRows:
        return ShardedRows(self.own.to(*args), self.n, self.shards)


class Transposed:
    """``F.mT`` of :class:`ShardedRows`."""

    def __init__(self, rows: ShardedRows) -> None:
        self.rows = rows

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.rows.shards.sum(self.rows.own.mT @ other[..., self.rows.span, :])


Factor = Tensor | ShardedRows


def square_norms(factor: Factor) -> Tensor:
    """Of each row, ``(..., n)``."""
    if isinstance(factor, ShardedRows):
        return factor.shards.gather(square_norms(factor.own), factor.n, dim=-1)
    total = factor.new_zeros(factor.shape[:-1])
    for some in factor.split(_TOGETHER, dim=-1):
        total += some.square().sum(dim=-1)
    return total


def gram(factor: Factor) -> Tensor:
    """``F^T F`` of one factor, ``(r, r)``."""
    if isinstance(factor, ShardedRows):
        return factor.shards.sum(factor.own.mT @ factor.own)
    return factor.mT @ factor


def fetched(factor: Factor, indices: Tensor) -> Tensor:
    """Rows ``(k, r)`` for indices ``(k,)``."""
    if isinstance(factor, ShardedRows):
        return factor.shards.rows(factor.own, indices, factor.n)
    return factor[indices]


def leading(factor: Factor, columns: int) -> Factor:
    """The first columns."""
    if isinstance(factor, ShardedRows):
        return ShardedRows(factor.own[:, :columns], factor.n, factor.shards)
    return factor[..., :columns]


def whole(factor: Factor) -> Tensor:
    """All rows on every rank: n x r numbers, for what is not shared out."""
    if isinstance(factor, ShardedRows):
        return factor.shards.gather(factor.own, factor.n)
    return factor

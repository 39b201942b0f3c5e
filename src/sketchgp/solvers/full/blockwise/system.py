"""``(K + noise) W = Y`` by blocks of rows: residuals of some rows, blocks of the matrix, and a count of the work."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....operators.access import Access
from ....operators.rows import RowProduct
from ....settings import memory_budget
from ....space import SharedSpace, Space
from ...problem import System

_LEAST_BLOCK = 256
_FLOPS_PER_ENTRY = 20  # of a block's Cholesky factorization, in the time that one kernel entry takes
_SPREAD = 4.0  # norm of a matrix of b x b independent rounding errors, over sqrt(b) of them
_TOLERATED = 0.05  # relative error of a block with its noise that its inverse may have
_COPIES = 4  # of a block that are held at once


class BlockSystem:
    """One system, without batch, and how many entries of K were evaluated for it.

    Where several ranks work together, vectors are the rows ``(h, t)`` that this one holds, as its ``space`` has them.

    :ivar entries: entries of K evaluated so far, by rows, blocks and whole products.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.space = Space.of(system.n)
        self.noise = system.noise.to(torch.float64)
        self.access = Access(system.operator)
        self._rows = RowProduct(system.operator)
        self._accurate_rows: RowProduct | None = None
        self._spread: float | None = None
        self.entries = 0

    @property
    def n(self) -> int:
        return self.system.n

    @property
    def dtype(self) -> torch.dtype:
        return self.system.dtype

    @property
    def device(self) -> torch.device:
        return self.noise.device

    @property
    def passes(self) -> float:
        """The work done so far, in entries of K over n^2."""
        return self.entries / self.n**2

    @property
    def engines(self) -> list[str]:
        """The engines that kernel matrices are evaluated with, as they were chosen at the start."""
        return self._rows.engines

    def use_engines(self, engines: list[str]) -> bool:
        """Evaluate with these, but where an engine was asked for by name; returns whether that makes a difference.

        Another engine rounds otherwise.
        """
        asked = self._rows.asked
        chosen = [mine if asked_for else old for old, mine, asked_for in zip(engines, self.engines, asked, strict=True)]
        self._rows = RowProduct(self.system.operator, engines=chosen)
        return chosen != engines

    def zeros(self, width: int) -> Tensor:
        """A vector."""
        return self.noise.new_zeros(self.space.height, width)

    def rows(self, indices: Tensor, vectors: Tensor) -> Tensor:
        """``(K + noise)[indices] v`` for float64 vectors, K in its own dtype; of several ranks, the part of it that the
        rows held here make up."""
        return self._of_rows(self._rows, indices, vectors)

    def residual(self, indices: Tensor, vectors: Tensor, r: Tensor, accurate: bool = False) -> Tensor:
        """``((K + noise) v - r)[indices]``, ``(b, t)``, whole on every rank: one message.

        :param accurate: K in float64.
        """
        return self.space.total(self._residual_part(indices, vectors, r, accurate)[0])

    def residual_and(self, indices: Tensor, vectors: Tensor, r: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The same and, in the same message, all rows ``(b, t)`` of what ranks hold the rows ``other`` of, as
        :meth:`~sketchgp.solvers.space.Space.held` has them."""
        if not isinstance(self.space, SharedSpace):
            return self.residual(indices, vectors, r), other
        part, here = self._residual_part(indices, vectors, r, False)
        spread = torch.zeros_like(part)
        spread[here] = other
        found, whole = self.space.total(torch.stack([part, spread]))
        return found, whole

    def _residual_part(
        self, indices: Tensor, vectors: Tensor, r: Tensor, accurate: bool
    ) -> tuple[Tensor, slice | Tensor]:
        """What this rank adds to a residual, and which of the rows it holds."""
        here, local = self.space.held(indices)
        part = self.accurate_rows(indices, vectors) if accurate else self.rows(indices, vectors)
        part[here] -= r[local]
        return part, here

    def _of_rows(self, product: RowProduct, indices: Tensor, vectors: Tensor) -> Tensor:
        self.entries += len(indices) * self.n
        if not isinstance(self.space, SharedSpace):
            return product(indices, vectors).addcmul_(self.noise[indices, None], vectors[indices])
        here, local = self.space.held(indices)
        part = product.part(indices, vectors, self.space.span)
        part[here] += self.noise[indices[here], None] * vectors[local]
        return part

    def cross(self, rows: Tensor, columns: Tensor, vectors: Tensor) -> Tensor:
        """``(K + noise)[rows, columns] v`` for float64 vectors ``(len(columns), t)``, whole; K in its own dtype.

        Rows are distinct, and columns are.
        """
        self.entries += len(rows) * len(columns)
        product = self._rows(rows, vectors, columns)
        places = torch.full((self.n,), -1, dtype=torch.long, device=self.device)
        places[columns] = torch.arange(len(columns), device=self.device)
        shared = places[rows]  # where a row is among the columns
        return product + (shared >= 0).unsqueeze(1) * self.noise[rows, None] * vectors[shared]

    def accurate_rows(self, indices: Tensor, vectors: Tensor) -> Tensor:
        """The same with K evaluated in float64."""
        if self._accurate_rows is None:
            self._accurate_rows = RowProduct(self.system.operator, accurate=True)
        return self._of_rows(self._accurate_rows, indices, vectors)

    def accurate_product(self, vectors: Tensor) -> Tensor:
        """``(K + noise) v`` in float64."""
        self.entries += self.n**2
        return self.space.product(self.system.accurate_product, vectors)

    def block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """``K[rows, columns]`` in float64, without the noise."""
        self.entries += len(rows) * len(columns)
        return self.access.block(rows, columns)

    def square_block(self, rows: Tensor) -> Tensor:
        """``K[rows, rows]`` to be inverted with its noise: from the stored matrix, if there is one and the rounding of
        its entries is small beside the noise."""
        if self._spread is None:
            resolution = torch.finfo(self.dtype).eps * float(self.access.diagonal().max())
            self._spread = _SPREAD * resolution / float(self.noise.min())
        if self._spread * len(rows) ** 0.5 < _TOLERATED:
            stored = self._rows.stored_block(rows)
            if stored is not None:
                self.entries += len(rows) ** 2
                return stored
        return self.block(rows, rows)


def automatic_block_size(n: int, device: torch.device) -> int:
    """Rows a step, such that factorizing the block takes no longer than evaluating its rows of K.

    ``b^3 / 3`` operations against ``n b`` entries gives ``b = 8 sqrt(n)``, at least 256 and at most n; and no more
    than the memory budget (:class:`sketchgp.settings.memory_budget`) holds in float64.
    """
    balanced = math.ceil(math.sqrt(3 * _FLOPS_PER_ENTRY * n))
    stored = math.isqrt(memory_budget.value(device) // (8 * _COPIES))
    return max(1, min(n, max(balanced, _LEAST_BLOCK), stored))

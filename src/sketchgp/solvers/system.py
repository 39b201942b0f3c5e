"""The linear system ``(K + noise) w = b`` as solvers see it: products, rows and blocks, and a count of the work."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..operators.access import Access, AccurateProduct, Remainder, RowProduct, element
from ..preconditioners.rpcholesky import rpcholesky
from ..random_streams import generator
from ..settings import memory_budget
from ..space import SharedSpace, Space, whole

_LEAST_BLOCK = 512
_PIVOTS = 64  # of a stored remainder: of kin40k they leave 1e-4 of the entries, and cost a fifth of its time
# of the Cholesky factorizations for each kernel entry, so that they take a third of the time or less
_FLOPS_PER_ENTRY = {"cpu": 10, "fused": 4}
_ON_DEVICES = 20
_SPREAD = 4.0  # norm of a matrix of b x b independent rounding errors, over sqrt(b) of them
_TOLERATED = 0.05  # error of a block, relative to its noise, that its inverse may have
_COPIES = 4  # of a block that are held at once


class System:
    """``A = K + diag(noise)`` for one matrix or a batch: products in K's dtype and in float64.

    Rows and blocks are those of a system without batch.  They take and return vectors as its ``space`` holds them,
    where several ranks work together the rows ``(h, t)`` of this rank; :meth:`product` takes all rows.

    :param operator: symmetric positive semidefinite LinearOperator ``(..., n, n)``.
    :param noise: ``(..., n)`` positive.
    :ivar products: products with K so far; ``entries``: entries of K evaluated by products, rows and blocks.
    """

    def __init__(self, operator: Any, noise: Tensor) -> None:
        self.operator = operator.evaluate_kernel().detach()
        self.noise = noise.detach()
        self.products = self.entries = 0
        self.space = Space.of(self.n)
        self._remainder: Remainder | None = None

    def fresh(self) -> System:
        """Return the same system for the ranks that work together now, its entries counted from zero.

        Products count on: those that a caller made for a start belong to the solve.
        """
        system = copy.copy(self)
        system.entries = 0
        system.space = Space.of(self.n)
        return system

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        return self.noise.device

    @property
    def n(self) -> int:
        return self.operator.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of the systems, to which those of operator and noise are broadcast."""
        return torch.broadcast_shapes(self.operator.batch_shape, self.noise.shape[:-1])

    def element(self, index: tuple[int, ...], batch: torch.Size) -> System:
        """Return one system of the batch."""
        return System(element(self.operator, index), self.noise.expand(*batch, self.n)[index])

    @cached_property
    def diagonal(self) -> Tensor:
        """Noise in float64, ``(..., n, 1)``."""
        return self.noise.to(torch.float64).unsqueeze(-1)

    @cached_property
    def access(self) -> Access:
        """Entries of K in float64."""
        return Access(self.operator)

    # --- products -------------------------------------------------------------------------------------------

    def product(self, vectors: Tensor) -> Tensor:
        """``A vectors`` for float64 vectors ``(..., n, t)``, K applied in its own dtype."""
        self._count_product()
        if self._remainder is None:
            product = self.operator._matmul(vectors.to(self.dtype)).to(torch.float64)
        else:
            product = self._remainder(vectors)
        return product.addcmul_(self.diagonal, vectors)

    def store_remainder(self) -> None:
        """Store what few pivots leave of K, for all products in its dtype to come, where it fits the memory budget."""
        if Remainder.serves(self.access, memory_budget.value(self.device)):
            few = rpcholesky(self.access, _PIVOTS, generator=generator(0, "pivots of a stored remainder"))
            self._remainder = Remainder(self.access, whole(few.factor))

    def accurate_product(self, vectors: Tensor) -> Tensor:
        """``A vectors``, all in float64."""
        if self.dtype == torch.float64:
            return self.product(vectors)
        self._count_product()
        return self._float64(vectors).addcmul_(self.diagonal, vectors)

    def _count_product(self) -> None:
        self.products += 1
        self.entries += self.n**2

    def sampled_rows(self, indices: Tensor, vectors: Tensor) -> Tensor:
        """Rows ``(..., b, t)`` of ``A vectors`` in float64, of one system or a batch; not counted as work."""
        rows = self.diagonal[..., indices, :] * vectors[..., indices, :]
        return self._accurate_rows(indices, vectors) + rows

    @cached_property
    def _float64(self) -> AccurateProduct:
        return AccurateProduct(self.operator)

    # --- rows and blocks ------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> RowProduct:
        return RowProduct(self.operator)

    @cached_property
    def _accurate_rows(self) -> RowProduct:
        return RowProduct(self.operator, accurate=True)

    @property
    def engines(self) -> list[str]:
        """Engines that evaluate rows of K, as they were chosen at the start."""
        return self._rows.engines

    def use_engines(self, engines: list[str]) -> bool:
        """Evaluate rows with these engines, but where one was asked for by name, and return whether they differ.

        Another engine rounds otherwise.
        """
        asked = self._rows.asked
        chosen = [mine if asked_for else old for old, mine, asked_for in zip(engines, self.engines, asked, strict=True)]
        self._rows = RowProduct(self.operator, engines=chosen)
        return chosen != engines

    def zeros(self, width: int) -> Tensor:
        """Return a zero vector of the space."""
        return self.diagonal.new_zeros(self.space.height, width)

    def rows(self, indices: Tensor, vectors: Tensor, accurate: bool = False) -> Tensor:
        """``A[indices] v`` for float64 vectors, K in its own dtype; on each rank the part that its rows add to it.

        :param accurate: evaluate K in float64.
        """
        self.entries += len(indices) * self.n
        product, (here, local) = self._accurate_rows if accurate else self._rows, self.space.held(indices)
        shared = self.space.shared
        part = product.part(indices, vectors, self.space.span) if shared else product(indices, vectors)
        part[here] = part[here].addcmul(self.diagonal[indices[here]], vectors[local])
        return part

    def residual(self, indices: Tensor, vectors: Tensor, r: Tensor, accurate: bool = False) -> Tensor:
        """``(A v - r)[indices]``, ``(b, t)``, whole on every rank by one message.

        :param accurate: evaluate K in float64.
        """
        return self.space.total(self._residual_part(indices, vectors, r, accurate)[0])

    def residual_and(self, indices: Tensor, vectors: Tensor, r: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`residual` and, by the same message, all rows ``(b, t)`` of an array.

        :param other: the rows that :meth:`~sketchgp.space.Space.held` finds on this rank.
        """
        if not isinstance(self.space, SharedSpace):
            return self.residual(indices, vectors, r), other
        part, here = self._residual_part(indices, vectors, r, False)
        spread = torch.zeros_like(part)
        spread[here] = other
        residual, gathered = self.space.total(torch.stack([part, spread]))
        return residual, gathered

    def _residual_part(
        self, indices: Tensor, vectors: Tensor, r: Tensor, accurate: bool
    ) -> tuple[Tensor, slice | Tensor]:
        """Return what this rank adds to a residual, and which of its rows are here."""
        here, local = self.space.held(indices)
        part = self.rows(indices, vectors, accurate)
        part[here] -= r[local]
        return part, here

    def cross(self, rows: Tensor, columns: Tensor, vectors: Tensor) -> Tensor:
        """``A[rows, columns] v`` for float64 vectors ``(len(columns), t)``, whole; K in its own dtype.

        Rows are distinct, and columns are.
        """
        self.entries += len(rows) * len(columns)
        product = self._rows(rows, vectors, columns)
        places = torch.full((self.n,), -1, dtype=torch.long, device=self.device)
        places[columns] = torch.arange(len(columns), device=self.device)
        shared = places[rows]  # where a row is among the columns
        return product + (shared >= 0).unsqueeze(1) * self.diagonal[rows] * vectors[shared]

    def block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """``K[rows, columns]`` in float64, without the noise."""
        self.entries += len(rows) * len(columns)
        return self.access.block(rows, columns)

    def square_block(self, rows: Tensor) -> Tensor:
        """Return ``K[rows, rows]`` in float64, to be inverted with its noise.

        It is read where K is stored for its rows, and the rounding of its entries is small beside the noise.
        """
        little = self._rounding * len(rows) ** 0.5 < _TOLERATED
        stored = self._rows.stored_block(rows) if little else None
        if stored is None:
            return self.block(rows, rows)
        self.entries += stored.numel()
        return stored

    @cached_property
    def _rounding(self) -> float:
        """Norm of the rounding errors of a stored block over the root of its size, and over the least noise."""
        resolution = torch.finfo(self.dtype).eps * float(self.access.diagonal().max())
        return _SPREAD * resolution / float(self.diagonal.min())


def automatic_block_size(n: int, device: torch.device, engines: Sequence[str] = ()) -> int:
    """Return rows a step, such that factorizing the block takes less time than evaluating its rows of K.

    ``b^3 / 3`` operations against ``n b`` entries gives ``b = 5.5 sqrt(n)`` on a CPU, ``3.5 sqrt(n)`` where the engine
    ``"fused"`` makes all products, ``8 sqrt(n)`` elsewhere; at least 512 and at most n; and no more than the memory
    budget (:class:`sketchgp.settings.memory_budget`) holds in float64.

    :param engines: those of the products with rows of K.
    """
    kind = "fused" if set(engines) == {"fused"} else device.type
    balanced = math.ceil(math.sqrt(3 * _FLOPS_PER_ENTRY.get(kind, _ON_DEVICES) * n))
    stored = math.isqrt(memory_budget.value(device) // (8 * _COPIES))
    return max(1, min(n, max(balanced, _LEAST_BLOCK), stored))

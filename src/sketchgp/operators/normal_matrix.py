"""The matrix of the inducing-point problem, ``Kzx Kxz + noise Kzz``, as an operator that never holds Kxz."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator
from torch import Tensor

from .kernel_matrix import KernelMatrix
from .tall import TallMatrix
from .unchanged import Memory


class NormalMatrix(LinearOperator):
    """``M = T^T T + level Kzz``, ``(m, m)`` float64, with ``T = diag(weights) k(x, z)`` by tiles.

    A product costs ``n m`` kernel evaluations and O((n + m) t) memory beside one tile and Kzz.  Its preconditioner, for
    :meth:`solve` of linear_operator too, is what ``preconditioner`` makes of it.  Not differentiable.

    :param kzz: ``(m, m)`` float64, the kernel matrix of the inducing points.
    :param tall: T.
    :param level: the noise variance that ``weights`` refer to.
    :param preconditioner: from this operator to an object with ``apply_inverse``; called once, when needed.
    """

    def __init__(
        self,
        kzz: Tensor,
        *,
        tall: TallMatrix,
        level: float,
        preconditioner: Callable[[NormalMatrix], Any] | None = None,
        memory: Memory | None = None,
    ) -> None:
        memory = Memory() if memory is None else memory  # shared with the copies that linear_operator makes
        super().__init__(kzz, tall=tall, level=level, preconditioner=preconditioner, memory=memory)
        self.kzz, self.tall, self.level, self.make, self.memory = kzz, tall, level, preconditioner, memory

    def accurate(self) -> NormalMatrix:
        """The same with float64 entries of T."""
        return NormalMatrix(self.kzz, **{**self._kwargs, "tall": self.tall.accurate()})

    @torch.no_grad()
    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(1)).squeeze(1)
        return self.tall.gram_matmul(rhs).addmm_(self.kzz, rhs, alpha=self.level)

    @torch.no_grad()
    def to_dense(self) -> Tensor:
        """``(m, m)``."""
        out = self.kzz * self.level
        part = torch.zeros_like(out) if self.tall.space.shared else out
        for _, tile in self.tall.own_tiles():
            part.addmm_(tile.mT, tile)
        return out if part is out else out.add_(self.tall.total(part))

    def built(self) -> Any:
        """The preconditioner, made at the first call; None without."""
        make = self.make
        return None if make is None else self.memory.remember("preconditioner", lambda: make(self))

    def _preconditioner(self) -> tuple[Callable[[Tensor], Tensor] | None, None, None]:
        built = self.built()
        return (None if built is None else built.apply_inverse), None, None

    def _size(self) -> torch.Size:
        return self.kzz.shape

    def _transpose_nonbatch(self) -> NormalMatrix:
        return self

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return DenseLinearOperator(self.to_dense())._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Any) -> Tensor:
        return self.to_dense()[row_index, col_index]

    def _diagonal(self) -> Tensor:
        out = self.kzz.diagonal() * self.level
        for _, tile in self.tall.tiles():
            out += tile.square().sum(dim=0)
        return out


class TiledNormalMatrix:
    """The same matrix with Kzz by tiles, too: ``n m + m^2 / 2`` kernel evaluations a product, no m x m matrix.

    :param kzz: ``k(z, z)``, by tiles, in the dtype of its entries.
    """

    def __init__(self, kzz: KernelMatrix, tall: TallMatrix, level: float) -> None:
        self.kzz, self.tall, self.level = kzz, tall, level
        self.products = 0  # with Kzz

    @property
    def shape(self) -> tuple[int, int]:
        return self.tall.shape[1], self.tall.shape[1]

    def accurate(self) -> TiledNormalMatrix:
        """The same with float64 entries."""
        if self.tall.dtype == torch.float64 and self.kzz.dtype == torch.float64:
            return self
        return TiledNormalMatrix(self.kzz.double(), self.tall.accurate(), self.level)

    @torch.no_grad()
    def kzz_matmul(self, rhs: Tensor) -> Tensor:
        """``Kzz v``, ``(m, t)`` float64."""
        self.products += 1
        return self.kzz.product(rhs.to(self.kzz.dtype)).to(torch.float64)

    @torch.no_grad()
    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.tall.gram_matmul(rhs).add_(self.kzz_matmul(rhs), alpha=self.level)

"""The matrix of the inducing-point problem, ``Kzx Kxz + noise Kzz``, which never holds Kxz."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel_matrix import KernelMatrix
from .tall import TallMatrix
from .unchanged import Memory


class NormalMatrix:
    """``M = T^T T + level Kzz``, ``(m, m)`` float64, with ``T = diag(weights) k(x, z)`` by tiles.

    A product costs ``n m`` kernel evaluations and O((n + m) t) memory beside one tile and Kzz.  Not differentiable.

    :param kzz: ``(m, m)`` float64, the kernel matrix of the inducing points.
    :param tall: T.
    :param level: the noise variance that ``weights`` refer to.
    :param memory: values that copies with other entries of T share.
    """

    def __init__(self, kzz: Tensor, tall: TallMatrix, level: float, memory: Memory | None = None) -> None:
        self.kzz, self.tall, self.level = kzz, tall, level
        self.memory = Memory() if memory is None else memory

    @property
    def shape(self) -> tuple[int, int]:
        return self.tall.shape[1], self.tall.shape[1]

    def accurate(self) -> NormalMatrix:
        """Return M with float64 entries of T."""
        return NormalMatrix(self.kzz, self.tall.accurate(), self.level, self.memory)

    @torch.no_grad()
    def product(self, rhs: Tensor) -> Tensor:
        """``M v``, ``(m, t)`` float64."""
        return self.tall.gram_matmul(rhs).addmm_(self.kzz, rhs, alpha=self.level)


class TiledNormalMatrix:
    """:class:`NormalMatrix` with Kzz by tiles, too: ``n m + m^2 / 2`` kernel evaluations a product, no m x m matrix.

    :param kzz: ``k(z, z)``, by tiles, in the dtype of its entries.
    :ivar products: how many products with Kzz were computed.
    """

    def __init__(self, kzz: KernelMatrix, tall: TallMatrix, level: float) -> None:
        self.kzz, self.tall, self.level = kzz, tall, level
        self.products = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.tall.shape[1], self.tall.shape[1]

    def accurate(self) -> TiledNormalMatrix:
        """Return M with float64 entries."""
        if self.tall.dtype == torch.float64 and self.kzz.dtype == torch.float64:
            return self
        return TiledNormalMatrix(self.kzz.type(torch.float64), self.tall.accurate(), self.level)

    @torch.no_grad()
    def kzz_matmul(self, rhs: Tensor) -> Tensor:
        """``Kzz v``, ``(m, t)`` float64."""
        self.products += 1
        return self.kzz.product(rhs.to(self.kzz.dtype)).to(torch.float64)

    @torch.no_grad()
    def product(self, rhs: Tensor) -> Tensor:
        """``M v``, ``(m, t)`` float64."""
        return self.tall.gram_matmul(rhs).add_(self.kzz_matmul(rhs), alpha=self.level)

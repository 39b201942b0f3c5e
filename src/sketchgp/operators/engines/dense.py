"""The engine ``"dense"``: the matrix is stored at the first product and used from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...memory import out_of_memory
from ...settings import memory_budget
from ..thin import thin_product
from ..tiles import logger
from .base import Engine, Gradients
from .tiled import Tiled

if TYPE_CHECKING:
    from ..kernel_matrix import KernelMatrix


class Dense(Engine):
    """Products with the stored matrix, ``n m`` entries; derivatives by tiles.  Pays where many products follow.

    Where there turns out to be no memory for the matrix, products go by tiles, with a line in the log.
    """

    name = "dense"

    def fits(self, matrix: KernelMatrix) -> bool:
        """Whether the matrix fits the memory budget, or is stored already."""
        size = matrix.shape.numel() * matrix.compute_dtype.itemsize
        ranks = matrix.ranks()
        size = size if ranks is None else -(-size // ranks.count)  # each stores its own rows
        return matrix._stored is not None or size <= memory_budget.value(matrix.device)

    def product(self, matrix: KernelMatrix, rhs: Tensor) -> Tensor:
        stored = self.kept(matrix)
        if stored is None:
            return Tiled().product(matrix, rhs)
        return (
            stored.reshape(*matrix.flat_batch, *stored.shape[-2:]) @ rhs if rhs.dim() > 2 else thin_product(stored, rhs)
        )

    def derivative(self, matrix: KernelMatrix, left: Tensor, right: Tensor) -> Gradients:
        return Tiled().derivative(matrix, left, right)

    def kept(self, matrix: KernelMatrix) -> Tensor | None:
        """The stored matrix; None where there turned out to be no memory for it."""
        if matrix.memo.get("dense refused"):
            return None
        try:
            return matrix.stored()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        gigabytes = matrix.shape.numel() * matrix.compute_dtype.itemsize / 2**30
        logger.warning("No memory for the kernel matrix (%.1f GiB) on %s; going on by tiles", gigabytes, matrix.device)
        matrix.memo["dense refused"] = True
        return None

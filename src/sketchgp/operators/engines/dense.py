"""The engine ``"dense"``: the matrix is stored at the first product and used from then on."""

from __future__ import annotations

from torch import Tensor

from ...memory import out_of_memory
from ...settings import memory_budget
from ..pairs import Pairs
from ..tiles import logger, thin_product
from .base import Engine, Gradients
from .tiled import Tiled

_STORED = "stored matrix"


class Dense(Engine):
    """Products with the stored matrix, ``n m`` entries; derivatives by tiles.  Pays where many products follow.

    Where there turns out to be no memory for the matrix, products go by tiles, with a line in the log.
    """

    name = "dense"

    def fits(self, pairs: Pairs) -> bool:
        """Return whether the matrix fits the memory budget, or is stored already."""
        size = pairs.shape.numel() * pairs.compute_dtype.itemsize
        ranks = pairs.ranks()
        size = size if ranks is None else -(-size // ranks.count)  # each stores its own rows
        return self.holds(pairs) or size <= memory_budget.value(pairs.device)

    def holds(self, pairs: Pairs) -> bool:
        """Return whether the matrix has been stored."""
        return pairs.remembers(_STORED)

    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        stored = self.kept(pairs)
        if stored is None:
            return Tiled().product(pairs, rhs)
        return (
            stored.reshape(*pairs.flat_batch, *stored.shape[-2:]) @ rhs if rhs.dim() > 2 else thin_product(stored, rhs)
        )

    def derivative(self, pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
        return Tiled().derivative(pairs, left, right)

    def kept(self, pairs: Pairs) -> Tensor | None:
        """Return the stored matrix; None where memory ran out for it."""
        if not pairs.stores:
            return None
        try:
            return pairs.remember(_STORED, lambda: Tiled().dense(pairs))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        gigabytes = pairs.shape.numel() * pairs.compute_dtype.itemsize / 2**30
        logger.warning("No memory for the kernel matrix (%.1f GiB) on %s; going on by tiles", gigabytes, pairs.device)
        pairs.stores = False
        return None

"""The sparse sign embedding: a random matrix with a few entries +-1 a column that nearly keeps lengths.

Reference: Diaz, Epperly, Frangella, Tropp, Webber (arXiv:2304.12465), section 2.2.1, who take it from Cohen (2016) and
Martinsson and Tropp (2020), section 9.2.
"""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from ..errors import InputError
from ..random_streams import generator
from .tiles import spans

_CHUNK = 4096  # columns that are drawn at once, each chunk by a seed of its own


class SparseSignEmbedding(LinearOperator):
    """``Phi``, ``(rows, columns)``: each column has ``nonzeros`` entries ``+-1 / sqrt(nonzeros)`` in distinct rows.

    Nothing is stored: columns are drawn when they are needed, by chunks that each have a seed of their own, and are the
    same at every call, on every device.  A product with ``(columns, t)`` costs ``nonzeros columns t`` additions.  On
    CUDA the order of additions is not fixed, so that the last digits can vary.

    :param like: any tensor of the dtype (float32 or float64) and on the device that products shall have.
    :param rows: the size of the sketch.
    :param columns: the length of what is sketched.
    :param nonzeros: of a column, at most ``rows``.
    :raises InputError: for sizes that are not positive, or more nonzeros than rows.
    """

    def __init__(
        self, like: Tensor, *, rows: int, columns: int, nonzeros: int = 8, seed: int = 0, transposed: bool = False
    ) -> None:
        options = {"rows": rows, "columns": columns, "nonzeros": nonzeros, "seed": seed, "transposed": transposed}
        super().__init__(like, **options)
        if min(rows, columns, nonzeros) < 1:
            raise InputError(
                f"A sparse sign embedding needs positive sizes, got {rows} x {columns} with {nonzeros} nonzeros."
            )
        if nonzeros > rows:
            raise InputError(f"A sparse sign embedding with {rows} rows has at most as many nonzeros, got {nonzeros}.")
        self.like, self.transposed = like, transposed
        self.sketch_size, self.length, self.nonzeros, self.seed = rows, columns, nonzeros, seed
        self._kept: tuple[int, Tensor, Tensor] | None = None

    def add_product(self, out: Tensor, columns: slice, block: Tensor) -> None:
        """``out += Phi[:, columns] block``, for out ``(rows, t)`` and block ``(len(columns), t)``."""
        start, scale = columns.start, self.nonzeros**-0.5
        while start < columns.stop:
            chunk, offset = divmod(start, _CHUNK)
            stop = min(columns.stop, (chunk + 1) * _CHUNK)
            places, signs = self._drawn(chunk)
            part = slice(offset, offset + stop - start)
            values = block[start - columns.start : stop - columns.start]
            for place, sign in zip(places[part].unbind(1), signs[part].unbind(1), strict=True):
                out.index_add_(0, place, values * (sign * scale).to(out.dtype).unsqueeze(1))
            start = stop

    def _drawn(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Rows and signs of a chunk's columns, ``(c, nonzeros)`` each."""
        if self._kept is None or self._kept[0] != chunk:
            stream = generator(self.seed, f"sparse sign embedding, part {chunk}")
            count = min(_CHUNK, self.length - chunk * _CHUNK)
            places = distinct(count, self.nonzeros, self.sketch_size, stream)
            signs = torch.randint(0, 2, places.shape, generator=stream).mul_(2).sub_(1)
            self._kept = chunk, places.to(self.device), signs.to(self.device)
        return self._kept[1], self._kept[2]

    @torch.no_grad()
    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(1)).squeeze(1)
        if not self.transposed:
            out = rhs.new_zeros(self.sketch_size, rhs.shape[1])
            for span in spans(self.length, _CHUNK):
                self.add_product(out, span, rhs[span])
            return out
        parts = []
        for chunk in range(len(list(spans(self.length, _CHUNK)))):
            places, signs = self._drawn(chunk)
            part = rhs.new_zeros(len(places), rhs.shape[1])
            for place, sign in zip(places.unbind(1), signs.unbind(1), strict=True):
                part.addcmul_(rhs[place], sign.to(rhs.dtype).unsqueeze(1))
            parts.append(part)
        return torch.cat(parts) * self.nonzeros**-0.5

    def _size(self) -> torch.Size:
        shape = (self.sketch_size, self.length)
        return torch.Size(shape[::-1] if self.transposed else shape)

    def _transpose_nonbatch(self) -> SparseSignEmbedding:
        return self.__class__(self.like, **{**self._kwargs, "transposed": not self.transposed})

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Any) -> Tensor:
        return self.to_dense()[row_index, col_index]

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device


def distinct(count: int, size: int, limit: int, generator: torch.Generator) -> Tensor:
    """``(count, size)`` integers below ``limit``, uniform and distinct in each row (a partial Fisher-Yates shuffle).

    The j-th is drawn among the ``limit - j`` that are left: as many places up as there are earlier ones at or below.
    """
    found = torch.empty(count, size, dtype=torch.long)
    for j in range(size):
        drawn = torch.randint(0, limit - j, (count,), generator=generator)
        earlier = found[:, :j].sort(dim=1).values
        for taken in earlier.unbind(1):
            drawn += drawn >= taken
        found[:, j] = drawn
    return found

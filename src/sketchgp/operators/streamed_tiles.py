"""Tiles of a kernel matrix whose rows are read from a source as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..devices import here, sent
from ..row_sources import RowSource, ahead
from .pairs import Pairs
from .tiles import Shape

Piece = tuple[slice, slice, bool]
Make = Callable[[Tensor, Tensor, slice, slice], Any]


def sources(pairs: Pairs) -> list[RowSource]:
    """Those of x1 and x2 that are read as they are needed; none where both are tensors."""
    sides: tuple[Any, ...] = (pairs.x1, pairs.x2)
    return [x for x in sides if isinstance(x, RowSource)]


def within_blocks(pairs: Pairs, shape: Shape) -> Shape:
    """A tile's rows and columns, no more of a source than it reads at once."""
    height, width = (
        min(size, x.block_rows) if isinstance(x, RowSource) else size
        for size, x in zip(shape, (pairs.x1, pairs.x2), strict=True)
    )
    return height, width


class StreamedTiles:
    """Tiles of ``k(x1, x2)`` in the order of :func:`.tiles.pieces`, where x1, x2 or both are sources.

    The tiles are those that tensors would be cut into, and are asked for in the same order; so products are the same
    sums, in the same order.  Rows are read for several tiles of a row of tiles at once, as many as the source reads at
    once, the next ones by another thread.

    :param matrix: without batch.
    :param order: the tiles that will be asked for.
    :param make: from rows of x1 and x2, and which they are, to their tiles.
    """

    def __init__(self, pairs: Pairs, order: Iterable[Piece], make: Make) -> None:
        self._matrix, self._make = pairs, make
        most = min(source.block_rows for source in sources(pairs))
        reader = _Reader(pairs.x1, pairs.x2)
        self._groups = ahead(partial(reader.read, *group) for group in _groups(order, most))
        self._place: tuple[slice, slice] | None = None
        self._tiles: Any = None

    @property
    def outputscale(self) -> Tensor | None:
        """As :attr:`FastTiles.outputscale`, once a tile was made."""
        return self._tiles.outputscale

    def _advance(self) -> None:
        self._tiles = None  # its buffers go before new ones come
        rows, columns, x1, x2 = next(self._groups)
        self._place = (rows, columns)
        self._tiles = self._make(x1, x2, rows, columns)

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """The next tile, as :meth:`FastTiles.tile` has it."""
        while self._place is None or rows != self._place[0] or not _inside(columns, self._place[1]):
            self._advance()
        first = self._place[1].start
        height = rows.stop - rows.start
        return self._tiles.tile(slice(0, height), slice(columns.start - first, columns.stop - first))


class _Reader:
    """Reads rows of x1 and x2; those of x1 are kept for the next time."""

    def __init__(self, x1: Tensor | RowSource, x2: Tensor | RowSource) -> None:
        self._x1, self._x2 = x1, x2
        self._kept: tuple[slice, Tensor] | None = None

    def read(self, rows: slice, columns: slice) -> tuple[slice, slice, Tensor, Tensor]:
        if self._kept is None or self._kept[0] != rows:
            self._kept = (rows, self._x1[rows])
        return rows, columns, self._kept[1], self._x2[columns]


def _groups(order: Iterable[Piece], most: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of consecutive tiles of the same rows, of at most so many columns if it is more than one."""
    rows = columns = None
    for down, across, _ in order:
        joined = rows == down and columns is not None and columns.stop == across.start
        if joined and columns is not None and across.stop - columns.start <= most:
            columns = slice(columns.start, across.stop)
            continue
        if rows is not None and columns is not None:
            yield rows, columns
        rows, columns = down, across
    if rows is not None and columns is not None:
        yield rows, columns


def _inside(part: slice, whole: slice) -> bool:
    return whole.start <= part.start and part.stop <= whole.stop


def coincident(pairs: Pairs, rows: slice, columns: slice) -> Tensor | int | None:
    """The pairs at distance exactly 0 in a part of the matrix, as :class:`.FastTiles` has them."""
    if pairs.same:
        return rows.start - columns.start
    if pairs.coincident is None:
        return None
    i, j = here(pairs.coincident)
    inside = (i >= rows.start) & (i < rows.stop) & (j >= columns.start) & (j < columns.stop)
    return sent(torch.stack([i[inside] - rows.start, j[inside] - columns.start]), pairs.device)

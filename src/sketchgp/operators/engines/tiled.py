"""The engines ``"tiled"``, torch operations on one tile at a time, and ``"dense"``, which stores the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from ...devices import here, sent
from ...errors import InputError
from ...memory import out_of_memory
from ...row_sources import RowSource, ahead
from ...settings import memory_budget
from ..fast_tiles import FastGradient, FastTiles
from ..generic_tiles import GenericTiles
from ..nearby import nearby
from ..pairs import Pairs, far_rows
from ..tiles import GROUP, Piece, Shape, add_product, logger, padded, pieces, shrinking, thin_product, tile_shape
from .base import Engine, Gradients, Live, folds


class Tiled(Engine):
    """Products tile by tile, in memory O((n + m)(d + t)) beside one tile.

    Where x1 is x2, each pair is evaluated once and used twice.  When memory runs out, the tile shrinks.
    """

    name = "tiled"

    def product(self, pairs: Pairs, rhs: Tensor, within: slice | None = None) -> Tensor:
        """Return ``K rhs``, or the part of it that some tiles make.

        :param within: the rows of these tiles, which count with their mirror images where x1 is x2; None for all.
        """
        near = nearby(pairs) if within is None else None
        if near is not None:
            return near.back(self.product(near.pairs, rhs.index_select(-2, near.right)))
        return shrinking(
            pairs.device,
            lambda: _shape(pairs, within=within),
            lambda shape: _product(pairs, rhs, shape, pairs.same, within),
        )

    def width(self, pairs: Pairs) -> int:
        """Return the number of columns of a tile."""
        return _shape(pairs)[1]

    def dense(self, pairs: Pairs) -> Tensor:
        """Return the matrix ``(*batch, n, m)``, without autograd."""
        out = torch.empty(pairs.shape, dtype=pairs.compute_dtype, device=pairs.device)  # no tile makes it fit
        if 0 in pairs.batch_shape:
            return out
        return shrinking(pairs.device, lambda: _shape(pairs), lambda shape: _dense(pairs, out, shape))

    def derivative(self, pairs: Pairs, left: Tensor, right: Tensor, within: slice | None = None) -> Gradients:
        """Return the gradients, or the part of them that some rows make.

        :param within: these rows, as in :meth:`product` where both sides count as one (:func:`folds`); None for all.
        """
        near = nearby(pairs) if within is None else None
        if near is not None:
            result = self.derivative(near.pairs, left.index_select(-2, near.left), right.index_select(-2, near.right))
            sides = (None if g is None else near.back(g, side) for g, side in zip(result, (True, False), strict=False))
            return (*sides, *result[2:])
        fold = folds(pairs)
        if fold:  # K is symmetric, so the weights may be made so: only the upper triangle is then visited
            left, right = torch.cat([left, right], dim=-1), torch.cat([right, left], dim=-1) * 0.5

        def weights(rows: slice, columns: slice, out: Tensor) -> Tensor:
            return torch.matmul(left[..., rows, :], right[..., columns, :].mT, out=out)

        return self._derivative(pairs, weights, fold, within)

    def dense_derivative(self, pairs: Pairs, gradient: Tensor) -> Gradients:
        """Return the gradient of ``sum_ij gradient_ij K_ij``, for ``gradient`` of the matrix's shape."""
        gradient = gradient.reshape(*pairs.flat_batch, *gradient.shape[-2:])

        def weights(rows: slice, columns: slice, out: Tensor) -> Tensor:
            return out.copy_(gradient[..., rows, columns])

        return self._derivative(pairs, weights, False)

    def _derivative(
        self,
        pairs: Pairs,
        weights: Callable[[slice, slice, Tensor], Tensor],
        half: bool,
        within: slice | None = None,
    ) -> Gradients:
        if pairs.sources:
            raise InputError(
                "Products with rows that are read as they are needed have no gradients; tune on some of the rows."
            )
        return shrinking(
            pairs.device,
            lambda: _shape(pairs, gradient=True, within=within),
            lambda shape: _gradient(pairs, weights, shape, half, within),
        )


TILED = Tiled()


def _shape(pairs: Pairs, gradient: bool = False, within: slice | None = None) -> Shape:
    atoms = 1 if pairs.expression is None else len(pairs.expression.atoms)
    n, m = pairs.shape[-2:]
    n = n if within is None else within.stop - within.start
    buffers = atoms * (2 if gradient else 1)
    shape = tile_shape(n, m, pairs.compute_dtype, pairs.device, pairs.flat_batch.numel(), buffers)
    height, width = (
        min(size, x.block_rows) if isinstance(x, RowSource) else size  # which a source reads at once
        for size, x in zip(shape, (pairs.x1, pairs.x2), strict=True)
    )
    return height, width


def cut(pairs: Pairs, shape: Shape, half: bool, within: slice | None = None, gradient: bool = False) -> Iterator[Piece]:
    """Return the tiles that matter, in the format of :func:`pieces`; :param gradient: for derivatives."""
    if pairs.layout is None:
        return pieces(pairs.shape[-2], pairs.shape[-1], shape, half, within)
    return pairs.layout.pieces(pairs.shape[-2], pairs.shape[-1], shape, half, gradient)


Tiles = FastTiles | GenericTiles


def _tiles(pairs: Pairs, shape: Shape, order: Iterable[Piece]) -> Iterator[tuple[Piece, Tensor, Tensor | None]]:
    """Yield tiles in the order of their pieces, each with the factor that it still lacks; None for 1.

    A tile is overwritten by the next one.
    """
    if pairs.sources:
        yield from _streamed(pairs, shape, order)
        return
    tiles: Tiles
    if pairs.expression is not None:
        tiles = FastTiles(pairs.expression, pairs.prepared(), shape, 0 if pairs.same else pairs.coincident)
    else:
        tensors = [t.detach() for t in pairs.tensors]
        tiles = GenericTiles(pairs.evaluator(tensors[2:]), tensors, far_rows(pairs))
    for piece in order:
        yield piece, tiles.tile(*piece[:2]), tiles.outputscale


def _streamed(pairs: Pairs, shape: Shape, order: Iterable[Piece]) -> Iterator[tuple[Piece, Tensor, Tensor | None]]:
    """Yield the same where x1, x2 or both are sources; pairs have no batch.

    The tiles are those that tensors would be cut into, in the same order, so that products are the same sums.  Rows are
    read for several tiles of a row of tiles at once, as many as the source reads at once, the next ones by another
    thread; those of x1 are kept for the next time.
    """
    kept: tuple[slice, Tensor] | None = None

    def read(group: list[Piece]) -> tuple[list[Piece], Tensor, Tensor]:
        nonlocal kept
        rows = group[0][0]
        if kept is None or kept[0] != rows:
            kept = (rows, pairs.x1[rows])
        return group, kept[1], pairs.x2[group[0][1].start : group[-1][1].stop]

    most = min(source.block_rows for source in pairs.sources)
    for group, x1, x2 in ahead(partial(read, group) for group in _groups(order, most)):
        rows, first = group[0][0], group[0][1].start
        tiles = _tiles_of(pairs, shape, x1, x2, rows, slice(first, group[-1][1].stop))
        for piece in group:
            across = slice(piece[1].start - first, piece[1].stop - first)
            yield piece, tiles.tile(slice(0, rows.stop - rows.start), across), tiles.outputscale
        del tiles  # its buffers go before new ones come


def _groups(order: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Join consecutive tiles of the same rows, up to so many columns."""
    group: list[Piece] = []
    for piece in order:
        if group:
            (rows, across, _), first = group[-1], group[0][1].start
            if (rows, across.stop) != (piece[0], piece[1].start) or piece[1].stop - first > most:
                yield group
                group = []
        group.append(piece)
    if group:
        yield group


def _tiles_of(pairs: Pairs, shape: Shape, x1: Tensor, x2: Tensor, rows: slice, columns: slice) -> Tiles:
    """Return the tiles of a part of the matrix, from its rows of x1 and x2, which are ``rows`` and ``columns``."""
    tensors = [x1, x2, *(p.detach() for p in pairs.parameters)]
    if pairs.expression is None:
        return GenericTiles(pairs.evaluator(tensors[2:]), tensors, None)
    prepared = pairs.prepare(tensors, False)
    return FastTiles(pairs.expression, prepared, shape, coincident(pairs, rows, columns))


@torch.no_grad()
def _product(pairs: Pairs, rhs: Tensor, shape: Shape, half: bool, within: slice | None = None) -> Tensor:
    sums, scale = TileSums(pairs.flat_batch, pairs.shape[-2], rhs), None
    for (rows, columns, mirror), tile, lacking in _tiles(pairs, shape, cut(pairs, shape, half, within)):
        scale = lacking
        if tile.dim() != rhs.dim():  # a generic kernel keeps its batch dimensions
            tile = tile.expand(*pairs.shape[:-2], *tile.shape[-2:]).reshape(*pairs.flat_batch, *tile.shape[-2:])
        sums.add(rows, columns, tile)
        if mirror:
            sums.add(columns, rows, tile.mT)
    out = sums.total()
    return out if scale is None else out.mul_(scale)


@torch.no_grad()
def _dense(pairs: Pairs, out: Tensor, shape: Shape) -> Tensor:
    order = pieces(pairs.shape[-2], pairs.shape[-1], shape, pairs.same)
    for (rows, columns, mirror), tile, scale in _tiles(pairs, shape, order):
        if scale is not None:
            tile.mul_(scale)
        if pairs.expression is not None:
            tile = tile.reshape(*pairs.shape[:-2], *tile.shape[-2:])
        out[..., rows, columns] = tile
        if mirror:
            out[..., columns, rows] = tile.mT
    return out


@torch.no_grad()
def _gradient(
    pairs: Pairs,
    weights: Callable[[slice, slice, Tensor], Tensor],
    shape: Shape,
    half: bool,
    within: slice | None = None,
) -> Gradients:
    live = Live(pairs)
    if not live.wanted:
        return live.pull_back([])
    adder: FastGradient | GenericTiles
    if pairs.expression is not None and live.prepared is not None:
        zeros = 0 if live.same else pairs.coincident
        tiles = FastTiles(pairs.expression, live.prepared.converted(Tensor.detach), shape, zeros)
        adder = FastGradient(tiles, live.prepared, live.needs_inputs)
    else:
        adder = GenericTiles(pairs.evaluator(live.tensors[2:]), live.tensors, far_rows(pairs))
    entries = pairs.flat_batch.numel() * shape[0] * shape[1]
    buffer = torch.empty(entries, dtype=pairs.compute_dtype, device=pairs.device)
    for rows, columns, mirror in cut(pairs, shape, half, within, gradient=True):
        size = torch.Size((*pairs.flat_batch, rows.stop - rows.start, columns.stop - columns.start))
        block = weights(rows, columns, buffer[: size.numel()].view(size))
        if mirror:
            block *= 2
        if isinstance(adder, GenericTiles):
            block = block.view(*pairs.batch_shape, *size[-2:])
        adder.add(rows, columns, block)
    return live.pull_back(adder.pairs())


def coincident(pairs: Pairs, rows: slice, columns: slice) -> Tensor | int | None:
    """Return the pairs at distance exactly 0 in a part of the matrix, in the format of :class:`.FastTiles`."""
    if pairs.same:
        return rows.start - columns.start
    if pairs.coincident is None:
        return None
    i, j = here(pairs.coincident)
    inside = (i >= rows.start) & (i < rows.stop) & (j >= columns.start) & (j < columns.stop)
    return sent(torch.stack([i[inside] - rows.start, j[inside] - columns.start]), pairs.device)


_FEW = {torch.float32: 8, torch.float64: 256}  # columns up to which they lie across


class TileSums:
    """Sum of ``K rhs`` over the tiles of K.

    On a CPU few columns lie across: rows of their own, which products with tiles then go along.  With tiles of 1 MB a
    thread and one (two) threads of an AMD EPYC this takes 0.37 (0.34) of the time for 11 float64 columns, 0.21 (0.29)
    for 4, 0.53 (0.53) for 32; 0.48 (0.89) for 4 float32 columns, and for more than 8 of them what two threads lose.

    :param batch: sizes of the batch, ``(b,)`` or none; :param rows: of K; :param rhs: ``(*batch, m, t)``.
    """

    def __init__(self, batch: torch.Size, rows: int, rhs: Tensor) -> None:
        self.columns = t = rhs.shape[-1]
        self.across = rhs.device.type == "cpu" and rhs.dim() == 2 and 1 < t <= _FEW.get(rhs.dtype, 0)
        if self.across:
            more = -t % GROUP if t > 2 else 0
            self.rhs = torch.nn.functional.pad(rhs.mT, (0, 0, 0, more)).contiguous()
            self.out = rhs.new_zeros(t + more, rows)
        else:
            self.rhs = padded(rhs)
            self.out = rhs.new_zeros(*batch, rows, self.rhs.shape[-1])

    def add(self, rows: slice, columns: slice, tile: Tensor) -> None:
        """Add the part of the products that a tile makes."""
        if self.across:
            self.out[:, rows].addmm_(self.rhs[:, columns], tile.mT)
        else:
            add_product(self.out[..., rows, :], tile, self.rhs[..., columns, :])

    def total(self) -> Tensor:
        """Return the sum, ``(*batch, n, t)``."""
        return self.out[: self.columns].mT.contiguous() if self.across else self.out[..., : self.columns]


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
        return _STORED in pairs.memory

    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        stored = self.kept(pairs)
        if stored is None:
            return TILED.product(pairs, rhs)
        return (
            stored.reshape(*pairs.flat_batch, *stored.shape[-2:]) @ rhs if rhs.dim() > 2 else thin_product(stored, rhs)
        )

    def kept(self, pairs: Pairs) -> Tensor | None:
        """Return the stored matrix; None where memory ran out for it."""
        if not pairs.stores:
            return None
        try:
            return pairs.remember(_STORED, lambda: TILED.dense(pairs))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        gigabytes = pairs.shape.numel() * pairs.compute_dtype.itemsize / 2**30
        logger.warning("No memory for the kernel matrix (%.1f GiB) on %s; going on by tiles", gigabytes, pairs.device)
        pairs.stores = False
        return None

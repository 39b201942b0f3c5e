"""The engine ``"tiled"``: torch operations on one tile at a time; any kernel, dtype, device and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import InputError
from ..far_rows import far_rows, known_of, known_sides
from ..fast_gradient import FastGradient
from ..fast_tiles import FastTiles
from ..generic_tiles import GenericTiles
from ..nearby import nearby
from ..streamed_tiles import StreamedTiles, coincident, sources, within_blocks
from ..tile_sums import TileSums
from ..tiles import Shape, pieces, shrinking, tile_shape
from .base import Engine, Gradients, Live, folds

if TYPE_CHECKING:
    from ..kernel_matrix import KernelMatrix


class Tiled(Engine):
    """Products tile by tile, in memory O((n + m)(d + t)) beside one tile.

    Where x1 is x2, each pair is evaluated once and used twice.  When memory runs out, the tile shrinks.
    """

    name = "tiled"

    def product(self, matrix: KernelMatrix, rhs: Tensor, within: slice | None = None) -> Tensor:
        """:param within: rows whose tiles, with their mirror images where x1 is x2, are all that is added up."""
        near = nearby(matrix) if within is None else None
        if near is not None:
            return near.back(self.product(near.matrix, rhs.index_select(-2, near.right)))
        return shrinking(
            matrix.device,
            lambda: _shape(matrix, within=within),
            lambda shape: _product(matrix, rhs, shape, matrix.same, within),
        )

    def width(self, matrix: KernelMatrix) -> int:
        """Columns of its tiles."""
        return _shape(matrix)[1]

    def dense(self, matrix: KernelMatrix) -> Tensor:
        """The whole matrix ``(*batch, n, m)``, without autograd."""
        out = torch.empty(matrix.shape, dtype=matrix.compute_dtype, device=matrix.device)  # no tile makes it fit
        half = matrix.same
        return shrinking(matrix.device, lambda: _shape(matrix), lambda shape: _dense(matrix, out, shape, half))

    def derivative(self, matrix: KernelMatrix, left: Tensor, right: Tensor, within: slice | None = None) -> Gradients:
        """:param within: as in :meth:`product`, where both sides are taken for one (:func:`folds`); else plain rows."""
        near = nearby(matrix) if within is None else None
        if near is not None:
            found = self.derivative(near.matrix, left.index_select(-2, near.left), right.index_select(-2, near.right))
            sides = (None if g is None else near.back(g, side) for g, side in zip(found, (True, False), strict=False))
            return (*sides, *found[2:])
        fold = folds(matrix)
        if fold:  # K is symmetric, so the weights may be made so: only the upper triangle is then visited
            left, right = torch.cat([left, right], dim=-1), torch.cat([right, left], dim=-1) * 0.5

        def weights(rows: slice, columns: slice, out: Tensor) -> Tensor:
            return torch.matmul(left[..., rows, :], right[..., columns, :].mT, out=out)

        return self._derivative(matrix, weights, fold, within)

    def dense_derivative(self, matrix: KernelMatrix, gradient: Tensor) -> Gradients:
        """The gradient of ``sum_ij gradient_ij K_ij``, for ``gradient`` of the matrix's shape."""
        gradient = gradient.reshape(*matrix.flat_batch, *gradient.shape[-2:])

        def weights(rows: slice, columns: slice, out: Tensor) -> Tensor:
            return out.copy_(gradient[..., rows, columns])

        return self._derivative(matrix, weights, False)

    def _derivative(
        self,
        matrix: KernelMatrix,
        weights: Callable[[slice, slice, Tensor], Tensor],
        half: bool,
        within: slice | None = None,
    ) -> Gradients:
        if sources(matrix):
            raise InputError(
                "Products with rows that are read as they are needed have no gradients; tune on some of the rows."
            )
        return shrinking(
            matrix.device,
            lambda: _shape(matrix, gradient=True, within=within),
            lambda shape: _gradient(matrix, weights, shape, half, within),
        )


def _shape(matrix: KernelMatrix, gradient: bool = False, within: slice | None = None) -> Shape:
    atoms = 1 if matrix.expression is None else len(matrix.expression.atoms)
    n, m = matrix.shape[-2:]
    n = n if within is None else within.stop - within.start
    buffers = atoms * (2 if gradient else 1)
    shape = tile_shape(n, m, matrix.compute_dtype, matrix.device, matrix.flat_batch.numel(), buffers)
    return within_blocks(matrix, shape)


def _pieces(
    matrix: KernelMatrix, shape: Shape, half: bool, within: slice | None, gradient: bool = False
) -> Iterator[tuple[slice, slice, bool]]:
    """The tiles that matter, as :func:`pieces` has them; :param gradient: of derivatives."""
    layout = matrix.memo.get("layout")
    if layout is None:
        return pieces(matrix.shape[-2], matrix.shape[-1], shape, half, within)
    return layout.pieces(matrix.shape[-2], matrix.shape[-1], shape, half, gradient)


def _tiles(
    matrix: KernelMatrix, shape: Shape, half: bool, within: slice | None = None
) -> FastTiles | GenericTiles | StreamedTiles:
    """:param half: and ``within``, as :func:`pieces` has them: the order of the tiles."""
    if sources(matrix):
        order = pieces(matrix.shape[-2], matrix.shape[-1], shape, half, within)
        return StreamedTiles(matrix, order, partial(_tiles_of, matrix, shape))
    if matrix.expression is not None:
        return FastTiles(matrix.expression, matrix.prepared(), shape, matrix.same, matrix.coincident)
    tensors = [t.detach() for t in matrix._args]
    return GenericTiles(matrix.evaluator(tensors[2:]), tensors, far_rows(matrix))


def _tiles_of(
    matrix: KernelMatrix, shape: Shape, x1: Tensor, x2: Tensor, rows: slice, columns: slice
) -> FastTiles | GenericTiles:
    """Of a part of the matrix, from its rows of x1 and x2; ``rows`` and ``columns`` say which they are."""
    tensors = [x1, x2, *(p.detach() for p in matrix.parameters)]
    sides = known_sides(matrix)
    if matrix.expression is None:
        return GenericTiles(matrix.evaluator(tensors[2:]), tensors, None if sides is None else sides[0][0][rows])
    known = None
    if sides is not None:
        known = known_of(matrix, [mask[rows] for mask in sides[0]], [mask[columns] for mask in sides[1]])
    prepared = matrix.prepare(tensors, False, known)
    return FastTiles(matrix.expression, prepared, shape, False, coincident(matrix, rows, columns))


@torch.no_grad()
def _product(matrix: KernelMatrix, rhs: Tensor, shape: Shape, half: bool, within: slice | None = None) -> Tensor:
    tiles = _tiles(matrix, shape, half, within)
    sums = TileSums(matrix.flat_batch, matrix.shape[-2], rhs)
    for rows, columns, mirror in _pieces(matrix, shape, half, within):
        tile = tiles.tile(rows, columns)
        if tile.dim() != rhs.dim():  # a generic kernel keeps its batch dimensions
            tile = tile.expand(*matrix.shape[:-2], *tile.shape[-2:]).reshape(*matrix.flat_batch, *tile.shape[-2:])
        sums.add(rows, columns, tile)
        if mirror:
            sums.add(columns, rows, tile.mT)
    out = sums.total()
    return out if tiles.outputscale is None else out.mul_(tiles.outputscale)


@torch.no_grad()
def _dense(matrix: KernelMatrix, out: Tensor, shape: Shape, half: bool) -> Tensor:
    tiles = _tiles(matrix, shape, half)
    for rows, columns, mirror in pieces(matrix.shape[-2], matrix.shape[-1], shape, half):
        tile = tiles.tile(rows, columns)
        if tiles.outputscale is not None:
            tile.mul_(tiles.outputscale)
        if isinstance(tiles, FastTiles):
            tile = tile.reshape(*matrix.shape[:-2], *tile.shape[-2:])
        out[..., rows, columns] = tile
        if mirror:
            out[..., columns, rows] = tile.mT
    return out


@torch.no_grad()
def _gradient(
    matrix: KernelMatrix,
    weights: Callable[[slice, slice, Tensor], Tensor],
    shape: Shape,
    half: bool,
    within: slice | None = None,
) -> Gradients:
    live = Live(matrix)
    if not live.wanted:
        return live.pull_back([])
    adder: FastGradient | GenericTiles
    if matrix.expression is not None and live.prepared is not None:
        tiles = FastTiles(matrix.expression, live.prepared.detached(), shape, live.same, matrix.coincident)
        adder = FastGradient(tiles, live.prepared, live.needs_inputs)
    else:
        adder = GenericTiles(matrix.evaluator(live.tensors[2:]), live.tensors, far_rows(matrix))
    entries = matrix.flat_batch.numel() * shape[0] * shape[1]
    buffer = torch.empty(entries, dtype=matrix.compute_dtype, device=matrix.device)
    for rows, columns, mirror in _pieces(matrix, shape, half, within, gradient=True):
        size = torch.Size((*matrix.flat_batch, rows.stop - rows.start, columns.stop - columns.start))
        block = weights(rows, columns, buffer[: size.numel()].view(size))
        if mirror:
            block *= 2
        if isinstance(adder, GenericTiles):
            block = block.view(*matrix.batch_shape, *size[-2:])
        adder.add(rows, columns, block)
    return live.pull_back(adder.pairs())

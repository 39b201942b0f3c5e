"""How a large matrix is cut into tiles that fit the cache (CPU) or the free memory (CUDA)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..memory import available_memory, out_of_memory

# Measured on two cores with 2 MB of second-level cache each: tiles that fit it with their scratch are 4% to 30% faster
# than larger ones, smaller ones lose that to calls.  On two cores with 1 MB each: tiles higher than wide keep a core on
# its own rows; from 1024 columns on, the matrix product of few features is two to three times slower (MKL on AMD); a
# width that is a power of two slows the product with the transposed tile.
_CPU_WIDTH = 700
_CPU_BYTES = 10**6  # for each thread
_CPU_MOST = 3 * _CPU_WIDTH**2 * 4
_CUDA_ENTRIES = 2**26
_CUDA_SHARE = 16  # a CUDA tile may take one part in so many of the free memory
_LEAST_ENTRIES = 2**12

Shape = tuple[int, int]
Piece = tuple[slice, slice, bool]  # rows and columns of a tile, and whether its mirror image is to be taken from it
Result = TypeVar("Result")
logger = logging.getLogger("sketchgp")
_shrunk: dict[torch.device, int] = {}  # halvings of the tile after running out of memory, for the rest of the process


def tile_shape(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, batch: int = 1, buffers: int = 1
) -> Shape:
    """Rows and columns of a tile of a ``(rows, columns)`` matrix.

    :param batch: matrices that are cut at once.
    :param buffers: pairs of buffers of a tile's size that are in use at once.
    """
    if device.type == "cuda":
        entries = min(_CUDA_ENTRIES, available_memory(device) // (_CUDA_SHARE * dtype.itemsize))
        widest = max(int(entries**0.5), 1)
    else:
        entries, widest = min(_CPU_BYTES * torch.get_num_threads(), _CPU_MOST) // dtype.itemsize, _CPU_WIDTH
    shrunk = _shrunk.get(device, 0)
    entries = max((entries >> shrunk) // max(buffers * batch, 1), _LEAST_ENTRIES >> shrunk, 1)
    width = max(min(columns, widest, int(entries**0.5)), 1)
    height = max(min(rows, entries // width), 1)
    if width < height < rows:
        height -= height % width  # whole squares along the diagonal
    if height == rows:  # few rows: the tile may be wider
        width = max(min(columns, entries // height, max(widest, _LEAST_ENTRIES // height)), 1)
    return height, width


def spans(length: int, step: int, first: int = 0) -> Iterator[slice]:
    """Consecutive slices of at most ``step`` that cover ``range(first, length)``."""
    for start in range(first, length, step):
        yield slice(start, min(start + step, length))


def pieces(rows: int, columns: int, shape: Shape, half: bool, within: slice | None = None) -> Iterator[Piece]:
    """The tiles of a ``(rows, columns)`` matrix.

    :param half: of a symmetric matrix, only tiles that make it up together with their mirror images: square ones
        along the diagonal, and those to the right of them.
    :param within: rows, to which all tiles belong; None for all.
    """
    within = slice(0, rows) if within is None else within
    for down in spans(within.stop, shape[0], within.start):
        start = 0
        if half:
            for part in spans(down.stop, shape[1], down.start):
                for across in spans(down.stop, shape[1], part.start):
                    yield part, across, across.start > part.start
            start = down.stop
        for across in spans(columns, shape[1], start):
            yield down, across, half


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out += left @ right``, of matrices without a temporary."""
    if out.dim() == 2:
        out.addmm_(left, right)
    else:
        out += left @ right


def padded(x: Tensor) -> Tensor:
    """``x`` (..., n, t) with columns of zeros up to a multiple of 16, where that makes products with it faster.

    On CPUs a product with 16 columns takes less than half the time of one with 3 to 12 (MKL).
    """
    t = x.shape[-1]
    if x.device.type != "cpu" or t == 1 or t % 16 == 0:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:-1], -t % 16)], dim=-1)


def shrinking(device: torch.device, shape: Callable[[], Shape], compute: Callable[[Shape], Result]) -> Result:
    """``compute(shape())``, repeated with smaller tiles as often as memory runs out.

    A long solve goes on that way, with a line in the log, instead of ending.  Where no tile is small enough, it was not
    the tiles that took the memory, and they are left as they were.
    """
    before = _shrunk.get(device, 0)
    while True:
        tile = shape()
        try:
            return compute(tile)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if tile[0] * tile[1] <= 1:
                _shrunk[device] = before
                raise
            message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        # Outside the except block, so that the frames which hold the old buffers are gone.
        _shrunk[device] = _shrunk.get(device, 0) + 2
        if device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning("Out of memory with tiles of %d x %d on %s; going on with a quarter of it (%s)",
                       *tile, device, message)  # fmt: skip


_FEW = 64  # columns up to which a product is thin
GROUP = 4  # of columns, that matrix products take at once
_ROWS = 512  # of the matrix, that one of a batch of products takes


def thin_product(matrix: Any, vectors: Tensor) -> Tensor:
    """``matrix @ vectors`` for ``matrix`` ``(..., p, q)``, or the transpose of one, and vectors ``(..., q, t)``.

    A matrix that is no tensor (rows that several ranks hold) multiplies as it does.  On a CPU it is the transpose of
    ``vectors^T matrix^T``, with columns of zeros up to a multiple of four, and by rows some at a time where each lies
    in memory as one.  On two cores of an AMD EPYC: of 12,000 x 12,000 float32 numbers and 11 columns 0.044 s where the
    plain product takes 0.12 (one thread: 0.082 and 0.24); of 40,000 x 1,774 float64 numbers, by rows or by columns,
    0.05 to 0.07 s where it takes 0.07 to 0.3, and up to 2.8 s with vectors that lie column by column.
    """
    t = vectors.shape[-1]
    if (
        not isinstance(matrix, Tensor)
        or vectors.device.type != "cpu"
        or matrix.dim() != 2
        or vectors.dim() != 2
        or not 1 < t <= _FEW
    ):
        return matrix @ vectors
    rows = torch.nn.functional.pad(vectors.mT, (0, 0, 0, -t % GROUP)).contiguous()
    whole = len(matrix) // _ROWS * _ROWS
    if whole == 0 or matrix.stride(-1) != 1:
        return (rows @ matrix.mT)[:t].mT.contiguous()
    parts = torch.bmm(rows.expand(whole // _ROWS, *rows.shape), matrix[:whole].unflatten(0, (-1, _ROWS)).mT)
    result = vectors.new_empty(len(matrix), t)
    result[:whole].unflatten(0, (-1, _ROWS)).copy_(parts[:, :t].mT)
    if whole < len(matrix):
        result[whole:] = (rows @ matrix[whole:].mT)[:t].mT
    return result

"""``k(x, z)`` for many rows x and fewer columns z, by tiles of whole rows, and the normal matrix made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices import here, sent
from ..fingerprint import Memory
from ..memory import available_memory, out_of_memory
from ..row_sources import RowSource, blocks
from ..space import Space
from .centre import Centre
from .expression import Known
from .kernel_matrix import KernelMatrix
from .pairs import far_sides, known_of
from .tiles import logger, spans

_CPU_ENTRIES = 2**20  # of a tile: in float64 with its transposed product, still near the caches of two cores
_ROWS = 128  # of a tile: with fewer, distances of many features take longer; so it may then be four times as large
_CUDA_ENTRIES = 2**26
_CUDA_SHARE = 4  # a tile and its copies may take one part in so many of the free memory
_COPIES = 4  # of a tile in float64, at the most, as measured
_LEAST_ROWS = 16
_INPUTS = 2**22  # numbers of x that are prepared, and z anew beside them, for several tiles at once


def constant(matrix: KernelMatrix) -> KernelMatrix:
    """Return the matrix with the kernel's parameters as constants, differentiable in the inputs only."""
    return matrix.with_parameters([p.detach() for p in matrix.parameters])


def tile_rows(m: int, device: torch.device) -> int:
    """Rows of a tile of m columns that products do best with; on a device, as many as its free memory allows."""
    most = _CPU_ENTRIES
    if device.type == "cuda":
        most = min(_CUDA_ENTRIES, available_memory(device) // (_COPIES * _CUDA_SHARE * 8))
    return max(_LEAST_ROWS, most // m, min(_ROWS, 4 * most // m))


def tile_bytes(n: int, m: int, device: torch.device) -> int:
    """Memory that a product with an ``(n, m)`` matrix takes for tiles."""
    return _COPIES * 8 * m * min(n, tile_rows(m, device))


@dataclass
class Evaluated:
    """Work with a matrix and with its copies of other dtypes: entries of T, and products with Kzz by tiles."""

    entries: int = 0
    products: int = 0


class TallMatrix:
    """``T = k(x, z)``, ``(n, m)``, never stored: products with T, with its transpose, and with ``T^T T``, in float64.

    Entries are evaluated in the dtype of x; sums are float64.  So T is the same matrix in every product, and ``T^T T``
    positive semidefinite, to float64 rounding: float32 entries only perturb the kernel, by 1e-7 of itself.  What the
    kernel makes of x (and float64 copies of float32 inputs) is held for some rows at a time.  Where ranks work together
    (:func:`sketchgp.distributed.sharded`), each evaluates its own rows of x in products, ``entries`` counts those of
    all, and results are whole: n t numbers are gathered, or m t added up.

    :param kernel: a GPyTorch kernel without batch.
    :param x: ``(n, d)``, or a source of them; :param z: ``(m, d)``, of one dtype and device.
    :param weights: ``(n,)`` positive: the root of what each row counts; None for ones.  T is then ``diag(weights) k``.
    :param accurate: evaluate the entries in float64, whatever the dtype.
    :param evaluated: counts that another matrix shares.
    """

    def __init__(
        self,
        kernel: Any,
        x: Tensor | RowSource,
        z: Tensor,
        weights: Tensor | None = None,
        accurate: bool = False,
        evaluated: Evaluated | None = None,
    ) -> None:
        self.kernel, self.x, self.z, self.weights = kernel, x, z, weights
        self._accurate = accurate
        self.evaluated = Evaluated() if evaluated is None else evaluated
        self.pattern: KernelMatrix | None = None  # of one row, that all others are made after
        self._sides: list[list[Tensor]] | None = None  # on a device, which of x and z are far from the centre
        self.known: Known | None = None  # the same, of points that are some of another matrix'
        self._right: Tensor | None = None
        self.centre = self.centre_of(z)
        self.shape, self.device = (len(x), len(z)), x.device
        self.dtype = torch.float64 if accurate else x.dtype  # of the entries

    def accurate(self) -> TallMatrix:
        """Return T with float64 entries."""
        if self.dtype == torch.float64:
            return self
        return TallMatrix(self.kernel, self.x, self.z, self.weights, True, self.evaluated)

    def at(self, x: Tensor, z: Tensor, own: bool = True, centre: Centre | None = None) -> TallMatrix:
        """Return T for other points, without weights.

        The kernel is recognised and far points are looked for once, so that a device is not waited for at every batch.

        :param own: whether the points are rows of x and z.
        :param centre: of z; None where it is not known yet.
        """
        other = TallMatrix(self.kernel, x, z, accurate=self._accurate)
        other.pattern, other.known = self._like(), self._known(None) if own else None
        other.centre = centre or other.centre
        return other

    def centre_of(self, points: Tensor, rows: int | None = None) -> Centre:
        """Return the centre of points as the kernel sees them; ``rows`` as of :class:`Centre`."""
        return Centre(self._selected(points), rows=rows)

    def _selected(self, x: Any) -> Any:
        dims = self.kernel.active_dims
        return x if dims is None else x.index_select(-1, dims)

    def _like(self) -> KernelMatrix:
        if self.pattern is None:
            matrix = KernelMatrix.of(self.kernel, self.x[:1], self.z, engine="tiled").detach()
            self.pattern = matrix.type(torch.float64) if self._accurate else matrix
            if self.device.type != "cpu" and torch.is_tensor(self.x):
                self._sides = far_sides(self.pattern.pairs, self._selected(self.x), self._selected(self.z))
        return self.pattern

    def _known(self, rows: slice | Tensor | None) -> Known | None:
        """Return which of some rows of x, and of z, are far; None where the points have to be looked at.

        :param rows: slice or indices; None for other points, which have a centre of their own.
        """
        pairs = self._like().pairs
        if self._sides is None:
            return None
        if rows is not None:
            rows = here(rows) if torch.is_tensor(rows) else rows
            return known_of(pairs, [mask[rows] for mask in self._sides[0]], self._sides[1])
        return None if any(bool(mask.any()) for mask in self._sides[0]) else [None] * len(self._sides[0])

    def _matrix(self, x: Tensor, rows: slice | Tensor) -> KernelMatrix:
        """Return the kernel matrix of some rows of x.

        :param rows: their places in x.
        """
        matrix = self._like()
        if self._right is None:
            self._right = self._selected(self.z).to(matrix.dtype)
        part = matrix.at(self._selected(x).to(matrix.dtype), self._right, False, self.centre)
        part.pairs.known = self._known(rows) if self.known is None else self.known
        return part

    def _dense(self, matrix: KernelMatrix, weights: Tensor | None) -> Tensor:
        part = matrix.to_dense().to(torch.float64)
        self.evaluated.entries += matrix.shape.numel()
        return part if weights is None else part * weights.unsqueeze(1)

    @torch.no_grad()
    def part(self, rows: Tensor) -> Tensor:
        """``T[rows]`` for indices ``(r,)``, dense, float64."""
        return self._dense(self._matrix(self.x[rows], rows), None if self.weights is None else self.weights[rows])

    @torch.no_grad()
    def tiles(self, rows: int | None = None, within: slice | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Slices of rows and the tiles ``(rows, m)``, float64, in order.

        Where memory runs out as a tile is made, it and those after it have a quarter of the rows.

        :param rows: of a tile; None for what products do best with.
        :param within: the rows that are gone through; None for all.
        """
        n, m = self.shape
        within = slice(0, n) if within is None else within
        step, most = max(1, min(n, rows or tile_rows(m, self.device))), _INPUTS // max(1, self.x.shape[1])
        if isinstance(self.x, RowSource):
            step, most = min(step, self.x.block_rows), min(most, self.x.block_rows)
        together = step * max(1, most // step)
        for some, inputs in blocks(self.x, spans(within.stop, together, within.start)):
            matrix = self._matrix(inputs, some)
            start, count = 0, some.stop - some.start
            while start < count:
                stop = min(start + step, count)
                whole = slice(some.start + start, some.start + stop)
                indices = sent(torch.arange(start, stop), self.device)
                tile: Tensor | None = None
                try:
                    tile = self._dense(matrix.rows(indices), None if self.weights is None else self.weights[whole])
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error) or step <= _LEAST_ROWS:
                        raise
                if tile is None:  # outside the except block, so that the frames which hold buffers are gone
                    step = max(_LEAST_ROWS, step // 4)
                    logger.warning("Out of memory with %d rows of %d on %s; going on with %d", stop - start, m,
                                   self.device, step)  # fmt: skip
                    continue
                yield whole, tile
                start = stop

    @property
    def space(self) -> Space:
        """Rows of x, of the ranks that work together now."""
        return Space.of(self.shape[0])

    def own_tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield :meth:`tiles` of this rank's rows; sums over them are completed by the total of :attr:`space`."""
        space, (n, m) = self.space, self.shape
        yield from self.tiles(within=space.span)
        self.evaluated.entries += (n - space.height) * m

    def joined(self, values: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """All of ``(n, t)`` values of which each rank gives those of its rows, and the sum of parts ``(p, t)``:
        by one message, where few rows make waiting dearer than sending twice."""
        space, n = self.space, self.shape[0]
        if not space.shared:
            return values, part
        both = torch.cat([part, values.new_zeros(n, values.shape[1])])
        both[len(part) :][space.span] = values
        part, values = space.total(both).split([len(part), n])
        return values, part

    def own_matmul(self, vectors: Tensor) -> Tensor:
        """This rank's rows of ``T v``, float64."""
        own = self.space.span
        out = vectors.new_empty(own.stop - own.start, vectors.shape[-1])
        for span, tile in self.own_tiles():
            torch.matmul(tile, vectors, out=out[span.start - own.start : span.stop - own.start])
        return out

    def matmul(self, vectors: Tensor) -> Tensor:
        """``T v``: ``(m, t)`` to ``(n, t)``, float64."""
        return self.space.whole(self.own_matmul(vectors))

    def t_matmul(self, vectors: Tensor) -> Tensor:
        """``T^T v``: ``(n, t)`` to ``(m, t)``, float64."""
        out = vectors.new_zeros(self.shape[1], vectors.shape[-1])
        for span, tile in self.own_tiles():
            out.addmm_(tile.mT, vectors[span])
        return self.space.total(out)

    def gram(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``T^T (T v)`` and ``|T v|^2`` of each column: ``(m, t)`` to ``(m, t)`` and ``(t,)``, in one sweep."""
        out, squares = torch.zeros_like(vectors), vectors.new_zeros(vectors.shape[1])
        for _, tile in self.own_tiles():
            image = tile @ vectors
            squares += image.square().sum(dim=0)
            out.addmm_(tile.mT, image)
        if self.space.shared:
            both = self.space.total(torch.cat([out, squares.unsqueeze(0)]))
            out, squares = both[:-1], both[-1]
        return out, squares


class NormalMatrix:
    """``M = T^T T + level Kzz``, ``(m, m)`` float64, with ``T = diag(weights) k(x, z)`` by tiles.

    A product costs ``n m`` kernel evaluations, and ``m^2 / 2`` where Kzz goes by tiles too.  It takes O((n + m) t)
    memory beside one tile and what is stored of Kzz.  Not differentiable.

    :param kzz: the kernel matrix of the inducing points, float64, stored as ``(m, m)`` or by tiles.
    :param tall: T.
    :param level: the noise variance that ``weights`` refer to.
    """

    def __init__(self, kzz: Tensor | KernelMatrix, tall: TallMatrix, level: float) -> None:
        self.kzz, self.tall, self.level = kzz, tall, level
        self.shape, self.memory = (tall.shape[1], tall.shape[1]), Memory()

    @torch.no_grad()
    def kzz_matmul(self, rhs: Tensor) -> Tensor:
        """``Kzz v``, ``(m, t)`` float64."""
        if isinstance(self.kzz, Tensor):
            return self.kzz @ rhs
        self.tall.evaluated.products += 1
        return self.kzz.product(rhs)

    @torch.no_grad()
    def residual(self, targets: Tensor, vectors: Tensor) -> Tensor:
        """``T^T y - M v``, ``(m, t)``, as ``T^T (y - T v) - level Kzz v``: rounded in the size of what is left of y."""
        out = torch.zeros_like(vectors)
        for span, tile in self.tall.own_tiles():
            out.addmm_(tile.mT, targets[span] - tile @ vectors)
        return self.tall.space.total(out).sub_(self.kzz_matmul(vectors), alpha=self.level)

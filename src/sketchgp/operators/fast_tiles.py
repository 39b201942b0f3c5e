"""Fast tiles: kernels made of functions of distances (see :mod:`sketchgp.operators.expression`).

A tile's distances (:mod:`sketchgp.operators.distances`) are followed by in-place arithmetic in buffers that are reused
from tile to tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .distances import Distances
from .expression import Expression, Prepared


class FastTiles:
    """Tiles of ``k(x1, x2)`` for a recognised kernel.

    :param prepared: features and coefficients.
    :param shape: the largest rows and columns of a tile.
    :param same: whether x1 and x2 are the same points: distances on the diagonal are then exactly 0.
    :param coincident: ``(2, p)`` rows and columns of further pairs at distance exactly 0, each once; or a number k,
        where these are all ``(i, i + k)``.
    """

    def __init__(
        self,
        expression: Expression,
        prepared: Prepared,
        shape: tuple[int, int],
        same: bool,
        coincident: Tensor | int | None = None,
    ) -> None:
        self.expression, self.same = expression, same
        self.coincident = coincident if torch.is_tensor(coincident) else None
        self.diagonal = 0 if same else coincident if isinstance(coincident, int) else None
        self.features = prepared.features
        self.coefficients = prepared.coefficients  # (*b, T), with the constants that the profiles leave out
        gains = []
        for term in expression.terms:
            gain = 1.0
            for atom in term:
                gain *= expression.atoms[atom].profile.gain
            gains.append(gain)
        self.gains = gains
        self.batch = self.coefficients.shape[:-1]
        self.distances = [Distances(a.profile, f) for a, f in zip(expression.atoms, self.features, strict=True)]
        self._entries = shape[0] * shape[1] * self.batch.numel()
        self._buffers: list[Tensor] = []
        self._taken = 0
        scaled = [self.coefficients[..., t] * gain for t, gain in enumerate(gains)]
        self.weights = [c.reshape(*self.batch, 1, 1) if len(self.batch) else c for c in scaled]

    @property
    def single(self) -> bool:
        """Whether the kernel is one function of one distance times a scale."""
        return self.expression.terms == ((0,),)

    @property
    def outputscale(self) -> Tensor | None:
        """What the tiles are still to be multiplied by, ``()`` or ``(B, 1, 1)``; None where they are complete."""
        return self.weights[0] if self.single else None

    def take(self, rows: slice, columns: slice) -> Tensor:
        """A buffer of a tile's shape, free until the next tile."""
        if self._taken == len(self._buffers):
            self._buffers.append(self.coefficients.new_empty(self._entries))
        shape = (*self.batch, rows.stop - rows.start, columns.stop - columns.start)
        self._taken += 1
        return self._buffers[self._taken - 1][: torch.Size(shape).numel()].view(shape)

    def _last(self, rows: slice, columns: slice) -> Tensor:
        """The buffer that ``take`` gives next."""
        buffer = self.take(rows, columns)
        self._taken -= 1
        return buffer

    def distance(self, atom: int, rows: slice, columns: slice) -> Tensor:
        t = self.distances[atom].tile(rows, columns, self.take(rows, columns), lambda: self._last(rows, columns))
        if self.diagonal is not None:  # entries of the diagonal are exactly at distance 0
            first, shift = rows.start, rows.start + self.diagonal - columns.start
            start, stop = max(0, -shift), min(rows.stop - first, columns.stop - columns.start - shift)
            if start < stop:
                t[..., start:stop, start + shift : stop + shift].diagonal(dim1=-2, dim2=-1).zero_()
        if self.coincident is not None:
            i, j = self.coincident
            if self._is_whole(rows, columns):
                t[..., i, j] = 0
                return t
            inside = (i >= rows.start) & (i < rows.stop) & (j >= columns.start) & (j < columns.stop)
            if t.device.type == "cpu":
                t[..., i[inside] - rows.start, j[inside] - columns.start] = 0
                return t
            # a device would have to tell how many there are: so of all pairs, those elsewhere add 0 to some entry
            i, j = (i - rows.start).clamp(0, t.shape[-2] - 1), (j - columns.start).clamp(0, t.shape[-1] - 1)
            t.view(*self.batch, -1).index_add_(-1, i * t.shape[-1] + j, torch.where(inside, -t[..., i, j], 0))
        return t

    def _is_whole(self, rows: slice, columns: slice) -> bool:
        """Whether a tile is the whole matrix."""
        f = self.features[0]
        return (rows.start, rows.stop, columns.start, columns.stop) == (0, f.left.shape[-2], 0, f.right.shape[-2])

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """The tile without the ``outputscale``, in a buffer that the next call overwrites."""
        self._taken = 0
        values = []
        for number, atom in enumerate(self.expression.atoms):
            t = self.distance(number, rows, columns)
            values.append(atom.profile.value(t, self.take(rows, columns), self.features[number].alpha))
        if self.single:
            return values[0]
        out = self.take(rows, columns).zero_()
        spare = self.take(rows, columns)
        for weight, term in zip(self.weights, self.expression.terms, strict=True):
            if not term:
                out += weight
            else:
                out.addcmul_(multiply([values[a] for a in term], spare), weight)
        return out


def multiply(factors: list[Tensor], out: Tensor) -> Tensor:
    """The elementwise product of one or more tensors; a single one is returned as it is."""
    if len(factors) == 1:
        return factors[0]
    torch.mul(factors[0], factors[1], out=out)
    for factor in factors[2:]:
        out.mul_(factor)
    return out

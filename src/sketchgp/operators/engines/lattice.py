"""The engine ``"lattice"``: exact products in n log n where points lie on a regular lattice, with gaps.

A recognised kernel is a function of differences, and even in each of them.  With points ``x_i = o + h j_i`` for
integers j, ``k(x_i, x_l) = c[|j_i - j_l|]``, and with S, which puts rows into cells of a grid,

    K v = S1^T F^-1 (F c * F S2 v),

where the transform F is of ``M_k >= 2 N_k - 1`` points along each of the N_k cells, so that nothing wraps around.  Gaps
cost nothing.  A derivative is one correlation for all hyperparameters,

    u^T dK v = sum_tau R[tau] dc[tau],    R = F^-1 (F S1 u * conj(F S2 v)).

Coordinates of tables were rounded, and lie beside their cells: ``x_i = o + h j_i + e s_i``, with ``|s_i| <= 1/2`` along
each coordinate and e below 0.002 h.  Then k is a polynomial of second order in ``s_i - s_l`` whose coefficients are
functions of ``j_i - j_l``, found by differences of k over e.  Written out in powers of s_i and s_l it takes a transform
for each power whose coefficient is more than rounding.  It is off by ``(e / h)^3`` or so.  Where it is off by more than
1e-8 of k(0), as for a period far below h, tiles take its place.  Derivatives are taken as if s were zero.

Everything is computed in float64.

Reference: Wood and Chan, "Simulation of stationary Gaussian processes in [0, 1]^d" (1994), for the embedding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from ...settings import memory_budget
from ..centre import Centre
from ..pairs import Pairs
from ..tiles import spans
from .base import Engine, Gradients
from .tiled import TILED

_SORTED = 500  # entries of a tile that take as long as looking at a point
_POINT = 50  # entries of a tile that take as long as a point of a grid, of a few columns
_COLUMNS = (10, 100)  # such few, and so many that evaluating the entry takes no time beside multiplying by it
_AXES = 3  # coordinates with more than one value, at the most
_BYTES = 128  # of a point of a grid, its transform and the kernel's values, in products and derivatives
_POINTS = 2**20  # of grids that are transformed at once: more do not fit caches
_EXACT = {torch.float32: 1e-6, torch.float64: 1e-11}  # of a step, that coordinates may be off and count as cells
_BESIDE = 1e-3  # of a step, that coordinates of a table may be off
_ROUNDED = 4  # roundings between values that may be meant to be one
_WRONG = 1e-8  # of k(0), that the polynomial may be off
_NOTHING = {torch.float32: 1e-9, torch.float64: 1e-14}  # of k(0): terms that are nowhere larger are left out
_FINER = 4  # times as many cells that an exact lattice may have
_DIVISORS = 6  # smaller steps that are tried
# of values at some shifts, in units of the reach: what a coefficient of a power of one coordinate is made of
_DIFFERENCES = (((0, 1.0),), ((-1, -0.5), (1, 0.5)), ((-1, 0.5), (0, -1.0), (1, 0.5)))

Powers = tuple[int, ...]  # of the offsets s, one number for each coordinate


@dataclass(frozen=True)
class Side:
    """Where some rows lie.

    :ivar cells: ``(n,)``, counted along the last coordinate first; :ivar offsets: s, ``(n, d)``.
    """

    cells: Tensor
    offsets: Tensor

    def power(self, powers: Powers) -> Tensor:
        """Return the product of powers of the offsets, ``(n, 1)``."""
        return self.offsets.pow(torch.tensor(powers, device=self.cells.device)).prod(dim=1, keepdim=True)

    def rows(self, rows: Tensor | slice) -> Side:
        """Return some of the rows."""
        return Side(self.cells[rows], self.offsets[rows])


@dataclass(frozen=True)
class Grid:
    """Cells of a lattice in which the rows of x1 and x2 lie.

    :ivar left: rows of x1; :ivar right: rows of x2.
    :ivar steps: h, of each coordinate, 0 where it has one value; :ivar sizes: N; :ivar reach: e.
    """

    left: Side
    right: Side
    steps: tuple[float, ...]
    sizes: tuple[int, ...]
    reach: tuple[float, ...]

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """M of each coordinate."""
        from scipy.fft import next_fast_len  # a tenth of the time of importing the package

        return tuple(1 if size == 1 else next_fast_len(2 * size - 1, real=True) for size in self.sizes)

    @cached_property
    def powers(self) -> list[Powers]:
        """Return the powers of offsets that products are made of, up to the second order."""
        orders = [range(3 if e else 1) for e in self.reach]
        return [powers for powers in itertools.product(*orders) if sum(powers) <= 2]

    @property
    def points(self) -> int:
        """Points of all grids that a product with a vector transforms, and transforms back, at the most."""
        return math.prod(self.padded) * len(self.powers)

    def batches(self, columns: int) -> Iterator[slice]:
        """Return spans of columns that are transformed at once."""
        return spans(columns, max(1, _POINTS // math.prod(self.padded)))

    def transform(self, side: Side, columns: Tensor) -> Tensor:
        """Return ``F S v`` for columns ``(n, t)`` float64, ``(t, ...)``."""
        grid = columns.new_zeros(columns.shape[1], math.prod(self.sizes)).index_add_(1, side.cells, columns.mT)
        return torch.fft.rfftn(grid.reshape(-1, *self.sizes), s=self.padded)

    def back(self, transformed: Tensor) -> Tensor:
        """Return ``F^-1`` of ``(t, ...)``, in the padded grid."""
        return torch.fft.irfftn(transformed, s=self.padded)

    def at(self, side: Side, grid: Tensor) -> Tensor:
        """Return the values ``(n, t)`` of padded grids ``(t, ...)`` in the cells of rows."""
        within = (slice(None), *map(slice, self.sizes))
        return grid[within].flatten(1).index_select(1, side.cells).mT

    def whole(self, half: Tensor, powers: Powers) -> Tensor:
        """Return the padded grid of values ``(N_1, ...)`` at differences from 0 on, odd in each odd power."""
        for axis, (size, padded, power) in enumerate(zip(self.sizes, self.padded, powers, strict=True)):
            place = torch.arange(padded, device=half.device)
            half = half.index_select(axis, torch.minimum(place, padded - place).clamp(max=size - 1))
            if power % 2:
                half.narrow(axis, padded - size + 1, size - 1).neg_()
        return half

    def folded(self, grid: Tensor) -> Tensor:
        """Return the sum of the values of a padded grid at differences of each size, ``(N_1, ...)``."""
        for axis, size in enumerate(self.sizes):
            half = grid.narrow(axis, 0, size).clone()
            if size > 1:
                mirrored = grid.narrow(axis, grid.shape[axis] - size + 1, size - 1).flip(axis)
                half.narrow(axis, 1, size - 1).add_(mirrored)
            grid = half
        return grid

    def differences(self, device: torch.device) -> Tensor:
        """Return ``h tau`` of all cells, ``(N_1 ... N_d, d)`` float64."""
        sides = [
            step * torch.arange(size, dtype=torch.float64, device=device)
            for step, size in zip(self.steps, self.sizes, strict=True)
        ]
        return torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).reshape(-1, len(sides))


class Lattice(Engine):
    """Products by fast Fourier transforms, in memory of some grids for each column."""

    name = "lattice"

    def missing(self, pairs: Pairs) -> str | None:
        if pairs.expression is None or pairs.flat_batch or pairs.sources:
            return "it takes one matrix in memory, of a kernel with fast tiles"
        if pairs.ranks() is not None:
            return "several ranks work together"
        if pairs.x1.requires_grad or pairs.x2.requires_grad:
            return "inputs have gradients"
        if self.grid(pairs) is None:
            return f"the points lie on no regular lattice of at most {_AXES} coordinates that fits the memory budget"
        return None

    def serves(self, pairs: Pairs, columns: int = 1) -> bool:
        """Return whether products with so many columns take less time than by tiles."""
        entries, (few, many) = math.prod(pairs.shape), _COLUMNS
        if entries < _SORTED * sum(pairs.shape) or self.missing(pairs) is not None:
            return False
        return _POINT * self.found(pairs).points * min(max(columns, few), many) <= entries * few

    def grid(self, pairs: Pairs) -> Grid | None:
        """Return the cells of the points; None where they lie on no lattice that is small enough."""
        return pairs.memory.remember("grid", lambda: _grid(self, pairs), (pairs.x1, pairs.x2))

    def found(self, pairs: Pairs) -> Grid:
        """Return the cells of points that lie on a lattice."""
        grid = self.grid(pairs)
        assert grid is not None
        return grid

    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        grid, spectra = self.found(pairs), self._spectra(pairs)
        if spectra is None:
            return TILED.product(pairs, rhs)
        needed = [powers for powers in grid.powers if any(_above(powers, spectra))]
        left, right = ({p: side.power(p) for p in needed} for side in (grid.left, grid.right))
        result = torch.zeros(pairs.shape[-2], rhs.shape[-1], dtype=torch.float64, device=rhs.device)
        for some in grid.batches(rhs.shape[-1]):
            columns = rhs[:, some].to(torch.float64)
            moved = {p: grid.transform(grid.right, columns * right[p]) for p in needed}
            for powers in needed:
                terms = [spectra[total] * number * moved[rest] for total, rest, number in _above(powers, spectra)]
                result[:, some] += left[powers] * grid.at(grid.left, grid.back(sum(terms[1:], terms[0])))
        return result.to(rhs.dtype)

    def derivative(self, pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
        grid = self.found(pairs)
        if any(grid.reach) and self._spectra(pairs) is None:
            return TILED.derivative(pairs, left, right)
        total = torch.zeros((), dtype=torch.float64, device=left.device)
        for some in grid.batches(left.shape[-1]):
            sides = ((grid.left, left), (grid.right, right))
            u, v = (grid.transform(side, vectors[:, some].to(torch.float64)) for side, vectors in sides)
            total = total + (u * v.conj()).sum(dim=0)
        weights = grid.folded(grid.back(total.unsqueeze(0)).squeeze(0)).reshape(-1, 1)
        lags = _lags(pairs, grid.differences(pairs.device))
        found = TILED.derivative(lags, weights, torch.ones_like(weights[:1]))
        of_parameters = [None if g is None else g.to(p.dtype) for g, p in zip(found[2:], pairs.parameters, strict=True)]
        return (None, None, *of_parameters)

    def _spectra(self, pairs: Pairs) -> dict[Powers, Tensor] | None:
        """Return what :func:`_spectra` does, remembered; rows of other pairs share what those remember."""
        whole = _whole(pairs) or pairs
        return whole.remember("spectra", lambda: _spectra(whole, self.found(whole)))


def _above(powers: Powers, known: Iterable[Powers]) -> Iterator[tuple[Powers, Powers, float]]:
    """Yield powers a of ``s_i - s_l`` with ``s_i^b`` in them, a - b, and the number that stands before that product."""
    for total in known:
        rest = tuple(a - b for a, b in zip(total, powers, strict=True))
        if min(rest, default=0) >= 0:
            number = math.prod(math.comb(a, b) for a, b in zip(total, powers, strict=True))
            yield total, rest, float(number * (-1) ** sum(rest))


@torch.no_grad()
def _spectra(pairs: Pairs, grid: Grid) -> dict[Powers, Tensor] | None:
    """Return ``F c`` of the coefficient of each power of ``s_i - s_l``; None where the polynomial is too far off."""
    differences, reach = grid.differences(pairs.device), grid.reach

    def moved(shift: Tensor) -> Tensor:
        lags = _lags(pairs, differences + shift.to(differences) * differences.new_tensor(reach))
        return TILED.dense(lags).reshape(grid.sizes)

    at = cache(lambda shift: moved(torch.tensor(shift)))  # several coefficients are differences of the same values
    # points of one cell along a coordinate have the same offset there
    result, between = {}, (0.4 - 0.1 * torch.arange(len(reach))).to(differences) * (differences > 0)
    left = moved(between) if any(reach) else None
    scale = float(at((0,) * len(reach)).flatten()[0])
    nothing = _NOTHING[pairs.compute_dtype] * scale
    for powers in grid.powers:
        values = torch.zeros(grid.sizes, dtype=torch.float64, device=pairs.device)
        for points in itertools.product(*(_DIFFERENCES[power] for power in powers)):
            shift, numbers = zip(*points, strict=True)
            values += math.prod(numbers) * at(shift)
        if any(powers) and float(values.abs().max()) <= nothing:
            continue
        result[powers] = torch.fft.rfftn(grid.whole(values, powers))
        if left is not None:
            left -= values * between.pow(torch.tensor(powers).to(between)).prod(dim=1).reshape(grid.sizes)
    if left is not None and float(left.abs().max()) > _WRONG * scale:
        return None
    return result


def _lags(pairs: Pairs, differences: Tensor) -> Pairs:
    """Return the pairs of some differences and 0, in float64."""
    parameters = [p.detach().to(torch.float64).requires_grad_(p.requires_grad) for p in pairs.parameters]
    origin = torch.zeros_like(differences[:1])
    return pairs.of([differences, origin, *parameters], engine="tiled", same=False, centre=Centre(origin))


def _whole(pairs: Pairs) -> Pairs | None:
    """Return the pairs that these are rows of, with the same columns; None for no such."""
    whole, rows = pairs.whole or (None, None)
    return whole if whole is not None and whole.x2 is pairs.x2 and rows is not None and rows.dim() == 1 else None


# --- finding the lattice ----------------------------------------------------------------------------------------------


@torch.no_grad()
def _grid(engine: Lattice, pairs: Pairs) -> Grid | None:
    whole = _whole(pairs)
    if whole is not None:
        grid = engine.grid(whole)
        assert pairs.whole is not None and pairs.whole[1] is not None
        return None if grid is None else replace(grid, left=grid.left.rows(pairs.whole[1]))
    points = (pairs.x2 if pairs.same else torch.cat([pairs.x1, pairs.x2])).detach()
    points = points.to(pairs.compute_dtype)
    if not points.numel() or not bool(torch.isfinite(points).all()):
        return None
    limits = memory_budget.value(pairs.device) // _BYTES, math.prod(pairs.shape) // _POINT
    most = max(1, limits[0] if pairs.asked else min(limits))
    cells, offsets = torch.zeros(len(points), dtype=torch.long, device=points.device), []
    steps, sizes, reach = [], list[int](), []
    for values in points.unbind(dim=1):
        axis = _axis(values, most)
        if axis is None or math.prod(sizes) > most:
            return None
        place, step, off = axis
        steps.append(step)
        sizes.append(int(place.max()) + 1)
        reach.append(0.0 if off is None else 2 * float(off.abs().max()))
        cells = cells * sizes[-1] + place
        offsets.append(torch.zeros_like(values) if off is None else off / reach[-1])
    if math.prod(sizes) > most or sum(size > 1 for size in sizes) > _AXES:
        return None
    both = Side(cells, torch.stack(offsets, dim=1))
    left = both if pairs.same else both.rows(slice(len(pairs.x1)))
    right = both if pairs.same else both.rows(slice(len(pairs.x1), None))
    grid = Grid(left, right, tuple(steps), tuple(sizes), tuple(reach))
    return grid if grid.points <= most else None


def _axis(values: Tensor, most: int) -> tuple[Tensor, float, Tensor | None] | None:
    """Return integers j ``(n,)`` from 0 on with ``values = o + h j + off``, h and off; None where there are none.

    ``off`` is None where it is next to nothing; else it is a function of j.
    """
    exact, rounding = _EXACT[values.dtype], _ROUNDED * torch.finfo(values.dtype).eps
    levels, level = values.double().unique(return_inverse=True)
    gaps = levels.diff()
    apart = gaps > rounding * torch.maximum(levels[1:].abs(), levels[:-1].abs())
    if not bool(apart.any()):
        return (torch.zeros_like(level), 0.0, None) if len(levels) == 1 else None
    found, least = None, float(gaps[apart].min())
    for beside in (_BESIDE, exact):
        step = _divisor(gaps[apart], beside * least, float(levels[-1] - levels[0]) / most)
        if step is None:
            continue
        places = torch.nn.functional.pad(torch.where(apart, (gaps / step).round(), 0).cumsum(0), (1, 0))
        centred = places - places.mean()
        slope = float(centred @ levels / centred.square().sum())
        off = levels - levels.mean() - slope * centred
        largest = float(off.abs().max()) / slope
        if largest <= exact and float(places[-1]) < most:
            return places.long()[level], slope, None
        if beside == _BESIDE and largest <= beside and float(places[-1]) < most and bool(apart.all()):
            found = places.long()[level], slope, off[level]
            most = _FINER * int(places[-1])  # an exact lattice is as good, unless it has far more cells
    return found


def _divisor(gaps: Tensor, tolerance: float, least: float) -> float | None:
    """Return the largest step of which all gaps are multiples, as far as can be told; None where it is too small."""
    step = float(gaps.min())
    for _ in range(_DIVISORS):
        alike = gaps[(gaps - step).abs() <= 4 * tolerance]
        step = float(alike.mean()) if len(alike) else step
        if step <= max(least, 8 * tolerance):
            return None
        counts = (gaps / step).round()
        rest = (gaps - counts * step).abs()
        left = rest > 4 * tolerance * (1 + counts)
        if not bool(left.any()):
            return step
        step = float(rest[left].min())
    return None

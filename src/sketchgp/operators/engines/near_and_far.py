"""The engine ``"near_and_far"``: products in n log n for scattered points in one to three dimensions, to a tolerance.

Matern kernels of smoothness nu are mixtures of Gaussians.  With r the distance of scaled inputs,

    k(r) = 1 / Gamma(nu) int_0^inf t^(nu - 1) exp(-t - r^2 / 4t) dt.

The integral is split at ``t = delta^2``.  What lies below is the *near* part, which falls like
``exp(-r^2 / 4 delta^2)``.  It becomes a sparse matrix of the pairs closer than some ``r_c``, found by a k-d tree.  The
rest, the *far* part, is a smooth function.  It is multiplied by a window that falls from 1 to 0 beyond all differences
of points, and continued periodically.  Its Fourier coefficients c give ``F* (c * F v)`` with two non-uniform transforms
F.  Both parts and their slopes are known in closed form.  They are even in each coordinate, so that cosines give c.
RBF kernels are a single Gaussian, which is near or far as a whole.  Delta is chosen by predicted cost.

Beside rounding, an entry is off by at most the sum of five numbers, each kept below a fifth of the tolerance:

- the near part at ``r_c``, beyond which it is less;
- the sum of the sizes of the coefficients that are left out, from a grid twice as fine;
- what the window takes from the far part;
- the far part at the distance from which on it is taken for 0;
- the error of the transforms: four times their tolerance times the sum of the sizes of all c.

A product is off by at most this number times the sum of the sizes of the vector.  Coefficients beyond the finer grid
are smaller than all others by orders of magnitude, and not counted.  The tolerance of the transforms is what their
library aims at, not a theorem.

References: Ewald, "Die Berechnung optischer und elektrostatischer Gitterpotentiale" (1921), for the split; Potts,
Steidl and Nieslony, "Fast convolution with radial kernels at nonequispaced knots" (2004), for the window; Barnett,
Magland and af Klinteberg, "A parallel nonuniform fast Fourier transform library" (2019), for the transforms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...settings import memory_budget
from ..pairs import Pairs
from ..tiles import spans
from .base import Engine, Gradients, Live, installed
from .fused import FUSED

_NU = {"gauss": math.inf, "matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}  # of k(0), that an entry may be off
_PARTS = 5  # of the error, each a share of the tolerance
_AXES = 3  # coordinates with more than one value, at the most
_BEYOND = 64.0  # scaled distance at which all kernels are 0
_BYTES = (24, 128)  # of a pair of near points, and of a coefficient, with what they are made of
_SAMPLE = 200  # rows whose neighbours are counted
_PAIRS = 2**18  # pairs of near points that are looked for at once
_CUTOFFS = (1.0, 1.1, 1.3, 1.6, 2.0)  # times the expected one, until it leaves out little enough
# Nanoseconds on one thread of an AMD EPYC: of a pair of near points, of a point and of a coefficient in one to three
# dimensions, in a transform of two columns (in float64: double); of making a pair and a coefficient; of all the rest;
# of an entry of a float32 tile, with its mirror image.
_NEAR, _POINT, _MODE = 0.6, (25, 70, 250), (20, 45, 80)
_MADE, _REST, _ENTRY = (80, 400), 1e8, 0.3
_USES = 20  # products of a square matrix; others are multiplied once
_TRANSFORM = Lock()  # before version 2.5 finufft gives wrong sums to threads that share a plan
_COLUMNS = 10  # of a product by tiles, that take as long as evaluating the entries


@dataclass(frozen=True)
class Split:
    """A kernel that is 1 at 0, split in two.

    :ivar nu: smoothness of the Matern kernel, infinite for RBF; :ivar t: delta squared; RBF is not split, and t is 0
        or infinite.
    """

    nu: float
    t: float

    def at(self, q: Tensor, near: bool) -> tuple[Tensor, Tensor]:
        """Return the near or the far part and its slope at squared distances."""
        if self.t in (0, math.inf) and near != (self.t > 0):
            return torch.zeros_like(q), torch.zeros_like(q)
        if self.nu == math.inf:
            value = torch.exp(-q / 2)
            return value, -value / 2
        r, sign, s = q.sqrt().clamp(min=1e-100), 1 if near else -1, math.sqrt(self.t)
        edge = rising = torch.zeros_like(q)
        falling = 2 * torch.exp(-r)
        if s in (0, math.inf):
            s = 0.0
        else:
            edge = sign * torch.exp(-self.t - (r / (2 * s)).square())
            rising = edge * torch.special.erfcx(r / (2 * s) + s)
            falling *= torch.special.erfc(sign * (r / (2 * s) - s)) / 2
        # integrals with nu - 1 and nu in place of nu, from -1/2 and 1/2 on
        less = (falling + rising) * math.sqrt(math.pi) / r
        value = (falling - rising) * (math.sqrt(math.pi) / 2)
        for order in np.arange(0.5, self.nu):
            less, value = value, order * value + r.square() / 4 * less - s ** (2 * order) * edge
        return value / math.gamma(self.nu), less / (-4 * math.gamma(self.nu))

    def radius(self, near: bool, level: float) -> tuple[float, float]:
        """Return a distance from which on a part is at most ``level``, and the part there."""
        most = min(_BEYOND, 16 * math.sqrt(self.t)) if near else _BEYOND
        r = torch.linspace(0, most, 4097, dtype=torch.float64)
        values = self.at(r.square(), near)[0]
        place = min(int((values > level).sum()), len(r) - 1)
        return float(r[place]), float(values[place])

    def cutoff(self, axes: int, level: float) -> float:
        """Return a frequency such that all larger ones of the far part add up to ``level`` in so many dimensions."""
        w, exponent = torch.logspace(-4, 12, 8001, dtype=torch.float64), self.nu + axes / 2
        kept, density = torch.ones_like(w), torch.exp(-w.square() / 2)
        if self.nu < math.inf:
            density = (1 + w.square()) ** -exponent
            kept = torch.special.gammaincc(torch.full_like(w, exponent), self.t * (1 + w.square()))
        density *= w**axes  # with respect to the logarithm of w
        above = (kept * density).flip(0).cumsum(0).flip(0) / density.sum()
        return float(w[min(int((above > level).sum()), len(w) - 1)])


@dataclass(frozen=True)
class Problem:
    """Points in scaled coordinates, and how the kernel is split.

    :ivar sides: of x1 and x2, ``(n, p)`` float64 in the order of a k-d tree; one tensor where they are the same.
    :ivar orders: which points stand where.
    :ivar axes: coordinates with more than one value; :ivar extents: the largest difference along each.
    :ivar split: the two parts; :ivar level: a share of the tolerance.
    :ivar cost: predicted nanoseconds of making what a product needs, and of a product with two columns.
    """

    sides: tuple[Tensor, Tensor]
    orders: tuple[Tensor, Tensor]
    axes: list[int]
    extents: Tensor
    split: Split
    level: float
    cost: tuple[float, float] = (math.inf, math.inf)

    @cached_property
    def reach(self) -> tuple[float, float]:
        """Distance from which on the near part is left out, and the near part there."""
        return self.split.radius(True, self.level)

    @cached_property
    def top(self) -> float:
        """Far part at distance 0; below the level it is left out."""
        return float(self.split.at(torch.zeros(1, dtype=torch.float64), False)[0])

    def period(self, frequency: float) -> Period:
        """Return the periods of the far part, for frequencies up to some one."""
        edge = 2.2 * math.sqrt(-math.log(self.level)) / frequency
        share = torch.tensor(1 - 2 * self.level / len(self.axes), dtype=torch.float64)
        width = 2 * edge * float(torch.special.erfinv(share))
        inner = self.extents.clamp(max=self.split.radius(False, self.level)[0])
        lengths = self.extents + inner + 2 * width
        sizes = 2 * (lengths * frequency / (2 * math.pi) + 1).ceil()
        return Period(inner + width / 2, edge, lengths, sizes)

    def priced(self, tree: Any, budget: int) -> Problem:
        """Return the problem with its cost, which is infinite where there is no memory."""
        axes, rows = len(self.axes), [len(side) for side in self.sides]
        modes = near = product = 0.0
        if self.top > self.level:
            modes = float(self.period(self.split.cutoff(axes, self.level)).sizes.prod())
            product = (1 + (self.level < 1e-8)) * (2 * _MODE[axes - 1] * modes + _POINT[axes - 1] * sum(rows))
        if self.reach[0] > 0 and _BYTES[1] * modes <= budget:
            sample = self.sides[0][:: max(1, rows[0] // _SAMPLE)]
            near = float(np.mean(tree.query_ball_point(sample, self.reach[0], return_length=True))) * rows[0]
        if _BYTES[0] * near + _BYTES[1] * modes > budget:
            return self
        made = _REST + _MADE[0] * near + _MADE[1] * modes
        return replace(self, cost=(made, product + 2 * _NEAR * near))


@dataclass(frozen=True)
class Period:
    """The window and the periods of the far part.

    :ivar ends: where the window is 1/2, along each axis; :ivar edge: over which it falls.
    :ivar lengths: of the periods; :ivar sizes: M, numbers of coefficients.
    """

    ends: Tensor
    edge: float
    lengths: Tensor
    sizes: Tensor


class Far:
    """Fourier coefficients of the far part, and the transforms.

    :ivar error: that an entry is off at the most.
    """

    def __init__(self, problem: Problem, threads: int) -> None:
        self.problem, self.threads, level = problem, threads, problem.level
        for factor in _CUTOFFS:
            self.period = problem.period(factor * problem.split.cutoff(len(problem.axes), level))
            self.sizes = [int(size) for size in self.period.sizes]
            self.kept = tuple(slice(0, size // 2) for size in self.sizes)
            sides = [torch.nn.functional.pad(torch.full((m - 1,), 2.0).double(), (1, 1), value=1) for m in self.sizes]
            # places in a period that each one of half a period stands for
            self.counts = torch.stack(torch.meshgrid(*sides, indexing="ij")).prod(dim=0)
            half = self._cosines(self.grid()[0])
            sums = half.abs() * self.counts
            total = float(sums[self.kept].sum())
            left_out = float(sums.sum()) - total
            if left_out <= level:
                break
        half = self._only_kept(half)
        for axis, size in enumerate(self.sizes):
            half = half.index_select(axis, torch.arange(-size // 2, size // 2).abs())
        self.coefficients, self.accuracy = half.numpy(), max(level / (4 * total), 1e-14)
        self.error = left_out + 2 * level + 4 * self.accuracy * total
        ends = torch.stack([end for side in problem.sides for end in side[:, problem.axes].aminmax(dim=0)])
        self.middle = (ends.amin(dim=0) + ends.amax(dim=0)) / 2
        self.plans: dict[tuple[int, int], Any] = {}

    def grid(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return windowed values and slopes of the far part on half a period of each axis, and the coordinates."""
        steps = self.period.lengths / self.period.sizes / 2
        sides = [step * torch.arange(size + 1) for step, size in zip(steps, self.sizes, strict=True)]
        places = list(torch.meshgrid(*sides, indexing="ij"))
        value, slope = self.problem.split.at(torch.stack(places).square().sum(dim=0), False)
        for place, end in zip(places, self.period.ends, strict=True):
            window = torch.special.erfc((place - end) / self.period.edge) / 2
            value, slope = value * window, slope * window
        return value, slope, places

    def _cosines(self, values: Tensor) -> Tensor:
        """Return Fourier coefficients of an even function, both on half a period."""
        from scipy.fft import dctn

        return torch.from_numpy(dctn(values.numpy(), type=1)) / (2.0 ** len(self.sizes) * math.prod(self.sizes))

    def _only_kept(self, half: Tensor) -> Tensor:
        result = torch.zeros_like(self.counts)
        result[self.kept] = half[self.kept]
        return result

    def transform(self, kind: int, side: int, numbers: Any) -> Any:
        """Return a sum over the points of a side (``kind`` 1), or over coefficients (2)."""
        import finufft

        with _TRANSFORM:
            if (kind, side) not in self.plans:
                options = {"eps": self.accuracy, "isign": 2 * kind - 3, "nthreads": self.threads}
                points = self.problem.sides[side][:, self.problem.axes] - self.middle
                plan = self.plans[kind, side] = finufft.Plan(kind, tuple(self.sizes), **options)
                plan.setpts(*(points * (2 * math.pi / self.period.lengths)).mT.contiguous().numpy())
            return self.plans[kind, side].execute(numbers)

    def product(self, vectors: Tensor) -> Tensor:
        """Return the product with vectors ``(m, t)``, in float64."""
        results = [self.transform(2, 0, self.transform(1, 1, v) * self.coefficients) for v in _complex(vectors)]
        return torch.cat([torch.view_as_real(torch.from_numpy(one)) for one in results], dim=1)[:, : vectors.shape[1]]

    def derivative(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return what :meth:`Parts.derivative` does, of the far part and its axes."""
        sums = torch.zeros(self.sizes, dtype=torch.float64)
        for u, v in zip(_complex(left), _complex(right), strict=True):
            sums += torch.from_numpy((self.transform(1, 0, u).conj() * self.transform(1, 1, v)).real)
        for axis, size in enumerate(self.sizes):
            shape = (*sums.shape[:axis], size + 1, *sums.shape[axis + 1 :])
            sums = sums.new_zeros(shape).index_add_(axis, torch.arange(-size // 2, size // 2).abs(), sums)
        weights = self._cosines(self._only_kept(sums) / self.counts) * self.counts  # the transposed of the cosines
        value, slope, places = self.grid()
        return (weights * value).sum(), torch.stack([2 * (weights * slope * place.square()).sum() for place in places])


class Parts:
    """Both parts of ``k(x1, x2)`` for a kernel that is 1 at distance 0.

    :ivar near: sparse; :ivar far: None where it is negligible.
    :ivar error: that every entry is off at the most.
    """

    def __init__(self, problem: Problem, threads: int, dtype: torch.dtype) -> None:
        from scipy.sparse import csr_matrix, vstack

        self.problem, size = problem, [len(side) for side in problem.sides]
        self.far = Far(problem, threads) if problem.top > problem.level else None
        self.error = problem.reach[1] + (problem.top if self.far is None else self.far.error)
        parts = []
        for rows, i, j, distances in self._close():
            values = problem.split.at(distances.square(), True)[0].to(dtype).numpy()
            parts.append(csr_matrix((values, (i - rows.start, j)), shape=(rows.stop - rows.start, size[1])))
        self.near = vstack(parts, format="csr") if parts else None

    def _close(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield spans of rows, and rows, columns and distances of their pairs of near points."""
        from scipy.spatial import cKDTree

        if self.problem.reach[0] == 0:
            return
        left, right = (side.numpy() for side in self.problem.sides)
        tree, done, step = cKDTree(right, balanced_tree=False), 0, 64
        while done < len(left):
            rows = slice(done, min(done + step, len(left)))
            some = cKDTree(left[rows], balanced_tree=False)
            pairs = some.sparse_distance_matrix(tree, self.problem.reach[0], output_type="ndarray")
            i, j, distances = (torch.from_numpy(np.ascontiguousarray(pairs[name])) for name in "ijv")
            yield rows, i + rows.start, j, distances
            done, step = rows.stop, max(1, min(4 * step, _PAIRS * step // max(1, len(pairs))))

    def product(self, vectors: Tensor) -> Tensor:
        """Return the product with vectors ``(m, t)``."""
        left, right = self.problem.orders
        vectors, result = vectors.index_select(0, right), vectors.new_zeros(len(left), vectors.shape[1])
        if self.near is not None:
            result += torch.from_numpy(self.near @ vectors.numpy())
        if self.far is not None:
            result += self.far.product(vectors)
        return torch.empty_like(result).index_copy_(0, left, result)

    def derivative(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sum_t u_t^T K v_t``, and its derivatives in the logarithms of the scales of the coordinates."""
        u, v = (s.double().index_select(0, order) for s, order in zip((left, right), self.problem.orders, strict=True))
        x1, x2 = self.problem.sides
        total, slopes = u.new_zeros(()), u.new_zeros(x1.shape[1])
        for _, i, j, distances in self._close():
            weights, (value, slope) = (u[i] * v[j]).sum(dim=1), self.problem.split.at(distances.square(), True)
            total += weights @ value
            slopes += 2 * (weights * slope) @ (x1[i] - x2[j]).square()
        if self.far is not None:
            value, slope = self.far.derivative(u, v)
            total, slopes = total + value, slopes.index_add(0, torch.tensor(self.problem.axes), slope)
        return total, slopes


def _complex(vectors: Tensor) -> Iterator[Any]:
    """Yield pairs of columns as the parts of complex numbers."""
    for some in spans(vectors.shape[1], 2):
        columns = torch.nn.functional.pad(vectors[:, some].double(), (0, 2 + some.start - some.stop)).contiguous()
        yield torch.view_as_complex(columns).numpy()


class NearAndFar(Engine):
    """Products by a sparse matrix and non-uniform fast Fourier transforms, in memory O(n + grid)."""

    name = "near_and_far"
    package = "the package finufft is missing (pip install 'sketchgp[maps]')"

    def absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return "it computes on the CPU"
        return None if installed("finufft") else self.package

    def unsuited(self, pairs: Pairs) -> str | None:
        """Return why such pairs cannot be taken, wherever their points lie, as half a sentence; None where they can."""
        expression = pairs.expression
        if expression is None or pairs.flat_batch or pairs.sources:
            return "it takes one matrix in memory, of a kernel with fast tiles"
        if len(expression.terms) != 1 or [atom.profile.name in _NU for atom in expression.atoms] != [True]:
            return "it takes an RBF or a Matern kernel, alone or scaled"
        if pairs.ranks() is not None:
            return "several ranks work together"
        return "inputs have gradients" if pairs.x1.requires_grad or pairs.x2.requires_grad else None

    def missing(self, pairs: Pairs) -> str | None:
        reason = self.unsuited(pairs) or self.absent(pairs.device, pairs.dtype)
        if reason is None and self.problem(pairs) is None:
            return f"it takes finite points of at most {_AXES} coordinates, with grids that fit the memory budget"
        return reason

    def serves(self, pairs: Pairs, columns: int = 1) -> bool:
        """Return whether products with so many columns take less time than in the other ways, and are as accurate."""
        uses = _USES if pairs.same else 1
        entries = math.prod(pairs.shape) * (_ENTRY if pairs.same else 2 * _ENTRY) * (1 + columns / _COLUMNS)
        entries *= FUSED.share(pairs) if FUSED.serves(pairs, columns) else 1.0
        if pairs.compute_dtype != torch.float32 or entries * uses < _REST or self.unsuited(pairs):
            return False
        if not self.takes(pairs):
            return False
        made, product = self.found(pairs).cost
        return made / uses + product * (-(-columns // 2)) <= entries

    def problem(self, pairs: Pairs) -> Problem | None:
        """Return the points, with the split of least predicted cost; None where they cannot be taken."""
        return pairs.remember("points of near and far", lambda: _problem(pairs))

    def found(self, pairs: Pairs) -> Problem:
        """Return the same of points that can be taken."""
        problem = self.problem(pairs)
        assert problem is not None
        return problem

    def parts(self, pairs: Pairs) -> Parts:
        """Return both parts of the matrix over k(0), remembered."""
        threads, dtype = torch.get_num_threads(), pairs.compute_dtype
        return pairs.remember("near and far", lambda: Parts(self.found(pairs), threads, dtype))

    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        return self.parts(pairs).product(rhs) * pairs.prepared().coefficients

    def derivative(self, pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
        live = Live(pairs)
        if live.prepared is None:
            return live.pull_back([])
        total, slopes = self.parts(pairs).derivative(left, right)
        weight, scale = live.prepared.features[0].weight, live.prepared.coefficients
        assert weight is not None
        of_weight = slopes * scale.detach() / weight.detach()
        return live.pull_back([(weight, of_weight.to(weight)), (scale, total.to(scale).reshape(scale.shape))])


@torch.no_grad()
def _problem(pairs: Pairs) -> Problem | None:
    from scipy.spatial import cKDTree

    assert pairs.expression is not None
    features = pairs.of([t.detach().double() for t in pairs.tensors], centre=pairs.centre).prepared().features[0]
    sides = [features.left] if pairs.same else [features.left, features.right]
    both = torch.cat(sides)
    if features.weight is None or not all(map(len, sides)) or not bool(both.isfinite().all()):
        return None
    extents = both.amax(dim=0) - both.amin(dim=0)
    axes = extents.nonzero()[:, 0].tolist() or [0]
    if len(axes) > _AXES:
        return None
    trees = [cKDTree(side.numpy(), balanced_tree=False) for side in sides]
    orders = [torch.from_numpy(tree.indices) for tree in trees]
    sides = [side[order] for side, order in zip(sides, orders, strict=True)]
    nu, level = _NU[pairs.expression.atoms[0].profile.name], _TOLERANCE[pairs.compute_dtype] / _PARTS
    spacing = float(extents[axes].clamp(min=1e-3).prod() / len(both)) ** (1 / len(axes))
    steps = [0.0] if nu == math.inf else [spacing**2 * 2.0**k for k in range(-8, 40)]
    best = problem = Problem((sides[0], sides[-1]), (orders[0], orders[-1]), axes, extents[axes], Split(nu, 0.0), level)
    uses, least = _USES if pairs.same else 1, math.inf
    for t in [*steps, math.inf]:
        other = replace(problem, split=Split(nu, t)).priced(trees[-1], memory_budget.value(pairs.device))
        total = other.cost[0] / uses + other.cost[1]
        if total < least:
            best, least = other, total
        elif total > 10 * least:
            break
    return best if least < math.inf else None

"""The automatic rank: columns are added while they pay, by the rest of the trace and fixed prices.

Nothing is timed, so that results do not depend on the clock: operations have prices, by device and dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..devices import float64_cost
from ..operators import KernelMatrix
from ..operators.access import Access, terms
from ..operators.engines import DENSE, FUSED, LATTICE, NEAR_AND_FAR, TILED, choose
from ..operators.nearby import nearby

_NEGLIGIBLE = 0.01  # of sum(residual / noise), below which the matrix is its diagonal to the probes, too
_LEAST = 10  # columns before which the decay of the trace says nothing
_BACK = 1.5  # the decay compares the trace with that of 1.5 times fewer columns
_SHARE = 0.5  # of n beyond which a factor costs what a Cholesky factorization of K would
# Iterations to a residual of 1e-3 are 3.5 (1 + 3 l / (1 + s))^0.4, where l is the largest eigenvalue of what is left
# and s the least, over the noise: s is 0.03 of their mean where the trace does not fall, and goes with exp(-10 decay).
# Fitted on 22 data sets of 2,500 rows, 3 kernels and noises of 0.1, 0.01 and 1e-4 (docs/methods/rpcholesky.md).
_FACTOR, _SPREAD, _POWER, _FLOOR, _FALL = 3.5, 3.0, 0.4, 0.03, 10.0


@dataclass(frozen=True)
class Prices:
    """Nanoseconds of the parts of a solve.

    :ivar flop: one of a float64 matrix product.
    :ivar apply: an entry of F in ``P^-1 v``, which reads it twice.
    :ivar stored: an entry of a stored float64 matrix in a product with one vector (float32: half).
    :ivar tile: one pass over an entry of a float32 tile, which a symmetric matrix uses twice (float64: double).
    :ivar point: a point of a float64 grid, which is transformed and transformed back.
    :ivar feature: one feature of the distance of an entry (float64: double).
    :ivar single: an entry of a column, beside two of a float64 tile.
    :ivar row: an entry of the inputs, in each round of columns.
    :ivar step: an iteration or a round of columns, whatever its size.
    """

    flop: float
    apply: float
    stored: float
    tile: float
    point: float
    feature: float
    single: float
    row: float
    step: float


# CPU: one core of an Intel Xeon (AVX-512).  More cores, or older ones, change all of them by much the same factor.
# Others: estimated from the data sheet of an Nvidia H100 (67 teraflops in float64, 3.4 TB a second); not measured.
_CPU = Prices(flop=0.014, apply=0.85, stored=0.5, tile=0.9, point=20.0, feature=0.007, single=6.0, row=5.0, step=3e5)
_OTHER = Prices(
    flop=2e-5, apply=5e-3, stored=2.5e-3, tile=1.5e-3, point=2e-2, feature=3e-5, single=1e-2, row=1e-2, step=3e5
)

_PASSES = {"gauss": 1, "matern32": 2, "matern52": 2, "rational_quadratic": 3, "matern12": 4, "laplace": 4}
_GENERIC = 3  # passes of a kernel without fast tiles
_BATCHED = 6.0  # of an operation of a large product: two in a batch of small ones, each three times as slow
_NEAR = 0.3  # of the iterations that regressions on neighbours leave: 0.04 to 0.6 on eight data sets


class Costs:
    """Costs of an iteration of conjugate gradients and of one more column of F, for one matrix.

    :param neighbors: of each row, in whose regression a column counts (:class:`.FullScale`).
    """

    def __init__(self, matrix: Access, neighbors: int = 0) -> None:
        self.n, self.prices = matrix.n, _CPU if matrix.device.type == "cpu" else _OTHER
        self.slow = float64_cost(matrix.device) / 2  # the prices are of devices where float64 takes twice the time
        # of an entry of F: the column is made orthogonal to it, and meets it again in half of F^T D^-1 F
        self.build = 3 * self.prices.flop * self.slow
        product = column = width = 0.0
        for _, part in terms(matrix.source):
            tile, other = self._tile(part, torch.float64), self._stored(part) or self._transformed(part)
            product += other or self._tile(part, part.dtype) * _share(part)
            column += 2 * tile + self.prices.single
            width += part.x1.shape[-1] if isinstance(part, KernelMatrix) else 0
        self.product, self.entry = product, column + _BATCHED * self.prices.flop * self.slow * neighbors**2
        self.share = _NEAR if neighbors else 1.0
        self.round = self.prices.step + self.n * width * self.prices.row

    def _tile(self, part: Any, dtype: torch.dtype) -> float:
        """Return the cost of an entry of a product by tiles."""
        passes, width = _GENERIC, 0
        if isinstance(part, KernelMatrix):
            width = part.x1.shape[-1]
            if part.expression is not None:
                passes = sum(_PASSES.get(atom.profile.name, _GENERIC) for atom in part.expression.atoms)
        by_dtype = 2 * self.slow if dtype == torch.float64 else dtype.itemsize / 4
        return (passes * self.prices.tile + width * self.prices.feature) * by_dtype

    def _stored(self, part: Any) -> float:
        """Return the cost of an entry of a product with a stored matrix; 0 for one that is not stored."""
        kept = (
            choose(part.pairs) is DENSE
            if isinstance(part, KernelMatrix)
            else torch.is_tensor(getattr(part, "tensor", None))
        )
        return self.prices.stored * part.dtype.itemsize / 8 if kept else 0.0

    def _transformed(self, part: Any) -> float:
        """Return the cost of an entry of a product by a fast engine; 0 for other products."""
        engine = choose(part.pairs) if isinstance(part, KernelMatrix) else None
        if engine is LATTICE:
            return self.prices.point * LATTICE.found(part.pairs).points / self.n**2
        return NEAR_AND_FAR.found(part.pairs).cost[1] / self.n**2 if engine is NEAR_AND_FAR else 0.0

    def iteration(self, rank: int) -> float:
        """Return the cost of an iteration with a factor of this rank."""
        product = self.n**2 * self.product
        return product + self.n * rank * self.prices.apply + self.prices.step

    def column(self, rank: int) -> float:
        """Return the cost of one more column; a round brings about a third of the present rank, and at most fifty."""
        made = self.n * (self.entry + rank * self.build)
        return made + self.round / max(1.0, min(50.0, rank / 3))


def _share(part: Any) -> float:
    """Return the time of a product over that by tiles of all pairs of points; several ranks share out all of them."""
    engine = choose(part.pairs) if isinstance(part, KernelMatrix) else None
    share = FUSED.share(part.pairs) if engine is FUSED else 1.0
    near = nearby(part.pairs) if engine in (FUSED, TILED) and part.pairs.ranks() is None else None
    return share if near is None else share * near.share


class RankByCost:
    """Decision whether F has enough columns, asked as they are added.

    Columns are added while the iterations that they are predicted to save cost more than the columns.  The largest
    eigenvalue of ``D^-1/2 (K - F F^T) D^-1/2`` is taken to be ``a e / r``, e what is left of the trace after r columns
    and ``r^-a`` the decay of e per point that is no pivot, over the last third of the columns: eigenvalues that all
    points share alike, which no column takes away from the others, do not count.

    :param costs: of iterations and columns.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._seen: list[tuple[int, float]] = []

    def __call__(self, rank: int, left: float) -> bool:
        """Return whether to stop.

        :param rank: columns so far; :param left: ``sum(residual / noise)`` of these columns.
        """
        n = self.costs.n
        if rank < min(_LEAST, n) and left > _NEGLIGIBLE:  # few columns cost nothing, and leave less to the probes
            self._seen.append((rank, left / (n - rank)))
            return False
        if left <= 1 or rank >= max(_LEAST, _SHARE * n):  # the condition number is at most 2
            return True
        share = left / (n - rank)
        self._seen.append((rank, share))
        before, was = next((seen for seen in reversed(self._seen) if _BACK * seen[0] <= rank), self._seen[0])
        if not 0 < before < rank:
            return False
        decay = max(0.0, math.log(was / share) / math.log(rank / before))
        largest = _SPREAD * decay * left / rank / (1 + _FLOOR * share * math.exp(-_FALL * decay))
        iterations = self.costs.share * _FACTOR * (1 + largest) ** _POWER
        saved = _POWER * (1 + decay) * largest / (1 + largest) * iterations / rank  # by one column
        price = self.costs.column(rank) + iterations * (n * self.costs.prices.apply)  # of a wider F
        return saved * self.costs.iteration(rank) < price

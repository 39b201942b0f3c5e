"""Nystrom approximations whose test matrix does not look at K: uniform columns, and Gaussian combinations of columns.

References: Williams and Seeger (2001) for uniform columns; Frangella, Tropp, Udell, "Randomized Nystrom
preconditioning" (arXiv:2110.02820), Algorithm 2.1, for the Gaussian sketch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..checks import seed, settle, word
from ..devices import queued
from ..operators.access import Access
from ..operators.moving_factors import MovingFactor
from ..operators.tiles import spans
from ..random_streams import generator
from ..space import Factor, Space, square_norms
from .base import Preconditioner, Selection
from .low_rank import LowRank, nystrom_factor, pivoted_factor, sketched_factor

_DRAWN = 4096  # rows of a test matrix that are drawn at once


@torch.no_grad()
def uniform_nystrom(matrix: Access, rank: int, *, generator: torch.Generator) -> LowRank:
    """Return the Nystrom approximation from ``rank`` distinct columns chosen uniformly.

    Cheapest, and right when all columns matter alike; it misses small clusters.  O(n rank^2) operations.
    """
    pivots = torch.randperm(matrix.n, generator=generator)[:rank].to(matrix.device)
    return _with_residual(matrix, pivoted_factor(matrix, pivots).factor, pivots)


def gaussian_test_matrix(n: int, rank: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return an orthonormal basis ``(n, rank)`` of a Gaussian matrix, float64; the diagonal of R is positive."""
    q, r = torch.linalg.qr(queued(_drawn(n, rank, generator, slice(0, n)), device))
    return q * torch.where(r.diagonal() < 0, -1, 1)


def scaled_test_matrix(
    matrix: Access, rank: int, generator: torch.Generator, scales: Tensor | None = None, space: Space | None = None
) -> Factor:
    """Return an orthonormal test matrix with its rows multiplied by ``scales``, ``(n,)`` or of each matrix of a batch.

    Each of several ranks draws all rows and keeps its own.
    """
    if space is None or not space.shared:
        test = gaussian_test_matrix(matrix.n, rank, generator, matrix.device)
        return test if scales is None else test * scales.unsqueeze(-1)
    own = space.span
    test = queued(_drawn(matrix.n, rank, generator, own), matrix.device)
    root = torch.linalg.cholesky(space.total(test.mT @ test))  # R^T
    test = torch.linalg.solve_triangular(root, test.mT, upper=False).mT
    return space.factor(test if scales is None else test * scales[own].unsqueeze(-1))


def _drawn(n: int, rank: int, generator: torch.Generator, own: slice) -> Tensor:
    """Draw some rows of a matrix ``(n, rank)`` of normal numbers."""
    result = torch.empty(own.stop - own.start, rank, dtype=torch.float64)
    for rows in spans(n, _DRAWN):
        drawn = torch.randn(rows.stop - rows.start, rank, dtype=torch.float64, generator=generator)
        first, last = max(rows.start, own.start), min(rows.stop, own.stop)
        if first < last:
            result[first - own.start : last - own.start] = drawn[first - rows.start : last - rows.start]
    return result


@torch.no_grad()
def gaussian_nystrom(
    matrix: Access,
    rank: int,
    *,
    generator: torch.Generator,
    scales: Tensor | None = None,
    space: Space | None = None,
) -> LowRank:
    """Return the Nystrom approximation from ``rank`` random combinations of all columns.

    The best of the sketches for a given rank, but it reads all n^2 entries: one product with ``rank`` columns.

    :param scales: ``(n,)``, of the points in the combinations: ``D^-1/2`` gives the approximation of
        ``D^-1/2 K D^-1/2``, times ``D^1/2`` on both sides.
    :param space: of F; None makes all rows here.  Each of several ranks draws all rows of the test matrix, and
        multiplies 256 of its columns at a time.
    """
    test = scaled_test_matrix(matrix, min(rank, matrix.n), generator, scales, space)
    return _with_residual(matrix, sketched_factor(matrix, test).factor, None)


def _with_residual(matrix: Access, factor: Factor | None, pivots: Tensor | None) -> LowRank:
    assert factor is not None
    return LowRank(factor, pivots, (matrix.diagonal() - square_norms(factor)).clamp_(min=0))


@dataclass(frozen=True)
class Nystrom(Preconditioner):
    """``P = F F^T + noise`` with ``F F^T = Y (M^T Y)^-1 Y^T`` and ``Y = K M``.

    ``sketch="gaussian"``: M is random and dense; the most accurate for a rank, at the price of a product of K with
    r columns.  ``sketch="uniform"``: M picks r columns uniformly; the cheapest, and it misses small clusters.
    Where the noise D differs between points, the Gaussian M is multiplied by ``D^-1/2``, which makes F that of
    ``D^-1/2 K D^-1/2``.

    References: Frangella, Tropp, Udell (arXiv:2110.02820), Algorithm 2.1; Williams and Seeger (2001).

    :param rank: columns of F, or None (automatic: doubled until ``sum(residual / noise) <= 1``, ``10 sqrt(n)`` columns,
        the default of arXiv:2304.12465, section 2.1, or the memory budget).
    :param sketch: ``"gaussian"`` or ``"uniform"``.
    :param seed: seed of all random choices.
    """

    sketch: Literal["gaussian", "uniform"] = "gaussian"
    seed: int = 0
    lean = below = True

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, word, "sketch", allowed=("gaussian", "uniform"))
        settle(self, seed, "seed")

    @property
    def name(self) -> str:
        return f"Nystrom[{self.sketch}]"

    def _generator(self) -> torch.Generator:
        """Return the same stream at every call: F is made again from the same test matrix."""
        return generator(self.seed, "Nystrom preconditioner")

    def most_columns(self, n: int) -> int:
        return math.ceil(10 * math.sqrt(n))

    @property
    def pivoted(self) -> bool:
        return self.sketch == "uniform"

    def select_one(self, matrix: Access, noise: Tensor) -> Selection:
        return dataclasses.replace(super().select_one(matrix, noise), scales=_scales(noise))

    def approximate(self, matrix: Access, noise: Tensor) -> LowRank:
        bound, space = self.rank_for(matrix.n, matrix.device), Space.of(matrix.n)
        rank = bound if self.rank is not None else max(1, bound // 8)
        while True:
            stream = self._generator()
            if self.sketch == "gaussian":
                result = gaussian_nystrom(matrix, rank, generator=stream, scales=_scales(noise), space=space)
            else:
                result = uniform_nystrom(matrix, rank, generator=stream)
            if rank >= bound or float((result.residual / noise).sum()) <= 1:
                return result
            rank = min(2 * rank, bound)

    def moving(self, matrix: Access, selection: Selection) -> MovingFactor:
        if self.sketch == "uniform":
            return super().moving(matrix, selection)
        if selection.test is None:
            stream, space = self._generator(), Space.of(matrix.n)
            selection.test = scaled_test_matrix(matrix, selection.columns, stream, selection.scales, space)
        return sketched_factor(matrix, selection.test)

    def factor(self, matrix: Access, selection: Selection) -> Tensor:
        if self.sketch == "uniform":
            return super().factor(matrix, selection)
        test = scaled_test_matrix(matrix, selection.columns, self._generator(), selection.scales)
        assert isinstance(test, Tensor)
        sketch = matrix.matmul(test)
        return nystrom_factor(sketch, test.mT @ sketch, matrix.resolution)


def _scales(noise: Tensor) -> Tensor:
    """Return the factors ``(n,)`` of the rows of a test matrix."""
    return (noise.min() / noise).sqrt()

"""Nystrom preconditioners with a test matrix that does not look at K: Gaussian, or uniform columns."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..checks import seed, settle, word
from ..lowrank import (
    LowRank,
    gaussian_nystrom,
    gaussian_test_matrix,
    nystrom_factor,
    scaled_test_matrix,
    sketched_factor,
    uniform_nystrom,
)
from ..operators.access import Access
from ..operators.moving_factors import MovingFactor
from ..random_streams import generator
from ..space import Space
from .base import Preconditioner, Selection


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
                result = uniform_nystrom(matrix, rank, generator=stream, space=space)
            if rank >= bound or float((result.residual / noise).sum()) <= 1:
                return result
            rank = min(2 * rank, bound)

    def moving(self, matrix: Access, selection: Selection) -> MovingFactor:
        if self.sketch == "uniform":
            return super().moving(matrix, selection)
        if selection.test is None:
            stream = self._generator()
            selection.test = scaled_test_matrix(
                matrix.n, selection.columns, stream, matrix.device, selection.scales, Space.of(matrix.n)
            )
        return sketched_factor(matrix, selection.test)

    def factor(self, matrix: Access, selection: Selection) -> Tensor:
        if self.sketch == "uniform":
            return super().factor(matrix, selection)
        test = gaussian_test_matrix(matrix.n, selection.columns, self._generator(), matrix.device)
        if selection.scales is not None:  # of each matrix of a batch
            test = test * selection.scales.unsqueeze(-1)
        sketch = matrix.matmul(test)
        return nystrom_factor(sketch, test.mT @ sketch, matrix.resolution)


def _scales(noise: Tensor) -> Tensor:
    """Return the factors ``(n,)`` of the rows of a test matrix."""
    return (noise.min() / noise).sqrt()

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
from .base import Preconditioner, Selection, _selection


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

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, word, "sketch", allowed=("gaussian", "uniform"))
        settle(self, seed, "seed")

    @property
    def name(self) -> str:
        return f"Nystrom[{self.sketch}]"

    def _generator(self) -> torch.Generator:
        """The same at every call: the factor is made again of the test matrix that was judged."""
        return generator(self.seed, "Nystrom preconditioner")

    def _approximate(self, matrix: Access, rank: int, scales: Tensor) -> LowRank:
        if self.sketch == "gaussian":
            return gaussian_nystrom(matrix, rank, generator=self._generator(), scales=scales, space=Space.of(matrix.n))
        return uniform_nystrom(matrix, rank, generator=self._generator(), space=Space.of(matrix.n))

    def rows_stored(self, n: int) -> int:
        return Space.of(n).most_rows

    @property
    def lean(self) -> bool:
        return True

    def _reach(self, n: int) -> int:
        return math.ceil(10 * math.sqrt(n))

    @property
    def pivoted(self) -> bool:
        return self.sketch == "uniform"

    @property
    def below(self) -> bool:
        return True

    def _select(self, matrix: Access, noise: Tensor) -> Selection:
        bound = self.rank_for(matrix.n, matrix.device)
        rank = bound if self.rank is not None else max(1, bound // 8)
        scales = (noise.min() / noise).sqrt()
        while True:
            low_rank = self._approximate(matrix, rank, scales)
            if rank >= bound or float((low_rank.residual / noise).sum()) <= 1:
                return dataclasses.replace(_selection(low_rank), scales=scales)
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

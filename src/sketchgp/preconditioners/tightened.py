"""Columns added until bounds of the log determinant are tight, rather than until solves are fast."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from ..operators.access import Access
from ..space import Factor, leading, square_norms
from .base import Preconditioner, Selection

_COLUMNS = 20.0  # times n^1/2: the most columns; F costs more than products with K beyond
_FASTEST = 0.01  # of what is left, after twice the columns


def log_slack(prior: Tensor, factor: Factor, noise: Tensor) -> Tensor:
    """``sum_i log(1 + e_i / d_i)`` for e the diagonal of ``K - F F^T`` and d that of the noise, ``(...)``.

    With ``P = F F^T + D``, ``F F^T <= K`` and ``E = K - F F^T``, ``log det (K + D) - log det P`` is at the least 0 and
    at most ``log det (I + D^-1/2 E D^-1/2)``, as ``P >= D``; that is at most this sum (Hadamard's inequality), which is
    below the ``n log(1 + tr(D^-1 E) / n)`` of Artemev, Burt, van der Wilk (arXiv:2102.08314) by that of Jensen.

    :param prior: the diagonal of K, ``(..., n)``; :param factor: F, ``(..., n, r)``; :param noise: d, ``(..., n)``.
    """
    left = (prior - square_norms(factor)).clamp(min=0)
    return (left / noise).log1p().sum(dim=-1)


@dataclass(frozen=True)
class Tightened(Preconditioner):
    """Another choice, whose automatic rank is doubled until bounds with it are tight.

    The rank is left as it is where the user named one.  Columns end at ``20 n^1/2`` and at the memory budget.

    :param base: the choice, with ``F F^T <= K``.
    :param slack: of :func:`log_slack` over ``2 n``, which is to be come to.
    :param hopeful: add columns even where their decay says that all there may be would not do.
    """

    base: Preconditioner = dataclasses.field(default_factory=Preconditioner)
    slack: float = 0.0
    hopeful: bool = False

    @property
    def pivoted(self) -> bool:
        return self.base.pivoted

    @property
    def below(self) -> bool:
        return self.base.below

    @property
    def name(self) -> str:
        return self.base.name

    def select_one(self, matrix: Access, noise: Tensor) -> Selection:
        selection = self.base.select_one(matrix, noise)
        prior, n = matrix.diagonal(), matrix.n
        most = min(self.base.rank_for(n, matrix.device), math.ceil(_COLUMNS * math.sqrt(n)))
        while self.base.rank is None:
            factor = selection.factor
            rank = max(1, factor.shape[-1])
            left, before = (
                float(log_slack(prior, part, noise)) / (2 * n) for part in (factor, leading(factor, rank // 2))
            )
            falls = max(_FASTEST, (left / before) ** 2) if before > 0 else 0.0  # by twice the columns, at the best
            doublings = math.log2(most / rank) if most > rank else 0.0
            hopeless = not self.hopeful and left * falls**doublings > self.slack
            if left <= self.slack or not doublings or hopeless:
                break
            selection = dataclasses.replace(self.base, rank=min(2 * rank, most)).select_one(matrix, noise)
        return selection

"""How far rounding has taken the residual of a recurrence from the true one: an estimate by a few rows.

The recurrence ``r -= alpha A p`` of conjugate gradients keeps the error of every product, and the true residual
``b - A w`` goes its own way.  Going on below their difference is in vain: the residual then has to be computed anew.
Van der Vorst and Ye, "Residual replacement strategies for Krylov subspace iterative methods" (SIAM J. Sci. Comput. 22,
2000), bound that difference; here it is measured in rows drawn once, since bounds are far too large in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...random_streams import generator
from ...space import Space
from ..problem import System

_ROWS = 64  # the estimate's standard deviation is a tenth


class Drift:
    """The rows, and what they say of one system or a batch.

    :param system: of n points; a look costs ``64 n`` kernel entries in float64.
    :param space: of the vectors.
    """

    def __init__(self, system: System, space: Space) -> None:
        self.system, self.space = system, space
        order = torch.randperm(system.n, generator=generator(0, "rows of residuals"))
        self.rows = order[:_ROWS].sort().values.to(system.noise.device)

    def between(self, b: Tensor, value: Tensor, r: Tensor) -> Tensor:
        """The norms of ``b - A value - r``, about, ``(..., t)``.

        :param b: right-hand sides; :param value: the iterate; :param r: residuals of the recurrence; vectors of the
            space.
        """
        rows, space = self.rows, self.space
        there = self.system.accurate_rows(rows, space.whole(value))
        difference = space.rows(b, rows) - there - space.rows(r, rows)
        return difference.norm(dim=-2) * (self.system.n / len(rows)) ** 0.5

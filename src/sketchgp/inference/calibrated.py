"""Low-rank variances calibrated by exact ones at a few training points that are left out.

For training point i the variance of the posterior of all others is ``1 / (A^-1)_ii - noise_i``, which takes one solve
(Dubrule, "Cross validation of kriging in a unique neighborhood", Mathematical Geology 1983; Rasmussen and Williams,
"Gaussian processes for machine learning", equation 5.12); and of low-rank variances it takes a step more
(:meth:`~.predictive_variance.LowRankVariance.left_out`).  The logarithms of their ratios have a mean, which is taken
off, and a deviation, which is what remains.  Where density or noise is uneven a few ratios are far larger than the
others, so that the largest one counts, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.access import Access
from ..operators.tall import constant
from ..preconditioners import rpcholesky
from ..preconditioners.full_scale import features_of
from ..random_streams import generator, rows_beside
from .predictive_variance import LowRankVariance

_RANK = 100
_NEIGHBOURS, _ON_MAPS = 128, 64  # the latter of many rows with up to three features
_POINTS = 60
_EXACT = 0.01  # relative error of the exact variances, which come from solves
_LARGEST = 2.5  # expected largest of so many normal errors, in standard errors
_FEW = 0.25  # share of points below the typical variance
_FLOOR = 0.02  # of the median noise: latent variances below it are not compared as ratios


class Calibrated:
    """``s^(1 - V(x) / k(x, x)) V(x)`` of low-rank variances V with neighbours: s where data are near, 1 where none are.

    :param matrix: K, a kernel matrix without batch.
    :param noise: ``(n,)``.
    :param leave_out: gives the exact latent variances ``(p,)``, float64, at training points with these indices that are
        left out.

    :ivar factor: s.
    :ivar scatter: the relative standard error of a variance that is not small beside the noise; 0 where there are so
        few points that it is exact.
    :ivar floor: below it, variances are right to a share of it rather than of themselves.
    :ivar typical: ``()`` a latent variance that few points are below.
    """

    def __init__(self, matrix: KernelMatrix, noise: Tensor, leave_out: Callable[[Tensor], Tensor]) -> None:
        self.matrix, noise = constant(matrix), noise.detach().to(torch.float64)
        n, self.factor, self.scatter, self.spread = len(noise), 1.0, 0.0, 0.0
        self.floor = _FLOOR * noise.median()
        with torch.no_grad():
            pivots = rpcholesky(
                Access(self.matrix),
                max(1, min(_RANK, n // 4)),
                generator=generator(0, "inducing points of low-rank variances"),
                weights=1 / noise,
            ).pivots
            assert pivots is not None
            x = self.matrix.x1
            near = _ON_MAPS if n > 30 * _ON_MAPS and features_of(self.matrix, 3) is not None else _NEIGHBOURS
            self.low_rank = LowRankVariance(self.matrix, noise, x[pivots], near)
            if n <= near:  # variances are exact
                self.typical = self.low_rank(x).quantile(_FEW)
                return
            points = rows_beside(pivots, n, _POINTS, generator(0, "points that variances are calibrated at"))
            exact = leave_out(points)
            self.typical = exact.quantile(_FEW)
            ratio = (exact + self.floor) / (self.low_rank.left_out(points) + self.floor)
            logs = ratio.clamp(min=torch.finfo(ratio.dtype).tiny).log()
            self.factor = math.exp(float(logs.mean()))
            spread = max(float(logs.std()), float((logs - logs.mean()).abs().max()) / _LARGEST)
            self.spread = spread * math.sqrt(1 + 1 / len(points))
            self.scatter = math.hypot(self.spread, _EXACT)

    def error(self, variance: Tensor) -> Tensor:
        """Return relative standard errors of variances ``(m,)``, larger for those below the floor."""
        if self.scatter == 0:
            return torch.zeros_like(variance)
        spread = self.spread * (1 + self.floor / variance.clamp(min=torch.finfo(variance.dtype).tiny))
        return (spread.square() + _EXACT**2).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        """Return latent variances ``(m,)`` at x ``(m, d)``, as the kernel sees it; float64, differentiable in x."""
        low_rank = self.low_rank(x)
        if self.factor == 1.0:
            return low_rank
        prior = self.matrix.entries(x, None)
        share = low_rank / prior.clamp(min=torch.finfo(prior.dtype).tiny)
        share = share.clamp(max=1)  # 1 where no data are near, and the variance exact
        return torch.minimum(low_rank * self.factor ** (1 - share), prior)

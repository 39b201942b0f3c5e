"""Low-rank variances made right on the average, by the exact ones at a few training points that are left out.

For training point i the variance of the posterior of all others is ``1 / (A^-1)_ii - noise_i``, which takes one solve
(Dubrule, "Cross validation of kriging in a unique neighborhood", Mathematical Geology 1983; Rasmussen and Williams,
"Gaussian processes for machine learning", equation 5.12); and of low-rank variances it takes a step more
(:meth:`~.predictive_variance.LowRankVariance.left_out`).  The logarithms of their ratios have a mean, which is taken
off, and a deviation, which is what remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..lowrank import rpcholesky
from ..operators import KernelMatrix
from ..operators.access import Access
from ..operators.tall import constant
from ..random_streams import generator
from .predictive_variance import LowRankVariance

_RANK = 100
_NEIGHBOURS = 128
_POINTS = 28
_FEW = 0.25  # of the points, that are below a typical variance
_FLOOR = 0.02  # of the noise: latent variances below it are not compared as ratios


class Calibrated:
    """``s^(1 - V(x) / k(x, x)) V(x)`` of low-rank variances V with neighbours: s where data are near, 1 where none are.

    :param matrix: K, a kernel matrix without batch.
    :param noise: ``(n,)``.
    :param leave_out: gives the exact latent variances ``(p,)``, float64, at training points with these indices that are
        left out.

    :ivar factor: s; :ivar scatter: the relative standard error of a variance; 0 where
        there are so few points that it is exact.
    :ivar typical: ``()`` a latent variance that few points are below.
    """

    def __init__(self, matrix: KernelMatrix, noise: Tensor, leave_out: Callable[[Tensor], Tensor]) -> None:
        self.matrix, noise = constant(matrix), noise.detach().to(torch.float64)
        n, self.factor, self.scatter = len(noise), 1.0, 0.0
        with torch.no_grad():
            pivots = rpcholesky(
                Access(self.matrix),
                max(1, min(_RANK, n // 4)),
                generator=generator(0, "inducing points of low-rank variances"),
                weights=1 / noise,
            ).pivots
            assert pivots is not None
            x = self.matrix.x1
            if n <= _NEIGHBOURS:  # all points as inducing points
                self.low_rank = LowRankVariance(self.block, x, noise, x)
                self.typical = self.low_rank(x).quantile(_FEW)
                return
            self.low_rank = LowRankVariance(self.block, x, noise, x[pivots], _NEIGHBOURS)
            others = torch.ones(n, dtype=torch.bool, device=x.device).index_fill_(0, pivots, False).nonzero().squeeze(1)
            some = torch.randperm(len(others), generator=generator(0, "points that variances are calibrated at"))
            points = others[some[:_POINTS].to(x.device)]
            floor = _FLOOR * noise[points]
            exact = leave_out(points)
            self.typical = exact.quantile(_FEW)
            ratio = (exact + floor) / (self.low_rank.left_out(points) + floor)
            logs = ratio.clamp(min=torch.finfo(ratio.dtype).tiny).log()
            self.factor = math.exp(float(logs.mean()))
            self.scatter = float(logs.std()) * math.sqrt(1 + 1 / len(points))

    def block(self, a: Tensor, b: Tensor | None) -> Tensor:
        """:func:`block` of the matrix."""
        return block(self.matrix, a, b)

    def __call__(self, x: Tensor) -> Tensor:
        """Latent variances ``(m,)`` at x ``(m, d)``, as the kernel sees it; float64, differentiable in x."""
        found = self.low_rank(x)
        if self.factor == 1.0:
            return found
        prior = self.block(x, None)
        left = (found / prior.clamp(min=torch.finfo(prior.dtype).tiny)).clamp(
            max=1
        )  # where nothing is known, it is exact
        return torch.minimum(found * self.factor ** (1 - left), prior)


def block(matrix: KernelMatrix, a: Tensor, b: Tensor | None) -> Tensor:
    """``k(a, b)`` in float64 by the kernel of a matrix, or the diagonal ``k(a_i, a_i)`` where b is None.

    :param a: ``(..., p, d)`` and :param b: ``(..., q, d)``, as the kernel sees them.
    """
    if b is None:
        return matrix.at(a, a, True).type(torch.float64).diagonal(dim1=-1, dim2=-2)
    return matrix.at(a, b).type(torch.float64).to_dense()

"""Predictive variance from a low-rank factor and neighbours, for more test points than can be solved for one by one.

The exact variance at z, ``k(z,z) - k(z,X) (K + noise)^-1 k(X,z)``, needs one solve a test point.  With inducing
points Z the FITC approximation needs none: f is split into the part that Z explains and a remainder taken as
independent between points, which adds to the noise,

    var(z) = k(z,z) - q(z,z) + k(z,Z) (Kzz + Kzx D^-1 Kxz)^-1 k(Z,z),   D = noise + diag(K - Q),

where ``q(a,b) = k(a,Z) Kzz^-1 k(Z,b)``.  Snelson and Ghahramani, "Sparse Gaussian processes using pseudo-inputs"
(NIPS 2005), equation 8.  It lies above the exact variance nearly always, by many times where the noise is small, since
what the remainders of neighbours say about each other is not used.

With ``e = k - q`` the covariance of the remainder and N the training points nearest to z, that is mended:

    var(z) = e(z,z) - e(z,N) b + g^T (I + F^T T^-1 F)^-1 g,   T = e(X,X) + noise,
    b = (e(N,N) + noise)^-1 e(N,z),   g = F(z) - F(N)^T b,   F(a) F(b)^T = q(a,b):

the remainder at z is conditioned on that of its neighbours, and what the low-rank part does not know about itself
counts as far as the neighbours do not say it.  T^-1 is that of Vecchia's approximation (:class:`.FullScale`).  With D
in place of T, points that lie close together would count as independent: where data are dense and inducing points are
not, the low-rank part would look better known than it is.  Gyger, Furrer and Sigrist, "Vecchia-inducing-points
full-scale approximations for Gaussian processes" (2025).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import NumericalError
from ..operators import KernelMatrix
from ..operators.substitution import cholesky_solve
from ..operators.tiles import spans
from ..preconditioners import shifted_cholesky
from .full_scale import FullScale

_ROWS = 4096
_EARLIER = 16  # neighbours that the remainder of a training point is regressed on
_ENTRIES = 2**22  # entries of k(z, X), or of blocks of neighbours, held at once
_NOT_DEFINITE = "The low-rank variance met a matrix that is not positive definite; check the inputs."


class LowRankVariance:
    """FITC variances for one training set, kernel and set of inducing points, corrected by neighbours where there are
    to be some; all in float64.

    Set-up costs ``n r^2`` operations; each test point ``r^2``, and with M neighbours ``n`` entries of the kernel to
    find them, ``M^2`` more and ``M^2 (M / 3 + r)`` operations.  Memory ``r^2`` beside tiles, with neighbours ``2 n r``
    and the set-up of :class:`.FullScale`.

    :param block: ``block(a, b)`` gives ``k(a, b)`` for inputs (..., p, d) and (..., q, d), dense; ``block(a, None)``
        the diagonal ``k(a_i, a_i)``.
    :param x: training inputs ``(n, d)``.
    :param noise: ``(n,)`` variances.
    :param inducing_points: ``(r, d)``.
    :param neighbours: M, or n where that is less; 0 for FITC.
    :param matrix: ``k(X, X)`` as an operator; only neighbours need it.
    :raises NumericalError: for a matrix that is not positive definite.
    """

    def __init__(
        self,
        block: Any,
        x: Tensor,
        noise: Tensor,
        inducing_points: Tensor,
        neighbours: int = 0,
        matrix: KernelMatrix | None = None,
    ) -> None:
        self.block, self.inducing_points, self.x, self.noise = block, inducing_points, x, noise
        self.neighbours = min(neighbours, len(x))
        core = block(inducing_points, inducing_points)
        try:
            self.root = shifted_cholesky(core, torch.finfo(core.dtype).eps)
        except NumericalError as error:
            raise NumericalError(_NOT_DEFINITE, see="not-definite") from error
        if neighbours:
            assert matrix is not None
            self._features = torch.cat([self._half(x[rows]).mT for rows in spans(len(x), _ROWS)])
            self._remainder = FullScale(matrix, noise, self._features, _EARLIER)
            self.inner_root = self._remainder.root
            return
        inner = torch.eye(len(core), dtype=core.dtype, device=core.device)
        for rows in spans(len(x), _ROWS):
            half = self._half(x[rows])  # (r, rows): half^T half = Q
            diagonal = noise[rows] + (block(x[rows], None) - half.square().sum(dim=0)).clamp_(min=0)
            inner += (half / diagonal) @ half.mT
        self.inner_root, bad = torch.linalg.cholesky_ex(inner)
        if int(bad):
            raise NumericalError(_NOT_DEFINITE, see="not-definite")

    def _half(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.root, self.block(self.inducing_points, x), upper=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return variances ``(m,)`` of the latent function at x ``(m, d)``, differentiable in x where ``block`` is."""
        parts = [self._variance(x[rows]) for rows in spans(len(x), self._rows)]
        return torch.cat(parts) if parts else x.new_zeros(0, dtype=self.root.dtype)

    def left_out(self, indices: Tensor) -> Tensor:
        """Return variances ``(p,)`` at training points, no inducing points, each as if it were not among the data."""
        parts = [self._variance(self.x[some], some) for some in indices.split(self._rows)]
        return torch.cat(parts) if parts else self.noise.new_zeros(0)

    @property
    def _rows(self) -> int:
        """Number of points at once."""
        if not self.neighbours:
            return _ROWS
        return max(1, _ENTRIES // max(len(self.x), self.neighbours * (self.neighbours + len(self.root))))

    def _variance(self, x: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return variances ``(p,)`` at x, without the training points ``left_out`` that they are."""
        half, prior = self._half(x), self.block(x, None)
        rest, explained = (prior - half.square().sum(dim=0)).clamp(min=0), torch.zeros_like(prior)
        if self.neighbours:
            near = self._nearest(x, left_out)
            weights, explained = self._conditioned(x, half, near)
            half = half - (self._features[near].mT @ weights).squeeze(-1).mT
        known = torch.linalg.solve_triangular(self.inner_root, half, upper=False)
        variance = (rest - explained).clamp(min=0) + known.square().sum(dim=0)
        if left_out is not None:  # the low-rank part knows the point itself
            features, local = self._remainder.weighted_features(left_out), self._remainder.near[left_out]
            mine = torch.linalg.solve_triangular(self.inner_root, features.mT, upper=False)
            left = (local - mine.square().sum(dim=0)).clamp(min=torch.finfo(local.dtype).eps * local)
            variance = variance + (mine * known).sum(dim=0).square() / left
        return variance

    @torch.no_grad()
    def _nearest(self, x: Tensor, left_out: Tensor | None) -> Tensor:
        """Return indices ``(p, M)`` of the training points of the largest covariance with each of x."""
        near, most = self.block(x, self.x).abs(), len(self.x)
        if left_out is not None:
            near.scatter_(1, left_out.unsqueeze(1), -1)
            most -= 1
        return near.topk(min(self.neighbours, most), dim=1, sorted=False).indices

    def _conditioned(self, x: Tensor, half: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Return b ``(p, M, 1)``, and the variance of the remainder that neighbours explain, ``(p,)``."""
        points, features = self.x[near], self._features[near]
        between = self.block(points, points) - features @ features.mT
        between.diagonal(dim1=-2, dim2=-1).add_(self.noise[near])
        cross = self.block(points, x.unsqueeze(1)) - features @ half.mT.unsqueeze(-1)
        root, bad = torch.linalg.cholesky_ex(between)
        if bool(bad.any()):
            root = shifted_cholesky(between, torch.finfo(root.dtype).eps)
        weights = cholesky_solve(cross, root)
        return weights, (cross * weights).sum(dim=(-2, -1))

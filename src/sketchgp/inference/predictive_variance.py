"""Predictive variance from a low-rank factor and neighbours, for more test points than can be solved for one by one.

The exact variance at z, ``k(z,z) - k(z,X) (K + noise)^-1 k(X,z)``, needs one solve a test point.  With inducing
points Z, f is split into the part that Z explains, with the covariance ``q(a,b) = k(a,Z) Kzz^-1 k(Z,b)``, and a
remainder.  With ``e = k - q`` the covariance of the remainder and N the training points nearest to z,

    var(z) = e(z,z) - e(z,N) b + g^T (I + F^T T^-1 F)^-1 g,   T = e(X,X) + noise,
    b = (e(N,N) + noise)^-1 e(N,z),   g = F(z) - F(N)^T b,   F(a) F(b)^T = q(a,b):

the remainder at z is conditioned on that of its neighbours, and what the low-rank part does not know about itself
counts as far as the neighbours do not say it.  T^-1 is that of Vecchia's approximation (:class:`.FullScaleFactor`).
With the diagonal of T in its place, as in FITC, points that lie close together would count as independent: where data
are dense and inducing points are not, the low-rank part would look better known than it is.  Gyger, Furrer and Sigrist,
"Vecchia-inducing-points full-scale approximations for Gaussian processes" (2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.tiles import spans
from ..preconditioners import shifted_cholesky
from ..preconditioners.full_scale import FullScaleFactor, Tree, features_of, left_of, regression

_ROWS = 4096
_EARLIER = 16  # neighbours that the remainder of a training point is regressed on
_ENTRIES = 2**22  # entries of k(z, X), or of blocks of neighbours, held at once


class LowRankVariance:
    """Variances from a low-rank factor and neighbours, for one training set and kernel; all in float64.

    Set-up costs ``n r^2`` operations and that of :class:`.FullScaleFactor`; each test point ``M^2`` entries of the
    kernel and ``r^2 + M^2 (M / 3 + r)`` operations, and ``n`` entries more where no k-d tree finds its M neighbours.
    Memory ``2 n r + r^2`` beside tiles.

    :param matrix: ``k(X, X)`` as an operator, without batch.
    :param noise: ``(n,)`` variances.
    :param inducing_points: ``(r, d)``, as the kernel sees them.
    :param neighbours: M of them; variances are exact where there are no more points.
    :raises NumericalError: for a matrix that is not positive definite.
    """

    def __init__(self, matrix: KernelMatrix, noise: Tensor, inducing_points: Tensor, neighbours: int) -> None:
        self.block, self.inducing_points, self.x, self.noise = matrix.entries, inducing_points, matrix.x1, noise
        n = len(self.x)
        self.neighbours = min(neighbours, n)
        core = self.block(inducing_points, inducing_points)
        self.root = shifted_cholesky(core, torch.finfo(core.dtype).eps)
        self._features = torch.cat([self._half(self.x[rows]).mT for rows in spans(n, _ROWS)])
        earlier = n if self.neighbours == n else _EARLIER
        self._remainder = FullScaleFactor.of(matrix, noise, self._features, earlier)
        self.inner_root = self._remainder.root
        features = features_of(matrix)
        self._matrix, self._tree = matrix, None if features is None else Tree(features)

    def _half(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.root, self.block(self.inducing_points, x), upper=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return variances ``(m,)`` of the latent function at x ``(m, d)``, differentiable in x."""
        parts = [self._variance(x[rows]) for rows in spans(len(x), self._rows)]
        return torch.cat(parts) if parts else x.new_zeros(0, dtype=self.root.dtype)

    def left_out(self, indices: Tensor) -> Tensor:
        """Return variances ``(p,)`` at training points, no inducing points, each as if it were not among the data."""
        parts = [self._variance(self.x[some], some) for some in indices.split(self._rows)]
        return torch.cat(parts) if parts else self.noise.new_zeros(0)

    @property
    def _rows(self) -> int:
        """Number of points at once."""
        return max(1, _ENTRIES // max(len(self.x), self.neighbours * (self.neighbours + len(self.root))))

    def _variance(self, x: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return variances ``(p,)`` at x, without the training points ``left_out`` that they are."""
        near = self._nearest(x, left_out)
        points = torch.cat([x.unsqueeze(1), self.x[near]], dim=1)
        features = torch.cat([self._half(x).mT.unsqueeze(1), self._features[near]], dim=1)
        noise = torch.nn.functional.pad(self.noise[near], (1, 0))
        weights, rest = regression(
            self.block(points, points), features, noise, torch.ones_like(noise, dtype=torch.bool)
        )
        known = torch.linalg.solve_triangular(self.inner_root, left_of(features, weights).mT, upper=False)
        variance = (rest + known.square().sum(dim=0)).clamp(min=0)
        if left_out is not None:  # the low-rank part knows the point itself
            features, local = self._remainder.weighted_features[left_out], self._remainder.local_diagonal[left_out]
            mine = torch.linalg.solve_triangular(self.inner_root, features.mT, upper=False)
            left = (local - mine.square().sum(dim=0)).clamp(min=torch.finfo(local.dtype).eps * local)
            variance = variance + (mine * known).sum(dim=0).square() / left
        return variance

    @torch.no_grad()
    def _nearest(self, x: Tensor, left_out: Tensor | None) -> Tensor:
        """Return indices ``(p, M)`` of training points near each of x.

        In few dimensions they are the nearest by distance over lengthscales, else those of the largest covariance.
        """
        count, matrix = min(self.neighbours + (left_out is not None), len(self.x)), self._matrix
        features = None if self._tree is None else features_of(matrix.at(x, x, centre=matrix.pairs.centre))
        if self._tree is None or features is None:
            found = self.block(x, self.x).abs().topk(count, dim=1).indices
        else:
            found = self._tree.nearest(features, count)
        if left_out is None:
            return found
        own_last = (found == left_out.unsqueeze(1)).to(torch.int8).argsort(dim=1, stable=True)
        return found.gather(1, own_last)[:, :-1]

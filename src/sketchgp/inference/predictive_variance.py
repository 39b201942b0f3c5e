"""Predictive variance from a low-rank factor, for more test points than can be solved for one by one.

The exact variance at z, ``k(z,z) - k(z,X) (K + noise)^-1 k(X,z)``, needs one solve a test point.  With inducing
points Z (the pivots of the preconditioner) the FITC approximation needs none: f is split into the part that Z
explains and a remainder taken as independent between points, which adds to the noise,

    var(z) = k(z,z) - q(z,z) + k(z,Z) (Kzz + Kzx D^-1 Kxz)^-1 k(Z,z),   D = noise + diag(K - Q),

where ``q(a,b) = k(a,Z) Kzz^-1 k(Z,b)``.  Snelson and Ghahramani, "Sparse Gaussian processes using pseudo-inputs"
(NIPS 2005), equation 8.  It lies above the exact variance nearly always, since what the remainders of neighbours
say about each other is not used; compare a few points with exact solves before relying on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import NumericalError
from ..lowrank import shifted_cholesky
from ..operators.tiles import spans

_ROWS = 4096
_NOT_DEFINITE = "The low-rank variance met a matrix that is not positive definite; check the inputs."


class LowRankVariance:
    """FITC variances for one training set, kernel and set of inducing points; all in float64.

    Set-up costs ``n r^2`` operations, each test point ``r^2``; memory ``r^2`` beside tiles of 4096 x r.

    :param block: ``block(a, b)`` gives ``k(a, b)`` for inputs (p, d) and (q, d), dense; ``block(a, None)`` the
        diagonal ``k(a_i, a_i)``.
    :param x: training inputs ``(n, d)``.
    :param noise: ``(n,)`` variances.
    :param inducing_points: ``(r, d)``.
    """

    def __init__(self, block: Any, x: Tensor, noise: Tensor, inducing_points: Tensor) -> None:
        self.block, self.inducing_points = block, inducing_points
        core = block(inducing_points, inducing_points)
        try:
            self.root = shifted_cholesky(core, torch.finfo(core.dtype).eps)
        except NumericalError as error:
            raise NumericalError(_NOT_DEFINITE) from error
        inner = torch.eye(len(core), dtype=core.dtype, device=core.device)
        for rows in spans(len(x), _ROWS):
            half = self._half(x[rows])  # (r, rows): half^T half = Q
            diagonal = noise[rows] + (block(x[rows], None) - half.square().sum(dim=0)).clamp_(min=0)
            inner += (half / diagonal) @ half.mT
        self.inner_root, bad = torch.linalg.cholesky_ex(inner)
        if int(bad):
            raise NumericalError(_NOT_DEFINITE)

    def _half(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.root, self.block(self.inducing_points, x), upper=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Variances ``(m,)`` of the latent function at x ``(m, d)``."""
        parts = []
        for rows in spans(len(x), _ROWS):
            half = self._half(x[rows])
            posterior = torch.linalg.solve_triangular(self.inner_root, half, upper=False)
            prior = self.block(x[rows], None)
            parts.append((prior - half.square().sum(dim=0)).clamp_(min=0) + posterior.square().sum(dim=0))
        return torch.cat(parts) if parts else x.new_zeros(0)

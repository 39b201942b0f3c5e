"""Posteriors of few training points in less than float64: factorized like GPyTorch's, but in float64.

A Cholesky factor in float32 loses what the noise is where it lies seven digits below the kernel's scale, and exists no
more below that: GPyTorch adds jitter then, with a warning, which changes the answer.
"""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from ...operators.access import float64
from ...settings import memory_budget
from .added_diag import AcceleratedAddedDiagLinearOperator
from .lazy_covariance import LazyCovariance
from .threshold import cholesky_points

_ARRAYS = 3  # of n x n float64 numbers at once


def root_of(noisy: Any) -> Tensor | None:
    """The Cholesky factor of ``K + noise`` ``(..., n, n)`` in float64, differentiable; None where GPyTorch's way is as
    good (float64), or the only one (a structure, too many points for the memory, not positive definite).

    :param noisy: not evaluated, so that the kernel can be in float64.
    """
    ours = isinstance(noisy, AcceleratedAddedDiagLinearOperator) and noisy.acceleration is not None
    if not ours or noisy.dtype == torch.float64 or noisy.shape[-1] > cholesky_points():
        return None
    if _ARRAYS * 8 * noisy.shape.numel() > memory_budget.value(noisy.device):
        return None
    root, failed = torch.linalg.cholesky_ex(float64(noisy))
    return None if bool(failed.any()) or not bool(torch.isfinite(root).all()) else root


class FactorizedCovariance(LazyCovariance):
    """``prior - half^T half``, ``(..., m, m)``, of which the diagonal costs a diagonal.

    :param prior: ``(..., m, m)``, not evaluated; :param half: ``root^-1 k(X, x)``, ``(..., n, m)`` float64.
    """

    def __init__(self, prior: LinearOperator, half: Tensor) -> None:
        super().__init__(prior, half)
        self.prior, self.half = prior, half

    def covariance(self) -> Tensor:
        """``(..., m, m)`` float64."""
        return float64(self.prior) - self.half.mT @ self.half

    def variances(self) -> Tensor:
        """``(..., m)`` float64."""
        return (float64(self.prior, diagonal=True) - self.half.square().sum(dim=-2)).clamp(min=0)

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.prior.batch_shape, self.half.shape[:-2])
        return torch.Size((*batch, *self.prior.shape[-2:]))

    @property
    def dtype(self) -> torch.dtype:
        """The prior's."""
        return self.prior.dtype


def conditioned(prior: LinearOperator, cross: LinearOperator, root: Tensor) -> FactorizedCovariance:
    """The posterior covariance.

    :param cross: k(x, X), ``(..., m, n)``, not evaluated.
    """
    c = float64(cross).mT
    batch = torch.broadcast_shapes(c.shape[:-2], root.shape[:-2])
    parts = (part.expand(*batch, *part.shape[-2:]) for part in (root, c))
    return FactorizedCovariance(prior, torch.linalg.solve_triangular(*parts, upper=False))

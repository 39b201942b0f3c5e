"""Posteriors of few training points: by one Cholesky factor in float64, whatever the model's dtype.

A factor in float32 loses the noise where it lies seven digits below the kernel's scale.  It does not exist where the
noise is smaller still: GPyTorch then adds jitter, with a warning, which changes the answer.
"""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import settings
from linear_operator.operators import LinearOperator
from torch import Tensor

from ...operators.access import float64
from ...operators.lazies import parameters_in
from ...operators.unchanged import State
from ...settings import memory_budget
from .added_diag import AcceleratedAddedDiagLinearOperator, left_to_us
from .lazy_covariance import LazyCovariance, positive
from .threshold import cholesky_points

_ARRAYS = 3  # of n x n float64 numbers at once


def root_of(noisy: Any, observed: Tensor | None = None) -> Tensor | None:
    """Return the Cholesky factor of ``K + noise`` ``(..., n, n)`` in float64, differentiable.

    None where GPyTorch has another way: for an operator whose structure it inverts, for more points than are to be
    factorized or than fit the memory, and where the matrix is not positive definite.

    :param noisy: not evaluated, so that the kernel can be in float64.
    :param observed: ``(n,)`` bool, which rows and columns are meant; None for all.
    """
    if not isinstance(noisy, AcceleratedAddedDiagLinearOperator) or noisy.acceleration is None:
        return None
    n = noisy.shape[-1] if observed is None else int(observed.sum())
    if n > cholesky_points() and left_to_us(settings.fast_computations.solves):
        return None
    structured = observed is None and noisy.dtype == torch.float64
    if structured and not isinstance(noisy.evaluate_kernel(), AcceleratedAddedDiagLinearOperator):
        return None
    if _ARRAYS * 8 * noisy.shape.numel() > memory_budget.value(noisy.device):
        return None
    matrix = float64(noisy)
    matrix = matrix if observed is None else matrix[..., observed, :][..., observed]
    root, failed = torch.linalg.cholesky_ex(matrix)
    return None if bool(failed.any()) or not bool(torch.isfinite(root).all()) else root


class FactorizedCovariance(LazyCovariance):
    """``prior - half^T half``, ``(..., m, m)``, of which the diagonal costs a diagonal.

    :param prior: ``(..., m, m)``, not evaluated; :param half: ``root^-1 k(X, x)``, ``(..., n, m)`` float64.
    :raises InputError: when the covariance is looked at after a hyperparameter of the prior was changed in place.
    """

    def __init__(self, prior: LinearOperator, half: Tensor) -> None:
        super().__init__(prior, half)
        self.prior, self.half = prior, half
        self._parameters = parameters_in(prior)
        self._state = State((), self._parameters)

    def changed(self) -> bool:
        """Whether a hyperparameter of the prior was."""
        return not self._state.holds((), self._parameters)

    def covariance(self) -> Tensor:
        """``(..., m, m)`` float64."""
        return float64(self.prior) - self.half.mT @ self.half

    def variances(self) -> Tensor:
        """``(..., m)`` float64."""
        prior = float64(self.prior, diagonal=True)
        return positive(prior - self.half.square().sum(dim=-2), prior)

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
    if root.dim() == 2 < c.dim():  # one system with the columns of the whole batch
        columns = c.movedim(-2, 0).reshape(c.shape[-2], -1)
        half = torch.linalg.solve_triangular(root, columns, upper=False)
        half = half.reshape(c.shape[-2], *c.shape[:-2], c.shape[-1]).movedim(0, -2)
        return FactorizedCovariance(prior, half)
    batch = torch.broadcast_shapes(c.shape[:-2], root.shape[:-2])
    parts = (part.expand(*batch, *part.shape[-2:]) for part in (root, c))
    return FactorizedCovariance(prior, torch.linalg.solve_triangular(*parts, upper=False))

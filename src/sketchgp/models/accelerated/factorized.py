"""Posteriors of few training points: by one Cholesky factor in float64, whatever the model's dtype.

A factor in float32 loses the noise where it lies seven digits below the kernel's scale.  It does not exist where the
noise is smaller still: GPyTorch then adds jitter, with a warning, which changes the answer.
"""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import settings
from torch import Tensor

from ...operators.access import float64
from ...settings import memory_budget
from .added_diag import AcceleratedAddedDiagLinearOperator, left_to_us
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

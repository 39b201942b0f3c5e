"""Elementwise products of covariances that GPyTorch had approximated before the library saw them.

``first.mul(second)`` of two operators with structure of their own (the covariance of a scaled sum or product of
kernels, and that of an ``IndexKernel``) factorizes both, above ``max_cholesky_size`` rows by Lanczos, with at most 100
columns.  Where the kernels are rough that is another matrix, and nothing tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_operator.operators import CholLinearOperator, LinearOperator, MulLinearOperator, RootLinearOperator
from torch import Tensor

from ...errors import ConvergenceWarning, warn
from ...operators.tiles import spans

_ROWS = 64  # of a block that is evaluated alone: of fewer rows than the factor's columns
_TOLERANCE = 1e-5


def _factorized(operator: Any) -> bool:
    """Return True if a product in the operator has a factor that may be an approximation."""
    if isinstance(operator, MulLinearOperator):
        sides = operator.left_linear_op, operator.right_linear_op
        return any(isinstance(side, RootLinearOperator) and not isinstance(side, CholLinearOperator) for side in sides)
    return isinstance(operator, LinearOperator) and any(_factorized(part) for part in operator._args)


@torch.no_grad()
def check_products(forward: Callable[..., Any], inputs: tuple[Tensor, ...], covariance: Any) -> None:
    """Warn where the diagonal of a factorized product is not that of the model's covariance.

    The diagonal is computed anew from blocks of rows that are few enough for a factor without error; an approximation
    by projection lies below it.

    :param forward: the model's own; :param inputs: its arguments; :param covariance: its result.
    """
    if not _factorized(covariance):
        return
    diagonal = covariance.diagonal(dim1=-1, dim2=-2)
    parts = []
    for rows in spans(diagonal.shape[-1], _ROWS):
        alone = forward(*(x[..., rows, :] for x in inputs)).lazy_covariance_matrix
        parts.append(alone.diagonal(dim1=-1, dim2=-2))
    expected = torch.cat(parts, dim=-1)
    largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = float((diagonal - expected).abs().max() / largest)
    if error > max(_TOLERANCE, 100 * torch.finfo(expected.dtype).eps):
        warn(
            "The elementwise product of two covariances in the model's forward was approximated by GPyTorch before "
            f"sketchgp saw it: its diagonal is off by {error:.1e} of its largest entry, and answers may be by more. "
            "Multiply the kernels instead of their covariances, with active_dims for the inputs of each.",
            ConvergenceWarning,
            see="product-of-covariances",
        )

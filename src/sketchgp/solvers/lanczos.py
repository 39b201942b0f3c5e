"""Lanczos matrices from the coefficients of conjugate gradients (Golub and Van Loan, "Matrix Computations", 10.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tridiagonal(coefficients: Sequence[Tensor], like: Tensor) -> Tensor:
    """``(..., k, k)`` from alpha and beta of k iterations, ``(2, ...)`` each; alpha is 0 once a system has ended.

    Rows past a system's end are those of the identity.

    :param like: ``(...)``, of the shape and dtype that is wanted where there are no iterations: the identity then.
    """
    count = max(len(coefficients), 1)
    matrix = like.new_zeros(*like.shape, count, count)
    matrix.diagonal(dim1=-2, dim2=-1).fill_(1)
    for k, (alpha, _) in enumerate(coefficients):
        active = alpha > 0
        entry = 1 / torch.where(active, alpha, 1)
        if k:
            before, ratio = coefficients[k - 1]
            safe = torch.where(before > 0, before, 1)
            entry = entry + torch.where(before > 0, ratio / safe, 0)
            side = torch.where(active & (before > 0), ratio.sqrt() / safe, 0)
            matrix[..., k, k - 1] = matrix[..., k - 1, k] = side
        matrix[..., k, k] = torch.where(active, entry, 1)
    return matrix

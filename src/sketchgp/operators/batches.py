"""Batches of kernel matrices that are one matrix over and over, and the derivatives of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .engines import TILED
from .shapes import leading_to_columns, repeated
from .shared import derivative

if TYPE_CHECKING:
    from .kernel_matrix import KernelMatrix


def repeats(matrix: KernelMatrix) -> bool:
    """Whether a batch is one matrix over and over: unbatched kernel, inputs expanded without copies."""
    once = not matrix.kernel.batch_shape and matrix.batch_shape.numel() > 0
    return once and repeated(matrix.x1) and repeated(matrix.x2)


def single(matrix: KernelMatrix) -> KernelMatrix:
    """The matrix that a batch repeats."""
    x1, x2 = (x.detach().flatten(0, -3)[0].requires_grad_(x.requires_grad) for x in (matrix.x1, matrix.x2))
    return matrix._with(x1, x1 if matrix.x2 is matrix.x1 else x2, matrix.same)


def derivative_of_batch(matrix: KernelMatrix, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of ``sum_t left_t^T K right_t`` for each of the operator's tensors, without autograd.

    :param left_vecs: ``(..., n, t)`` or ``(n,)``; :param right_vecs: ``(..., m, t)`` or ``(m,)``.
    """
    if left_vecs.dim() == 1:
        left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
    batch = torch.broadcast_shapes(matrix.batch_shape, left_vecs.shape[:-2], right_vecs.shape[:-2])
    more = len(batch) - len(matrix.batch_shape)
    if len(matrix.batch_shape) and batch == matrix.batch_shape and repeats(matrix):  # one matrix: more columns
        one, count = single(matrix), batch.numel()
        sides = (v.expand(*batch, *v.shape[-2:]).movedim(-2, 0).flatten(1) for v in (left_vecs, right_vecs))
        of_x1, of_x2, *rest = one._derivative(*sides)
        of_x1, of_x2 = (
            None if g is None else (g / count).expand(x.shape) for g, x in ((of_x1, matrix.x1), (of_x2, matrix.x2))
        )
        return (of_x1, of_x2, *rest)
    if batch[more:] != matrix.batch_shape:  # a batch of size one against a larger one: its parts add up
        return TILED.dense_derivative(matrix, (left_vecs @ right_vecs.mT).sum_to_size(matrix.shape))
    left, right = (
        leading_to_columns(v, batch, more)
        .reshape(*matrix.flat_batch, v.shape[-2], batch[:more].numel() * v.shape[-1])
        .to(matrix.compute_dtype)
        for v in (left_vecs, right_vecs)
    )
    return derivative(matrix, left, right)

"""The rows of a kernel matrix that each row correlates with most, and the variance that they leave open."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.access import Access
from ..operators.tiles import spans

_ENTRIES = 2**23  # entries of a block at once


@torch.no_grad()
def nearest(matrix: KernelMatrix, count: int) -> Tensor:
    """Return the ``count`` other rows that correlate most with each, ``(n, count)``; K is evaluated once.

    :param matrix: ``(n, n)`` without batch; :param count: below n.
    """
    n = matrix.shape[-1]
    rows_of_all = torch.arange(n, device=matrix.device)
    near = rows_of_all.new_empty(n, count)
    scale = matrix.diagonal(dim1=-1, dim2=-2).clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    for rows in spans(n, max(1, _ENTRIES // n)):
        tile = matrix.rows(rows_of_all[rows]).to_dense().abs_().mul_(scale)
        tile.diagonal(offset=rows.start).fill_(-1)
        near[rows] = tile.topk(count, dim=1, sorted=False).indices
    return near


@torch.no_grad()
def conditional_variances(matrix: KernelMatrix, noise: Tensor, near: Tensor) -> Tensor:
    """Return variances of observations given those of their neighbours, ``(n,)`` float64, at least ``1 / (A^-1)_ii``.

    :param noise: ``(n,)`` float64; :param near: ``(n, m)``.
    """
    n, m = near.shape
    access, variances = Access(matrix), torch.empty_like(noise)
    for rows in spans(n, max(1, _ENTRIES // (m + 1) ** 2)):
        index = torch.cat([torch.arange(rows.start, rows.stop, device=near.device).unsqueeze(1), near[rows]], dim=1)
        block = access.block(index, index)
        block.diagonal(dim1=-2, dim2=-1).add_(noise[index])
        root, failed = torch.linalg.cholesky_ex(block[:, 1:, 1:])
        half = torch.linalg.solve_triangular(root, block[:, 1:, :1], upper=False).square().sum(dim=(1, 2))
        variances[rows] = block[:, 0, 0] - torch.where(failed > 0, 0, half)
    return torch.maximum(variances, noise)

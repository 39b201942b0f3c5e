"""The arc-cosine kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from .. import checks


class ArcCosineKernel(Kernel):
    r"""The arc-cosine kernel: :math:`k(x, z) = \|x\|^q \|z\|^q J_q(\theta) / \pi` with theta the angle between x and z.

    It is the covariance of an infinitely wide layer of units :math:`\max(0, w \cdot x)^q` with normal weights w, with
    :math:`J_0 = \pi - \theta`, :math:`J_1 = \sin\theta + (\pi - \theta)\cos\theta` and
    :math:`J_2 = 3 \sin\theta\cos\theta + (\pi - \theta)(1 + 2\cos^2\theta)`.  A layer with a bias is had by a column
    of ones in x.  Cho and Saul, "Kernel methods for deep learning" (NeurIPS 2009).

    There is no output scale; wrap it in a ``ScaleKernel``.

    :param order: q: 0 for steps, 1 for rectified linear units, 2 for their squares.
    :param active_dims: the dimensions that the kernel looks at.
    :raises InputError: for what is something else.
    """

    is_stationary = False

    def __init__(self, order: int = 1, active_dims: Sequence[int] | None = None) -> None:
        dims = None if active_dims is None else checks.counts("ArcCosineKernel", "active_dims", active_dims, least=0)
        super().__init__(active_dims=dims)
        self.order = checks.count("ArcCosineKernel", "order", order, least=0, most=2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """The kernel between x1 ``(..., n, d)`` and x2 ``(..., m, d)``: ``(..., n, m)``, or ``(..., n)`` for
        ``diag``."""
        lengths = x1.norm(dim=-1), x2.norm(dim=-1)
        if diag:
            products, size = (x1 * x2).sum(dim=-1), lengths[0] * lengths[1]
        else:
            products, size = x1 @ x2.mT, lengths[0].unsqueeze(-1) * lengths[1].unsqueeze(-2)
        cosine = (products / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp(-1, 1)
        edge = 1 - torch.finfo(cosine.dtype).eps  # where the slope of acos is infinite
        angle = torch.where(cosine.abs() < edge, cosine, cosine.detach()).acos()
        sine, rest = (1 - cosine.square()).clamp_min(0), math.pi - angle
        sine = torch.where(sine > 0, sine, 1).sqrt() * (sine > 0)
        if self.order == 0:
            result = rest
        elif self.order == 1:
            result = sine + rest * cosine
        else:
            result = 3 * sine * cosine + rest * (1 + 2 * cosine.square())
        return size**self.order * result / math.pi

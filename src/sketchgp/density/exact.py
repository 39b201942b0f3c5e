"""The quadratic form and the log determinant of a Gaussian log density by one factorization, with their gradient.

``d(r^T A^-1 r) = 2 w^T dr - w^T dA w`` and ``d log det A = tr(A^-1 dA)`` for ``w = A^-1 r``: beside the factor the
gradient takes the inverse, ``n^3`` operations in all, where differentiating the factorization takes several times that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import NumericalError
from ..operators.access import float64
from ..operators.substitution import cholesky_solve
from .base import LogDensity


class Exact(LogDensity):
    """Log densities by one Cholesky factorization in float64, whatever n is: ``n^3`` operations and n x n memory."""

    exact = True

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``r^T A^-1 r`` of each column and ``log det A``, float64; see :class:`LogDensity`.

        :raises NumericalError: where A is not positive definite in float64.
        """
        matrix, noise = float64(operator.latent), operator.noise.to(torch.float64)
        batch = torch.broadcast_shapes(matrix.shape[:-2], noise.shape[:-1])
        matrix, noise = matrix.expand(*batch, -1, -1), noise.expand(*batch, -1)
        return _InvQuadLogdet.apply(self, matrix, noise, columns.to(torch.float64))


class _InvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, density: Exact, matrix: Tensor, noise: Tensor, given: Tensor
    ) -> tuple[Tensor, Tensor]:
        # in LAPACK's column-major order, so that what follows is done in place, without fresh memory
        matrix, batch = matrix.mT.clone(memory_format=torch.contiguous_format).mT, matrix.shape[:-2]
        matrix.diagonal(dim1=-1, dim2=-2).add_(noise)  # cheaper than adding a diagonal matrix
        root, failed = torch.linalg.cholesky_ex(matrix, out=(matrix, matrix.new_empty(batch, dtype=torch.int32)))
        if bool(failed.any()) or not bool(torch.isfinite(root.diagonal(dim1=-1, dim2=-2)).all()):
            raise NumericalError("K + noise is not positive definite to float64; raise the noise.", see="not-definite")
        columns = density.with_basis(given)
        weights = cholesky_solve(columns, root)
        each, weights = density.regressed((columns * weights).sum(dim=-2), weights)
        determinant = 2 * root.diagonal(dim1=-1, dim2=-2).log().sum(dim=-1)
        if any(ctx.needs_input_grad):
            inverted = any(ctx.needs_input_grad[1:3])
            ctx.save_for_backward(torch.cholesky_inverse(root, out=root) if inverted else root[..., :0], weights)
        return each, determinant

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, of_each: Tensor, of_determinant: Tensor
    ) -> tuple[Tensor | None, ...]:
        inverse, weights = ctx.saved_tensors
        scaled = weights * of_each.unsqueeze(-2)
        of_matrix = of_noise = None
        if any(ctx.needs_input_grad[1:3]):
            of_matrix = inverse * of_determinant[..., None, None]
            n, t = weights.shape[-2:]
            of_matrix.view(-1, n, n).baddbmm_(scaled.reshape(-1, n, t), weights.reshape(-1, n, t).mT, alpha=-1)
            of_noise = of_matrix.diagonal(dim1=-1, dim2=-2).clone()
        return None, of_matrix, of_noise, 2 * scaled

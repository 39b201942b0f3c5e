"""``P = F F^T + diag(d)`` with F made of a kernel matrix, differentiable in the kernel with few n x r arrays in memory.

Functions of P have the gradient ``H = G F`` of F, half of it, row by row; :mod:`sketchgp.operators.moving_factors`
takes it to the kernel.  ``F^T H`` takes no product of n r^2 where it is known: it is ``I - C^-1`` for log det P, C the
capacitance matrix, and of few columns where H is; ``H L^-1`` is so there, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..space import Factor
from .access import Access
from .engines.base import Gradients
from .kernel_matrix import KernelMatrix
from .low_rank_plus_diagonal import LowRankPlusDiagonal, Rows, inverse_rows
from .moving_factors import ENTRIES, MovingFactor
from .tiles import spans


class _Logdet(torch.autograd.Function):
    """log det P; its derivative with respect to P is ``G = P^-1``."""

    @staticmethod
    def forward(ctx: Any, operator: MovingPlusDiagonal, *args: Tensor) -> Tensor:
        ctx.operator = operator.detached(None)
        ctx.save_for_backward(*args)
        return LowRankPlusDiagonal.log_determinant(ctx.operator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        operator, diagonal = ctx.operator, ctx.saved_tensors[-1]
        root = operator.capacitance_root()
        of_diagonal = 1 / diagonal  # right as it is for rank 0

        def rows_of(rows: slice) -> Tensor:  # H = P^-1 F = D^-1 F C^-1
            half, of_diagonal[rows] = inverse_rows(operator.rows(rows), diagonal[rows], root)
            return operator.moving.back(half * grad)

        core = -torch.cholesky_inverse(root)  # F^T H
        core.diagonal().add_(1)
        gradients = operator.pulled_back(ctx.saved_tensors, rows_of, core * grad)
        return (None, *gradients, operator.completed(of_diagonal) * grad)


class MovingPlusDiagonal(LowRankPlusDiagonal):
    """The preconditioner above for one float64 kernel matrix.

    :param x: ``(n, d)`` float64 inputs.
    :param tensors: the kernel's parameters, in the order of ``names``, and the diagonal ``(n,)``: what is
        differentiated, with x.
    :param kernel: the kernel; :param names: the names of its parameters.
    :param moving: F and what it is made of.
    :param engine: of products with all of K, which sketches take.
    :param out_dtype: dtype the operator shows to its callers.
    """

    def __init__(
        self,
        x: Tensor,
        *tensors: Tensor,
        kernel: Any,
        names: tuple[str, ...],
        moving: MovingFactor,
        engine: str = "tiled",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super(LowRankPlusDiagonal, self).__init__(
            x, *tensors, kernel=kernel, names=names, moving=moving, engine=engine, out_dtype=out_dtype
        )
        self.diagonal_part, self.out_dtype = tensors[-1], out_dtype
        self.kernel, self.names, self.moving, self.engine = kernel, names, moving, engine
        self.known_root: Tensor | None = None

    def _matrix(self, x: Tensor, *parameters: Tensor) -> KernelMatrix:
        return KernelMatrix(x, x, *parameters, kernel=self.kernel, names=self.names, engine=self.engine, same=True)

    @property
    def factor(self) -> Factor:  # type: ignore[override]
        """F, ``(n, r)``, without gradients."""
        factor = self.moving.factor
        if factor is None:
            matrix = Access(self._matrix(*(t.detach() for t in self._args[:-1])))
            factor = self.moving.factor = self.moving.made(matrix)
        return factor

    def _rebuilt(self, tensors: tuple[Tensor, ...], out_dtype: torch.dtype | None) -> MovingPlusDiagonal:
        options = {"kernel": self.kernel, "names": self.names, "moving": self.moving, "engine": self.engine}
        copy = self.__class__(*tensors, **options, out_dtype=out_dtype)
        copy.known_root = self.capacitance_root()
        return copy

    def detached(self, out_dtype: torch.dtype | None) -> MovingPlusDiagonal:
        return self._rebuilt(tuple(t.detach() for t in self._args), out_dtype)

    def type(self, dtype: torch.dtype) -> LowRankPlusDiagonal:
        return self._rebuilt(self._args, dtype)

    def plain(self) -> LowRankPlusDiagonal:
        """The same matrix with a factor that autograd can differentiate: as accurate, and five times the memory."""
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in self._args)):
            return LowRankPlusDiagonal(self.factor, self.diagonal_part.detach(), out_dtype=self.out_dtype)
        factor = self.moving.live(Access(self._matrix(*self._args[:-1])))
        return LowRankPlusDiagonal(factor, self.diagonal_part, out_dtype=self.out_dtype)

    def to_dense(self) -> Tensor:
        return self.plain().to_dense()

    def _diagonal(self) -> Tensor:
        return self.plain()._diagonal()

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LowRankPlusDiagonal:
        return self.plain()._expand_batch(batch_shape)

    def to(self, *args: Any, **kwargs: Any) -> LowRankPlusDiagonal:
        return self.plain().to(*args, **kwargs)

    def _permute_batch(self, *dims: int) -> LowRankPlusDiagonal:
        return self.plain()._permute_batch(*dims)

    def _unsqueeze_batch(self, dim: int) -> LowRankPlusDiagonal:
        return self.plain()._unsqueeze_batch(dim)

    def log_determinant(self) -> Tensor:
        return _Logdet.apply(self, *self._args).to(self.dtype)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> Gradients:
        batch = torch.broadcast_shapes(left_vecs.shape[:-2], right_vecs.shape[:-2])
        left, right = (v.expand(*batch, *v.shape[-2:]).movedim(-2, 0).flatten(1) for v in (left_vecs, right_vecs))
        return super()._bilinear_derivative(left, right)

    @torch.no_grad()
    def pull_back_products(self, tensors: tuple[Tensor, ...], pairs: list[tuple[Tensor, Tensor]]) -> Gradients:
        """:meth:`pull_back` of ``H = sum_i a_i b_i``, for a_i ``(n, t)`` and b_i ``(t, r)``."""
        a, b = torch.cat([a for a, _ in pairs], dim=1), torch.cat([b for _, b in pairs])
        back = self.moving.back(b)
        return self.pulled_back(tensors, lambda rows: a[rows] @ back, (self.factor.mT @ a) @ b)

    @torch.no_grad()
    def pull_back(self, tensors: tuple[Tensor, ...], rows_of: Rows) -> Gradients:
        """Gradients for x and the kernel's parameters from H, half the gradient of F, given by rows.

        :param tensors: x, the parameters and the diagonal, with the flags that say which need a gradient.
        :param rows_of: ``slice -> (h, r)`` rows of H; called once for each block, whatever needs a gradient.
        """
        core = torch.zeros(self.rank, self.rank, dtype=self.factor.dtype, device=self.factor.device)

        def back(rows: slice) -> Tensor:
            h = rows_of(rows)
            core.add_(self.rows(rows).mT @ h)
            return self.moving.back(h)

        return self.pulled_back(tensors, back, core, whole=False)

    @torch.no_grad()
    def pulled_back(self, tensors: tuple[Tensor, ...], rows_of: Rows, core: Tensor, whole: bool = True) -> Gradients:
        """:meth:`pull_back` from the two matrices that H is wanted for.

        :param tensors: x, the parameters and the diagonal, with the flags that say which need a gradient.
        :param rows_of: and ``core`` and ``whole``: see :meth:`MovingFactor.gradients`.
        """
        held, r = self.held, self.moving.width
        blocks = list(spans(held.stop, max(1, ENTRIES // max(r, 1)), held.start)) if r else []
        if not r or not any(t.requires_grad for t in tensors[:-1]):
            for rows in blocks:
                rows_of(rows)
            return (None,) * (len(tensors) - 1)
        matrix = self._matrix(*tensors[:-1])
        of_x, of_x2, *rest = self.moving.gradients(matrix, blocks, rows_of, core, whole)
        return (of_x if of_x is None or of_x2 is None else of_x + of_x2, *rest)

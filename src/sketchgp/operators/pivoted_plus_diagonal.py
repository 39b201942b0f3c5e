"""``P = F F^T + diag(d)`` with F made of columns of K, differentiable in the kernel, with one n x r array in memory.

With the factor F of ``K(:, S) K(S, S)^-1 K(S, :) = F F^T``, differentiating through F by autograd keeps K(:, S), F and
their gradients: five arrays of n x r.  But the gradient G of every function of P used here is known in closed form,
so that ``H = G F`` is known row by row, and with ``L L^T = K(S, S)``, ``F = K(:, S) L^-T``

    gradient of K(:, S) = 2 H L^-1,    gradient of K(S, S) = -L^-T (F^T H) L^-1.

The same holds for any function of F whose gradient is 2 H; where ``F^T H`` is not symmetric, the symmetric matrix with
its upper triangle takes its place (the derivative of a Cholesky factorization).
Where ``F = K(:, S) C`` for numbers C that stay as they are (EigenPro's), the gradient of K(:, S) is ``2 H C^T`` and
there is no other.
Blocks of rows of the first are handed to the kernel at once.  ``F^T H`` takes no product of n r^2 where it is known:
it is ``I - C^-1`` for log det P, C the capacitance matrix, and of few columns where H is; ``H L^-1`` is so there, too.
Where ranks work together, each has its own rows of F and hands over those; the gradients are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import Factor, ShardedRows, in_force
from .engines import TILED
from .kernel_matrix import KernelMatrix
from .low_rank_plus_diagonal import Gradients, LowRankPlusDiagonal, Rows, inverse_rows
from .shared import summed
from .tiles import spans

_ENTRIES = 2**22  # of F that are worked on at once


@dataclass
class PivotedFactor:
    """``F = K(:, S) L^-T`` or ``K(:, S) C``, without gradients: pivots S ``(s,)``, factor F ``(n, r)``.

    L = core_root ``(r, r)`` is the lower Cholesky factor of K(S, S), with whatever shift made it exist; C =
    coefficients ``(s, r)`` stay as they are while K moves.  One of them is None.
    F may be taken away (None) by whoever needs the memory for another; an operator that is used after all then makes
    it again.
    """

    pivots: Tensor
    core_root: Tensor | None
    factor: Factor | None
    coefficients: Tensor | None = None

    def back(self, rows: Tensor) -> Tensor:
        """``H L^-1`` or ``H C^T`` ``(h, s)`` of rows of H ``(h, r)``: half the gradient of those of K(:, S)."""
        if self.core_root is None:
            assert self.coefficients is not None
            return rows @ self.coefficients.mT
        return torch.linalg.solve_triangular(self.core_root, rows, upper=False, left=False)

    def made(self, matrix: Any) -> Factor:
        """F, ``(n, r)``, of a matrix that gives ``matrix.block(rows, columns)``."""
        return factor_of_columns(matrix, self.pivots, self.core_root, self.coefficients)


@torch.no_grad()
def factor_of_columns(matrix: Any, pivots: Tensor, root: Tensor | None, coefficients: Tensor | None = None) -> Factor:
    """``K(:, S) L^-T`` or ``K(:, S) C``, ``(n, r)``, by blocks of rows; K(:, S) is never there as a whole.

    :param matrix: gives K by ``matrix.block(rows, columns)``.
    """
    made_of = root if coefficients is None else coefficients
    assert made_of is not None
    n = matrix.shape[-2] if isinstance(matrix, KernelMatrix) else matrix.n
    shards = in_force()
    held = slice(0, n) if shards is None else shards.span(n)
    factor = made_of.new_empty(held.stop - held.start, made_of.shape[-1])
    for rows in spans(held.stop, max(1, _ENTRIES // max(len(pivots), 1)), held.start):
        part = matrix.block(torch.arange(rows.start, rows.stop, device=made_of.device), pivots)
        if coefficients is None:
            part = torch.linalg.solve_triangular(made_of, part.mT, upper=False).mT
        else:
            part = part @ coefficients
        factor[rows.start - held.start : rows.stop - held.start] = part
    return factor if shards is None else ShardedRows(factor, n, shards)


class _Logdet(torch.autograd.Function):
    """log det P; its derivative with respect to P is ``G = P^-1``."""

    @staticmethod
    def forward(ctx: Any, operator: PivotedPlusDiagonal, *args: Tensor) -> Tensor:
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
            return operator.pivoted.back(half * grad)

        core = -torch.cholesky_inverse(root)  # F^T H
        core.diagonal().add_(1)
        gradients = operator.pulled_back(ctx.saved_tensors, rows_of, core * grad)
        return (None, *gradients, operator.completed(of_diagonal) * grad)


class PivotedPlusDiagonal(LowRankPlusDiagonal):
    """The preconditioner above for one float64 kernel matrix.

    :param x: ``(n, d)`` float64 inputs.
    :param tensors: the kernel's parameters, in the order of ``names``, and the diagonal ``(n,)``: what is
        differentiated, with x.
    :param kernel: the kernel; :param names: the names of its parameters.
    :param pivoted: F and what it is made of.
    :param out_dtype: dtype the operator shows to its callers.
    """

    def __init__(
        self,
        x: Tensor,
        *tensors: Tensor,
        kernel: Any,
        names: tuple[str, ...],
        pivoted: PivotedFactor,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super(LowRankPlusDiagonal, self).__init__(
            x, *tensors, kernel=kernel, names=names, pivoted=pivoted, out_dtype=out_dtype
        )
        self.diagonal_part, self.out_dtype = tensors[-1], out_dtype
        self.kernel, self.names, self.pivoted = kernel, names, pivoted
        self._root_cache: Tensor | None = None

    @property
    def factor(self) -> Factor:  # type: ignore[override]
        """F, ``(n, r)``, without gradients."""
        factor = self.pivoted.factor
        if factor is None:
            x, *parameters = (t.detach() for t in self._args[:-1])
            matrix = KernelMatrix(x, x, *parameters, kernel=self.kernel, names=self.names, engine="tiled", same=True)
            factor = self.pivoted.factor = self.pivoted.made(matrix)
        return factor

    def _rebuilt(self, tensors: tuple[Tensor, ...], out_dtype: torch.dtype | None) -> PivotedPlusDiagonal:
        options = {"kernel": self.kernel, "names": self.names, "pivoted": self.pivoted}
        copy = self.__class__(*tensors, **options, out_dtype=out_dtype)
        copy._root_cache = self.capacitance_root()
        return copy

    def detached(self, out_dtype: torch.dtype | None) -> PivotedPlusDiagonal:
        return self._rebuilt(tuple(t.detach() for t in self._args), out_dtype)

    def type(self, dtype: torch.dtype) -> LowRankPlusDiagonal:
        return self._rebuilt(self._args, dtype)

    def plain(self) -> LowRankPlusDiagonal:
        """The same matrix with a factor that autograd can differentiate: as accurate, and five times the memory."""
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in self._args)):
            return LowRankPlusDiagonal(self.factor, self.diagonal_part.detach(), out_dtype=self.out_dtype)
        x, *parameters = self._args[:-1]
        matrix = KernelMatrix(x, x, *parameters, kernel=self.kernel, names=self.names, engine="tiled", same=True)
        pivots, root = self.pivoted.pivots, self.pivoted.core_root
        if root is None:
            assert self.pivoted.coefficients is not None
            factor = matrix.columns(pivots) @ self.pivoted.coefficients
        else:
            core = matrix.block(pivots, pivots)
            live = torch.linalg.cholesky(core + (root @ root.mT - core).detach())
            factor = torch.linalg.solve_triangular(live, matrix.columns(pivots).mT, upper=False).mT
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
        over = self.pivoted.back(b)
        return self.pulled_back(tensors, lambda rows: a[rows] @ over, (self.factor.mT @ a) @ b)

    @torch.no_grad()
    def pull_back(self, tensors: tuple[Tensor, ...], rows_of: Rows) -> Gradients:
        """Gradients for x and the kernel's parameters from H, half the gradient of F, given by rows.

        :param tensors: x, the parameters and the diagonal, with the flags that say which need a gradient.
        :param rows_of: ``slice -> (h, r)`` rows of H; called once for each block, whatever needs a gradient.
        """
        core = torch.zeros(self.rank, self.rank, dtype=self.factor.dtype, device=self.factor.device)

        def over(rows: slice) -> Tensor:
            h = rows_of(rows)
            core.add_(self.rows(rows).mT @ h)
            return self.pivoted.back(h)

        return self.pulled_back(tensors, over, core, in_parts=True)

    @torch.no_grad()
    def pulled_back(
        self, tensors: tuple[Tensor, ...], rows_of: Rows, core: Tensor, in_parts: bool = False
    ) -> Gradients:
        """:meth:`pull_back` from the two matrices that H is wanted for.

        :param tensors: x, the parameters and the diagonal, with the flags that say which need a gradient.
        :param rows_of: ``slice -> (h, s)`` rows of ``H L^-1`` or ``H C^T``; called once for each block, whatever
            needs a gradient.
        :param core: ``F^T H``, ``(r, r)``; read, where there is an L, when all rows have been asked for.
        :param in_parts: whether a rank's own rows make a part of it only.
        """
        x, *parameters = tensors[:-1]
        pivots, root = self.pivoted.pivots, self.pivoted.core_root
        r, held = len(pivots), self.held
        shards = None if isinstance(self.factor, Tensor) else self.factor.shards
        blocks = list(spans(held.stop, max(1, _ENTRIES // max(r, 1)), held.start)) if r else []
        if not r or not any(t.requires_grad for t in (x, *parameters)):
            for rows in blocks:
                rows_of(rows)
            return (None,) * (1 + len(parameters))
        of_x = torch.zeros_like(x) if x.requires_grad else None
        totals = [torch.zeros_like(p) if p.requires_grad else None for p in parameters]
        chosen = x.detach()[pivots].requires_grad_(x.requires_grad)

        def add(rows: Tensor, gradient: Tensor) -> None:
            part = x.detach()[rows].requires_grad_(x.requires_grad)
            block = KernelMatrix(part, chosen, *parameters, kernel=self.kernel, names=self.names, engine="tiled")
            block.coincident = (rows.unsqueeze(1) == pivots).nonzero().mT
            of_rows, of_chosen, *found = TILED.dense_derivative(block, gradient)
            for total, value in zip(totals, found, strict=True):
                if total is not None and value is not None:
                    total += value
            if of_x is not None and of_rows is not None and of_chosen is not None:
                of_x.index_add_(0, rows, of_rows)
                of_x.index_add_(0, pivots, of_chosen)

        for rows in blocks:
            add(torch.arange(rows.start, rows.stop, device=x.device), 2 * rows_of(rows))
        if shards is not None:
            of_x, *totals = summed(shards, (of_x, *totals))
            core = shards.sum(core) if in_parts and root is not None else core
        if root is None:
            return (of_x, *totals)
        upper = core.triu()
        core = (upper + upper.mT) - torch.diag(core.diagonal())
        inner = torch.linalg.solve_triangular(root, core, upper=False, left=False)
        add(pivots, -torch.linalg.solve_triangular(root.mT, inner, upper=True))
        return (of_x, *totals)

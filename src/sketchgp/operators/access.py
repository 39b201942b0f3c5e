"""Columns, blocks and diagonal of any symmetric ``LinearOperator``, in float64: what low-rank methods read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import settings, to_dense, to_linear_operator
from linear_operator.operators import (
    ConstantMulLinearOperator,
    DenseLinearOperator,
    KernelLinearOperator,
    LinearOperator,
    MulLinearOperator,
    PsdSumLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from .generic_tiles import call
from .kernel_matrix import KernelMatrix
from .lazies import without_keops
from .tiles import spans

SUMS = (SumLinearOperator, PsdSumLinearOperator)
_SMALL = 2**22  # entries of a float64 matrix that is evaluated whole, and not by tiles
_BLOCK = 512  # rows of a block whose diagonal is taken
_CONVERTED = 2**22  # entries of a stored matrix that are converted to float64 at once


def float64(operator: Any, diagonal: bool = False) -> Tensor:
    """A part of a covariance, or its diagonal, dense and differentiable; what is made of kernels is evaluated in
    float64."""
    operator = to_linear_operator(operator)
    if isinstance(operator, LazyEvaluatedKernelTensor):
        whole = operator.dtype == torch.float64 and (diagonal or operator.shape.numel() <= _SMALL)
        if whole and diagonal and (known := _diagonal_alone(operator)) is not None:
            return known
        found = None if whole else KernelMatrix.from_lazy(operator, "tiled")
        operator = operator.evaluate_kernel() if found is None else found
    if isinstance(operator, SUMS):
        first, *others = (float64(part, diagonal) for part in operator.linear_ops)
        return sum(others, first)
    if isinstance(operator, MulLinearOperator):
        return float64(operator.left_linear_op, diagonal) * float64(operator.right_linear_op, diagonal)
    if isinstance(operator, ConstantMulLinearOperator):
        constant = operator._constant.to(torch.float64)
        constant = constant.reshape(*constant.shape, *([1] if diagonal else [1, 1]))
        return float64(operator.base_linear_op, diagonal) * constant
    if isinstance(operator, KernelMatrix):
        operator = operator.type(torch.float64)
    return (operator.diagonal(dim1=-1, dim2=-2) if diagonal else to_dense(operator)).to(torch.float64)


def _diagonal_alone(lazy: LazyEvaluatedKernelTensor) -> Tensor | None:
    """The diagonal of an unevaluated kernel, computed by itself; None for kernels that give more than was asked for."""
    x1, x2 = lazy.x1, lazy.x2
    if lazy.params or lazy.last_dim_is_batch or lazy.kernel.num_outputs_per_input(x1, x2) != 1:
        return None
    with torch.set_grad_enabled(lazy._is_grad_enabled and torch.is_grad_enabled()):
        values = call(without_keops(lazy.kernel), x1, x2, diag=True)
    if values.shape[-1:] != lazy.shape[-1:] or values.dim() >= lazy.dim():
        return None
    return values.expand(lazy.shape[:-1])


class Access:
    """Reads parts of one symmetric ``(..., n, n)`` operator, differentiably where autograd is on.

    :param operator: the matrix; a ``KernelMatrix`` is evaluated in float64, others in their own dtype and then
        converted.
    """

    def __init__(self, operator: LinearOperator) -> None:
        self.source, self.source_dtype = operator, operator.dtype
        self.exact = isinstance(operator, KernelMatrix)
        self.operator = operator.type(torch.float64) if self.exact else operator.evaluate_kernel()

    @classmethod
    def stored(cls, matrix: Tensor) -> Access:
        """Of a dense symmetric tensor ``(..., n, n)``."""
        return cls(DenseLinearOperator(matrix))

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.operator.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.operator.batch_shape

    @property
    def device(self) -> torch.device:
        return self.operator.device

    @property
    def resolution(self) -> float:
        """Relative size of the rounding errors in the entries."""
        return torch.finfo(torch.float64 if self.exact else self.source_dtype).eps

    def diagonal(self) -> Tensor:
        """``(..., n)``."""
        return diagonal(self.operator).to(torch.float64)

    def columns(self, indices: Tensor) -> Tensor:
        """``(..., n, r)`` for indices ``(..., r)`` (one set a batch element) or ``(r,)``."""
        return columns(self.operator, indices).to(torch.float64)

    def block(self, rows: Tensor, columns_: Tensor) -> Tensor:
        """``(..., p, q)`` for indices ``(..., p)`` and ``(..., q)``."""
        return block(self.operator, rows, columns_).to(torch.float64)

    def matmul(self, rhs: Tensor) -> Tensor:
        """``K rhs`` for rhs ``(..., n, t)`` in float64, differentiable."""
        rhs = rhs.to(self.operator.dtype)
        if isinstance(self.operator, KernelMatrix) and not torch.is_grad_enabled():  # also of rows on disk
            return self.operator.product(rhs).to(torch.float64)
        return (self.operator @ rhs).to(torch.float64)

    def element(self, index: tuple[int, ...]) -> Access:
        """One matrix of the batch, without gradients."""
        return Access(element(self.operator, index))


@torch.no_grad()
def element(operator: LinearOperator, index: tuple[int, ...]) -> LinearOperator:
    """One matrix of a batch, without gradients; sums, products and multiples are taken part by part.

    :param operator: of the whole batch shape, and evaluated (``evaluate_kernel``).
    """
    if isinstance(operator, KernelMatrix):
        return operator.element(index)
    batch = operator.batch_shape
    if isinstance(operator, SUMS):
        return SumLinearOperator(*(element(_expanded(part, batch), index) for part in operator.linear_ops))
    if isinstance(operator, MulLinearOperator):
        sides = (_expanded(part, batch) for part in (operator.left_linear_op, operator.right_linear_op))
        return MulLinearOperator(*(element(side, index) for side in sides))
    if isinstance(operator, ConstantMulLinearOperator):
        base, constant = operator.base_linear_op, operator._constant
        return ConstantMulLinearOperator(element(_expanded(base, batch), index), constant.expand(batch)[index])
    return operator[index]


def _expanded(operator: LinearOperator, batch: torch.Size) -> LinearOperator:
    return operator if operator.batch_shape == batch else operator.expand(*batch, *operator.shape[-2:])


def diagonal(operator: LinearOperator) -> Tensor:
    """``(..., n)``.  Sums and products are taken part by part."""
    if isinstance(operator, SUMS):
        first, *others = (diagonal(part) for part in operator.linear_ops)
        return sum(others, first)
    if isinstance(operator, MulLinearOperator):
        return diagonal(operator.left_linear_op) * diagonal(operator.right_linear_op)
    if isinstance(operator, ConstantMulLinearOperator):
        return diagonal(operator.base_linear_op) * operator.expanded_constant.squeeze(-1)
    if isinstance(operator, KernelLinearOperator) and settings.max_cholesky_size.value() <= 1:
        # GPyTorch's KeOps kernels then leave single entries to KeOps too, and its diagonal expects a tensor
        blocks = (to_dense(operator[..., rows, rows]) for rows in spans(operator.shape[-1], _BLOCK))
        return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in blocks], dim=-1)
    return operator.diagonal(dim1=-2, dim2=-1)


def columns(operator: LinearOperator, indices: Tensor) -> Tensor:
    """Dense columns of ``operator``: ``(..., n, r)``.  Sums and products are taken part by part."""
    if isinstance(operator, KernelMatrix):
        return operator.columns(indices)
    if isinstance(operator, DenseLinearOperator):
        return _gather_columns(operator.tensor, indices)
    if isinstance(operator, SUMS):
        return sum(
            (columns(part, indices) for part in operator.linear_ops[1:]), columns(operator.linear_ops[0], indices)
        )
    if isinstance(operator, MulLinearOperator):
        return columns(operator.left_linear_op, indices) * columns(operator.right_linear_op, indices)
    if isinstance(operator, ConstantMulLinearOperator):
        return columns(operator.base_linear_op, indices) * operator.expanded_constant
    if not indices.shape[-1]:  # of rank 0; operators with structure of their own do not know it
        batch = torch.broadcast_shapes(operator.batch_shape, indices.shape[:-1])
        return torch.zeros(*batch, operator.shape[-1], 0, dtype=operator.dtype, device=operator.device)
    if indices.dim() == 1:
        return to_dense(operator[..., :, indices])
    identity = torch.zeros(*indices.shape[:-1], operator.shape[-1], indices.shape[-1], dtype=operator.dtype,
                           device=operator.device)  # fmt: skip
    return operator @ identity.scatter_(-2, indices.unsqueeze(-2), 1.0)


def block(operator: LinearOperator, rows: Tensor, columns_: Tensor) -> Tensor:
    """Dense ``operator[rows, columns]``: ``(..., p, q)``.  Sums and products are taken part by part."""
    if isinstance(operator, KernelMatrix):
        return operator.block(rows, columns_)
    if isinstance(operator, DenseLinearOperator):
        return _gather_columns(_gather_rows(operator.tensor, rows), columns_)
    if isinstance(operator, SUMS):
        first, *others = (block(part, rows, columns_) for part in operator.linear_ops)
        return sum(others, first)
    if isinstance(operator, MulLinearOperator):
        return block(operator.left_linear_op, rows, columns_) * block(operator.right_linear_op, rows, columns_)
    if isinstance(operator, ConstantMulLinearOperator):
        return block(operator.base_linear_op, rows, columns_) * operator.expanded_constant
    return _gather_rows(columns(operator, columns_), rows)


def _gather_columns(matrix: Tensor, indices: Tensor) -> Tensor:
    if indices.dim() == 1:
        return matrix.index_select(-1, indices)
    batch = torch.broadcast_shapes(matrix.shape[:-2], indices.shape[:-1])
    matrix = matrix.expand(*batch, *matrix.shape[-2:])
    index = indices.unsqueeze(-2).expand(*batch, matrix.shape[-2], indices.shape[-1])
    return matrix.gather(-1, index)


def _gather_rows(matrix: Tensor, indices: Tensor) -> Tensor:
    if indices.dim() == 1:
        return matrix.index_select(-2, indices)
    return _gather_columns(matrix.mT, indices).mT


Term = tuple[float | Tensor, LinearOperator]


def terms(operator: LinearOperator, scale: float | Tensor = 1.0) -> Iterator[Term]:
    """The operator as a sum of scaled operators that are neither sums nor scaled themselves."""
    operator = operator.evaluate_kernel()
    if isinstance(operator, SUMS):
        for part in operator.linear_ops:
            yield from terms(part, scale)
    elif isinstance(operator, ConstantMulLinearOperator):
        yield from terms(operator.base_linear_op, scale * operator.expanded_constant.to(torch.float64))
    else:
        yield scale, operator.detach() if operator.requires_grad else operator


def accurate_terms(operator: LinearOperator) -> list[Term]:
    """The same in float64; kernel matrices are then evaluated by tiles, and stored matrices are left as they are."""
    found: list[Term] = []
    for scale, part in terms(operator):
        if isinstance(part, KernelMatrix):
            part = part.double().by("tiled")
        elif not isinstance(part, DenseLinearOperator):
            part = part.type(torch.float64)
        found.append((scale, part))
    return found


def evaluated_accurately(operator: LinearOperator, engine: str = "tiled") -> LinearOperator:
    """The operator with its kernel matrices evaluated in float64, differentiable in the same tensors; as it is where it
    is in float64, or not made of kernel matrices alone.

    :param engine: of the products.
    """
    operator = operator.evaluate_kernel()
    whole = operator.dtype == torch.float64 or not all(isinstance(part, KernelMatrix) for _, part in terms(operator))
    return operator if whole else _in_float64(operator, engine)


def _in_float64(operator: LinearOperator, engine: str) -> LinearOperator:
    operator = operator.evaluate_kernel()
    if isinstance(operator, SUMS):
        return SumLinearOperator(*(_in_float64(part, engine) for part in operator.linear_ops))
    if isinstance(operator, ConstantMulLinearOperator):
        return ConstantMulLinearOperator(
            _in_float64(operator.base_linear_op, engine), operator._constant.to(torch.float64)
        )
    assert isinstance(operator, KernelMatrix)
    return operator.double().by(engine)


class AccurateProduct:
    """``v -> K v`` in float64 arithmetic, whatever dtype K has; nothing n x n is made in float64.

    A ``KernelMatrix`` is evaluated anew in float64 by tiles; a stored float32 matrix is taken as it is, by rows.
    """

    def __init__(self, operator: LinearOperator) -> None:
        self._terms = accurate_terms(operator)

    @torch.no_grad()
    def __call__(self, vectors: Tensor) -> Tensor:
        """``K vectors`` for vectors ``(..., n, t)`` in float64."""
        total: Tensor | None = None
        for scale, operator in self._terms:
            if isinstance(operator, DenseLinearOperator):
                product = dense_product(operator.tensor, vectors)
            else:
                product = operator.product(vectors) if isinstance(operator, KernelMatrix) else operator @ vectors
            product = product * scale if torch.is_tensor(scale) or scale != 1.0 else product
            total = product if total is None else total + product
        assert total is not None
        return total

    @torch.no_grad()
    def rows(self, indices: Tensor, vectors: Tensor) -> Tensor:
        """``K[indices] vectors``, ``(..., b, t)`` in float64, for indices ``(b,)``."""
        total = vectors.new_zeros(())
        for scale, operator in self._terms:
            if isinstance(operator, KernelMatrix):
                product = operator.rows(indices).product(vectors)
            else:
                product = columns(operator, indices).mT.to(torch.float64) @ vectors
            total = total + product * scale
        return total


def accurate_matmul(operator: LinearOperator, vectors: Tensor) -> Tensor:
    """``K vectors`` for vectors ``(..., n, t)`` in float64, as :class:`AccurateProduct` has it, and differentiable."""
    operator = operator.evaluate_kernel()
    if not torch.is_grad_enabled() or not (operator.requires_grad or vectors.requires_grad):
        return AccurateProduct(operator)(vectors)
    if isinstance(operator, SUMS):
        first, *others = (accurate_matmul(part, vectors) for part in operator.linear_ops)
        return sum(others, first)
    if isinstance(operator, ConstantMulLinearOperator):
        return accurate_matmul(operator.base_linear_op, vectors) * operator.expanded_constant.to(torch.float64)
    return operator.type(torch.float64) @ vectors


def dense_product(matrix: Tensor, vectors: Tensor) -> Tensor:
    """``matrix @ vectors`` for float64 vectors, of a stored matrix of any dtype."""
    if matrix.dtype == vectors.dtype:
        return matrix @ vectors
    batch = torch.Size(matrix.shape[:-2]).numel()
    step = max(1, _CONVERTED // max(1, batch * matrix.shape[-1]))
    parts = [matrix[..., rows, :].to(torch.float64) @ vectors for rows in spans(matrix.shape[-2], step)]
    return torch.cat(parts, dim=-2)

"""``KernelMatrix``: k(x1, x2) for any GPyTorch kernel, as an operator that never needs the whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import DenseLinearOperator, LinearOperator
from linear_operator.utils.broadcasting import _matmul_broadcast_shape
from torch import Tensor

from ..checks import inputs, instance
from ..errors import InputError
from ..row_sources import RowSource
from .centre import Centre
from .engines import FAST, TILED, check_able, check_choice
from .expression import recognise
from .first_order import first_order
from .generic_tiles import diagonal, is_plain, real, settle
from .lazies import parameters_of, without_keops
from .pairs import Pairs, part
from .products import derivative_of_batch, element, product_of_batch


class KernelMatrix(LinearOperator):
    """The matrix ``k(x1, x2)`` of shape ``(..., n, m)``, computed whenever it is needed and never stored as a whole
    (but by the engine ``"dense"``).

    A product costs ``n m`` kernel evaluations and O((n + m)(d + t)) memory beside one tile, forward and backward;
    where ``x1`` is ``x2`` each pair is evaluated once.  Scaled RBF, Matern, rational quadratic, periodic, l1 Laplace
    and constant kernels, their sums and products have fast paths (:mod:`sketchgp.operators.expression`); every other
    kernel is called on pairs of row blocks.

    Inputs may be bfloat16 or float16 with float32 parameters: they are stored so, and computed with in float32, the
    operator's dtype.

    :param x1: ``(..., n, d)`` inputs, after the kernel's ``active_dims`` were selected.
    :param x2: ``(..., m, d)`` inputs.
    :param parameters: the kernel's parameters, with respect to which it is differentiated.
    :param options: the other arguments of :class:`~sketchgp.operators.pairs.Pairs`: kernel, engine and others.
    :ivar pairs: the :class:`~sketchgp.operators.pairs.Pairs`, whose attributes of the same names are those of the
        operator.
    """

    def __init__(self, x1: Tensor, x2: Tensor, *parameters: Tensor, **options: Any) -> None:
        self.hold(Pairs(x1, x2, parameters, **options))

    @classmethod
    def on(cls, pairs: Pairs) -> KernelMatrix:
        """Return the operator of given pairs, with what they remember."""
        matrix = cls.__new__(cls)
        matrix.hold(pairs)
        return matrix

    def hold(self, pairs: Pairs) -> None:
        """Become the operator of given pairs."""
        super().__init__(*pairs.tensors, **pairs.options)
        self.pairs, self.x1, self.x2, self.parameters = pairs, pairs.x1, pairs.x2, pairs.parameters
        self.kernel, self.expression, self.same, self.engine = pairs.kernel, pairs.expression, pairs.same, pairs.engine

    @classmethod
    def of(
        cls, kernel: Kernel, x1: Any, x2: Any = None, engine: str = "auto", precision: str = "float32"
    ) -> KernelMatrix:
        """The operator for ``kernel(x1, x2)``, tensors or sources of rows; selects the kernel's active dimensions.

        :raises InputError: for an unknown engine or precision, an engine that cannot take this kernel, dtype or
            device, or a kernel that does not evaluate to a plain matrix.
        """
        check_choice("KernelMatrix.of", engine, precision, ("engine", "precision"))
        _check_operands("KernelMatrix.of", kernel, x1, x2)
        kernel = without_keops(kernel)
        same = x2 is None or x2 is x1
        if kernel.active_dims is not None:
            x1 = x1.index_select(-1, kernel.active_dims)
            x2 = x1 if x2 is None or same else x2.index_select(-1, kernel.active_dims)
        x2 = x1 if x2 is None else x2
        if not is_plain(kernel, x1, x2):
            raise InputError(f"{type(kernel).__name__} has structure of its own; a plain kernel matrix is expected.")
        return cls.assemble(kernel, x1, x2, engine, same, precision)

    @classmethod
    def from_lazy(
        cls, lazy: LazyEvaluatedKernelTensor, engine: str = "auto", precision: str = "float32"
    ) -> KernelMatrix | None:
        """The operator for GPyTorch's unevaluated kernel; None where the kernel has structure worth keeping.

        :raises InputError: if the engine cannot take this kernel, dtype or device.
        """
        kernel = without_keops(lazy.kernel)
        if lazy.last_dim_is_batch or lazy.params or not is_plain(kernel, lazy.x1, lazy.x2):
            return None
        same = lazy.x1 is lazy.x2 or (lazy.x1.shape == lazy.x2.shape and torch.equal(lazy.x1, lazy.x2))
        strict = engine not in [fast.name for fast in FAST]
        return cls.assemble(kernel, lazy.x1, lazy.x2, engine, same, precision, strict)

    @classmethod
    def assemble(
        cls, kernel: Kernel, x1: Tensor, x2: Tensor, engine: str, same: bool, precision: str, strict: bool = True
    ) -> KernelMatrix:
        named = parameters_of(kernel)
        names = tuple(named)
        if recognise(kernel) is not None:  # integers are numbers to such a kernel, and indices to some others
            x1, x2 = (x if x.is_floating_point() else x.to(next(iter(named.values())).dtype) for x in (x1, x2))
        matrix = cls(x1, x2, *named.values(), kernel=kernel, names=names, engine=engine, same=same, precision=precision)
        if strict:  # an engine that serves the training points of a model may not serve others
            check_able(matrix.pairs)
        if matrix.expression is None:
            settle(kernel, x1, x2)
        return matrix

    # --- the same kernel otherwise --------------------------------------------------------------------------

    def at(self, x1: Tensor, x2: Tensor, same: bool = False, centre: Centre | None = None) -> KernelMatrix:
        """Return the operator of other points ``(..., n, d)`` and ``(..., m, d)`` with the same kernel, whose active
        dimensions were selected; centre: what inputs are counted from, None for the median of x2."""
        return KernelMatrix.on(self.pairs.at(x1, x2, same, centre))

    def by(self, engine: str) -> KernelMatrix:
        """Return the same operator computed by another engine, remembering nothing."""
        return KernelMatrix.on(self.pairs.of(self.pairs.tensors, engine=engine))

    def with_parameters(self, parameters: Sequence[Tensor]) -> KernelMatrix:
        """Return the operator with other values of the kernel's parameters."""
        return KernelMatrix.on(self.pairs.of([self.x1, self.x2, *parameters]))

    # --- products and derivatives ---------------------------------------------------------------------------

    def matmul(self, other: Any) -> Any:
        """``K other``.  LinearOperator makes the operator anew, and loses what engines keep between products."""
        inputs = all(torch.is_tensor(x) and not x.is_inference() for x in (self.x1, self.x2))  # whose changes are seen
        if torch.is_tensor(other) and inputs and not self._differentiated(other):
            _matmul_broadcast_shape(self.shape, other.shape)
            return self.product(other)
        return super().matmul(other)

    def _differentiated(self, *others: Tensor) -> bool:
        """Return whether autograd records functions of the operator and these tensors."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (*self._args, *others))

    @torch.no_grad()
    def product(self, rhs: Tensor) -> Tensor:
        """Return ``K rhs`` without gradients; x1 and x2 may be sources of rows."""
        if rhs.dtype != self.dtype or rhs.device != self.device:
            raise InputError(
                f"A kernel matrix of {self.dtype} on {self.device} is multiplied by {rhs.dtype} on {rhs.device}; "
                "convert one of them."
            )
        if rhs.dim() == 1:
            return self.product(rhs.unsqueeze(-1)).squeeze(-1)
        if rhs.shape[-2] != self.shape[-1]:
            raise InputError(f"A kernel matrix of {self.shape[-1]} columns is multiplied by {rhs.shape[-2]} rows.")
        return product_of_batch(self.pairs, rhs)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.product(rhs)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return first_order(self.derivative(left_vecs, right_vecs), left_vecs, right_vecs, *self._args)

    @torch.no_grad()
    def derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``sum_t left_t^T K right_t`` for x1, x2 and each parameter, without autograd."""
        return derivative_of_batch(self.pairs, left_vecs, right_vecs)

    # --- parts of the matrix --------------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """The whole matrix ``(..., n, m)``, differentiable; the backward pass goes by tiles."""
        if self._differentiated():
            return _Evaluate.apply(self.pairs, *self._args)
        return TILED.dense(self.pairs).to(self.dtype)

    def columns(self, indices: Tensor) -> Tensor:
        """``k(x1, x2[indices])``, dense and differentiable: ``(..., n, r)`` for ``indices`` of shape (..., r)."""
        some = part(self.pairs, None, indices)
        if self.same and indices.dim() == 1:
            some.coincident = torch.stack([indices, torch.arange(len(indices), device=indices.device)])
        return KernelMatrix.on(some).to_dense()

    def block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """``k(x1[rows], x2[columns])``, dense and differentiable; indices as in :meth:`columns`."""
        some = part(self.pairs, rows, columns)
        if self.same and not some.same and rows.dim() == columns.dim() == 1:
            some.coincident = (rows.unsqueeze(1) == columns).nonzero().mT
        return KernelMatrix.on(some).to_dense()

    def entries(self, a: Tensor, b: Tensor | None) -> Tensor:
        """Return ``k(a, b)`` in float64, counted from the own centre, or the diagonal ``k(a_i, a_i)`` where b is None.

        :param a: ``(..., p, d)`` and :param b: ``(..., q, d)``, as the kernel sees them.
        """
        if b is None:
            return self.at(a, a, True).type(torch.float64).diagonal(dim1=-1, dim2=-2)
        return self.at(a, b, b is a, self.pairs.centre).type(torch.float64).to_dense()

    def rows(self, rows: Tensor, columns: Tensor | None = None) -> KernelMatrix:
        """``k(x1[rows], x2)``, or ``k(x1[rows], x2[columns])``, for indices (r,), as an operator."""
        return KernelMatrix.on(part(self.pairs, rows, columns))

    def element(self, index: tuple[int, ...]) -> KernelMatrix:
        """One matrix of the batch, differentiable; a kernel that is not recognised is called for the whole batch.

        :raises InputError: for a kernel that gives no batch; :raises NumericalError: if it differs from the batch's.
        """
        return KernelMatrix.on(element(self.pairs, index))

    def _diagonal(self) -> Tensor:
        value = diagonal(self.pairs.evaluator(self.parameters), real(self.x1), real(self.x2), self.batch_shape)
        return value.to(self.dtype).expand(self.shape[:-1])

    def evaluate_kernel(self) -> KernelMatrix:
        return self

    # --- what a LinearOperator must offer -------------------------------------------------------------------

    def _size(self) -> torch.Size:
        return self.pairs.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.pairs.dtype

    @property
    def device(self) -> torch.device:
        return self.x1.device

    def to(self, *args: Any, **kwargs: Any) -> KernelMatrix:
        """The operator with its tensors converted; the kernel, which belongs to the user, is left alone."""
        tensors = [_convert(t, *args, **kwargs) if t.is_floating_point() else t for t in self._args]
        return KernelMatrix(*tensors, **self.pairs.options)

    def type(self, dtype: torch.dtype) -> KernelMatrix:
        return self.to(dtype)

    def cpu(self) -> KernelMatrix:
        return self.to("cpu")

    def cuda(self, device_id: str | None = None) -> KernelMatrix:
        return self.to("cuda" if device_id is None else device_id)

    def _transpose_nonbatch(self) -> KernelMatrix:
        return self.at(self.x2, self.x1, self.same, self.pairs.centre)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        x1, x2 = (x.expand(*batch_shape, *x.shape[-2:]) for x in (self.x1, self.x2))
        return self.at(x1, x2, self.same, self.pairs.centre)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        if len(self.kernel.batch_shape):
            return DenseLinearOperator(self.to_dense()).unsqueeze(dim)
        x1, x2 = (x.expand(*self.batch_shape, *x.shape[-2:]).unsqueeze(dim) for x in (self.x1, self.x2))
        return self.at(x1, x2, self.same)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return DenseLinearOperator(self.to_dense().permute(*dims, -2, -1))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if any(not isinstance(index, slice) or index != slice(None) for index in batch_indices):
            index = (*batch_indices, row_index, col_index)
            return DenseLinearOperator(self.to_dense())[index]
        same = self.same and isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        if torch.is_tensor(row_index) and torch.is_tensor(col_index):
            same = self.same and row_index.shape == col_index.shape and bool((row_index == col_index).all())
        centre = self.pairs.centre if same else None  # of test and training points, that of the latter
        return self.at(self.x1[..., row_index, :], self.x2[..., col_index, :], same, centre)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        if self.batch_shape:
            index = (*batch_indices, row_index, col_index)
            return self.to_dense()[index]
        x1, x2 = real(self.x1[row_index]), real(self.x2[col_index])
        return diagonal(self.pairs.evaluator(self.parameters), x1, x2, self.batch_shape).to(self.dtype)


class _Evaluate(torch.autograd.Function):
    """The dense block of a kernel matrix with a backward pass by tiles: nothing but the block itself is kept for it."""

    @staticmethod
    def forward(ctx: Any, pairs: Pairs, *tensors: Tensor) -> Tensor:
        ctx.options, ctx.coincident = pairs.options, pairs.coincident
        ctx.save_for_backward(*tensors)
        return TILED.dense(pairs).to(pairs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors  # torch raises where one was changed in place since
        with torch.no_grad():
            pairs = Pairs(tensors[0], tensors[1], tensors[2:], **ctx.options)
            pairs.coincident = ctx.coincident
            result = TILED.dense_derivative(pairs, grad)
        return (None, *first_order(result, grad, *tensors))


def _convert(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``x.to(...)``, with batch dimensions that are expanded without copies left so."""
    if isinstance(x, RowSource):
        return x.to(*args, **kwargs)
    repeated = [step == 0 and size > 1 for step, size in zip(x.stride()[:-2], x.shape[:-2], strict=True)]
    single = x[tuple(slice(0, 1) if r else slice(None) for r in repeated)]
    return single.to(*args, **kwargs).expand(x.shape)


def _check_operands(owner: str, kernel: Any, x1: Any, x2: Any) -> None:
    """Check a kernel and two sets of points, of which the second may be None.

    :raises InputError: unless the points have one dtype, device and dimension.
    """
    instance(owner, "kernel", kernel, Kernel, "a gpytorch kernel")
    first = x1 if isinstance(x1, RowSource) else inputs(owner, "x1", x1)
    second = first if x2 is None else x2 if isinstance(x2, RowSource) else inputs(owner, "x2", x2)
    if (first.dtype, first.device, first.shape[-1]) != (second.dtype, second.device, second.shape[-1]):
        raise InputError(
            f"{owner}: x1 and x2 expect one dtype, device and number of features, got {first.dtype}, {first.device}, "
            f"{first.shape[-1]} and {second.dtype}, {second.device}, {second.shape[-1]}."
        )

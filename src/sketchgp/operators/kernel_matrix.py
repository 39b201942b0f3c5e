"""``KernelMatrix``: k(x1, x2) for any GPyTorch kernel, as an operator that never needs the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import DenseLinearOperator, LinearOperator
from linear_operator.utils.broadcasting import _matmul_broadcast_shape
from torch import Tensor

from ..distributed import Shards, in_force
from ..errors import InputError
from .batch_element import element
from .batches import derivative_of_batch, repeats, single
from .centre import Centre
from .engines import TILED, check_able, check_choice
from .expression import Expression, Known, Prepared, recognise
from .far_rows import pass_on
from .first_order import Evaluate, first_order
from .generic_tiles import diagonal, evaluate, is_plain, parameters_as, parameters_of, real, settle
from .shapes import check_operands, columns_to_leading, convert, index_rows, leading_to_columns, take_rows
from .shared import product
from .streamed_tiles import sources
from .unchanged import State
from .without_keops import without_keops

_OPTIONS = ("kernel", "names", "engine", "same", "precision", "centre", "shards", "asked")
_HALF = (torch.bfloat16, torch.float16)


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
    :param parameters: the kernel's parameters, in the order of ``names``: they are what is differentiated.
    :param kernel: the GPyTorch kernel (one output per input).
    :param names: the names of ``parameters`` in ``kernel.named_parameters()``.
    :param engine: how products are computed (:mod:`sketchgp.operators.engines`): ``"dense"`` stores the matrix at the
        first product, until torch knows of a change in inputs or parameters (memory shared with numpy is not seen),
        ``"tiled"`` computes it by tiles, ``"keops"`` and ``"triton"`` by the fused kernels of those
        packages, ``"auto"`` stores it where x1 is x2 and it fits the memory budget (``settings.memory_budget``), and
        else takes ``"triton"`` on CUDA and ``"tiled"`` where that does not apply.
    :param same: whether x1 and x2 hold the same points.
    :param precision: of the distances on tensor cores: ``"float32"``, and with ``engine="triton"`` also ``"tf32"``.
    :param centre: what inputs are counted from; None for the median of x2, which in a model are the training points.
    :param shards: ranks that products are shared out to (:mod:`.shared`); None for those of the block it is made in.
    :param asked: whether the engine was the user's choice, which must not be replaced; None unless it is ``"auto"``.
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor,
        *parameters: Tensor,
        kernel: Kernel,
        names: tuple[str, ...],
        engine: str = "auto",
        same: bool = False,
        precision: str = "float32",
        centre: Centre | None = None,
        shards: Shards | None = None,
        asked: bool | None = None,
    ) -> None:
        self.x1, self.x2, self.parameters = x1, x2, parameters
        self.kernel, self.names, self.engine, self.same, self.precision = kernel, names, engine, same, precision
        self.centre, self.shards = Centre(x2) if centre is None else centre, in_force() if shards is None else shards
        self.asked = engine != "auto" if asked is None else asked
        super().__init__(x1, x2, *parameters, **self._options())
        self.expression: Expression | None = recognise(kernel)
        self.coincident: Tensor | None = None  # (2, p) rows and columns of pairs that are one point
        self.memo: dict[str, Any] = {}  # what engines keep from product to product
        self._stored: Tensor | None = None

    @classmethod
    def of(
        cls, kernel: Kernel, x1: Any, x2: Any = None, engine: str = "auto", precision: str = "float32"
    ) -> KernelMatrix:
        """The operator for ``kernel(x1, x2)``, tensors or sources of rows; selects the kernel's active dimensions.

        :raises InputError: for an unknown engine or precision, an engine that cannot take this kernel, dtype or
            device, or a kernel that does not evaluate to a plain matrix.
        """
        check_choice("KernelMatrix.of", engine, precision, ("engine", "precision"))
        check_operands("KernelMatrix.of", kernel, x1, x2)
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
        return cls.assemble(kernel, lazy.x1, lazy.x2, engine, same, precision)

    @classmethod
    def assemble(cls, kernel: Kernel, x1: Tensor, x2: Tensor, engine: str, same: bool, precision: str) -> KernelMatrix:
        named = parameters_of(kernel)
        names = tuple(named)
        if recognise(kernel) is not None:  # integers are numbers to such a kernel, and indices to some others
            x1, x2 = (x if x.is_floating_point() else x.to(next(iter(named.values())).dtype) for x in (x1, x2))
        matrix = cls(x1, x2, *named.values(), kernel=kernel, names=names, engine=engine, same=same, precision=precision)
        check_able(matrix)
        if matrix.expression is None:
            settle(kernel, x1, x2)
        return matrix

    def _with(self, x1: Tensor, x2: Tensor, same: bool, centre: Centre | None = None) -> KernelMatrix:
        return self.__class__(x1, x2, *self.parameters, **{**self._options(), "same": same, "centre": centre})

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS}

    # --- what engines compute from --------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: float32 for half-precision inputs and parameters."""
        return torch.float32 if self.dtype in _HALF else self.dtype

    def ranks(self) -> Shards | None:
        """Those that products are shared out to, now."""
        return self.shards if self.shards is not None and self.shards.open else in_force()

    @property
    def flat_batch(self) -> torch.Size:
        """``()``, or the number of matrices in the batch ``(B,)``."""
        return torch.Size((self.batch_shape.numel(),)) if len(self.batch_shape) else torch.Size()

    def evaluator(self, parameters: Sequence[Tensor]) -> Callable[..., Tensor]:
        """The kernel as a function of two blocks of rows, with copies of ``parameters`` in place of its own."""
        values = [real(p) for p in parameters]

        def call(x1: Tensor, x2: Tensor, **options: Any) -> Tensor:
            with parameters_as(self.kernel, self.names, [value.clone() for value in values]):
                return evaluate(self.kernel, x1, x2, self.centre, **options)

        return call

    def prepare(self, tensors: list[Tensor], same: bool, known: Known | None = None) -> Prepared:
        """Features and coefficients of the recognised kernel, from x1, x2 and parameters given as ``tensors``."""
        assert self.expression is not None
        with parameters_as(self.kernel, self.names, [real(t) for t in tensors[2:]]):
            known = self.memo.get("known") if known is None else known
            options = (same, self.batch_shape, self.compute_dtype, self.centre.value(), known)
            return self.expression.prepare(tensors[0], tensors[1], *options)

    @torch.no_grad()
    def prepared(self) -> Prepared:
        """The same from the operator's own tensors, kept until one of them changes; without autograd."""
        kept = self.memo.get("prepared")
        if kept is None or not self._unchanged(kept[0]):
            kept = self.memo["prepared"] = (self._state(), self.prepare([t.detach() for t in self._args], self.same))
        return kept[1]

    def stored(self) -> Tensor:
        """The dense matrix in the dtype of the arithmetic, kept until one of the operator's tensors changes."""
        if self._stored is None or not self._unchanged(self.memo["stored state"]):
            self._stored = None  # two of them may not fit
            self._stored, self.memo["stored state"] = TILED.dense(self), self._state()
        return self._stored

    def _state(self) -> State:
        return State((self.x1, self.x2), self.parameters)

    def _unchanged(self, state: State) -> bool:
        return state.holds((self.x1, self.x2), self.parameters)

    def _evaluate(self) -> Tensor:
        """The dense matrix, without autograd."""
        if 0 in self.batch_shape:
            return self.x1.new_zeros(self.shape, dtype=self.dtype)
        return TILED.dense(self).to(self.dtype)

    # --- products and derivatives ---------------------------------------------------------------------------

    def matmul(self, other: Any) -> Any:
        """``K other``.  LinearOperator makes the operator anew, and loses what engines keep between products."""
        inputs = all(torch.is_tensor(x) and not x.is_inference() for x in (self.x1, self.x2))  # whose changes are seen
        if torch.is_tensor(other) and inputs and not self._differentiated(other):
            _matmul_broadcast_shape(self.shape, other.shape)
            return self._matmul(other)
        return super().matmul(other)

    def _differentiated(self, *others: Tensor) -> bool:
        """Whether gradients may be asked for of what is made of the operator and others."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (*self._args, *others))

    @torch.no_grad()
    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dtype != self.dtype or rhs.device != self.device:
            raise InputError(
                f"A kernel matrix of {self.dtype} on {self.device} is multiplied by {rhs.dtype} on {rhs.device}; "
                "convert one of them."
            )
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        if rhs.shape[-2] != self.shape[-1]:
            raise InputError(f"A kernel matrix of {self.shape[-1]} columns is multiplied by {rhs.shape[-2]} rows.")
        batch = self.batch_shape if rhs.dim() == 2 else torch.broadcast_shapes(self.batch_shape, rhs.shape[:-2])
        if 0 in self.batch_shape:
            return rhs.new_zeros(*batch, self.shape[-2], rhs.shape[-1])
        if self.batch_shape and repeats(self):
            if "single" not in self.memo:
                self.memo["single"] = single(self)
            return self.memo["single"]._matmul(rhs.expand(*batch, *rhs.shape[-2:]))
        more = len(batch) - len(self.batch_shape)
        if batch[more:] != self.batch_shape:
            return self._expand_batch(batch[more:])._matmul(rhs)
        flat = leading_to_columns(rhs, batch, more).reshape(
            *self.flat_batch, rhs.shape[-2], batch[:more].numel() * rhs.shape[-1]
        )
        value = product(self, flat.to(self.compute_dtype)).to(rhs.dtype)
        value = value.reshape(*self.batch_shape, self.shape[-2], *batch[:more], rhs.shape[-1])
        return value if not more else value.permute(*columns_to_leading(value.dim(), len(self.batch_shape), more))

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._transpose_nonbatch()._matmul(rhs)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return first_order(self._derivative(left_vecs, right_vecs), left_vecs, right_vecs, *self._args)

    @torch.no_grad()
    def _derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return derivative_of_batch(self, left_vecs, right_vecs)

    # --- parts of the matrix --------------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """The whole matrix ``(..., n, m)``, differentiable; the backward pass goes by tiles."""
        if self._differentiated():
            return Evaluate.apply(self, TILED.dense_derivative, *self._args)
        return self._evaluate()

    def columns(self, indices: Tensor) -> Tensor:
        """``k(x1, x2[indices])``, dense and differentiable: ``(..., n, r)`` for ``indices`` of shape (..., r)."""
        part = self._part(None, indices)
        if self.same and indices.dim() == 1:
            part.coincident = torch.stack([indices, torch.arange(len(indices), device=indices.device)])
        return part.to_dense()

    def block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """``k(x1[rows], x2[columns])``, dense and differentiable; indices as in :meth:`columns`."""
        part = self._part(rows, columns)
        if self.same and not part.same and rows.dim() == columns.dim() == 1:
            part.coincident = (rows.unsqueeze(1) == columns).nonzero().mT
        return part.to_dense()

    def rows(self, rows: Tensor, columns: Tensor | None = None) -> KernelMatrix:
        """``k(x1[rows], x2)``, or ``k(x1[rows], x2[columns])``, for indices (r,), as an operator."""
        return self._part(rows, columns)

    def against(self, x1: Tensor, x2: Tensor, centre: Centre, known: Known | None) -> KernelMatrix:
        """``k(x1, x2)`` of the same kernel for other points, with the kernel's active dimensions selected; ``known`` is
        which of them are far from the centre, None where nobody has looked."""
        matrix = self._with(x1, x2, False, centre)
        matrix.memo["known"] = known
        return matrix

    def _part(self, rows: Tensor | None, columns: Tensor | None) -> KernelMatrix:
        x1, x2 = (x if i is None else take_rows(x, i) for x, i in ((self.x1, rows), (self.x2, columns)))
        part = self._with(x1, x2, self.same and rows is columns, self.centre)
        part.memo["part"] = True
        flat = all(i is None or i.dim() == 1 for i in (rows, columns))
        if flat:
            part.memo["size"] = torch.Size((*self.shape[:-2], x1.shape[-2], x2.shape[-2]))
            pass_on(self, part, rows, columns)
        if self.expression is not None and flat and not sources(self):
            part.memo["prepared"] = (part._state(), self.prepared().part(rows, columns))
        return part

    def element(self, index: tuple[int, ...]) -> KernelMatrix:
        """One matrix of the batch, without gradients; a kernel that is not recognised is called for the whole batch.

        :raises InputError: for a kernel that gives no batch; :raises NumericalError: if it differs from the batch's.
        """
        return element(self, index)

    def _diagonal(self) -> Tensor:
        value = diagonal(self.evaluator(self.parameters), real(self.x1), real(self.x2), self.batch_shape)
        return value.to(self.dtype).expand(self.shape[:-1])

    def evaluate_kernel(self) -> KernelMatrix:
        return self

    # --- what a LinearOperator must offer -------------------------------------------------------------------

    def _size(self) -> torch.Size:
        size: torch.Size | None = self.memo.get("size")  # asked for dozens of times in a solve
        if size is None:
            batch = torch.broadcast_shapes(self.x1.shape[:-2], self.x2.shape[:-2], self.kernel.batch_shape)
            size = self.memo["size"] = torch.Size((*batch, self.x1.shape[-2], self.x2.shape[-2]))
        return size

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.x1.dtype
        for parameter in self.parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        return self.x1.device

    def to(self, *args: Any, **kwargs: Any) -> KernelMatrix:
        """The operator with its tensors converted; the kernel, which belongs to the user, is left alone."""
        tensors = [convert(t, *args, **kwargs) if t.is_floating_point() else t for t in self._args]
        return self.__class__(*tensors, **self._options())

    def type(self, dtype: torch.dtype) -> KernelMatrix:
        return self.to(dtype)

    def double(self, device_id: str | None = None) -> KernelMatrix:
        return self.to(torch.float64)

    def float(self, device_id: str | None = None) -> KernelMatrix:
        return self.to(torch.float32)

    def half(self, device_id: str | None = None) -> KernelMatrix:
        return self.to(torch.float16)

    def cpu(self) -> KernelMatrix:
        return self.to("cpu")

    def cuda(self, device_id: str | None = None) -> KernelMatrix:
        return self.to("cuda" if device_id is None else device_id)

    def _transpose_nonbatch(self) -> KernelMatrix:
        return self._with(self.x2, self.x1, self.same, self.centre)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        x1, x2 = (x.expand(*batch_shape, *x.shape[-2:]) for x in (self.x1, self.x2))
        return self._with(x1, x2, self.same, self.centre)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        if len(self.kernel.batch_shape):
            return DenseLinearOperator(self.to_dense())._unsqueeze_batch(dim)
        x1, x2 = (x.expand(*self.batch_shape, *x.shape[-2:]).unsqueeze(dim) for x in (self.x1, self.x2))
        return self._with(x1, x2, self.same)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return DenseLinearOperator(self.to_dense())._permute_batch(*dims)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if any(not isinstance(index, slice) or index != slice(None) for index in batch_indices):
            return DenseLinearOperator(self.to_dense())._getitem(row_index, col_index, *batch_indices)
        same = self.same and isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        if torch.is_tensor(row_index) and torch.is_tensor(col_index):
            same = self.same and row_index.shape == col_index.shape and bool((row_index == col_index).all())
        centre = self.centre if same else None  # of test and training points, that of the latter
        return self._with(index_rows(self.x1, row_index), index_rows(self.x2, col_index), same, centre)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        if self.batch_shape:
            index = (*batch_indices, row_index, col_index)
            return self.to_dense()[index]
        x1, x2 = real(self.x1[row_index]), real(self.x2[col_index])
        return diagonal(self.evaluator(self.parameters), x1, x2, self.batch_shape).to(self.dtype)

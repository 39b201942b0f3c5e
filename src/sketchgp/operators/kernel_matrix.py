"""``KernelMatrix``: k(x1, x2) for any GPyTorch kernel, as an operator that never needs the whole matrix."""

from __future__ import annotations

import threading
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import DenseLinearOperator, LinearOperator
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import InputError
from ..settings import memory_budget
from .generic import Forward, GenericTiles, is_plain
from .radial import RadialTiles, Scales, recognise
from .tiles import spans, tile_shape

Tiles = RadialTiles | GenericTiles
_SWAP = threading.RLock()  # functional_call exchanges the parameters of the user's kernel while it runs
ENGINES = ("auto", "dense", "tiled")


class _Evaluate(torch.autograd.Function):
    """The dense block with a backward pass by tiles: nothing but the block itself is kept for it."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *args: Tensor) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(*args)
        return _part(options, args)._evaluate()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        matrix = _part(ctx.options, ctx.saved_tensors)
        return (None, *matrix._derivative(lambda rows, columns: grad[..., rows, columns].clone()))


class KernelMatrix(LinearOperator):
    """The matrix ``k(x1, x2)`` of shape ``(..., n, m)``, computed tile by tile whenever it is needed.

    A product costs ``n m`` kernel evaluations and O((n + m)(d + t)) memory beside one tile, forward and backward;
    where ``x1`` is ``x2`` each pair is evaluated once.  Scaled RBF and Matern kernels have fast tiles
    (:mod:`sketchgp.operators.radial`), every other kernel is called on pairs of row blocks.

    :param x1: ``(..., n, d)`` inputs, after the kernel's ``active_dims`` were selected.
    :param x2: ``(..., m, d)`` inputs.
    :param parameters: the kernel's parameters, in the order of ``names``: they are what is differentiated.
    :param kernel: the GPyTorch kernel (one output per input).
    :param names: the names of ``parameters`` in ``kernel.named_parameters()``.
    :param engine: ``"dense"`` stores the matrix at the first product, ``"tiled"`` never does, ``"auto"`` stores
        it when it fits the memory budget (:class:`sketchgp.settings.memory_budget`).
    :param same: whether x1 and x2 hold the same points.
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
    ) -> None:
        super().__init__(x1, x2, *parameters, kernel=kernel, names=names, engine=engine, same=same)
        self.x1, self.x2, self.parameters = x1, x2, parameters
        self.kernel, self.names, self.engine, self.same = kernel, names, engine, same
        self._stored: Tensor | None = None
        self._sibling: RadialTiles | None = None
        self._coincident: Tensor | None = None
        self._stored_state: Any = None
        self._sibling_state: Any = None

    @classmethod
    def of(cls, kernel: Kernel, x1: Tensor, x2: Tensor | None = None, engine: str = "auto") -> KernelMatrix:
        """The operator for ``kernel(x1, x2)``; selects the kernel's active dimensions.

        :raises InputError: for an unknown engine, or a kernel that does not evaluate to a plain matrix.
        """
        if engine not in ENGINES:
            raise InputError(f"matmul expects one of {', '.join(map(repr, ENGINES))}, got {engine!r}.")
        same = x2 is None or x2 is x1
        x2 = x1 if x2 is None else x2
        if kernel.active_dims is not None:
            x1, x2 = x1.index_select(-1, kernel.active_dims), x2.index_select(-1, kernel.active_dims)
        if not is_plain(kernel, x1, x2):
            raise InputError(f"{type(kernel).__name__} has structure of its own; a plain kernel matrix is expected.")
        return cls._assemble(kernel, x1, x2, engine, same)

    @classmethod
    def from_lazy(cls, lazy: LazyEvaluatedKernelTensor, engine: str = "auto") -> KernelMatrix | None:
        """The operator for GPyTorch's unevaluated kernel; None where the kernel has structure worth keeping."""
        if lazy.last_dim_is_batch or lazy.params or not is_plain(lazy.kernel, lazy.x1, lazy.x2):
            return None
        same = lazy.x1 is lazy.x2 or (lazy.x1.shape == lazy.x2.shape and torch.equal(lazy.x1, lazy.x2))
        return cls._assemble(lazy.kernel, lazy.x1, lazy.x2, engine, same)

    @classmethod
    def _assemble(cls, kernel: Kernel, x1: Tensor, x2: Tensor, engine: str, same: bool) -> KernelMatrix:
        named = dict(kernel.named_parameters())
        return cls(x1, x2, *named.values(), kernel=kernel, names=tuple(named), engine=engine, same=same)

    def _with(self, x1: Tensor, x2: Tensor, same: bool) -> KernelMatrix:
        return self.__class__(x1, x2, *self.parameters, **{**self._options(), "same": same})

    def _options(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "names": self.names, "engine": self.engine, "same": self.same}

    # --- evaluation -----------------------------------------------------------------------------------------

    def _functional(self, module: nn.Module, parameters: tuple[Tensor, ...]) -> Any:
        named = {f"kernel.{name}": value for name, value in zip(self.names, parameters, strict=True)}

        def call(*args: Any, **options: Any) -> Any:
            with _SWAP:
                return functional_call(module, named, args, options)

        return call

    def _tiles(self, shape: tuple[int, int], live: list[Tensor] | None = None, same: bool | None = None) -> Tiles:
        """Tiles of at most ``shape``; of the ``live`` tensors, for gradients, or of the operator's own."""
        tensors = [t.detach() for t in (self.x1, self.x2, *self.parameters)] if live is None else live
        x1, x2, *parameters = tensors
        profile = recognise(self.kernel) if x1.dim() == x2.dim() == 2 else None
        if profile is not None:
            scales = self._functional(Scales(self.kernel), tuple(parameters))
            sibling = self._sibling if live is None else None
            same = self.same if same is None else same
            return RadialTiles(profile, scales, x1, x2, shape, same, self._coincident, sibling)
        evaluate = self._functional(Forward(self.kernel), tuple(parameters))
        return GenericTiles(evaluate, x1, x2, parameters)

    def _tile_shape(self) -> tuple[int, int]:
        *batch, n, m = self.shape
        return tile_shape(n, m, self.dtype, self.device, torch.Size(batch).numel())

    def _spans(self, height: int, width: int, half: bool) -> Any:
        """Pairs of row and column slices; with ``half``, only those that meet the upper triangle."""
        n, m = self.shape[-2:]
        for rows in spans(n, height):
            for columns in spans(m, width):
                if not half or columns.stop > rows.start:
                    yield rows, columns

    @torch.no_grad()
    def _evaluate(self) -> Tensor:
        """The dense matrix, without autograd."""
        height, width = self._tile_shape()
        tiles = self._tiles((height, width))
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows, columns in self._spans(height, width, half=False):
            out[..., rows, columns] = tiles.tile(rows, columns)
        return out if isinstance(tiles.outputscale, float) else out.mul_(tiles.outputscale)

    def _state(self) -> tuple[int, ...]:
        """Changes when one of the tensors is changed in place (but not through ``.data``)."""
        return tuple(tensor._version for tensor in self._args)

    def _repeats(self) -> bool:
        """Whether a batch is one matrix over and over: unbatched kernel, inputs expanded without copies."""
        inputs = (self.x1, self.x2)
        return not self.kernel.batch_shape and all(
            x.dim() > 2 and not any(step for step, size in zip(x.stride()[:-2], x.shape[:-2], strict=True) if size > 1)
            for x in inputs
        )

    def _stores(self) -> bool:
        if self.engine == "auto":  # a rectangular block is used once: storing it would gain nothing
            return self.same and self.shape.numel() * self.dtype.itemsize <= memory_budget.value(self.device)
        return self.engine == "dense"

    @torch.no_grad()
    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        if rhs.dim() > 2 and not self.batch_shape:  # one matrix, a batch of right-hand sides: more columns
            flat = self._matmul(rhs.movedim(-2, 0).reshape(rhs.shape[-2], -1))
            return flat.reshape(-1, *rhs.shape[:-2], rhs.shape[-1]).movedim(0, -2)
        if self.batch_shape and self._repeats():
            single = self._with(self.x1.flatten(0, -3)[0], self.x2.flatten(0, -3)[0], self.same)
            return single._matmul(
                rhs.expand(*torch.broadcast_shapes(self.batch_shape, rhs.shape[:-2]), *rhs.shape[-2:])
            )
        if self._stores():
            if self._stored is None or self._stored_state != self._state():
                self._stored, self._stored_state = self._evaluate(), self._state()
            return self._stored @ rhs
        return self._tiled_product(rhs)

    def _tiled_product(self, rhs: Tensor) -> Tensor:
        height, width = self._tile_shape()
        half = self.same and not self.batch_shape and rhs.dim() == 2
        if half:  # square tiles, so that a tile and its mirror image cover each pair once
            height = width = _square(height, width)
        tiles = self._tiles((height, width))
        batch = torch.broadcast_shapes(self.batch_shape, rhs.shape[:-2])
        out = torch.zeros(*batch, self.shape[-2], rhs.shape[-1], dtype=rhs.dtype, device=rhs.device)
        for rows, columns in self._spans(height, width, half):
            tile = tiles.tile(rows, columns)
            if half:
                out[rows].addmm_(tile, rhs[columns])
                if columns.start > rows.start:
                    out[columns].addmm_(tile.mT, rhs[rows])
            else:
                out[..., rows, :] += tile @ rhs[..., columns, :]
        return out if isinstance(tiles.outputscale, float) else out.mul_(tiles.outputscale)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._transpose_nonbatch()._matmul(rhs)

    # --- derivatives ----------------------------------------------------------------------------------------

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if left_vecs.dim() == 1:
            left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
        if not self.batch_shape and (left_vecs.dim() > 2 or right_vecs.dim() > 2):  # one matrix: more columns
            batch = torch.broadcast_shapes(left_vecs.shape[:-2], right_vecs.shape[:-2])
            left_vecs, right_vecs = (
                v.expand(*batch, *v.shape[-2:]).movedim(-2, 0).reshape(v.shape[-2], -1) for v in (left_vecs, right_vecs)
            )
        fold = self.same and not (self.x1.requires_grad or self.x2.requires_grad) and left_vecs.dim() == 2
        if fold:  # K is symmetric, so the weights may be made so: only the upper triangle is then visited
            left_vecs, right_vecs = (
                torch.cat([left_vecs, right_vecs], dim=-1),
                torch.cat([right_vecs, left_vecs], dim=-1) * 0.5,
            )
        return self._derivative(lambda rows, columns: left_vecs[..., rows, :] @ right_vecs[..., columns, :].mT, fold)

    def _derivative(self, weights: Any, symmetric: bool = False) -> tuple[Tensor | None, ...]:
        """Gradient of ``sum_ij w_ij k_ij`` for each of the operator's tensors (None where it needs none)."""
        args = (self.x1, self.x2, *self.parameters)
        live = [t.detach().requires_grad_(t.requires_grad) for t in args]
        wanted = [t for t in live if t.requires_grad]
        if not wanted:
            return (None,) * len(args)
        height, width = self._tile_shape()
        half = symmetric and not self.batch_shape
        if half:
            height = width = _square(height, width)
        separate = live[0].requires_grad or live[1].requires_grad  # x1 and x2 then have gradients of their own
        tiles = self._tiles((height, width), live, same=self.same and not separate)
        for rows, columns in self._spans(height, width, half):
            block = weights(rows, columns)
            if half and columns.start > rows.start:
                block *= 2
            tiles.add_gradient(rows, columns, block)
        found = iter(tiles.gradients(wanted))
        return tuple(next(found) if t.requires_grad else None for t in live)

    # --- parts of the matrix --------------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """The whole matrix ``(..., n, m)``, differentiable; the backward pass goes by tiles."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in self._args):
            return _Evaluate.apply({**self._options(), "coincident": self._coincident}, *self._args)
        return self._evaluate()

    def columns(self, indices: Tensor) -> Tensor:
        """``k(x1, x2[indices])``, dense and differentiable: ``(..., n, r)`` for ``indices`` of shape (..., r)."""
        part = self._with(self.x1, _take(self.x2, indices), same=False)
        if self._sibling is None or self._sibling_state != self._state():
            self._sibling_state = self._state()
            empty = self._with(self.x1, self.x2[..., :0, :], same=False)._tiles((0, 0))
            self._sibling = empty if isinstance(empty, RadialTiles) else None
        part._sibling = self._sibling
        if self.same and indices.dim() == 1:
            part._coincident = torch.stack([indices, torch.arange(len(indices), device=indices.device)])
        return part.to_dense()

    def block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """``k(x1[rows], x2[columns])``, dense and differentiable; indices as in :meth:`columns`."""
        part = self._with(_take(self.x1, rows), _take(self.x2, columns), same=False)
        if self.same and rows.dim() == columns.dim() == 1:
            part._coincident = (rows.unsqueeze(1) == columns).nonzero().mT
        return part.to_dense()

    def element(self, index: tuple[int, ...]) -> KernelMatrix:
        """One matrix of the batch (its parameters carry no gradient)."""
        x1, x2 = (x.expand(*self.batch_shape, *x.shape[-2:])[index] for x in (self.x1, self.x2))
        kernel = self.kernel
        if len(kernel.batch_shape):
            kernel = kernel.expand_batch(self.batch_shape)[index]
        with torch.no_grad():
            part = self._assemble(kernel, x1, x2, self.engine, self.same)
            return part.type(self.dtype).detach()

    def _diagonal(self) -> Tensor:
        evaluate = self._functional(Forward(self.kernel), self.parameters)
        return evaluate(self.x1, self.x2, diag=True).expand(self.shape[:-1])

    def evaluate_kernel(self) -> KernelMatrix:
        return self

    # --- what a LinearOperator must offer -------------------------------------------------------------------

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.x1.shape[:-2], self.x2.shape[:-2], self.kernel.batch_shape)
        return torch.Size((*batch, self.x1.shape[-2], self.x2.shape[-2]))

    @property
    def dtype(self) -> torch.dtype:
        return self.x1.dtype

    @property
    def device(self) -> torch.device:
        return self.x1.device

    def to(self, *args: Any, **kwargs: Any) -> KernelMatrix:
        """The operator with its tensors converted; the kernel, which belongs to the user, is left alone."""
        tensors = [_convert(t, *args, **kwargs) if t.is_floating_point() else t for t in self._args]
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
        return self._with(self.x2, self.x1, self.same)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        x1, x2 = (x.expand(*batch_shape, *x.shape[-2:]) for x in (self.x1, self.x2))
        return self._with(x1, x2, self.same)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        if len(self.kernel.batch_shape):
            return DenseLinearOperator(self.to_dense())._unsqueeze_batch(dim)
        x1, x2 = (x.expand(*self.batch_shape, *x.shape[-2:]).unsqueeze(dim) for x in (self.x1, self.x2))
        return self._with(x1, x2, self.same)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return DenseLinearOperator(self.to_dense())._permute_batch(*dims)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if any(index != slice(None) for index in batch_indices if isinstance(index, slice)) or any(
            not isinstance(index, slice) for index in batch_indices
        ):
            return DenseLinearOperator(self.to_dense())._getitem(row_index, col_index, *batch_indices)
        same = self.same and isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        if torch.is_tensor(row_index) and torch.is_tensor(col_index):
            same = self.same and row_index.shape == col_index.shape and bool((row_index == col_index).all())
        return self._with(_index(self.x1, row_index), _index(self.x2, col_index), same)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        if self.batch_shape:
            index = (*batch_indices, row_index, col_index)
            return self.to_dense()[index]
        evaluate = self._functional(Forward(self.kernel), self.parameters)
        return evaluate(self.x1[row_index], self.x2[col_index], diag=True)


def _part(options: dict[str, Any], args: tuple[Tensor, ...]) -> KernelMatrix:
    matrix = KernelMatrix(*args, **{key: value for key, value in options.items() if key != "coincident"})
    matrix._coincident = options["coincident"]
    return matrix


def _take(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``x`` (..., n, d) at ``indices`` (r,) or (..., r)."""
    if indices.dim() == 1:
        return x.index_select(-2, indices)
    x = x.expand(*indices.shape[:-1], *x.shape[-2:])
    return x.gather(-2, indices.unsqueeze(-1).expand(*indices.shape, x.shape[-1]))


def _convert(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``x.to(...)``, with batch dimensions that are expanded without copies left so."""
    repeated = [step == 0 and size > 1 for step, size in zip(x.stride()[:-2], x.shape[:-2], strict=True)]
    single = x[tuple(slice(0, 1) if r else slice(None) for r in repeated)]
    return single.to(*args, **kwargs).expand(x.shape)


def _square(height: int, width: int) -> int:
    return max(int((height * width) ** 0.5), 1)


def _index(x: Tensor, index: Any) -> Tensor:
    return x[..., index, :]

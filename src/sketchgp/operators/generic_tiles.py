"""Tiles of any kernel, by calling it on blocks of rows; gradients by autograd, tile by tile.

GPyTorch takes one kernel of a batch by ``kernel[i]``, which indexes every buffer as if it were a parameter:
``active_dims = (0, 2)`` becomes 0.  :class:`BatchElement` calls the batch and takes its element instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel, GridKernel, Kernel, LinearKernel, ProductKernel, RFFKernel, ScaleKernel
from linear_operator import to_dense
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from .. import row_sources
from ..devices import version
from ..errors import InputError
from ..settings import memory_budget
from .centre import Centre
from .lazies import KERNELS, evaluated, forward, parameters_of, parts_of, take_caches
from .tiles import spans

_LOW_RANK = (LinearKernel, RFFKernel)
_ROWS = 512  # of a block whose diagonal is taken, where a kernel gives no diagonal by itself


@contextmanager
def parameters_as(kernel: Kernel, names: Sequence[str], values: Sequence[Tensor]) -> Iterator[None]:
    """Let a kernel compute with ``values`` in place of its parameters called ``names``; its buffers get their dtype.

    Matrices that it has cached (grids and inducing points in eval mode) are neither used nor replaced.

    As ``torch.func.functional_call``, which leaves a module changed that stands in the tree twice (``k * k``).
    """
    with KERNELS:
        pairs = [(attrgetter(name)(kernel), value) for name, value in zip(names, values, strict=True)]
        new = {id(own): value for own, value in pairs}
        dtypes = {own.dtype: value.dtype for own, value in pairs if value.dtype != own.dtype}
        modules = list(kernel.modules())
        caches = [(part, take_caches(part)) for part in modules if isinstance(part, Kernel)]
        before = [
            (held, key, tensor)
            for module in modules
            for held in (module.__dict__["_parameters"], module.__dict__["_buffers"], module.__dict__)
            for key, tensor in held.items()
            if isinstance(tensor, Tensor) and (id(tensor) in new or tensor.dtype in dtypes)
        ]
        try:
            for held, key, tensor in before:
                held[key] = new[id(tensor)] if id(tensor) in new else tensor.to(dtypes[tensor.dtype])
            yield
        finally:
            for held, key, tensor in before:
                held[key] = tensor
            for part, cached in caches:
                take_caches(part)
                part.__dict__.update(cached)


def of_all_dims(kernel: Kernel) -> Kernel:
    """Return a kernel for inputs whose active dimensions were selected already; it shares the parameters."""
    if kernel.active_dims is None:
        return kernel
    result = object.__new__(type(kernel))
    result.__dict__.update(kernel.__dict__, _buffers={**kernel.__dict__["_buffers"], "active_dims": None})
    return result


def evaluate(
    kernel: Kernel, x1: Tensor, x2: Tensor, centre: Centre, far: Tensor | None = None, **options: Any
) -> Tensor:
    """Return ``kernel(x1, x2)`` as a plain tensor; active dimensions were selected already.

    Rows of x1 that lie far from the centre are evaluated by themselves: GPyTorch's distances count from the mean of x1.

    :param far: ``(n,)`` bool, on the CPU: which rows do; None where that is to be found out, which a device waits for.
    """
    with KERNELS:
        groups = None if options else centre.groups(x1, far)
        if groups is None:
            return call(kernel, x1, x2, **options)
        blocks = [call(kernel, x1[..., rows, :], x2) for rows in groups]
        return torch.cat(blocks, dim=-2).index_select(-2, torch.cat(groups).argsort())


def call(kernel: Kernel, x1: Tensor, x2: Tensor, diag: bool = False, **options: Any) -> Tensor:
    """Return ``kernel.forward(x1, x2)`` as a tensor.

    GPyTorch takes the diagonals ``(..., n, n)`` of a batch of n matrices of n points for matrices, where kernels are
    called by kernels.  One more point then tells them apart.
    """
    if not diag:
        return to_dense(evaluated(forward(kernel, x1, x2, apart=False, **options), apart=False))
    n = x1.shape[-2]
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], kernel.batch_shape)
    more = next(k for k in range(len(batch) + 1) if n + k not in batch)
    if more and n:
        x1, x2 = (torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], more, -1)], dim=-2) for x in (x1, x2))
    value = to_dense(evaluated(kernel.forward(x1, x2, diag=True, **options), apart=False))
    if not (more and n):
        return value
    return value[..., :n, :n] if value.shape[-2:] == (n + more, n + more) else value[..., :n]


def diagonal(evaluate: Callable[..., Tensor], x1: Tensor, x2: Tensor, batch: torch.Size) -> Tensor:
    """Return ``k(x1_i, x2_i)``, ``(*batch, n)``, of a kernel as a function of blocks; it may ignore ``diag``."""
    if not (torch.is_tensor(x1) and torch.is_tensor(x2)):
        both = zip(row_sources.blocks(x1), row_sources.blocks(x2), strict=True)
        return torch.cat([diagonal(evaluate, a, b, batch) for (_, a), (_, b) in both], dim=-1)
    n = x1.shape[-2]
    try:
        ignored = evaluate(x1[..., :2, :].detach(), x2[..., :2, :].detach(), diag=True).dim() > len(batch) + 1
    except RuntimeError:  # of a product in which one factor ignores it
        ignored = True
    if not ignored:  # in two parts: a grid's kernel gives a matrix for the whole grid, and for it alone
        halves = spans(n, -(-n // 2)) if n else [slice(None)]
        parts = [evaluate(x1[..., rows, :], x2[..., rows, :], diag=True) for rows in halves]
    else:
        blocks = (evaluate(x1[..., rows, :], x2[..., rows, :]) for rows in spans(n, _ROWS))
        parts = [block.diagonal(dim1=-2, dim2=-1) for block in blocks]
    return torch.cat(parts, dim=-1)


class GenericTiles:
    """Tiles of any kernel, by calling it on rows of x1 ``(..., n, d)`` and x2 ``(..., m, d)``.

    :param evaluate: the kernel as a function of two blocks of rows.
    :param tensors: x1, x2 and the parameters that ``evaluate`` uses; gradients are with respect to these.
    :param far: ``(n,)`` bool, on the CPU: which rows of x1 lie far from the centre; None where nobody has looked.
    """

    outputscale: Tensor | None = None

    def __init__(self, evaluate: Callable[..., Tensor], tensors: list[Tensor], far: Tensor | None) -> None:
        self.evaluate, self.tensors, self.far = evaluate, tensors, far
        self.x1, self.x2 = tensors[:2]
        self._gradients: dict[Tensor, Tensor] = {}

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """One tile, without autograd."""
        sides = real(self.x1[..., rows, :].detach()), real(self.x2[..., columns, :].detach())
        return self.evaluate(*sides, far=self._far(rows))

    def _far(self, rows: slice) -> Tensor | None:
        return None if self.far is None else self.far[rows]

    def add(self, rows: slice, columns: slice, weights: Tensor) -> None:
        """Add the gradient of ``(weights * tile).sum()``."""
        wanted = [t for t in dict.fromkeys(self.tensors) if t.requires_grad]
        with torch.enable_grad():
            tile = self.evaluate(real(self.x1[..., rows, :]), real(self.x2[..., columns, :]), far=self._far(rows))
            if not tile.requires_grad:
                return
            weights = weights.sum_to_size(tile.shape).to(tile.dtype)
            result = torch.autograd.grad(tile, wanted, weights, allow_unused=True)
        for t, gradient in zip(wanted, result, strict=True):
            if gradient is not None:
                self._gradients[t] = self._gradients[t] + gradient if t in self._gradients else gradient

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return ``(tensor, gradient)`` for the tensors that the kernel depends on."""
        return list(self._gradients.items())


def real(x: Tensor) -> Tensor:
    """Convert half-precision inputs to float32, which is computed in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def is_plain(kernel: Kernel, x1: Tensor, x2: Tensor) -> bool:
    """Return whether ``kernel`` gives one plain number a pair, by evaluating it on two points.

    Kernels with structure that GPyTorch exploits (interpolation grids, low rank, Kronecker products) do not.  Low rank
    survives neither in a product of kernels, which GPyTorch would approximate, nor in a sum with others.  A kernel that
    holds the points it is called with, as an interpolation grid does, may have structure for these points alone: it is
    called with all of them.
    """
    if x1.shape[-2] == 0 or x2.shape[-2] == 0 or kernel.num_outputs_per_input(x1, x2) != 1:
        return False
    dissolved = {id(part) for combined in kernel.modules() for part in _dissolved(combined)}
    plain = (Kernel.prediction_strategy, ScaleKernel.prediction_strategy)
    kept = (part for part in kernel.modules() if isinstance(part, Kernel) and id(part) not in dissolved)
    if any(type(part).prediction_strategy not in plain for part in kept):
        return False
    with torch.no_grad(), _own_parameters_spared(kernel):
        if not _is_dense(evaluated(forward(kernel, x1[..., :2, :], x2[..., :2, :], apart=False), apart=False)):
            return False
        inner = kernel
        while type(inner) is ScaleKernel:
            inner = inner.base_kernel
        if not _holds(inner, x1) or not _holds(inner, x2):
            return True
        fits = x1.shape[-2] * x2.shape[-2] * x1.dtype.itemsize <= memory_budget.value(x1.device)
        if not fits and not isinstance(inner, GridKernel):
            return True
        return _is_dense(evaluated(forward(copy.copy(inner), x1, x2)))  # what it keeps of this call goes with the copy


def _dissolved(kernel: Any) -> list[torch.nn.Module]:
    """Return the low-rank kernels within a kernel whose structure its products and sums do not keep."""
    mixed = type(kernel) is AdditiveKernel and not all(map(_is_low_rank, kernel.kernels))
    if not mixed and type(kernel) is not ProductKernel:
        return []
    return [part for part in kernel.modules() if isinstance(part, _LOW_RANK)]


def _is_low_rank(kernel: Any) -> bool:
    while type(kernel) is ScaleKernel:
        kernel = kernel.base_kernel
    if type(kernel) is AdditiveKernel:
        return all(map(_is_low_rank, kernel.kernels))
    return isinstance(kernel, _LOW_RANK)


def _holds(kernel: Kernel, x: Tensor) -> bool:
    """Return whether a buffer of the kernel equals x."""
    if not torch.is_tensor(x):
        return False
    held = [b for b in kernel.buffers(recurse=False) if b.shape[-2:] == x.shape[-2:] and b.dim() <= x.dim()]
    return any(torch.equal(b.expand_as(x), x) for b in held if b.device == x.device)


@contextmanager
def _own_parameters_spared(kernel: Kernel) -> Iterator[list[Tensor]]:
    """Let copies stand in for the kernel's parameters."""
    with KERNELS:
        named = parameters_of(kernel)
        copies = [p.detach().clone() for p in named.values()]
        with parameters_as(kernel, tuple(named), copies):
            yield copies


@torch.no_grad()
def settle(kernel: Kernel, x1: Tensor, x2: Tensor) -> None:
    """Change the parameters of a kernel as calling it with these points does; most kernels change none.

    ``nn.Embedding(max_norm=1)`` shortens the vectors that it looks up, in place.  Tiles are evaluated with copies of
    the parameters, as autograd may hold the originals; so it is done here, once, before anything is computed.
    """
    with _own_parameters_spared(kernel) as copies:
        evaluated(forward(kernel, real(x1[..., :1, :]), real(x2[..., :1, :])))
        if not any(version(c) for c in copies):
            return
        for x in (x1, x2):
            for rows in spans(x.shape[-2], _ROWS):
                evaluated(forward(kernel, real(x[..., rows, :]), real(x[..., :1, :])))
    for parameter, new in zip(parameters_of(kernel).values(), copies, strict=True):
        if not torch.equal(parameter, new):
            parameter.data.copy_(new)  # a graph that holds the parameter is of a call that had changed it before


def _is_dense(value: Any) -> bool:
    if torch.is_tensor(value) or type(value) is DenseLinearOperator:
        return True
    plain = ("SumLinearOperator", "MulLinearOperator", "ConstantMulLinearOperator", "PsdSumLinearOperator")
    return type(value).__name__ in plain and all(_is_dense(part) for part in parts_of(value))


Index = tuple[int, ...]


class BatchElement(Kernel):
    """One kernel of a batch of kernels, without batch: ``k(x1, x2)[index]``, at the cost of the whole batch.

    :param whole: the kernel; it is neither copied nor changed.
    :param index: which of the batch.
    :param batch: the shape of the batch of matrices.
    :param inputs: the batch shape of the inputs that ``whole`` is called with.
    """

    def __init__(self, whole: Kernel, index: Index, batch: torch.Size, inputs: torch.Size) -> None:
        super().__init__()
        self.whole, self.index, self.batch, self.inputs = whole, index, batch, inputs
        self.number = int(torch.arange(batch.numel()).reshape(batch)[index])  # what fingerprints tell elements by

    @property
    def batch_shape(self) -> torch.Size:
        """Return no batch, whatever that of the parts."""
        return torch.Size()

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        return self.whole.num_outputs_per_input(x1, x2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **options: Any) -> Tensor:
        """``(..., n, m)``, or ``(..., n)`` with ``diag`` where the kernel minds it, for x1 ``(..., n, d)``.

        :raises InputError: if the kernel gives another shape than that of its batch.
        """
        blocks, size = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), (x1.shape[-2], x2.shape[-2])
        if blocks:  # the batch of kernels stands behind them
            x1, x2 = (x.reshape(*x.shape[:-2], *[1] * len(self.batch), *x.shape[-2:]) for x in (x1, x2))
        x1, x2 = (torch.broadcast_to(x, torch.broadcast_shapes(x.shape, (*self.inputs, 1, 1))) for x in (x1, x2))
        value = call(self.whole, x1, x2, diag=diag, **options)
        index = (*[slice(None)] * len(blocks), *self.index)
        return pick(value, blocks + self.batch, index, size, diag, self.whole)

    def own(self, parameter: Tensor, trailing: int) -> Tensor:
        """Return this element of a parameter ``(*b, ...)`` with ``trailing`` dimensions behind the batch."""
        kept = parameter.shape[parameter.dim() - trailing :]
        return parameter.expand(*self.batch, *kept)[self.index]


def pick(value: Tensor, batch: torch.Size, index: Any, size: tuple[int, ...], diag: bool, kernel: Kernel) -> Tensor:
    """Return one matrix ``(n, m)``, or diagonal ``(n,)``, of the value of a batch, whose shape is checked."""
    if diag and value.dim() < len(batch) + 2:
        size = size[:1]
    fits = value.shape[-len(size) :] == size and value.dim() <= len(batch) + len(size)
    own, whole = value.shape[: value.dim() - len(size)], batch[len(batch) + len(size) - value.dim() :]
    if not fits or any(mine not in (1, all_) for mine, all_ in zip(own, whole, strict=True)):
        raise InputError(
            f"{type(kernel).__name__} gives shape {tuple(value.shape)} where {(*batch, *size)} is expected: one matrix "
            "for each kernel of its batch."
        )
    return value.expand(*batch, *size)[index]

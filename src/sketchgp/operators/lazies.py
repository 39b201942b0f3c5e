"""Covariances that GPyTorch has not evaluated yet, evaluated without a change of its settings.

GPyTorch evaluates a ``LazyEvaluatedKernelTensor`` with ``lazily_evaluate_kernels`` off for the whole process and the
kernel's ``active_dims`` taken away meanwhile: of two threads one can leave either behind for good.  Here the kernel's
``forward`` is called, and what it returns unevaluated is evaluated in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from operator import add, mul
from typing import Any

import gpytorch.kernels as plain
import torch
from gpytorch import settings
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel, keops
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import (
    ConstantMulLinearOperator,
    DenseLinearOperator,
    LinearOperator,
    MatmulLinearOperator,
    MulLinearOperator,
    PsdSumLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)
from linear_operator.utils.memoize import cached
from torch import Tensor, nn

from ..errors import InputError
from ..settings import memory_budget
from .centre import Centre

KERNELS = threading.RLock()  # held while a kernel of the user's runs, or has other parameters than its own
SUMS = (SumLinearOperator, PsdSumLinearOperator)
_CACHED = "_cached"  # begins the names of attributes in which kernels keep what they computed
_FEATURES = 8  # up to which differences take no longer than the other steps of a kernel


def forward(kernel: Kernel, x1: Tensor, x2: Tensor, apart: bool = True, **options: Any) -> Any:
    """Call ``kernel.forward(x1, x2)`` as GPyTorch does, with every kernel inside of it evaluated.

    GPyTorch's scaled kernels, sums and products are put together of their parts.  Of other kernels with kernels inside
    only their own code knows what becomes of those, and it expects GPyTorch's setting: those alone are called with it,
    one at a time.  Products are stored where they fit the memory budget: GPyTorch's operator for them approximates.

    :param apart: whether rows that lie far from the others are evaluated by themselves (:func:`_call_apart`).
    :param options: what else the kernel is told.
    """
    if type(kernel) is ScaleKernel and not options:
        value = evaluated(forward(kernel.base_kernel, x1, x2, apart), apart)
        return _scaled(value, kernel.outputscale[..., None, None])
    if type(kernel) in (AdditiveKernel, ProductKernel) and not options:
        parts = []
        for part in kernel.kernels:
            a, b = (x if part.active_dims is None else x.index_select(-1, part.active_dims) for x in (x1, x2))
            parts.append(to_linear_operator(evaluated(forward(part, a, b, apart), apart)))
        if type(kernel) is AdditiveKernel:
            return _added(parts)
        dense = all(type(part) is DenseLinearOperator for part in parts)
        if not dense:
            size = torch.broadcast_shapes(*(part.shape for part in parts)).numel() * x1.dtype.itemsize
            dense = size <= memory_budget.value(x1.device) or not torch.equal(x1, x2)
        return reduce(mul, map(to_dense, parts) if dense else parts)
    return _call_apart(kernel, x1, x2) if apart and not options else _call(kernel, x1, x2, **options)


def _scaled(value: Any, scale: Tensor) -> Any:
    """Multiply an evaluated covariance, both factors of features by the root of the scale.

    GPyTorch does so where the points are equal.  Elsewhere float32 would round the scale otherwise.
    """
    if isinstance(value, MulLinearOperator) and scale.numel() > 1:  # which knows no batch of constants
        return ConstantMulLinearOperator(value, scale[..., 0, 0])
    if type(value) in SUMS:
        return SumLinearOperator(*(_scaled(part, scale) for part in value.linear_ops))
    if type(value) is MatmulLinearOperator:
        return MatmulLinearOperator(value.left_linear_op * scale.sqrt(), value.right_linear_op * scale.sqrt())
    return value * scale


def _added(parts: Sequence[Any]) -> Any:
    """Add evaluated covariances, as dense matrices where one of them is dense.

    GPyTorch would add one of low rank by a root of the others, with jitter, or by Lanczos.
    """
    if any(type(part) is DenseLinearOperator for part in parts):
        return reduce(add, map(to_dense, parts))
    if any(isinstance(part, RootLinearOperator) for part in parts):
        return SumLinearOperator(*parts)
    return reduce(add, parts)


def check_columns(kernel: Kernel, x: Tensor) -> None:
    """Refuse inputs that have more or fewer columns than the kernel has lengthscales.

    :raises InputError: if they have.
    """
    if kernel.ard_num_dims not in (None, x.shape[-1]):
        expected = f"inputs with {kernel.ard_num_dims} columns, its ard_num_dims"
        raise InputError(f"{type(kernel).__name__} expects {expected}; those that reach it have {x.shape[-1]}.")


def _call(kernel: Kernel, x1: Tensor, x2: Tensor, **options: Any) -> Any:
    check_columns(kernel, x1)
    parts = [part for part in kernel.modules() if isinstance(part, Kernel)]
    with KERNELS, settings.lazily_evaluate_kernels(False) if parts[1:] else nullcontext():
        measuring = [part for part in parts if getattr(part.covar_dist, "__func__", None) is Kernel.covar_dist]
        with _replaced(measuring, "covar_dist", _distances):
            return kernel.forward(x1, x2, **options)


@contextmanager
def _replaced(kernels: Sequence[Kernel], name: str, function: Any) -> Iterator[None]:
    """Let a function, called with the kernel first, take the place of a method of some kernels."""
    for part in kernels:
        part.__dict__[name] = partial(function, part)
    try:
        yield
    finally:
        for part in kernels:
            del part.__dict__[name]


@contextmanager
def evaluated_in(model: nn.Module) -> Iterator[None]:
    """Evaluate by :func:`forward` what the model's own ``forward`` evaluates, as it does for a product of covariances.

    Covariances with a structure are stored where they fit the memory budget: GPyTorch multiplies factors with jitter.
    """
    inside = False

    def evaluate(kernel: Kernel, x1: Tensor, x2: Tensor, **options: Any) -> Any:
        nonlocal inside
        if inside or options.get("diag"):
            return type(kernel).forward(kernel, x1, x2, **options)
        inside = True
        try:
            value = evaluated(forward(kernel, x1, x2, **{k: v for k, v in options.items() if v is not False}))
        finally:
            inside = False
        fits = value.shape.numel() * x1.dtype.itemsize <= memory_budget.value(x1.device)
        return to_dense(value) if fits and not isinstance(value, RootLinearOperator) else value

    with KERNELS:
        parts = [part for part in model.modules() if isinstance(part, Kernel) and "forward" not in part.__dict__]
        with _replaced(parts, "forward", evaluate):
            yield


def _distances(kernel: Kernel, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False,
               square_dist: bool = False, **options: Any) -> Tensor:  # fmt: skip
    """Compute distances of few features by differences: GPyTorch's product rounds squares of the inputs."""
    if last_dim_is_batch:
        x1, x2 = x1.mT.unsqueeze(-1), x2.mT.unsqueeze(-1)
    if diag or x1.shape[-1] > _FEATURES or x1.dtype.itemsize < 4:
        return Kernel.covar_dist(kernel, x1, x2, diag=diag, square_dist=square_dist, **options)
    if torch.is_grad_enabled() and (x1.requires_grad or x2.requires_grad):  # cdist can be differentiated once
        square = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(dim=-1)
    else:
        square = torch.cdist(x1, x2, compute_mode="donot_use_mm_for_euclid_dist").square()
    return square if square_dist else square.clamp_min(1e-30).sqrt()


def _call_apart(kernel: Kernel, x1: Tensor, x2: Tensor) -> Any:
    """Call ``kernel.forward(x1, x2)`` in groups of rows of x1 that lie near each other.

    GPyTorch's distances count from the mean of x1: one far row among them costs all others their digits.  A kernel that
    gives an operator with structure is called with all rows.
    """
    groups = Centre(x2, x1).groups(x1) if x1.shape[-2] > 1 and x1.is_floating_point() else None
    few = None if groups is None else to_linear_operator(_call(kernel, x1[..., :2, :], x2[..., :2, :]))
    if groups is None or type(few) is not DenseLinearOperator:
        return _call(kernel, x1, x2)
    outputs = kernel.num_outputs_per_input(x1, x2)
    same = x1 is x2 or torch.equal(x1, x2)
    blocks = []
    for rows in groups:
        some = x1[..., rows, :]
        block = to_dense(_call(kernel, some, x2))
        if same:  # where equal points are told by equal arguments
            own = to_dense(_call(kernel, some, some))
            block = block.index_copy(-1, _entries(rows, outputs), own.expand(*block.shape[:-1], -1))
        blocks.append(block)
    return torch.cat(blocks, dim=-2).index_select(-2, _entries(torch.cat(groups), outputs).argsort())


def _entries(points: Tensor, outputs: int) -> Tensor:
    """Return the rows of a covariance that belong to points, for kernels with several outputs a point."""
    return (points.unsqueeze(-1) * outputs + torch.arange(outputs, device=points.device)).reshape(-1)


def evaluated(value: Any, apart: bool = True, by: Callable[[Any], Any] | None = None) -> Any:
    """Return a tensor or operator with every unevaluated kernel in it evaluated.

    :param apart: as in :func:`forward`.
    :param by: gives what takes the place of a part, or None where its own parts are looked at.
    """
    if by is not None and (other := by(value)) is not None:
        return other
    if isinstance(value, LazyEvaluatedKernelTensor):
        options = {**value.params, **({"last_dim_is_batch": True} if value.last_dim_is_batch else {})}
        with KERNELS, torch.set_grad_enabled(keeps_gradients(value)):
            return evaluated(forward(value.kernel, value.x1, value.x2, apart, **options), apart)
    if not isinstance(value, LinearOperator) or type(value).evaluate_kernel is not LinearOperator.evaluate_kernel:
        return value  # which evaluates itself when it is looked at
    before = parts_of(value)
    parts = [evaluated(part, apart, by) for part in before]
    if all(new is old for new, old in zip(parts, before, strict=True)):
        return value
    parts = [new if torch.is_tensor(old) else to_linear_operator(new) if torch.is_tensor(new) else new
             for new, old in zip(parts, before, strict=True)]  # fmt: skip
    if type(value) in SUMS:
        return _added(parts)
    return value.__class__(*parts, **value._kwargs)


class UnevaluatedKernel(LazyEvaluatedKernelTensor):
    """GPyTorch's unevaluated kernel, evaluated by :func:`evaluated`."""

    @cached(name="kernel_eval")
    def evaluate_kernel(self) -> LinearOperator:
        """Return the covariance as the operator that the kernel makes of it.

        :raises InputError: if the kernel gives another shape than it promised.
        """
        value = evaluated(self)
        if value.shape != self.shape:
            raise InputError(
                f"{type(self.kernel).__name__} expects to give a covariance of shape {tuple(self.shape)}, "
                f"got {tuple(value.shape)}."
            )
        return to_linear_operator(value)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        """Evaluate a batch before indexing: GPyTorch would index the kernel, whose ``active_dims`` are no batch."""
        if all(isinstance(index, slice) and index == slice(None) for index in batch_indices):
            return super()._getitem(row_index, col_index, *batch_indices)
        index = (*batch_indices, row_index, col_index)
        return self.evaluate_kernel()[index]


def parts_of(operator: LinearOperator) -> Sequence[Any]:
    """Return the arguments that an operator was made of."""
    return operator._args


def keeps_gradients(lazy: LazyEvaluatedKernelTensor) -> bool:
    """Return whether autograd was at work when the kernel was called."""
    return lazy._is_grad_enabled


def take_caches(module: Any) -> dict[str, Any]:
    """Remove and return the values that a kernel has cached, by the names that GPyTorch gives such attributes.

    They do not notice a change of parameters, and may hold a graph.
    """
    return {name: module.__dict__.pop(name) for name in list(module.__dict__) if name.startswith(_CACHED)}


def parameters_of(kernel: Kernel) -> dict[str, Tensor]:
    """Return the kernel's parameters by name, also while another thread lets it compute with others.

    Pyro's samples of hyperparameters are among them, which are plain attributes in place of parameters.
    """
    with KERNELS:
        named: dict[str, Tensor] = dict(kernel.named_parameters())
        for path, module in kernel.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, Tensor) and value.requires_grad and not key.startswith(_CACHED):
                    named[f"{path}.{key}" if path else key] = value
        return named


def parameters_in(operator: Any) -> list[Tensor]:
    """Return the parameters of all kernels in an operator."""
    kernel = getattr(operator, "kernel", None)
    if isinstance(kernel, Kernel):  # a KernelMatrix, or GPyTorch's unevaluated one
        return list(parameters_of(kernel).values())
    parts = parts_of(operator) if isinstance(operator, LinearOperator) else ()
    return [parameter for part in parts for parameter in parameters_in(part)]


def adopt_kernels(operator: Any) -> None:
    """Make the unevaluated kernels of an operator :class:`UnevaluatedKernel`, in place."""
    if type(operator) is LazyEvaluatedKernelTensor:
        operator.__class__ = UnevaluatedKernel
    elif isinstance(operator, LinearOperator):
        for part in parts_of(operator):
            adopt_kernels(part)


_PLAIN: dict[type, type] = {
    keops.RBFKernel: plain.RBFKernel,
    keops.MaternKernel: plain.MaternKernel,
    keops.PeriodicKernel: plain.PeriodicKernel,
}


def without_keops(kernel: Any) -> Any:
    """Replace GPyTorch's KeOps kernels by the plain ones, which share their parameters.

    They are the same functions; here an engine decides how they are evaluated.  Subclasses are left alone: they may
    compute something else.
    """
    return _without(kernel, {})


def _without(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        before = module.__dict__["_modules"]
        parts = {name: None if part is None else _without(part, made) for name, part in before.items()}
        cls: Any = _PLAIN.get(type(module), type(module))
        new = module
        if cls is not type(module) or any(part is not before[name] for name, part in parts.items()):
            new = object.__new__(cls)
            new.__dict__.update(module.__dict__, _modules=parts)
        made[id(module)] = new
    return made[id(module)]

"""Tiles of any kernel, by calling it on blocks of rows; gradients by autograd, tile by tile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpytorch import settings
from gpytorch.kernels import Kernel, ScaleKernel
from linear_operator import to_dense
from linear_operator.operators import DenseLinearOperator
from torch import Tensor, nn


class Forward(nn.Module):
    """``kernel.forward`` as a module, so that the parameters can be swapped for the operator's own tensors."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x1: Tensor, x2: Tensor, **options: Any) -> Tensor:
        with settings.lazily_evaluate_kernels(False), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return to_dense(self.kernel.forward(x1, x2, **options))


class GenericTiles:
    """Tiles of any kernel, by calling it; gradients by autograd, tile by tile."""

    outputscale: float | Tensor = 1.0

    def __init__(self, evaluate: Callable[..., Tensor], x1: Tensor, x2: Tensor, parameters: list[Tensor]) -> None:
        self.evaluate, self.x1, self.x2, self.parameters = evaluate, x1, x2, parameters
        self._gradients: list[Tensor | None] | None = None

    def tile(self, rows: slice, columns: slice) -> Tensor:
        return self.evaluate(self.x1[..., rows, :].detach(), self.x2[..., columns, :].detach())

    def add_gradient(self, rows: slice, columns: slice, weights: Tensor) -> None:
        inputs = [self.x1, self.x2, *self.parameters]
        if self._gradients is None:
            self._gradients = [torch.zeros_like(t) if t.requires_grad else None for t in inputs]
        with torch.enable_grad():
            tile = self.evaluate(self.x1[..., rows, :], self.x2[..., columns, :])
            if not tile.requires_grad:
                return
            wanted = [t for t in inputs if t.requires_grad]
            found = iter(torch.autograd.grad(tile, wanted, weights.sum_to_size(tile.shape), allow_unused=True))
        for total, tensor in zip(self._gradients, inputs, strict=True):
            if tensor.requires_grad and (gradient := next(found)) is not None and total is not None:
                total += gradient

    def gradients(self, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        assert self._gradients is not None
        return tuple(g for g in self._gradients if g is not None)


def is_plain(kernel: Kernel, x1: Tensor, x2: Tensor) -> bool:
    """Whether ``kernel`` gives one plain number a pair, found by evaluating it on two points.

    Kernels with structure that GPyTorch exploits (interpolation grids, low rank, Kronecker products, KeOps) are not.
    """
    if x1.shape[-2] == 0 or x2.shape[-2] == 0 or kernel.num_outputs_per_input(x1, x2) != 1:
        return False
    for part in kernel.modules():
        if isinstance(part, Kernel) and type(part).prediction_strategy not in (
            Kernel.prediction_strategy,
            ScaleKernel.prediction_strategy,
        ):
            return False
    with torch.no_grad(), settings.lazily_evaluate_kernels(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = kernel.forward(x1[..., :2, :], x2[..., :2, :])
    return _is_dense(value)


def _is_dense(value: Any) -> bool:
    if torch.is_tensor(value) or type(value) is DenseLinearOperator:
        return True
    plain = ("SumLinearOperator", "MulLinearOperator", "ConstantMulLinearOperator", "PsdSumLinearOperator")
    return type(value).__name__ in plain and all(_is_dense(part) for part in value._args)

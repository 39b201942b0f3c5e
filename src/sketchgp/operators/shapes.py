"""Rows, columns and batch dimensions of tensors, as ``KernelMatrix`` takes and moves them."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..checks import inputs, instance
from ..errors import InputError
from ..row_sources import RowSource


def leading_to_columns(x: Tensor, batch: torch.Size, more: int) -> Tensor:
    """``x`` expanded to the batch, with the first ``more`` batch dimensions made columns: ``(..., n, *more, t)``."""
    x = x.expand(*batch, *x.shape[-2:])
    return x.permute(*range(more, x.dim() - 1), *range(more), x.dim() - 1) if more else x


def columns_to_leading(dims: int, batch: int, more: int) -> list[int]:
    """The permutation that undoes :func:`leading_to_columns` on a product ``(*batch, n, *more, t)``.

    :param dims: how many dimensions that has; ``batch`` and ``more`` of them as named.
    """
    return [*range(batch + 1, batch + 1 + more), *range(batch + 1), dims - 1]


def take_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``x`` (..., n, d) at ``indices`` (r,) or (..., r)."""
    if indices.dim() == 1:
        return x.index_select(-2, indices)
    x = x.expand(*indices.shape[:-1], *x.shape[-2:])
    return x.gather(-2, indices.unsqueeze(-1).expand(*indices.shape, x.shape[-1]))


def repeated(x: Tensor) -> bool:
    """Whether a batch ``(..., n, d)`` is one matrix over and over, expanded without copies."""
    steps = zip(x.stride()[:-2], x.shape[:-2], strict=True)
    return x.dim() > 2 and not any(step for step, size in steps if size > 1)


def convert(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``x.to(...)``, with batch dimensions that are expanded without copies left so."""
    if isinstance(x, RowSource):
        return x.to(*args, **kwargs)
    repeated = [step == 0 and size > 1 for step, size in zip(x.stride()[:-2], x.shape[:-2], strict=True)]
    single = x[tuple(slice(0, 1) if r else slice(None) for r in repeated)]
    return single.to(*args, **kwargs).expand(x.shape)


def index_rows(x: Tensor, index: Any) -> Tensor:
    """Rows of ``x`` (..., n, d), by an index or a slice."""
    return x[..., index, :]


def check_operands(owner: str, kernel: Any, x1: Any, x2: Any) -> None:
    """:raises InputError: for what is no kernel, or no points (x2 may be None) of one dtype, device and dimension."""
    instance(owner, "kernel", kernel, Kernel, "a gpytorch kernel")
    first = x1 if isinstance(x1, RowSource) else inputs(owner, "x1", x1)
    second = first if x2 is None else x2 if isinstance(x2, RowSource) else inputs(owner, "x2", x2)
    if (first.dtype, first.device, first.shape[-1]) != (second.dtype, second.device, second.shape[-1]):
        raise InputError(
            f"{owner}: x1 and x2 expect one dtype, device and number of features, got {first.dtype}, {first.device}, "
            f"{first.shape[-1]} and {second.dtype}, {second.device}, {second.shape[-1]}."
        )

"""One matrix of a batch of kernel matrices.

GPyTorch takes one kernel of a batch by ``kernel[i]``, which indexes every buffer as if it were a parameter:
``active_dims = (0, 2)`` becomes 0.  Here nothing of the kernel is indexed.  The whole batch is called and its element
taken; where the kernel is recognised (:mod:`sketchgp.operators.expression`), parameters of known shapes are.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..errors import InputError
from .generic_tiles import call

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
        """None, whatever the batch of the parts."""
        return torch.Size()

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        return self.whole.num_outputs_per_input(x1, x2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **options: Any) -> Tensor:
        """``(n, m)``, or ``(n,)`` with ``diag`` where the kernel minds it.

        :raises InputError: if the kernel gives another shape than that of its batch.
        """
        x1, x2 = (x.expand(*self.inputs, *x.shape[-2:]) for x in (x1, x2))
        value = call(self.whole, x1, x2, diag=diag, **options)
        return pick(value, self.batch, self.index, (x1.shape[-2], x2.shape[-2]), diag, self.whole)

    def own(self, parameter: Tensor, trailing: int) -> Tensor:
        """This element of a parameter ``(*b, ...)`` with ``trailing`` dimensions behind the batch."""
        kept = parameter.shape[parameter.dim() - trailing :]
        return parameter.expand(*self.batch, *kept)[self.index]


def pick(value: Tensor, batch: torch.Size, index: Index, size: tuple[int, ...], diag: bool, kernel: Kernel) -> Tensor:
    """One matrix ``(n, m)``, or diagonal ``(n,)``, of what a kernel gives for a batch; its shape is checked."""
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

"""One matrix of a batch of kernel matrices.

GPyTorch takes one kernel of a batch by ``kernel[i]``, which indexes every buffer as if it were a parameter:
``active_dims = (0, 2)`` becomes 0.  Here nothing of the kernel is indexed.  The whole batch is called and its element
taken; where the kernel is recognised (:mod:`sketchgp.operators.expression`), parameters of known shapes are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..errors import InputError, NumericalError
from .generic_tiles import call, real

if TYPE_CHECKING:
    from .kernel_matrix import KernelMatrix

Index = tuple[int, ...]

_FEW = 8  # rows and columns at which an element is compared with its batch
_RELATIVE, _ABSOLUTE = 1e-2, 1e-6  # differences allowed in an entry: of itself, of the largest; kernels may round


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
        return _pick(value, self.batch, self.index, (x1.shape[-2], x2.shape[-2]), diag, self.whole)

    def own(self, parameter: Tensor, trailing: int) -> Tensor:
        """This element of a parameter ``(*b, ...)`` with ``trailing`` dimensions behind the batch."""
        kept = parameter.shape[parameter.dim() - trailing :]
        return parameter.expand(*self.batch, *kept)[self.index]


def _pick(value: Tensor, batch: torch.Size, index: Index, size: tuple[int, ...], diag: bool, kernel: Kernel) -> Tensor:
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


@torch.no_grad()
def element(matrix: KernelMatrix, index: Index) -> KernelMatrix:
    """``matrix[index]``, a constant, computed by the engine of the batch.

    A few of its entries are compared with those that the kernel itself gives for the batch.

    :raises InputError: for a kernel that does not give one matrix for each element.
    :raises NumericalError: if they differ.
    """
    batch, kernel, names = matrix.batch_shape, matrix.kernel, matrix.names
    x1, x2 = (x.detach().expand(*batch, *x.shape[-2:])[index] for x in (matrix.x1, matrix.x2))
    x2 = x1 if matrix.x2 is matrix.x1 else x2
    parameters = [p.detach() for p in matrix.parameters]
    if len(kernel.batch_shape) or (matrix.expression is None and _hides_a_batch(matrix, x1, x2)):
        inputs = torch.broadcast_shapes(matrix.x1.shape[:-2], matrix.x2.shape[:-2])
        kernel, names = BatchElement(kernel, index, batch, inputs), tuple(f"whole.{name}" for name in names)
    found = type(matrix)(x1, x2, *parameters, **{**matrix._options(), "kernel": kernel, "names": names, "centre": None})
    _check(matrix, found, index)
    return found


def _hides_a_batch(matrix: KernelMatrix, x1: Tensor, x2: Tensor) -> bool:
    """Whether a kernel that says it has no batch gives one all the same."""
    return matrix.evaluator(matrix.parameters)(real(x1[:1]), real(x2[:1])).dim() > 2


def _check(matrix: KernelMatrix, found: KernelMatrix, index: Index) -> None:
    """Compare some entries of an element with what the kernel gives for the batch, both in float64."""
    rows, columns = (
        torch.linspace(0, size - 1, min(size, _FEW), device=matrix.device).long() for size in matrix.shape[-2:]
    )
    if not (len(rows) and len(columns)):
        return
    parameters = [p.detach().to(torch.float64) for p in matrix.parameters]
    few = [x.detach().index_select(-2, i).double() for x, i in ((matrix.x1, rows), (matrix.x2, columns))]
    size = (len(rows), len(columns))
    given = _pick(matrix.evaluator(parameters)(*few), matrix.batch_shape, index, size, False, matrix.kernel)
    few = [x.index_select(-2, i).double() for x, i in ((found.x1, rows), (found.x2, columns))]
    options = {**found._options(), "engine": "tiled", "same": False}
    taken = type(found)(*few, *parameters, **options).to_dense()
    scale = float(given.abs().nan_to_num().max())
    if not torch.allclose(taken, given, rtol=_RELATIVE, atol=_ABSOLUTE * scale, equal_nan=True):
        raise NumericalError(
            f"Matrix {index} of a batch of {tuple(matrix.batch_shape)} differs, taken by itself, from the batch's by "
            f"{float((taken - given).abs().nan_to_num().max()):.2g} (entries up to {scale:.2g}): the matrices of "
            f"{type(matrix.kernel).__name__} depend on one another. Use matmul='gpytorch', which stores all of them.",
            see="batch-differs",
        )

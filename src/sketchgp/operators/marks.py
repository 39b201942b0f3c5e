"""Identity of operators and kernels: a key within this process, marks that last in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import SketchGPError
from ..fingerprint import add_tensors, module_key, module_mark, tensor_key, tensor_mark
from ..random_streams import generator
from .access import Access, terms
from .kernel_matrix import KernelMatrix

_PROBES = 8  # points of each scale at which a kernel's values are part of its mark
_SCALES = (1.0, 0.01, 100.0)  # of the balls that they are in: lengthscales may be of any size
_ROWS = 16  # of an operator that is no kernel matrix


def operator_key(operator: Any) -> tuple[Any, ...]:
    """A key of the operator's values: of its inputs and parameters, or of one product where those are unknown."""
    if isinstance(operator, KernelMatrix):
        return (tensor_key(operator.x1), *module_key(operator.kernel, operator.parameters))
    parts = list(terms(operator))
    if len(parts) > 1 or torch.is_tensor(parts[0][0]):
        return tuple((tensor_key(torch.as_tensor(scale)), operator_key(part)) for scale, part in parts)
    operator = operator.evaluate_kernel()
    vector = torch.arange(1, operator.shape[-1] + 1, dtype=operator.dtype, device=operator.device).cos()
    with torch.no_grad():
        return (type(operator), tensor_key(operator.detach() @ vector))


@torch.no_grad()
def operator_marks(operator: Any) -> dict[str, str]:
    """Marks of the inputs and the kernel of a kernel matrix, or a sum of them; of other parts of a sum, ``"the
    covariance"``: their tensors, and their values at some rows."""
    inputs, kernel, others = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    unknown = False
    for scale, part in terms(operator):
        head = f"{type(part).__name__} {part.dtype} {scale.tolist() if torch.is_tensor(scale) else scale!r}"
        if isinstance(part, KernelMatrix):
            add_tensors(inputs, part.x1, part.x2)
            kernel.update(f"{head} {_matrix_mark(part)}".encode())
        else:
            unknown, n = True, part.shape[-1]
            some = torch.linspace(0, n - 1, min(n, _ROWS), device=part.device).round().long()
            others.update(head.encode())
            add_tensors(others, *part.representation(), Access(part).block(some, some))
    result = {"the training inputs": inputs.hexdigest(), "the kernel": kernel.hexdigest()}
    return {**result, "the covariance": others.hexdigest()} if unknown else result


def kernel_mark(kernel: Any, points: Tensor) -> str:
    """A mark of a kernel: its parts, settings and parameters, and its values at points of the unit ball.

    The values tell those apart that differ by their code, or by what is no plain setting.  A kernel that takes only
    points of its own is evaluated at some of ``points``, which are then part of its mark.

    :param points: ``(p, d)`` that the kernel is evaluated at in the problem; of others than those kernels only d, dtype
        and device count.
    """
    return _mark(module_mark(kernel), lambda x: KernelMatrix.of(kernel, x, engine="tiled"), points)


def _matrix_mark(matrix: KernelMatrix) -> str:
    """Return the mark of the kernel of a matrix, whose active dimensions were selected already."""
    return _mark(module_mark(matrix.kernel, matrix.parameters), lambda x: matrix.at(x, x, True), matrix.x1)


@torch.no_grad()
def _mark(of_parts: str, matrix_of: Callable[[Tensor], KernelMatrix], points: Tensor) -> str:
    values = []
    for probes in _probes(points):
        try:
            values.append(matrix_of(probes).detach().to_dense())
        except (RuntimeError, ValueError, IndexError, SketchGPError):  # not of these points
            continue
    if not any(bool(torch.isfinite(one).any()) for one in values):
        values = [matrix_of(points[:_PROBES]).detach().to_dense()]
    return f"{of_parts} {tensor_mark(*values)}"


def _probes(points: Tensor) -> Iterator[Tensor]:
    """Yield points in balls of different size, equal for all problems of the same dimension."""
    d = points.shape[-1]
    stream = generator(0, "points at which kernels are told apart")
    unit = torch.rand(_PROBES, d, dtype=torch.float64, generator=stream) / max(1, d) ** 0.5
    for scale in _SCALES:
        yield (scale * unit).to(points.device, points.dtype)

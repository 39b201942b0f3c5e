"""The engine ``"triton"``: fused kernels on NVIDIA GPUs, that keep nothing of the matrix, not even a tile."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, cast

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..base import Engine, Gradients, Live
from .launch import differentiate, multiply
from .layout import Precision

if TYPE_CHECKING:
    from ...kernel_matrix import KernelMatrix


_DOUBLE = "it computes in float32, and the inputs are float64"
# c of the table below
_ERRORS = {"float32": 2.0**-20, "bf16x6": 2.0**-22, "tf32": 2.0**-9, "bf16x3": 2.0**-15, "bf16": 2.0**-6.9}


class Triton(Engine):
    """Products ``K V`` and their derivatives in one pass over the pairs, in registers; memory O((n + m)(p + t)).

    Where x1 is x2, one or two right-hand sides are multiplied with each pair evaluated once, for both of its rows,
    if that costs so much less (:mod:`.costs`).  Partial sums then take up to 64 MiB, or 8 vectors and as many
    more as keep the device busy, if that is more.  Derivatives evaluate every entry.

    Distances are products of matrices on tensor cores, ``q = |a|^2 + |b|^2 - 2 a.b``, of features that are centred
    and divided by lengthscales.  ``precision`` says how their products are rounded: ``|error of q| <= c (|a|^2 +
    |b|^2)``, with c, and a few 1e-7 more for the sums, which are in float32:

    ===========  ============================================  =======  ============================
    precision    products of                                   c        time on tensor cores (tf32: 1)
    ===========  ============================================  =======  ============================
    float32      two tf32 parts, low times low left out        2^-20    3
    bf16x6       three bfloat16 parts, the least left out      2^-22    3
    tf32         tf32, 11 significant bits                     2^-9     1
    bf16x3       two bfloat16 parts, low times low left out    2^-15    3/2
    bf16         bfloat16, 8 significant bits                  2^-6.9   1/2
    ===========  ============================================  =======  ============================

    The norms are those of the rounded features: errors of small distances are smaller than that, and points that
    coincide stay at distance 0 but for the rounding of sums.  With ``"float32"``, distances of up to four features are
    summed up from differences, and l1 distances always are, without any cancellation.  More than 4 right-hand sides
    (with ``"tf32"`` and ``"bf16x3"`` 2, with ``"bf16"`` 1) are multiplied by a matrix product too, with values and
    right-hand sides rounded in the same way, and so are the weights and features of gradients; all sums are in float32.
    Devices older than compute capability 8.0 multiply in float32 whatever the precision.

    64 right-hand sides take one pass over the pairs.  A derivative takes one pass where x1 is x2, and otherwise two;
    more than 128 features in one kernel cost one more for each 128, and of a sum or product of many kernels each takes
    a pass of its own.  Where the columns are shared out among programs, their partial results are added up in a fixed
    order: the same call gives the same result.
    """

    name = "triton"
    precisions = ("float32", "bf16x6", "bf16x3", "tf32", "bf16")

    def absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if not _importable():
            return "Triton is not installed"
        if dtype == torch.float64:
            return _DOUBLE
        if not (device.type == "cuda" and torch.version.hip is None) and not _interpreted():
            return f"it needs a CUDA device, and the inputs are on {device}"
        return None if _recent() else "Triton is older than 3.2"

    def unsuited(self, kernel: Kernel, known: bool, dtype: torch.dtype) -> str | None:
        """Why it can take no matrix of this kernel and dtype, wherever it is.

        :param known: whether the kernel is recognised.
        """
        if not known:
            return f"{type(kernel).__name__} is none of the kernels, nor a sum or product of them, that it knows"
        return _DOUBLE if dtype == torch.float64 else None

    def missing(self, matrix: KernelMatrix) -> str | None:
        reason = self.unsuited(matrix.kernel, matrix.expression is not None, matrix.dtype)
        if reason is not None:
            return reason
        if matrix.coincident is not None:
            return "it cannot be told which points of two sets coincide"
        return self.absent(matrix.device, matrix.dtype)

    def resolution(self, matrix: KernelMatrix) -> float:
        return _ERRORS[matrix.precision]

    @torch.no_grad()
    def product(self, matrix: KernelMatrix, rhs: Tensor) -> Tensor:
        assert matrix.expression is not None
        precision = cast(Precision, matrix.precision)
        return multiply(matrix.expression, matrix.prepared(), matrix.shape[-2], rhs, matrix.same, precision)

    @torch.no_grad()
    def derivative(self, matrix: KernelMatrix, left: Tensor, right: Tensor) -> Gradients:
        live = Live(matrix)
        if live.prepared is None or matrix.expression is None:
            return live.pull_back([])
        precision = cast(Precision, matrix.precision)
        return live.pull_back(differentiate(matrix.expression, live.prepared, left, right, matrix.same, precision))


@functools.lru_cache(maxsize=1)
def _importable() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=1)
def _recent() -> bool:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 2)


def _interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

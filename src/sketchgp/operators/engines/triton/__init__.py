"""The engine ``"triton"``: fused kernels on NVIDIA GPUs, that keep nothing of the matrix, not even a tile."""

from __future__ import annotations

import functools
import os
from typing import cast

import torch
from torch import Tensor

from ...pairs import Pairs
from ..base import Engine, Gradients, Live, installed
from .launch import Precision, differentiate, multiply

# c of the table below
_ERRORS = {"float32": 2.0**-20, "tf32": 2.0**-9}


class Triton(Engine):
    """Products ``K V`` and their derivatives in one pass over the pairs, in registers; memory O((n + m)(p + t)).

    Distances are products of matrices on tensor cores, ``q = |a|^2 + |b|^2 - 2 a.b``, of features that are centred
    and divided by lengthscales.  ``precision`` says how their products are rounded.  The error of q is at most
    ``c (|a|^2 + |b|^2)``, and a few 1e-7 more for the sums, which are in float32:

    - ``"float32"``: two tf32 parts, low times low left out; c = 2^-20, three products.
    - ``"tf32"``: 11 significant bits; c = 2^-9, one product.

    The norms are those of the rounded features.  Errors of small distances are therefore smaller, and points that
    coincide stay at distance 0 but for the rounding of sums.  With ``"float32"``, distances of up to four features are
    summed up from differences, without cancellation; l1 distances always are.

    Right-hand sides are multiplied by a matrix product of the same precision, 64 of them in one pass over the pairs,
    and so are the weights and features of gradients.  All sums are in float32.  A derivative takes one pass where x1
    is x2, and otherwise two.
    More than 128 features in one kernel cost one more pass for each 128, and each kernel of a sum or product takes its
    own.  Where programs share the columns, partial results are added in a fixed order: the same call gives
    the same result.
    """

    name = "triton"
    precisions = ("float32", "tf32")

    def absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if dtype == torch.float64:
            return "it computes in float32, and the inputs are float64"
        if not installed("triton"):
            return "Triton is not installed"
        if not (device.type == "cuda" and torch.version.hip is None) and not _interpreted():
            return f"it needs a CUDA device, and the inputs are on {device}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs tensor cores that know tf32, those of compute capability 8.0 or newer"
        return None if _recent() else "Triton is older than 3.2"

    def missing(self, pairs: Pairs) -> str | None:
        if pairs.expression is None:
            return f"{type(pairs.kernel).__name__} is none of the kernels, nor a sum or product of them, that it knows"
        if pairs.coincident is not None:
            return "it cannot be told which points of two sets coincide"
        return self.absent(pairs.device, pairs.dtype)

    def resolution(self, pairs: Pairs) -> float:
        return _ERRORS[pairs.precision]

    @torch.no_grad()
    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        assert pairs.expression is not None
        precision = cast(Precision, pairs.precision)
        return multiply(pairs.expression, pairs.prepared(), pairs.shape[-2], rhs, pairs.same, precision)

    @torch.no_grad()
    def derivative(self, pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
        live = Live(pairs)
        if live.prepared is None or pairs.expression is None:
            return live.pull_back([])
        precision = cast(Precision, pairs.precision)
        return live.pull_back(differentiate(pairs.expression, live.prepared, left, right, pairs.same, precision))


@functools.lru_cache(maxsize=1)
def _recent() -> bool:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 2)


def _interpreted() -> bool:
    """Return whether Triton runs its kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

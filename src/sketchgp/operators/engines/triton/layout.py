"""How features and vectors lie in memory for the Triton kernels: padded, scaled, split into parts, in chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...profiles import GAUSS, LAPLACE, LOG2E, RATIONAL_QUADRATIC, Profile
from .plan import AtomPlan

PADDING = 128  # rows of everything are padded to a multiple of this, the largest block: no kernel needs masks
DIRECT = 4  # Euclidean distances of up to so many features are summed up from differences, without cancellation
KEPT = 1024  # bytes of a row's features, of all atoms, that fit into shared memory with a block of columns
Precision = Literal["float32", "tf32", "ieee"]


class Arithmetic(NamedTuple):
    """Arithmetic of the matrix products.

    :ivar parts: numbers that one value is split into; :ivar product: ``input_precision`` of ``tl.dot``;
    :ivar mode: of ``kernels.high``; :ivar single: right-hand sides up to which a matrix product does not pay, counted
        from the instruction throughputs of compute capabilities 8.0 and 9.0 (CUDA C++ programming guide).
    """

    parts: int
    product: str
    mode: str
    single: int

    @property
    def plan(self) -> tuple[int, str, str]:
        return self[:3]


ARITHMETIC: dict[str, Arithmetic] = {
    "float32": Arithmetic(2, "tf32", "split tf32", 4),
    "tf32": Arithmetic(1, "tf32", "tf32", 2),
    "ieee": Arithmetic(1, "ieee", "float32", 8),  # for devices whose tensor cores do not know tf32
}


@dataclass(frozen=True)
class Packed:
    """One side of an atom, or of the vectors, as the kernels read it.

    :ivar high: ``(B, chunks, rows, k)`` for products, ``(B, features, rows)`` for differences.
    :ivar low: the low parts, or None.
    :ivar norms: ``(B, rows)``, half the squared norms, or None.
    """

    high: Tensor
    low: Tensor | None = None
    norms: Tensor | None = None


def padded(size: int) -> int:
    return -(-size // PADDING) * PADDING


def power(size: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


def flat(x: Tensor) -> Tensor:
    """``(B, n, p)`` in float32, of ``(n, p)`` or ``(B, n, p)``."""
    return (x.unsqueeze(0) if x.dim() == 2 else x).to(torch.float32)


def atom_plans(profiles: list[Profile], sizes: list[int], precision: Precision) -> tuple[AtomPlan, ...]:
    """How to compute the distances of each atom, of so many features."""
    arithmetic = ARITHMETIC[precision]
    plans = []
    for profile, size in zip(profiles, sizes, strict=True):
        p, alpha = max(size, 1), profile is RATIONAL_QUADRATIC
        if profile.l1:
            plans.append(AtomPlan(profile.name, False, True, min(p, 4), p > 4, alpha))
        elif p <= DIRECT and precision in ("float32", "ieee"):
            plans.append(AtomPlan(profile.name, False, False, p, False, alpha))
        else:
            k, looped = chunk(p)
            plans.append(AtomPlan(profile.name, True, False, k, looped, alpha))
    kept = sum(plan.k for plan in plans if plan.dot and not plan.looped) * arithmetic.parts * 4
    if kept > KEPT:
        plans = [replace(p, looped=True, k=min(p.k, 32)) if p.dot else p for p in plans]
    return tuple(plans)


def chunk(p: int) -> tuple[int, bool]:
    """Columns in a chunk of a matrix of p columns, and whether there are more chunks than one.

    A single chunk of the rows stays in shared memory while a program passes over the columns.
    """
    return (max(power(p), 16), False) if p <= 64 else (32, True)


def unit(profile: Profile, dot: bool) -> float:
    """What features are multiplied by, so that a tile's ``d`` is in the units of ``kernels``.

    ``d`` is ``|x - z|^2 / 2`` from products of matrices, and ``|x - z|^2``, or the l1 distance, from differences.
    """
    if profile is LAPLACE:
        return LOG2E
    square = LOG2E if profile is GAUSS else 1.0 if profile is RATIONAL_QUADRATIC else 2 * LOG2E**2
    return math.sqrt(square if dot else square / 2)


def pack_features(x: Tensor, profile: Profile, plan: AtomPlan, precision: Precision) -> Packed:
    """One side of an atom, x ``(n, p)`` or ``(B, n, p)``.

    The norms are those of the rounded numbers that are multiplied, with what their product leaves out left out here
    too: then points that coincide are at distance 0 but for the rounding of sums, at any precision.
    """
    x = flat(x) * unit(profile, plan.dot)
    if not plan.dot:
        n, p = x.shape[-2:]
        more = count(plan, p) * plan.k - p
        return Packed(functional.pad(x.mT, (0, padded(n) - n, 0, more)).contiguous())
    packed = pack_matrix(x, plan.k, precision)
    high = packed.high
    norms = (high * high).sum(dim=(1, 3), dtype=torch.float64)  # each product is exact in float32
    if packed.low is not None:
        norms += 2 * (high * packed.low).sum(dim=(1, 3), dtype=torch.float64)
    return replace(packed, norms=(norms / 2).float())


def pack_matrix(x: Tensor, k: int, precision: Precision) -> Packed:
    """Rows of x ``(B, n, p)``, in chunks of k columns and in parts."""
    b, n, p = x.shape
    chunks = max(-(-p // k), 1)
    x = functional.pad(x, (0, chunks * k - p, 0, padded(n) - n))
    x = x.reshape(b, x.shape[1], chunks, k).transpose(1, 2).contiguous()
    parts: list[Tensor] = []
    for _ in range(ARITHMETIC[precision].parts):
        parts.append(_rounded(x, precision))
        x = x - parts[-1]
    return Packed(*parts)


def pack_vectors(x: Tensor, width: int) -> Packed:
    """Columns of x ``(B, n, t)``, t <= width, one after another: ``(B, width, rows)``."""
    n, t = x.shape[-2:]
    return Packed(functional.pad(x.mT, (0, padded(n) - n, 0, width - t)).contiguous())


def count(plan: AtomPlan, p: int) -> int:
    """Chunks of an atom of p features."""
    return max(-(-p // plan.k), 1)


def _rounded(x: Tensor, precision: Precision) -> Tensor:
    """Round to tf32 by hand, as the device rounds towards zero."""
    if precision == "ieee":
        return x
    bits = (x.view(torch.int32) + 4096) & -8192  # 10 bits of the fraction are left
    return torch.where(x.isfinite(), bits.view(torch.float32), x)

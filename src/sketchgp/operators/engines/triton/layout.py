"""How features and vectors lie in memory for the Triton kernels: padded, scaled, split into parts, in chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...profiles import GAUSS, LAPLACE, LOG2E, RATIONAL_QUADRATIC, Profile


@dataclass(frozen=True)
class AtomPlan:
    """Constants by which one atom is computed.

    :ivar profile: its name, as of the functions in ``kernels``.
    :ivar dot: whether distances come from a matrix product, else from differences feature by feature.
    :ivar l1: whether absolute differences are summed.
    :ivar k: features in a chunk.
    :ivar looped: whether there may be more than one chunk.
    :ivar alpha: whether there is a shape parameter.
    """

    profile: str
    dot: bool
    l1: bool
    k: int
    looped: bool
    alpha: bool


@dataclass(frozen=True)
class Plan:
    """Constants that the source depends on.

    :ivar terms: the factors of each term, as of an ``Expression``.
    :ivar arithmetic: parts of a number (1 or 2), ``input_precision`` of the products, the mode of ``high``.
    :ivar same: whether pairs on the diagonal are at distance 0.
    :ivar width: right-hand sides in a block.
    :ivar dot: whether they are multiplied by a matrix product, else one by one.
    :ivar looped: in a gradient, whether there may be more chunks of them than one.
    :ivar targets: in a gradient, atoms whose features get one, with the number of features in a block.
    :ivar sums: in a gradient, whether to compute those of coefficients and shape parameters.
    """

    atoms: tuple[AtomPlan, ...]
    terms: tuple[tuple[int, ...], ...]
    arithmetic: tuple[int, str, str]
    same: bool
    width: int
    dot: bool
    looped: bool = False
    targets: tuple[tuple[int, int], ...] = ()
    sums: bool = False

    @property
    def parts(self) -> int:
        return self.arithmetic[0]

    @property
    def shapes(self) -> list[int]:
        """Atoms with a shape parameter."""
        return [a for a, atom in enumerate(self.atoms) if atom.alpha]

    @property
    def more(self) -> list[str]:
        """Suffix of the name of the low part, where there is one."""
        return ["l"][: self.parts - 1]

    def both(self, name: str) -> str:
        """Return the two arguments that hold the parts of ``name``; a single part is passed twice."""
        return f"{name}, {name}{'l' if self.parts > 1 else ''}"

    def loads(self, name: str, load: str) -> list[str]:
        """Statements that load the parts.

        :param load: the expression, with ``{}`` where the pointer's name ends.
        """
        return [f"{name}{end} = {load.format(end)}" for end in ["", *self.more]]


class Blocks(NamedTuple):
    """Rows and columns of a tile, warps that share it, loads that are under way at once."""

    rows: int
    columns: int
    warps: int
    stages: int


def product_blocks(plan: Plan, memory: int) -> list[Blocks]:
    """Return blocks to try, best first, for this many bytes of shared memory."""
    looped = any(atom.dot and atom.looped for atom in plan.atoms)
    if plan.dot:
        choices = [Blocks(128, 64, 8, 2)]
    elif not any(atom.dot for atom in plan.atoms):
        choices = [Blocks(128, 128, 8, 2)]
    elif looped and len(plan.atoms) == 1:
        choices = [Blocks(128, 128, 8, 3), Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 2)]
    else:
        choices = [Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2)]
    if len(plan.atoms) > 2:  # each has a tile of its own
        choices = []
    if len(plan.atoms) <= 3:
        choices += [Blocks(64, 64, 4, 2)]
    return _that_fit(plan, memory, [*choices, Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)])


def gradient_blocks(plan: Plan, memory: int) -> list[Blocks]:
    """Return blocks for gradients, which keep sums for a block of features, too."""
    choices = [Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)]
    single = plan.parts == 1 and len(plan.atoms) == 1 and plan.atoms[0].k <= 64
    if single or not any(atom.dot for atom in plan.atoms):
        choices = [Blocks(64, 64, 4, 2), *choices]
    return _that_fit(plan, memory, choices)


def _that_fit(plan: Plan, memory: int, choices: list[Blocks]) -> list[Blocks]:
    """Return the blocks that fit by an estimate, which leaves the compiler an eighth to rearrange tiles."""
    kept = sum(atom.k for atom in plan.atoms if atom.dot and not atom.looped)
    passing = max((atom.k for atom in plan.atoms if atom.dot and atom.looped), default=0)
    size = plan.parts * 4

    def needed(b: Blocks) -> int:
        entries = kept * (b.rows + b.columns * b.stages) + passing * (b.rows + b.columns) * b.stages
        if plan.dot:
            entries += plan.width * b.columns * b.stages
        return entries * size

    return [b for b in choices if needed(b) * 8 <= memory * 7] or choices[-1:]


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
    """Return the constants of each atom, for its number of features."""
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
    """Return the factor of features that puts a tile's ``d`` into the units of ``kernels``.

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

"""Products and derivatives of one expression by Triton kernels: how numbers lie in memory, and what is launched.

Features and vectors are padded, scaled to the units of the kernels, cut into chunks and split into parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...expression import Expression, Prepared
from ...profiles import GAUSS, LAPLACE, LOG2E, RATIONAL_QUADRATIC, Profile
from .source import AtomPlan, Plan, compiled

T = TypeVar("T")
Precision = Literal["float32", "tf32"]

PARTS: dict[Precision, int] = {"float32": 2, "tf32": 1}  # tf32 numbers that one value is split into
_PADDING = 128  # rows of everything are padded to a multiple of this, the largest block: no kernel needs masks
_DIRECT = 4  # Euclidean distances of up to so many features are summed up from differences, without cancellation
_KEPT = 1024  # bytes of a row's features, of all atoms, that fit into shared memory with a block of columns
_WIDEST = 64  # right-hand sides, or features, that are one chunk
_CHUNK = 32  # features in a chunk where there are more, and right-hand sides in one of a gradient
_FEATURES = 128  # columns of features for which one program keeps a gradient
_PROGRAMS = 8  # for each multiprocessor, so that none waits long for the last


class Blocks(NamedTuple):
    """Rows and columns of a tile, warps that share it, loads that are under way at once."""

    rows: int
    columns: int
    warps: int
    stages: int


_BLOCKS = [Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)]


def blocks_of(plan: Plan, gradient: bool) -> list[Blocks]:
    """Return blocks to try, best first: each atom has a tile of its own, and gradients keep sums for features, too."""
    if not gradient:
        return _BLOCKS[max(0, min(len(plan.atoms) - 2, 2)) :]
    large = not any(atom.dot for atom in plan.atoms) or (plan.parts == 1 and len(plan.atoms) == 1)
    return _BLOCKS[1 if large else 2 :]


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

    def named(self, name: str) -> dict[str, Tensor]:
        """Return the arguments of a kernel that are called so."""
        values = {name: self.high, f"{name}l": self.low, f"{name}n": self.norms}
        return {key: value for key, value in values.items() if value is not None}


def _padded(size: int) -> int:
    return -(-size // _PADDING) * _PADDING


def _power(size: int) -> int:
    """The smallest power of two that is not smaller, 16 at the least."""
    return max(1 << max(size - 1, 0).bit_length(), 16)


def _flat(x: Tensor) -> Tensor:
    """``(B, n, p)`` in float32, of ``(n, p)`` or ``(B, n, p)``."""
    return (x.unsqueeze(0) if x.dim() == 2 else x).to(torch.float32)


def _atom_plans(profiles: list[Profile], sizes: list[int], parts: int) -> tuple[AtomPlan, ...]:
    """Return the constants of each atom, for its number of features.

    A single chunk of the rows stays in shared memory while a program passes over the columns.
    """
    plans = []
    for profile, size in zip(profiles, sizes, strict=True):
        p, alpha = max(size, 1), profile is RATIONAL_QUADRATIC
        if profile.l1:
            plans.append(AtomPlan(profile.name, False, True, min(p, 4), p > 4, alpha))
        elif p <= _DIRECT and parts == 2:
            plans.append(AtomPlan(profile.name, False, False, p, False, alpha))
        else:
            looped = p > _WIDEST
            plans.append(AtomPlan(profile.name, True, False, _CHUNK if looped else _power(p), looped, alpha))
    kept = sum(plan.k for plan in plans if plan.dot and not plan.looped) * parts * 4
    if kept > _KEPT:
        plans = [replace(p, looped=True, k=min(p.k, _CHUNK)) if p.dot else p for p in plans]
    return tuple(plans)


def unit(profile: Profile, dot: bool) -> float:
    """Return the factor of features that puts a tile's ``d`` into the units of ``kernels``.

    ``d`` is ``|x - z|^2 / 2`` from products of matrices, and ``|x - z|^2``, or the l1 distance, from differences.
    """
    if profile is LAPLACE:
        return LOG2E
    square = LOG2E if profile is GAUSS else 1.0 if profile is RATIONAL_QUADRATIC else 2 * LOG2E**2
    return math.sqrt(square if dot else square / 2)


def _pack_features(x: Tensor, profile: Profile, plan: AtomPlan, parts: int) -> Packed:
    """One side of an atom, x ``(n, p)`` or ``(B, n, p)``.

    The norms are those of the rounded numbers that are multiplied, with what their product leaves out left out here
    too: then points that coincide are at distance 0 but for the rounding of sums, at any precision.
    """
    x = _flat(x) * unit(profile, plan.dot)
    if not plan.dot:
        n, p = x.shape[-2:]
        more = _count(plan, p) * plan.k - p
        return Packed(functional.pad(x.mT, (0, _padded(n) - n, 0, more)).contiguous())
    packed = _pack_matrix(x, plan.k, parts)
    high = packed.high
    norms = (high * high).sum(dim=(1, 3), dtype=torch.float64)  # each product is exact in float32
    if packed.low is not None:
        norms += 2 * (high * packed.low).sum(dim=(1, 3), dtype=torch.float64)
    return replace(packed, norms=(norms / 2).float())


def _pack_matrix(x: Tensor, k: int, parts: int) -> Packed:
    """Rows of x ``(B, n, p)``, in chunks of k columns and in parts."""
    b, n, p = x.shape
    chunks = max(-(-p // k), 1)
    x = functional.pad(x, (0, chunks * k - p, 0, _padded(n) - n))
    x = x.reshape(b, x.shape[1], chunks, k).transpose(1, 2).contiguous()
    split: list[Tensor] = []
    for _ in range(parts):
        split.append(_rounded(x))
        x = x - split[-1]
    return Packed(*split)


def _count(plan: AtomPlan, p: int) -> int:
    """Chunks of an atom of p features."""
    return max(-(-p // plan.k), 1)


def _rounded(x: Tensor) -> Tensor:
    """Round to tf32 by hand, as the device rounds towards zero."""
    bits = (x.view(torch.int32) + 4096) & -8192  # 10 bits of the fraction are left
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


# --- products and derivatives -----------------------------------------------------------------------------------


def multiply(
    expression: Expression,
    prepared: Prepared,
    rows: int,
    rhs: Tensor,
    same: bool,
    precision: Precision,
    blocks: Blocks | None = None,
) -> Tensor:
    """``K rhs`` ``(n, t)`` or ``(B, n, t)``, for rhs ``(m, t)`` or ``(B, m, t)``.

    :param rows: n.
    :param same: whether entries on the diagonal are at distance 0.
    :param blocks: a choice of block sizes, for tests.
    """
    columns, t = rhs.shape[-2:]
    if not rows or not rhs.numel():
        return rhs.new_zeros(*rhs.shape[:-2], rows, t)
    problem = _kept(expression, prepared, precision)
    plan = problem.plan(same, t)
    v = problem.vectors(rhs, plan)
    items, parts = v.high.shape[:2]
    arguments = {**problem.shared, **problem.side("x"), **problem.side("z"), **v.named("v")}

    def run(blocks: Blocks) -> Tensor:
        launch = _Launch(plan, blocks, rows, columns, items, parts, rhs.device)
        shape = (launch.splits, items, parts, _padded(rows), plan.width)
        out = torch.empty(shape, dtype=torch.float32, device=rhs.device)
        launch(False, {**arguments, "out": out})
        return out[0] if launch.splits == 1 else out.sum(dim=0)

    total = _with_blocks(run, [blocks] if blocks else blocks_of(plan, False))
    return total.transpose(1, 2).flatten(2)[:, :rows, :t].reshape(*rhs.shape[:-2], rows, t).to(rhs.dtype)


def differentiate(
    expression: Expression,
    prepared: Prepared,
    left: Tensor,
    right: Tensor,
    same: bool,
    precision: Precision,
    blocks: Blocks | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of ``sum_t left_t^T K right_t`` for the tensors of ``prepared`` that need one, as pairs with them.

    :param left: ``(n, t)`` or ``(B, n, t)``.
    :param right: ``(m, t)`` or ``(B, m, t)``.
    """
    wanted = [a for a, f in enumerate(prepared.features) if f.left.requires_grad or f.right.requires_grad]
    shapes = [f.alpha for f in prepared.features if f.alpha is not None]
    sums = any(x.requires_grad for x in (*shapes, prepared.coefficients))
    if not (wanted or sums):
        return []
    once = all(f.left is f.right for f in prepared.features)  # one tensor then gets the gradients of both sides
    if once and left is not right and wanted:  # K is symmetric: W may be made so, and rows are all that is needed
        left, right = torch.cat([left, right], dim=-1), torch.cat([right, left], dim=-1) * 0.5
    if not left.numel() or not right.numel():
        tensors = [t for f in prepared.features for t in ((f.left,) if once else (f.left, f.right))]
        return [(t, torch.zeros_like(t)) for t in (*tensors, *shapes, prepared.coefficients)]
    problem = _Problem(expression, prepared.detached(), precision)
    plan = problem.plan(same, left.shape[-1], gradient=True)
    vectors = [problem.vectors(v, plan) for v in (left, right)]
    sizes = [left.shape[-2], right.shape[-2]]
    totals: list[tuple[Tensor, Tensor]] = []
    for side in (0,) if once else (0, 1):
        for part in _passes(problem, plan, wanted, sums and side == 0):
            of_features, of_sums = _gradient_pass(problem, part, side, vectors, sizes, blocks)
            if of_features is not None and part.target is not None:
                a = part.target[0]
                owner = prepared.features[a].left if side == 0 else prepared.features[a].right
                factor = unit(expression.atoms[a].profile, plan.atoms[a].dot) * (2 if once else 1)
                gradient = of_features[:, : owner.shape[-2], : owner.shape[-1]].mul(factor)
                totals.append((owner, gradient.reshape(owner.shape).to(owner.dtype)))
            if of_sums is not None:
                totals += _parameter_pairs(plan, prepared, of_sums)
    return totals


class _Problem:
    """An expression, packed.

    :ivar shared: arguments of a kernel that do not depend on the side.
    """

    def __init__(self, expression: Expression, prepared: Prepared, precision: Precision) -> None:
        self.parts, self.terms = PARTS[precision], expression.terms
        profiles = [atom.profile for atom in expression.atoms]
        self.atoms = _atom_plans(profiles, [f.left.shape[-1] for f in prepared.features], self.parts)
        self.packed: list[tuple[Packed, Packed]] = []
        self.shared: dict[str, Any] = {}
        for a, (profile, plan, f) in enumerate(zip(profiles, self.atoms, prepared.features, strict=True)):
            left = _pack_features(f.left, profile, plan, self.parts)
            right = left if f.right is f.left else _pack_features(f.right, profile, plan, self.parts)
            self.packed.append((left, right))
            if f.alpha is not None:
                self.shared[f"alpha{a}"] = f.alpha.float().reshape(-1).contiguous()
            if plan.looped:
                self.shared[f"c{a}"] = _count(plan, f.left.shape[-1])
        self.shared["coefficients"] = prepared.coefficients.float().reshape(-1, len(self.terms)).contiguous()

    def plan(self, same: bool, t: int, gradient: bool = False) -> Plan:
        """Return the plan for t right-hand sides."""
        return Plan(self.atoms, self.terms, self.parts, same, min(_power(t), _CHUNK if gradient else _WIDEST))

    def vectors(self, x: Tensor, plan: Plan) -> Packed:
        return _pack_matrix(_flat(x), plan.width, self.parts)

    def side(self, name: str, turned: bool = False) -> dict[str, Tensor]:
        """Return the features of the kernel's rows (``"x"``) or columns (``"z"``).

        :param turned: whether x2 stands for the rows and x1 for the columns.
        """
        which = (name == "z") != turned
        return {k: v for a, both in enumerate(self.packed) for k, v in both[which].named(f"{name}{a}").items()}


def _kept(expression: Expression, prepared: Prepared, precision: Precision) -> _Problem:
    """The problem, packed at the first product and kept with the features it was made of."""
    kept: dict[Precision, _Problem] = vars(prepared).setdefault("_triton", {})
    if precision not in kept:
        kept[precision] = _Problem(expression, prepared, precision)
    return kept[precision]


def _with_blocks(run: Callable[[Blocks], T], choices: list[Blocks]) -> T:
    """Return ``run`` with the first blocks that the device has shared memory and registers for."""
    for blocks in choices[:-1]:
        try:
            return run(blocks)
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
    return run(choices[-1])


class _Launch:
    """One kernel on a device: the grid, and how the columns are shared out."""

    def __init__(
        self, plan: Plan, blocks: Blocks, rows: int, columns: int, items: int, parts: int, device: torch.device
    ) -> None:
        self.plan, self.blocks, self.device = plan, blocks, device
        self.row_blocks, self.column_blocks = -(-rows // blocks.rows), -(-columns // blocks.columns)
        programs = self.row_blocks * items * parts
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        splits = min(-(-_PROGRAMS * cores // programs), self.column_blocks)
        self.steps = -(-self.column_blocks // splits)
        self.splits = -(-self.column_blocks // self.steps)  # no share is empty
        self.numbers = {
            "x_rows": _padded(rows),
            "z_rows": _padded(columns),
            "row_blocks": self.row_blocks,
            "column_blocks": self.column_blocks,
            "steps": self.steps,
            "splits": self.splits,
            "parts": parts,
            "items": items,
        }
        self.grid = (programs * self.splits,)

    def __call__(self, gradient: bool, arguments: dict[str, Any]) -> None:
        kernel, b = compiled(self.plan, gradient), self.blocks
        options = {"BM": b.rows, "BN": b.columns, "num_warps": b.warps, "num_stages": b.stages}
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernel[self.grid](**arguments, **self.numbers, **options)


def _gradient_pass(
    problem: _Problem, plan: Plan, side: int, vectors: list[Packed], sizes: list[int], blocks: Blocks | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient ``(B, rows, p)`` of the target's features in the kernel's units, and the sums ``(B, quantities)``.

    :param side: 0 for the features of x1, 1 for those of x2; :param sizes: points of each side.
    """
    own, other = vectors[side], vectors[1 - side]
    (items, chunks), device = own.high.shape[:2], own.high.device
    parts = 1
    if plan.target is not None and plan.atoms[plan.target[0]].looped:
        a, width = plan.target
        parts = -(-problem.shared[f"c{a}"] * plan.atoms[a].k // width)
    arguments = {**problem.shared, **problem.side("x", side == 1), **problem.side("z", side == 1)}
    arguments |= {**own.named("l"), **other.named("r"), "cw": chunks}

    def run(blocks: Blocks) -> tuple[Tensor | None, Tensor | None]:
        launch = _Launch(plan, blocks, sizes[side], sizes[1 - side], items, parts, device)
        rows = _padded(sizes[side])
        shapes: dict[str, tuple[int, ...]] = {}
        if plan.target is not None:
            shapes["g"] = (launch.splits, items, parts, rows, plan.target[1])
        if plan.sums:
            shapes["sums"] = (launch.splits, items, len(plan.terms) + len(plan.shapes), rows)
        results = {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
        launch(True, {**arguments, **results})
        of_features = results["g"].sum(dim=0).transpose(1, 2).flatten(2) if "g" in results else None
        used = launch.row_blocks * blocks.rows  # rows of padding in no block are not written
        of_sums = results["sums"][..., :used].sum(dim=(0, 3), dtype=torch.float64) if "sums" in results else None
        return of_features, of_sums

    return _with_blocks(run, [blocks] if blocks else blocks_of(plan, True))


def _passes(problem: _Problem, plan: Plan, wanted: list[int], sums: bool) -> list[Plan]:
    """Return a plan for each atom that is differentiated: one has room for its sums in registers.

    Each pass computes all distances and values again.  Coefficients and shape parameters go with the first one, unless
    there are many atoms.
    """
    passes = []
    for a in wanted:
        atom = plan.atoms[a]
        width = min(_power(problem.shared[f"c{a}"] * atom.k), _FEATURES) if atom.looped else _power(atom.k)
        passes.append(replace(plan, target=(a, width)))
    if sums and (not passes or len(plan.atoms) > 2):
        return [replace(plan, sums=True), *passes]
    return [replace(passes[0], sums=sums), *passes[1:]]


def _parameter_pairs(plan: Plan, prepared: Prepared, sums: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Coefficients, then shape parameters, with their gradients."""
    c, terms = prepared.coefficients, len(plan.terms)
    pairs = [(c, sums[:, :terms].reshape(c.shape).to(c.dtype))]
    for i, a in enumerate(plan.shapes):
        alpha = prepared.features[a].alpha
        assert alpha is not None
        pairs.append((alpha, sums[:, terms + i].reshape(alpha.shape).to(alpha.dtype)))
    return [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]

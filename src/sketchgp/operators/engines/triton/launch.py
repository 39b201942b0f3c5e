"""Products and derivatives of one expression by Triton kernels: how numbers lie in memory, and what is launched.

Features and vectors are padded, scaled to the units of the kernels, cut into chunks and split into parts.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...expression import Expression, Prepared
from ...profiles import GAUSS, LAPLACE, LOG2E, RATIONAL_QUADRATIC, Profile
from .source import NUMBERS, AtomPlan, Plan, compiled

Precision = Literal["float32", "tf32"]

PARTS: dict[Precision, int] = {"float32": 2, "tf32": 1}  # tf32 numbers that one value is split into
_PADDING = 128  # rows of everything are padded to a multiple of this, the largest block: no kernel masks rows
_DIRECT = 4  # Euclidean distances of up to so many features are summed up from differences, without cancellation
_WIDEST = 64  # right-hand sides in a block of a product
_CHUNK = 32  # features in a chunk, and right-hand sides in a block of a gradient
_FEATURES = 128  # columns of features for which one program keeps a gradient
_PROGRAMS = 8  # for each multiprocessor, so that none waits long for the last


class Blocks(NamedTuple):
    """Rows and columns of a tile, warps that share it, loads that are under way at once."""

    rows: int
    columns: int
    warps: int
    stages: int


PRODUCT = Blocks(128, 64, 8, 2)
GRADIENT = Blocks(64, 32, 4, 2)  # smaller, as sums for features take registers


@dataclass(frozen=True)
class Packed:
    """One side of an atom, or of the vectors, as the kernels read it.

    :ivar high: ``(B, rows, width)`` for products, ``(B, features, rows)`` for differences.
    :ivar low: the low parts, or ``high`` again where a single part is taken; None for differences.
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
    """Return the smallest power of two that is not smaller, at least 16."""
    return max(1 << max(size - 1, 0).bit_length(), 16)


def _flat(x: Tensor) -> Tensor:
    """Return ``(B, n, p)`` in float32, of ``(n, p)`` or ``(B, n, p)``."""
    return (x.unsqueeze(0) if x.dim() == 2 else x).to(torch.float32)


def _atom_plan(profile: Profile, p: int, parts: int) -> AtomPlan:
    """Return the constants of an atom of p features."""
    dot = not (profile.l1 or (p <= _DIRECT and parts == 2))
    k = min(_power(p), _CHUNK) if dot else min(max(p, 1), _DIRECT)
    return AtomPlan(profile.name, dot, profile.l1, k, profile is RATIONAL_QUADRATIC)


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
        more = _count(p, plan.k) * plan.k - p
        return Packed(functional.pad(x.mT, (0, _padded(n) - n, 0, more)).contiguous())
    packed = _pack_matrix(x, plan.k, parts)
    high, low = packed.high, packed.low
    norms = (high * high).sum(dim=2, dtype=torch.float64)  # each product is exact in float32
    if parts == 2 and low is not None:
        norms += 2 * (high * low).sum(dim=2, dtype=torch.float64)
    return replace(packed, norms=(norms / 2).float())


def _pack_matrix(x: Tensor, k: int, parts: int) -> Packed:
    """Return the rows of x ``(B, n, p)``, filled up to chunks of k columns, in parts."""
    n, p = x.shape[-2:]
    x = functional.pad(x, (0, _count(p, k) * k - p, 0, _padded(n) - n)).contiguous()
    high = _rounded(x)
    return Packed(high, _rounded(x - high) if parts == 2 else high)


def _count(p: int, k: int) -> int:
    """Chunks of k that p features take, one at the least."""
    return max(-(-p // k), 1)


def _rounded(x: Tensor) -> Tensor:
    """Round to tf32 by hand, as the device rounds towards zero."""
    bits = (x.view(torch.int32) + 4096) & -8192  # 10 bits of the fraction are left
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


# --- products and derivatives -----------------------------------------------------------------------------------


def multiply(
    expression: Expression, prepared: Prepared, rows: int, rhs: Tensor, same: bool, precision: Precision
) -> Tensor:
    """Return ``K rhs`` ``(n, t)`` or ``(B, n, t)``, for rhs ``(m, t)`` or ``(B, m, t)``.

    :param rows: n.
    :param same: whether entries on the diagonal are at distance 0.
    """
    columns, t = rhs.shape[-2:]
    if not rows or not rhs.numel():
        return rhs.new_zeros(*rhs.shape[:-2], rows, t)
    problem = _kept(expression, prepared, precision)
    plan = problem.plan(same, t)
    arguments = {**problem.arguments(), **problem.vectors(rhs, plan).named("v")}
    results = _launch(plan, False, arguments, (rows, columns), _count(t, plan.width))
    return results["out"].sum(dim=0)[:, :rows, :t].reshape(*rhs.shape[:-2], rows, t).to(rhs.dtype)


def differentiate(
    expression: Expression, prepared: Prepared, left: Tensor, right: Tensor, same: bool, precision: Precision
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of ``sum_t left_t^T K right_t`` for the tensors of ``prepared`` that need one, as pairs with them.

    Each atom that is differentiated takes a pass that computes all distances and values again: one has room for its
    sums in registers.  Coefficients and shape parameters go with the first pass.

    :param left: ``(n, t)`` or ``(B, n, t)``.
    :param right: ``(m, t)`` or ``(B, m, t)``.
    """
    wanted = [a for a, f in enumerate(prepared.features) if f.left.requires_grad or f.right.requires_grad]
    shapes = [f.alpha for f in prepared.features if f.alpha is not None]
    sums = any(x.requires_grad for x in (*shapes, prepared.coefficients))
    if not (wanted or sums) or not (left.numel() and right.numel()):
        return []
    once = all(f.left is f.right for f in prepared.features)  # one tensor then gets the gradients of both sides
    if once and left is not right and wanted:  # K is symmetric: W may be made so, and rows are all that is needed
        left, right = torch.cat([left, right], dim=-1), torch.cat([right, left], dim=-1) * 0.5
    problem = _Problem(expression, prepared.converted(Tensor.detach), precision)
    plan = problem.plan(same, left.shape[-1], gradient=True)
    blocks = _count(left.shape[-1], plan.width)
    vectors = [problem.vectors(v, plan) for v in (left, right)]
    totals: list[tuple[Tensor, Tensor]] = []
    for side in (0,) if once or not wanted else (0, 1):
        own, other = (left, right) if side == 0 else (right, left)
        arguments = {**problem.arguments(turned=side == 1), **vectors[side].named("l"), **vectors[1 - side].named("r")}
        for i, a in enumerate(wanted or [None]):
            target = None if a is None else problem.target(a)
            one = replace(plan, target=target, sums=sums and side == i == 0)
            results = _launch(one, True, arguments, (own.shape[-2], other.shape[-2]), blocks)
            if a is not None:
                owner = prepared.features[a].left if side == 0 else prepared.features[a].right
                factor = unit(expression.atoms[a].profile, plan.atoms[a].dot) * (2 if once else 1)
                gradient = results["g"].sum(dim=0)[:, : owner.shape[-2], : owner.shape[-1]].mul(factor)
                totals.append((owner, gradient.reshape(owner.shape).to(owner.dtype)))
            if one.sums:
                of_sums = results["sums"].sum(dim=(0, 3), dtype=torch.float64)
                totals += _parameter_pairs(plan, prepared, of_sums)
    return totals


class _Problem:
    """An expression, packed.

    :ivar shared: arguments of a kernel that do not depend on the side.
    """

    def __init__(self, expression: Expression, prepared: Prepared, precision: Precision) -> None:
        self.parts, self.terms = PARTS[precision], expression.terms
        self.atoms: tuple[AtomPlan, ...] = ()
        self.packed: list[tuple[Packed, Packed]] = []
        self.shared: dict[str, Any] = {}
        for a, (atom, f) in enumerate(zip(expression.atoms, prepared.features, strict=True)):
            plan = _atom_plan(atom.profile, f.left.shape[-1], self.parts)
            left = _pack_features(f.left, atom.profile, plan, self.parts)
            right = left if f.right is f.left else _pack_features(f.right, atom.profile, plan, self.parts)
            self.atoms += (plan,)
            self.packed.append((left, right))
            self.shared[f"c{a}"] = _count(f.left.shape[-1], plan.k)
            if f.alpha is not None:
                self.shared[f"alpha{a}"] = f.alpha.float().reshape(-1).contiguous()
        self.shared["coefficients"] = prepared.coefficients.float().reshape(-1, len(self.terms)).contiguous()

    def plan(self, same: bool, t: int, gradient: bool = False) -> Plan:
        """Return the plan for t right-hand sides."""
        return Plan(self.atoms, self.terms, self.parts, same, min(_power(t), _CHUNK if gradient else _WIDEST))

    def target(self, a: int) -> tuple[int, int]:
        """Return ``Plan.target`` of an atom."""
        return a, min(_power(self.shared[f"c{a}"] * self.atoms[a].k), _FEATURES)

    def vectors(self, x: Tensor, plan: Plan) -> Packed:
        return _pack_matrix(_flat(x), plan.width, self.parts)

    def arguments(self, turned: bool = False) -> dict[str, Any]:
        """Return the arguments of a kernel that describe the matrix.

        :param turned: whether x2 stands for the rows and x1 for the columns.
        """
        arguments = dict(self.shared)
        for a, both in enumerate(self.packed):
            rows, columns = reversed(both) if turned else both
            arguments |= {**rows.named(f"x{a}"), **columns.named(f"z{a}")}
        return arguments


def _kept(expression: Expression, prepared: Prepared, precision: Precision) -> _Problem:
    """Return the problem, packed at the first product and kept with the features it was made of."""
    kept: dict[Precision, _Problem] = vars(prepared).setdefault("_triton", {})
    if precision not in kept:
        kept[precision] = _Problem(expression, prepared, precision)
    return kept[precision]


def _launch(
    plan: Plan, gradient: bool, arguments: dict[str, Any], sizes: tuple[int, int], vectors: int
) -> dict[str, Tensor]:
    """Run one kernel and return its results, with the shares of the columns as their first dimension.

    :param sizes: rows and columns.
    :param vectors: blocks of right-hand sides.
    """
    coefficients = arguments["coefficients"]
    items, device = coefficients.shape[0], coefficients.device
    blocks, rows, parts = GRADIENT if gradient else PRODUCT, _padded(sizes[0]), vectors
    shapes: dict[str, tuple[int, ...]] = {}
    if not gradient:
        shapes["out"] = (rows, parts * plan.width)
    elif plan.target is not None:
        a, width = plan.target
        parts = _count(arguments[f"c{a}"] * plan.atoms[a].k, width)
        shapes["g"] = (rows, parts * width)
    else:
        parts = 1
    if plan.sums:
        shapes["sums"] = (len(plan.terms) + len(plan.shapes), rows)
    row_blocks, column_blocks = -(-sizes[0] // blocks.rows), -(-sizes[1] // blocks.columns)
    programs = row_blocks * items * parts
    splits, steps = _shares(programs, column_blocks, device)
    numbers = (rows, _padded(sizes[1]), row_blocks, column_blocks, steps, splits, parts, items, vectors)
    # rows of padding that are in no block are not written
    results = {name: torch.zeros(splits, items, *shape, device=device) for name, shape in shapes.items()}
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        compiled(plan, gradient)[(programs * splits,)](
            **arguments, **results, **dict(zip(NUMBERS, numbers, strict=True)),
            BM=blocks.rows, BN=blocks.columns, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return results


def _shares(programs: int, column_blocks: int, device: torch.device) -> tuple[int, int]:
    """Return into how many shares the columns are cut, and how many blocks a share has: every core gets work."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    splits = min(-(-_PROGRAMS * cores // programs), column_blocks)
    steps = -(-column_blocks // splits)
    return -(-column_blocks // steps), steps  # no share is empty


def _parameter_pairs(plan: Plan, prepared: Prepared, sums: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Coefficients, then shape parameters, with their gradients."""
    c, terms = prepared.coefficients, len(plan.terms)
    pairs = [(c, sums[:, :terms].reshape(c.shape).to(c.dtype))]
    for i, a in enumerate(plan.shapes):
        alpha = prepared.features[a].alpha
        assert alpha is not None
        pairs.append((alpha, sums[:, terms + i].reshape(alpha.shape).to(alpha.dtype)))
    return [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]

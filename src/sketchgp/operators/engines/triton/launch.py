"""Products and derivatives of one expression by Triton kernels: what is launched, on which blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...expression import Expression, Prepared
from .layout import (
    ARITHMETIC,
    PADDING,
    Blocks,
    Packed,
    Plan,
    Precision,
    atom_plans,
    chunk,
    count,
    flat,
    gradient_blocks,
    pack_features,
    pack_matrix,
    pack_vectors,
    padded,
    power,
    product_blocks,
    unit,
)
from .source import compiled

T = TypeVar("T")
Route = Literal["columns", "matrix"]

MOST_SINGLE = 8  # right-hand sides of a gradient that are multiplied one by one at most
_WIDEST = 64  # right-hand sides that one program takes
_FEATURES = 128  # columns of features for which one program keeps a gradient
_PROGRAMS = 8  # for each multiprocessor, so that none waits long for the last


class Side(NamedTuple):
    """The rows, or the columns, of a derivative: their features, and the vectors."""

    features: list[Packed]
    vectors: Packed
    size: int


def multiply(
    expression: Expression,
    prepared: Prepared,
    rows: int,
    rhs: Tensor,
    same: bool,
    precision: Precision,
    blocks: Blocks | None = None,
    route: Route | None = None,
) -> Tensor:
    """``K rhs`` ``(n, t)`` or ``(B, n, t)``, for rhs ``(m, t)`` or ``(B, m, t)``.

    :param rows: n.
    :param same: whether entries on the diagonal are at distance 0.
    :param blocks: a choice of block sizes, for tests.
    :param route: for tests and benchmarks: right-hand sides one by one, or by a matrix product; None for the default.
    """
    columns, t = rhs.shape[-2:]
    if not rows or not rhs.numel():
        return rhs.new_zeros(*rhs.shape[:-2], rows, t)
    v = flat(rhs)
    problem = _kept(expression, prepared, _possible(precision, rhs.device))
    plan = problem.plan(same, t, route=route)
    packed = problem.vectors(v, plan)
    parts = packed.high.shape[1] if plan.dot else 1
    slab = (parts, padded(rows), plan.width) if plan.dot else (plan.width, padded(rows))
    sides = {**problem.arguments("x", problem.left), **problem.arguments("z", problem.right)}

    def run(blocks: Blocks) -> Tensor:
        launch = _Launch(plan, blocks, rows, columns, v.shape[0], parts, rhs.device)
        out = torch.empty(launch.splits, v.shape[0], *slab, dtype=torch.float32, device=rhs.device)
        launch(False, {**problem.shared, **sides, **_named("v", packed), "out": out})
        return out[0] if launch.splits == 1 else out.sum(dim=0)

    choices = [blocks] if blocks else product_blocks(plan, _shared_memory(rhs.device))
    total = _with_blocks(run, (plan, False), choices)
    total = total.transpose(1, 2).flatten(2) if plan.dot else total.mT
    return total[:, :rows, :t].reshape(*rhs.shape[:-2], rows, t).to(rhs.dtype)


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
    n, m = left.shape[-2], right.shape[-2]
    once = all(f.left is f.right for f in prepared.features)  # one tensor then gets the gradients of both sides
    if once and left is not right and wanted:  # K is symmetric: W may be made so, and rows are all that is needed
        left, right = torch.cat([left, right], dim=-1), torch.cat([right, left], dim=-1) * 0.5
    totals: list[tuple[Tensor, Tensor]] = []
    if not left.numel() or not right.numel():
        tensors = [t for f in prepared.features for t in ((f.left,) if once else (f.left, f.right))]
        return [(t, torch.zeros_like(t)) for t in (*tensors, *shapes, prepared.coefficients)]
    problem = _Problem(expression, prepared.detached(), _possible(precision, left.device))
    plan = problem.plan(same, left.shape[-1], gradient=True)
    sides = [
        Side(problem.left, problem.vectors(flat(left), plan), n),
        Side(problem.right, problem.vectors(flat(right), plan), m),
    ]
    for side in (0,) if once else (0, 1):
        for part in _passes(problem, plan, wanted, sums and side == 0):
            result = _gradient_pass(problem, part, sides[side], sides[1 - side], blocks)
            for a, gradient in zip(dict(part.targets), result, strict=False):
                features = prepared.features[a]
                owner = features.left if side == 0 else features.right
                p = owner.shape[-1]
                factor = unit(expression.atoms[a].profile, plan.atoms[a].dot) * (2 if once else 1)
                gradient = gradient[:, : owner.shape[-2], :p].mul(factor)
                totals.append((owner, gradient.reshape(owner.shape).to(owner.dtype)))
            if part.sums:
                totals += _parameter_pairs(plan, prepared, result[-1])
    return totals


class _Problem:
    """An expression, packed."""

    def __init__(self, expression: Expression, prepared: Prepared, precision: Precision) -> None:
        self.precision, self.terms = precision, expression.terms
        profiles = [atom.profile for atom in expression.atoms]
        self.atoms = plans = atom_plans(profiles, [f.left.shape[-1] for f in prepared.features], precision)
        self.left: list[Packed] = []
        self.right: list[Packed] = []
        self.shared: dict[str, Any] = {}
        for a, (atom, f) in enumerate(zip(expression.atoms, prepared.features, strict=True)):
            plan = plans[a]
            self.left.append(pack_features(f.left, atom.profile, plan, precision))
            same = f.right is f.left
            self.right.append(self.left[-1] if same else pack_features(f.right, atom.profile, plan, precision))
            if f.alpha is not None:
                self.shared[f"alpha{a}"] = f.alpha.float().reshape(-1).contiguous()
            if plan.looped:
                self.shared[f"c{a}"] = count(plan, f.left.shape[-1])
        if not all(plan.dot for plan in self.atoms):
            device = prepared.coefficients.device
            self.shared["nothing"] = torch.zeros(PADDING, 16, dtype=torch.bfloat16, device=device)
        self.shared["coefficients"] = prepared.coefficients.float().reshape(-1, len(self.terms)).contiguous()

    def plan(self, same: bool, t: int, gradient: bool = False, route: Route | None = None) -> Plan:
        """Return the plan for t right-hand sides."""
        width, looped = power(t), False
        arithmetic = ARITHMETIC[self.precision]
        dot = width > (MOST_SINGLE if gradient else arithmetic.single)
        if route is not None:
            dot = route == "matrix"
        if dot and gradient:
            width, looped = chunk(t)
        elif dot:
            width = max(16, min(width, _WIDEST))
        return Plan(tuple(self.atoms), self.terms, arithmetic.plan, same, width, dot, looped)

    def vectors(self, x: Tensor, plan: Plan) -> Packed:
        return pack_matrix(x, plan.width, self.precision) if plan.dot else pack_vectors(x, plan.width)

    def arguments(self, side: str, features: list[Packed]) -> dict[str, Any]:
        return {
            name: value for a, packed in enumerate(features) for name, value in _named(f"{side}{a}", packed).items()
        }


def _kept(expression: Expression, prepared: Prepared, precision: Precision) -> _Problem:
    """The problem, packed at the first product and kept with the features it was made of."""
    kept: dict[Precision, _Problem] = vars(prepared).setdefault("_triton", {})
    if precision not in kept:
        kept[precision] = _Problem(expression, prepared, precision)
    return kept[precision]


def _possible(precision: Precision, device: torch.device) -> Precision:
    """Float32 multiplications on devices whose tensor cores do not know tf32."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return "ieee" if old else precision


def _named(name: str, packed: Packed) -> dict[str, Any]:
    values = {name: packed.high, f"{name}l": packed.low, f"{name}n": packed.norms}
    return {key: value for key, value in values.items() if value is not None}


_TOO_LARGE: dict[tuple[Plan, bool], int] = {}  # how many of the blocks of a kernel turned out to need too much


def _with_blocks(run: Callable[[Blocks], T], key: tuple[Plan, bool], choices: list[Blocks]) -> T:
    """Return ``run`` with the first blocks that the device has shared memory for."""
    for i in range(_TOO_LARGE.get(key, 0), len(choices) - 1):
        try:
            return run(choices[i])
        except Exception as error:
            if not _too_large(error):
                raise
            _TOO_LARGE[key] = i + 1
    return run(choices[-1])


def _too_large(error: BaseException) -> bool:
    """Return whether a kernel needs more of the device than there is."""
    return type(error).__name__ == "OutOfResources"


def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may take."""
    if device.type != "cuda":
        return 1 << 17
    known = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    major, minor = torch.cuda.get_device_capability(device)
    guess = 227 if major in (9, 10) else 163 if (major, minor) in ((8, 0), (8, 7)) else 99 if major >= 8 else 64
    return known or guess * 1024


def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class _Launch:
    """One kernel on a device: the grid, and how the columns are shared out."""

    def __init__(
        self, plan: Plan, blocks: Blocks, rows: int, columns: int, items: int, parts: int, device: torch.device
    ) -> None:
        self.plan, self.blocks, self.device = plan, blocks, device
        self.row_blocks, self.column_blocks = -(-rows // blocks.rows), -(-columns // blocks.columns)
        self.items, self.parts = items, parts
        self.strides = (padded(rows), padded(columns))
        programs = self.row_blocks * items * parts
        splits = min(-(-_PROGRAMS * _cores(device) // programs), self.column_blocks)
        self.steps = -(-self.column_blocks // splits)
        self.splits = -(-self.column_blocks // self.steps)  # no share is empty

    def __call__(self, gradient: bool, arguments: dict[str, Any]) -> None:
        kernel = compiled(self.plan, gradient)
        numbers = {
            "x_rows": self.strides[0],
            "z_rows": self.strides[1],
            "row_blocks": self.row_blocks,
            "column_blocks": self.column_blocks,
            "steps": self.steps,
            "splits": self.splits,
            "parts": self.parts,
            "items": self.items,
        }
        grid = (self.row_blocks * self.splits * self.parts * self.items,)
        b = self.blocks
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernel[grid](**arguments, **numbers, BM=b.rows, BN=b.columns, num_warps=b.warps, num_stages=b.stages)


def _gradient_pass(problem: _Problem, plan: Plan, own: Side, other: Side, blocks: Blocks | None) -> list[Tensor]:
    """Gradients ``(B, rows, p)`` of the targets' features in the kernel's units, then the sums ``(B, quantities)``."""
    device, items = own.vectors.high.device, own.vectors.high.shape[0]
    parts = 1
    for a, width in plan.targets:
        atom = plan.atoms[a]
        if atom.looped:
            parts = -(-problem.shared[f"c{a}"] * atom.k // width)
    rows = padded(own.size)
    arguments = {**problem.arguments("x", own.features), **problem.arguments("z", other.features)}
    arguments |= {**_named("l", own.vectors), **_named("r", other.vectors)}
    if plan.looped:
        arguments["cw"] = own.vectors.high.shape[1]

    def run(blocks: Blocks) -> list[Tensor]:
        launch = _Launch(plan, blocks, own.size, other.size, items, parts, device)
        shapes: dict[str, tuple[int, ...]] = {
            f"g{a}": (launch.splits, items, parts, rows, width) for a, width in plan.targets
        }
        if plan.sums:
            shapes["sums"] = (launch.splits, items, len(plan.terms) + len(plan.shapes), rows)
        results = {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
        launch(True, {**problem.shared, **arguments, **results})
        result = [results[f"g{a}"].sum(dim=0).transpose(1, 2).flatten(2) for a, _ in plan.targets]
        if plan.sums:
            used = launch.row_blocks * blocks.rows  # rows of padding in no block are not written
            result.append(results["sums"][..., :used].sum(dim=(0, 3), dtype=torch.float64))
        return result

    choices = [blocks] if blocks else gradient_blocks(plan, _shared_memory(device))
    return _with_blocks(run, (plan, True), choices)


def _passes(problem: _Problem, plan: Plan, wanted: list[int], sums: bool) -> list[Plan]:
    """Return the parts that are differentiated together, as many as have room for their sums in registers.

    Each pass computes all distances and values again.
    """
    passes: list[Plan] = []
    room = 0
    if sums and len(plan.atoms) > 2:
        passes.append(replace(plan, sums=True))
        sums = False
    for a in wanted:
        atom = plan.atoms[a]
        width = min(power(problem.shared[f"c{a}"] * atom.k), _FEATURES) if atom.looped else power(atom.k)
        if width > room:
            passes.append(plan)
            room = max(_FEATURES // 2, width) if len(plan.atoms) <= 2 else width
        passes[-1] = replace(passes[-1], targets=(*passes[-1].targets, (a, width)))
        room -= width
    if sums:
        passes = [replace(passes[0] if passes else plan, sums=True), *passes[1:]]
    return passes


def _parameter_pairs(plan: Plan, prepared: Prepared, sums: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Coefficients, then shape parameters, with their gradients."""
    c, terms = prepared.coefficients, len(plan.terms)
    pairs = [(c, sums[:, :terms].reshape(c.shape).to(c.dtype))]
    for i, a in enumerate(plan.shapes):
        alpha = prepared.features[a].alpha
        assert alpha is not None
        pairs.append((alpha, sums[:, terms + i].reshape(alpha.shape).to(alpha.dtype)))
    return [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]

"""Engines check themselves: no user's product is the first of its kind that an engine computes.

Before it, a small random block is multiplied (or differentiated) by the engine and, in float64, by tiles.  A kind is
what is compiled and launched for itself: kernel and numbers of features, dtype, precision, class of width, what is
differentiated, device.  The block has rows of the user's and random ones of their spread, as they are and drawn
together until typical distances are a lengthscale of each part of the kernel: its values are then neither all 0 nor
all 1.  A check takes milliseconds beside what the engine compiles, which the product to come needs anyway; what it
found holds for the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import InputError, warn
from ...memory import out_of_memory
from ...random_streams import generator
from ..centre import Centre
from ..expression import Prepared
from ..pairs import Pairs
from .base import Engine, Gradients
from .tiled import TILED

_SIZE = (150, 140)  # rows and columns: more than one block of any engine, and no multiple of one
_WIDEST = 160  # columns of a right-hand side
_CLOSE = 2.0**-10  # at which the distances of a periodic kernel are those of its inputs
_ROUNDOFFS = 16.0  # of an exponential and what is around it
_SAFETY = 4.0  # over the bound
_LOCK = threading.RLock()
_VERDICTS: dict[Hashable, str | None] = {}  # None, or what was wrong
_WARNED: set[tuple[str, str]] = set()  # engines and devices
_logger = logging.getLogger("sketchgp")


class _Undecided(Exception):
    """Nothing could be compared: values of the kernel that are no numbers, or no memory."""


def trusted(engine: Engine, pairs: Pairs, columns: int, gradient: bool = False) -> Engine:
    """Return the engine, after its check; where it failed and was the library's own choice, tiles, with one warning.

    :param columns: of the right-hand sides.
    :param gradient: whether a product is to be differentiated, not computed.
    :raises InputError: where it failed and was asked for by name.
    """
    c = engine.resolution(pairs)
    if c is None or pairs.expression is None or not (columns and pairs.x1.numel() and pairs.x2.numel()):
        return engine
    kind = (engine.name, *_kind(pairs, columns, gradient))
    with _LOCK:
        if kind not in _VERDICTS:
            try:
                _VERDICTS[kind] = _fault(engine, c, pairs, min(columns, _WIDEST), gradient)
            except _Undecided:
                return engine
    fault = _VERDICTS[kind]
    if fault is None:
        return engine
    if pairs.asked:
        raise InputError(f"matmul={engine.name!r} cannot be used here: {fault}. Use matmul='tiled'.")
    _say(engine, pairs.device, fault)
    return TILED


def _say(engine: Engine, device: torch.device, fault: str) -> None:
    """Warn of the first fault of an engine on a device; log the others."""
    message = f"The engine {engine.name!r} is left out on {device}, tiles are used: {fault}."
    with _LOCK:
        first = (engine.name, str(device)) not in _WARNED
        _WARNED.add((engine.name, str(device)))
    if first:
        warn(f"{message} Please report this; matmul='tiled' avoids the check and this warning.", see="engine")
    else:
        _logger.info(message)


def _kind(pairs: Pairs, columns: int, gradient: bool) -> tuple[Hashable, ...]:
    assert pairs.expression is not None
    sizes = [features.left.shape[-1] for features in pairs.prepared().features]
    atoms = zip([atom.profile.name for atom in pairs.expression.atoms], sizes, strict=True)
    differentiated = (pairs.x1 is pairs.x2, *[t.requires_grad for t in pairs.tensors]) if gradient else None
    width = min(1 << max(columns - 1, 0).bit_length(), 256)  # up to a power of two they share the same code
    types = (pairs.precision, pairs.same, *[(t.dtype, t.dim() > 2) for t in pairs.tensors])
    return (pairs.device, tuple(atoms), pairs.expression.terms, types, width, differentiated)


def _fault(engine: Engine, c: float, pairs: Pairs, columns: int, gradient: bool) -> str | None:
    """Return the fault of an engine, as half a sentence; None where there is none.

    :raises _Undecided: where the check does not decide.
    """
    what = f"{'a gradient' if gradient else 'a product'} with {columns} column{'s' * (columns > 1)}"
    with torch.inference_mode(False), torch.no_grad():
        few = max(8, int(_SIZE[0] * max(1, pairs.batch_shape.numel()) ** -0.5))
        block = _block(pairs, min(_SIZE[0], few), min(_SIZE[1], few), own=not gradient)
        stream = generator(0, "vectors by which an engine checks itself")
        left, right = (
            torch.rand(size, columns, dtype=torch.float64, generator=stream).to(block.device, block.compute_dtype)
            for size in block.shape[-2:]
        )
        right = right if gradient else _few_large(right)
        left, right = (v.expand(*block.flat_batch, *v.shape).contiguous() for v in (left, right))
        try:
            if gradient:
                gradients = engine.derivative(block, left, right)
                excess = _gradient_excess(block, c, gradients, left, right)
            else:
                excess = _excess(block, c, engine.product(block, right), right)
        except _Undecided:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise _Undecided from error
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}{': ' if lines else ''}{lines[0][:200] if lines else ''}"
            return f"{what} of a small block failed ({reason})"
    if excess <= 1:
        return None
    return f"{what} of a small block is {excess:.2g} times as far from float64 as its stated error allows"


def _few_large(numbers: Tensor) -> Tensor:
    """Give numbers ``(m, t)`` from 0 to 1 signs, and make all but eight in each column small.

    The bound of a sum of many errors is far above their sum, and would hide products of too few digits.
    """
    m, t = numbers.shape
    signed = (numbers * 1024).floor() % 2 * 2 - 1
    large = torch.linspace(0, m - 1, 8, device=numbers.device).round().long().unsqueeze(1)
    large = (large - torch.arange(t, device=numbers.device)) % m
    sizes = torch.full_like(numbers, 0.01).scatter_(0, large, 1.0)
    return signed * sizes * (0.5 + numbers / 2)


# --- the block --------------------------------------------------------------------------------------------------------


def _block(pairs: Pairs, rows: int, columns: int, own: bool) -> Pairs:
    """Return a matrix of the same kind, of few points, moved to around 0: these kernels depend on differences.

    :param own: whether some are rows of the user's as they are, however far apart they lie.
    """
    steps = _steps(pairs, pairs.x2, rows if pairs.same else columns, 1)
    origin = Centre(torch.zeros_like(pairs.centre.value))
    scales = _scales(pairs, steps, origin)
    if own:
        scales = torch.cat([scales.new_ones(1), scales])
    x2 = _points(pairs.x2, steps, scales)
    if not pairs.same:
        x1 = _points(pairs.x1, _steps(pairs, pairs.x1, rows, 2), scales)
    elif pairs.x1 is pairs.x2:
        x1 = x2
    else:
        x1 = x2.detach().clone().requires_grad_(pairs.x1.requires_grad)
    return pairs.at(x1, x2, pairs.same, origin)


def _steps(pairs: Pairs, x: Tensor, count: int, seed: int) -> Tensor:
    """Return steps ``(..., count, d)`` from the centre, float64.

    Every other one leads to a row of x ``(..., n, d)``, the others to random points of the same spread.
    """
    some = torch.linspace(0, x.shape[-2] - 1, min(x.shape[-2], 4 * count), device=x.device).long()
    candidates = x.detach().index_select(-2, some)
    candidates = candidates if candidates.dtype.itemsize >= 4 else candidates.float()
    far = pairs.centre.far(candidates)
    near = candidates if bool(far.all()) else candidates[..., ~far, :]
    near = near.to(torch.float64) - pairs.centre.value
    near = near.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    spread = near.abs().mean(dim=-2, keepdim=True)
    spread = torch.where(spread > 0, spread, 1.0)
    noise = torch.randn(count, near.shape[-1], dtype=torch.float64, generator=generator(seed, "points of a check"))
    steps = noise.to(near.device) * spread
    own = near[..., : (count + 1) // 2, :]
    steps = steps.expand(*near.shape[:-2], *steps.shape[-2:]).clone()
    steps[..., : 2 * own.shape[-2] : 2, :] = own
    return steps


def _scales(pairs: Pairs, steps: Tensor, origin: Centre) -> Tensor:
    """Return the factor of the steps that makes the typical distance of each atom 1."""
    assert pairs.expression is not None
    close = (_CLOSE * steps).to(pairs.x2.dtype)
    scales = [steps.new_ones(())] * (not pairs.expression.atoms)
    features = pairs.at(close, close, True, origin).prepared().features
    for atom, f in zip(pairs.expression.atoms, features, strict=True):
        x = f.left.to(torch.float64)
        step = x - x.roll(1, dims=-2)
        scales.append(_CLOSE / torch.linalg.vector_norm(step, 1 if atom.profile.l1 else 2, dim=-1).median())
    result = torch.stack(scales)
    return torch.where(result.isfinite() & (result > 0), result, 1.0).clamp(2.0**-40, 2.0**40)


def _points(x: Tensor, steps: Tensor, scales: Tensor) -> Tensor:
    """Multiply each step by one of the scales and, unless it is 1, by a number from 1/2 to 3/2."""
    count = steps.shape[-2]
    spread = torch.rand(count, 1, dtype=torch.float64, generator=generator(0, "how far points of a check are drawn"))
    each = scales[(torch.arange(count, device=scales.device) // 2) % len(scales)].unsqueeze(-1)
    points = steps * torch.where(each == 1, 1.0, each * (spread.to(steps.device) + 0.5))
    return points.to(x.dtype).requires_grad_(x.requires_grad)


# --- what is right ----------------------------------------------------------------------------------------------------


class _Exact:
    """A block as tiles see it, in float64 but for its features, whose rounding is none of the engine's."""

    compute_dtype = torch.float64

    def __init__(self, block: Pairs) -> None:
        self._block = block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def prepare(self, tensors: list[Tensor], same: bool) -> Prepared:
        return self._block.prepare(tensors, same).converted(Tensor.double)

    def prepared(self) -> Prepared:
        return self._block.prepared().converted(Tensor.double)


def _excess(block: Pairs, c: float, result: Tensor, right: Tensor) -> float:
    """Return the largest error of an entry of a product over its bound.

    :raises _Undecided: where the product is no number.
    """
    right = right.to(torch.float64)
    exact = TILED.product(cast("Pairs", _Exact(block)), right)
    if not bool(exact.isfinite().all()):
        raise _Undecided
    if result.shape != exact.shape:
        return float("inf")
    bound = _SAFETY * (_entry_errors(block, c) @ right.abs())
    excess = ((result.to(torch.float64) - exact).abs() / bound).nan_to_num(nan=float("inf"))
    return float(excess.max())


def _entry_errors(block: Pairs, c: float) -> Tensor:
    """Return error bounds of the entries from those of distances; entries and vectors are rounded by 2 c each."""
    assert block.expression is not None
    prepared, eps = block.prepared().converted(Tensor.double), torch.finfo(block.compute_dtype).eps
    values: list[Tensor] = []
    largest: list[Tensor] = []
    least: list[Tensor] = []  # of points at distance 0, which cannot come nearer
    for atom, f in zip(block.expression.atoms, prepared.features, strict=True):
        order = 1.0 if atom.profile.l1 else 2.0
        q = torch.cdist(f.left, f.right, p=order, compute_mode="donot_use_mm_for_euclid_dist") ** order
        sizes = [x.abs().pow(order).sum(dim=-1) for x in (f.left, f.right)]
        error = _of_distances(c, eps, f.left.shape[-1]) * (sizes[0].unsqueeze(-1) + sizes[1].unsqueeze(-2))
        for distances, out in ((q, values), ((q - error).clamp(min=0), largest), (q + error, least)):
            out.append(atom.profile.at(distances, f.alpha))
    total = prepared.coefficients.new_zeros(*block.flat_batch, *block.shape[-2:])
    for number, term in enumerate(block.expression.terms):
        size = prepared.coefficients[..., number, None, None].abs()
        exact, most, lowest = (torch.ones_like(total) for _ in range(3))
        for a in term:
            exact, most, lowest = exact * values[a], most * largest[a], lowest * least[a]
        total += size * (
            torch.maximum(most - exact, exact - lowest) + (4 * c + _ROUNDOFFS * eps) * most + _ROUNDOFFS * eps
        )
    return total


def _of_distances(c: float, eps: float, features: int) -> float:
    """Return the factor of ``|a|^2 + |b|^2``: c, and the rounding of sums, which devices may cut off every 8 terms."""
    return c + (8 + features / 8) * eps


def _gradient_excess(block: Pairs, c: float, result: Gradients, left: Tensor, right: Tensor) -> float:
    """The largest error of the gradients of inputs, and of those of parameters, over its bound: relative to their norm.

    :raises _Undecided: where a gradient is no number.
    """
    left, right = left.to(torch.float64), right.to(torch.float64)
    exact = TILED.derivative(cast("Pairs", _Exact(block)), left, right)
    bound = _relative_error(block, c)
    worst = 0.0
    for part in (slice(0, 2), slice(2, None)):
        if [g is None for g in exact[part]] != [g is None for g in result[part]]:
            return float("inf")
        wanted, given = (
            [g.to(torch.float64).flatten() for g in gradients[part] if g is not None] for gradients in (exact, result)
        )
        if not wanted:
            continue
        if [g.shape for g in wanted] != [g.shape for g in given]:
            return float("inf")
        true, error = torch.cat(wanted), torch.cat(given) - torch.cat(wanted)
        if not bool(true.isfinite().all()):
            raise _Undecided
        allowed = bound * true.norm() + torch.finfo(torch.float32).tiny
        worst = max(worst, float((error.norm() / allowed).nan_to_num(nan=float("inf"))))
    return worst


def _relative_error(block: Pairs, c: float) -> float:
    """Return the relative error of gradients for an error of the distances, a root where slopes are steepest at 0."""
    assert block.expression is not None
    eps = torch.finfo(block.compute_dtype).eps
    largest = c + _ROUNDOFFS * eps
    for atom, f in zip(block.expression.atoms, block.prepared().features, strict=True):
        power = 1 if atom.profile.l1 else 2
        size = sum(float(x.abs().pow(power).sum(dim=-1).max()) for x in (f.left, f.right))
        error = _of_distances(c, eps, f.left.shape[-1]) * max(size, 1.0)
        largest = max(largest, error**0.5 if atom.profile.name == "matern12" else error)
    return min(_SAFETY * largest, 0.5)

"""Functions that numba compiles for one expression: distances, kernel function and sums over columns in registers.

Writing them out as text keeps all structure out of the compiled code: the inner loop has a constant length, reads and
writes one contiguous buffer at constant offsets, and is what LLVM vectorises.  ``repr`` of a plan says all that its
source depends on.

Names in the text: ``a3_1`` feature 3 of row 1 of a block, ``z3`` the same of a column, ``v2`` the values of atom 2,
``k1`` the entry of row 1, ``s2_1`` its sum with right-hand side 2, ``w2_1`` what row 1 is multiplied by where each pair
is used for both of its points.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...profiles import GAUSS, LAPLACE, LOG2E, RATIONAL_QUADRATIC, Profile

CHUNK = 512  # columns in a pass of the inner loop, whose buffer stays in the first-level cache
_SUMMED = 256  # rows after which sums of columns in float32 are added up in float64
_ROWS, _WIDE = 4, 8  # rows at a time; from so many right-hand sides on half as many, for the registers
_LEAST = 60.0  # values are 2^-60 times the scale at least: CPUs take many times as long below the normal numbers
_EXP2, _LOG2 = 6, 10  # degrees of polynomials, which are off by less than they are rounded
_FLAGS = {"contract", "reassoc", "nsz", "arcp"}  # NaN and infinities count

# of q, which is made of features times ``unit``; u is s log2(e)
_VALUES = {
    "gauss": "exp2(-q)",
    "laplace": "exp2(-q)",
    "matern12": "exp2(-u)",
    "matern32": "(ONE + LN2 * u) * exp2(-u)",
    "matern52": "(ONE + LN2 * u + LN2_SQUARE_THIRD * u * u) * exp2(-u)",
    "rational_quadratic": "exp2(-alpha{a} * log2_1p(q))",
}


def unit(profile: Profile) -> float:
    """Return the factor of features that puts distances into the units of the text, but for shape parameters."""
    return {GAUSS.name: math.sqrt(LOG2E / 2), RATIONAL_QUADRATIC.name: math.sqrt(0.5)}.get(profile.name, LOG2E)


@dataclass(frozen=True)
class Plan:
    """Constants that the source depends on.

    :ivar atoms: the profile of each, and its number of features; :ivar terms: as of an ``Expression``.
    :ivar width: right-hand sides; :ivar both: whether each pair counts for both of its points.
    """

    atoms: tuple[tuple[str, int], ...]
    terms: tuple[tuple[int, ...], ...]
    width: int
    both: bool

    @property
    def features(self) -> int:
        """Features of all atoms."""
        return sum(size for _, size in self.atoms)

    @property
    def buffer(self) -> int:
        """Numbers in the buffer of a thread."""
        return CHUNK * (self.features + self.width * (1 + self.both))


@functools.lru_cache(maxsize=256)
def compiled(plan: Plan) -> Callable[..., None]:
    """Return the function of a plan.

    It adds the products of rows ``r0 <= i < r1`` and columns ``c0 <= j < c1`` to ``out``, and where each pair counts
    twice ``keep`` times those of the transpose to ``back``.  Features lie feature by feature, vectors column by column.
    """
    from numba import float32, float64, int64, njit, void

    exp2, log2_1p = _elementary()
    constants = {
        "exp2": exp2, "log2_1p": log2_1p, "sqrt": np.sqrt, "ZERO": np.float32(0), "ONE": np.float32(1),
        "FURTHEST": np.float32(_LEAST), "LN2": np.float32(math.log(2)),
        "LN2_SQUARE_THIRD": np.float32(math.log(2) ** 2 / 3),
    }  # fmt: skip
    singles, doubles, place = float32[:, ::1], float64[:, ::1], (int64,) * 4
    signature = void(*(singles,) * 4, doubles, doubles, float32[::1], *place, float32, float32[::1])
    options: dict[str, Any] = {"nogil": True, "fastmath": _FLAGS, "error_model": "numpy"}
    return njit(signature, **options)(_defined("product", _product(plan), constants))


def _defined(name: str, text: str, constants: dict[str, Any]) -> Callable[..., Any]:
    namespace = dict(constants)
    exec(compile(text, f"<sketchgp {name}>", "exec"), namespace)
    return namespace[name]


@functools.lru_cache(maxsize=1)
def _elementary() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``exp2(x)`` and ``log2_1p(x)`` of float32 numbers, polynomials that are vectorised."""
    from numba import njit

    power = _interpolated(np.exp2, -0.5, 0.5, _EXP2)
    root = math.sqrt(0.5)
    logarithm = _interpolated(lambda x: np.log1p(x) / (x * math.log(2)), root - 1, 1 / root - 1, _LOG2)
    exp2 = [
        "def exp2(x):",
        "    x = LEAST if x < LEAST else x",
        "    n = int32(x - HALF)",  # truncated: nearest, for a negative x
        "    f = x - float32(n)",
        f"    return {_horner(power)} * int32((n + BIAS) << BITS).view(float32)",
    ]
    # u = 2^e m with m around 1; m - 1 is had without the rounding of u
    log2_1p = [
        "def log2_1p(x):",
        "    x = MOST if x > MOST else x",
        "    u = float32(x + ONE)",
        "    e = int32((u.view(int32) - ROOT) >> BITS)",
        "    s = int32((BIAS - e) << BITS).view(float32)",
        "    f = x * s + (s - ONE)",
        f"    return float32(e) + f * {_horner(logarithm)}",
    ]
    constants = {
        "float32": np.float32, "int32": np.int32, "ONE": np.float32(1), "HALF": np.float32(0.5),
        "LEAST": np.float32(-_LEAST), "MOST": np.float32(2.0**120), "BIAS": np.int32(127), "BITS": np.int32(23),
        "ROOT": np.float32(root).view(np.int32),
    }  # fmt: skip
    compile_ = njit(fastmath={"contract"})  # the order of these operations matters
    first, second = (
        compile_(_defined(lines[0][4:].split("(")[0], "\n".join(lines), {**constants, **_coefficients(c)}))
        for lines, c in ((exp2, power), (log2_1p, logarithm))
    )
    return first, second


def _interpolated(function: Callable[..., Any], low: float, high: float, degree: int) -> np.ndarray:
    """Return the coefficients of the polynomial through the Chebyshev nodes, the lowest first."""
    fit = np.polynomial.chebyshev.Chebyshev.interpolate(function, degree, [low, high])
    return fit.convert(kind=np.polynomial.Polynomial).coef


def _horner(coefficients: np.ndarray) -> str:
    last = len(coefficients) - 1
    return functools.reduce(lambda text, k: f"({text} * f + P{k})", range(last - 1, -1, -1), f"P{last}")


def _coefficients(values: np.ndarray) -> dict[str, np.float32]:
    return {f"P{k}": np.float32(value) for k, value in enumerate(values)}


def _product(plan: Plan) -> str:
    p, t, rows = plan.features, plan.width, range(_ROWS // 2 if plan.width >= _WIDE else _ROWS)
    back = (p + t) * CHUNK
    lines = ["def product(left, right, rhs, lhs, out, back, numbers, r0, r1, c0, c1, keep, buffer):"]
    lines += [f"    f{i} = numbers[{i}]" for i in range(len(plan.terms))]
    lines += [f"    alpha{a} = numbers[{len(plan.terms) + a}]" for a in range(len(plan.atoms))]
    lines += [f"    for c in range(c0, c1, {CHUNK}):", f"        m = min({CHUNK}, c1 - c)"]
    for source, count, first in (("right", p, 0), ("rhs", t, p)):
        lines += [
            f"        for k in range({count}):",
            f"            for j in range(m): buffer[({first} + k) * {CHUNK} + j] = {source}[k, c + j]",
            f"            for j in range(m, {CHUNK}): buffer[({first} + k) * {CHUNK} + j] = ZERO",
        ]
    lines += [f"        for h in range(r0, r1, {_SUMMED}):", f"            last = min(h + {_SUMMED}, r1)"]
    if plan.both:
        lines += [f"            for j in range({t * CHUNK}): buffer[{back} + j] = ZERO"]
    lines += [f"            for i in range(h, last, {len(rows)}):"]
    for r in rows:
        lines += [f"                i{r} = min(i + {r}, last - 1)"]
        lines += [f"                a{k}_{r} = left[{k}, i{r}]" for k in range(p)]
        lines += [f"                s{k}_{r} = ZERO" for k in range(t)]
        if plan.both:  # a row beyond the last one counts 0 times
            lines += [f"                on{r} = keep if i + {r} < last else ZERO"]
            lines += [f"                w{k}_{r} = lhs[{k}, i{r}] * on{r}" for k in range(t)]
    lines += [f"                for j in range({CHUNK}):"]
    lines += [f"                    z{k} = buffer[{k * CHUNK} + j]" for k in range(p)]
    for r in rows:
        lines += [f"                    {line}" for line in _entry(plan, r)]
        lines += [f"                    s{k}_{r} += k{r} * buffer[{(p + k) * CHUNK} + j]" for k in range(t)]
    if plan.both:
        sums = [" + ".join(f"k{r} * w{k}_{r}" for r in rows) for k in range(t)]
        lines += [f"                    buffer[{back + k * CHUNK} + j] += {total}" for k, total in enumerate(sums)]
    for r in rows:
        lines += [f"                if i + {r} < last:"]
        lines += [f"                    out[{k}, i{r}] += s{k}_{r}" for k in range(t)]
    if plan.both:
        lines += [
            f"            for k in range({t}):",
            f"                for j in range(m): back[k, c + j] += buffer[{back} + k * {CHUNK} + j]",
        ]
    return "\n".join(lines)


def _entry(plan: Plan, r: int) -> list[str]:
    """Return the lines that make the entry ``k`` of a row and a column."""
    lines, first = [], 0
    for a, (profile, size) in enumerate(plan.atoms):
        lines += ["q = ZERO"]
        for k in range(first, first + size):
            lines += [f"e = a{k}_{r} - z{k}", f"q += {'abs(e)' if profile == LAPLACE.name else 'e * e'}"]
        if profile.startswith("matern"):
            lines += ["u = sqrt(q)", "u = FURTHEST if u > FURTHEST else u"]
        lines += [f"v{a} = {_VALUES[profile].format(a=a)}"]
        first += size
    products = [" * ".join(f"v{a}" for a in term) for term in plan.terms]
    if len(products) == 1:  # its coefficient is put into the result
        return [*lines, f"k{r} = {products[0] or 'ONE'}"]
    return [*lines, f"k{r} = {' + '.join(f'f{i} * {one}' if one else f'f{i}' for i, one in enumerate(products))}"]

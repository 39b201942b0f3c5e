"""Functions that numba compiles for one expression: distances, kernel function and sums over columns in registers.

With several right-hand sides the entries of four rows are kept in the first-level cache, for sums with four right-hand
sides at a time.

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

_BYTES = 2048  # of one feature of the columns in a pass of the inner loop; kept entries stay in the first-level cache
_SUMMED = 256  # rows after which sums of columns in float32 are added up in float64
_ROWS = 4  # rows at a time
GROUP = 4  # right-hand sides at a time, where entries are kept for all of them
_NARROW = 12  # features up to which one is as fast with one right-hand side, and compiled sooner
# values are at least so many powers of two below the scale: CPUs take many times as long below the normal numbers
_LEAST = {"float32": 60.0, "float64": 500.0}
# degrees of the polynomials of exp2 and log2, which are off by less than they are rounded
_DEGREES = {"float32": (6, 8), "float64": (11, 22)}
_FLAGS = {"contract", "reassoc", "nsz", "arcp"}  # NaN and infinities count

# of q, which is made of features times ``unit``; its root is s log2(e)
_EXPONENTS = {"gauss": "q", "laplace": "q", "rational_quadratic": "alpha{a} * log2_1p(q)"}
_FACTORS = {"matern32": "(ONE + LN2 * u)", "matern52": "(ONE + LN2 * u + LN2_SQUARE_THIRD * u * u)"}


# of parts of an atom: how many features, and whether they are cosines of half of an angle and, as many, sines
Layout = tuple[tuple[int, bool], ...]


def unit(profile: Profile) -> float:
    """Return the factor of features that puts distances into the units of the text, but for shape parameters."""
    return {GAUSS.name: math.sqrt(LOG2E / 2), RATIONAL_QUADRATIC.name: math.sqrt(0.5)}.get(profile.name, LOG2E)


@dataclass(frozen=True)
class Plan:
    """Constants that the source depends on.

    :ivar atoms: the profile and the layout of each.
    :ivar terms: as of an ``Expression``.
    :ivar single: whether there is one right-hand side; else any number of groups, for which entries are kept.
    :ivar both: whether each pair counts for both of its points.
    :ivar dtype: of the arithmetic, ``"float32"`` or ``"float64"``.
    """

    atoms: tuple[tuple[str, Layout], ...]
    terms: tuple[tuple[int, ...], ...]
    single: bool
    both: bool
    dtype: str

    @property
    def features(self) -> int:
        """Features of all atoms."""
        return sum(size for _, layout in self.atoms for size, _ in layout)

    def buffer(self, width: int) -> int:
        """Return how many numbers the buffer of a thread has: features, entries, right-hand sides and their sums."""
        return self.stride * (self.features + (0 if self.single else _ROWS) + width * (1 + self.both))

    @property
    def stride(self) -> int:
        """Numbers from one row of the buffer to the next: a cache line more, or all rows would share few cache sets."""
        return self.chunk + 64 // np.dtype(self.dtype).itemsize

    @property
    def chunk(self) -> int:
        """Columns in a pass of the inner loop."""
        return _BYTES // np.dtype(self.dtype).itemsize


@functools.lru_cache(maxsize=256)
def compiled(plan: Plan) -> Callable[..., None]:
    """Return the function of a plan.

    It adds the products of rows ``r0 <= i < r1`` and columns ``c0 <= j < c1`` to ``out``, and where each pair counts
    twice, and ``keep`` is not 0, those of the transpose to ``back``.  Features lie feature by feature, vectors column
    by column.
    """
    import numba

    real, exp2, log2_1p = np.dtype(plan.dtype).type, *_elementary(plan.dtype)
    constants = {
        "exp2": exp2, "log2_1p": log2_1p, "sqrt": np.sqrt, "ZERO": real(0), "ONE": real(1),
        "FURTHEST": real(_LEAST[plan.dtype]), "LN2": real(math.log(2)), "LN2_SQUARE_THIRD": real(math.log(2) ** 2 / 3),
    }  # fmt: skip
    number = getattr(numba, plan.dtype)
    vectors, sums, place = number[:, ::1], numba.float64[:, ::1], (numba.int64,) * 4
    signature = numba.void(*(vectors,) * 4, sums, sums, number[::1], *place, number, number[::1])
    options: dict[str, Any] = {"nogil": True, "fastmath": _FLAGS, "error_model": "numpy"}
    return numba.njit(signature, **options)(_defined("product", _product(plan), constants))


def _defined(name: str, text: str, constants: dict[str, Any]) -> Callable[..., Any]:
    namespace = dict(constants)
    exec(compile(text, f"<sketchgp {name}>", "exec"), namespace)
    return namespace[name]


@functools.lru_cache(maxsize=2)
def _elementary(dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``2^-x`` for ``0 <= x <= _LEAST`` and ``log2(1 + x)``, polynomials that are vectorised."""
    from numba import njit

    info, degrees = np.finfo(dtype), _DEGREES[dtype]
    real, integer = info.dtype.type, np.dtype(f"int{info.bits}").type
    power = _interpolated(np.exp2, -0.5, 0.5, degrees[0])
    root = math.sqrt(0.5)
    logarithm = _interpolated(lambda x: np.log1p(x) / (x * math.log(2)), root - 1, 1 / root - 1, degrees[1])
    # adding the shift rounds to an integer n, which the last bits then hold, and the exponent of p takes
    exp2 = [
        "def exp2(x):",
        "    y = real(SHIFT - x)",
        "    f = (SHIFT - y) - x",
        f"    p = real({_horner(power)})",
        "    return integer(p.view(integer) + integer(y.view(integer) << BITS)).view(real)",
    ]
    # u = 2^e m with m around 1; m - 1 is had without the rounding of u
    log2_1p = [
        "def log2_1p(x):",
        "    x = MOST if x > MOST else x",
        "    u = real(x + ONE)",
        "    e = integer(integer(u.view(integer) - ROOT) >> BITS)",
        "    s = integer((BIAS - e) << BITS).view(real)",
        "    f = x * s + (s - ONE)",
        f"    return real(e) + f * {_horner(logarithm)}",
    ]
    constants = {
        "real": real, "integer": integer, "ONE": real(1), "BITS": integer(info.nmant),
        "SHIFT": real(1.5 * 2**info.nmant), "MOST": real(2.0 ** (info.maxexp - 8)), "BIAS": integer(info.maxexp - 1),
        "ROOT": real(root).view(integer),
    }  # fmt: skip
    compile_ = njit(fastmath={"contract"})  # the order of these operations matters

    def function(name: str, lines: list[str], coefficients: np.ndarray) -> Callable[..., Any]:
        numbers = {f"P{k}": real(c) for k, c in enumerate(coefficients)}
        return compile_(_defined(name, "\n".join(lines), constants | numbers))

    return function("exp2", exp2, power), function("log2_1p", log2_1p, logarithm)


def _interpolated(function: Callable[..., Any], low: float, high: float, degree: int) -> np.ndarray:
    """Return the coefficients of the polynomial through the Chebyshev nodes, the lowest first."""
    fit = np.polynomial.chebyshev.Chebyshev.interpolate(function, degree, [low, high])
    return fit.convert(kind=np.polynomial.Polynomial).coef


def _horner(coefficients: np.ndarray) -> str:
    last = len(coefficients) - 1
    return functools.reduce(lambda text, k: f"({text} * f + P{k})", range(last - 1, -1, -1), f"P{last}")


def _product(plan: Plan) -> str:
    p, chunk, stride, width = plan.features, plan.chunk, plan.stride, "1" if plan.single else "t"
    rows = range(1 if plan.single and p <= _NARROW else _ROWS)
    kept, rhs = p * stride, (p + (0 if plan.single else _ROWS)) * stride  # first places in the buffer
    back = f"{rhs} + {width} * {stride}"
    entries = [f"z{k} = buffer[{k * stride} + j]" for k in range(p)] + [text for r in rows for text in _entry(plan, r)]
    lines = [
        "def product(left, right, rhs, lhs, out, back, numbers, r0, r1, c0, c1, keep, buffer):",
        "    t = len(rhs)",
    ]
    lines += [f"    f{i} = numbers[{i}]" for i in range(len(plan.terms))]
    lines += [f"    alpha{a} = numbers[{len(plan.terms) + a}]" for a in range(len(plan.atoms))]
    lines += [f"    for c in range(c0, c1, {chunk}):", f"        m = min({chunk}, c1 - c)"]
    for source, count, first in (("right", p, 0), ("rhs", width, rhs)):
        lines += [
            f"        for k in range({count}):",
            f"            for j in range(m): buffer[{first} + k * {stride} + j] = {source}[k, c + j]",
            f"            for j in range(m, {chunk}): buffer[{first} + k * {stride} + j] = ZERO",
        ]
    lines += [f"        for h in range(r0, r1, {_SUMMED}):", f"            last = min(h + {_SUMMED}, r1)"]
    if plan.both:
        lines += [f"            for j in range({width} * {stride}): buffer[{back} + j] = ZERO"]
    lines += [f"            for i in range(h, last, {len(rows)}):"]
    for r in rows:
        lines += [f"                i{r} = min(i + {r}, last - 1)"]
        lines += [f"                a{k}_{r} = left[{k}, i{r}]" for k in range(p)]
        if plan.both:  # a row beyond the last one does not count
            lines += [f"                on{r} = keep != ZERO and i + {r} < last"]
    if plan.single:
        sides = [("0", f"buffer[{rhs} + j]", f"buffer[{rhs + stride} + j]")]
        lines += _indented(4, _sums(plan, rows, sides, entries))
    else:
        again = [f"k{r} = buffer[{kept + r * stride} + j]" for r in rows]
        entries += [f"buffer[{kept + r * stride} + j] = k{r}" for r in rows]
        sides = [(f"k + {k}", f"y{k}[j]", f"b{k}[j]") for k in range(GROUP)]
        lines += _indented(4, [f"for j in range({chunk}):", *_indented(1, entries), f"for k in range(0, t, {GROUP}):"])
        for k, (side, _, _) in enumerate(sides):  # slices, so that the loops are vectorised though t is not known
            lines += [f"                    y{k} = buffer[{rhs} + ({side}) * {stride}:]"]
            lines += [f"                    b{k} = buffer[{back} + ({side}) * {stride}:]"] if plan.both else []
        lines += _indented(5, _sums(plan, rows, sides, again))
    if plan.both:
        lines += [
            f"            for k in range({width}):",
            f"                for j in range(m): back[k, c + j] += buffer[{back} + k * {stride} + j]",
        ]
    return "\n".join(lines)


def _indented(levels: int, lines: list[str]) -> list[str]:
    return ["    " * levels + line for line in lines]


def _sums(plan: Plan, rows: range, sides: list[tuple[str, str, str]], entries: list[str]) -> list[str]:
    """Return the lines that add up, for some rows, the products with some right-hand sides.

    :param sides: of each right-hand side its index, the number that an entry is multiplied by, and the mirrored sum.
    :param entries: lines that set ``k`` of each row.  One right-hand side takes one loop for both sums; others take a
        loop for each, over the kept entries.
    """
    lines = [f"s{k}_{r} = ZERO" for r in rows for k in range(len(sides))]
    if plan.both:
        mirrored = [(r, k, side) for r in rows for k, (side, _, _) in enumerate(sides)]
        lines += [f"w{k}_{r} = lhs[{side}, i{r}] if on{r} else ZERO" for r, k, side in mirrored]
    sums = [f"s{k}_{r} += k{r} * {y}" for r in rows for k, (_, y, _) in enumerate(sides)]
    back = [f"{b} += " + " + ".join(f"k{r} * w{k}_{r}" for r in rows) for k, (_, _, b) in enumerate(sides)]
    parts = [sums] if not plan.both else [sums + back] if plan.single else [sums, back]
    for part in parts:
        lines += [f"for j in range({plan.chunk}):", *_indented(1, entries + part)]
    for r in rows:
        own = [f"out[{side}, i{r}] += s{k}_{r}" for k, (side, _, _) in enumerate(sides)]
        lines += [f"if i + {r} < last:", *_indented(1, own)]
    return lines


def _entry(plan: Plan, r: int) -> list[str]:
    """Return the lines that make the entry ``k`` of a row and a column."""
    lines, first = [], 0
    for a, (profile, layout) in enumerate(plan.atoms):
        lines += ["q = ZERO"]
        for size, circle in layout:
            half = size // 2 if circle else 0
            for k in range(first, first + size - half):
                s = k + half
                difference = f"a{s}_{r} * z{k} - a{k}_{r} * z{s}" if circle else f"a{k}_{r} - z{k}"
                lines += [f"e = {difference}", f"q += {'abs(e)' if profile == LAPLACE.name else 'e * e'}"]
            first += size
        lines += [f"u = {_EXPONENTS.get(profile, 'sqrt(q)').format(a=a)}", "u = FURTHEST if u > FURTHEST else u"]
        lines += [f"v{a} = {_FACTORS.get(profile, 'ONE')} * exp2(u)"]
    products = [" * ".join(f"v{a}" for a in term) for term in plan.terms]
    if len(products) == 1:  # its coefficient is put into the result
        return [*lines, f"k{r} = {products[0] or 'ONE'}"]
    return [*lines, f"k{r} = {' + '.join(f'f{i} * {one}' if one else f'f{i}' for i, one in enumerate(products))}"]

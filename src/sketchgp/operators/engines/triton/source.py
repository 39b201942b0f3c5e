"""Source text of the Triton kernels of one expression, from the pieces in ``kernels``.

An expression has any number of atoms and terms.  Writing its kernels out as text, every atom with variables of its
own, keeps all structure out of the compiled code and needs nothing of Triton but its oldest features (it has no lists,
and tuples only of late).  ``repr`` of a plan says all that its source depends on.

Names in the text: ``x3``, ``z3`` the features of atom 3 for rows and columns (``x3l`` their low parts, ``x3n`` half
their squared norms), ``d3`` a tile of distances, ``v3`` of values, ``s3`` of slopes; ``f2`` the coefficient of term 2;
``c3`` chunks of features, ``cw`` blocks of right-hand sides; ``row``, ``col`` where the tile starts, ``x_start``,
``z_start`` the same in all of a batch; ``item`` the matrix of the batch, ``split`` the share of the columns, ``part``
the block of right-hand sides, or of features in a gradient.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from dataclasses import dataclass
from typing import Any

NUMBERS = ("x_rows", "z_rows", "row_blocks", "column_blocks", "steps", "splits", "parts", "items", "cw")


@dataclass(frozen=True)
class AtomPlan:
    """Constants by which one atom is computed.

    :ivar profile: its name, as of the functions in ``kernels``.
    :ivar dot: whether distances come from a matrix product, else from differences feature by feature.
    :ivar l1: whether absolute differences are summed.
    :ivar k: features in a chunk.
    :ivar alpha: whether there is a shape parameter.
    """

    profile: str
    dot: bool
    l1: bool
    k: int
    alpha: bool


@dataclass(frozen=True)
class Plan:
    """Constants that the source depends on.

    :ivar terms: the factors of each term, as of an ``Expression``.
    :ivar parts: numbers that one value is split into, 1 or 2.
    :ivar same: whether pairs on the diagonal are at distance 0.
    :ivar width: right-hand sides in a block.
    :ivar target: in a gradient, the atom whose features get one, with the number of features in a block.
    :ivar sums: in a gradient, whether to compute those of coefficients and shape parameters.
    """

    atoms: tuple[AtomPlan, ...]
    terms: tuple[tuple[int, ...], ...]
    parts: int
    same: bool
    width: int
    target: tuple[int, int] | None = None
    sums: bool = False

    @property
    def shapes(self) -> list[int]:
        """Atoms with a shape parameter."""
        return [a for a, atom in enumerate(self.atoms) if atom.alpha]


@functools.lru_cache(maxsize=256)
def compiled(plan: Plan, gradient: bool) -> Any:
    """Return the kernel of a plan: a product, or a gradient."""
    from triton import jit

    from . import kernels

    name = "gradient" if gradient else "product"
    text = (_gradient if gradient else _product)(plan)
    file = f"<sketchgp {name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads the source
    namespace = {**vars(kernels), "__name__": "sketchgp.generated"}
    exec(compile(text, file, "exec"), namespace)
    return jit(namespace[name], do_not_specialize=_numbers(plan))


def _product(plan: Plan) -> str:
    """``out[split, item] = K v`` for a block of rows and a share of the columns."""
    width, place = plan.width, f"cw * {plan.width}, part * {plan.width}"
    body = [*_start(plan), f"total = tl.zeros((BM, {width}), tl.float32)"]
    loop = [
        *_profiles(plan),
        f"kh, kl = split_parts({_sum(plan)}, PARTS)",
        f"b, bl = load_parts(v, vl, z_start, {place}, BN, {width}, PARTS)",
        "total += multiply(kh, kl, b, bl, PARTS)",
    ]
    body += ["for j in range(first, last):", *_indented(loop)]
    body += [f"put_block(out, slab * x_rows + row, {place}, total, BM, {width})"]
    return _function("product", plan, ["v", "vl", "out"], body)


def _gradient(plan: Plan) -> str:
    """Gradients of ``sum_ij W_ij K_ij``, ``W = L R^T``: features of rows, and sums over columns for parameters."""
    pointers = ["l", "ll", "r", "rl"]
    target, width = plan.target or (None, 0)
    quantities = [f"t{t}" for t in range(len(plan.terms))] + [f"q{a}" for a in plan.shapes] if plan.sums else []
    body = [*_start(plan), *(f"{name} = tl.zeros((BM,), tl.float32)" for name in quantities)]
    if target is not None:
        body += [f"acc = tl.zeros((BM, {width}), tl.float32)", "h_sum = tl.zeros((BM,), tl.float32)"]

    loop = [*_profiles(plan), f"w = cross(l, ll, x_start, r, rl, z_start, cw, BM, BN, {plan.width}, PARTS)"]
    if plan.sums:
        loop += [f"t{t} += tl.sum({_times('w', term)}, 1)" for t, term in enumerate(plan.terms)]
        loop += [f"q{a} += tl.sum(w * {_others(plan, a)} * o{a}, 1)" for a in plan.shapes]
    if target is not None:
        loop += _add_gradient(plan, target, width)
    body += ["for j in range(first, last):", *_indented(loop)]

    if target is not None:
        body += _own(plan, target, width) if plan.atoms[target].dot else []
        body += [f"put_block(g, slab * x_rows + row, parts * {width}, part * {width}, acc, BM, {width})"]
        pointers += ["g"]
    if quantities:
        stores = [
            f"put_vector(sums, (slab * {len(quantities)} + {i}) * x_rows + row, {name}, BM)"
            for i, name in enumerate(quantities)
        ]
        body += ["if part == 0:", *_indented(stores)]
        pointers += ["sums"]
    return _function("gradient", plan, pointers, body)


# --- parts of both ----------------------------------------------------------------------------------------------


def _function(name: str, plan: Plan, pointers: list[str], body: list[str]) -> str:
    """Return the text of a kernel.

    :param pointers: those beside the pointers to the atoms.
    """
    atoms: list[str] = []
    for a, atom in enumerate(plan.atoms):
        for side in (f"x{a}", f"z{a}"):
            atoms += [side, f"{side}l", f"{side}n"] if atom.dot else [side]
        atoms += [f"alpha{a}"] if atom.alpha else []
    arguments = [*atoms, "coefficients", *pointers, *_numbers(plan), "BM: tl.constexpr", "BN: tl.constexpr"]
    lines = [f"PARTS: tl.constexpr = {plan.parts}", *body]
    return "\n".join([f"def {name}({', '.join(arguments)}):", *_indented(lines), ""])


def _numbers(plan: Plan) -> list[str]:
    return [*NUMBERS, *(f"c{a}" for a in range(len(plan.atoms)))]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _start(plan: Plan) -> list[str]:
    """Return the lines that find the place of a program and load what does not depend on the columns."""
    lines = [
        "pid = tl.program_id(0)",
        "row = pid % row_blocks * BM",
        "rest = pid // row_blocks",
        "split = rest % splits",
        "rest = rest // splits",
        "part = rest % parts",
        "item = (rest // parts).to(tl.int64)",
        "slab = split * items + item",
        "x_rows = x_rows.to(tl.int64)",  # offsets may pass 2^31
        "z_rows = z_rows.to(tl.int64)",
        "x_start = item * x_rows + row",
        "first = split * steps",
        "last = tl.minimum(first + steps, column_blocks)",
    ]
    lines += [f"f{t} = tl.load(coefficients + item * {len(plan.terms)} + {t})" for t in range(len(plan.terms))]
    for a, atom in enumerate(plan.atoms):
        lines += [f"a{a} = tl.load(alpha{a} + item)"] if atom.alpha else []
        lines += [f"n{a} = vector(x{a}n, x_start, BM)"] if atom.dot else []
    return lines


def _profiles(plan: Plan) -> list[str]:
    """The tiles ``d0, d1, ...`` of distances, ``v0, v1, ...`` of values and ``s0, s1, ...`` of slopes."""
    lines = ["col = j * BN", "z_start = item * z_rows + col"]
    for a, atom in enumerate(plan.atoms):
        if atom.dot:
            place = f"x{a}, x{a}l, x_start, z{a}, z{a}l, z_start, c{a}"
            lines += [f"d{a} = cross({place}, BM, BN, {atom.k}, PARTS)"]
            # what a program passes over is loaded late, and takes registers for a short time
            lines += [f"d{a} = n{a}[:, None] + vector(z{a}n, z_start, BN)[None, :] - d{a}"]
        else:
            lines += [f"d{a} = differences({_vectors(plan, a)}, c{a}, BM, BN, {atom.k}, {atom.l1})"]
    lines += _zero_diagonal(plan, [f"d{a}" for a, atom in enumerate(plan.atoms) if atom.dot])
    for a, atom in enumerate(plan.atoms):  # the compiler drops slopes that nothing uses
        results, alpha = (f"v{a}, s{a}, o{a}", f"a{a}") if atom.alpha else (f"v{a}, s{a}", "0.0")
        lines += [f"{results} = {atom.profile}(d{a}, {alpha})"]
    return lines


def _zero_diagonal(plan: Plan, tiles: list[str]) -> list[str]:
    """Return lines that put exact zeros for a point and itself; tiles by differences have them anyway."""
    if not (plan.same and tiles):
        return []
    lines = ["if (col < row + BM) & (row < col + BN):"]
    lines += ["    apart = (row + tl.arange(0, BM))[:, None] != (col + tl.arange(0, BN))[None, :]"]
    return lines + [f"    {tile} = tl.where(apart, {tile}, 0.0)" for tile in tiles]


def _vectors(plan: Plan, a: int) -> str:
    """Return the arguments that locate the features of an atom computed by differences."""
    features = f"item * c{a} * {plan.atoms[a].k}"
    return f"x{a}, {features} * x_rows + row, x_rows, z{a}, {features} * z_rows + col, z_rows"


def _times(first: str, term: tuple[int, ...]) -> str:
    """Return the product with the values of some atoms."""
    return " * ".join([first, *(f"v{a}" for a in term)])


def _sum(plan: Plan) -> str:
    """Return the sum that gives the kernel's values."""
    total = " + ".join(_times(f"f{t}", term) for t, term in enumerate(plan.terms))
    return total if any(plan.terms) else f"tl.zeros((BM, BN), tl.float32) + ({total})"


def _others(plan: Plan, a: int) -> str:
    """Return ``dK / dphi_a``."""
    result = [
        _times(f"f{t}", term[:i] + term[i + 1 :])
        for t, term in enumerate(plan.terms)
        for i, factor in enumerate(term)
        if factor == a
    ]
    return f"({' + '.join(result)})"


def _add_gradient(plan: Plan, a: int, width: int) -> list[str]:
    """Add one tile's share of the gradient of the features of atom ``a``."""
    atom = plan.atoms[a]
    lines = [f"h = w * {_others(plan, a)} * s{a}"]
    if not atom.dot:
        last = f"tl.minimum(part * {width} + {width}, c{a} * {atom.k})"
        return [
            *lines,
            f"acc = difference_gradients(acc, h, {_vectors(plan, a)}, part * {width}, {last}, "
            f"BM, BN, {width}, {atom.l1})",
        ]
    lines += _zero_diagonal(plan, ["h"])  # what these entries add cancels, but for rounding
    # with one part, rows are summed as they are multiplied: the gradient is then of differences, without cancellation
    return [
        *lines,
        "hh, hl = split_parts(h, PARTS)",
        f"h_sum += tl.sum({'h' if plan.parts > 1 else 'hh'}, 1)",
        f"e, el = {_wide(plan, a, width, 'z', 'BN')}",
        "acc += multiply(hh, hl, e, el, PARTS)",
    ]


def _own(plan: Plan, a: int, width: int) -> list[str]:
    """Complete the gradient by the features of the rows, those that ``acc`` is about, in float32."""
    features = "b + bl" if plan.parts > 1 else "b"
    return [f"b, bl = {_wide(plan, a, width, 'x', 'BM')}", f"acc = h_sum[:, None] * ({features}) - acc"]


def _wide(plan: Plan, a: int, width: int, side: str, size: str) -> str:
    """Return the call that loads the features that ``acc`` is about."""
    place = f"{side}_start, c{a} * {plan.atoms[a].k}, part * {width}"
    return f"load_parts({side}{a}, {side}{a}l, {place}, {size}, {width}, PARTS)"

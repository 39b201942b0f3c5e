"""Source text of the Triton kernels of one expression, from the pieces in ``kernels``.

An expression has any number of atoms and terms.  Writing its kernels out as text, every atom with variables of its
own, keeps all structure out of the compiled code and needs nothing of Triton but its oldest features (it has no lists,
and tuples only of late).  ``repr`` of a plan says all that its source depends on.

Names in the text: ``x3``, ``z3`` the features of atom 3 for rows and columns (``x3l`` their low parts, ``x3n`` half
their squared norms), ``d3`` a tile of distances, ``v3`` of values, ``s3`` of slopes; ``f2`` the coefficient of term 2;
``c3`` chunks of features; ``row``, ``col`` where the tile starts; ``item`` the matrix of the batch, ``split`` the share
of the columns, ``part`` the block of right-hand sides, or of features in a gradient.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from dataclasses import dataclass
from typing import Any

_NUMBERS = ("x_rows", "z_rows", "row_blocks", "column_blocks", "steps", "splits", "parts", "items")


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

    @property
    def more(self) -> list[str]:
        """Suffix of the name of the low part, where there is one."""
        return ["l"][: self.parts - 1]

    def both(self, name: str) -> str:
        """Return the two arguments that hold the parts of ``name``; a single part is passed twice."""
        return f"{name}, {name}{'l' if self.parts > 1 else ''}"

    def pointers(self, name: str) -> list[str]:
        """Return the names of the pointers to the parts."""
        return [f"{name}{end}" for end in ("", *self.more)]

    def loads(self, name: str, load: str) -> list[str]:
        """Statements that load the parts.

        :param load: the expression, with ``{}`` where the pointer's name ends.
        """
        return [f"{name}{end} = {load.format(end)}" for end in ("", *self.more)]


@functools.lru_cache(maxsize=256)
def compiled(plan: Plan, gradient: bool) -> Any:
    """The kernel of a plan: a product, or a gradient."""
    from triton import jit

    from . import kernels

    name = "gradient" if gradient else "product"
    text, counts = (_gradient if gradient else _product)(plan)
    file = f"<sketchgp {name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads the source
    namespace = {**vars(kernels), "__name__": "sketchgp.generated"}
    exec(compile(text, file, "exec"), namespace)
    return jit(namespace[name], do_not_specialize=[*_NUMBERS, *counts])


def _product(plan: Plan) -> tuple[str, list[str]]:
    """``out[split, item] = K v`` for a block of rows and a share of the columns."""
    pointers, counts = _features(plan)
    loop = [*_columns(plan), *_profiles(plan)]
    loop += [f"k = {_sum(plan)}"]
    loop += plan.loads("b", f"block(v{{}}, (item * parts + part) * z_rows + col, BN, {plan.width})")
    loop += [*_split("k"), f"total += multiply(kh, kl, {plan.both('b')}, PARTS)"]
    body = [*_start(plan), f"total = tl.zeros((BM, {plan.width}), tl.float32)"]
    body += ["for j in range(first, last):", *_indented(loop)]
    body += [f"put_block(out, (slab * parts + part) * x_rows + row, total, BM, {plan.width})"]
    return _function("product", plan, [*pointers, *plan.pointers("v"), "out"], counts, body), counts


def _gradient(plan: Plan) -> tuple[str, list[str]]:
    """Gradients of ``sum_ij W_ij K_ij``, ``W = L R^T``: features of rows, and sums over columns for parameters."""
    pointers, counts = _features(plan)
    pointers += [*plan.pointers("l"), *plan.pointers("r")]
    target, width = plan.target or (None, 0)
    quantities = [f"t{t}" for t in range(len(plan.terms))] + [f"q{a}" for a in plan.shapes] if plan.sums else []
    body = [*_start(plan), *(f"{name} = tl.zeros((BM,), tl.float32)" for name in quantities)]
    if target is not None:
        body += [f"acc = tl.zeros((BM, {width}), tl.float32)", "h_sum = tl.zeros((BM,), tl.float32)"]

    loop = [*_columns(plan), *_profiles(plan)]
    loop += [
        f"w = cross_chunks({plan.both('l')}, item * cw * x_rows + row, x_rows, {plan.both('r')}, "
        f"item * cw * z_rows + col, z_rows, cw, BM, BN, {plan.width}, PARTS)"
    ]
    if plan.sums:
        loop += [f"t{t} += tl.sum({_times('w', *_factors(term))}, 1)" for t, term in enumerate(plan.terms)]
        loop += [f"q{a} += tl.sum(w * {_others(plan, a)} * o{a}, 1)" for a in plan.shapes]
    if target is not None:
        loop += _add_gradient(plan, target, width)
    body += ["for j in range(first, last):", *_indented(loop)]

    if target is not None:
        body += _own(plan, target, width) if plan.atoms[target].dot else []
        body += [f"put_block(g, (slab * parts + part) * x_rows + row, acc, BM, {width})"]
        pointers += ["g"]
    if quantities:
        stores = [
            f"put_vector(sums, (slab * {len(quantities)} + {i}) * x_rows + row, {name}, BM)"
            for i, name in enumerate(quantities)
        ]
        body += ["if part == 0:", *_indented(stores)]
        pointers += ["sums"]
    return _function("gradient", plan, pointers, [*counts, "cw"], body), [*counts, "cw"]


# --- parts of both ----------------------------------------------------------------------------------------------


def _split(name: str) -> list[str]:
    """Statements that make the parts of a tile in registers."""
    return [f"{name}h = high({name}, PARTS)", f"{name}l = low({name}, {name}h, PARTS)"]


def _function(name: str, plan: Plan, pointers: list[str], counts: list[str], body: list[str]) -> str:
    arguments = [*pointers, *_NUMBERS, *counts, "BM: tl.constexpr", "BN: tl.constexpr"]
    lines = [f"PARTS: tl.constexpr = {plan.parts}", *body]
    return "\n".join([f"def {name}({', '.join(arguments)}):", *_indented(lines), ""])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _features(plan: Plan) -> tuple[list[str], list[str]]:
    """Pointers and numbers of chunks that hold the atoms."""
    pointers, counts = [], []
    for a, atom in enumerate(plan.atoms):
        for side in (f"x{a}", f"z{a}"):
            pointers += [*plan.pointers(side), f"{side}n"] if atom.dot else [side]
        pointers += [f"alpha{a}"] if atom.alpha else []
        counts += [f"c{a}"] if atom.looped else []
    return [*pointers, "coefficients"], counts


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
        if atom.dot and not atom.looped:
            lines += plan.loads(f"b{a}", f"block(x{a}{{}}, x_start, BM, {atom.k})")
    return lines


def _columns(plan: Plan) -> list[str]:
    """The columns of the tile ``j``, and their features where they are one chunk."""
    lines = ["col = j * BN", "z_start = item * z_rows + col"]
    for a, atom in enumerate(plan.atoms):
        if atom.dot and not atom.looped:
            lines += plan.loads(f"e{a}", f"block(z{a}{{}}, z_start, BN, {atom.k})")
    return lines


def _profiles(plan: Plan) -> list[str]:
    """The tiles ``d0, d1, ...`` of distances, ``v0, v1, ...`` of values and ``s0, s1, ...`` of slopes."""
    lines: list[str] = []
    for a, atom in enumerate(plan.atoms):
        if not atom.dot:
            lines += [f"d{a} = differences({_vectors(plan, a)}, {_count(plan, a)}, BM, BN, {atom.k}, {atom.l1})"]
            continue
        if atom.looped:
            lines += [
                f"d{a} = cross_chunks({plan.both(f'x{a}')}, item * c{a} * x_rows + row, x_rows, "
                f"{plan.both(f'z{a}')}, item * c{a} * z_rows + col, z_rows, c{a}, BM, BN, {atom.k}, PARTS)"
            ]
        else:
            lines += [f"d{a} = cross({plan.both(f'b{a}')}, {plan.both(f'e{a}')}, PARTS)"]
        # what a program passes over is loaded late, and takes registers for a short time
        lines += [f"d{a} = n{a}[:, None] + vector(z{a}n, z_start, BN)[None, :] - d{a}"]
    lines += _zero_diagonal(plan, [f"d{a}" for a, atom in enumerate(plan.atoms) if atom.dot])
    for a, atom in enumerate(plan.atoms):  # the compiler drops slopes that nothing uses
        results, alpha = (f"v{a}, s{a}, o{a}", f"a{a}") if atom.alpha else (f"v{a}, s{a}", "0.0")
        lines += [f"{results} = {atom.profile}(d{a}, {alpha})"]
    return lines


def _zero_diagonal(plan: Plan, tiles: list[str]) -> list[str]:
    """Exact zeros for a point and itself; tiles computed by differences have them anyway."""
    if not (plan.same and tiles):
        return []
    lines = ["if (col < row + BM) & (row < col + BN):"]
    lines += ["    apart = (row + tl.arange(0, BM))[:, None] != (col + tl.arange(0, BN))[None, :]"]
    return lines + [f"    {tile} = tl.where(apart, {tile}, 0.0)" for tile in tiles]


def _count(plan: Plan, a: int) -> str:
    return f"c{a}" if plan.atoms[a].looped else "1"


def _vectors(plan: Plan, a: int) -> str:
    """Return the arguments that locate the features of an atom computed by differences."""
    features = f"item * {_count(plan, a)} * {plan.atoms[a].k}"
    return f"x{a}, {features} * x_rows + row, x_rows, z{a}, {features} * z_rows + col, z_rows"


def _factors(term: tuple[int, ...]) -> list[str]:
    return [f"v{a}" for a in term]


def _times(*factors: str) -> str:
    return " * ".join(factors)


def _sum(plan: Plan) -> str:
    """The kernel's values."""
    total = " + ".join(_times(f"f{t}", *_factors(term)) for t, term in enumerate(plan.terms))
    return total if any(plan.terms) else f"tl.zeros((BM, BN), tl.float32) + ({total})"


def _others(plan: Plan, a: int) -> str:
    """``dK / dphi_a``."""
    result = [
        _times(f"f{t}", *_factors(term[:i] + term[i + 1 :]))
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
        last = f"tl.minimum(part * {width} + {width}, {_count(plan, a)} * {atom.k})"
        return [
            *lines,
            f"acc = difference_gradients(acc, h, {_vectors(plan, a)}, part * {width}, {last}, "
            f"BM, BN, {width}, {atom.l1})",
        ]
    lines += _zero_diagonal(plan, ["h"])  # what these entries add cancels, but for rounding
    lines += _split("h")
    # with one part, rows are summed as they are multiplied: the gradient is then of differences, without cancellation
    lines += [f"h_sum += tl.sum({'h' if plan.parts > 1 else 'hh'}, 1)"]
    if atom.looped:
        lines += plan.loads(f"e{a}", _wide(plan, a, width, "z", "col", "BN"))
    return [*lines, f"acc += multiply(hh, hl, {plan.both(f'e{a}')}, PARTS)"]


def _own(plan: Plan, a: int, width: int) -> list[str]:
    """Complete the gradient by the features of the rows, those that ``acc`` is about, in float32."""
    lines = plan.loads(f"b{a}", _wide(plan, a, width, "x", "row", "BM")) if plan.atoms[a].looped else []
    return [*lines, f"acc = h_sum[:, None] * ({' + '.join(plan.pointers(f'b{a}'))}) - acc"]


def _wide(plan: Plan, a: int, width: int, side: str, start: str, size: str) -> str:
    """Return the call that loads the features of a block of chunks, as :meth:`Plan.loads` takes it."""
    k = plan.atoms[a].k
    place = f"item * c{a} * {side}_rows + {start}, {side}_rows, part * {width // k}, c{a}"
    return f"wide_block({side}{a}{{}}, {place}, {size}, {width}, {k})"

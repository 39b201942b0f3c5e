"""Source text of the Triton kernels of one expression, from the pieces in ``kernels``.

An expression has any number of atoms and terms.  Writing its kernels out as text, every atom with variables of its
own, keeps all structure out of the compiled code and needs nothing of Triton but its oldest features (it has no lists,
and tuples only of late).  ``repr`` of a plan says all that its source depends on.

Names in the text: ``x3``, ``z3`` the features of atom 3 for rows and columns (``x3l`` their low parts, ``x3n`` half
their squared norms), ``d3`` a tile of distances, ``v3`` of values, ``s3`` of slopes; ``c3``
chunks of features; ``row``, ``col`` where the tile starts; ``item`` the matrix of the batch, ``split`` the share of the
columns, ``part`` the block of right-hand sides, or of features in a gradient.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

from .layout import Plan

_PARTS_OF = "{0}h, {0}l"  # as :func:`_split` names them
_NUMBERS = ("x_rows", "z_rows", "row_blocks", "column_blocks", "steps", "splits", "parts", "items")


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
    pointers += ["v", *(f"v{end}" for end in plan.more)] if plan.dot else ["v"]
    columns = range(plan.width)
    body = [*_start(plan)]
    if plan.dot:
        body += [f"total = tl.zeros((BM, {plan.width}), tl.float32)"]
    else:
        body += [f"total{i} = tl.zeros((BM,), tl.float32)" for i in columns]
    loop = [*_columns(plan), *_distances(plan)]
    loop += _values(plan)
    if plan.dot:
        start = f"(item * parts + part) * z_rows + col, BN, {plan.width}"
        loop += plan.loads("vh", f"block(v{{}}, {start})")
        loop += [*_split("k", "k"), f"total += multiply({_PARTS_OF.format('k')}, {plan.both('vh')}, PARTS, INPUT)"]
    else:
        loop += [f"r{i} = vector(v, (item * {plan.width} + {i}) * z_rows + col, BN)" for i in columns]
        loop += [f"total{i} += tl.sum(k * r{i}[None, :], 1)" for i in columns]
    body += ["for j in range(first, last):", *_indented(loop)]
    scale = " * f0" if len(plan.terms) == 1 else ""
    if plan.dot:
        body += [f"put_block(out, (slab * parts + part) * x_rows + row, total{scale}, BM, {plan.width})"]
    else:
        body += [f"put_vector(out, (slab * {plan.width} + {i}) * x_rows + row, total{i}{scale}, BM)" for i in columns]
    return _function("product", plan, [*pointers, "out"], counts, body), counts


def _gradient(plan: Plan) -> tuple[str, list[str]]:
    """Gradients of ``sum_ij W_ij K_ij``, ``W = L R^T``: features of rows, and sums over columns for parameters."""
    pointers, counts = _features(plan)
    pointers += [f"{side}{end}" for side in "lr" for end in ["", *(plan.more if plan.dot else [])]]
    counts += ["cw"] if plan.looped else []
    body = [*_start(plan)]
    if plan.dot and not plan.looped:
        body += plan.loads("lb", f"block(l{{}}, x_start, BM, {plan.width})")
    elif not plan.dot:
        body += [f"l{i} = vector(l, (item * {plan.width} + {i}) * x_rows + row, BM)" for i in range(plan.width)]
    targets = dict(plan.targets)
    for a, width in targets.items():
        body += [f"acc{a} = tl.zeros((BM, {width}), tl.float32)"]
        body += [f"h{a}_sum = tl.zeros((BM,), tl.float32)"] if plan.atoms[a].dot else []
    quantities = [f"t{t}" for t in range(len(plan.terms))] + [f"q{a}" for a in plan.shapes] if plan.sums else []
    body += [f"{name} = tl.zeros((BM,), tl.float32)" for name in quantities]

    loop = [*_columns(plan), *_distances(plan)]
    for a, atom in enumerate(plan.atoms):
        results = f"v{a}, s{a}, o{a}" if atom.alpha else f"v{a}, s{a}"
        loop += [f"{results} = {atom.profile}_slope(d{a}, {_alpha(plan, a)})"]
    if plan.looped:
        loop += [
            f"w = cross_chunks({plan.both('l')}, item * cw * x_rows + row, x_rows, {plan.both('r')}, "
            f"item * cw * z_rows + col, z_rows, cw, BM, BN, {plan.width}, PARTS, INPUT)"
        ]
    elif plan.dot:
        start = f"z_start, BN, {plan.width}"
        loop += plan.loads("rb", f"block(r{{}}, {start})")
        loop += [f"w = cross({plan.both('lb')}, {plan.both('rb')}, PARTS, INPUT)"]
    else:
        loop += [f"r{i} = vector(r, (item * {plan.width} + {i}) * z_rows + col, BN)" for i in range(plan.width)]
        loop += ["w = " + " + ".join(f"l{i}[:, None] * r{i}[None, :]" for i in range(plan.width))]
    if plan.sums:
        loop += [f"t{t} += tl.sum({_times('w', _factors(term))}, 1)" for t, term in enumerate(plan.terms)]
    for a, atom in enumerate(plan.atoms):
        if a in targets or (plan.sums and atom.alpha):
            loop += [f"w{a} = {_others(plan, a)}"]
        if plan.sums and atom.alpha:
            loop += [f"q{a} += tl.sum(w{a} * o{a}, 1)"]
        if a in targets:
            loop += _add_gradient(plan, a, targets[a])
    body += ["for j in range(first, last):", *_indented(loop)]

    scale = " * f0" if len(plan.terms) == 1 else ""
    for a, width in targets.items():
        if plan.atoms[a].dot:
            body += _own(plan, a, width)
            body += [f"acc{a} = h{a}_sum[:, None] * own{a} - acc{a}"]
        body += [f"put_block(g{a}, (slab * parts + part) * x_rows + row, acc{a}{scale}, BM, {width})"]
    stores = [
        f"put_vector(sums, (slab * {len(quantities)} + {i}) * x_rows + row, "
        f"{name}{scale if name.startswith('q') else ''}, BM)"
        for i, name in enumerate(quantities)
    ]
    body += ["if part == 0:", *_indented(stores)] if stores else []
    pointers += [f"g{a}" for a in targets] + (["sums"] if plan.sums else [])
    return _function("gradient", plan, pointers, counts, body), counts


# --- parts of both ----------------------------------------------------------------------------------------------


def _split(value: str, name: str) -> list[str]:
    """Statements that make the parts of a tile in registers."""
    return [f"{name}h = high({value}, MODE)", f"{name}l = low({value}, {name}h, PARTS)"]


def _function(name: str, plan: Plan, pointers: list[str], counts: list[str], body: list[str]) -> str:
    arguments = [*pointers, *_NUMBERS, *counts, "BM: tl.constexpr", "BN: tl.constexpr"]
    parts, product, mode = plan.arithmetic
    constants = [f"PARTS: tl.constexpr = {parts}", f"INPUT: tl.constexpr = {product!r}"]
    constants += [f"MODE: tl.constexpr = {mode!r}"]
    return "\n".join([f"def {name}({', '.join(arguments)}):", *_indented(constants + body), ""])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _features(plan: Plan) -> tuple[list[str], list[str]]:
    """Pointers and numbers of chunks that hold the atoms."""
    pointers, counts = [] if all(atom.dot for atom in plan.atoms) else ["nothing"], []
    for a, atom in enumerate(plan.atoms):
        for side in "xz":
            pointers += [f"{side}{a}"]
            pointers += [f"{side}{a}n"] if atom.dot else []
            pointers += [f"{side}{a}{end}" for end in plan.more] if atom.dot else []
        pointers += [f"alpha{a}"] if atom.alpha else []
        counts += [f"c{a}"] if atom.looped else []
    return [*pointers, "coefficients"], counts


def _start(plan: Plan) -> list[str]:
    """Return the lines that find the place of a program and load its constants."""
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
    return [*lines, *_once(plan), *_side(plan, "x")]


def _once(plan: Plan) -> list[str]:
    """Return the lines that do not depend on rows and columns."""
    lines: list[str] = []
    terms = len(plan.terms)
    if not all(atom.dot for atom in plan.atoms):
        lines += ["nothing_x = block(nothing, 0, BM, 16)", "nothing_z = block(nothing, 0, BN, 16)"]
    lines += [f"f{t} = tl.load(coefficients + item * {terms} + {t})" for t in range(terms)]
    for a, atom in enumerate(plan.atoms):
        lines += [f"a{a} = tl.load(alpha{a} + item)"] if atom.alpha else []
    return lines


def _side(plan: Plan, side: str) -> list[str]:
    """The norms, and the features that are one chunk, of a tile's rows (side "x") or columns ("z")."""
    lines: list[str] = []
    features, size = ("b", "BM") if side == "x" else ("e", "BN")
    for a, atom in enumerate(plan.atoms):
        if atom.dot and side == "x":
            lines += [f"n{a} = vector(x{a}n, x_start, BM)"]
        if atom.dot and not atom.looped:
            lines += plan.loads(f"{features}{a}", f"block({side}{a}{{}}, {side}_start, {size}, {atom.k})")
    return lines


def _columns(plan: Plan) -> list[str]:
    """The columns of the tile ``j``."""
    return ["col = j * BN", "z_start = item * z_rows + col", *_side(plan, "z")]


def _distances(plan: Plan) -> list[str]:
    """The tiles ``d0, d1, ...``."""
    lines: list[str] = []
    if not all(atom.dot for atom in plan.atoms):
        # Zeros by a product of matrices: its result lies among the threads as those of other products do, so that tiles
        # need not be rearranged, and each thread reads few entries of rows and columns and sums up many.
        old = plan.arithmetic[1] == "ieee"
        product = "tl.dot(nothing_x, tl.trans(nothing_z), input_precision=INPUT)"
        lines += ["zero = tl.zeros((BM, BN), tl.float32)" if old else f"zero = {product}"]
    for a, atom in enumerate(plan.atoms):
        if not atom.dot:
            lines += [f"d{a} = differences(zero, {_vectors(plan, a)}, {_count(plan, a)}, BM, BN, {atom.k}, {atom.l1})"]
            continue
        if atom.looped:
            lines += [
                f"d{a} = cross_chunks({plan.both(f'x{a}')}, item * c{a} * x_rows + row, x_rows, "
                f"{plan.both(f'z{a}')}, item * c{a} * z_rows + col, z_rows, c{a}, BM, BN, {atom.k}, PARTS, INPUT)"
            ]
        else:
            lines += [f"d{a} = cross({plan.both(f'b{a}')}, {plan.both(f'e{a}')}, PARTS, INPUT)"]
        # what a program passes over is loaded late, and takes registers for a short time
        lines += [f"d{a} = n{a}[:, None] + vector(z{a}n, z_start, BN)[None, :] - d{a}"]
    return lines + _zero_diagonal(plan, [f"d{a}" for a, atom in enumerate(plan.atoms) if atom.dot])


def _values(plan: Plan) -> list[str]:
    """The tile ``k``, but for the coefficient of a single term."""
    lines = [f"v{a} = {atom.profile}(d{a}, {_alpha(plan, a)})" for a, atom in enumerate(plan.atoms)]
    return [*lines, f"k = {_sum(plan)}"]


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


def _alpha(plan: Plan, a: int) -> str:
    return f"a{a}" if plan.atoms[a].alpha else "0.0"


def _factors(term: tuple[int, ...]) -> list[str]:
    return [f"v{a}" for a in term]


def _times(*factors: str | list[str]) -> str:
    flat = [f for group in factors for f in ([group] if isinstance(group, str) else group)]
    return " * ".join(flat)


def _sum(plan: Plan) -> str:
    """The kernel's values; the coefficient of a single term is multiplied in at the end."""
    if not any(plan.terms):
        constant = "1.0" if len(plan.terms) == 1 else " + ".join(f"f{t}" for t in range(len(plan.terms)))
        return f"tl.zeros((BM, BN), tl.float32) + ({constant})"
    if len(plan.terms) == 1:
        return _times(_factors(plan.terms[0]))
    return " + ".join(_times(f"f{t}", _factors(term)) for t, term in enumerate(plan.terms))


def _others(plan: Plan, a: int) -> str:
    """``W dK / dphi_a``, but for the coefficient of a single term."""
    result = []
    for t, term in enumerate(plan.terms):
        for i in [i for i, factor in enumerate(term) if factor == a]:
            others = _factors(term[:i] + term[i + 1 :])
            result += [others if len(plan.terms) == 1 else [f"f{t}", *others]]
    if result == [[]]:
        return "w"
    return f"w * ({' + '.join(_times(group) or '1.0' for group in result)})"


def _add_gradient(plan: Plan, a: int, width: int) -> list[str]:
    """Add one tile's share of the gradient of the features of atom ``a``."""
    atom = plan.atoms[a]
    lines = [f"h{a} = w{a} * s{a}"]
    if not atom.dot:
        last = f"tl.minimum(part * {width} + {width}, {_count(plan, a)} * {atom.k})"
        return [
            *lines,
            f"acc{a} = difference_gradients(acc{a}, h{a}, {_vectors(plan, a)}, part * {width}, {last}, "
            f"BM, BN, {width}, {atom.l1})",
        ]
    lines += _zero_diagonal(plan, [f"h{a}"])  # what these entries add cancels, but for rounding
    lines += _split(f"h{a}", f"h{a}")
    # with one part, rows are summed as they are multiplied: the gradient is then of differences, without cancellation
    lines += [f"h{a}_sum += tl.sum(h{a}{'' if plan.parts > 1 else 'h'}, 1)"]
    if atom.looped:
        chunk = f"item * c{a} * z_rows + col, z_rows, part * {width // atom.k}, c{a}, BN, {width}, {atom.k}"
        lines += plan.loads(f"e{a}", f"wide_block(z{a}{{}}, {chunk})")
    return [*lines, f"acc{a} += multiply({_PARTS_OF.format(f'h{a}')}, {plan.both(f'e{a}')}, PARTS, INPUT)"]


def _own(plan: Plan, a: int, width: int) -> list[str]:
    """The features of the rows, those that ``acc`` is about, in float32."""
    atom = plan.atoms[a]
    if atom.looped:
        chunk = f"item * c{a} * x_rows + row, x_rows, part * {width // atom.k}, c{a}, BM, {width}, {atom.k}"
        lines = [f"own{a} = wide_block(x{a}, {chunk})"]
        return [*lines, *(f"own{a} += wide_block(x{a}{end}, {chunk})" for end in plan.more)]
    lines = [f"own{a} = b{a}"]
    return [*lines, *(f"own{a} += b{a}{end}" for end in plan.more)]

"""Source text of the Triton kernel that evaluates each pair of points once, for both of its rows (see ``source``).

Blocks of BN points stand in a circle.  Program ``own`` keeps block ``own`` as columns, and passes as rows over the
blocks that are ``offset = 0, 1, ..., blocks // 2`` further on: each pair of blocks is met once, and every program has
as many.  A tile is added to the sums of the columns, entry by entry in registers, and its rows are summed up and
stored: for one offset the rows of all programs make up one whole vector, so what programs store lies in slabs, one for
each offset, that are full, and are added up in a fixed order.  The slabs come behind those of the columns' sums.
"""

from __future__ import annotations

from .plan import Plan
from .source import _distances, _features, _function, _indented, _once, _side, _values

NUMBERS = ("x_rows", "blocks", "begin", "end", "steps", "splits", "items")


def product(plan: Plan) -> tuple[str, list[str]]:
    """``out[split, item]``, the sums of columns of a share of the offsets, and ``out[splits + offset - begin, item]``,
    those of rows, for the offsets ``begin <= offset < end``."""
    pointers, counts = _features(plan)
    columns, scale = range(plan.width), " * f0" if len(plan.terms) == 1 else ""
    body = [
        "pid = tl.program_id(0)",
        "own = pid % blocks",
        "rest = pid // blocks",
        "split = rest % splits",
        "item = (rest // splits).to(tl.int64)",
        "x_rows = x_rows.to(tl.int64)",  # offsets may pass 2^31
        "z_rows = x_rows",
        "col = own * BN",
        "z_start = item * z_rows + col",
        "first = begin + split * steps",
        "last = tl.minimum(first + steps, end)",
        *_once(plan),
        *_side(plan, "z"),
    ]
    for i in columns:
        body += [f"r{i} = vector(v, (item * {plan.width} + {i}) * z_rows + col, BN)"]
        body += [f"total{i} = tl.zeros((BM, BN), tl.float32)"]
    loop = [
        "offset = j // (BN // BM)",
        "other = own + offset",
        "other = tl.where(other >= blocks, other - blocks, other)",
        "row = other * BN + j % (BN // BM) * BM",
        "x_start = item * x_rows + row",
        # of an even number of blocks, those that face each other meet twice; and a block meets itself as a whole
        "met = tl.where((offset * 2 == blocks) & (own >= offset), 0.0, 1.0)",
        "mirrored = tl.where(offset == 0, 0.0, met)",
        "slab = (splits + offset - begin) * items + item",
        *_side(plan, "x"),
        *_distances(plan),
        *_values(plan),
    ]
    for i in columns:
        loop += [
            f"w{i} = vector(v, (item * {plan.width} + {i}) * x_rows + row, BM) * met",
            f"total{i} += k * w{i}[:, None]",
            f"put_vector(out, (slab * {plan.width} + {i}) * x_rows + row, "
            f"tl.sum(k * r{i}[None, :], 1) * mirrored{scale}, BM)",
        ]
    body += ["for j in range(first * (BN // BM), last * (BN // BM)):", *_indented(loop)]
    body += [
        f"put_vector(out, ((split * items + item) * {plan.width} + {i}) * x_rows + col, tl.sum(total{i}, 0){scale}, BN)"
        for i in columns
    ]
    return _function("product", plan, [*pointers, "v", "out"], counts, body, NUMBERS), counts

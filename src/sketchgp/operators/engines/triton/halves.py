"""Products with a symmetric matrix that evaluate each pair of points once: what is launched (``half_source``)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .blocks import Blocks
from .layout import padded
from .plan import Plan
from .source import compiled

SLABS = 2**26  # bytes of partial sums, unless they are fewer than 8 vectors
_LEAST = 8


def halved(plan: Plan, blocks: Blocks, n: int, items: int, programs: int, arguments: dict[str, Any]) -> Tensor:
    """``K v`` in the units of the kernel, ``(B, width, padded n)``, whose last rows are anything.

    :param blocks: the smaller of their two sizes is taken for the rows.
    :param programs: that keep the device busy.
    :param arguments: of the kernel: features, vectors, scales.
    """
    device = arguments["v"].device
    low, high = sorted(blocks[:2])
    blocks = blocks._replace(rows=low, columns=high)
    count, rows = -(-n // blocks.columns), padded(n)
    offsets, slab = count // 2 + 1, 4 * items * plan.width * rows
    splits = min(-(-programs // (count * items)), offsets)
    most = max(_LEAST, SLABS // slab - splits)  # offsets at once
    kernel = compiled(replace(plan, quarters=blocks.quarters), False)
    sizes = {"BM": blocks.rows, "BN": blocks.columns, "num_warps": blocks.warps, "num_stages": blocks.stages}
    total: Tensor | None = None
    for begin in range(0, offsets, most):
        end = min(begin + most, offsets)
        steps = -(-(end - begin) // splits)
        shares = -(-(end - begin) // steps)  # none is empty
        out = torch.empty(shares + end - begin, items, plan.width, rows, dtype=torch.float32, device=device)
        numbers = {"x_rows": rows, "blocks": count, "begin": begin, "end": end, "steps": steps, "splits": shares}
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(count * shares * items,)](**arguments, **numbers, items=items, out=out, **sizes)
        part = out.sum(dim=0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total

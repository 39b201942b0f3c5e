"""Some rows and columns of pairs, and which rows lie far from the centre.

Far rows are looked for once for all parts of a matrix, since a device is waited for.  Rows, columns and masks of them
are on the CPU, where tiles are cut; the CPU asks for the values of indices that are on a device only
(:func:`sketchgp.devices.here`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..devices import here
from ..row_sources import RowSource, blocks
from .expression import Known
from .fast_tiles import far_points
from .generic_tiles import real
from .pairs import Pairs
from .tiles import spans

_SIDES = "far rows of both sides"
_NUMBERS = 2**24  # of inputs whose distances from the centre are computed at once


def far_rows(pairs: Pairs) -> Tensor:
    """Return a mask ``(n,)`` of the rows of x1 that are far for a kernel that is called."""
    return pairs.remember("far rows", lambda: _far_rows(pairs))


def _far_rows(pairs: Pairs) -> Tensor:
    whole, rows = pairs.whole or (None, None)
    if pairs.known is not None:
        first = pairs.known[0]
        return torch.zeros(pairs.shape[-2], dtype=torch.bool) if first is None else first[0]
    if whole is None or whole.sources or (rows is not None and rows.dim() > 1):
        step = max(1, _NUMBERS * pairs.shape[-2] // max(1, pairs.x1.numel()))
        result = [pairs.centre.far(real(pairs.x1[..., some, :])) for some in spans(pairs.shape[-2], step)]
        return torch.cat(result).cpu() if result else torch.zeros(0, dtype=torch.bool)
    mask = far_rows(whole)
    if rows is None:
        return mask
    return mask[here(rows)] if bool(mask.any()) else mask.new_zeros(len(rows))


@torch.no_grad()
def far_sides(pairs: Pairs, *sides: Tensor | RowSource) -> list[list[Tensor]]:
    """Return masks ``(n,)`` of the far rows of each side ``(n, d)``, for each factor of the kernel.

    A kernel that is called has one mask.  Rows are read once, and a device is waited for once.
    """
    parameters = [p.detach() for p in pairs.parameters]
    result: list[Tensor] = []
    for x in sides:
        step = max(1, _NUMBERS // max(1, x.shape[-1]))
        for _, rows in blocks(x, None if isinstance(x, RowSource) else spans(len(x), step)):
            if pairs.expression is None:
                result.append(pairs.centre.far(real(rows)).unsqueeze(0))
                continue
            prepared = pairs.at(rows, rows, True, pairs.centre).prepare([rows, rows, *parameters], True)
            masks = [far_points(f.left.square().sum(dim=-1)) for f in prepared.features]
            result.append(torch.stack(masks) if masks else torch.zeros(0, len(rows), dtype=torch.bool, device=x.device))
    both = torch.cat(result, dim=1).cpu()
    return [list(part) for part in both.split([len(x) for x in sides], dim=1)]


def pass_on(whole: Pairs, part: Pairs, rows: Tensor | None, columns: Tensor | None) -> None:
    """Hand the far rows of a matrix to a part of it, with indices ``(r,)`` and ``(c,)`` of rows and columns."""
    sides = known_sides(whole)
    if sides is None:
        return
    indices = [None if i is None else here(i) for i in (rows, columns)]
    left, right = (masks if i is None else [mask[i] for mask in masks] for masks, i in zip(sides, indices, strict=True))
    if part.sources:
        part.remember(_SIDES, lambda: [left, right])
    else:
        part.known = known_of(part, left, right)


def known_sides(pairs: Pairs) -> list[list[Tensor]] | None:
    """Return :func:`far_sides` of x1 and x2 where they are read from a source to a device; None elsewhere."""
    if pairs.device.type == "cpu" or not pairs.sources:
        return None

    def look() -> list[list[Tensor]]:
        result = far_sides(pairs, *([pairs.x1] if pairs.x2 is pairs.x1 else [pairs.x1, pairs.x2]))
        return [result[0], result[-1]]

    return pairs.remember(_SIDES, look)


def known_of(pairs: Pairs, left: Sequence[Tensor], right: Sequence[Tensor]) -> Known:
    """Return the argument ``known`` of :meth:`.Expression.prepare` from masks of far rows and far columns.

    Far rows of a kernel that is called matter whatever the columns are.
    """
    if pairs.expression is None:
        return list(zip(left, right, strict=True))
    return [(i, j) if bool(i.any()) and bool(j.any()) else None for i, j in zip(left, right, strict=True)]


def part(pairs: Pairs, rows: Tensor | None, columns: Tensor | None) -> Pairs:
    """Return the pairs of x1[rows] and x2[columns].

    :param rows: indices ``(r,)`` or ``(..., r)``; None for all; :param columns: the same of x2.
    """
    x1, x2 = (x if i is None else _take_rows(x, i) for x, i in ((pairs.x1, rows), (pairs.x2, columns)))
    result = pairs.at(x1, x2, pairs.same and rows is columns, pairs.centre)
    result.whole = (pairs, rows)
    if all(i is None or i.dim() == 1 for i in (rows, columns)):
        pass_on(pairs, result, rows, columns)
        if pairs.expression is not None and not pairs.sources:
            result.remember("prepared", lambda: pairs.prepared().part(rows, columns))
    return result


def _take_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``x`` (..., n, d) at ``indices`` (r,) or (..., r)."""
    if indices.dim() == 1:
        return x.index_select(-2, indices)
    x = x.expand(*indices.shape[:-1], *x.shape[-2:])
    return x.gather(-2, indices.unsqueeze(-1).expand(*indices.shape, x.shape[-1]))

"""Which rows of a kernel matrix lie far from its centre: found once for all its parts, as a device is waited for.

Rows, columns and masks of them are on the CPU here, where tiles are cut; of indices that are on a device only, the CPU
has to ask for the values (:func:`sketchgp.devices.here`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..devices import here
from ..row_sources import RowSource, blocks
from .distances import far_points
from .expression import Known
from .generic_tiles import real
from .streamed_tiles import sources
from .tiles import spans

if TYPE_CHECKING:
    from .kernel_matrix import KernelMatrix

_NUMBERS = 2**24  # of inputs whose distances from the centre are computed at once


def far_rows(matrix: KernelMatrix) -> Tensor:
    """``(n,)`` bool: the rows of x1 that are far for a kernel that is called."""
    version = 0 if matrix.x1.is_inference() else matrix.x1._version
    kept = matrix.memo.get("far")
    if kept is None or kept[0] != version:
        whole, rows = matrix.memo.get("whole", (None, None))
        if (known := matrix.memo.get("known")) is not None:
            mask = torch.zeros(matrix.shape[-2], dtype=torch.bool) if known[0] is None else known[0][0]
        elif whole is None or sources(whole):
            step = max(1, _NUMBERS * matrix.shape[-2] // max(1, matrix.x1.numel()))
            found = [matrix.centre.far(real(matrix.x1[..., some, :])) for some in spans(matrix.shape[-2], step)]
            mask = torch.cat(found).cpu() if found else torch.zeros(0, dtype=torch.bool)
        elif rows is None:
            mask = far_rows(whole)
        else:
            mask = far_rows(whole)
            mask = mask[here(rows)] if bool(mask.any()) else mask.new_zeros(len(rows))
        kept = matrix.memo["far"] = (version, mask)
    answer: Tensor = kept[1]
    return answer


@torch.no_grad()
def far_sides(matrix: KernelMatrix, *sides: Tensor | RowSource) -> list[list[Tensor]]:
    """Of each side ``(n, d)``, for each factor of the kernel (for the kernel, where it is called), ``(n,)`` bool: which
    rows are far.  The rows are gone through once, and a device is waited for once."""
    parameters = [p.detach() for p in matrix.parameters]
    found: list[Tensor] = []
    for x in sides:
        step = max(1, _NUMBERS // max(1, x.shape[-1]))
        for _, rows in blocks(x, None if isinstance(x, RowSource) else spans(len(x), step)):
            if matrix.expression is None:
                found.append(matrix.centre.far(real(rows)).unsqueeze(0))
                continue
            prepared = matrix._with(rows, rows, True, matrix.centre).prepare([rows, rows, *parameters], True)
            masks = [far_points(f.left.square().sum(dim=-1)) for f in prepared.features]
            found.append(torch.stack(masks) if masks else torch.zeros(0, len(rows), dtype=torch.bool, device=x.device))
    both = torch.cat(found, dim=1).cpu()
    return [list(part) for part in both.split([len(x) for x in sides], dim=1)]


def pass_on(whole: KernelMatrix, part: KernelMatrix, rows: Tensor | None, columns: Tensor | None) -> None:
    """Let a part of a matrix know what is known of the whole; ``(r,)`` and ``(c,)`` indices of rows and columns."""
    part.memo["whole"] = (whole, rows)
    sides = known_sides(whole)
    if sides is None:
        return
    indices = [None if i is None else here(i) for i in (rows, columns)]
    left, right = (masks if i is None else [mask[i] for mask in masks] for masks, i in zip(sides, indices, strict=True))
    if sources(part):
        part.memo["sides"] = (part._state(), [left, right])
    else:
        part.memo["known"] = known_of(part, left, right)


def known_sides(matrix: KernelMatrix) -> list[list[Tensor]] | None:
    """:func:`far_sides` of x1 and x2 where they are read as they are needed, on to a device; None elsewhere."""
    if matrix.device.type == "cpu" or not sources(matrix):
        return None
    kept = matrix.memo.get("sides")
    if kept is None or not matrix._unchanged(kept[0]):
        found = far_sides(matrix, *([matrix.x1] if matrix.x2 is matrix.x1 else [matrix.x1, matrix.x2]))
        kept = matrix.memo["sides"] = (matrix._state(), [found[0], found[-1]])
    sides: list[list[Tensor]] = kept[1]
    return sides


def known_of(matrix: KernelMatrix, left: Sequence[Tensor], right: Sequence[Tensor]) -> Known:
    """What :meth:`.Expression.prepare` wants to know, of masks of rows and of columns; of a kernel that is called, the
    rows that are far matter whatever the columns are."""
    if matrix.expression is None:
        return list(zip(left, right, strict=True))
    return [(i, j) if bool(i.any()) and bool(j.any()) else None for i, j in zip(left, right, strict=True)]

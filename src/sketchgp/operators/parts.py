"""Some rows and columns of pairs, which know what is known of the whole."""

from __future__ import annotations

from torch import Tensor

from .far_rows import pass_on
from .pairs import Pairs
from .shapes import take_rows
from .streamed_tiles import sources


def part(pairs: Pairs, rows: Tensor | None, columns: Tensor | None) -> Pairs:
    """Return the pairs of x1[rows] and x2[columns].

    :param rows: indices ``(r,)`` or ``(..., r)``; None for all; :param columns: the same of x2.
    """
    x1, x2 = (x if i is None else take_rows(x, i) for x, i in ((pairs.x1, rows), (pairs.x2, columns)))
    found = pairs.at(x1, x2, pairs.same and rows is columns, pairs.centre)
    found.whole = (pairs, rows)
    if all(i is None or i.dim() == 1 for i in (rows, columns)):
        pass_on(pairs, found, rows, columns)
        if pairs.expression is not None and not sources(pairs):
            found.remember("prepared", lambda: pairs.prepared().part(rows, columns))
    return found

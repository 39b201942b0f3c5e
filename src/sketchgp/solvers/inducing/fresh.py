"""Rows that are like none of some others: on the points that made a preconditioner it looks better than it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ROWS = 4096


def unlike(x: Tensor, *others: Tensor) -> Tensor:
    """Which rows of x ``(n, d)`` equal, in all features, no row of the others ``(m, d)``: ``(n,)`` bool.

    By the hashes of rows, so memory is O(m) beside tiles.
    """
    known = {row for other in others for row in _hashes(other)}
    return torch.tensor([row not in known for row in _hashes(x)], dtype=torch.bool, device=x.device)


def _hashes(x: Tensor) -> Iterator[int]:
    for part in x.detach().split(_ROWS):
        rows = part.cpu().add(0.0).numpy()  # -0.0 becomes 0.0
        yield from (hash(row.tobytes()) for row in rows)

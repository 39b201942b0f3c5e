"""Uniform random numbers by their place: number (l, j) of a seed is the same whichever others are asked for.

:class:`Philox` has no state.  Rows can be asked for in any order, in any portions, on any device.  They are
made of integer operations alone, so that they are the same bits everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..random_streams import salted

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_NUMBERS = 2**15  # made at once, in the cache of a processor; ten times as fast as all at once
_CUDA_NUMBERS = 2**24


class Philox:
    """Independent numbers: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
    3" (SC 2011), its counter the place, its key the seed; a number is one word of 32 bits, ``(w + 1/2) / 2^32``.

    :param seed: any integer; :param purpose: as for :func:`sketchgp.random_streams.generator`.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        key = salted(seed, purpose)
        self._key = key & _MASK, key >> 32

    def __call__(self, rows: Tensor, columns: int) -> Tensor:
        """Return numbers ``(r, columns)`` in (0, 1), float64, for int64 ``rows`` ``(r,)``, at least 0."""
        fours = -(-columns // 4)
        most = _CUDA_NUMBERS if rows.device.type == "cuda" else _NUMBERS
        place = torch.arange(fours, device=rows.device)
        parts = [
            torch.stack(philox((part & _MASK).unsqueeze(1), (part >> 32).unsqueeze(1), place, 0, *self._key), dim=-1)
            .reshape(len(part), 4 * fours)[:, :columns]
            .to(torch.float64)
            for part in rows.split(max(1, most // max(1, 4 * fours)))
        ]
        found = torch.cat(parts) if parts else rows.new_zeros(0, columns, dtype=torch.float64)
        return found.add_(0.5).mul_(2.0**-32)


def philox(
    c0: Tensor, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, k0: int, k1: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits of a counter of four and a key of two, all int64; tensors broadcast.

    The high word of a product of 64 bits is right whatever its sign bit says.
    """
    x0, x1, x2, x3 = torch.broadcast_tensors(*(torch.as_tensor(c, device=c0.device) for c in (c0, c1, c2, c3)))
    for _ in range(_ROUNDS):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((p1 >> 32) & _MASK) ^ x1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ x3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3

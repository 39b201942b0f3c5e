"""Products of the tiles of a matrix with vectors, added up in the form that CPUs are fast at."""

from __future__ import annotations

import torch
from torch import Tensor

from .tiles import add_product, padded

_GROUP = 4  # of columns, that matrix products take at once
_FEW = {torch.float32: 8, torch.float64: 256}  # columns up to which they lie across


class TileSums:
    """``K rhs`` from the tiles of K.

    On a CPU few columns lie across: rows of their own, which products with tiles then go along.  With tiles of 1 MB a
    thread and one (two) threads of an AMD EPYC this takes 0.37 (0.34) of the time for 11 float64 columns, 0.21 (0.29)
    for 4, 0.53 (0.53) for 32; 0.48 (0.89) for 4 float32 columns, and for more than 8 of them what two threads lose.

    :param batch: sizes of the batch, ``(b,)`` or none; :param rows: of K; :param rhs: ``(*batch, m, t)``.
    """

    def __init__(self, batch: torch.Size, rows: int, rhs: Tensor) -> None:
        self.columns = t = rhs.shape[-1]
        self.across = rhs.device.type == "cpu" and rhs.dim() == 2 and 1 < t <= _FEW.get(rhs.dtype, 0)
        if self.across:
            more = -t % _GROUP if t > 2 else 0
            self.rhs = torch.nn.functional.pad(rhs.mT, (0, 0, 0, more)).contiguous()
            self.out = rhs.new_zeros(t + more, rows)
        else:
            self.rhs = padded(rhs)
            self.out = rhs.new_zeros(*batch, rows, self.rhs.shape[-1])

    def add(self, rows: slice, columns: slice, tile: Tensor) -> None:
        """What ``tile``, of these rows and columns of K, is part of."""
        if self.across:
            self.out[:, rows].addmm_(self.rhs[:, columns], tile.mT)
        else:
            add_product(self.out[..., rows, :], tile, self.rhs[..., columns, :])

    def total(self) -> Tensor:
        """``(*batch, n, t)``."""
        return self.out[: self.columns].mT.contiguous() if self.across else self.out[..., : self.columns]

"""The preconditioner of ``preconditioner="auto"``: a low-rank factor, with neighbours where these are to help."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..operators.access import Access, has_entries
from .base import Preconditioner, noise_of_each
from .full_scale import FullScale, features_of
from .rpcholesky import RPCholesky

_ROWS = 5000  # below which either takes a second
_FEATURES = 3  # of maps: with more, neighbours gained nothing on five sets (benchmarks/full_scale.py)
_LEFT = 2.0  # of the noise, that pivots leave of a row in the mean: below it more pivots are as good as neighbours
_RANK = 64  # columns beside neighbours: on maps the time hardly depends on them from 0 to 150


def is_map(matrix: Access) -> bool:
    """Return whether K is of many rows of few features, which have neighbours."""
    if matrix.n < _ROWS or not has_entries(matrix.source):
        return False
    return all(features_of(one.source, _FEATURES) is not None for _, one in matrix.elements())


@dataclass(frozen=True)
class AutomaticPreconditioner(RPCholesky):
    """:class:`RPCholesky`, or :class:`FullScale` on maps whose kernel no low-rank factor of moderate rank explains.

    It is decided whenever pivots are chosen, by what the pivots of :class:`FullScale` leave of the trace.
    """

    @property
    def name(self) -> str:
        return RPCholesky.__name__

    def resolved(self, matrix: Access, noise: Tensor) -> Preconditioner:
        if not is_map(matrix):
            return RPCholesky()
        noise = noise_of_each(matrix, noise)
        left = [FullScale().approximate(one, noise[i]).residual / noise[i] for i, one in matrix.elements()]
        return FullScale(rank=_RANK) if float(torch.stack(left).mean()) > _LEFT else RPCholesky()

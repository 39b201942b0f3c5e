"""The preconditioner of ``preconditioner="auto"``: a low-rank factor, with neighbours where these are to help."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..operators.access import Access
from .base import Preconditioner, noise_of_each
from .full_scale import FullScale, features_of
from .rpcholesky import RPCholesky

_ROWS = 5000  # below which either takes a second
_FEATURES = 3  # of maps: with more, neighbours gained nothing on five sets (benchmarks/full_scale.py)
_LEFT = 2.0  # of the noise, that pivots leave of a row in the mean: below it more pivots are as good as neighbours
_RANK = 64  # columns beside neighbours: on maps the time hardly depends on them from 0 to 150


def is_map(matrix: Access, noise: Tensor) -> bool:
    """Return whether K is of many rows of few features, which have neighbours."""
    if matrix.n < _ROWS or not FullScale.serves_matrix(matrix, noise):
        return False
    return features_of(matrix.source, _FEATURES) is not None


@dataclass(frozen=True)
class AutomaticPreconditioner(RPCholesky):
    """:class:`RPCholesky`, or :class:`FullScale` on maps whose kernel no low-rank factor of moderate rank explains.

    It is decided whenever pivots are chosen, by what the pivots of :class:`FullScale` leave of the trace.
    """

    @property
    def name(self) -> str:
        return RPCholesky.__name__

    def resolved(self, matrix: Access, noise: Tensor) -> Preconditioner:
        if not is_map(matrix, noise):
            return RPCholesky()
        noise = noise_of_each(matrix, noise)
        left = FullScale().approximate(matrix, noise).residual
        return FullScale(rank=_RANK) if float((left / noise).mean()) > _LEFT else RPCholesky()

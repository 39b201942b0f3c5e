"""What :func:`sketchgp.choose_inducing_points` returns, which problems and models take as their inducing points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class InducingPoints:
    """What :func:`sketchgp.choose_inducing_points` chose.

    :ivar points: ``(m, d)``, of x's dtype and device.
    :ivar indices: ``(m,)`` the rows of x they are, distinct; None for the centres of k-means.
    :ivar counts: ``(m,)`` float64: how many points each stands for, for ``Falkon(counts=...)``; None where unknown.
    :ivar method: by which they were chosen.
    :ivar notes: what did not go as asked.
    """

    points: Tensor
    indices: Tensor | None
    counts: Tensor | None
    method: str
    notes: list[str] = field(default_factory=list)


def plain_points(points: Any) -> Any:
    """The tensor of what was chosen; anything else as it is."""
    return points.points if isinstance(points, InducingPoints) else points

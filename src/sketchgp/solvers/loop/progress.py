"""The argument of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Progress:
    """Work done, estimated residual, held-out error and iterate of a solve under way.

    :ivar iteration: steps so far.
    :ivar passes: kernel entries evaluated, over those of the matrix.
    :ivar epochs: rows of the data seen, over n.
    :ivar seconds: since the start, set-up and earlier runs of a resumed solve included.
    :ivar residual: relative residual of each column ``(t,)``, as the solver estimates it while it runs.
    :ivar held_out: root mean square error of each column on the held-out points; None where there are none.
    """

    iteration: int
    passes: float
    epochs: float
    seconds: float
    residual: Tensor
    held_out: Tensor | None
    _weights: Callable[[], Tensor] = field(repr=False)

    def weights(self) -> Tensor:
        """The present W, ``(n, t)`` or ``(m, t)``, float64; inside ``sharded()`` it is asked for on all ranks."""
        return self._weights()

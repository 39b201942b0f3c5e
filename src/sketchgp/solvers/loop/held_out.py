"""The error on points that the solver does not see."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...fingerprint import tensor_mark
from ...report import HeldOutError

_SHARE = 0.1  # of the work that held-out predictions may take


class HeldOut:
    """Root mean square error of each column, ``W -> (t,)``.

    :param predict: weights to predictions ``(p, t)`` float64, by ``each`` kernel entries.
    :param x: points ``(p, d)``; :param y: targets ``(p,)`` or ``(p, t)``.
    :ivar mark: tells one set of points from another; :ivar entries: kernel entries evaluated so far.
    """

    def __init__(self, predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, each: float) -> None:
        self.predict, self.each = predict, each
        self.wanted = y.reshape(len(x), -1).to(torch.float64)
        self.mark, self.entries = tensor_mark(x, y), 0.0

    def __call__(self, weights: Tensor) -> Tensor:
        self.entries += self.each
        return (self.predict(weights) - self.wanted).square().mean(dim=0).sqrt().cpu()


class Watcher:
    """Held-out errors as a solve goes on."""

    def __init__(self, held_out: HeldOut | None, always: bool) -> None:
        self.held_out, self.always = held_out, always
        self.errors: list[HeldOutError] = []
        self.earlier = 0.0  # entries evaluated before the solve was resumed

    @property
    def mark(self) -> str:
        """Mark of the held-out points; empty where there are none."""
        return "" if self.held_out is None else self.held_out.mark

    @property
    def entries(self) -> float:
        """Kernel entries evaluated for held-out predictions so far."""
        return self.earlier + (0.0 if self.held_out is None else self.held_out.entries)

    def look(self, weights: Tensor, entries: float, passes: float, seconds: float) -> Tensor | None:
        """Return the error now, or the one before where computing it again would take too much of the time."""
        if self.errors and not self.always and self.entries > _SHARE * entries:
            return self.errors[-1].error
        return self.last_look(weights, passes, seconds)

    def last_look(self, weights: Tensor, passes: float, seconds: float) -> Tensor | None:
        """Return the error now; None where there are no held-out points."""
        if self.held_out is None:
            return None
        error = self.held_out(weights)
        self.errors.append(HeldOutError(passes, seconds, error))
        return error

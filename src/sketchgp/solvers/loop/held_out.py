"""The error on points that the solver does not see."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...report import HeldOutError

_SHARE = 0.1  # of the work that held-out predictions may take


class HeldOut(Protocol):
    """``W -> error (t,)`` on held-out points.

    :ivar mark: tells one set from another.
    """

    mark: str

    @property
    def entries(self) -> float:
        """Of the kernel, evaluated for it so far."""
        ...

    def __call__(self, weights: Tensor) -> Tensor: ...


class Watcher:
    """Held-out errors as a solve goes on."""

    def __init__(self, held_out: HeldOut | None, always: bool) -> None:
        self.held_out, self.always = held_out, always
        self.errors: list[HeldOutError] = []
        self.earlier = 0.0  # entries evaluated before the solve was resumed

    @property
    def entries(self) -> float:
        """Of the kernel, evaluated for held-out predictions so far."""
        return self.earlier + (0.0 if self.held_out is None else self.held_out.entries)

    def look(self, weights: Tensor, entries: float, passes: float, seconds: float) -> Tensor | None:
        """The error now; the one before, where computing it again would take too much of the time."""
        if self.held_out is None:
            return None
        if self.errors and not self.always and self.entries > _SHARE * entries:
            return self.errors[-1].error
        return self.last_look(weights, passes, seconds)

    def last_look(self, weights: Tensor, passes: float, seconds: float) -> Tensor | None:
        """The error now."""
        if self.held_out is None:
            return None
        error = self.held_out(weights)
        self.errors.append(HeldOutError(passes, seconds, error))
        return error

"""The base class of blockwise methods."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockMethod:
    """A method at work on ``(K + noise) d = r`` from d = 0.

    Everything that the next step depends on is in ``tensors`` and ``numbers``, so that saving them saves the run.

    :cvar name: as reports print it.
    :cvar positions: the names of the tensors that are points like d.
    :cvar growth: of the estimated residual over its least at which :meth:`shrink_step` is called; None never.
    :cvar advice: what to try when it diverges all the same.
    :ivar rank: of the low-rank parts; 0 where there are none.
    """

    name = ""
    positions: tuple[str, ...] = ("w",)
    growth: float | None = None
    advice = "Use another seed, a larger block_size, or float64 data."
    rank = 0

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {}

    def begin(self, width: int) -> None:
        """Set d = 0 for ``width`` right-hand sides, and forget momentum."""
        raise NotImplementedError

    def rebase(self) -> None:
        """Take the present d as the new origin, so that d = 0 again and r is ``r - (K + noise) d``; keep momentum."""
        origin = self.value.clone()
        for name in self.positions:
            self.tensors[name].sub_(origin)

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One step; returns the rows ``(b,)`` it used and ``(K + noise) d - r`` there ``(b, t)``, as it was before.

        :param generator: CPU generator that every random choice comes from.
        """
        raise NotImplementedError

    def asks(self) -> list[Tensor]:
        """Return numbers ``()`` to be fetched from the device after a step, and given to :meth:`answer`."""
        return []

    def answer(self, answers: list[float]) -> None:
        """Receive the numbers of :meth:`asks`, before the next step."""

    @property
    def value(self) -> Tensor:
        """d, ``(n, t)`` float64."""
        raise NotImplementedError

    @property
    def details(self) -> dict[str, float | str]:
        """Choices that the method made, by name, for the report."""
        return {"block_size": int(self.numbers["block_size"])}

    def describe(self) -> str:
        """Say how blocks are inverted, for the report's line on the preconditioner."""
        raise NotImplementedError

    def evaluation_point(self) -> Tensor:
        """Return the d at which the next step takes its residual."""
        return self.value

    def shrink_step(self) -> None:
        """Go on with a smaller step: the residual grows."""
        raise NotImplementedError

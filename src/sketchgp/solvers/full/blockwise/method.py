"""What a blockwise method is to the solve that it is a part of."""

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
        """Take the present d as the new origin, so that d = 0 again; momentum is kept.

        The method goes on with ``r - (K + noise) d`` for r, as it would have gone on.
        """
        origin = self.value.clone()
        for name in self.positions:
            self.tensors[name].sub_(origin)

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One step; returns the rows ``(b,)`` it used and ``(K + noise) d - r`` there ``(b, t)``, as it was before.

        :param generator: CPU generator that every random choice comes from.
        """
        raise NotImplementedError

    def asks(self) -> list[Tensor]:
        """Numbers ``()`` that it wants to know after a step: they are fetched with what the solve looks at, and given
        to :meth:`told`."""
        return []

    def told(self, answers: list[float]) -> None:
        """What :meth:`asks` asked for, before the next step."""

    @property
    def value(self) -> Tensor:
        """d, ``(n, t)`` float64."""
        raise NotImplementedError

    @property
    def details(self) -> dict[str, float | str]:
        """What it chose, by name, for the report."""
        return {"block_size": int(self.numbers["block_size"])}

    def describe(self) -> str:
        """How the blocks are inverted, for the report's line on the preconditioner."""
        raise NotImplementedError

    def evaluation_point(self) -> Tensor:
        """The d at which the next step takes its residual."""
        return self.value

    def shrink_step(self) -> None:
        """Go on with a smaller step: the residual grows."""
        raise NotImplementedError

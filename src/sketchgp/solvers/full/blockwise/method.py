"""The base class of blockwise methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...system import System


class BlockMethod:
    """A method at work on ``(K + noise) d = r`` from d = 0; a subclass adds :meth:`step`.

    Everything that the next step depends on is in ``tensors`` and ``numbers``, so that saving them saves the run.

    :param choices: the solver; :param system: the matrix; :param block_size: rows a step.

    :cvar positions: the names of the tensors that are points like d; d itself is ``tensors["w"]``.
    :cvar growth: of the estimated residual over its least at which :meth:`shrink_step` is called; None never.
    :cvar advice: what to try when it diverges all the same.
    :ivar rank: of the low-rank parts; 0 where there are none.
    """

    positions: tuple[str, ...] = ("w",)
    growth: float | None = None
    advice = "Use another seed, a larger block_size, or float64 data."
    rank = 0

    def __init__(self, choices: Any, system: System, block_size: int) -> None:
        self.choices, self.system = choices, system
        self.name: str = choices.name
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {"block_size": block_size}

    def begin(self, width: int) -> None:
        """Set d = 0 for ``width`` right-hand sides, and forget momentum."""
        self.tensors |= {name: self.system.zeros(width) for name in self.positions}

    def rebase(self) -> None:
        """Take the present d as the new origin, so that d = 0 again and r is ``r - (K + noise) d``; keep momentum."""
        origin = self.value.clone()
        for name in self.positions:
            self.tensors[name].sub_(origin)

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Take one step; return the rows ``(b,)`` it used and ``(K + noise) d - r`` there ``(b, t)``, as it was before.

        :param generator: CPU generator that every random choice comes from.
        """
        raise NotImplementedError

    def asks(self) -> list[Tensor]:
        """Return numbers ``()`` to be fetched from the device after a step, and given to :meth:`answer`."""
        return []

    def answer(self, answers: list[float]) -> None:
        """Receive the numbers of :meth:`asks`, before the next step."""

    @property
    def block_size(self) -> int:
        """Rows of a step, at most."""
        return int(self.numbers["block_size"])

    @property
    def value(self) -> Tensor:
        """d, ``(n, t)`` float64."""
        return self.tensors["w"]

    @property
    def details(self) -> dict[str, float | str]:
        """Choices that the method made, by name, for the report."""
        return {"block_size": self.block_size}

    def describe(self) -> str:
        """Say how blocks are inverted, for the report's line on the preconditioner."""
        return f"blocks of {self.block_size}"

    def evaluation_point(self) -> Tensor:
        """Return the d at which the next step takes its residual."""
        return self.value

    def shrink_step(self) -> None:
        """Go on with a smaller step: the residual grows."""
        raise NotImplementedError

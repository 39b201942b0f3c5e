"""The base class of iterative solvers: how long they may take, and where their state is kept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..checks import number, path, settle
from .loop import Budget, Checkpoint, HeldOut, Method, Progress, Run

_LIMITS = ("max_iterations", "max_passes", "max_epochs", "max_seconds")


@dataclass(frozen=True, kw_only=True)
class Budgeted:
    """Base class of choices.

    :param max_seconds: the most time, set-up and earlier runs of a resumed solve included; None for no limit.
    :param checkpoint: a file to keep the state of the solve in.  If it exists the solve goes on from it, and ends with
        the bits that an uninterrupted one ends with (on the same device and number of threads).  It holds tensors
        only.  Of another problem, or with other choices than budget and tolerance, it is refused; so is a path that
        another solve, in this process or another, is using (a lock on ``path.lock``, which ends with the process).
        Of ranks that work together rank 0 writes and reads it; as many have the same bits again, others the same
        answer.
    :param every: seconds between two writes of the checkpoint.
    """

    adjustable: ClassVar[tuple[str, ...]] = ("tol", "max_seconds", "checkpoint", "every")  # choices that change no step

    max_seconds: float | None = None
    checkpoint: str | os.PathLike[str] | None = None
    every: float = 60.0

    def _check_budget(self) -> None:
        settle(self, number, "every", above=0)
        settle(self, number, "max_seconds", above=0, optional=True)
        settle(self, path, "checkpoint", optional=True)

    @property
    def name(self) -> str:
        """The method's name, as reports print it."""
        return type(self).__name__

    @property
    def limited(self) -> bool:
        """Return whether the user limited the work, and so asked for the best that the limit allows."""
        return any(getattr(self, f.name) != f.default for f in dataclasses.fields(self) if f.name in _LIMITS)

    def _prepared(
        self,
        method: Method,
        work: float,
        *,
        began: float,
        marks: Callable[[], tuple[dict[str, str], dict[str, str]]],
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: HeldOut | None = None,
        keep_interrupted: bool = True,
    ) -> Run:
        """Return the run of a method.

        :param work: the budget, in the method's unit.
        :param marks: marks of the problem and rough marks, as :class:`Checkpoint` takes them.
        :param keep_interrupted: on Ctrl-C, return the iterate with a warning instead of raising.
        """
        checkpoint = None if self.checkpoint is None else Checkpoint(self.checkpoint, self.every, *marks())
        return Run(
            method,
            Budget(work, self.max_seconds),
            began=began,
            initial=initial,
            callback=callback,
            held_out=held_out,
            checkpoint=checkpoint,
            raising=not keep_interrupted,
        )

    def _described(self) -> str:
        """Describe the choices that a checkpoint must be of."""
        choices: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in self.adjustable
        }
        return f"{self.name} {choices}"


def cut(name: str, asked: int | None, there: int, what: str) -> list[str]:
    """Return a note for the report where more was asked for than there is."""
    return [f"{name} {asked} was asked for; {there} {what} have {there}"] if (asked or 0) > there else []

"""The base classes of iterative solvers: how long they may take, and where their state is kept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..checks import flag, function, like, number, pair, path, settle
from ..errors import InputError
from ..fingerprint import tensor_mark
from ..operators import KernelMatrix
from ..report import SolveReport
from ..row_sources import RowSource
from .loop import Checkpoint, HeldOut, Method, Progress, Run
from .problem import FullProblem, check_problem

_LIMITS = ("max_iterations", "max_passes", "max_epochs", "max_seconds")
Choices = TypeVar("Choices", bound="Budgeted")


@dataclass(frozen=True, kw_only=True)
class Budgeted:
    """Base class of choices.

    :param max_seconds: the most time, set-up and earlier runs of a resumed solve included; None for no limit.
    :param checkpoint: a file to keep the state of the solve in.  If it exists the solve goes on from it, and ends with
        the bits that an uninterrupted one ends with (on the same device and number of threads).  It holds tensors
        only.  Of another problem, or with other choices than budget and tolerance, it is refused.  Solves that run
        at once need a path each.  Of ranks that work together rank 0 writes and reads it; as many have the same bits
        again, others the same answer.
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

    def without_budget(self: Choices) -> Choices:
        """Return these choices without the limit of time and the checkpoint, which are of one solve alone."""
        return dataclasses.replace(self, max_seconds=None, checkpoint=None)

    def _execute(
        self,
        method: Method,
        work: float,
        marks: Callable[[], tuple[dict[str, str], dict[str, str]]],
        facts: Callable[[], dict[str, Any]] = dict,
        progress: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, SolveReport]:
        """Run a method; return the value, and the report, which is not recorded yet.

        :param work: the budget, in the method's unit.
        :param marks: marks of the problem and rough marks, as :class:`Checkpoint` takes them.
        :param facts: fields of the report that only the solver knows, once the method has ended.
        :param options: those of a :class:`Run`.
        """
        checkpoint = None if self.checkpoint is None else Checkpoint(self.checkpoint, self.every, *marks())
        run = Run(method, work, self.max_seconds, checkpoint=checkpoint, **options)
        value = run.loop(progress).value
        return value, run.report(**facts())

    def _options(
        self,
        points: Tensor | RowSource,
        columns: torch.Size,
        predicting: Callable[[Tensor], Callable[[Tensor], Tensor]],
        initial: Tensor | None,
        callback: Callable[[Progress], Any] | None,
        held_out: tuple[Tensor, Tensor] | None,
        progress: bool | None,
    ) -> dict[str, Any]:
        """Check the arguments of ``solve``, and return those of a run.

        :param points: those with a weight each; :param columns: the shape of a target, () or (t,).
        :param predicting: from other points ``(p, d)`` to what makes predictions ``(p, t)`` there of weights.
        :raises InputError: for arguments that do not fit.
        """
        owner = f"{self.name}.solve"
        if initial is not None:
            like(owner, "initial", initial, (len(points), *columns), points.device)
            initial = initial.reshape(len(points), -1)
        function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        found = pair(owner, held_out, points, columns)
        error = None if found is None else HeldOut(predicting(found[0]), *found)
        return {
            "initial": initial, "callback": callback, "held_out": error, "progress": progress,
            "keep_interrupted": True,
        }  # fmt: skip

    def _described(self) -> str:
        """Describe the choices that a checkpoint must be of."""
        choices: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in self.adjustable
        }
        return f"{self.name} {choices}"


@dataclass(frozen=True, kw_only=True)
class FullSolver(Budgeted):
    """Base class of the iterative solvers of :class:`FullProblem`."""

    problem_type: ClassVar[type[FullProblem]] = FullProblem

    def validate(self, problem: FullProblem) -> None:
        """:raises InputError: for anything but a :class:`FullProblem`, or where a choice does not fit it."""
        check_problem(f"{self.name}.solve", problem)

    def _full_options(self, problem: FullProblem, matmul: str, *watched: Any) -> dict[str, Any]:
        """Return :meth:`_options` of a problem; :param watched: its last four arguments."""

        def predicting(x: Tensor) -> Callable[[Tensor], Tensor]:
            cross = KernelMatrix.of(problem.kernel, x, problem.x, engine=matmul).detach()
            return lambda w: cross.product(w.to(cross.dtype)).to(torch.float64)

        return self._options(problem.x, problem.y.shape[1:], predicting, *watched)


def require_repeating(first: Callable[[], tuple[Any, Tensor]], once: bool = False) -> None:
    """Check that a solve of a stream can go on from a checkpoint.

    :param first: gives its first batch; :param once: whether it can be gone through once only.
    :raises InputError: where it begins with another batch each time.
    """
    if once or tensor_mark(*first()) != tensor_mark(*first()):
        raise InputError(
            "checkpoint expects a stream that repeats itself, so that batches that were seen can be skipped; this one "
            "cannot be gone through twice, or has begun with two different batches. Shuffle its data once, before, or "
            "do without."
        )


def cut(name: str, asked: int | None, there: int, what: str) -> list[str]:
    """Return a note for the report where more was asked for than there is."""
    return [f"{name} {asked} was asked for; {there} {what} have {there}"] if (asked or 0) > there else []

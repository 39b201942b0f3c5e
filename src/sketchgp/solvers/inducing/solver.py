"""The base class of iterative solvers of the inducing-point problem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...fingerprint import tensor_mark
from ...operators.marks import kernel_mark
from ...report import conclude
from ..choices import Budgeted, require_repeating
from ..loop import Method, Progress, clock, compare_ranks, solve_marks
from ..problem import Solution
from .problem import InducingPointProblem, check_inducing


@dataclass(frozen=True, kw_only=True)
class InducingPointSolver(Budgeted):
    """Base class of the iterative solvers of :class:`InducingPointProblem`; its parameters are those of all of them."""

    problem_type: ClassVar[type[InducingPointProblem]] = InducingPointProblem
    _budget: ClassVar[str]  # the parameter that is one, in the method's unit

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: for anything but an :class:`InducingPointProblem`, or where the choices do not fit it."""
        check_inducing(f"{self.name}.solve", problem)

    def _method(self, problem: InducingPointProblem) -> Method:
        """Return the method at work on one problem, set up."""
        raise NotImplementedError

    def _facts(self, problem: InducingPointProblem, method: Any) -> dict[str, Any]:
        """Return fields of the report that only this solver knows."""
        raise NotImplementedError

    def _memory_kept(self, problem: InducingPointProblem) -> AbstractContextManager[Any]:
        """Return a context that says in words that memory ran out."""
        return nullcontext()

    def solve(
        self,
        problem: InducingPointProblem,
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve an :class:`InducingPointProblem`.

        :param initial: starting point, of the solution's shape.
        :param callback: called with a :class:`~sketchgp.solvers.Progress` once an iteration, or an epoch; True ends the
            solve.
        :param held_out: points ``(p, d)`` and targets ``(p,)`` or ``(p, t)`` whose root mean square error is computed
            as the solve goes on (in at most a tenth of the work; where it decides when to stop, after each epoch) and
            kept in the report.
        :param progress: show a progress bar (default: in a terminal or notebook).
        :returns: W, ``(m,)`` or ``(m, t)`` as y has columns or not, float64 whatever the dtype of x: the weights of
            neighbouring points cancel, and would not do so in float32.
        :raises InputError: for arguments that do not fit, or too little memory.
        :raises NumericalError: where NaN appears, or it diverges.

        Ctrl-C ends the solve after the step under way with the best iterate so far, and a warning.
        """
        began = clock()
        self.validate(problem)
        columns, z = problem.target_shape, problem.inducing_points
        options = self._options(z, columns, problem.predicting, initial, callback, held_out, progress)
        compare_ranks(self.name, lambda: self._marks(problem))
        with self._memory_kept(problem), torch.no_grad():
            method = self._method(problem)
            value, report = self._execute(
                method, getattr(self, self._budget), lambda: (self._checkpoint_marks(problem, method), {}),
                lambda: self._facts(problem, method), began=began, **options,
            )  # fmt: skip
        conclude(report)
        return Solution(value.reshape(problem.m, *columns), report, problem)

    def _checkpoint_marks(self, problem: InducingPointProblem, method: Any) -> dict[str, str]:
        """Return :meth:`_marks` of a problem that can be gone on with, and marks of what the set-up found."""
        if problem.streamed:
            require_repeating(problem.first)
        return self._marks(problem)

    def _marks(self, problem: InducingPointProblem) -> dict[str, str]:
        """Return marks that tell one solve from another."""
        x, y = problem.first()
        return {
            "the training inputs": tensor_mark(x),
            "the inducing points": tensor_mark(problem.inducing_points),
            "the kernel": kernel_mark(problem.kernel, problem.inducing_points),
            **solve_marks(problem.noise, y, self._described()),
        }

"""The base class of iterative solvers of the full problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import flag, function, like, pair
from ...operators import KernelMatrix
from ..choices import Budgeted
from ..loop import HeldOut, Progress
from ..problem import FullProblem, check_problem


@dataclass(frozen=True, kw_only=True)
class FullSolver(Budgeted):
    """Base class of the iterative solvers of :class:`FullProblem`."""

    problem_type: ClassVar[type[FullProblem]] = FullProblem

    def validate(self, problem: FullProblem) -> None:
        """:raises InputError: for anything but a :class:`FullProblem`, or where a choice does not fit it."""
        check_problem(f"{self.name}.solve", problem)

    def _options(
        self,
        problem: FullProblem,
        matmul: str,
        initial: Tensor | None,
        callback: Callable[[Progress], Any] | None,
        held_out: tuple[Tensor, Tensor] | None,
        progress: bool | None,
    ) -> dict[str, Any]:
        """Check the arguments of ``solve``, and return those of ``run``.

        :raises InputError: for arguments that do not fit.
        """
        owner = f"{self.name}.solve"
        if initial is not None:
            like(owner, "initial", initial, problem.y.shape, problem.y.device, whose="y's")
            initial = initial.reshape(len(problem.x), -1)
        function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        points = pair(owner, held_out, problem.x, problem.y.shape[1:])
        error: HeldOut | None = None
        if points is not None:
            cross = KernelMatrix.of(problem.kernel, points[0], problem.x, engine=matmul).detach()
            error = HeldOut(lambda w: _product(cross, w), cross.x1, points[1], cross.shape.numel())
        return {
            "initial": initial, "callback": callback, "held_out": error, "progress": progress,
            "keep_interrupted": True,
        }  # fmt: skip


def _product(matrix: KernelMatrix, weights: Tensor) -> Tensor:
    return matrix._matmul(weights.to(matrix.dtype)).to(torch.float64)

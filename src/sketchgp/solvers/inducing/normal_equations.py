"""Conjugate gradients on the normal equations of the inducing-point problem: what KRILL, Falkon, NystromPCG share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import count, flag, function, like, settle, tolerance, word
from ...memory import enough_memory, require_memory
from ...operators.normal_matrix import NormalMatrix, TiledNormalMatrix
from ...operators.tall import tile_bytes
from ...preconditioners.factored import TriangularFactors
from ...preconditioners.row_nystrom import NystromRoot
from ...report import SolveReport, conclude, peak_memory
from ..conjugate_gradients import Iterate
from ..problem import Solution
from .problem import InducingPointProblem, check_inducing
from .split_gradients import SplitGradients

_VECTORS = 10  # float64 blocks (m, t) of a solve


@dataclass(frozen=True, kw_only=True)
class NormalEquationsSolver:
    """Preconditioned conjugate gradients on ``(Kzx Kxz + noise Kzz) W = Kzx y``, all columns at once.

    :param tol: relative residual ``||(Kzx Kxz + noise Kzz) w - Kzx y|| / ||Kzx y||`` that every column must reach.
    :param max_iterations: the most iterations.
    :param precision: of the entries of Kxz: ``"float64"`` whatever the dtype of x, which costs a fifth more on a CPU;
        or ``"float32"`` for float32 data on devices where float64 is slow: the residual is then corrected with float64
        entries, which takes several times the iterations where the noise is small.  Sums and factors are float64.
    """

    _predictions: ClassVar[bool] = False  # whether tol is of the error of predictions, not of the residual

    tol: float = 1e-4
    max_iterations: int = 200
    precision: str = "float64"

    def __post_init__(self) -> None:
        settle(self, tolerance, "tol")
        self._check_common()

    def _check_common(self) -> None:
        settle(self, count, "max_iterations")
        settle(self, word, "precision", allowed=("float32", "float64"))

    @property
    def name(self) -> str:
        return type(self).__name__

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem, or its matrices the memory that is free."""
        require_memory(*self._memory(problem))

    def _memory(self, problem: InducingPointProblem) -> tuple[int, torch.device, str, str]:
        """What a solve needs, where, and how an error calls it and what it advises."""
        return (
            self.bytes_needed(problem),
            problem.device,
            f"{self.name}() for m = {problem.m} and {_columns(problem)} column(s)",
            "use fewer inducing points, or solver=NystromPCG() or EigenPro4(), which need no m x m matrix.",
        )

    def bytes_needed(self, problem: InducingPointProblem) -> int:
        """Memory of a solve: of m x m matrices, of tiles, and of vectors for all columns."""
        n, m = problem.expected_rows, problem.m
        vectors = 8 * _columns(problem) * (2 * n + _VECTORS * m)
        return self._bytes(problem) + tile_bytes(n, m, problem.device) + vectors

    def _bytes(self, problem: InducingPointProblem) -> int:
        """Of the m x m matrices that are held at once."""
        raise NotImplementedError

    def preconditioner(self, matrix: Any) -> TriangularFactors | NystromRoot | None:
        """The preconditioner of one normal matrix; None for none."""
        raise NotImplementedError

    def _matrix(self, problem: InducingPointProblem, accurate: bool) -> NormalMatrix | TiledNormalMatrix:
        return problem.normal_matrix(accurate)

    def _describe(self, problem: InducingPointProblem) -> str:
        raise NotImplementedError

    def _remedy(self, problem: InducingPointProblem) -> str:
        """What else there is to try where iterations run out, after "Raise max_iterations"."""
        raise NotImplementedError

    def solve(
        self,
        problem: InducingPointProblem,
        initial: Tensor | None = None,
        callback: Callable[[Iterate], Any] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve an :class:`InducingPointProblem` of tensors.

        :param initial: starting point, of the solution's shape.
        :param callback: called with an :class:`~sketchgp.solvers.Iterate` once an iteration; True ends the solve.
        :param progress: show a progress bar (default: only in a terminal).
        :returns: W, ``(m,)`` or ``(m, t)`` as y has columns or not, float64 whatever the dtype of x: the weights of
            neighbouring points cancel, and would not do so in float32.
        :raises InputError: for arguments that do not fit, a stream, noise 0, or too little memory.
        :raises NumericalError: where NaN appears.

        Ctrl-C ends the solve with the best iterate (true residual) so far, and a warning.
        """
        start, owner = time.perf_counter(), f"{self.name}.solve"
        check_inducing(owner, problem)
        function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        x, y = problem.tensors(f"{self.name}()")
        assert problem.y is not None
        shape = (problem.m, *problem.y.shape[1:])
        if initial is not None:
            like(owner, "initial", initial, shape, problem.device, whose="the solution's")
        self.validate(problem)
        float32 = self.precision == "float32"
        with enough_memory(*self._memory(problem)), torch.no_grad():
            matrix = self._matrix(problem, accurate=not float32)
            rhs = matrix.tall.accurate().t_matmul(y)
            factors = self.preconditioner(matrix)
            setup = time.perf_counter() - start
            initial = None if initial is None else initial.reshape(rhs.shape).to(rhs)
            run = SplitGradients(
                matrix, factors, rhs, self.tol, self.max_iterations, initial, callback, self._predictions
            )
            run.loop(progress, self.name)
        report = SolveReport(
            solver=self.name,
            preconditioner=self._describe(problem),
            n=problem.m,
            columns=rhs.shape[1],
            iterations=run.iterations,
            matmuls=run.products,
            residual=run.residual.cpu(),
            history=torch.stack(run.history).cpu(),
            tol=self.tol,
            converged=run.converged,
            reason=run.reason,
            seconds=time.perf_counter() - start - setup,
            setup_seconds=setup,
            rank=factors.rank if isinstance(factors, NystromRoot) else 0,
            dtype="float32" if float32 and x.dtype == torch.float32 else "float64",
            device=str(problem.device),
            peak_memory=peak_memory(problem.device),
            notes=run.notes,
            remedies={
                "ran out of iterations": f"Raise max_iterations (now {self.max_iterations}){self._remedy(problem)}."
            },
            deviations=run.deviations.cpu(),
            judged="predictions" if self._predictions else "residual",
        )
        conclude(report)
        return Solution(run.best.reshape(shape), report)


def _columns(problem: InducingPointProblem) -> int:
    return 1 if problem.y is None else max(1, problem.y[:1].numel())

"""The base class of KRILL, Falkon and NystromPCG: conjugate gradients on the normal equations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import count, settle, tolerance
from ...memory import enough_memory, require_memory
from ...operators.tall import tile_bytes
from ...preconditioners.krill import TriangularFactors
from ...preconditioners.row_nystrom import NystromRoot
from ...report import Reason
from .problem import InducingPointProblem
from .solver import InducingPointSolver
from .split_gradients import SplitGradients

_VECTORS = 10  # float64 blocks (m, t) of a solve


@dataclass(frozen=True, kw_only=True)
class NormalEquationsSolver(InducingPointSolver):
    """Preconditioned conjugate gradients on ``(Kzx Kxz + noise Kzz) W = Kzx y``, all columns at once.

    :param tol: relative residual ``||(Kzx Kxz + noise Kzz) w - Kzx y|| / ||Kzx y||`` that every column must reach.  It
        goes on from there until no prediction is more than a tenth of a posterior deviation off, by the residual in the
        preconditioner's norm over the least Ritz value: with little noise a small residual does not say so.
    :param max_iterations: the most iterations.

    Everything is float64, kernel entries of float32 data too: with float32 ones the residual has to be corrected, which
    takes several times the iterations where the noise is small.
    """

    adjustable: ClassVar[tuple[str, ...]] = (*InducingPointSolver.adjustable, "max_iterations")
    _budget: ClassVar[str] = "max_iterations"
    _stored: ClassVar[bool] = True  # whether Kzz is
    _predictions: ClassVar[bool] = False  # whether tol is of the error of predictions, not of the residual

    tol: float = 1e-4
    max_iterations: int = 200

    def __post_init__(self) -> None:
        if not self._predictions:
            settle(self, tolerance, "tol")
        self._check_budget()
        settle(self, count, "max_iterations")

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: for a stream or noise 0; where the choices do not fit the problem, or its matrices the
        memory that is free."""
        super().validate(problem)
        problem.tensors(f"{self.name}()")
        require_memory(*self._memory(problem))

    def _memory(self, problem: InducingPointProblem) -> tuple[int, torch.device, str, str]:
        """Return the bytes that a solve needs, the device, the name that an error gives it, and its advice."""
        return (
            self.bytes_needed(problem),
            problem.device,
            f"{self.name}() for m = {problem.m} and {problem.target_shape.numel()} column(s)",
            "use fewer inducing points, or solver=NystromPCG() or EigenPro4(), which need no m x m matrix.",
        )

    def bytes_needed(self, problem: InducingPointProblem) -> int:
        """Memory of a solve: of m x m matrices, of tiles, and of vectors for all columns."""
        n, m = problem.expected_rows, problem.m
        columns = 1 if problem.streamed else max(1, problem.target_shape.numel())
        vectors = 8 * columns * (2 * n + _VECTORS * m)
        return self._bytes(problem) + tile_bytes(n, m, problem.device) + vectors

    def _bytes(self, problem: InducingPointProblem) -> int:
        """Return the bytes of the m x m matrices that are held at once."""
        raise NotImplementedError

    def preconditioner(self, matrix: Any, targets: Tensor) -> TriangularFactors | NystromRoot | None:
        """The preconditioner of one normal matrix; None for none.

        :param targets: ``(n, t)`` with the weights of T, for those that look at them.
        """
        raise NotImplementedError

    def _memory_kept(self, problem: InducingPointProblem) -> AbstractContextManager[Any]:
        return enough_memory(*self._memory(problem))

    def _method(self, problem: InducingPointProblem) -> SplitGradients:
        _, y = problem.tensors(f"{self.name}()")
        matrix = problem.normal_matrix(self._stored)
        return SplitGradients(self.name, matrix, self.preconditioner(matrix, y), y, self.tol, self._predictions)

    def _words(self, problem: InducingPointProblem) -> tuple[str, str]:
        """Describe the preconditioner; and say what to try beside more iterations, to follow that advice."""
        raise NotImplementedError

    def _facts(self, problem: InducingPointProblem, method: SplitGradients) -> dict[str, Any]:
        preconditioner, remedy = self._words(problem)
        return {
            "preconditioner": preconditioner,
            "rank": method.factors.rank if isinstance(method.factors, NystromRoot) else 0,
            "dtype": "float64",
            "remedies": {Reason.ITERATIONS: f"Raise max_iterations (now {self.max_iterations}){remedy}."},
        }

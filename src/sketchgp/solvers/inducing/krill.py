"""KRILL: the inducing-point problem by conjugate gradients with a sketched preconditioner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import count, seed, settle
from ...errors import InputError
from ...operators.tall import NormalMatrix, tile_bytes
from ...preconditioners.krill import TriangularFactors, krill_preconditioner, sketch_rows
from ...settings import free_memory
from .normal_equations import NormalEquationsSolver
from .problem import InducingPointProblem
from .split_gradients import SplitGradients


@dataclass(frozen=True, kw_only=True)
class KRILL(NormalEquationsSolver):
    """Solves ``(Kzx Kxz + noise Kzz) W = Kzx y`` by conjugate gradients, preconditioned by
    ``(Phi Kxz)^T (Phi Kxz) + noise Kzz`` for a sparse sign embedding Phi.

    Algorithm 2 of arXiv:2304.12465, but for how the factor is computed
    (:func:`~sketchgp.preconditioners.krill.krill_preconditioner`).  Its Theorem 2.3 says that the preconditioned matrix
    has a condition number of at most 3, whatever the data and the points, for O(m log m) rows of Phi and O(log m)
    nonzeros.  With fewer, as here and in the paper's experiments, nothing is proved; a few tens of iterations at the
    most is what was observed.  Costs
    ``n m`` kernel evaluations an iteration and ``O((n + m) m + sketch_size m^2)`` at the start; memory ``9 m^2``
    float64 numbers at the start (``21 m^2`` up to 4,000 points).  Choose it wherever m x m matrices fit; else
    :class:`NystromPCG` or :class:`EigenPro4`.

    :param sketch_size: rows of Phi, at least m.  More take fewer iterations; None is 2m, the paper's, and up to 8m
        where m is small beside n, so that they cost next to nothing, and memory is not short.
    :param nonzeros: of a column of Phi.
    :param seed: of Phi.

    The other parameters are those of :class:`sketchgp.solvers.NormalEquationsSolver`: ``tol``, ``max_iterations``.
    """

    sketch_size: int | None = None
    nonzeros: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, count, "sketch_size", optional=True)
        settle(self, count, "nonzeros")
        settle(self, seed, "seed")

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem, or its matrices the memory that is free."""
        super().validate(problem)
        if self.sketch_size is not None and self.sketch_size < problem.m:
            raise InputError(
                f"KRILL(sketch_size={self.sketch_size}) is below the {problem.m} inducing points; the sketch then "
                "loses directions, and the solve stalls. Choose at least m; the default is 2m or more."
            )

    def _rows(self, n: int, m: int, device: torch.device) -> int:
        if self.sketch_size is not None:
            return self.sketch_size
        rows, free = sketch_rows(n, m), free_memory(device)
        return rows if _bytes(m, rows) + tile_bytes(n, m, device) <= free // 2 else 2 * m

    def _bytes(self, problem: InducingPointProblem) -> int:
        return _bytes(problem.m, self._rows(problem.expected_rows, problem.m, problem.device))

    def preconditioner(self, matrix: NormalMatrix, targets: Tensor) -> TriangularFactors:
        """Return the sketched preconditioner of one normal matrix."""
        rows = self._rows(*matrix.tall.shape, matrix.tall.device)
        return krill_preconditioner(matrix, rows, self.nonzeros, self.seed, targets)

    def _words(self, problem: InducingPointProblem) -> tuple[str, str]:
        rows = self._rows(problem.expected_rows, problem.m, problem.device)
        return f"sparse sign embedding of {rows} rows", f" or sketch_size (now {rows})"

    def _facts(self, problem: InducingPointProblem, method: SplitGradients) -> dict[str, Any]:
        rows = self._rows(problem.expected_rows, problem.m, problem.device)
        return {**super()._facts(problem, method), "details": {"sketch_size": rows}}


def _bytes(m: int, rows: int) -> int:
    """Return the bytes of the stacked sketch, its copy in the factorization, and the m x m matrices."""
    return 8 * m * (5 * m + 2 * rows)

"""KRILL: the inducing-point problem by conjugate gradients with a sketched preconditioner."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from ..operators.normal_matrix import NormalMatrix
from ..preconditioners.factored import TriangularFactors
from ..preconditioners.krill import krill_preconditioner
from .blockwise import check_count, check_seed
from .inducing import InducingPointProblem, NormalEquationsSolver


@dataclass(frozen=True, kw_only=True)
class KRILL(NormalEquationsSolver):
    """Solves ``(Kzx Kxz + noise Kzz) W = Kzx y`` by conjugate gradients, preconditioned by
    ``(Phi Kxz)^T (Phi Kxz) + noise Kzz`` for a sparse sign embedding Phi.

    With inducing points of any kind a few tens of iterations at the most: the preconditioner is within a constant
    factor of the matrix whatever the data (arXiv:2304.12465, Theorem 3.4 and section 3).  Costs
    ``n m`` kernel evaluations an iteration and ``O((n + m) m + sketch_size m^2)`` at the start; memory ``8 m^2``
    float64 numbers at the start.  Choose it wherever m x m matrices fit; else :class:`EigenPro4` or
    :class:`SketchySAGA`.

    :param sketch_size: rows of Phi, at least m; None is 2m, the paper's.  More takes fewer iterations.
    :param nonzeros: of a column of Phi.
    :param seed: of Phi.

    The other parameters are those of :class:`sketchgp.solvers.NormalEquationsSolver`: ``tol``, ``max_iterations``,
    ``precision``.
    """

    sketch_size: int | None = None
    nonzeros: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("sketch_size", self.sketch_size)
        check_count("nonzeros", self.nonzeros)
        check_seed(self.seed)

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem, or its matrices the memory that is free."""
        super().validate(problem)
        if self.sketch_size is not None and self.sketch_size < problem.m:
            raise InputError(
                f"KRILL(sketch_size={self.sketch_size}) is below the {problem.m} inducing points; the sketch then "
                "loses directions, and the solve stalls. Choose at least m; 2m is the default."
            )

    def _bytes(self, m: int) -> int:
        return 8 * m * (4 * m + 2 * (self.sketch_size or 2 * m))

    def preconditioner(self, matrix: NormalMatrix) -> TriangularFactors:
        """KRILL's, of one normal matrix."""
        return krill_preconditioner(matrix, self.sketch_size, self.nonzeros, self.seed)

    def _describe(self, problem: InducingPointProblem) -> str:
        return f"sparse sign embedding of {self.sketch_size or 2 * problem.m} rows"

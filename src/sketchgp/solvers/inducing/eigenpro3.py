"""EigenPro 3: preconditioned stochastic gradients for inducing points, projected after every batch.

Reference: Abedsoltan, Belkin, Pandit, "Toward large kernel models" (ICML 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from .eigenpro import EigenProSolver
from .problem import InducingPointProblem
from .projection import Projection


@dataclass(frozen=True, kw_only=True)
class EigenPro3(EigenProSolver):
    """Minimises ``sum_i (f(x_i) - y_i)^2 + noise ||f||^2`` over ``f = k(., z) W`` by stochastic gradients in function
    space, the top q directions of the kernel slowed down, f projected on the span of z after every batch.

    A batch of b costs ``2 b m`` kernel evaluations at most and a projection ``Kzz theta = h``: ``2 m^2`` operations
    by a Cholesky factor, tens of ``m^2`` kernel evaluations by conjugate gradients.  Memory O(m q) for the directions
    and, with the inexact projection, 1000 m at most for its preconditioner; n does not matter, and x may be a stream.
    Step and rank are computed; with noise 0 it interpolates, and regularises by stopping early on held-out points.

    With a constant step SGD hovers above the optimum.  So the step falls to 0 in the second half of the run, and an
    average of the iterates is returned.

    Choose it while Kzz fits into memory and the data do not; for tensors KRILL is exact, and beyond that
    :class:`EigenPro4` projects less often.  "EigenPro 3-ExactProjection" of the papers is
    ``EigenPro3(projection="exact", preconditioner="paper", averaging=False, cooldown=0)``.

    The parameters are those of :class:`sketchgp.solvers.inducing.eigenpro.EigenProSolver`.
    """

    def _delay(self, problem: InducingPointProblem, batch: int, projection: Projection) -> int:
        return 1

"""EigenPro 4: preconditioned stochastic gradients for inducing points, projected once in a number of batches.

Reference: Abedsoltan, Ma, Pandit, Belkin, "Fast training of large kernel models with delayed projections" (2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...checks import count, settle
from .eigenpro import EigenProSolver
from .problem import InducingPointProblem
from .projection import Projection


@dataclass(frozen=True, kw_only=True)
class EigenPro4(EigenProSolver):
    """Minimises ``sum_i (f(x_i) - y_i)^2 + noise ||f||^2`` over ``f = k(., z) W`` by stochastic gradients in function
    space, the top q directions of the kernel slowed down, f projected on the span of z once in T batches.

    Between two projections the points of the T batches are inducing points too.  A batch of b costs ``b m`` kernel
    evaluations and at most ``b^2 T`` for those points; a projection tens of ``m^2`` (or ``2 m^2`` operations where Kzz
    fits into memory).  T balances the two (:meth:`delay_for`), so an epoch is linear in m.  Memory O(m q + T b), with
    the inexact projection 1000 m at most for its preconditioner; n does not matter, and x may be a stream.

    What T batches fit is only then projected, which biases the fixed point by O(T step), away from the least squares
    solution.  The step falls to 0 in the second half of the run, and takes that bias with it.

    Choose it where m x m matrices do not fit into memory, or x does not; else KRILL is exact and faster.

    :param delay: T; None for :meth:`delay_for`.  A projection also ends every epoch.

    The other parameters are those of :class:`sketchgp.solvers.inducing.eigenpro.EigenProSolver`.
    """

    delay: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, count, "delay", optional=True)

    @staticmethod
    def delay_for(m: int, batch: int, cost: float) -> int:
        """``(m / batch) sqrt(2 cost)``, at least 1: T with the least work a batch (the paper's equation 35).

        :param cost: of a projection, in evaluations of Kzz (the paper's ``T_ep2``).
        """
        return max(1, round(m / batch * math.sqrt(2 * cost)))

    def _delay(self, problem: InducingPointProblem, batch: int, projection: Projection) -> int:
        return self.delay or self.delay_for(problem.m, batch, projection.cost)

    def _advice(self) -> str:
        return (
            "Choose a larger delay, projection='exact' or a smaller projection_tol, a larger subsample_size, or a "
            "smaller step_scale."
        )

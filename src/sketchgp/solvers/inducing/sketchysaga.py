"""SketchySAGA: the inducing-point problem by preconditioned stochastic gradients with variance reduction.

References: Rathore, Frangella, Udell, "Have ASkotch: fast methods for large-scale, memory-constrained kernel ridge
regression" (arXiv:2407.10070), section 3.3 and Algorithm 5; Defazio, Bach, Lacoste-Julien, "SAGA" (arXiv:1407.0202).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...checks import count, number, seed, settle, tolerance
from ...errors import InputError
from ...report import Reason
from ..choices import cut
from . import InducingPointProblem, InducingPointSolver
from .saga import Saga


@dataclass(frozen=True, kw_only=True)
class SketchySAGA(InducingPointSolver):
    """Solves ``(Kzx Kxz + noise Kzz) W = Kzx y`` by stochastic gradients: for a batch B of b rows

        ``new = k(x_B, z) w - y_B``;  ``aux = k(z, x_B) (new - psi_B)``;  ``psi_B = new``;
        ``w -= step (P + rho)^-1 (G + (n / b) aux + noise Kzz w)``;  ``G += aux``

    where psi holds the residual of every row when it was last seen and ``G = Kzx psi``, so that the gradient's noise
    vanishes at the solution and convergence is linear (arXiv:2407.10070, Theorem F.1).  P is a Nystrom approximation of
    the matrix (with ``noise Kzz``, which the paper leaves out of it), its data part from ten times as many rows as its
    rank.  ``n m`` kernel evaluations an epoch, and half as many again for ``Kzz w``: computed anew at every step it
    would dominate where b is below m, so it is kept for up to m / b steps, as many as its own smoothness allows; it
    changes slowly once preconditioned, and at the solution not at all.  Memory O(n t + m (rank + t)) beside tiles: no
    m x m matrix.  Entries are of x's dtype, vectors and sums float64.

    Every now and then a sweep over all rows computes the true residual, with float64 entries, and starts the table
    anew from it, so that rounding of float32 entries is corrected (iterative refinement).

    ``rho=None`` finds the damping: the least one whose steps, times the steps of an epoch, add up to 1.5 Newton steps
    for the directions that P captures.  Less would slow these, more the ones that P misses.  The step is half the
    inverse smoothness of a batch, measured on other rows than those of P
    (:class:`~sketchgp.preconditioners.sketchysaga.DampedNystrom`).  Steps that diverge all the same are taken back and
    halved, with a note in the report.

    A small residual says little about predictions where the problem is ill-conditioned, so that is not enough to stop:
    sweeps at epochs that grow by half also see how much the function changed since the one before, in the norm that
    bounds predictions, and what is left is extrapolated from that (:mod:`sketchgp.solvers.energy`).

    A solve returns the best of the iterates whose true residual is known.  In its report ``passes`` are the kernel
    evaluations, those of Kzz, of the start and of the true residuals included, over n m; and ``history`` the estimates
    after each epoch, true residuals where there was a sweep.  The callback is called once an epoch.  Ctrl-C takes one
    more sweep.  A solve that goes on from a checkpoint makes its preconditioner again.

    Choose it to compare with the paper.  :class:`NystromPCG`, with the same memory, gets closer in fewer passes.

    :param tol: relative residual ``||(Kzx Kxz + noise Kzz) w - Kzx y|| / ||Kzx y||`` that every column must reach.
    :param deviations: posterior deviations that no prediction may be off by, as estimated, in every column.
    :param max_epochs: the most epochs of steps.
    :param block_size: b; None is n / 20, at least 16 and at most 512.  Epochs hardly depend on it, the work of the
        preconditioner does: raise it on a GPU.
    :param rank: of P, at most m; None is 300.  More takes fewer epochs.
    :param rho: the damping, in units of the matrix; None finds it.
    :param seed: of every random choice.

    The other parameters are those of :class:`sketchgp.solvers.InducingPointSolver`: ``max_seconds``, ``checkpoint``,
    ``every``.
    """

    adjustable: ClassVar[tuple[str, ...]] = (*InducingPointSolver.adjustable, "deviations", "max_epochs")

    tol: float = 1e-4
    deviations: float = 0.3
    max_epochs: float = 200.0
    block_size: int | None = None
    rank: int | None = None
    rho: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_budget()
        settle(self, tolerance, "tol")
        settle(self, number, "max_epochs", "deviations", above=0)
        settle(self, number, "rho", above=0, finite=True, optional=True)
        settle(self, count, "block_size", "rank", optional=True)
        settle(self, seed, "seed")

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: for a stream or noise 0; where the choices do not fit the problem of n points and m
        inducing points."""
        super().validate(problem)
        x, _ = problem.tensors(f"{self.name}()")
        if (self.block_size or 0) > len(x):
            raise InputError(
                f"SketchySAGA(block_size={self.block_size}) exceeds the {len(x)} points; choose at most {len(x)}."
            )

    def _notes(self, problem: InducingPointProblem) -> list[str]:
        return cut("rank", self.rank, problem.m, "inducing points")

    def _work(self) -> float:
        return self.max_epochs

    def _method(self, problem: InducingPointProblem) -> Saga:
        return Saga(problem, self)

    def _facts(self, problem: InducingPointProblem, method: Saga) -> dict[str, Any]:
        p = method.p
        more = f"or the rank (now {p.rank}), and go on with initial= or a checkpoint"
        return {
            "preconditioner": f"Nystrom rank {p.rank}, damping {p.damping:.2e}, batches of {method.block_size}",
            "rank": p.rank,
            "dtype": str(method.tall.dtype).removeprefix("torch."),
            "remedies": {Reason.EPOCHS: f"Raise max_epochs, {more}."},
        }

"""SketchySAGA: the inducing-point problem by preconditioned stochastic gradients with variance reduction.

References: Rathore, Frangella, Udell, "Have ASkotch: fast methods for large-scale, memory-constrained kernel ridge
regression" (arXiv:2407.10070), section 3.3 and Algorithm 5; Defazio, Bach, Lacoste-Julien, "SAGA" (arXiv:1407.0202).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import count, flag, function, like, number, pair, seed, settle, tolerance
from ..errors import InputError
from ..report import conclude
from .inducing.problem import InducingPointProblem, check_inducing
from .inducing.saga import Saga
from .loop import Progress
from .problem import Solution


@dataclass(frozen=True, kw_only=True)
class SketchySAGA:
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
    bounds predictions, and what is left is extrapolated from that (:mod:`sketchgp.solvers.inducing.remaining`).

    Choose it to compare with the paper.  :class:`NystromPCG`, with the same memory, gets closer in fewer passes.

    :param tol: relative residual ``||(Kzx Kxz + noise Kzz) w - Kzx y|| / ||Kzx y||`` that every column must reach.
    :param deviations: posterior deviations that no prediction may be off by, as estimated, in every column.
    :param max_epochs: the most epochs of steps.
    :param max_seconds: the most time, or None.
    :param block_size: b; None is n / 20, at least 16 and at most 512.  Epochs hardly depend on it, the work of the
        preconditioner does: raise it on a GPU.
    :param rank: of P, at most m; None is 300.  More takes fewer epochs.
    :param rho: the damping, in units of the matrix; None finds it.
    :param seed: of every random choice.
    """

    tol: float = 1e-4
    deviations: float = 0.3
    max_epochs: float = 200.0
    max_seconds: float | None = None
    block_size: int | None = None
    rank: int | None = None
    rho: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        settle(self, tolerance, "tol")
        settle(self, number, "max_epochs", "deviations", above=0)
        settle(self, number, "max_seconds", above=0, optional=True)
        settle(self, number, "rho", above=0, finite=True, optional=True)
        settle(self, count, "block_size", "rank", optional=True)
        settle(self, seed, "seed")

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem of n points and m inducing points."""
        assert torch.is_tensor(problem.x)
        for name, most, what in (("block_size", len(problem.x), "points"), ("rank", problem.m, "inducing points")):
            if (getattr(self, name) or 0) > most:
                raise InputError(
                    f"SketchySAGA({name}={getattr(self, name)}) exceeds the {most} {what}; choose at most {most}."
                )

    @torch.no_grad()
    def solve(
        self,
        problem: InducingPointProblem,
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve an :class:`InducingPointProblem` of tensors.

        :param initial: starting point, of the solution's shape.
        :param callback: called with a :class:`~sketchgp.solvers.blockwise.Progress` once an epoch; True ends the solve.
        :param held_out: points ``(p, d)`` and targets ``(p,)`` or ``(p, t)`` whose root mean square error is computed
            as the solve goes on (in at most a tenth of the work) and kept in the report.
        :param progress: show a progress bar (default: only in a terminal).
        :returns: W, ``(m,)`` or ``(m, t)``, float64; of the iterates whose true residual is known, the best.  In the
            report ``passes`` are the kernel evaluations, those of Kzz, of the start and of the true residuals
            included, over n m; and ``history`` the estimates after each epoch.
        :raises InputError: for arguments that do not fit, a stream, or noise 0.
        :raises NumericalError: where NaN appears, or no step is small enough.

        Ctrl-C ends the solve after the step under way with the best iterate, its true residual and a warning.
        """
        owner = "SketchySAGA.solve"
        check_inducing(owner, problem)
        function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        x, y = problem.tensors("SketchySAGA()")
        assert problem.y is not None
        self.validate(problem)
        columns = problem.y.shape[1:]
        if initial is not None:
            like(owner, "initial", initial, (problem.m, *columns), problem.device, whose="the solution's")
        held_out = pair(owner, held_out, problem.inducing_points, columns)
        run = Saga(problem, x, y, self, initial, callback, held_out)
        run.loop(progress)
        report = run.report()
        conclude(report)
        return Solution(run.best.reshape(run.shape), report)

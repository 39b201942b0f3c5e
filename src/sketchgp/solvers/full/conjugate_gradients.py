"""Preconditioned conjugate gradients for blocks of right-hand sides, with true residuals.

References: those of :mod:`sketchgp.solvers.recurrence` and of :mod:`.gradients`, where the mathematics is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...checks import count, instance, settle, tolerance, word
from ...errors import InputError
from ...fingerprint import tensor_mark
from ...operators import LowRankPlusDiagonal
from ...operators.access import Access, accuracy_notes
from ...operators.engines import Matmul
from ...operators.marks import operator_marks
from ...preconditioners import AutomaticPreconditioner, Preconditioner
from ...report import Reason, SolveReport, conclude, shortfall_counted
from ..choices import FullSolver
from ..energy import Goal
from ..loop import Progress, clock, compare_ranks, solve_marks
from ..problem import FullProblem, Solution
from ..recurrence import LostToRoundingError
from ..system import System
from .gradients import Gradients
from .prediction_tolerance import FollowedPoints

_OTHERS = (
    "Conjugate gradients get no further in float64: use Cholesky(), where 24 n^2 bytes fit in memory, or ASkotch(); or "
    "raise the noise."
)


@dataclass(frozen=True)
class ConjugateGradients(FullSolver):
    """Conjugate gradients on ``(K + noise) W = Y``; all columns at once, each stopping by itself.

    Costs one product with K an iteration and six n x t float64 arrays.  Vectors and inner products are float64.
    With float32 data the products run in float32.  The residual is recomputed with float64 products when the recurrence
    ends or has drifted away from it (:mod:`.gradients`), and the solve goes on from there (iterative refinement) until
    the *true* residual meets the tolerance; where float32 products cannot get there it changes to float64 ones.
    There are no absolute thresholds: scaling K and noise, or y, by any factor changes nothing.

    Without a limit of its own (``max_iterations``, ``max_seconds``), a solve that falls short is finished by a Cholesky
    factorization in float64 where that fits the memory budget: smooth kernels with an output scale 1e10 times the noise
    defeat the recurrence.  In a model, a mean that is estimated to be more than one posterior deviation off even then
    is a :class:`sketchgp.errors.NumericalError`.  A limit asks for the best that it allows: the value, with a warning.

    :param tol: relative residual ``||y - (K + noise) w|| / ||y||`` that every column must reach.  ``"posterior"``: go
        on until the error of predictions ``k(., x) w`` is estimated to be below 1% of the posterior deviation of an
        observation, by 32 points that are followed (:mod:`.prediction_tolerance`).  ``"certified"``: until it
        certainly is (:attr:`SolveReport.error_bound`).  None is 1e-3; in a model it is ``"posterior"`` for the mean,
        1e-3 for other solves, or GPyTorch's ``eval_cg_tolerance`` and ``cg_tolerance`` where those are smaller.  Both
        words are for the mean; other solves of a model do as for None.
    :param max_iterations: the most iterations; None is 1000, or GPyTorch's ``max_cg_iterations`` in a model.
    :param precision: ``"auto"`` as above, or ``"float64"`` for float64 products throughout.

    The other parameters are those of all iterative solvers: ``max_seconds``, ``checkpoint``, ``every``
    (:class:`sketchgp.solvers.Budgeted`); in a model they are those of the posterior mean's solve.
    """

    adjustable: ClassVar[tuple[str, ...]] = (*FullSolver.adjustable, "max_iterations")

    tol: float | Literal["posterior", "certified"] | None = None
    max_iterations: int | None = None
    precision: Literal["auto", "float64"] = "auto"

    def __post_init__(self) -> None:
        settle(self, tolerance, "tol", words=("posterior", "certified"), optional=True)
        settle(self, count, "max_iterations", optional=True)
        settle(self, word, "precision", allowed=("auto", "float64"))
        self._check_budget()

    def solve(
        self,
        problem: FullProblem,
        preconditioner: Preconditioner | Literal["auto"] | None = "auto",
        matmul: Matmul = "auto",
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve a :class:`FullProblem`.

        :param preconditioner: a choice object, None, or ``"auto"`` as in :func:`sketchgp.accelerate`.
        :param matmul: ``"auto"``, ``"dense"``, ``"fused"``, ``"lattice"``, ``"near_and_far"``, ``"tiled"`` or
            ``"triton"``.
        :param initial: starting point in y's shape.
        :param callback: called with a :class:`Progress` once an iteration, whose residual is that of the recurrence;
            returning True ends the solve.
        :param held_out: points ``(m, d)`` and targets ``(m,)`` or ``(m, t)`` whose root mean square error is computed
            as the solve goes on (in at most a tenth of the work) and kept in the report.
        :param progress: show a progress bar (default: in a terminal or notebook).
        :raises InputError: for arguments that do not fit; :raises NumericalError: where NaN appears.

        Ctrl-C ends the solve with the best iterate (true residual) so far, and a warning.
        """
        owner = "ConjugateGradients.solve"
        self.validate(problem)
        choice = AutomaticPreconditioner() if preconditioner == "auto" else preconditioner
        if choice is not None:
            instance(owner, "preconditioner", choice, Preconditioner, "a choice such as RPCholesky(), None or 'auto'")
        options = self._full_options(problem, matmul, initial, callback, held_out, progress)
        began, system, built, notes = clock(), problem.system(matmul), None, []
        if choice is not None:
            choice.validate(system.n)
            choice = choice.resolved(Access(system.operator), system.noise)
            built = choice.build(system.operator, system.noise)
            options |= {"name": choice.name, "below": choice.below}
            notes = [choice.note(system.n)]
        columns = problem.y.reshape(system.n, -1)
        value, report = self.run(system, columns, built, setup_seconds=clock() - began, **options)
        report.notes += filter(None, notes)
        return Solution(value.reshape(problem.y.shape), report, problem)

    def run(
        self,
        system: System,
        rhs: Tensor,
        preconditioner: LowRankPlusDiagonal | None,
        *,
        name: str = "none",
        below: bool = False,
        setup_seconds: float = 0.0,
        goal: Goal | None = None,
        followed: FollowedPoints | None = None,
        **options: Any,
    ) -> tuple[Tensor, SolveReport]:
        """Solve one system (or a batch) and record its report.

        :param rhs: ``(..., n, t)``.
        :param goal: what every column is to come to beside the tolerance, which is a residual then.
        :param followed: points for ``tol="posterior"``; None for some of the system's own.
        :param below: whether the preconditioner lies below the matrix (:attr:`Preconditioner.below`), which makes the
            certified error small.
        :param setup_seconds: what making the preconditioner took.
        :param options: ``initial``, ``callback``, ``held_out`` and ``progress`` as those of :meth:`solve`;
            ``keep_interrupted`` to return the best iterate with a warning on Ctrl-C, instead of raising.
        :returns: the solution in rhs's dtype, and its report.
        """
        method = self._method(system, rhs, preconditioner, below=below, goal=goal, followed=followed)
        value, report = self._run(method, rhs, name, began=clock() - setup_seconds, **options)
        return value.to(rhs.dtype), report

    def lanczos(
        self, system: System, rhs: Tensor, preconditioner: LowRankPlusDiagonal | None, *, name: str = "none"
    ) -> tuple[Tensor, SolveReport]:
        """Solve as :meth:`run` does, for the Lanczos matrices of all columns ``(t, ..., k, k)``, and the report.

        Columns that ended before iteration k are padded with ones.
        """
        method = self._method(system, rhs, preconditioner, lanczos_columns=rhs.shape[-1])
        _, report = self._run(method, rhs, name, began=clock())
        return method.lanczos.matrices().to(rhs.dtype), report

    def explain(
        self,
        system: System,
        c: Tensor,
        goal: Goal,
        *,
        preconditioner: LowRankPlusDiagonal | None = None,
        name: str = "none",
        below: bool = False,
        initial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, SolveReport]:
        """Solve ``A w = c``, c ``(..., n, t)`` float64, to a goal, and record the report.

        :returns: w; A times it, which the last true residual is of; and the report.
        """
        method = self._method(system, c, preconditioner, below=below, goal=goal)
        value, report = self._run(method, c, name, began=clock(), initial=initial)
        product = method.product_of(value)
        return value, system.accurate_product(value) if product is None else product, report

    def tridiagonalize(
        self,
        system: System,
        rhs: Tensor,
        preconditioner: LowRankPlusDiagonal | None,
        columns: int,
        *,
        name: str = "none",
        below: bool = False,
        setup_seconds: float = 0.0,
        judged: bool = False,
    ) -> tuple[Tensor, Tensor, SolveReport, Tensor, Tensor]:
        """Solve one system (or a batch) and keep what Lanczos's method sees on the way.

        With ``P = R R^T`` the preconditioner, its vectors V of ``R^-1 A R^-T`` begin with ``R^-1 rhs`` of norm 1;
        ``W = R^-T V`` satisfies ``W^T P W = I`` and ``W^T A W = T`` until rounding is felt.

        :param rhs: ``(..., n, t)``; :param columns: the first so many are those of Lanczos.
        :param judged: whether to end where their eigenvalues tell that float32 products are with another matrix.
        :raises LostToRoundingError: there.
        :returns: the solution; ``2 b^T x - x^T A x`` of each column, at most ``b^T A^-1 b`` and less by the square of
            the error alone; its report, T ``(columns, ..., k, k)`` float64, and W ``(columns, ..., n, k)`` in rhs's
            dtype; rows of T past a column's end are unit rows, columns of W are zero.  k is at most what the memory
            budget allows of W, or 20; a note of the report says where that was short.
        """
        system.store_remainder()
        method = self._method(system, rhs, preconditioner, below=below, lanczos_columns=columns, keep_vectors=True)
        method.watched, method.out_dtype = judged, torch.float64  # judged before it is rounded
        value, report = self.without_budget()._run(method, rhs, name, began=clock() - setup_seconds)
        if method.lost:
            raise LostToRoundingError("An eigenvalue of a matrix that has none so small.")
        forms = method.space.dot(method.value, method.b + method.r)
        return value.to(rhs.dtype), forms, report, method.lanczos.matrices(), method.lanczos.kept_vectors()

    @torch.no_grad()
    def _method(self, system: System, rhs: Tensor, built: LowRankPlusDiagonal | None, **wanted: Any) -> Gradients:
        """Return the method at work on one system with a preconditioner.

        :param wanted: other arguments of :class:`Gradients`.
        """
        compare_ranks(self.name, lambda: solve_marks(system.noise, rhs, self._described()))
        return Gradients(self, system, rhs, built, **wanted)

    @torch.no_grad()
    def _run(self, method: Gradients, rhs: Tensor, name: str, **options: Any) -> tuple[Tensor, SolveReport]:
        """Run a method; return the value in float64, and the report, which is recorded.

        :param name: of the preconditioner; :param options: those of a run.
        """
        work, marks = self.max_iterations or 1000, lambda: self._marks(method, rhs, name)
        value, report = self._execute(method, work, marks, lambda: self._facts(method, name), **options)
        report.notes += accuracy_notes(method.system.operator)
        with shortfall_counted() if method.lost and not method.by_energy else nullcontext():
            conclude(report)
        return value, report

    def _facts(self, method: Gradients, name: str) -> dict[str, Any]:
        """Return fields of the report, with advice for the reasons to end."""
        preconditioner = method.preconditioner
        rank = 0 if preconditioner is None else preconditioner.rank
        remedy = "Use a preconditioner: preconditioner=sketchgp.RPCholesky()."
        if preconditioner is not None:
            remedy = f"Choose a preconditioner= of higher rank (now {rank}), or raise max_iterations."
        remedies = {Reason.ITERATIONS: remedy}
        if method.advice:
            remedies = dict.fromkeys((Reason.ITERATIONS, Reason.STAGNATED), method.advice)
        elif method.asked != "certified" and method.exact and method.out_dtype == torch.float64:
            remedies[Reason.STAGNATED] = _OTHERS
        if method.asked == "certified":
            remedies[Reason.STAGNATED] = (
                "Rounding allows no less: raise the noise, or ask for an estimate, tol='posterior'."
            )
        return {"preconditioner": name, "rank": rank, "remedies": remedies}

    def _marks(self, method: Gradients, rhs: Tensor, name: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return marks of the problem for a checkpoint, and rough ones of what ranks round otherwise."""
        system, built = method.system, method.preconditioner
        if system.operator.batch_shape or rhs.dim() > 2:
            raise InputError("checkpoint expects a single system; solve the parts of a batch one by one.")
        marks, rough = {**operator_marks(system.operator), **solve_marks(system.noise, rhs, self._described())}, {}
        if built is not None:
            marks["the preconditioner"] = tensor_mark(built.apply_inverse(rhs[:, :1].to(torch.float64)))
            rough["the preconditioner"] = name
        return marks, rough

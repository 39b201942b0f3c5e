"""The choices of an accelerated model, and the caches that outlive GPyTorch's short-lived operators."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from gpytorch.settings import eval_cg_tolerance
from linear_operator import settings
from linear_operator.operators import BatchRepeatLinearOperator
from torch import Tensor

from ...density import LogDensity, Probes, Solutions
from ...operators import LowRankPlusDiagonal
from ...preconditioners import Preconditioner, PreconditionerCache
from ...report import SolveReport
from ...solvers import BlockSolver, Budgeted, Cholesky, ConjugateGradients, FullProblem, Solver, System
from ...solvers.automatic import automatic_solver
from ...solvers.solver import solve_system
from ...space import Space

_GPYTORCHS_ITERATIONS = 1000  # GPyTorch's default, which is no tighter than the solver's own
_RESIDUAL = 1e-3  # relative residual where nothing else was asked for
Purpose = Literal["mean", "fantasies", "columns"]  # what is solved for: a posterior mean, that of fantasies, or others
ATTRIBUTE = "_sketchgp"  # a model keeps its Acceleration here, and a likelihood a list of them


@dataclass
class Acceleration:
    """The choices of one ``accelerate`` call, shared by the model and its likelihood.

    Deep copies and pickles keep the choices and start with empty caches.

    :ivar solver: the solver of the posterior mean, or "auto"; conjugate gradients (or the :class:`Cholesky` that it is)
        solve everything else.
    :ivar variance: how variances are computed, :ivar variance_samples: and of how many samples.
    :ivar lock: held by ``predict`` while it looks for the model's solution, or solves for it.
    :ivar probe_seed: seed of fixed probe vectors for the log determinant, or None for fresh ones each time.
    :ivar probe_count: how many there are of them, or None for GPyTorch's ``num_trace_samples``.
    :ivar doubled: whether log determinants are by float64 products, as float32 has been found to lose one.
    :ivar density: how log densities are computed; a fit sets it by :meth:`having`.
    :ivar solutions: solutions of the last evaluation of a fit by samples.
    """

    preconditioner: Preconditioner | None
    solver: Solver[FullProblem] | str
    matmul: str
    matmul_precision: str = "float32"
    variance: str = "auto"
    variance_samples: int = 128
    probe_seed: int | None = 0
    probe_count: int | None = None
    cache: PreconditionerCache = field(init=False, repr=False)
    doubled: bool = field(default=False, init=False, compare=False)
    density: LogDensity = field(default_factory=Probes, init=False, repr=False, compare=False)
    solutions: Solutions | None = field(default=None, init=False, repr=False, compare=False)
    lock: Any = field(default_factory=threading.RLock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.cache = PreconditionerCache(self.preconditioner or Preconditioner())

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    @contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Have other values of some attributes inside the block, such as another density."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def probe_choice(self) -> tuple[int | None, int]:
        """Return the seed of fixed probes, or None for fresh ones, and their number."""
        seed = self.probe_seed
        if seed is None and settings.deterministic_probes.on():
            seed = 0
        return seed, self.probe_count or settings.num_trace_samples.value()

    def solver_for(self, purpose: Purpose, system: System, evaluation: bool = True) -> tuple[Solver[FullProblem], str]:
        """Return the solver of one kind of solve and, where it was chosen automatically, the reason.

        :param evaluation: whether columns are solved for to GPyTorch's ``eval_cg_tolerance``; a mean always is.
        """
        if purpose == "mean":
            return self.mean_solver(system)
        if purpose == "columns" or isinstance(self.solver, Cholesky):
            return self.column_solver(evaluation), ""
        tol = self.solver.tol if isinstance(self.solver, ConjugateGradients) else None  # as accurate as the mean
        return self._gradients_of_mean(tol).without_budget(), ""

    def conjugate_gradients(self, evaluation: bool = False) -> ConjugateGradients:
        """Return conjugate gradients to a relative residual; choices left open follow GPyTorch's settings in force.

        :param evaluation: whether the tolerance follows ``eval_cg_tolerance`` instead of ``cg_tolerance``.
        """
        chosen = self.solver if isinstance(self.solver, ConjugateGradients) else ConjugateGradients()
        allowed = settings.max_cg_iterations.value()
        limit = chosen.max_iterations or (None if allowed == _GPYTORCHS_ITERATIONS else allowed)
        tol = chosen.tol if isinstance(chosen.tol, float) else _tolerance(evaluation)
        return dataclasses.replace(chosen, tol=tol, max_iterations=limit)

    def column_solver(self, evaluation: bool = False) -> ConjugateGradients | Cholesky:
        """Return the solver of every system but the posterior mean's."""
        return self.solver if isinstance(self.solver, Cholesky) else self.column_gradients(evaluation)

    def column_gradients(self, evaluation: bool = False) -> ConjugateGradients:
        """Return conjugate gradients without the limit of time and the checkpoint, which are the mean's alone."""
        return self.conjugate_gradients(evaluation).without_budget()

    def mean_solver(self, system: System) -> tuple[Solver[FullProblem], str]:
        """Return the solver of the posterior mean and, where it was chosen automatically, the reason."""
        chosen, why = self.solver, ""
        if isinstance(chosen, str):
            preconditioner, operator = self.preconditioner if self.preconditions() else None, system.operator
            chosen, why = automatic_solver(system.n, operator.device, preconditioner, operator)
        if isinstance(chosen, ConjugateGradients):
            return self._gradients_of_mean(chosen.tol), why
        return self._with_tolerance(chosen, evaluation=True), why

    def own_solver(self) -> Solver[FullProblem]:
        """Return the solver that the user named, with ``cg_tolerance`` where its own tolerance was left open."""
        assert not isinstance(self.solver, str)
        return self._with_tolerance(self.solver, evaluation=False)

    def _gradients_of_mean(self, tol: float | Literal["posterior", "certified"] | None) -> ConjugateGradients:
        """Return conjugate gradients that end once predictions are accurate, unless a residual was asked for."""
        if tol is None and eval_cg_tolerance.value() >= _RESIDUAL:
            tol = "posterior"
        solver = self.conjugate_gradients(evaluation=True)
        return dataclasses.replace(solver, tol=tol) if isinstance(tol, str) else solver

    @staticmethod
    def _with_tolerance(solver: Solver[FullProblem], evaluation: bool) -> Solver[FullProblem]:
        """Return an iterative solver with GPyTorch's tolerance if its own was left open, and others as they are."""
        if not isinstance(solver, Budgeted) or getattr(solver, "tol", 0) is not None:
            return solver
        left_open: dict[str, Any] = {"tol": _tolerance(evaluation)}
        return dataclasses.replace(solver, **left_open)

    def preconditions(self) -> bool:
        """Return True if there is to be a preconditioner, by the choice and the setting in force."""
        return self.preconditioner is not None and settings.max_preconditioner_size.value() > 0

    def build(self, operator: Any, noise: Tensor, differentiable: bool) -> LowRankPlusDiagonal | None:
        """Return the preconditioner of ``operator + diag(noise)``, or None where there is to be none.

        Under ``deterministic_probes`` pivots are kept, so that losses are one function of the hyperparameters.
        """
        if not self.preconditions():
            return None
        with self.cache.holding() if settings.deterministic_probes.on() else nullcontext():
            return self.cache.get(operator, noise, differentiable)

    def preconditioned(self, built: LowRankPlusDiagonal | None) -> dict[str, Any]:
        """Return a preconditioner as arguments of conjugate gradients: with its name, and whether it lies below A."""
        if built is None:
            return {"preconditioner": None}
        return {"preconditioner": built, "name": self.cache.chosen.name, "below": self.cache.chosen.below}

    @torch.no_grad()
    def solve(
        self, solver: Any, system: System, rhs: Tensor, start: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, SolveReport]:
        """Return ``A^-1 rhs``, ``(..., n, t)``: by conjugate gradients with the preconditioner, or by another solver.

        :param start: a solution of nearly the same system, for other solvers.
        :param options: further arguments of :meth:`ConjugateGradients.run`.
        """
        if not isinstance(solver, ConjugateGradients):
            return _solve_from(solver, system, rhs, start)
        chosen = self.preconditioned(self.build(system.operator, system.noise, differentiable=False))
        return solver.run(system, rhs, setup_seconds=self.cache.take_seconds(), **chosen, **options)


def _tolerance(evaluation: bool) -> float:
    """Return GPyTorch's tolerance of evaluation or training, at most 1e-3."""
    return min(_RESIDUAL, (eval_cg_tolerance if evaluation else settings.cg_tolerance).value())


def _solve_from(solver: Any, system: System, rhs: Tensor, before: Tensor | None) -> tuple[Tensor, SolveReport]:
    """Return ``A^-1 rhs``, ``(n, t)``, starting from a solution of nearly the same system.

    The solve starts from zero where there is no such solution, or where one of its columns is no nearer than zero.  So
    it does where the solver takes no start or keeps a checkpoint, and where ranks, whose starts may differ, work
    together.
    """
    warm = isinstance(solver, BlockSolver) and solver.checkpoint is None and not Space.of(system.n).shared
    if warm and before is not None and before.shape == rhs.shape and before.device == rhs.device:
        residual = rhs.to(torch.float64) - system.accurate_product(before)
        if bool((residual.norm(dim=0) < rhs.norm(dim=0)).all()):
            value, report = solver.run(system, rhs, initial=before)
            report.notes.append("began with the solution that a fit has left")
            return value, report
    return solve_system(solver, system, rhs)


def marked_choices(covariance: Any) -> Acceleration | None:
    """Return the choices of the accelerated model whose forward marked this prior covariance."""
    if isinstance(covariance, BatchRepeatLinearOperator):
        covariance = covariance.base_linear_op
    return getattr(covariance, ATTRIBUTE, None)


def choices_of(covariance: Any, likelihood: Any) -> Acceleration | None:
    """Return the choices that a prior covariance is marked with, or else those of its likelihood's last model.

    GPyTorch rebuilds some covariances (interpolation grids, fantasies), which loses the mark.  None is returned where
    neither is known.
    """
    owners = likelihood.__dict__.get(ATTRIBUTE)
    return marked_choices(covariance) or (owners[-1] if owners else None)

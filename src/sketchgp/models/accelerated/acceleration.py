"""What an accelerated model carries: its choices, and the caches that outlive GPyTorch's short-lived operators."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from linear_operator import settings
from linear_operator.operators import BatchRepeatLinearOperator
from torch import Tensor

from ...operators import LowRankPlusDiagonal
from ...preconditioners import Preconditioner, PreconditionerCache
from ...solvers import Budgeted, Cholesky, ConjugateGradients, FullProblem, Solver
from ...solvers.automatic import automatic_solver
from .mean_solve import gpytorch_tolerance
from .warm import Left

_GPYTORCHS_ITERATIONS = 1000  # its default, which limits nothing that the solver's own default does not
_RESIDUAL = 1e-3  # relative, of solves that nothing else is said of
ATTRIBUTE = "_sketchgp"  # where a model keeps its Acceleration, and a likelihood a list of them


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
    :ivar left: solutions that a fit by samples has left.
    """

    preconditioner: Preconditioner | None
    solver: Solver[FullProblem] | str
    matmul: str
    matmul_precision: str = "float32"
    variance: str = "auto"
    variance_samples: int = 128
    probe_seed: int | None = 0
    probe_count: int | None = None
    cache: PreconditionerCache | None = field(init=False, repr=False)
    doubled: bool = field(default=False, init=False, compare=False)
    left: Left | None = field(default=None, init=False, repr=False, compare=False)
    lock: threading.RLock = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.cache = None if self.preconditioner is None else PreconditionerCache(self.preconditioner)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @contextmanager
    def fixed_probes(self, seed: int, count: int) -> Iterator[None]:
        """Probe vectors of log determinants are the same ``count`` ones for every one inside the block."""
        before = self.probe_seed, self.probe_count
        self.probe_seed, self.probe_count = seed, count
        try:
            yield
        finally:
            self.probe_seed, self.probe_count = before

    @property
    def preconditioner_name(self) -> str:
        return "none" if self.preconditioner is None else self.preconditioner.name

    def conjugate_gradients(self) -> ConjugateGradients:
        """Conjugate gradients with what the user left open taken from GPyTorch's settings in force; to a residual."""
        chosen = self.solver if isinstance(self.solver, ConjugateGradients) else ConjugateGradients()
        allowed = settings.max_cg_iterations.value()
        limit = chosen.max_iterations or (None if allowed == _GPYTORCHS_ITERATIONS else allowed)
        tol = chosen.tol if isinstance(chosen.tol, float) else self._tolerance()
        return dataclasses.replace(chosen, tol=tol, max_iterations=limit)

    def column_solver(self) -> ConjugateGradients | Cholesky:
        """The solver of every system but the posterior mean's."""
        if isinstance(self.solver, Cholesky):
            return self.solver
        return dataclasses.replace(self.conjugate_gradients(), max_seconds=None, checkpoint=None)

    def mean_solver(self, n: int, device: torch.device) -> tuple[Solver[FullProblem], str]:
        """The solver of the posterior mean of n points; and, where it was chosen here, why."""
        if isinstance(self.solver, ConjugateGradients):
            return self._gradients_of_mean(self.solver.tol), ""
        if not isinstance(self.solver, str):
            return self._with_tolerance(self.solver), ""
        chosen, why = automatic_solver(n, device, self.preconditioner if self.preconditions() else None)
        if isinstance(chosen, ConjugateGradients):
            return self._gradients_of_mean(None), why
        return self._with_tolerance(chosen), why

    def own_solver(self) -> Solver[FullProblem]:
        """The solver that the user named, with GPyTorch's tolerance where its own was left open."""
        assert not isinstance(self.solver, str)
        return self._with_tolerance(self.solver)

    def fantasy_solver(self) -> ConjugateGradients | Cholesky:
        """The solver of the means of fantasies: as exact as the mean's."""
        if isinstance(self.solver, Cholesky):
            return self.solver
        tol = self.solver.tol if isinstance(self.solver, ConjugateGradients) else None
        return dataclasses.replace(self._gradients_of_mean(tol), max_seconds=None, checkpoint=None)

    def _gradients_of_mean(self, tol: float | Literal["posterior", "certified"] | None) -> ConjugateGradients:
        """Conjugate gradients for the mean: until predictions are right, where no residual was asked for."""
        if tol is None and gpytorch_tolerance() >= _RESIDUAL:
            tol = "posterior"
        found = self.conjugate_gradients()
        return dataclasses.replace(found, tol=tol) if isinstance(tol, str) else found

    def _with_tolerance(self, solver: Solver[FullProblem]) -> Solver[FullProblem]:
        """The solver with GPyTorch's tolerance, where it is of iterations and its own was left open."""
        if not isinstance(solver, Budgeted) or getattr(solver, "tol", 0) is not None:
            return solver
        left_open: dict[str, Any] = {"tol": self._tolerance()}
        return dataclasses.replace(solver, **left_open)

    @staticmethod
    def _tolerance() -> float:
        return min(_RESIDUAL, gpytorch_tolerance())

    def preconditions(self) -> bool:
        """Whether there is to be a preconditioner, by the choice and the setting in force."""
        return self.cache is not None and settings.max_preconditioner_size.value() > 0

    def build(self, operator: Any, noise: Tensor, differentiable: bool) -> LowRankPlusDiagonal | None:
        """The preconditioner of ``operator + diag(noise)``, or None where there is to be none.

        Under ``deterministic_probes`` pivots are kept: they make one function of the losses as the probes do.
        """
        if self.cache is None or not self.preconditions():
            return None
        with self.cache.holding() if settings.deterministic_probes.on() else nullcontext():
            return self.cache.get(operator, noise, differentiable)


class Inverse:
    """``v -> P^-1 v``: the callable that linear_operator passes around as a preconditioner."""

    def __init__(self, built: LowRankPlusDiagonal) -> None:
        self.built = built.detached(built.out_dtype)

    def __call__(self, vectors: Tensor) -> Tensor:
        with torch.no_grad():
            return self.built.apply_inverse(vectors)


def marked_choices(covariance: Any) -> Acceleration | None:
    """The choices of the accelerated model whose prior covariance this is, by the mark its forward left."""
    if isinstance(covariance, BatchRepeatLinearOperator):
        covariance = covariance.base_linear_op
    return getattr(covariance, ATTRIBUTE, None)


def choices_of(covariance: Any, likelihood: Any) -> Acceleration | None:
    """Those of a prior covariance, or of the last model that its likelihood was accelerated with; None for neither.

    GPyTorch rebuilds some covariances (interpolation grids, fantasies), which loses the mark.
    """
    owners = likelihood.__dict__.get(ATTRIBUTE)
    return marked_choices(covariance) or (owners[-1] if owners else None)

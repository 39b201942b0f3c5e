"""The training data of an accelerated model as one linear system, ``A = K + noise``, and what is remembered of it."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property
from typing import Any

import torch
from gpytorch.settings import detach_test_caches
from torch import Tensor

from ...density.base import bilinear_derivative
from ...errors import NumericalError
from ...fingerprint import data_key
from ...inference import explained
from ...inference.calibrated import Calibrated
from ...inference.pathwise import Deviations
from ...operators import KernelMatrix, LowRankPlusDiagonal
from ...operators.first_order import first_order, in_callers_context
from ...operators.lazies import SUMS
from ...report import Reason, SolveReport, shortfall_counted, warn_of
from ...settings import memory_budget
from ...solvers import Budgeted, Cholesky, ConjugateGradients, System
from ...solvers.energy import Goal, VarianceGoal
from ...solvers.full.cholesky import factor_bytes
from ...solvers.solver import solve_system
from .acceleration import Acceleration
from .added_diag import AcceleratedAddedDiagLinearOperator, summands
from .approximate import Approximate, refuse
from .threshold import threshold_untouched

EXACT_ROWS = 256  # test points that are solved for at once
_LOOSE = 0.5  # relative residual, where the goal is one of energies
_VECTORS = 20  # float64 vectors that a solve holds for each column
_COLUMNS = 90  # rows of A for each right-hand side, up to which a factorization is the cheaper
_REMEMBERED = "_sketchgp_remembered"  # attribute of a prediction strategy


class Remembered:
    """Results that a prediction strategy keeps for later predictions; copies and pickles are empty.

    :ivar key: of the parameters, data and settings that the strategy is of; None before it is known.
    :ivar solved_by_us: whether no solve is by GPyTorch's own iterations; None before somebody asked.
    :ivar columns: test points that were solved for, or are about to be.
    :ivar root: the Cholesky factor of A, where it was factorized; :ivar failed: whether it has none to float64.
    :ivar low_rank: low-rank variances, :ivar deviations: and posterior samples, where they were computed.
    :ivar checked: which of ``"low_rank"`` and ``"samples"`` were compared with exact variances.
    """

    def __init__(self) -> None:
        self.key: tuple[Any, ...] | None = None
        self.solved_by_us: bool | None = None
        self.columns, self.failed = 0, False
        self.root: Tensor | None = None
        self.low_rank: Calibrated | None = None
        self.deviations: Deviations | None = None
        self.checked: set[str] = set()

    def __reduce__(self) -> Any:
        return Remembered, ()


def remembered_by(strategy: Any) -> Remembered:
    """Return what a prediction strategy remembers."""
    return strategy.__dict__.setdefault(_REMEMBERED, Remembered())


class Training:
    """``A = K + noise`` of a model's observed training data, and how it is solved, as both are when this is made.

    It has no gradients where GPyTorch's ``detach_test_caches`` is on.

    With ``solver="auto"`` it is factorized once that is cheaper than conjugate gradients, ``n^3 / 3`` operations in
    place of ``2 n^2`` an iteration and column; with :class:`~sketchgp.solvers.Cholesky` it always is.

    :param noisy: A, evaluated, ``(..., n, n)``; an operator of another class is solved by its structure.
    :param acceleration: the choices of the model.
    :param remembered: what earlier predictions found.

    :ivar matrix: K, and :ivar noise: variances ``(..., n)``; None of both for an operator of another class.
    :ivar plain: whether K is one kernel matrix without batch, whose kernel is known at any two inputs.
    """

    def __init__(self, noisy: Any, acceleration: Acceleration, remembered: Remembered | None = None) -> None:
        self.noisy = noisy.detach() if detach_test_caches.on() else noisy
        self.acceleration = acceleration
        self.remembered = Remembered() if remembered is None else remembered
        self.ours = isinstance(noisy, AcceleratedAddedDiagLinearOperator)
        self.solver = acceleration.column_solver(evaluation=True)
        self.matrix: Any = self.noisy.latent if self.ours else None
        self.noise: Any = self.noisy.noise if self.ours else None
        self.plain = isinstance(self.matrix, KernelMatrix) and not noisy.batch_shape and self.matrix.x1.dim() == 2
        self.gradients, self._preconditioned = torch.is_grad_enabled(), acceleration.preconditions()
        self._free = isinstance(acceleration.solver, str) and threshold_untouched()
        self._noted = [(tensor, data_key(tensor)) for tensor in noisy.representation()] if self.ours else []

    @property
    def changed(self) -> bool:
        """True if a hyperparameter, or the data, were changed in place since then."""
        return any(data_key(tensor) != key for tensor, key in self._noted)

    @cached_property
    def system(self) -> System:
        """A without gradients, for a solver."""
        if self.ours:
            return self.noisy.system()
        zero = torch.zeros(self.noisy.shape[:-1], dtype=self.noisy.dtype, device=self.noisy.device)
        return System(self.noisy, zero)

    @cached_property
    def preconditioner(self) -> LowRankPlusDiagonal | None:
        """The preconditioner of conjugate gradients, or None."""
        if not self._preconditioned:
            return None
        with torch.no_grad():
            return self.acceleration.build(self.system.operator, self.system.noise, differentiable=False)

    # --- solves ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def solve_block(self, b: Tensor, goal: Goal) -> tuple[explained.Explained, SolveReport]:
        """Solve ``A w = b`` for b ``(n, t)`` float64 by the solver of the mean, and return the report as well.

        Conjugate gradients go on to the goal, other solvers to their tolerance.
        """
        solver, _ = self.acceleration.mean_solver(self.system)
        if not isinstance(solver, ConjugateGradients):
            solver = solver.without_budget() if isinstance(solver, Budgeted) else solver
            weights, report = solve_system(solver, self.system, b)
            return explained.Explained(weights, self.system.accurate_product(weights)), report
        assert isinstance(self.solver, ConjugateGradients)
        return self._solved_by_gradients(dataclasses.replace(self.solver, tol=_LOOSE), b, goal)

    def solve(self, c: Tensor, prior: Tensor, below_noise: bool = True) -> explained.Explained:
        """Solve ``A w = c`` until the errors of all variances ``prior - c^T w`` are below a hundredth of each.

        They need never be below a ten thousandth of the noise.

        :param c: ``(..., n, m)`` float64; :param prior: ``(..., m)``.
        :param below_noise: whether errors end below a hundredth of the least noise, too.
        """
        if not self.ours:
            return self._solved_by_structure(c, prior)
        if self.factorizes(0):
            try:
                return self._solved_by_factor(c)
            except NumericalError:
                if isinstance(self.solver, Cholesky):
                    raise
        assert isinstance(self.solver, ConjugateGradients)
        goal = VarianceGoal(prior, self.system.noise.to(torch.float64).amin(dim=-1, keepdim=True), below_noise)
        return self._solved_by_gradients(self.solver, c, goal)[0]

    def _solved_by_gradients(
        self, solver: ConjugateGradients, c: Tensor, goal: Goal
    ) -> tuple[explained.Explained, SolveReport]:
        options = self.acceleration.preconditioned(self.preconditioner)
        with shortfall_counted():
            result, report = explained.solve(self.system, c, solver, goal, **options)
        return self._finished(result, report, c), report

    def _solved_by_structure(self, c: Tensor, prior: Tensor) -> explained.Explained:
        """Refine the solution of GPyTorch, which solves by structure, where it is not accurate enough."""
        parts = summands(self.noisy)
        noise = self.system.noise if parts is None else parts[1].diagonal(dim1=-1, dim2=-2)
        solver = self.solver if isinstance(self.solver, ConjugateGradients) else ConjugateGradients()
        initial = None if type(self.noisy) in SUMS else self.noisy.solve(c)
        goal = VarianceGoal(prior, noise.to(torch.float64).amin(dim=-1, keepdim=True), below_noise=True)
        return explained.solve(self.system, c, solver, goal, initial=initial)[0]

    def _finished(self, result: explained.Explained, report: SolveReport, c: Tensor) -> explained.Explained:
        """Return the result of conjugate gradients or, where they fell short, that of a factorization that fits."""
        limited = isinstance(self.solver, ConjugateGradients) and self.solver.limited
        if not report.converged and not limited and self._factor_fits():
            with suppress(NumericalError):
                result = self._solved_by_factor(c)
                left = (c - self.system.accurate_product(result.weights)).norm(dim=-2)
                report.residual = (left / c.norm(dim=-2).clamp(min=torch.finfo(c.dtype).tiny)).reshape(-1)
                report.reason, report.converged = Reason.DIRECT, True
                report.notes.append("a Cholesky factorization in float64 finished the solve")
        warn_of(report)
        return result

    # --- the factor -----------------------------------------------------------------------------------------

    def factorizes(self, columns: int) -> bool:
        """Return whether A is factorized, by the points announced to :meth:`expect` so far and ``columns`` more."""
        if isinstance(self.solver, Cholesky):
            return True
        few = self.system.n > _COLUMNS * (self.remembered.columns + columns)
        return self._free and (self.remembered.root is not None or (not few and self._factor_fits()))

    def expect(self, columns: int) -> None:
        """Announce that so many test points are about to be solved for."""
        if self._free:
            self.remembered.columns += columns

    def _factor_fits(self) -> bool:
        """Tell whether a factorization exists, as far as is known, and fits the memory budget."""
        needed, remembered = factor_bytes(self.system.n, self.system.batch_shape.numel()), self.remembered
        fits = needed <= memory_budget.value(self.system.noise.device)
        return remembered.root is not None or (not remembered.failed and fits)

    def _solved_by_factor(self, c: Tensor) -> explained.Explained:
        """:raises NumericalError: where A is not positive definite to float64."""
        try:
            result, self.remembered.root = explained.solve_by_factor(self.system, c, self.remembered.root)
        except NumericalError:
            self.remembered.failed = True
            raise
        return result

    # --- variances ------------------------------------------------------------------------------------------

    @cached_property
    def approximate(self) -> Approximate:
        """Variances of many points."""
        return Approximate(self)

    def method(self, chosen: str, x: Tensor, differentiated: bool) -> str:
        """Return how variances at x ``(m, d)`` are computed: ``"exact"``, ``"low_rank"`` or ``"samples"``.

        :param chosen: one of these, or ``"auto"``; :param x: as the kernel sees it.
        :param differentiated: whether gradients in the points may be asked for.
        :raises InputError: where the model has not what was chosen.
        """
        if chosen in ("low_rank", "samples") and not self.plain:
            raise refuse(chosen)
        if chosen != "auto":
            return chosen
        hyperparameters = self.gradients and any(tensor.requires_grad for tensor in self.noisy.representation())
        live = differentiated or hyperparameters
        if live or not self.plain or isinstance(self.solver, Cholesky) or self.approximate.exact_is_cheap(len(x)):
            return "exact"
        self.approximate.prepare(x)
        return self.approximate.best()

    def quadratic_forms(self, c: Tensor, prior: Tensor, diagonal: bool) -> Tensor:
        """Return ``c^T A^-1 c`` ``(..., m, m)``, or its diagonal ``(..., m)``; differentiable in c and A's parts."""
        tree, parts = self.noisy.representation_tree(), self.noisy.representation()
        return _QuadraticForms.apply(self, tree, diagonal, prior.detach(), c, *parts)

    @property
    def columns(self) -> int:
        """Number of columns of n numbers that a solve has room for within the memory budget."""
        budget = memory_budget.value(self.system.noise.device)
        return max(1, budget // (8 * _VECTORS * self.system.n))


class _QuadraticForms(torch.autograd.Function):
    """Explained variances, whose gradient takes no solve: the value does not depend on its weights to first order."""

    @staticmethod
    def forward(
        ctx: Any, training: Training, tree: Any, diagonal: bool, prior: Tensor, c: Tensor, *parts: Tensor
    ) -> Tensor:
        result = training.solve(c.detach(), prior, below_noise=not diagonal)
        ctx.tree, ctx.diagonal, ctx.caller = tree, diagonal, copy_context()
        ctx.save_for_backward(result.weights, c, *parts)
        return result.diagonal(c) if diagonal else result.matrix(c)

    @staticmethod
    @in_callers_context
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, c, *parts = ctx.saved_tensors
        of_parts: tuple[Tensor | None, ...] = (None,) * len(parts)
        with torch.no_grad():
            half = weights * grad.unsqueeze(-2) if ctx.diagonal else weights @ ((grad + grad.mT) / 2)
            if any(ctx.needs_input_grad[5:]):
                of_parts = bilinear_derivative(ctx.tree(*parts), -half, weights)
            of_c = (2 * half).sum_to_size(c.shape)
        return first_order((None, None, None, None, of_c, *of_parts), grad, *ctx.saved_tensors)

"""The covariance of an accelerated model's posterior, solved for when somebody looks at it, and only as far as needed.

GPyTorch's prediction strategy solves for every test point when the model is called, also where only the mean is read.
Here the training side is noted as it is at the call: the settings that solves depend on, whether autograd is on, the
tensors behind the matrix.  What is looked at later is what would have been computed then, or an error.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from ...errors import NumericalError
from ...fingerprint import data_key, tensor_key
from ...inference import explained
from ...operators import KernelMatrix, LowRankPlusDiagonal
from ...operators.access import float64
from ...operators.first_order import first_order, in_callers_context
from ...operators.lazies import parameters_in
from ...operators.marks import operator_key
from ...operators.tiles import spans
from ...operators.unchanged import State
from ...report import Reason, SolveReport, shortfall_counted, warn_of
from ...settings import memory_budget, variance
from ...solvers import Budgeted, Cholesky, ConjugateGradients, System
from ...solvers.energy import Goal
from ...solvers.solver import solve_system
from ..lazy_covariance import Formula, LazyCovariance, positive
from .added_diag import AcceleratedAddedDiagLinearOperator
from .approximate import Approximate, Refusing, refuse
from .threshold import threshold_untouched

_ROWS = 256  # test points solved for at once
_LOOSE = 0.5  # relative residual, where the goal is of energies
_VECTORS = 8  # float64 vectors that a solve holds for each of them
_FACTOR = "_sketchgp_factor"  # of a prediction strategy


def factors_of(strategy: Any) -> explained.Factors:
    """Where a prediction strategy keeps the factor of its training covariance."""
    return strategy.__dict__.setdefault(_FACTOR, explained.Factors())


class TrainingSide:
    """``A = K + noise`` of the training data, and how it is solved, as both are when this is made.

    :param noisy: A, evaluated, ``(..., n, n)``.
    :param factors: where its Cholesky factor is kept, if it comes to that: with ``solver="auto"`` once that is cheaper
        than conjugate gradients, and with :class:`~sketchgp.solvers.Cholesky`.
    """

    def __init__(self, noisy: AcceleratedAddedDiagLinearOperator, factors: explained.Factors) -> None:
        acceleration = noisy.acceleration
        assert acceleration is not None
        self.noisy, self.acceleration = noisy, acceleration
        self.solver = acceleration.column_solver(evaluation=True)
        self.preconditioned = acceleration.preconditions()
        self.gradients = torch.is_grad_enabled()
        self._factors, self._free = factors, isinstance(acceleration.solver, str) and threshold_untouched()
        self._noted = [(tensor, data_key(tensor)) for tensor in noisy.representation()]

    @property
    def changed(self) -> bool:
        """Whether a hyperparameter, or the data, were changed in place since then."""
        return any(data_key(tensor) != key for tensor, key in self._noted)

    @cached_property
    def system(self) -> System:
        """A as solvers take it."""
        return System(self.noisy._linear_op, self.noisy._noise_vector())

    @cached_property
    def preconditioner(self) -> LowRankPlusDiagonal | None:
        if not self.preconditioned or isinstance(self.solver, Cholesky):
            return None
        with torch.no_grad():
            return self.acceleration.build(self.system.operator, self.system.noise, differentiable=False)

    @property
    def _name(self) -> str:
        """Of the preconditioner."""
        return "none" if self.preconditioner is None else self.acceleration.preconditioner_name

    @property
    def _below(self) -> bool:
        """Whether it lies below the matrix."""
        choice = self.acceleration.preconditioner
        return self.preconditioner is not None and choice is not None and choice.below

    @cached_property
    def approximate(self) -> Approximate:
        """Variances of many points."""
        return Approximate(self)

    def method(self, chosen: str, x: Tensor, differentiated: bool) -> str:
        """How variances at x ``(m, d)``, as the kernel sees it, are computed: ``"exact"``, ``"low_rank"`` or
        ``"samples"``.

        :param chosen: one of these, or ``"auto"``.
        :param differentiated: whether gradients in the points may be asked for.
        :raises InputError: where the model has not what was chosen.
        """
        serves = Approximate.serves(self.noisy)
        if chosen in ("low_rank", "samples") and not serves:
            raise refuse(chosen)
        if chosen != "auto":
            return chosen
        hyperparameters = self.gradients and any(tensor.requires_grad for tensor in self.noisy.representation())
        live = differentiated or hyperparameters
        if live or not serves or isinstance(self.solver, Cholesky) or self.approximate.exact_is_cheap(len(x)):
            return "exact"
        self.approximate.prepare(x)
        return self.approximate.best()

    @torch.no_grad()
    def solve_block(self, b: Tensor, goal: Goal) -> tuple[explained.Explained, SolveReport]:
        """``A w = b`` for b ``(n, t)`` float64 by the solver of the mean: with conjugate gradients to the goal, with
        others to their tolerance; and the report."""
        solver, _ = self.acceleration.mean_solver(self.system.n, b.device)
        if not isinstance(solver, ConjugateGradients):
            if isinstance(solver, Budgeted):
                solver = dataclasses.replace(solver, max_seconds=None, checkpoint=None)
            weights, report = solve_system(solver, self.system, b)
            return explained.Explained(weights, self.system.accurate_product(weights)), report
        assert isinstance(self.solver, ConjugateGradients)
        with shortfall_counted():
            weights, product, report = dataclasses.replace(self.solver, tol=_LOOSE).explain(
                self.system, b, self.preconditioner, goal, name=self._name, below=self._below
            )
        return self._finished(explained.Explained(weights, product), report, b), report

    @cached_property
    def kept(self) -> explained.Factor:
        return self._factors.of((operator_key(self.system.operator), tensor_key(self.system.noise)))

    def factorizes(self, columns: int) -> bool:
        """Whether so many more test points will be solved for by a factorization."""
        return isinstance(self.solver, Cholesky) or (self._free and self.kept.pays(self.system, columns))

    def expect(self, columns: int) -> None:
        """So many test points are about to be solved for."""
        if self._free:
            self.kept.columns += columns

    def solve(self, c: Tensor, prior: Tensor, below_noise: bool) -> explained.Explained:
        """:param c: ``(..., n, m)`` float64; :param prior: ``(..., m)``; :param below_noise: as errors are to be."""
        if isinstance(self.solver, Cholesky):
            return self.kept.solve(self.system, c)
        if self.factorizes(0):
            with suppress(NumericalError):  # by iterations then
                return self.kept.solve(self.system, c)
        with shortfall_counted():
            found, report = explained.solve(
                self.system,
                c,
                prior,
                self.solver,
                self.preconditioner,
                name=self._name,
                below=self._below,
                below_noise=below_noise,
            )
        return self._finished(found, report, c)

    def _finished(self, found: explained.Explained, report: SolveReport, c: Tensor) -> explained.Explained:
        """Return what conjugate gradients found or, where they fell short, what a factorization that fits finds."""
        limited = isinstance(self.solver, ConjugateGradients) and self.solver.limited
        if not report.converged and not limited and self.kept.fits(self.system):
            with suppress(NumericalError):
                found = self.kept.solve(self.system, c)
                left = (c - self.system.accurate_product(found.weights)).norm(dim=-2)
                report.residual = (left / c.norm(dim=-2).clamp(min=torch.finfo(c.dtype).tiny)).reshape(-1)
                report.reason, report.converged = Reason.DIRECT, True
                report.notes.append("a Cholesky factorization in float64 finished the solve")
        warn_of(report)
        return found

    def explained(self, c: Tensor, prior: Tensor, diagonal: bool) -> Tensor:
        """``c^T A^-1 c`` ``(..., m, m)``, or its diagonal ``(..., m)``; differentiable in c and A's parts."""
        tree, parts = self.noisy.representation_tree(), self.noisy.representation()
        return _Explained.apply(self, tree, diagonal, prior.detach(), c, *parts)

    @property
    def rows(self) -> int:
        """How many test points are solved for at once."""
        fitting = memory_budget.value(self.system.noise.device) // (8 * _VECTORS * self.noisy.shape[:-1].numel())
        return max(1, fitting if isinstance(self.solver, Cholesky) else min(_ROWS, fitting))


class _Explained(torch.autograd.Function):
    """The gradient takes no solve: by the formula of the value, the weights are where it does not depend on them."""

    @staticmethod
    def forward(
        ctx: Any, side: TrainingSide, tree: Any, diagonal: bool, prior: Tensor, c: Tensor, *parts: Tensor
    ) -> Tensor:
        found = side.solve(c.detach(), prior, below_noise=not diagonal)
        ctx.tree, ctx.diagonal, ctx.caller = tree, diagonal, copy_context()
        ctx.save_for_backward(found.weights, c, *parts)
        return found.diagonal(c) if diagonal else found.matrix(c)

    @staticmethod
    @in_callers_context
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, c, *parts = ctx.saved_tensors
        of_parts: tuple[Tensor | None, ...] = (None,) * len(parts)
        with torch.no_grad():
            half = weights * grad.unsqueeze(-2) if ctx.diagonal else weights @ ((grad + grad.mT) / 2)
            if any(ctx.needs_input_grad[5:]):
                operator = ctx.tree(*parts)
                of_parts = operator._bilinear_derivative(-half.to(operator.dtype), weights.to(operator.dtype))
            of_c = (2 * half).sum_to_size(c.shape)
        return first_order((None, None, None, None, of_c, *of_parts), grad, *ctx.saved_tensors)


class Solved(Formula):
    """``prior - cross A^-1 cross^T`` by solves; the diagonal takes some test points at a time.

    :param prior: ``(..., m, m)`` and :param cross: ``(..., m, n)``, LinearOperators, evaluated.
    :param side: A.
    """

    def __init__(self, prior: LinearOperator, cross: LinearOperator, side: TrainingSide) -> None:
        self.prior, self.cross, self.side, self.sources = prior, cross, side, (prior, cross)
        batch = torch.broadcast_shapes(prior.batch_shape, cross.batch_shape, side.noisy.batch_shape)
        self.shape = torch.Size((*batch, *prior.shape[-2:]))

    def matrix(self) -> Tensor:
        """Return the covariance ``(..., m, m)`` float64, differentiable."""
        c, prior = float64(self.cross).mT, float64(self.prior)
        self._expect()
        return prior - self.side.explained(c, prior.diagonal(dim1=-1, dim2=-2), diagonal=False)

    def _expect(self) -> None:
        """Announce how many points are about to be solved for, of each system."""
        self.side.expect(self.shape[:-1].numel() // max(1, self.side.noisy.batch_shape.numel()))

    def diagonal(self) -> Tensor:
        """Return the variances ``(..., m)`` float64, differentiable."""
        chosen = variance.value(self.side.acceleration.variance)
        if isinstance(self.cross, KernelMatrix) and self.shape[-1]:
            x = self.cross.x1.reshape(-1, self.cross.x1.shape[-1])
            method = self.side.method(chosen, x.detach(), torch.is_grad_enabled() and x.requires_grad)
            if method != "exact":
                return self._approximate(x, method, chosen == "auto")
        elif chosen in ("low_rank", "samples"):
            raise refuse(chosen)
        return self._exact_variance()

    def _approximate(self, x: Tensor, method: str, checked: bool) -> Tensor:
        approximate, kept = self.side.approximate, self.side.kept
        value = approximate(x, method)
        if checked and method not in kept.checked:
            approximate.check(x.detach(), value.detach(), method)
            kept.checked.add(method)
        if not x.requires_grad:  # the model's other answers have gradients in these tensors
            value = Refusing.apply(value, method, *self.prior.representation(), *self.cross.representation())
        return value.reshape(self.shape[:-1])

    def _exact_variance(self) -> Tensor:
        prior = float64(self.prior, diagonal=True)
        self._expect()
        lean = isinstance(self.cross, KernelMatrix)
        cross = self.cross if lean else float64(self.cross)
        parts = []
        for rows in spans(self.shape[-1], max(1, self.side.rows // max(1, self.shape[:-2].numel()))):
            c = float64(cross[..., rows, :]) if lean else cross[..., rows, :]
            some = prior[..., rows]
            parts.append(some - self.side.explained(c.mT, some, diagonal=True))
        return positive(torch.cat(parts, dim=-1) if parts else prior, prior)

    def changed(self) -> bool:
        return self.side.changed

    def select(self, rows: slice, batch: tuple[Any, ...]) -> Solved | None:
        full_batch = all(isinstance(index, slice) and index == slice(None) for index in batch)
        plain = isinstance(self.prior, KernelMatrix) and isinstance(self.cross, KernelMatrix)
        return (
            Solved(self.prior[..., rows, rows], self.cross[..., rows, :], self.side) if full_batch and plain else None
        )


class Factorized(Formula):
    """``prior - half^T half``, whose diagonal takes a diagonal.

    :param prior: ``(..., m, m)``, not evaluated.
    :param half: ``root^-1 k(X, x)``, ``(..., n, m)`` float64.
    """

    def __init__(self, prior: LinearOperator, half: Tensor) -> None:
        self.prior, self.half, self.sources = prior, half, (prior, half)
        self.shape = torch.Size((*torch.broadcast_shapes(prior.batch_shape, half.shape[:-2]), *prior.shape[-2:]))
        self._parameters = parameters_in(prior)
        self._state = State((), self._parameters)

    def changed(self) -> bool:
        return not self._state.holds((), self._parameters)

    def matrix(self) -> Tensor:
        return float64(self.prior) - self.half.mT @ self.half

    def diagonal(self) -> Tensor:
        prior = float64(self.prior, diagonal=True)
        return positive(prior - self.half.square().sum(dim=-2), prior)


def conditioned(prior: LinearOperator, cross: LinearOperator, root: Tensor) -> LazyCovariance:
    """Return the posterior covariance by the Cholesky factor ``root`` ``(..., n, n)`` of the training covariance.

    :param cross: k(x, X), ``(..., m, n)``, not evaluated.
    """
    c = float64(cross).mT
    if root.dim() == 2 < c.dim():  # one system with the columns of the whole batch
        columns = c.movedim(-2, 0).reshape(c.shape[-2], -1)
        half = torch.linalg.solve_triangular(root, columns, upper=False)
        half = half.reshape(c.shape[-2], *c.shape[:-2], c.shape[-1]).movedim(0, -2)
        return LazyCovariance(Factorized(prior, half))
    batch = torch.broadcast_shapes(c.shape[:-2], root.shape[:-2])
    parts = (part.expand(*batch, *part.shape[-2:]) for part in (root, c))
    return LazyCovariance(Factorized(prior, torch.linalg.solve_triangular(*parts, upper=False)))

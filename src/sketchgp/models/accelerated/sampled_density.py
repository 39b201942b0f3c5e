"""The quadratic form and the log determinant of a Gaussian's log density from samples, solved for by any solver.

With ``z_s ~ N(0, A)`` and ``u_s = A^-1 z_s`` the gradient of ``log det A`` is the mean of ``u_s^T dA u_s``.  It takes
no factor of a preconditioner: one block solve for r and the samples, and one bilinear derivative.  The ``z_s`` are
functions of the prior, drawn with the same random numbers at every evaluation, plus noise, so that they move with the
hyperparameters, and the solutions before are near the next ones: solves are warm started.  Lin, Padhy, Mlodozeniec,
Antoran, Hernandez-Lobato, "Improving linear system solvers for hyperparameter optimisation in iterative Gaussian
processes" (NeurIPS 2024, arXiv:2405.18457).

The log determinant itself is followed from one evaluation to the next by the trapezoidal rule: ``log det A' - log det A
~ (mean u'^T (A' - A) u' + mean u^T (A' - A) u) / 2``.  It begins with that of A's diagonal: values are right but for a
constant.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...inference.pathwise import sample_targets
from ...operators import KernelMatrix
from ...operators.expression import recognise
from ...operators.first_order import in_callers_context
from ...solvers import Budgeted, Cholesky, ConjugateGradients, System
from ...solvers.solver import kernel_of, solve_system
from .acceleration import Acceleration
from .mean_solve import held
from .warm import Left

_LOOSEST = 0.5  # relative residual of a correction, however near the solution before was


class Samples:
    """Random numbers of the samples, and what the evaluation before left: one object for one fit.

    :param acceleration: whose solver solves; :param seed: of the samples; :param count: how many there are.
    """

    def __init__(self, acceleration: Acceleration, seed: int, count: int) -> None:
        solver: Any = acceleration.own_solver()
        if isinstance(solver, Budgeted):  # those of the posterior mean
            solver = dataclasses.replace(solver, checkpoint=None, max_seconds=None)
        self.solver, self.seed, self.count = solver, seed, count
        self._system: System | None = None
        self._solutions: Tensor | None = None  # (n, t + count)
        self._forms: Tensor | None = None  # mean of u^T A u
        self._determinant: Tensor | None = None

    @staticmethod
    def serve(acceleration: Acceleration, covariance: Any) -> bool:
        """Whether an evaluated training covariance with noise is one plain kernel matrix that functions can be drawn
        of, and the solver is of the user's own choice and none that takes a factor."""
        if isinstance(acceleration.solver, str | ConjugateGradients | Cholesky):
            return False
        matrix = getattr(covariance, "_linear_op", None)
        if not isinstance(matrix, KernelMatrix) or not matrix.same or covariance.batch_shape:
            return False
        return matrix.x1.dim() == 2 and recognise(matrix.kernel, waves=True) is not None

    @torch.no_grad()
    def evaluate(self, system: System, columns: Tensor) -> tuple[Tensor, Tensor]:
        """``A^-1 columns`` and ``A^-1 z``, together ``(n, t + count)`` float64; and ``log det A`` but for a constant.

        :param columns: ``(n, t)``.
        """
        rhs = torch.cat([columns.to(torch.float64), self._drawn(system)], dim=1)
        t, before = columns.shape[1], self._solutions
        if before is None or before.shape != rhs.shape or self._system is None:
            value, _ = solve_system(self.solver, system, rhs)
            diagonal = system.operator._diagonal().to(torch.float64) + system.noise.to(torch.float64)
            determinant = diagonal.log().sum()
        else:
            product = system.accurate_product(before)
            value = before + self._correction(system, rhs, rhs - product)
            old = self._forms
            assert old is not None and self._determinant is not None
            moved = (before * product)[:, t:].sum() / self.count - old  # u^T (A' - A) u
            behind = (value * self._system.accurate_product(value))[:, t:].sum() / self.count
            determinant = self._determinant + (moved + (value * rhs)[:, t:].sum() / self.count - behind) / 2
        self._system, self._solutions, self._determinant = _kept(system), value, determinant
        self._forms = (value * rhs)[:, t:].sum() / self.count
        return value, determinant

    def _correction(self, system: System, rhs: Tensor, residual: Tensor) -> Tensor:
        """What the solutions before lack, to the solver's tolerance of the right-hand sides."""
        size, left = rhs.norm(dim=0), residual.norm(dim=0)
        tol = getattr(self.solver, "tol", None)
        if not isinstance(tol, float):
            return solve_system(self.solver, system, residual)[0]
        if bool((left <= tol * size).all()):
            return torch.zeros_like(rhs)
        wanted = float((tol * size / left).min().clamp(max=_LOOSEST))
        solver: Any = self.solver
        return solve_system(dataclasses.replace(solver, tol=wanted), system, residual)[0]

    def _drawn(self, system: System) -> Tensor:
        """``z`` ``(n, count)``, float64: what :func:`sketchgp.sample_posterior` solves for with this seed."""
        matrix = system.operator
        return sample_targets(kernel_of(matrix), matrix.x1.detach(), system.noise, self.count, self.seed)

    @property
    def left(self) -> Left | None:
        """What the latest evaluation leaves; None where there was none."""
        if self._solutions is None:
            return None
        return Left(self.seed, self._solutions[:, : -self.count], self._solutions[:, -self.count :])


def _kept(system: System) -> System:
    """With copies of what an optimiser changes in place."""
    matrix = system.operator
    return System(matrix.with_parameters([p.detach().clone() for p in matrix.parameters]), system.noise.clone())


_samples: ContextVar[Samples | None] = ContextVar("sketchgp_samples", default=None)


def sampling(samples: Samples) -> AbstractContextManager[None]:
    """Log densities of accelerated models inside are by samples."""
    return held(_samples, samples)


def samples_in_force() -> Samples | None:
    """Of the block that this is called in."""
    return _samples.get()


def sampled_inv_quad_logdet(samples: Samples, covariance: Any, columns: Tensor, reduce: bool) -> tuple[Tensor, Tensor]:
    """``(r^T A^-1 r, log det A)``, the latter but for a constant; float64, differentiable in r and A once.

    :param covariance: A, ``(n, n)``, evaluated; :param columns: r, ``(n, t)`` or ``(n,)``.
    :param reduce: whether the quadratic forms of all columns are added up.
    """
    columns = columns.unsqueeze(-1) if columns.dim() == 1 else columns
    tree, parts = covariance.representation_tree(), covariance.representation()
    each, determinant = _InvQuadLogdet.apply(samples, tree, columns.to(torch.float64), *parts)
    return each.sum(dim=-1) if reduce else each, determinant


class _InvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, samples: Samples, tree: Any, columns: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        operator = tree(*args)
        system = System(operator._linear_op, operator._noise_vector())
        solutions, determinant = samples.evaluate(system, columns)
        ctx.tree, ctx.count, ctx.caller = tree, samples.count, copy_context()
        ctx.save_for_backward(solutions, *args)
        t = columns.shape[1]
        return (columns * solutions[:, :t]).sum(dim=0), determinant

    @staticmethod
    @once_differentiable
    @in_callers_context
    def backward(ctx: Any, of_each: Tensor, of_determinant: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        solutions, *args = ctx.saved_tensors
        t = len(of_each)
        scale = torch.cat([-of_each, (of_determinant / ctx.count).expand(ctx.count)])
        of_args: tuple[Tensor | None, ...] = (None,) * len(args)
        if any(ctx.needs_input_grad[3:]):
            operator = ctx.tree(*args)
            left, right = (v.to(operator.dtype) for v in (solutions * scale, solutions))
            of_args = operator._bilinear_derivative(left, right)
        return (None, None, 2 * solutions[:, :t] * of_each, *of_args)

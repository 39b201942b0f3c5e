"""The quadratic form and the log determinant of a Gaussian log density from samples, solved for by any solver.

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
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..inference.pathwise import Deviations
from ..operators import KernelMatrix
from ..operators.expression import recognise
from ..operators.first_order import in_callers_context
from ..solvers import Budgeted, Cholesky, ConjugateGradients, System
from ..solvers.solver import kernel_of, solve_system
from .base import LogDensity, Solutions, bilinear_derivative

_LOOSEST = 0.5  # relative residual of a correction, however near the solution before was


class Samples(LogDensity):
    """Log densities, up to a constant, with gradients from samples: the random numbers and the last solutions of a fit.

    :param solver: solves for the targets and the samples; limits of the posterior mean are dropped.
    :param seed: seed of the samples.
    :param count: number of samples.
    """

    regresses = False

    def __init__(self, solver: Any, seed: int, count: int) -> None:
        solver = solver.without_budget() if isinstance(solver, Budgeted) else solver
        self.solver, self.seed, self.count = solver, seed, count
        # of the last evaluation: the system, the solutions (n, t + count), the mean of u^T A u, and the determinant
        self._last: tuple[System, Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def serves(solver: Any, covariance: Any) -> bool:
        """Return whether this density serves a solver and an evaluated training covariance with noise.

        The covariance must be one plain kernel matrix with random features, and the solver one that the user named and
        that takes no factor.
        """
        if isinstance(solver, str | ConjugateGradients | Cholesky):
            return False
        matrix = getattr(covariance, "latent", None)
        if not isinstance(matrix, KernelMatrix) or not matrix.same or covariance.batch_shape:
            return False
        return matrix.x1.dim() == 2 and recognise(matrix.kernel, waves=True) is not None

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        tree, parts = operator.representation_tree(), operator.representation()
        return _InvQuadLogdet.apply(self, tree, columns.to(torch.float64), *parts)

    @torch.no_grad()
    def evaluate(self, system: System, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``A^-1 [columns, z]``, ``(n, t + count)`` float64, and ``log det A`` up to a constant."""
        rhs = torch.cat([columns.to(torch.float64), self._drawn(system)], dim=1)
        t, last = columns.shape[1], self._last
        if last is None or last[1].shape != rhs.shape:
            value, _ = solve_system(self.solver, system, rhs)
            diagonal = system.operator.diagonal().to(torch.float64) + system.noise.to(torch.float64)
            determinant, forms = diagonal.log().sum(), (value * rhs)[:, t:].sum() / self.count
        else:
            earlier, before, old, known = last
            product = system.accurate_product(before)
            value = before + self._correction(system, rhs, rhs - product)
            forms = (value * rhs)[:, t:].sum() / self.count
            moved = (before * product)[:, t:].sum() / self.count - old  # u^T (A' - A) u
            behind = (value * earlier.accurate_product(value))[:, t:].sum() / self.count
            determinant = known + (moved + forms - behind) / 2
        self._last = _copied(system), value, forms, determinant
        self.solutions = Solutions(self.seed, value[:, :t], value[:, t:])
        return value, determinant

    def _correction(self, system: System, rhs: Tensor, residual: Tensor) -> Tensor:
        """Return the correction of the previous solutions, to the solver's tolerance of the right-hand sides."""
        size, error = rhs.norm(dim=0), residual.norm(dim=0)
        tol = getattr(self.solver, "tol", None)
        if not isinstance(tol, float):
            return solve_system(self.solver, system, residual)[0]
        if bool((error <= tol * size).all()):
            return torch.zeros_like(rhs)
        loose = float((tol * size / error).min().clamp(max=_LOOSEST))
        solver: Any = self.solver
        return solve_system(dataclasses.replace(solver, tol=loose), system, residual)[0]

    def _drawn(self, system: System) -> Tensor:
        """Return z, ``(n, count)`` float64: the targets of :func:`sketchgp.sample_posterior` with this seed."""
        x = system.operator.x1.detach()
        return Deviations(kernel_of(system.operator), x, self.count, self.seed).targets(x, system.noise)


def _copied(system: System) -> System:
    """Return a system with copies of the tensors that an optimiser changes in place."""
    matrix = system.operator
    return System(matrix.with_parameters([p.detach().clone() for p in matrix.parameters]), system.noise.clone())


class _InvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, samples: Samples, tree: Any, columns: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        solutions, determinant = samples.evaluate(tree(*args).system(), columns)
        ctx.tree, ctx.count, ctx.caller = tree, samples.count, copy_context()
        ctx.save_for_backward(solutions, *args)
        return (columns * solutions[:, : columns.shape[1]]).sum(dim=0), determinant

    @staticmethod
    @once_differentiable
    @in_callers_context
    def backward(ctx: Any, of_each: Tensor, of_determinant: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        solutions, *args = ctx.saved_tensors
        t = len(of_each)
        scale = torch.cat([-of_each, (of_determinant / ctx.count).expand(ctx.count)])
        of_args: tuple[Tensor | None, ...] = (None,) * len(args)
        if any(ctx.needs_input_grad[3:]):
            of_args = bilinear_derivative(ctx.tree(*args), solutions * scale, solutions)
        return (None, None, 2 * solutions[:, :t] * of_each, *of_args)

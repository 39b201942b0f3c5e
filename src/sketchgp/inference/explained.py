"""The variance that data explain, ``c^T A^-1 c``, from solves that are judged by what they leave out of it.

With ``A = K + D``, D the noise, any w and its residual ``r = c - A w``,

    ``2 c^T w - w^T A w = c^T A^-1 c - r^T A^-1 r``.

What is left out is of second order and never negative: the squared error of w in the norm of A, of which conjugate
gradients know what every iteration takes off it (:mod:`sketchgp.solvers.energy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operators.substitution import cholesky_solve
from ..report import SolveReport
from ..solvers import Cholesky, ConjugateGradients, System
from ..solvers.certificate import Certificate
from ..solvers.energy import Goal


@dataclass
class Explained:
    """Weights ``(..., n, m)`` near ``A^-1 c`` and their product with A, float64.

    :ivar certain: of one system, ``(3, m)``: at least the errors of the weights in the norm of A, and what lies below
        and above ``c^T A^-1 c`` (:class:`sketchgp.solvers.certificate.Certificate`); None where it is not known.
    """

    weights: Tensor
    product: Tensor
    certain: Tensor | None = None

    def diagonal(self, c: Tensor) -> Tensor:
        """Return explained variances ``(..., m)``, from below."""
        return (self.weights * (2 * c - self.product)).sum(dim=-2)

    def matrix(self, c: Tensor) -> Tensor:
        """Return explained covariances ``(..., m, m)``, symmetric, and never more than the exact ones."""
        half = self.weights.mT @ (c - 0.5 * self.product)
        return half + half.mT


def solve(
    system: System, c: Tensor, solver: ConjugateGradients, goal: Goal, **options: Any
) -> tuple[Explained, SolveReport]:
    """Solve ``A w = c``, c ``(..., n, m)`` float64, to the solver's tolerance, and on to a goal.

    A solve that falls short warns.

    :param options: further arguments of :meth:`ConjugateGradients.explain`, such as the preconditioner.
    """
    weights, product, report = solver.explain(system, c, goal, **options)
    if report.error_bound is None or report.quadratic_bounds is None or weights.dim() > 2:
        return Explained(weights, product), report
    certain = torch.stack([report.error_bound, *report.quadratic_bounds]).to(c.device)
    return Explained(weights, product, certain), report


def solve_by_factor(system: System, c: Tensor, root: Tensor | None) -> tuple[Explained, Tensor]:
    """Solve ``A w = c`` for c ``(..., n, m)`` float64 by a Cholesky factorization, and return the factor as well.

    :param root: the factor, where it is known.
    :raises NumericalError: where A is not positive definite to float64.
    """
    one = not system.batch_shape and c.dim() > 2  # one system for a batch of columns
    together = c.movedim(-2, 0).reshape(c.shape[-2], -1) if one else c
    if root is None:
        weights, _, root = Cholesky().factorize(system, together)
    else:
        weights = cholesky_solve(together, root)
    if one:
        weights = weights.reshape(c.shape[-2], *c.shape[:-2], c.shape[-1]).movedim(0, -2)
    certificate = Certificate(system, None)
    if weights.dim() > 2 or not certificate.known:
        return Explained(weights, c), root
    return Explained(weights, c, certificate.of_factor(c, weights)), root

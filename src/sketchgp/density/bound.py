"""The two ends of a Gaussian log density, rounding included; they take no random number.

With ``A = K + D``, ``P = F F^T + D`` for F of pivots, ``F F^T <= K``, any w, ``r = y - A w`` and ``e`` the diagonal of
``K - F F^T``,

    q <= y^T A^-1 y <= q + r^T P^-1 r        with ``q = 2 y^T w - w^T A w``,
    log det P <= log det A <= log det P + sum_i log(1 + e_i / d_i).

The last sum bounds ``log det (I + D^-1/2 E D^-1/2)`` by Hadamard's inequality, with ``E = K - F F^T`` and ``P >= D``.
By Jensen's it is below ``n log(1 + tr(D^-1 E) / n)``, the bound of the reference.

Reference: Artemev, Burt, van der Wilk, "Tighter bounds on the log marginal likelihood of Gaussian process regression
using conjugate gradients" (arXiv:2102.08314).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from linear_operator.operators import DiagLinearOperator, InterpolatedLinearOperator
from torch import Tensor

from ..operators import LowRankPlusDiagonal
from ..operators.access import Access, evaluated_accurately, terms
from ..solvers.certificate import Certificate
from ..solvers.energy import SampleGoal
from .base import LogDensity

_TRIES = 5  # solves for one w, each starting from the one before
_TIGHT = 1e-7  # target of r^T P^-1 r, as a share of the rows
_NEGLIGIBLE = 0.01  # share of the log determinant's gap that it may be at any rate


class Bound(LogDensity):
    """Log densities as lower bounds, together with how far above them the upper bounds are; without gradients.

    P is the model's preconditioner, where it is made of pivots and ``F F^T <= K``.

    :param limit: the largest gap of a log determinant, in nats, that a solve is worth.
    :ivar gap: nats between the two ends of all log densities so far; None where there were none, NaN where nothing is
        certain, infinite where P is none of these or the limit is exceeded.
    """

    regresses = False
    gap: float | None = None

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit

    @torch.no_grad()
    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return upper bounds of ``r^T A^-1 r`` and of ``log det A``, float64; see :class:`LogDensity`."""
        batch = torch.broadcast_shapes(columns.shape[:-2], operator.batch_shape)
        b = columns.to(torch.float64).expand(*batch, *columns.shape[-2:])
        ends = self._ends(operator, b)
        if isinstance(ends, float):
            self.gap = ends
            return b.sum(dim=-2) * math.nan, b.sum(dim=(-1, -2)) * math.nan
        low, high, least, most = ends
        self.gap = (self.gap or 0.0) + 0.5 * float((high - low).sum() + (most - least).sum())
        return high, most

    def _ends(self, operator: Any, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | float:
        """Return both ends of the forms and both of the log determinant, or the gap that tells why there are none."""
        acceleration, noise = operator.acceleration, operator.noise
        if self._preconditioner(acceleration, operator.latent, noise) is None:
            return math.inf
        kernel = evaluated_accurately(operator.latent)
        found = self._preconditioner(acceleration, kernel, noise)
        if found is None:
            return math.inf
        built, excess = found
        accurate = operator.rebuilt(kernel, DiagLinearOperator(noise.to(kernel.dtype))).system()
        certificate = Certificate(accurate, built, below=True)
        # interpolations of a grid need not be positive semidefinite
        if not certificate.known or any(isinstance(part, InterpolatedLinearOperator) for _, part in terms(kernel)):
            return math.nan
        w, r = self._solve(operator, built, b, float(excess.sum()) / 2 / b[..., 0, :].numel())
        _, low, high = certificate.bounds(b, w, r)
        determinant, rounded = built.log_determinant(), -accurate.n * certificate.slack.squeeze(-1).log()
        return low, high, determinant - rounded, determinant + excess + rounded

    def _preconditioner(
        self, acceleration: Any, kernel: Any, noise: Tensor
    ) -> tuple[LowRankPlusDiagonal, Tensor] | None:
        """Return P and what the log determinant may be above its own; None where it gives no bound, or a wide one."""
        built, chosen = acceleration.build(kernel, noise, differentiable=False), acceleration.cache.chosen
        if built is None or not (chosen.pivoted and chosen.below):
            return None
        left = built.unexplained(Access(kernel).diagonal())
        excess = (left / built.diagonal_part).log1p().sum(dim=-1)
        return (built, excess) if float(excess.sum()) <= 2 * self.limit else None

    def _solve(self, operator: Any, built: Any, b: Tensor, nats: float) -> tuple[Tensor, Tensor]:
        """Return w and ``r = b - A w`` with a small ``r^T P^-1 r``.

        :param nats: gap of the log determinant, for each column.
        """
        system, solver = operator.system(), operator.acceleration.column_gradients()
        target, norm = max(_TIGHT * system.n, _NEGLIGIBLE * nats), float(b.norm(dim=-2).max())
        tol = math.sqrt(target * float(system.noise.min())) / norm if norm > 0 else 1.0
        goal = SampleGoal(b.new_ones(()), b.new_zeros(1), share=math.inf)  # the residual alone says when to end
        value: Tensor | None = None
        for _ in range(_TRIES):
            value, product, report = dataclasses.replace(solver, tol=min(0.5, max(1e-14, 3 * tol))).explain(
                system,
                b,
                goal,
                preconditioner=built,
                name=operator.acceleration.cache.chosen.name,
                below=True,
                initial=value,
            )
            r = b - product
            excess = float((r * built.apply_inverse(r)).sum(dim=-2).max()) / target
            if not excess > 1 or not report.converged:
                break
            tol *= 0.5 / math.sqrt(excess)
        assert value is not None
        return value, r

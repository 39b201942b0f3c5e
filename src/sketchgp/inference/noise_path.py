"""Leave-one-out errors and marginal likelihoods of ``K + s I`` for many noises s, from one factor of K.

Up to some size by one eigendecomposition ``K = Q diag(l) Q^T``, which has everything in closed form.  Beyond, one
factor F gives the preconditioner ``F F^T + s I`` of every noise, and the solutions at noises done before make a good
start: their span is a rational Krylov space, and with ``K w_j`` kept, a product each, the combination of the least
residual at any noise costs none.  Where ``0 <= F F^T <= K``,

    log det P <= log det A <= log det P + n log(1 + tr(K - F F^T) / (n s)),
    q <= b^T A^-1 b <= q + r^T P^-1 r,   q = 2 b^T w - w^T A w,  r = b - A w

(Artemev, Burt, van der Wilk, "Tighter bounds on the log marginal likelihood of Gaussian process regression using
conjugate gradients", 2021).  Where the first bracket is too wide, the log determinant is estimated by Lanczos
quadrature from probes N(0, P) (Gardner et al., arXiv:1809.11165).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..operators import LowRankPlusDiagonal
from ..operators.access import Access
from ..preconditioners import Preconditioner
from ..random_streams import generator
from ..report import SolveReport
from ..solvers import ConjugateGradients, System
from ..space import Factor, square_norms
from .leave_one_out import log_density, probed_diagonal, signs, totals

_WIDE = 0.005  # of a log marginal likelihood over n: half a bracket up to which no probes are taken
_TOLERANCE = 1e-2  # relative residual of the probes' solves


@dataclass
class AtNoise:
    """Results at one noise; the marginal likelihood and its bounds are divided by n.

    Errors are standard errors; ``lower`` and ``upper`` are certain in exact arithmetic, or infinite.
    """

    noise: float
    error: tuple[float, float]
    density: tuple[float, float]
    likelihood: tuple[float, float]
    lower: float = -math.inf
    upper: float = math.inf
    reports: list[SolveReport] = field(default_factory=list)


@torch.no_grad()
def exact_path(system: System, residual: Tensor, scale: Tensor, noises: list[float]) -> list[AtNoise]:
    """Return results by one eigendecomposition in float64: ``9 n^3`` operations for all noises.

    :param system: whose operator is K; its noise is not looked at.
    :param residual: b, ``(n,)`` float64; :param scale: their unit in units of the data, ``(n,)``, which errors and
        densities are in.
    """
    n = system.n
    matrix = Access(system.operator).columns(torch.arange(n, device=residual.device))
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    values = values.clamp(min=0)  # rounding may make them negative
    turned, squares = vectors.mT @ residual, vectors.square()
    results = []
    for noise in noises:
        inverse = 1 / (values + noise)
        weights, diagonal = vectors @ (inverse * turned) / scale, squares @ inverse / scale.square()
        likelihood = _likelihood(turned @ (inverse * turned), (values + noise).log().sum(), scale)
        error, density = (weights / diagonal).square().mean(), log_density(diagonal, weights).mean()
        results.append(
            AtNoise(noise, (float(error), 0.0), (float(density), 0.0), (likelihood, 0.0), likelihood, likelihood)
        )
    return results


def _likelihood(quadratic: Tensor | float, log_determinant: Tensor | float, scale: Tensor) -> float:
    return -0.5 * (float(quadratic + log_determinant) / len(scale) + math.log(2 * math.pi)) - float(scale.log().mean())


class SolvedPath:
    """Solves along a grid of noises, with one factor of a preconditioner for all of them.

    :param data: K as ``training.system.operator`` ``(n, n)``, b as ``residual``, and ``scale`` as in
        :func:`exact_path`.
    :param least: the least noise of the grid, ``(n,)``.
    :param choice: of the preconditioner, :param built: that of K with the least noise; None for none.
    :param solver: of b; those of probes go to a residual of 1e-2.
    """

    def __init__(
        self,
        data: Any,
        least: Tensor,
        choice: Preconditioner | None,
        built: LowRankPlusDiagonal | None,
        solver: ConjugateGradients,
        probes: int,
        seed: int,
    ) -> None:
        operator, residual, self.scale = data.training.system.operator, data.residual, data.scale
        self.operator, self.residual, self.solver = operator, residual, solver
        self.rough = dataclasses.replace(solver, tol=max(_TOLERANCE, solver.tol or 0.0))
        self.n, self.probes, self.seed = len(residual), probes, seed
        self.factor: Factor = residual.new_zeros(self.n, 0) if built is None else built.factor
        self.name = choice.name if choice is not None and self.factor.shape[1] else "none"
        self.shift = 0.0 if built is None else built.diagonal_part - least
        self.below = built is None or (choice is not None and choice.pivoted)  # F F^T <= K
        self.left = float((Access(operator).diagonal() - square_norms(self.factor)).clamp(min=0).sum())
        self.z = signs(self.n, probes, seed, residual.device)
        self.columns = torch.cat([residual.unsqueeze(1), self.z], dim=1)
        self.known: list[tuple[Tensor, Tensor]] = []  # solutions W of earlier noises, and K W

    def start(self, noise: float) -> Tensor | None:
        """Return the combination of earlier solutions with the least residual at this noise, ``(n, 1 + S)``."""
        if not self.known:
            return None
        weights, products = (torch.stack(part, dim=-1) for part in zip(*self.known, strict=True))  # (n, 1 + S, k)
        target, basis = self.columns.mT.unsqueeze(-1), (products + noise * weights).movedim(0, 1)
        share = torch.linalg.lstsq(basis.cpu(), target.cpu(), driver="gelsd").solution.to(target.device)
        return (weights.movedim(0, 1) @ share).squeeze(-1).mT.contiguous()

    @torch.no_grad()
    def at(self, noise: float) -> AtNoise:
        """Return all results at this noise."""
        system = System(self.operator, torch.full_like(self.residual, noise))
        built = LowRankPlusDiagonal(self.factor, system.noise + self.shift)
        solved, report = self.rough.run(system, self.columns, built, name=self.name, initial=self.start(noise))
        right, first = self.columns[:, :1], solved[:, :1]
        weights, refined = self.solver.run(system, right, built, name=self.name, initial=first)
        solutions = torch.cat([weights, solved[:, 1:]], dim=1)
        self.known.append((solutions, system.product(solutions) - noise * solutions))
        remainder = right - system.accurate_product(weights)
        quadratic = float((weights * (right + remainder)).sum())
        missing = float((remainder * built.apply_inverse(remainder)).sum())
        low = float(built.log_determinant())
        high = low + self.n * math.log1p(self.left / (self.n * noise))
        reports, deviation = [report, refined], 0.0
        if self.below and high - low <= 4 * _WIDE * self.n:
            log_determinant = 0.5 * (low + high)
        else:
            beyond, deviation, one = self._quadrature(system, built)
            log_determinant = low + beyond
            log_determinant = min(max(log_determinant, low), high) if self.below else log_determinant
            reports.append(one)
        lower = _likelihood(quadratic + missing, high, self.scale) if self.below else -math.inf
        upper = _likelihood(quadratic, low, self.scale) if self.below else math.inf
        probed = probed_diagonal(system, self.z, solved[:, 1:], report.residual[1:], self.factor, self.below, self.seed)
        error, density = totals(probed.in_units(self.scale.square()), weights.squeeze(1) / self.scale)
        likelihood = _likelihood(quadratic, log_determinant, self.scale)
        return AtNoise(noise, error, density, (likelihood, 0.5 * deviation / self.n), lower, upper, reports)

    def _quadrature(self, system: System, built: LowRankPlusDiagonal) -> tuple[float, float, SolveReport]:
        """Return ``log det A - log det P``, its standard error, and the report of the solve."""
        stream = generator(self.seed, "probe vectors of a noise path")
        shapes = (built.rank, self.probes), (self.n, self.probes)
        normal = [torch.randn(shape, dtype=torch.float64, generator=stream) for shape in shapes]
        u = built.sample(*(part.to(self.residual.device) for part in normal))
        matrices, report = self.rough.lanczos(system, u, built, name=self.name)
        values, vectors = torch.linalg.eigh(matrices)
        logs = (vectors[:, 0].square() * values.clamp(min=1e-300).log()).sum(dim=1)
        each = (u * built.apply_inverse(u)).sum(dim=0) * logs
        return float(each.mean()), float(each.std() / self.probes**0.5), report

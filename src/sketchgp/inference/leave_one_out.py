"""Leave-one-out predictions from ``w = A^-1 r`` and the diagonal of ``A^-1``, exact or by probes.

With ``A = K + D``, r the targets less their prior means and ``a_i = (A^-1)_ii``, the prediction for row i without its
target has the residual ``w_i / a_i`` and, the noise included, the variance ``1 / a_i`` (Rasmussen and Williams,
"Gaussian processes for machine learning", equation 5.12).

Of probes z of random signs, ``z_i (A^-1 z)_i`` has the mean a_i and the variance ``sum_{j != i} (A^-1)_ij^2``; less
``z_i (B^-1 z)_i - (B^-1)_ii`` for some B near A it has less (Bekas, Kokiopoulou, Saad, "An estimator for the diagonal
of a matrix", 2007).  The preconditioner is no such B where the noise is small: ``P^-1`` is then mostly ``D^-1``, far
above ``A^-1``, and the deviation becomes 4 times (noise 1e-2) to 400 times (1e-4) that of plain probes (kin8nm, 2,000
points, rank 448).  With :class:`~sketchgp.preconditioners.full_scale.FullScaleFactor` it is 0.4 to 0.5 times of it.

What is computed from the a_i is not linear in them.  Its Taylor polynomials of second order around the values ``f_i``
of a fit through all rows are put in its place.  Their means are known: that of ``(x_i - f_i)^2`` is ``(a_i - f_i)^2``
and the variance of x_i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..operators.access import Access, has_entries
from ..operators.tiles import spans
from ..preconditioners.full_scale import FullScaleFactor
from ..random_streams import generator
from ..report import SolveReport
from ..solvers import Cholesky, System
from ..space import Factor, square_norms, whole

_COLUMNS = 512  # columns of an inverse at once
_ROUNDS = 50  # rounds of a fit
_STEP = 2.0  # largest step of the logarithm in a round
_FITTED = 4  # coefficients of a fit, at most


@torch.no_grad()
def exact_diagonal(system: System, residual: Tensor) -> tuple[Tensor, Tensor, SolveReport]:
    """Return w ``(n,)``, the diagonal of ``A^-1`` ``(n,)``, and the report of a Cholesky factorization in float64.

    :param residual: r, ``(n,)`` float64.
    :raises InputError: if the matrix does not fit in memory; :raises NumericalError: if it is not positive definite.
    """
    weights, report, root = Cholesky().factorize(system, residual.unsqueeze(1))
    diagonal = torch.empty_like(residual)
    for columns in spans(len(residual), _COLUMNS):  # of L^-1: the rows above the first of them are zero
        lower = root[columns.start :, columns.start :]
        unit = torch.zeros(len(lower), columns.stop - columns.start, dtype=root.dtype, device=root.device)
        unit.diagonal().fill_(1)
        half = torch.linalg.solve_triangular(lower, unit, upper=False)
        diagonal[columns] = half.square().sum(dim=0)
    return weights.squeeze(1), diagonal, report


def signs(n: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Return probes ``(n, count)`` of random signs, float64."""
    stream = generator(seed, "probe vectors of leave-one-out predictions")
    bits = torch.randint(0, 2, (n, count), generator=stream)
    return (2 * bits - 1).to(device, torch.float64)


@torch.no_grad()
def fitted(values: Tensor, *features: Tensor) -> Tensor:
    """Return a fit ``exp(b_0 + b_1 log u + ...)`` to noisy values ``(..., n)`` by positive features u ``(..., n)``.

    Values may be negative, their sum may not.  It is the maximum of ``sum (values log(fit) - fit)``, a concave function
    whose equations ``sum (values - fit) log(u) = 0`` are linear in the values, so that noise of mean zero leaves the
    fit where it is (Poisson regression).
    """
    scale = values.mean(dim=-1, keepdim=True)
    values, columns = values / scale, [torch.ones_like(values)]
    for feature in features:
        log = feature.log().expand_as(values)
        log = log - log.mean(dim=-1, keepdim=True)
        columns.append(log / log.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-8))
    design, link = torch.stack(columns, dim=-1), torch.zeros_like(values)
    for _ in range(_ROUNDS):
        fit = link.exp()
        gram = design.mT @ (design * fit.unsqueeze(-1))
        gram.diagonal(dim1=-2, dim2=-1).add_(1e-9 * values.shape[-1])
        step = torch.linalg.solve(gram, design.mT @ (values - fit).unsqueeze(-1))
        change = (design @ step).squeeze(-1)
        largest = change.abs().amax(dim=-1, keepdim=True)
        link = link + change * (_STEP / largest.clamp(min=_STEP))
        if float(largest.max()) < 1e-10:
            break
    return scale * link.exp()


@dataclass
class ProbedDiagonal:
    """Estimates of the diagonal of ``A^-1``.

    :ivar samples: ``(n, S)``, unbiased, one column a probe.
    :ivar fit: ``(n,)``, by :func:`fitted`.
    :ivar least: ``(n,)`` and :ivar most: ``(n,)``, what the values certainly lie between.
    :ivar solve_error: the relative residual that the probes' solve left, a root mean square.
    """

    samples: Tensor
    fit: Tensor
    least: Tensor
    most: Tensor
    solve_error: float

    def in_units(self, squares: Tensor) -> ProbedDiagonal:
        """Return the estimates in other units, each row divided by its square of a unit, ``(n,)``."""
        fit, least, most = (values / squares for values in (self.fit, self.least, self.most))
        return ProbedDiagonal(self.samples / squares.unsqueeze(1), fit, least, most, self.solve_error)

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the samples ``(n,)``, unbiased."""
        return self.samples.mean(dim=1)

    @cached_property
    def _noise(self) -> Tensor:
        """Variance of ``mean / fit``, ``(n,)``, unbiased."""
        return self.samples.var(dim=1) / self.samples.shape[1] / self.fit.square()

    @cached_property
    def _squares(self) -> Tensor:
        """Unbiased squares of ``values / fit - 1`` for the true values, ``(n,)``."""
        return (self.mean / self.fit - 1).square() - self._noise

    @cached_property
    def spread(self) -> Tensor:
        """Mean square of ``values / fit - 1`` for the true values; at least what n values cannot tell from 0."""
        n = len(self.fit)
        unseen = (_FITTED + math.sqrt(2 * n)) / n * self._noise.mean()
        return torch.maximum(self._squares.mean(), unseen).clamp(min=1e-12)

    def spread_of(self, shares: Tensor) -> Tensor:
        """Return the spread of rows weighted by ``shares`` ``(n,)``, which is at least that of all rows."""
        share = shares / shares.sum().clamp(min=torch.finfo(shares.dtype).tiny)
        return torch.maximum(share @ self._squares, self.spread)

    @cached_property
    def shrunk(self) -> tuple[Tensor, Tensor]:
        """Values ``(n,)`` and their standard errors: averages of a row's probes and of the fit, by their precisions."""
        noise = self._noise
        share = self.spread / (self.spread + noise)
        value = self.fit * (1 + share * (self.mean / self.fit - 1))
        of_solve = self.solve_error**2 / self.samples.shape[1]
        return value.clamp(self.least, self.most), self.fit * (share * noise + of_solve).sqrt()

    def total(self, value: Tensor, first: Tensor, second: Tensor) -> tuple[float, float]:
        """Return the mean over rows of ``value + first d + second d^2`` and its standard error.

        The coefficients are ``(n,)`` each, and ``d_i = a_i / fit_i - 1``.
        """
        count = self.samples.shape[1]
        relative = self.samples / self.fit.unsqueeze(1) - 1

        def expanded(mean: Tensor, noise: Tensor) -> Tensor:
            return value.mean() + (first @ mean + second @ (mean.square() - noise)) / len(value)

        total, squares = relative.sum(dim=1, keepdim=True), relative.square().sum(dim=1, keepdim=True)
        mean = total / count
        full_mean = expanded(mean, (squares / count - mean.square()) / (count - 1))
        left = count - 1  # each probe left out in turn
        mean = (total - relative) / left
        noise = ((squares - relative.square()) / left - mean.square()) / max(left - 1, 1)
        each = expanded(mean, noise)
        error = left / count * (each - each.mean()).square().sum()
        of_solve = (self.solve_error * first.abs().mean()).square() / count  # which hardly shows in the spread
        return float(full_mean), float((error + of_solve).sqrt())


@torch.no_grad()
def probed_diagonal(
    system: System, z: Tensor, solution: Tensor, left: Tensor, factor: Factor, below: bool, seed: int
) -> ProbedDiagonal:
    """Return estimates of the diagonal of ``A^-1``.

    :param z: probes ``(n, S)`` and :param solution: ``A^-1 z``, float64.
    :param left: relative residuals of that solve, ``(S,)``.
    :param factor: F of a preconditioner, ``(n, r)``; :param below: whether ``F F^T`` is at most K.
    :param seed: of the order of :class:`.FullScaleFactor`.
    """
    factor, noise, prior = whole(factor), system.noise.to(torch.float64), Access(system.operator).diagonal()
    if has_entries(system.operator):
        factor = factor if below else factor[:, :0]
        rest = (prior - square_norms(factor)).clamp(min=0) + noise
        near = FullScaleFactor.of(system.operator, noise, factor, seed=seed)
        guess = near.inverse_diagonal()
        # of A x and not of z, so that B solves for the residual: that of one row may be alike in all probes
        samples = z * (solution - near.apply_inverse(system.accurate_product(solution))) + guess.unsqueeze(1)
        fit = fitted(samples.mean(dim=1), guess, rest, near.local_diagonal)
    else:
        rest = prior - torch.linalg.vector_norm(factor, dim=-1).square()
        samples = z * solution
        fit = fitted(samples.mean(dim=1), torch.maximum(rest, 1e-6 * prior) + noise)
    return ProbedDiagonal(samples, fit, 1 / (prior + noise), 1 / noise, float(left.square().mean().sqrt()))


def log_density(diagonal: Tensor, weights: Tensor) -> Tensor:
    """Return log predictive densities ``(...)`` of targets left out, from a_i and w_i."""
    return 0.5 * (diagonal.log() - weights.square() / diagonal - math.log(2 * math.pi))


def totals(probed: ProbedDiagonal, weights: Tensor) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return mean squared error and mean log predictive density, left one out, with standard errors.

    :param weights: w, ``(n,)``.
    """
    square, ratio = (weights / probed.fit).square(), weights.square() / probed.fit
    error, error_deviation = probed.total(square, -2 * square, 3 * square)
    density, density_deviation = probed.total(*_expansion(probed.fit, weights))
    # what a quadratic leaves out where values are log-normal about the fit
    of_squares, of_ratios = float(probed.spread_of(square)), float(probed.spread_of(ratio))
    missing = error * ((1 + of_squares) ** 3 - 1 - 3 * of_squares), (of_ratios - math.log1p(of_ratios)) / 4
    return (error, math.hypot(error_deviation, missing[0])), (density, math.hypot(density_deviation, missing[1]))


def _expansion(fit: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients of 1, d and d^2 in log predictive densities for ``a_i = fit_i (1 + d)``."""
    ratio = weights.square() / fit
    return log_density(fit, weights), 0.5 * (1 + ratio), -0.5 * (0.5 + ratio)


def expected_log_density(samples: Tensor, fit: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over rows of the log predictive densities, ``(...)``; differentiable in samples and weights.

    It is expanded at the fit.  The remainder is of third order in the distance of the a_i from the fit, which is why
    the fit may be taken for a constant.

    :param samples: ``(..., n, S)`` of the a_i, S at least 2; :param fit: ``(..., n)``; :param weights: ``(..., n)``.
    """
    relative = samples / fit.unsqueeze(-1) - 1
    mean, noise = relative.mean(dim=-1), relative.var(dim=-1) / samples.shape[-1]
    value, first, second = _expansion(fit, weights)
    return (value + first * mean + second * (mean.square() - noise)).sum(dim=-1)

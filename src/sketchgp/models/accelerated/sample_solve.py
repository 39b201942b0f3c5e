"""The solve behind posterior samples: a column for each sample, with targets that are drawn from the prior."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import ConvergenceWarning, NumericalError, warn
from ...inference.pathwise import Deviations
from ...operators.tiles import logger
from ...random_streams import generator
from ...report import SolveReport, shortfall_counted
from ...solvers import Budgeted, Cholesky, ConjugateGradients
from .threshold import why_iterative
from .training import Training

_SHARE = 0.04  # of a posterior deviation: the error of samples, in the root mean square over training points
_NORMAL = 1.8874  # exp((log 2 + Euler's gamma) / 2): the standard deviation of a normal over its geometric mean
_LEAST = 1e-10  # the smallest residual that is asked for
_ROUNDS = 3
_POINTS = 64  # training points at which the spread of samples is measured


class SampleSolve:
    """``(K + noise)^-1 targets`` by the solver of the model's mean, and on until samples are right.

    ``K (K + D)^-1`` shortens every vector, so that a residual r puts a sample off by at most ``|r| / sqrt(n)`` in the
    root mean square over training points.  Where a solver's tolerance was left open, residuals are solved for in turn
    until that is a twenty-fifth of the typical spread of samples about their mean.  A checkpoint is the mean's alone.
    What GPyTorch would factorize is factorized in float64.

    :param training: the training covariance with noise, ``(..., n, n)``.
    :param index: which one of a batch.
    :param seed: of the functions and noises that targets are of; a fit by samples may have left their solutions.
    """

    def __init__(self, training: Training, index: tuple[int, ...] = (), seed: int | None = None) -> None:
        self.acceleration, system = training.acceleration, training.system
        self.system = system.element(index, system.batch_shape) if system.batch_shape else system
        self.solver, self.why = self._chosen(training.noisy.factorizes_solves)
        known = self.acceleration.solutions
        self._start = known.samples if known is not None and known.seed == seed else None

    def _chosen(self, factorized: bool) -> tuple[Any, str]:
        if factorized:
            return Cholesky(), ""
        solver, why = self.acceleration.mean_solver(self.system)
        if isinstance(solver, ConjugateGradients):  # to a residual: "posterior" is of the mean's weights
            solver = self.acceleration.conjugate_gradients(evaluation=True)
        if isinstance(solver, Budgeted):
            solver = dataclasses.replace(solver, checkpoint=None)
        return solver, "; ".join(filter(None, (why, why_iterative(self.system.n))))

    @property
    def _open(self) -> bool:
        """True if the user left the tolerance open."""
        given = self.acceleration.solver
        return isinstance(self.solver, Cholesky) or (
            getattr(self.solver, "tol", None) is not None
            and (isinstance(given, str) or not isinstance(getattr(given, "tol", 0.0), float))
        )

    @torch.no_grad()
    def __call__(self, deviations: Deviations, noise: Tensor) -> tuple[Tensor, SolveReport]:
        """Return the weights ``(n, S)`` of samples, refined by further solves where they need it, and the report.

        :raises NumericalError: where most samples would be more than a deviation off, and the user set no limit.
        """
        targets = deviations.targets(deviations.points, noise)
        with shortfall_counted() if self._open else nullcontext():
            weights, report = self._solve(self.solver, targets, self._start)
        if not self._open:
            return weights, report
        deviations.weights, size, n = weights, targets.norm(dim=0), self.system.n
        some = torch.randperm(n, generator=generator(0, "points of the spread of samples"))[:_POINTS]
        points = deviations.points[some.to(deviations.points.device)]
        for rounds in range(_ROUNDS + 1):
            spread = typical(deviations(points))
            wanted = max(_LEAST, float(_SHARE * spread * n**0.5 / size.mean()))
            last = rounds == _ROUNDS or isinstance(self.solver, Cholesky)
            if report.max_residual <= wanted or not report.converged or last:
                break
            residual = targets - self.system.accurate_product(weights)
            tol = min(0.5, float((wanted * size / residual.norm(dim=0)).min()))
            with shortfall_counted():
                correction, more = self._solve(dataclasses.replace(self.solver, tol=tol), residual)
            weights = weights + correction
            report = _both(report, more, residual.norm(dim=0) / size, wanted)
            deviations.weights = weights
        if report.max_residual > wanted:
            self._judge(report, spread, report.residual.to(size) * size / n**0.5)
        return weights, report

    def _judge(self, report: SolveReport, spread: Tensor, errors: Tensor) -> None:
        """Warn of samples that are less accurate than asked for, or raise where they are no answer.

        :param spread: their typical deviation from the mean; :param errors: ``(S,)``, at a typical point at the most.
        """
        error = (2 * errors).square().mean()  # the spread contains the errors, whose estimates are doubled
        without = (spread.square() - error).clamp(min=0)
        observed = (without + self.system.noise.to(torch.float64).mean()).sqrt()
        median, largest = float((errors / observed).median()), float((errors / observed).max())
        text = (
            f"Posterior samples are off by up to {largest:.1e} posterior deviations (in the median {median:.1e}): a "
            f"solve with {report.sizes} {report.reason} at a residual of {report.max_residual:.1e}. Raise the noise, "
            "or use solver=sketchgp.ASkotch()."
        )
        if median > 1 and not getattr(self.solver, "limited", False):
            raise NumericalError(text, see="failed-mean")
        warn(text, ConvergenceWarning, see="failed-mean")

    @torch.no_grad()
    def _solve(self, solver: Any, targets: Tensor, before: Tensor | None = None) -> tuple[Tensor, SolveReport]:
        value, report = self.acceleration.solve(solver, self.system, targets, before)
        if self.why and not isinstance(solver, Cholesky) and self.why not in report.notes:
            report.notes.append(self.why)
            logger.info(self.why)
        return value, report


def typical(deviations: Tensor) -> Tensor:
    """Return a typical standard deviation of normal numbers: a geometric mean, in which small ones count."""
    size = deviations.abs()
    return _NORMAL * size.clamp_min(1e-6 * size.max()).log().mean().exp()


def _both(first: SolveReport, second: SolveReport, left: Tensor, tol: float) -> SolveReport:
    """Merge the reports of a solve and of one for its residual.

    :param left: the first's residuals; :param tol: wanted of both.
    """
    note = f"solved for residuals until they were {tol:.1e}, so that samples are right to some percent of a deviation"
    return dataclasses.replace(
        second,
        residual=second.residual * left.to(second.residual),
        history=torch.cat([first.history, second.history * left.to(second.history)]),
        tol=tol,
        seconds=first.seconds + second.seconds,
        setup_seconds=first.setup_seconds + second.setup_seconds,
        work={name: count + first.work.get(name, 0) for name, count in second.work.items()},
        notes=[*(text for text in first.notes if not text.startswith("solved for residuals")), note],
    )

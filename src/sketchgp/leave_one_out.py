"""``leave_one_out(model)``: every training point predicted from all others, by one factorization or one block solve."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from . import checks
from .accelerate import acceleration_of
from .errors import InputError
from .inference.leave_one_out import ProbedDiagonal, exact_diagonal, log_density, probed_diagonal, signs, totals
from .memory import require_memory
from .models.accelerated.conditioned import TrainingData, check_inputs
from .models.accelerated.posterior import solution_report, strategy_of
from .models.accelerated.strategy import AcceleratedPredictionStrategy
from .models.accelerated.targets import refuse_missing
from .report import SolveReport
from .settings import memory_budget
from .solvers import Cholesky
from .solvers.full.cholesky import factor_bytes

_ALWAYS = 800  # rows up to which the matrix is always factorized
_EXACT_WORK = {"cpu": 2e11, "cuda": 2e15}  # n^3 up to which it is the default
_ENDS = 4.0  # standard errors to the end of an interval
_TOLERANCE = 5e-3  # of the probes' solve: what it leaves falls with its square, and is less than the probes' noise


@dataclass(repr=False)
class LeaveOneOut:
    """Predictions for the training points, each from all others, with the hyperparameters that were fitted to all.

    Tensors are ``(n,)`` in the dtype of the targets, with NaN where a target is missing.  ``mean`` predicts the target,
    ``variance`` is that of an observation (the noise is in it), ``residual`` is the target less the mean, and
    ``log_density`` the log predictive density of the target.  ``mean_squared_error`` and ``mean_log_density`` are
    averages over the rows.  All are in units of the data, those before BoTorch's ``Standardize``, as in
    :func:`predict`.

    Standard errors are those of the probes, 0 where ``exact``; what the tolerance of the model's mean left out is not
    in them.  ``num_probes`` were used, 0 where ``exact``.  ``report`` is of the solve for the probes, or of the
    factorization; ``mean_report`` of the solve behind the model's mean, where that was used.
    """

    mean: Tensor
    variance: Tensor
    residual: Tensor
    log_density: Tensor
    variance_standard_error: Tensor
    residual_standard_error: Tensor
    mean_squared_error: float
    mean_squared_error_standard_error: float
    mean_log_density: float
    mean_log_density_standard_error: float
    exact: bool
    num_probes: int
    report: SolveReport | None
    mean_report: SolveReport | None

    def __repr__(self) -> str:
        how = "exact" if self.exact else f"{self.num_probes} probes"
        error, density = (
            f"{value:.6g}" + ("" if self.exact else f" +- {deviation:.1g}")
            for value, deviation in (
                (self.mean_squared_error, self.mean_squared_error_standard_error),
                (self.mean_log_density, self.mean_log_density_standard_error),
            )
        )
        return f"<LeaveOneOut of {len(self.mean)} points, {how}: mean squared error {error}, log density {density}>"


def leave_one_out(
    model: ExactGP,
    exact: bool | None = None,
    num_probes: int = 16,
    seed: int = 0,
    progress: bool | None = None,
) -> LeaveOneOut:
    """Predict every training point from all others, without fitting anything again.

    With ``A = K + noise``, ``w = A^-1 (y - prior mean)`` and ``a_i = (A^-1)_ii``: residual ``w_i / a_i``, variance
    ``1 / a_i`` (Rasmussen and Williams 2006, equation 5.12).  Exact by one factorization, ``n^3`` operations; else the
    w of the model's mean are used and the a_i are estimated by probes, one block solve to a residual of 5e-3 with as
    many columns.  Beside the probes a row's value has what a low-rank and nearest-neighbour approximation of ``A^-1``
    (:class:`sketchgp.FullScale`, for kernels that are evaluated by entries) says of it, calibrated by all of them.

    :param model: one that :func:`accelerate` was called on, with one output and no batch, or an
        :class:`InducingPointGP` (exact, with its inducing points as they are: ``n m^2`` operations); it is put into
        eval mode.
    :param exact: whether to factorize; None does so up to 800 points, and beyond while ``n^3`` is at most 2e11 (CUDA:
        2e15) and the matrix fits the memory budget, or the model's solver is :class:`Cholesky`.
    :param num_probes: at least 2.
    :param seed: of the probes.
    :param progress: show a progress bar of the probes' solve (default: in a terminal or notebook).
    :raises InputError: for a model that is not one of these, targets that are missing outside of
        ``observation_nan_policy("mask")`` (inside, their rows are left out), memory that does not suffice, or BoTorch's
        transforms of outcomes that do not just shift and scale (``Log``), or of inputs in training only.

    A solve that does not reach its tolerance warns.
    """
    owner = "leave_one_out"
    closed = hasattr(model, "_left_out")  # models that have a closed form bring it
    acceleration = None if closed else acceleration_of(model, owner)
    exact = checks.flag(owner, "exact", exact, optional=True)
    num_probes = checks.count(owner, "num_probes", num_probes, least=2)
    seed = checks.seed(owner, "seed", seed)
    checks.flag(owner, "progress", progress, optional=True)
    if acceleration is None:
        return _closed(model, exact)
    data = TrainingData.of(owner, model)
    system = data.training.system
    n, device, needed = system.n, system.noise.device, factor_bytes(system.n, 1)
    with torch.no_grad():
        if exact is None:
            cheap = n**3 <= _EXACT_WORK.get(device.type, 2e11) and needed <= memory_budget.value(device)
            exact = n <= _ALWAYS or cheap or isinstance(acceleration.solver, Cholesky)
        if exact:
            require_memory(needed, device, f"{owner}(exact=True) for n = {n}", "use exact=False.")
            weights, diagonal, report = exact_diagonal(system, data.residual)
            return _result(model, data, weights, diagonal / data.scale.square(), None, report, None)
        weights, mean_report = _weights(model, data)
        probed, report = _probed(data, num_probes, seed, progress)
        probed = probed.in_units(data.scale.square())
        return _result(model, data, weights, probed.shrunk[0], probed, report, mean_report)


def _weights(model: Any, data: TrainingData) -> tuple[Tensor, SolveReport | None]:
    """Return w ``(n,)`` float64 as the model's mean has it, and the report of its solve."""
    if isinstance(strategy_of(model), AcceleratedPredictionStrategy):
        report = solution_report(model)
        return model.prediction_strategy.weights[data.observed].to(torch.float64), report
    # the strategy of an interpolated kernel keeps other values
    solver = data.training.acceleration.column_gradients(evaluation=True)
    weights, report = data.training.acceleration.solve(solver, data.training.system, data.residual.unsqueeze(1))
    return weights.squeeze(1), report


def _probed(
    data: TrainingData, num_probes: int, seed: int, progress: bool | None
) -> tuple[ProbedDiagonal, SolveReport]:
    """Return estimates of the diagonal of the inverse, and the report of their solve."""
    training, system, acceleration = data.training, data.training.system, data.training.acceleration
    solver = acceleration.column_gradients(evaluation=True)
    solver = dataclasses.replace(solver, tol=max(_TOLERANCE, solver.tol or 0.0))
    z = signs(system.n, num_probes, seed, system.noise.device)
    built, choice = training.preconditioner, acceleration.preconditioner
    factor = z.new_zeros(system.n, 0) if built is None else built.factor
    solution, report = acceleration.solve(solver, system, z, progress=progress)
    below = choice is not None and choice.pivoted
    return probed_diagonal(system, z, solution, report.residual, factor, below, seed), report


def _closed(model: Any, exact: bool | None) -> LeaveOneOut:
    """Return the predictions of a model that has a closed form for them."""
    check_inputs("leave_one_out", model)
    name, targets = type(model).__name__, model.train_targets
    if exact is False:
        raise InputError(f"leave_one_out: an {name} is always exact; exact expects True or None, got False.")
    if targets.dim() != 1:
        raise InputError(f"leave_one_out: model expects one output, targets (n,), got {tuple(targets.shape)}.")
    refuse_missing("leave_one_out", targets)
    model.eval()
    with torch.no_grad():
        residual, variance = model._left_out()
        everything, known = torch.ones_like(targets, dtype=torch.bool), targets.to(torch.float64)
        data = TrainingData(None, residual, everything, known, torch.ones_like(known))
        return _result(model, data, residual / variance, 1 / variance, None, None, None)


def _inverted(probed: ProbedDiagonal) -> tuple[Tensor, Tensor]:
    """Return variances ``1 / a_i`` and their relative standard errors, ``(n,)`` each.

    Where a_i is hardly known ``1 / a_i`` may be far larger: that at the lower end of an interval counts, too.
    """
    (value, error), most = probed.shrunk, 1 / probed.least
    variance = ((1 + (error / value).square()) / value).minimum(most)  # mean of 1 / a for an uncertain a
    lower = (value - _ENDS * error).maximum(probed.least)
    return variance, torch.maximum(error / value, (1 / lower - 1 / value) / _ENDS / variance)


def _result(
    model: Any,
    data: TrainingData,
    weights: Tensor,
    diagonal: Tensor,
    probed: ProbedDiagonal | None,
    report: SolveReport | None,
    mean_report: SolveReport | None,
) -> LeaveOneOut:
    """Return the predictions from w and the a_i in the dtype of the model, with the standard errors of the probes."""
    weights, dtype = weights / data.scale, model.train_targets.dtype
    variance, relative = 1 / diagonal, torch.zeros_like(diagonal)
    if probed is not None:
        variance, relative = _inverted(probed)
    residual, density = weights * variance, log_density(diagonal, weights)
    if probed is None:
        squared, likely = (float(residual.square().mean()), 0.0), (float(density.mean()), 0.0)
    else:
        squared, likely = totals(probed, weights)
    residual, variance, density, relative = map(data.spread, (residual, variance, density, relative))
    return LeaveOneOut(
        mean=(data.targets - residual).to(dtype),
        variance=variance.to(dtype),
        residual=residual.to(dtype),
        log_density=density.to(dtype),
        variance_standard_error=(variance * relative).to(dtype),
        residual_standard_error=(residual.abs() * relative).to(dtype),
        mean_squared_error=squared[0],
        mean_squared_error_standard_error=squared[1],
        mean_log_density=likely[0],
        mean_log_density_standard_error=likely[1],
        exact=probed is None,
        num_probes=0 if probed is None else probed.samples.shape[1],
        report=report,
        mean_report=mean_report,
    )

"""The promise itself, on random problems: an answer is as near to a dense float64 one as its report says, or the
library warned, or it refused.

The strategies and what they build are in ``property_cases.py``.  The default is a fixed set of cases, some 15 seconds
on one core.  For hours of others::

    SKETCHGP_PROPERTY_CASES=10000 SKETCHGP_PROPERTY_SEED=1 python -m pytest -n 0 tests/test_properties.py

A failure prints its case; ``examine(Case(...))`` repeats it.  Where ``SKETCHGP_PROPERTY_LOG`` names a file, each
case adds a line to it, which ``benchmarks/properties.py`` makes its summary of.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.means import ZeroMean
from hypothesis import HealthCheck, given, seed, settings
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

import sketchgp
from property_cases import (
    BoundCase,
    Case,
    Dense,
    UnevenCase,
    as_double,
    bound_cases,
    bound_model_of,
    cases,
    data_of,
    dense_kernel,
    dense_of,
    gradient_of,
    happened,
    inducing_of,
    inducing_reference,
    kernel_of,
    model_of,
    preconditioner_of,
    solver_of,
    uneven_cases,
    uneven_of,
)
from sketchgp import ConvergenceWarning, InputError, NumericalError
from sketchgp.sklearn import GaussianProcessRegressor

CASES = int(os.environ.get("SKETCHGP_PROPERTY_CASES", "0"))
SEED = os.environ.get("SKETCHGP_PROPERTY_SEED")
LOG = os.environ.get("SKETCHGP_PROPERTY_LOG")
SHARES = {"model": 0.5, "full": 0.25, "inducing": 0.25}
DEFAULT = 28
REFUSALS = (InputError, NumericalError, NotPSDError, NanError)
PROBES = 100


class WrongError(AssertionError):
    """An answer that is off, of which nothing was said."""


@dataclass
class Outcome:
    """``state`` is ``"right"``, ``"warned"`` or ``"refused"``.  Where it is right, ``deviations`` is the largest error
    of the mean in posterior deviations of an observation, and ``share`` what was allowed as a share of the targets."""

    state: str = "right"
    deviations: float = 0.0
    share: float = 0.0
    notes: list[str] = field(default_factory=list)


def examine(case: Case) -> Outcome:
    """Solve a case and judge the answer.

    :raises WrongError: if it is off, of which nothing was said.
    """
    torch.manual_seed(0)
    outcome = Outcome()
    with warnings.catch_warnings(record=True) as caught, sketchgp.record_solves() as reports:
        warnings.simplefilter("always")
        try:
            judge = {"model": _model, "full": _full, "inducing": _inducing}[case.family](case, reports)
        except (*REFUSALS, IndexError, torch.linalg.LinAlgError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            # GPyTorch's Lanczos, of sums of linear kernels in a forward, knows no single row
            if isinstance(error, IndexError) and not where.endswith("lanczos.py"):
                raise
            # a matrix that is singular in float64 has no reference
            if isinstance(error, torch.linalg.LinAlgError) and not where.endswith("property_cases.py"):
                raise
            outcome.state, judge = "refused", None
            outcome.notes.append(f"{type(error).__name__}: {error}"[:120])
    warned = any(isinstance(w.message, ConvergenceWarning) for w in caught)
    # a solve that float32 has lost may be done again in float64 at once: the second one counts
    again = [
        one
        for one, later in zip(reports, reports[1:], strict=False)
        if later.converged and later.dtype == "float64" and later.residual.shape == one.residual.shape
    ]
    silent = [r for r in reports if not r.converged and r.tol < math.inf and not any(r is one for one in again)]
    if silent and not warned and outcome.state != "refused":
        raise WrongError(f"not converged, and no warning: {silent[0]}")
    if judge is not None:
        outcome.state = "warned" if warned else "right"
        judge(outcome)
    return outcome


def _expect(condition: bool, what: str, found: Any, expected: Any, allowed: Any) -> None:
    if not condition:
        raise WrongError(f"{what}: found {_short(found)}, expected {_short(expected)}, allowed error {_short(allowed)}")


def _short(value: Any) -> Any:
    return [float(f"{v:.6g}") for v in value.flatten().tolist()[:8]] if torch.is_tensor(value) else value


def _check_mean(outcome: Outcome, found: Tensor, dense: Dense, residual: float, slack: Tensor) -> None:
    """Within what a relative residual of the system allows: ``|k.(A^-1 r)| <= |A^-1 k| |r|``."""
    error = (found.detach().double() - dense.posterior_mean).abs()
    allowed = 1.01 * dense.inverse_cross.norm(dim=0) * residual * dense.b.norm() + slack
    _expect(bool((error <= allowed).all()), "mean", found, dense.posterior_mean, allowed)
    outcome.share = max(outcome.share, float((allowed / dense.b.abs().max()).detach().max()))
    deviation = (dense.variance + dense.noise.median()).sqrt()
    outcome.deviations = max(outcome.deviations, float((error / deviation).detach().max()))


def _rounding(case: Case, dense: Dense) -> Tensor:
    """What rounding does to a mean: of the kernel at the test points and, by a sample, of the system."""
    signs = torch.randn(dense.k.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = (dense.inverse_cross.mT @ ((dense.k * signs) @ dense.w)).abs()
    largest = dense.prior.max().clamp_min(dense.k.abs().max())
    terms = (dense.cross.abs() * dense.w.abs().unsqueeze(1)).sum(0) + largest * 1e-3 * dense.w.abs().sum()
    means = dense.mean.abs() + dense.posterior_mean.abs()
    product = _jitter(case) * largest * dense.w.abs().sum()
    return _eps(case) * (30 * moved + 10 * means) + 10 * _distances(case) * (terms + moved) + product


def _jitter(case: Case) -> float:
    """GPyTorch's factors of a product have jitter on their diagonals; up to so much there is no warning."""
    return 1e-5 if case.form in ("hadamard", "product in forward") else 0.0


def _distances(case: Case) -> float:
    """Rounding errors of squared distances over lengthscales.  The library centres the inputs of kernels that it knows;
    GPyTorch's own expansion of the square loses what the norms are larger, and a distance half of the digits."""
    size, eps = case.d / case.lengthscale**2, _eps(case)
    if case.called:
        size *= 1 + case.far**2 + case.shift**2
        return eps * (1 + size) + (eps * size) ** 0.5
    moved = (case.shift / case.lengthscale) + (case.far / case.lengthscale) ** 2  # by the reference's float64
    return eps * (1 + size) + 3e-16 * moved


def _eps(case: Case) -> float:
    return max(torch.finfo(getattr(torch, case.dtype)).eps, 1e-14)


# --- models ---------------------------------------------------------------------------------------------------


def _model(case: Case, reports: list[Any]) -> Any:
    model, tests = model_of(case)
    double = as_double(model, True)
    references, others = dense_of(double, tests), dense_of(as_double(model, False), tests)
    later, later_others = references, others
    if case.event != "none":
        twin, _ = model_of(case)
        twin = happened(case, twin, None)
        later, later_others = dense_of(as_double(twin, True), tests), dense_of(as_double(twin, False), tests)
    policy = "mask" if case.form == "missing targets" else "ignore"

    def accelerated(model: Any) -> None:
        sketchgp.accelerate(model, preconditioner=preconditioner_of(case), solver=_solver(case), matmul=case.matmul)

    accelerated(model)
    prediction, variance, likelihood, gradient = None, None, None, None
    with (
        gpytorch.settings.max_cholesky_size(case.limit),
        gpytorch.settings.num_trace_samples(PROBES),
        gpytorch.settings.deterministic_probes(True),
        gpytorch.settings.observation_nan_policy(policy),
        gpytorch.settings.cg_tolerance(1e-3),
        gpytorch.settings.fast_computations(True, True, True),
    ):
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances(True):
            mean = model(*tests).mean
        of_mean = list(reports)
        if len(tests) == 1:
            wants = None if policy == "mask" else "exact"
            prediction = sketchgp.predict(model, data_of(case).test, variance=wants, progress=False)
            variance = prediction.variance
        of_event = len(reports)
        model = happened(case, model, accelerated)
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances(True):
            mean_after = model(*tests).mean
        after = sketchgp.predict(model, data_of(case).test, variance=None, progress=False) if prediction else None
        before = len(reports)
        if case.event != "none":
            model, _ = model_of(case)
            accelerated(model)
        estimated = _estimated(case)
        model.train()
        mll = sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)
        value = mll(model(*model.train_inputs), model.train_targets)
        value.sum().backward()
        likelihood = value.detach()
        gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        of_training = reports[before:]

    def judge(outcome: Outcome) -> None:
        for what in (mean, variance, likelihood, *gradient.values()):
            _expect(what is None or bool(torch.isfinite(what).all()), "not finite", what, "", "")
        if outcome.state == "warned":
            return
        means = mean.reshape(len(references), -1)
        residual = max((r.max_residual for r in of_mean), default=0.0)
        for number, (dense, other) in enumerate(zip(references, others, strict=True)):
            rounding = _rounding(case, dense) + 10 * (dense.posterior_mean - other.posterior_mean).abs()
            _check_mean(outcome, means[number], dense, residual, rounding)
            if prediction is not None:
                _check_mean(outcome, prediction.mean.reshape(len(references), -1)[number], dense, residual, rounding)
            if variance is not None:
                expected, found = dense.variance, variance.double().reshape(len(references), -1)[number]
                of_kernel = _distances(case) if case.called else 20 * _eps(case)
                rounding = of_kernel * dense.prior + 10 * (expected - other.variance).abs()
                allowed = 0.0101 * dense.noise.min() + rounding
                _expect(bool(((found - expected).abs() <= allowed).all()), "variance", found, expected, allowed)
        residual = max((r.max_residual for r in reports[of_event:before]), default=residual)
        for number, (dense, other) in enumerate(zip(later, later_others, strict=True)):
            rounding = _rounding(case, dense) + 10 * (dense.posterior_mean - other.posterior_mean).abs()
            for one in (mean_after, None if after is None else after.mean):
                if one is not None:
                    _check_mean(outcome, one.reshape(len(later), -1)[number], dense, residual, rounding)
        if estimated is not None:
            _check_estimated(case, outcome, estimated, references[0])
        _check_likelihood(case, double, references, likelihood, gradient, of_training)

    return judge


def _estimated(case: Case) -> Any:
    """Means and solves of the estimator with the same kernel, noise and data; None for most forms."""
    if case.form not in ("plain", "fixed noise") or case.solver != "'auto'":
        return None
    data = data_of(case)
    noise = data.noise.clamp_min(1e-12).numpy() if case.form == "fixed noise" else float(data.noise.min())
    estimator = GaussianProcessRegressor(kernel_of(case), alpha=noise, optimizer=None, normalize_y=False)
    estimator.fit(data.x.numpy(), data.y[:, 0].numpy())
    with sketchgp.record_solves() as solves:
        return torch.as_tensor(estimator.predict(data.test.numpy())), solves


def _check_estimated(case: Case, outcome: Outcome, estimated: Any, dense: Dense) -> None:
    """The same as of the model, without a mean."""
    mean, solves = estimated
    y = data_of(case).y[:, 0].double()
    dense = Dense(dense.a, dense.k, dense.noise, y, dense.cross, dense.prior, torch.zeros_like(dense.mean))
    residual = max((r.max_residual for r in solves), default=0.0)
    _check_mean(outcome, mean, dense, residual, _rounding(case, dense) + 10 * _eps(case) * y.abs().max())


def _solver(case: Case) -> Any:
    return "auto" if case.solver == "'auto'" else solver_of(case)


def _check_likelihood(
    case: Case, double: Any, references: list[Dense], value: Tensor, gradient: dict[str, Tensor], reports: list[Any]
) -> None:
    """In a band around the dense value and gradient that a hundred probes and the solves leave."""
    residual = max((r.max_residual for r in reports), default=0.0)
    precision = 1e-3 if case.dtype == "float64" else 1e-2
    count = case.n if case.form == "missing targets" else len(references[0].b)
    of_solves = 0.0
    for number, dense in enumerate(references):
        quad, logdet = float((dense.b @ dense.w).detach()), dense.logdet()
        expected = -0.5 * (quad + logdet + len(dense.b) * math.log(2 * math.pi)) / count
        size = abs(quad) + len(dense.b) + abs(logdet)
        of_value = residual * float((dense.w.norm() * dense.b.norm()).detach())
        jitter = _jitter(case) * float(dense.k.diagonal().max())
        least = float(dense.noise.detach().min().clamp(min=torch.finfo(torch.float64).tiny))  # some noises are zero
        of_value += jitter * float(dense.w.detach().square().sum()) + len(dense.b) * math.log1p(jitter / least)
        allowed = (of_value + 8 * _log_deviation(case, dense) + precision * size) / count
        found = float(value.reshape(-1)[number])
        _expect(abs(found - expected) <= allowed, "marginal likelihood", found, expected, allowed)
        of_solves += 4 * residual * float(dense.b.detach().norm()) * quad**0.5 / least**0.5 + precision * size
    of_fit, of_determinant = gradient_of(double, count)
    of_probes = 2 * sum(len(dense.b) ** 0.5 for dense in references)
    for name, found in gradient.items():
        if name.endswith("period_length"):  # of which probes tell little where there are many periods between rows
            continue
        first, second = of_fit[name], of_determinant[name]
        allowed = 0.5 * (first.abs() + second.abs()) + (of_probes + of_solves) / count
        error = (found.double() - first - second).abs()
        _expect(bool((error <= allowed).all()), f"gradient of {name}", found, first + second, allowed)


def _log_deviation(case: Case, dense: Dense) -> float:
    """A bound of the standard deviation of the log determinant's estimate: without a preconditioner, and with one that
    has some directions right and takes all others for noise."""
    logs = torch.linalg.eigvalsh(dense.a.detach()).clamp_min(1e-300).log()
    choice = preconditioner_of(case)
    rank = 0 if choice is None else min(len(logs), choice.rank or len(logs))
    directions = rank**0.5 * float(logs[-1] - dense.noise.detach().min().log())
    return math.sqrt(2 / PROBES) * max(float((logs - logs.mean()).norm()), directions)


# --- problems -------------------------------------------------------------------------------------------------


def _full(case: Case, reports: list[Any]) -> Any:
    data, kernel = data_of(case), kernel_of(case)
    noise = data.noise if case.differing else float(data.noise[0])
    problem = sketchgp.FullProblem(kernel, data.x, data.y, noise)
    solver, options = solver_of(case), {}
    if isinstance(solver, sketchgp.ConjugateGradients):
        options = {"preconditioner": preconditioner_of(case)}
    if not isinstance(solver, sketchgp.Cholesky):
        options |= {"matmul": case.matmul, "progress": False}
    solution = solver.solve(problem, **options)
    k, cross = dense_kernel(kernel, data.x, data.x), dense_kernel(kernel, data.x, data.test)
    prior = dense_kernel(kernel, data.test, data.test).diagonal()
    variances = problem.noise_vector.double()

    def judge(outcome: Outcome) -> None:
        _expect(bool(torch.isfinite(solution.value).all()), "not finite", solution.value, "", "")
        report = solution.report
        for column in range(data.y.shape[1]):
            b = data.y[:, column].double()
            dense = Dense(k + variances.diag(), k, variances, b, cross, prior, torch.zeros_like(prior))
            w = solution.value[:, column].double()
            r = b - dense.a @ w
            true, said = float(r.norm() / b.norm().clamp_min(1e-300)), float(report.residual.reshape(-1)[column])
            size = float((dense.a.abs() @ w.abs()).norm() / b.norm().clamp_min(1e-300))
            allowed = 1.01 * said + 100 * _distances(case) * size
            _expect(true <= allowed, f"residual of column {column}", true, said, allowed)
            if outcome.state == "right":
                slack = _rounding(case, dense)
                _check_mean(outcome, cross.mT @ w, dense, float(report.max_residual), slack)

    return judge


def _inducing(case: Case, reports: list[Any]) -> Any:
    data, kernel = data_of(case), kernel_of(case)
    m = inducing_of(case)
    z = data.x[torch.randperm(case.n, generator=torch.Generator().manual_seed(case.seed))[:m]].clone()
    solver = solver_of(case)
    variances = data.noise if case.differing else data.noise[:1].expand(case.n)
    variance, weights = None, None
    if case.form == "model":
        likelihood: Any = FixedNoiseGaussianLikelihood(noise=variances.clone())
        model = sketchgp.InducingPointGP(
            data.x, data.y[:, 0], likelihood, ZeroMean(), kernel, z, solver, variance="dtc"
        )
        interpolates, variances = False, model.noise().detach()  # GPyTorch's likelihood has a least noise
        prediction = sketchgp.predict(model.eval(), data.test, progress=False)
        mean, variance = prediction.mean.unsqueeze(1), prediction.variance
        y = data.y[:, :1].double()
    else:
        interpolates = type(solver).__name__.startswith("EigenPro")
        noise: Any = 0.0 if interpolates else variances if case.differing else float(variances[0])
        problem = sketchgp.InducingPointProblem(kernel, data.x, data.y, noise, z)
        weights = solver.solve(problem).value.reshape(m, -1).double()
        mean, y = dense_kernel(kernel, data.test, z) @ weights, data.y.double()
    kzz, kxz, ktz = (dense_kernel(kernel, part, z) for part in (z, data.x, data.test))
    prior = dense_kernel(kernel, data.test, data.test).diagonal()

    def judge(outcome: Outcome) -> None:
        for what in (mean, variance):
            _expect(what is None or bool(torch.isfinite(what).all()), "not finite", what, "", "")
        if interpolates:  # no tolerance; but never worse than predicting zero
            assert weights is not None
            left, none = float((kxz @ weights - y).norm()), float(y.norm())
            _expect(left <= 1.2 * none, "training error", left, none, 0.2 * none)
        if interpolates or outcome.state == "warned" or type(solver).__name__.startswith("EigenPro"):
            return
        system = kzz, kxz, ktz, prior, y, variances.double()
        expected, expected_variance = inducing_reference(*system)
        others = [inducing_reference(*system, cut=cut) for cut in (1e-13, 1e-15, 1e-16)]
        rounding = torch.stack([(other - expected).abs() for other, _ in others]).amax(dim=0)
        deviation = (expected_variance + variances.double().median()).sqrt()
        error = (mean.double() - expected).abs()
        outcome.deviations = float((error / deviation.unsqueeze(1)).max())
        near = max([0.1, *(report.max_deviations for report in reports if math.isfinite(report.max_deviations))])
        # a tolerance of the residual is relative to the targets, which may be many deviations of the prior
        share = 1e-2 if case.targets**2 > 9 * case.outputscale else 1e-3
        allowed = near * deviation.unsqueeze(1) + share * torch.maximum(y.abs().max(), expected.abs().max())
        allowed = allowed + 2 * rounding
        _expect(bool((error <= allowed).all()), "mean", mean, expected, allowed)
        if variance is not None:
            rounding = torch.stack([(other - expected_variance).abs() for _, other in others]).amax(dim=0)
            allowed = 0.01 * (expected_variance + variances.double().min()) + 100 * _distances(case) * prior
            allowed = allowed + 2 * rounding
            close = (variance.double() - expected_variance).abs() <= allowed
            _expect(bool(close.all()), "variance", variance, expected_variance, allowed)

    return judge


# --- the tests ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", SHARES)
def test_never_silently_wrong(family: str) -> None:
    """Right to what the report says, or warned, or refused."""

    @settings(
        max_examples=math.ceil((CASES or DEFAULT) * SHARES[family]),
        derandomize=SEED is None,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(family))
    def check(case: Case) -> None:
        start, state = time.perf_counter(), "wrong"
        try:
            outcome = examine(case)
            state = outcome.state
        finally:
            _log(case, state, time.perf_counter() - start, outcome if state != "wrong" else None)

    (check if SEED is None else seed(int(SEED))(check))()


@pytest.mark.filterwarnings("ignore")
def test_an_energy_that_an_estimate_does_not_see() -> None:
    """Conjugate gradients pause before they find the last directions: a variance was off by 1.8% of the noise."""
    examine(
        Case(
            family="model", form="lcm", kernel="piecewise", n=30, d=1, columns=1, dtype="float64", noise=0.00075,
            differing=True, outputscale=1.8, targets=1.0, lengthscale=9.8, spread=0.8, shift=10.0, repeated=0.0,
            far=0.0, solver="Skotch(max_passes=40)", preconditioner="None", matmul="auto", limit=0, seed=30,
        )
    )  # fmt: skip


def _examples(count: int, strategy: Any, check: Any) -> None:
    """Run a check on so many cases, or on a sixteenth of those that the environment asks for."""
    options = settings(
        max_examples=max(count, CASES // 16),
        derandomize=SEED is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    found = options(given(strategy)(check))
    (found if SEED is None else seed(int(SEED))(found))()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_bounds_are_bounds() -> None:
    """The collapsed bound of any dtype is the dense one, but for rounding, and never above the likelihood."""

    def check(case: BoundCase) -> None:
        model = bound_model_of(case)
        x, y = model.train_inputs[0], model.train_targets
        with torch.no_grad():
            mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
            try:
                found = float(mll(model(x), y))
            except REFUSALS:
                return
            double, noise = copy.deepcopy(model.covar_module).double(), model.likelihood.noise.double()
            k, z = double(x.double()).to_dense(), model.inducing_points.double()
            values, vectors = torch.linalg.eigh(double(z).to_dense())
            eye = noise * torch.eye(case.n, dtype=torch.float64)
            largest = float(k.diagonal().max() / noise)
            if largest > 1e9:  # the reference has no more digits
                return
            ends = []
            for least in (1e-14, 0.0):  # eigenvalues in between may count
                kept = values > least * values[-1]
                half = (double(x.double(), z).to_dense() @ vectors[:, kept]) / values[kept].sqrt()
                quad, logdet = _gaussian(half @ half.mT + eye, y.double())
                gap = float((k.diagonal() - half.square().sum(dim=1)).clamp(min=0).sum() / noise)
                ends.append(-0.5 * (quad + logdet + gap + case.n * math.log(2 * math.pi)) / case.n)
            likelihood = -0.5 * (sum(_gaussian(k + eye, y.double())) + case.n * math.log(2 * math.pi)) / case.n
            expected, most = min(ends), min(likelihood, max(ends))
        # of the shift that k(z, z) is factorized with, and of the reference itself
        rounding = 1e-5 * (1 + abs(expected)) + 1e-14 * case.m * largest * (1 + quad / case.n)
        _expect(found <= most + rounding, "bound", found, most, rounding)
        allowed = rounding + 0.02 * (1 + abs(expected))  # eigenvalues near the shift explain a little less
        _expect(found >= expected - allowed, "bound", found, expected, allowed)

    _examples(40, bound_cases(), check)


def _gaussian(covariance: Tensor, y: Tensor) -> tuple[float, float]:
    root = torch.linalg.cholesky(covariance)
    half = torch.linalg.solve_triangular(root, y.unsqueeze(1), upper=False)
    return float(half.square().sum()), float(2 * root.diagonal().log().sum())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_standard_errors_are_honest() -> None:
    """Few points are off by more than three of the standard errors that are stated for them, or there is a warning."""
    beyond = []

    def check(case: UnevenCase) -> None:
        model, test = uneven_of(case)
        with torch.no_grad(), gpytorch.settings.max_cholesky_size(4096):
            expected = model(test).variance
        sketchgp.accelerate(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = sketchgp.predict(model, test, variance=case.method, progress=False)  # type: ignore[arg-type]
        error = found.variance_standard_error
        assert found.variance is not None and error is not None
        share = float(((found.variance - expected).abs() > 3 * error * found.variance + 1e-9).double().mean())
        warned = any(isinstance(w.message, ConvergenceWarning) for w in caught)
        _expect(warned or share <= 0.12, "points beyond three standard errors", share, "0.3% to 2%", 0.12)
        beyond.append(share)

    _examples(6, uneven_cases(), check)
    assert sum(beyond) / len(beyond) < 0.02


def _log(case: Case, state: str, seconds: float, outcome: Outcome | None) -> None:
    if LOG:
        line: dict[str, Any] = {"case": dataclasses.asdict(case), "state": state, "seconds": seconds, "seed": SEED}
        if outcome is not None:
            line |= {"deviations": outcome.deviations, "share": outcome.share, "notes": outcome.notes}
        with open(LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

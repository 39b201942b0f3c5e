"""Systems on which conjugate gradients fail: a factorization finishes them, or there is an error, never zeros."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import sketchgp
from gp_models import TORCH_WARNINGS, Plain
from sketchgp.errors import ConvergenceWarning, NumericalError
from sketchgp.report import Reason, SolveReport

pytestmark = TORCH_WARNINGS
N = 850  # more than GPyTorch factorizes


def branin(x: Tensor) -> Tensor:
    a, b = 15 * x[..., 0] - 5, 15 * x[..., 1]
    value = (b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6) ** 2
    return (value + 10 * (1 - 1 / (8 * math.pi)) * torch.cos(a) - 44) / 51


def smooth(solver: Any = "auto", scale: float = 1e8, noise: float = 1e-5, **choices: Any) -> tuple[Any, Tensor]:
    """A model of a smooth function without noise, as a fit leaves it: an output scale 1e13 times the noise."""
    x, test = torch.rand(N, 2, dtype=torch.float64), torch.rand(20, 2, dtype=torch.float64)
    return model_of(x, branin(x), MaternKernel(2.5), scale, 30.0, noise, solver, **choices), test


def model_of(
    x: Tensor, y: Tensor, kernel: Any, scale: float, lengthscale: float, noise: float, solver: Any = "auto", **more: Any
) -> Any:
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    model = Plain(x, y, likelihood, ScaleKernel(kernel)).to(x.dtype)
    model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = scale, lengthscale
    likelihood.noise = noise
    return sketchgp.accelerate(model, solver=solver, **more).eval()


def exact(model: Any, test: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, latent variance and deviation of an observation by a dense factorization in float64."""
    with torch.no_grad():
        x, y, test = (part.double() for part in (model.train_inputs[0], model.train_targets, test))
        kernel = model.covar_module.double()
        noise = float(model.likelihood.noise)
        mu = float(model.mean_module(x)[0])
        root = torch.linalg.cholesky(kernel(x).to_dense() + noise * torch.eye(len(x), dtype=torch.float64))
        c = kernel(test, x).to_dense()
        mean = mu + c @ torch.cholesky_solve((y - mu).unsqueeze(-1), root).squeeze(-1)
        explained = torch.linalg.solve_triangular(root, c.mT, upper=False).square().sum(dim=0)
        variance = (kernel(test).to_dense().diagonal() - explained).clamp(min=0)
        return mean, variance, (variance + noise).sqrt()


# --- a factorization finishes what conjugate gradients cannot ---------------------------------------------------


@pytest.mark.parametrize("solver", ["auto", sketchgp.ConjugateGradients(), sketchgp.ConjugateGradients(tol=1e-3)])
def test_mean_of_smooth_data_without_noise(solver):
    model, test = smooth(solver)
    found = sketchgp.predict(model, test, variance=None)
    assert float((found.mean - branin(test)).abs().max()) < 1e-2
    assert found.report.converged
    assert any("Cholesky" in note for note in found.report.notes)


def test_variances_samples_and_fantasies_beside_it():
    model, test = smooth(sketchgp.ConjugateGradients())
    mean, variance, deviation = exact(model, test)
    found = sketchgp.predict(model, test, variance="exact")
    assert float(((found.mean - mean) / deviation).abs().max()) < 0.1
    assert float(((found.variance - variance) / deviation.square()).abs().max()) < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of samples that float64 does not determine to 4%
        samples = sketchgp.sample_posterior(model, 16)(test)
    assert float(((samples - mean) / deviation).abs().max()) < 6
    fantasies = model.get_fantasy_model(test[:2], branin(test[:2]))
    with torch.no_grad():
        assert float(((fantasies(test).mean - branin(test)) / deviation).abs().max()) < 2


def test_a_full_problem():
    x = torch.rand(400, 2, dtype=torch.float64)
    kernel = ScaleKernel(MaternKernel(2.5)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1e8, 30.0
    solution = sketchgp.ConjugateGradients().solve(sketchgp.FullProblem(kernel, x, branin(x), 1e-6))
    assert solution.report.converged
    test = torch.rand(20, 2, dtype=torch.float64)
    assert float((solution.predict(test) - branin(test)).abs().max()) < 1e-2


def test_a_batch():
    x = torch.rand(2, N, 2, dtype=torch.float64)
    kernel = ScaleKernel(MaternKernel(2.5, batch_shape=torch.Size([2])), batch_shape=torch.Size([2]))
    likelihood = gpytorch.likelihoods.GaussianLikelihood(
        batch_shape=torch.Size([2]), noise_constraint=gpytorch.constraints.GreaterThan(1e-9)
    )
    model = Plain(x, branin(x), likelihood, kernel).double()
    model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = 1e8, 30.0
    likelihood.noise = torch.full((2, 1), 1e-4, dtype=torch.float64)
    sketchgp.accelerate(model).eval()
    test = torch.rand(2, 10, 2, dtype=torch.float64)
    with torch.no_grad(), gpytorch.settings.skip_posterior_variances():
        assert float((model(test).mean - branin(test)).abs().max()) < 1e-2


# --- where it does not fit, an error ----------------------------------------------------------------------------

SMALL = 24 * N**2 - 1  # bytes: one less than a factorization takes


@pytest.mark.parametrize(
    "use",
    [
        lambda model, test: sketchgp.predict(model, test, variance=None),
        lambda model, test: model(test).mean,
        lambda model, test: sketchgp.sample_posterior(model, 2),
    ],
)
def test_a_mean_that_fails_is_an_error(use):
    model, test = smooth(sketchgp.ConjugateGradients())
    with sketchgp.settings.memory_budget(SMALL), pytest.raises(NumericalError, match=r"Cholesky\(\).*ASkotch\(\)"):
        use(model, test)


def test_samples_that_fail_are_an_error():
    """Their mean was given; the functions drawn are solved for."""
    model, test = smooth(sketchgp.ConjugateGradients())
    sketchgp.predict(model, test, variance=None)
    with sketchgp.settings.memory_budget(SMALL), pytest.raises(NumericalError, match="samples are off"):
        sketchgp.sample_posterior(model, 2)


def test_what_helps_where_it_does_not_fit():
    model, test = smooth(sketchgp.ASkotch())
    with sketchgp.settings.memory_budget(SMALL):
        found = sketchgp.predict(model, test, variance=None)
    assert float((found.mean - branin(test)).abs().max()) < 1e-2


@pytest.mark.parametrize("limit", ["max_iterations", "max_seconds", "setting"])
def test_a_limit_asks_for_the_best_that_it_allows(limit):
    limits = {} if limit == "setting" else {limit: 900}
    model, test = smooth(sketchgp.ConjugateGradients(**limits))
    allowed = 900 if limit == "setting" else 1000
    with gpytorch.settings.max_cg_iterations(allowed), pytest.warns(ConvergenceWarning, match="ASkotch"):
        found = sketchgp.predict(model, test, variance=None)
    assert found.report.reason == "stagnated" and not found.report.converged


def test_inducing_points():
    """A solver that was named and fails is an error, unless it was limited."""
    model, test = smooth(scale=1e12, noise=1e-9)
    x, y, kernel = model.train_inputs[0], model.train_targets, model.covar_module
    for limits in ({}, {"max_iterations": 20}):
        mean, solver = gpytorch.means.ConstantMean().double(), sketchgp.KRILL(**limits)
        given = sketchgp.InducingPointGP(x, y, model.likelihood, mean, kernel, x[:100], solver=solver).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            with nullcontext() if limits else pytest.raises(NumericalError, match="could not be computed"):
                sketchgp.predict(given, test, variance=None)


# --- targets far from the prior mean ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "scale", "noise", "dtype"),
    [
        (101325.0, 1e10, 1e-2, torch.float64),
        (101325.0, 1.0, 1e-2, torch.float64),
        (1e3, 1.0, 1e-2, torch.float32),
        (0.0, 1e10, 1e-2, torch.float64),
    ],
)
def test_targets_far_from_the_mean(offset, scale, noise, dtype):
    """Errors are in posterior deviations, however large the targets are."""
    x = torch.rand(N, 2, dtype=torch.float64)
    y = offset + torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(N, dtype=torch.float64)
    model = model_of(x.to(dtype), y.to(dtype), RBFKernel(), scale, 0.3, noise)
    model.mean_module.constant.data.zero_()
    test = torch.rand(100, 2, dtype=dtype)
    found = sketchgp.predict(model, test, variance=None)
    mean, _, deviation = exact(model, test)
    off = (found.mean - mean).abs() - torch.finfo(dtype).eps * mean.abs()
    assert float((off / deviation).max()) < 0.1
    assert found.report.max_deviations <= 0.1


# --- what reports say -------------------------------------------------------------------------------------------


def report(certain: float, about: float = 9e-4, judged: str = "predictions", letter: str = "m") -> SolveReport:
    return SolveReport(
        solver="Some", size=9, n=9, residual=torch.tensor([0.676]), history=torch.ones(1, 1), tol=0.01, converged=True,
        reason=Reason.REACHED, seconds=1.0, deviations=torch.tensor([about]),
        certain_deviations=torch.tensor([certain]), judged=judged, letter=letter,
    )  # fmt: skip


def test_a_bound_that_says_nothing_is_not_shown():
    for shown in (str(report(5e5)), repr(report(5e5))):
        assert "0.0009" in shown and "5e+05" not in shown and "certain" not in shown
    assert "certain" in repr(report(0.5)) and "certain" not in str(report(0.5))
    told = report(5e5, judged="bound")
    assert "certain" in str(told) and "certain" in repr(told)


def test_the_card_of_a_prediction_has_the_estimate_first():
    model, test = smooth(scale=1.0, noise=0.01)
    found = sketchgp.predict(model, test, variance=None)
    assert found.report.certainty < 1
    line = next(line for line in repr(found).splitlines() if "error of mean" in line)
    assert line.index("about") < line.index("certainly below")
    found.report.certain_deviations = torch.tensor([30.0])
    assert "about" in repr(found) and "certainly below" not in repr(found)


def test_a_loss_is_no_residual():
    told = report(float("inf"), letter="features")
    for shown in (str(told), repr(told)):
        assert "residual" not in shown and "45.7% of that of f = 0" in shown


def test_a_call_after_a_prediction_warns_of_the_same_solution():
    """The solution is kept; whoever looks at the mean next has not seen what was said of it."""
    model, test = smooth(sketchgp.ASkotch(max_passes=3), scale=1e4, noise=1e-4)
    with torch.no_grad():
        for look in (lambda: sketchgp.predict(model, test, variance=None), lambda: model(test), lambda: model(test)):
            with pytest.warns(ConvergenceWarning):
                look()

"""Targets whose shape does not fit the model are refused, and nothing is changed by that."""

from __future__ import annotations

from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood

import sketchgp
from gp_models import LEFT_ALONE, SOLVED, TORCH_WARNINGS, Plain, data, dense, iterative, marginal, posterior, scaled

pytestmark = TORCH_WARNINGS


def unchanged(model: Any, kinds: tuple[type, type]) -> bool:
    return (type(model), type(model.likelihood)) == kinds and not hasattr(model, "_sketchgp")


@pytest.mark.parametrize("name", ["scale-rbf-ard", "batch", "hadamard"])
def test_a_column_of_targets_is_refused(name: str) -> None:
    model, test = SOLVED[name].build()
    targets = model.train_targets
    model.set_train_data(targets=targets.unsqueeze(-1), strict=False)
    kinds = type(model), type(model.likelihood)
    with pytest.raises(sketchgp.InputError, match=r"train_y\.squeeze\(-1\)"):
        sketchgp.accelerate(model)
    assert unchanged(model, kinds)
    model.set_train_data(targets=targets, strict=False)
    with iterative(tol=1e-4):
        posterior(sketchgp.accelerate(model), test)


def test_targets_of_another_number_of_points_are_refused() -> None:
    model, _ = SOLVED["scale-rbf-ard"].build()
    model.set_train_data(targets=model.train_targets[:-1], strict=False)
    with pytest.raises(sketchgp.InputError, match="one target for each of the 180 points"):
        sketchgp.accelerate(model)


@pytest.mark.parametrize("settings", [iterative, dense])
def test_rows_and_targets_that_part_later_are_refused(settings: Any) -> None:
    """``set_train_data`` takes fewer targets than rows; every question asked afterwards names both."""
    model, test = SOLVED["scale-rbf-ard"].build()
    sketchgp.accelerate(model).eval()
    x, y = model.train_inputs[0], model.train_targets
    model.set_train_data(x[:9], y[:8], strict=False)
    calls = (lambda: sketchgp.predict(model, *test), lambda: model(*test).mean, lambda: sketchgp.fit(model))
    with settings():
        for call in (*calls, lambda: sketchgp.leave_one_out(model), lambda: sketchgp.sample_posterior(model, 2)):
            with pytest.raises(sketchgp.InputError, match="targets have shape"):
                call()
        model.set_train_data(x[:9] * torch.nan, y[:9], strict=False)
        for call in calls:
            with pytest.raises(sketchgp.InputError, match="hold NaN"):
                call()
        model.set_train_data(x[:9], y[:9], strict=False)
        sketchgp.predict(model, *test)


def test_a_log_density_refuses_a_column() -> None:
    """Whatever way it came: ``set_train_data``, or another target than the model's."""
    model, _ = SOLVED["scale-rbf-ard"].build()
    sketchgp.accelerate(model).train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    prior = model(*model.train_inputs)
    for settings in (iterative, dense):
        with settings(), pytest.raises(sketchgp.InputError, match=r"squeeze\(-1\)"):
            mll(prior, model.train_targets.unsqueeze(-1))


@pytest.mark.parametrize("several", [False, True])
def test_a_model_of_ours_refuses_at_construction(several: bool) -> None:
    class Model(sketchgp.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), scaled(gpytorch.kernels.RBFKernel())

    x, y, _ = data(n=30)
    if several:  # what several outputs have
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
        Model(x, torch.stack([y, -y], dim=-1), likelihood)
    else:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        with pytest.raises(sketchgp.InputError, match=r"squeeze\(-1\)"):
            Model(x, y.unsqueeze(-1), likelihood)
        assert type(likelihood) is gpytorch.likelihoods.GaussianLikelihood


@pytest.mark.parametrize("name", ["lcm", "kronecker"])
def test_several_outputs_are_served(name: str) -> None:
    model, _ = {**SOLVED, **LEFT_ALONE}[name].build()
    sketchgp.accelerate(model)
    with iterative(probes=4, tol=1e-3):
        assert torch.isfinite(marginal(model)[0])


def test_outputs_of_derivatives() -> None:
    """(n, d + 1) targets, of a likelihood of tasks."""
    x, y, xt = data(n=40)

    class Derivatives(Plain):
        def forward(self, x: Any) -> Any:
            mean, covariance = self.mean_module(x), self.covar_module(x)
            return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)

    targets = torch.stack([y, y, y], dim=-1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3)
    mean, kernel = gpytorch.means.ConstantMeanGrad(), gpytorch.kernels.RBFKernelGrad()
    model = Derivatives(x, targets, likelihood, kernel, mean).double()
    assert posterior(sketchgp.accelerate(model), (xt,))[0].shape == (len(xt), 3)
    model.train()
    sketchgp.restore(model).set_train_data(targets=targets[:, :1], strict=False)
    with pytest.raises(sketchgp.InputError):
        sketchgp.accelerate(model)


def test_a_column_is_one_output_of_an_inducing_point_model() -> None:
    """(n, 1) is legitimate there, and the bound is that of (n,)."""
    x, y, _ = data(n=60)
    values = []
    for targets in (y, y.unsqueeze(-1)):
        parts = gpytorch.means.ConstantMean().double(), scaled(gpytorch.kernels.RBFKernel()).double()
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        model = sketchgp.InducingPointGP(x, targets, likelihood, *parts, x[::6])
        model.train()
        values.append(ExactMarginalLogLikelihood(likelihood, model)(model(x), targets).detach())
    assert torch.allclose(values[0], values[1], rtol=1e-10)
    model = sketchgp.InducingPointGP(x, y, likelihood, *parts, x[::6]).train()
    with pytest.raises((sketchgp.InputError, RuntimeError)):
        ExactMarginalLogLikelihood(likelihood, model)(model(x), y.unsqueeze(-1))


def fixed(noises: int, n: int = 60) -> Plain:
    x, y, _ = data(n)
    likelihood = FixedNoiseGaussianLikelihood(torch.full((noises,), 1e-2, dtype=torch.float64))
    return Plain(x, y, likelihood, scaled(gpytorch.kernels.RBFKernel(), 0.8)).double()


def test_fixed_noise_of_other_rows_is_refused() -> None:
    """GPyTorch adds no noise then."""
    expected = r"noise has shape \(50,\) where the training targets have \(60,\)"
    with pytest.raises(sketchgp.InputError, match=expected):
        sketchgp.accelerate(fixed(50))
    model = sketchgp.accelerate(fixed(60))
    x, y, test = data(70)
    model.eval()
    model(test).variance  # noqa: B018
    model.set_train_data(x, y, strict=False)
    for ask in (model, lambda x: sketchgp.predict(model, x), lambda x: sketchgp.fit(model, iterations=1)):
        with pytest.raises(sketchgp.InputError, match=r"\(60,\) where the training targets have \(70,\)"):
            ask(test)
    model.train()
    with pytest.raises(sketchgp.InputError, match=r"\(60,\)"):
        ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    model.likelihood.noise = torch.full((70,), 1e-2, dtype=torch.float64)
    assert torch.isfinite(sketchgp.predict(model, test).variance).all()

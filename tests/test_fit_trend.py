"""Trends of a prior mean, which losses are minimised over: values, coefficients and gradients against dense algebra."""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.priors import NormalPrior
from torch import Tensor

import sketchgp
from sketchgp.density import Exact, Probes, Vecchia
from sketchgp.fitting.objective import Objective
from sketchgp.preconditioners import FullScale

N, D = 120, 2
WEIGHTS = torch.tensor([[3.0], [-2.0]], dtype=torch.float64)


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, mean: Any, power: int = 1) -> None:
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module, self.power = mean, power
        self.covar_module = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=x.shape[-1]))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x) ** self.power, self.covar_module(x))


def data(n: int = N, level: float = 5.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(6 * x[:, 0]) + (x @ WEIGHTS).squeeze(1) + level + 0.1 * noise


def objective_of(mean: Any, density: Any, x: Tensor, y: Tensor, kind: Any = Model, **options: Any) -> Objective:
    model = kind(x, y, mean, **options).to(x.dtype)
    model.covar_module.base_kernel.lengthscale = torch.tensor([[0.4, 0.7]], dtype=x.dtype)
    model.likelihood.noise = 0.05
    sketchgp.accelerate(model, matmul="tiled").train()
    return Objective(model, sketchgp.ExactMarginalLogLikelihood(model.likelihood, model), density)


def dense(objective: Objective) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the least loss over the trend, its coefficients and the gradient in the other parameters."""
    model = objective.model
    x, y = model.train_inputs[0], model.train_targets
    seen = ~torch.isnan(y)
    x, y = x[seen].double(), y[seen].double()
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    design = ones if isinstance(model.mean_module, ConstantMean) else torch.cat([x, ones], dim=1)
    others = [*model.covar_module.parameters(), *model.likelihood.parameters()]
    covariance = model.covar_module.double()(x).to_dense() + model.likelihood.noise * torch.eye(len(x))
    root = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(root, torch.cat([y.unsqueeze(1), design], dim=1), upper=False)
    coefficients = torch.linalg.lstsq(whitened[:, 1:].detach(), whitened[:, :1].detach()).solution
    rest = whitened[:, :1] - whitened[:, 1:] @ coefficients
    loss = 0.5 * rest.square().sum() + root.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)
    loss = loss / len(model.train_targets)
    return loss.detach(), coefficients.squeeze(1), list(torch.autograd.grad(loss, others))


DENSITIES = {
    "exact": lambda: Exact(),
    "all neighbours": lambda: Vecchia(FullScale(rank=0, neighbors=N)),
    "probes": lambda: Probes(),
}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("mean", [ConstantMean, lambda: LinearMean(D)])
@pytest.mark.parametrize("density", DENSITIES)
def test_losses_are_least_over_the_trend(density: str, mean: Any, missing: bool) -> None:
    x, y = data()
    if missing:
        y[::7] = math.nan
    objective = objective_of(mean(), DENSITIES[density](), x, y)
    cg = sketchgp.ConjugateGradients(tol=1e-10)
    with gpytorch.settings.observation_nan_policy("mask"), gpytorch.settings.max_cholesky_size(0):
        objective.acceleration.solver = cg
        with objective.acceleration.having(probe_seed=0, probe_count=200):
            value = objective.evaluate().value
    found = torch.cat([p.detach().reshape(-1) for p in objective.model.mean_module.parameters()])
    gradients = [p.grad for p in (*objective.model.covar_module.parameters(), *objective.model.likelihood.parameters())]
    loss, coefficients, expected = dense(objective)
    estimated = density == "probes"
    assert value == pytest.approx(float(loss), abs=0.05 if estimated else 1e-9)
    assert torch.allclose(found, coefficients, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=0.05 if estimated else 1e-8)


def test_what_a_trend_adds_to_targets_changes_nothing_else() -> None:
    """The same fits to the last digits that a loss is worth, whatever the level, the slopes and the start."""
    x, y = data()
    ends = []
    for level, slope, start in ((0.0, 0.0, 0.0), (1e4, 300.0, -7.0)):
        mean = LinearMean(D)
        torch.nn.init.constant_(mean.weights, start)
        torch.nn.init.constant_(mean.bias, start)
        model = sketchgp.accelerate(Model(x, y + level + slope * x[:, 0], mean).double())
        history = sketchgp.fit(model, progress=False)
        moved = torch.cat([mean.weights.detach().reshape(-1), mean.bias.detach()])
        ends.append((history.best_loss, moved - torch.tensor([slope, 0, level])))
    assert ends[0][0] == pytest.approx(ends[1][0], abs=1e-6)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-3)


class Tied(Model):
    """A model whose covariance depends on the constant of the mean."""

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        scale = 1 + self.mean_module.constant.square()
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x) * scale)


class Positive(LinearMean):
    """A mean that is linear where it is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Featured(LinearMean):
    """A linear mean of features that are learnt."""

    def __init__(self) -> None:
        super().__init__(D)
        self.features = torch.nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.features(x))


@pytest.mark.parametrize("what", ["prior", "square", "fixed", "few", "tied", "positive", "features"])
def test_parameters_that_are_no_trend_are_left_to_the_optimiser(what: str) -> None:
    x, y = data(6 if what == "few" else N)
    mean = LinearMean(D) if what == "few" else ConstantMean()
    if what == "prior":
        mean = ConstantMean(constant_prior=NormalPrior(0.0, 0.1))
    if what in ("positive", "features"):
        mean = Positive(D) if what == "positive" else Featured()
    if what == "fixed":
        mean.raw_constant.requires_grad_(False)
    kind = Tied if what == "tied" else Model
    objective = objective_of(mean, Exact(), x, y, kind, power=2 if what == "square" else 1)
    before = objective.state()
    with torch.no_grad():  # as starts ask for it
        assert objective.trend is None
    assert all(torch.equal(a, b) for a, b in zip(before, objective.state(), strict=True))
    objective.evaluate()
    assert [p is q for p, q in zip(objective.moved, objective.parameters, strict=True)]


def test_a_prior_keeps_the_constant() -> None:
    x, y = data()
    mean = ConstantMean(constant_prior=NormalPrior(0.0, 1e-3))
    model = sketchgp.accelerate(Model(x, y, mean).double())
    sketchgp.fit(model, progress=False)
    assert abs(float(mean.constant.detach())) < 0.5


def test_few_rows_by_probes() -> None:
    """Rows that GPyTorch factorizes: the end is where the dense loss is least over the trend."""
    x, y = data()
    model = sketchgp.accelerate(Model(x, y, ConstantMean()).double())
    history = sketchgp.fit(model, objective="probes", progress=False)
    constant = float(model.mean_module.constant.detach())
    loss, coefficients, _ = dense(Objective(model, sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)))
    assert history.best_loss == pytest.approx(float(loss), abs=1e-6)
    assert constant == pytest.approx(float(coefficients), abs=1e-3)


@pytest.mark.parametrize("density", ["exact", "probes"])
def test_a_mean_alone_is_fitted(density: str) -> None:
    x, y = data()
    model = sketchgp.accelerate(Model(x, y, LinearMean(D)).double())
    for parameter in (*model.covar_module.parameters(), *model.likelihood.parameters()):
        parameter.requires_grad_(False)
    history = sketchgp.fit(model, objective=density, progress=False)
    found = torch.cat([p.detach().reshape(-1) for p in model.mean_module.parameters()])
    model.requires_grad_(True)
    loss, coefficients, _ = dense(Objective(model, sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)))
    assert history.best_loss == pytest.approx(float(loss), abs=1e-4)
    assert torch.allclose(found, coefficients, atol=0.1)


class Hidden(Model):
    """A model whose mean follows the lengthscale behind autograd's back."""

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        scale = self.covar_module.base_kernel.lengthscale.detach().mean()
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x * scale), self.covar_module(x))


def test_a_mean_that_changes_unseen_is_refused() -> None:
    x, y = data()
    model = sketchgp.accelerate(Hidden(x, y, LinearMean(D)).double())
    with pytest.raises(sketchgp.InputError, match="mean changes with what is not its own"):
        sketchgp.fit(model, progress=False)

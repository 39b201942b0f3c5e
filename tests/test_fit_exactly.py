"""``fit`` with defaults: exact losses, L-BFGS, starts from a subset; compared with dense GPyTorch and scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import kernels
from scipy.optimize import minimize
from torch import Tensor

import sketchgp
from gp_models import (
    LEFT_ALONE,
    SOLVED,
    TORCH_WARNINGS,
    Plain,
    data,
    dense,
    iterative,
    marginal,
    relative,
    small_subsets,
)
from sketchgp.datasets import load_diamonds
from sketchgp.fitting import plan

pytestmark = TORCH_WARNINGS


@pytest.mark.parametrize("name", SOLVED)
def test_losses_and_gradients_are_exact(name: str) -> None:
    """Of every form of model, by another route: GPyTorch's own factorization, differentiated by autograd."""
    model, _ = SOLVED[name].build()
    with dense():
        value, gradient = marginal(model)
    model, _ = SOLVED[name].build()
    history = sketchgp.fit(sketchgp.accelerate(model), optimizer="adam", iterations=1)
    expected = math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))
    assert history.objective == "exact"
    assert abs(history.losses[0] + float(value.sum())) < 1e-9
    assert abs(history.gradients[0] - expected) < 1e-8 * expected


def regression(n: int = 120, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Two inputs that matter and one that does not."""
    x, y, _ = data(n=n, d=3)
    return x.to(dtype), ((y - y.mean()) / y.std()).to(dtype)


def ard(x: Tensor, y: Tensor, noise: float = 1e-5) -> Any:
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=x.shape[1]))
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(noise))
    return sketchgp.accelerate(Plain(x, y, likelihood, kernel).to(x.dtype))


def scikit_learn(x: Tensor, y: Tensor) -> float:
    """The loss a row that scikit-learn ends at."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel() * Matern(np.ones(x.shape[1]), nu=2.5) + WhiteKernel(0.5)
    found = GaussianProcessRegressor(kernel, random_state=0).fit(x.numpy(), y.numpy())
    return -found.log_marginal_likelihood_value_ / len(y)


@pytest.mark.parametrize("dtype", [torch.float32])
def test_ends_where_scikit_learn_does(dtype: torch.dtype) -> None:
    x, y = regression(dtype=dtype)
    model = ard(x, y)
    history = sketchgp.fit(model)
    assert history.reason == "the loss has settled"
    assert history.converged
    assert history.best_loss < scikit_learn(x.double(), y.double()) + 1e-3  # whose mean is zero
    assert all(later <= before for before, later in zip(history.losses, history.losses[1:], strict=False))
    assert history.evaluations < 100
    assert str(history).startswith("fit by lbfgs (exact): loss ")
    again = sketchgp.fit(ard(x, y), start="model", iterations=5)
    assert again.losses == history.losses[:5], "nothing is random"


def test_what_does_not_matter_stays_within_bounds() -> None:
    """Without a bound a lengthscale underflows, or ends beyond every number of float32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(80, 4, generator=generator)
    x[:, 0] = torch.randint(0, 3, (80,), generator=generator).float()  # groups
    y = x[:, 0].square() - x[:, 0] + 1e-4 * torch.randn(80, generator=generator)
    model = ard(x, y)
    sketchgp.fit(model)
    lengthscale = model.covar_module.base_kernel.lengthscale.detach()
    assert float(lengthscale.min()) >= 0.99e-5
    assert float(lengthscale.max()) <= 1.01e5
    found = sketchgp.predict(model, x[:5])
    assert bool(torch.isfinite(found.mean).all())


def test_goes_on_from_the_subset() -> None:
    """Here the subset is all rows, so that nothing is left to do; the first step of a search stays near."""
    x, y = regression()
    alone = ard(x, y, noise=1e-3)
    best = sketchgp.fit(alone).best_loss
    model = ard(x, y, noise=1e-3)
    with iterative(tol=1e-6):
        history = sketchgp.fit(model, start="subset", objective="probes", num_probes=50)
    assert history.subset is not None
    assert history.subset.rows == len(y)
    assert history.subset.best_loss == best
    assert "started from a fit to 120 rows" in str(history)
    assert history.objective == "probes"
    assert abs(history.losses[0] - best) < 0.02
    assert history.evaluations < 25
    assert relative(model.covar_module.outputscale.detach(), alone.covar_module.outputscale.detach()) < 0.5


def test_scaled_variables_have_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that SciPy is given after a subset, whose curvature scales them, by central differences."""
    seen = []

    def checked(loss: Any, start: Any, **options: Any) -> Any:
        along = np.linspace(1, 2, len(start))
        ends = [loss(start + sign * 1e-5 * along)[0] for sign in (1, -1)]
        seen.append((loss(start)[1] @ along, (ends[0] - ends[1]) / 2e-5))
        return minimize(loss, start, **options)

    small_subsets(monkeypatch)
    monkeypatch.setattr("sketchgp.fitting.minimise.minimize", checked)
    sketchgp.fit(ard(*regression(60), noise=1e-3), start="subset", objective="exact", iterations=5, tol=0)
    assert len(seen) > 2, "the last ones begin with a curvature that is known"
    for found, expected in seen:
        assert found == pytest.approx(expected, rel=1e-4)


def test_goes_on_from_subset_to_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins where the one before ended, and all of them have fewer rows than the model."""
    small_subsets(monkeypatch)
    x, y = regression()
    model = ard(x, y, noise=1e-3)
    with iterative(tol=1e-5):
        history = sketchgp.fit(model, start="subset", objective="probes", num_probes=10, tol=1e-3)
    chain = [history]
    while chain[-1].subset is not None:
        chain.append(chain[-1].subset)
    assert [(one.rows, one.objective) for one in chain] == [
        (120, "probes"),
        (40, "probes"),
        (20, "probes"),
        (10, "exact"),
    ]
    assert [one.bracket is None for one in chain] == [False, True, True, True]
    alone = ard(x, y, noise=1e-3)
    assert history.best_loss < sketchgp.fit(alone).best_loss + 0.02
    assert model.train_targets.shape == y.shape and bool((model.train_targets == y).all())


@pytest.mark.parametrize("name", ["fixed-noise", "hadamard", "lcm"])
def test_rows_of_other_models(name: str) -> None:
    model, _ = SOLVED[name].build()
    if name == "fixed-noise":
        model.train_targets[::9] = torch.nan
    sketchgp.accelerate(model)
    with gpytorch.settings.observation_nan_policy("mask"):
        history = sketchgp.fit(model, start="subset", iterations=5)
    assert history.subset is not None
    assert history.subset.rows == int((~model.train_targets.reshape(len(model.train_targets), -1).isnan()).any(1).sum())
    assert history.losses[0] == pytest.approx(history.subset.best_loss * history.subset.rows / history.rows, rel=1e-3)


def test_a_batch_has_no_subset() -> None:
    model = sketchgp.accelerate(SOLVED["batch"].build()[0])
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(sketchgp.InputError, match="without a batch"):
        sketchgp.fit(model, start="subset")
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    assert model.training


@pytest.mark.parametrize("why", ["solver", "threshold", "memory"])
def test_not_where_the_user_decided_otherwise(why: str) -> None:
    x, y = regression()
    model = ard(x, y)
    if why == "solver":
        sketchgp.accelerate(model, solver=sketchgp.ConjugateGradients())
    threshold = gpytorch.settings.max_cholesky_size(20 if why == "threshold" else 800)
    memory = sketchgp.settings.memory_budget(10**4 if why == "memory" else 10**9)
    with threshold, memory:
        assert sketchgp.fit(model, iterations=2).objective == "probes"


def test_parameters_in_bounds_that_no_transform_enforces() -> None:
    x, y = regression()
    model = ard(x, y)
    kernel = model.covar_module.base_kernel
    bounds = gpytorch.constraints.Interval(0.3, 0.7, transform=None, initial_value=0.5)
    kernel.register_constraint("raw_lengthscale", bounds)
    kernel.initialize(raw_lengthscale=torch.full((1, 3), 0.5))
    history = sketchgp.fit(model)
    assert history.converged
    lengthscale = kernel.lengthscale.detach()
    assert float(lengthscale.min()) >= 0.3
    assert float(lengthscale.max()) == pytest.approx(0.7)
    assert history.at_limits == {"covar_module.base_kernel.lengthscale": pytest.approx(0.7)}


def test_the_middle_of_a_narrow_interval_is_no_limit() -> None:
    x, y = regression()
    kernel = kernels.PeriodicKernel(period_length_constraint=gpytorch.constraints.Interval(365, 366))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = sketchgp.accelerate(Plain(x, y, likelihood, kernel).double())
    kernel.period_length = 365.5
    assert "covar_module.period_length" not in sketchgp.fit(model, iterations=1).at_limits


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_says_what_ended_on_a_limit(optimizer: str) -> None:
    """Targets without noise: the least that the likelihood allows is still too much."""
    x, _ = regression()
    y = torch.sin(4 * x[:, 0]) + x[:, 1]
    steps = {"start": "model"} if optimizer == "lbfgs" else {"learning_rate": 0.3, "iterations": 100}
    history = sketchgp.fit(ard(x, y, noise=1e-3), optimizer=optimizer, **steps)
    assert history.at_limits == {"likelihood.noise_covar.noise": pytest.approx(1e-3)}
    assert str(history).endswith("likelihood.noise_covar.noise at its limit 0.001")
    assert "at its limit 0.001" in " ".join(repr(history).split())
    noisy = y + 0.3 * torch.randn(len(x))
    assert sketchgp.fit(ard(x, noisy, noise=1e-3), start="model", tol=1e-3).at_limits == {}


def test_what_modules_learn_beside_parameters_is_kept() -> None:
    class Deep(Plain):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

        def forward(self, x: Tensor) -> Any:
            return super().forward(self.net(x))

    x, y = regression(dtype=torch.float32)
    model = sketchgp.accelerate(Deep(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()))
    sketchgp.fit(model, iterations=3)
    assert float(model.net[1].running_mean.abs().max()) > 0


def test_the_bound_of_an_inducing_point_model() -> None:
    x, y = regression()
    found = {}
    for optimizer in ("lbfgs", "adam"):
        parts = gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.ConstantMean(), kernels.RBFKernel()
        model = sketchgp.InducingPointGP(x, y, *parts, x[::6]).double()
        found[optimizer] = sketchgp.fit(model, optimizer=optimizer, tol=1e-6)
    assert found["lbfgs"].objective == "bound"
    assert found["lbfgs"].converged
    assert found["lbfgs"].best_loss < found["adam"].best_loss + 1e-4


@pytest.mark.parametrize("mean", ["ConstantMean", "LinearMean"])
def test_units_change_nothing_for_parameters_of_the_mean(mean: str) -> None:
    """The same losses, step by step, whatever targets and inputs are measured in."""
    x, y = regression()
    y = y + 3 + 2 * x[:, 0]
    found = []
    for of_y, of_x in ((1.0, 1.0), (1e4, 1.0), (1.0, 1e-3)):
        units = x.new_tensor([of_x, 1.0, 1.0])
        model = Plain(x * units, y * of_y, gpytorch.likelihoods.GaussianLikelihood(
                      noise_constraint=gpytorch.constraints.GreaterThan(1e-5 * of_y**2)),
                      kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=3)))  # fmt: skip
        model.mean_module = gpytorch.means.ConstantMean() if mean == "ConstantMean" else gpytorch.means.LinearMean(3)
        model = sketchgp.accelerate(model.double())
        with torch.no_grad():
            for parameter in model.mean_module.parameters():
                parameter.zero_()
        model.covar_module.base_kernel.lengthscale = units
        model.covar_module.outputscale, model.likelihood.noise = of_y**2, 0.1 * of_y**2
        found.append(np.array(sketchgp.fit(model, iterations=12, tol=0).losses) - math.log(of_y))
    for other in found[1:]:
        assert np.abs(other - found[0]).max() < 1e-5


def test_inducing_points_move_where_asked_whatever_their_unit() -> None:
    """From the best fit of those that stand still, by the same losses in any unit of an input."""
    x, y = regression()
    found = {}
    for unit in (1.0, 1e3):
        units = x.new_tensor([1.0, unit, 1.0])
        kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3))
        kernel.base_kernel.lengthscale = units
        parts = gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.ConstantMean(), kernel
        model = sketchgp.InducingPointGP(x * units, y, *parts, (x * units)[::8]).double()
        still = sketchgp.fit(model, iterations=15, tol=0).best_loss
        model.inducing_points.requires_grad_()
        before = model.inducing_points.detach().clone()
        history = sketchgp.fit(model, iterations=18, tol=0)
        assert history.best_loss < still - 0.01
        moved = (model.inducing_points.detach() - before) / units
        assert float(moved.abs().max()) > 0.05
        found[unit] = np.array(history.losses)
    assert np.abs(found[1e3] - found[1.0]).max() < 1e-5


def test_factorizes_where_solves_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for more rows than are factorized at once; a preconditioner of three columns makes solves long."""
    monkeypatch.setitem(plan.EXACT, "cpu", 100)
    x, y = regression(820, torch.float32)
    model = ard(x, y, noise=1e-2)
    sketchgp.restore(model)
    sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=3))
    history = sketchgp.fit(model, start="model", iterations=3)
    assert history.objective == "exact"
    assert history.restarts == [1]
    assert "longer than a factorization" in history.notes[-1]
    assert history.products[0] > 0 and not any(history.products[1:])
    kept = sketchgp.fit(model, start="model", iterations=1, objective="probes")
    assert kept.objective == "probes" and not kept.restarts


class Holding(Plain):
    """Beside its parameters it has a tensor, which nothing converts."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x @ self.turn)


def test_models_that_cannot_be_copied_or_converted() -> None:
    """What they hold beside parameters may be no one's to copy, or in float32 for good."""
    for dtype in (torch.float32, torch.float64):
        x, y = regression(60, dtype=dtype)
        model = Holding(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()).to(dtype)
        model.turn = torch.eye(3, dtype=dtype)
        model.kept = model.covar_module.lengthscale * 2
        with torch.no_grad():
            history = sketchgp.fit(sketchgp.accelerate(model), iterations=5)
        assert history.objective == "exact"
        assert history.best_loss < history.losses[0]


def test_few_rows_of_a_model_that_cannot_be_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit begins with all rows."""
    monkeypatch.setattr("sketchgp.fitting.run._FEW", 40)
    x, y = regression(60, dtype=torch.float32)
    model = Holding(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel())
    model.turn = torch.eye(3)
    history = sketchgp.fit(sketchgp.accelerate(model), iterations=5)
    assert history.subset is None
    assert history.best_loss < history.losses[0]


def test_targets_that_are_missing_are_named() -> None:
    x, y = regression(30)
    model = ard(x, torch.where(torch.arange(30) % 5 == 0, torch.nan, y))
    for policy in ("ignore", "fill"):
        refused = pytest.raises(sketchgp.InputError, match="observation_nan_policy")
        with gpytorch.settings.observation_nan_policy(policy), refused:
            sketchgp.fit(model)


def test_a_kernel_that_holds_the_likelihood_is_copied_with_it() -> None:
    """GPyTorch's InducingPointKernel hands its own likelihood to copies of it."""
    model, _ = LEFT_ALONE["sgpr"].build(torch.float32)
    wide, _ = LEFT_ALONE["sgpr"].build()
    history = sketchgp.fit(sketchgp.accelerate(model), iterations=4)
    expected = sketchgp.fit(sketchgp.accelerate(wide), iterations=4)
    assert history.losses == pytest.approx(expected.losses, abs=1e-4)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.covar_module.likelihood is model.likelihood


def test_a_sum_with_an_inducing_point_kernel_in_float32() -> None:
    """Exact variances are of a copy in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        x, y = regression(60, dtype=torch.float32)
        model = Plain(x.to(dtype), y.to(dtype), gpytorch.likelihoods.GaussianLikelihood(), gpytorch.kernels.RBFKernel())
        inducing = gpytorch.kernels.InducingPointKernel(gpytorch.kernels.RBFKernel(), x[:9].to(dtype), model.likelihood)
        model.covar_module = inducing + gpytorch.kernels.MaternKernel()
        model = sketchgp.accelerate(model.to(dtype)).eval()
        found.append(sketchgp.predict(model, x[:5].to(dtype) + 0.1, variance="exact").variance.double())
        assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.allclose(*found, atol=1e-5)


def test_a_factorization_that_was_named_is_taken() -> None:
    model = ard(*regression())
    sketchgp.restore(model)
    sketchgp.accelerate(model, solver=sketchgp.Cholesky())
    with iterative(tol=1e-3):
        history = sketchgp.fit(model, iterations=3)
    expected = sketchgp.fit(ard(*regression()), iterations=3)
    assert history.objective == "exact"
    assert history.losses == pytest.approx(expected.losses, abs=1e-9)


def test_in_inference_mode() -> None:
    expected = sketchgp.fit(ard(*regression()), iterations=3)
    model = ard(*regression())
    with torch.inference_mode():
        history = sketchgp.fit(model, iterations=3)
    assert history.losses == expected.losses


def test_a_fit_after_a_subset_ends_at_its_minimum() -> None:
    """Steps that shrink for a while are no sign of it: these losses fall by 3e-3 a row after three that bring 1e-4."""
    diamonds = load_diamonds()
    rows = torch.randperm(len(diamonds.x), generator=torch.Generator().manual_seed(2))[:1200]
    x = (diamonds.x - diamonds.x.mean(0)) / diamonds.x.std(0)
    y = (diamonds.y - diamonds.y.mean()) / diamonds.y.std()
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=x.shape[1]))
    model = sketchgp.accelerate(
        Plain(
            x[rows].float(),
            y[rows].float(),
            gpytorch.likelihoods.GaussianLikelihood(),
            kernel,
            gpytorch.means.ZeroMean(),
        )
    )
    history = sketchgp.fit(model)
    assert history.subset is not None and history.subset.rows == 1000
    assert sketchgp.fit(model, start="model").best_loss > history.best_loss - 1e-3

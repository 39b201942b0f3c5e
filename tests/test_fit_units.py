"""Fits from unit to unit: what inputs and targets are measured in, and what reaches the kernel, changes no end."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import LinearKernel, MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel, SpectralMixtureKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean, ZeroMean

import sketchgp
from gp_models import TORCH_WARNINGS, iterative, small_subsets
from sketchgp.fitting.minimise import InverseHessian
from sketchgp.fitting.objective import Objective
from sketchgp.fitting.starts import inputs_seen, spread
from sketchgp.fitting.variables import Variables

pytestmark = TORCH_WARNINGS


class Model(gpytorch.models.ExactGP):
    """A mean, what the inputs go through, and a kernel; noise of at least 1e-4 of the targets' squared unit."""

    def __init__(self, x: Any, y: Any, mean: Any, kernel: Any, unit: float = 1.0, through: Any = None) -> None:
        super().__init__(x, y, GaussianLikelihood(noise_constraint=GreaterThan(1e-4 * unit**2)))
        self.mean_module, self.covar_module, self.through = mean, kernel, through
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        z = x if self.through is None else self.through(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(z))


def rows(n: int = 60, d: int = 2, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = 1.4 * torch.sin(8 * x[:, 0]) + noise * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, (y - y.mean()) / y.std()


def scaled(d: int = 2) -> Any:
    return ScaleKernel(RBFKernel(ard_num_dims=d))


def fitted(*parts: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*size of the inputs", category=UserWarning)
        return sketchgp.fit(sketchgp.accelerate(Model(*parts)), **options)


CASES: dict[str, Any] = {
    "sum, scaled twice": (lambda: ScaleKernel(scaled() + ScaleKernel(MaternKernel(nu=1.5))), ZeroMean, None, 0.0),
    "offset": (scaled, ZeroMean, None, 60.0),
    "standardised, free constant": (scaled, ConstantMean, lambda: torch.nn.BatchNorm1d(2, affine=False), 60.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_unit_changes_no_end(name: str) -> None:
    """Losses in other units differ by the logarithm of the targets' unit alone."""
    kernel, mean, through, offset = CASES[name]
    x, y = rows(noise=0.5 if name != "offset" else 0.02)
    ends = []
    for inputs, targets in ((1.0, 1.0), (300.0, 1e3)):
        given = inputs * x, targets * (y + offset), mean(), kernel(), targets, None if through is None else through()
        history = fitted(*given)
        assert history.converged
        ends.append(history.best_loss - math.log(targets))
    assert max(ends) - min(ends) < 0.01
    assert min(ends) < (1.1 if name != "offset" else -0.5)  # 1.42 is noise alone


def test_the_first_step_ends_in_no_corner() -> None:
    """From the model's own parameters the gradient is many times as long as a step may be."""
    x, y = rows(100)
    expected = fitted(x, y, ZeroMean(), scaled(), start="model").best_loss
    found = fitted(x, 10 * y, ZeroMean(), scaled(), 10.0, start="model")
    assert found.best_loss - math.log(10) == pytest.approx(expected, abs=0.01)


def test_a_network_before_the_kernel_is_seen_by_the_starts() -> None:
    """Features a thousand times larger than the inputs, of which no unit is known."""
    x, y = rows(80)
    ends = []
    for times in (1.0, 1e3):
        network = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        network.weight.copy_(times * torch.eye(2))
        ends.append(fitted(x, y, ZeroMean(), ScaleKernel(RBFKernel()), 1.0, network).best_loss)
    assert ends[1] == pytest.approx(ends[0], abs=0.01)


@pytest.mark.parametrize("solved", ["factorized", "by products"])
def test_what_a_kernel_is_given_is_known_however_its_matrix_is_solved(solved: str) -> None:
    """``active_dims`` of the kernel and of a kernel inside of it, after a forward that scales the inputs."""
    x, y = rows(d=3)
    inner = MaternKernel(nu=1.5, active_dims=(1,))
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=(0, 2)) + inner)
    model = sketchgp.accelerate(Model(x, y, ZeroMean(), kernel, 1.0, lambda z: 7 * z)).train()
    with iterative() if solved == "by products" else contextlib.nullcontext():
        seen = inputs_seen(model)
    assert torch.equal(seen[id(kernel)], 7 * x)
    assert torch.equal(seen[id(kernel.base_kernel.kernels[0])], 7 * x[:, [0, 2]])
    assert torch.equal(seen[id(inner)], 7 * x[:, [1]])


def test_inputs_far_from_the_origin_and_a_linear_mean() -> None:
    """Weights and constant are hardly told apart at 1e5: a fit is not settled with a steep gradient."""
    x, y = rows(80)
    ends = []
    for shift in (0.0, 1e5):
        mean = LinearMean(2)
        for parameter in mean.parameters():
            torch.nn.init.zeros_(parameter)
        history = fitted(x + shift, y, mean, scaled())
        assert history.converged and history.gradients[history.best_step] < 0.01
        ends.append(history.best_loss)
    assert ends[1] == pytest.approx(ends[0], abs=0.01)


@pytest.mark.parametrize("start", ["auto", "model"])
def test_the_level_of_the_targets_changes_no_end(start: str) -> None:
    """A constant in units of the level would be steeper than all else, and noise as large as the level a plateau."""
    x, y = rows()
    ends = []
    for level in (0.0, 1e5):
        mean = ConstantMean()
        mean.initialize(constant=level if start == "model" else 0.0)
        ends.append(fitted(x, y + level, mean, ScaleKernel(LinearKernel()), start=start))
    assert all(end.converged for end in ends)
    assert ends[1].best_loss == pytest.approx(ends[0].best_loss, abs=0.005)


def test_weights_of_a_mean_are_moved_apart_however_far_a_row_is() -> None:
    """Steps of all variables change the mean at the rows as much as the targets differ, and in ways of their own."""
    x, y = rows(d=3)
    x[0] *= 1e4
    for given in (x, torch.cat([x, x[:, :1]], dim=1)):  # of full rank, with a copy of a column
        mean = LinearMean(given.shape[1])
        model = sketchgp.accelerate(Model(given, y, mean, scaled(given.shape[1]))).train()
        variables = Variables(Objective(model, sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)))
        before, changes = variables(), []
        with torch.no_grad():
            values = mean(given)
            for step in np.eye(len(before))[-4:]:  # three weights and the constant are free
                variables.put(before + step)
                changes.append((mean(given) - values) / y.std(correction=0))
            variables.put(before)
            assert torch.allclose(mean(given), values)
        gram = torch.stack(changes) @ torch.stack(changes).mT / len(given)
        assert torch.allclose(gram, torch.eye(4, dtype=torch.float64), atol=1e-5)


def test_an_inducing_point_model_starts_from_what_the_size_of_its_inputs_suggests() -> None:
    x = 100 * torch.rand(300, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.sin(0.06 * x[:, 0])
    likelihood, kernel = GaussianLikelihood(), ScaleKernel(RBFKernel())
    model = sketchgp.InducingPointGP(x, y, likelihood, ZeroMean(), kernel, inducing_points=x[:30].clone()).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        history = sketchgp.fit(model)
    assert history.best_loss < -2  # 1.1 with nothing learned
    assert float(kernel.base_kernel.lengthscale.detach()) > 10


def test_a_spectral_mixture_is_stretched_to_the_unit_of_its_inputs() -> None:
    """GPyTorch's own start is a wave of length 1 or so: it is the prior mean to inputs a thousand times smaller."""
    x, _ = rows(40, 1)
    y = torch.sin(20 * x[:, 0]) * torch.exp(-x[:, 0]) + 0.1 * torch.sin(1e3 * x[:, 0])
    losses = []
    for unit in (1.0, 1e-3):
        losses.append(fitted(unit * x, y, ZeroMean(), SpectralMixtureKernel(num_mixtures=1)).best_loss)
    assert abs(losses[1] - losses[0]) < 0.01


def test_a_stretched_spectral_mixture_keeps_its_constraints_and_what_is_fixed() -> None:
    x, y = rows(60, 1)
    kernel = SpectralMixtureKernel(num_mixtures=2, mixture_means_constraint=Interval(5.0, 6.0))
    kernel.initialize(mixture_means=5.5, mixture_scales=3.0)
    kernel.raw_mixture_scales.requires_grad_(False)
    model = Model(x, y, ZeroMean(), kernel).train()
    for times, end in ((10.0, 5.001), (0.01, 5.999)):
        assert spread(model, times)
        assert torch.allclose(kernel.mixture_means, torch.tensor(end, dtype=torch.float64), atol=1e-3)
        assert torch.allclose(kernel.mixture_scales, torch.tensor(3.0, dtype=torch.float64))
    kernel.raw_mixture_means.requires_grad_(False)
    assert not spread(model, 1.0)


def test_only_one_of_the_starts_came_so_low() -> None:
    """The history says so; where all agree it does not."""
    generator = torch.Generator().manual_seed(2)
    x, noise = (torch.randn(160, d, generator=generator, dtype=torch.float64) for d in (32, 1))
    y = x[:, 0] + 0.5 * x[:, 1] + 0.3 * torch.sin(3 * x[:, 2]) + 0.01 * noise[:, 0]
    alone = fitted(x[:50, :16], y[:50], ZeroMean(), ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=16)))
    doubts = [note for note in alone.notes if note.startswith("not sure")]
    (said,) = [note for note in alone.notes if " starts: " in note]
    losses = sorted(float(word.rpartition(" ")[2]) for word in said.partition(": ")[2].split(", "))
    assert len(losses) == 5, "the first three must end apart"
    assert bool(doubts) == (losses[2] > losses[0] + 0.002), "where most of them end elsewhere"
    assert all(doubt in str(alone) for doubt in doubts)
    x, y = rows()
    assert "not sure" not in str(fitted(x, y, ZeroMean(), scaled()))


def test_far_rows_and_a_kernel_of_inner_products() -> None:
    """Without lengthscales, too, other starts are tried, from the least squares fit of a linear mean."""
    x, y = (torch.randn(29, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64) for d in (4, 1))
    x, y = 0.065 * x, y[:, 0]
    x[0], x[1] = 2e4, torch.tensor([-2e4, 2e4, 2e4, -2e4])
    history = fitted(x, y, LinearMean(4), ScaleKernel(PolynomialKernel(power=3)))
    alone = 0.5 * math.log(2 * math.pi * math.e * float(y.var()))
    assert history.best_loss < alone, "noise alone explains the targets better"
    assert "not sure" not in str(history)


@pytest.mark.parametrize("fixed", [False, True])
def test_starts_without_lengthscales_are_called_what_they_are(fixed: bool) -> None:
    """By their noise, each once; by the output scale where the noise is given."""
    x, y = rows()
    model = Model(x, y, ZeroMean(), ScaleKernel(PolynomialKernel(power=2)))
    if fixed:
        model.likelihood = FixedNoiseGaussianLikelihood(torch.full((60,), 0.3, dtype=torch.float64))
    (said,) = [note for note in sketchgp.fit(sketchgp.accelerate(model)).notes if " starts: " in note]
    names = [word.removeprefix("from ").rpartition(" ")[0] for word in said.partition(": ")[2].split(", ")]
    others = ["their output scale"] if fixed else ["little noise", "hardly any noise"]
    assert names[: len(others) + 1] == ["the first one", *others] and len(set(names)) == len(names)
    assert "lengthscales" not in said


def test_a_loss_above_that_of_noise_is_noted() -> None:
    """A kernel without an output scale is many times too large, and its lengthscale stays."""
    x, y = rows()
    kernel = RBFKernel()
    kernel.lengthscale = 0.01
    kernel.raw_lengthscale.requires_grad_(False)
    history = fitted(x, y * 1e-3, ZeroMean(), kernel, 1e-3)
    assert any(note.startswith("not sure: noise alone") for note in history.notes)
    assert not any("noise alone" in note for note in fitted(x, y, ZeroMean(), scaled()).notes)


def test_limits_of_the_optimiser_are_named() -> None:
    """Targets that are all zero want no output scale; fit's own bounds end its descent."""
    x, _ = rows()
    history = fitted(x, torch.zeros(60, dtype=torch.float64), ZeroMean(), scaled())
    assert history.at_limits["covar_module.outputscale"] == pytest.approx(1e-5, rel=0.01)
    assert history.at_limits["likelihood.noise_covar.noise"] == pytest.approx(1e-4)


def test_inverse_hessian_by_pairs() -> None:
    """The product and the diagonal are those of the matrix that the formula updates."""
    draw = np.random.RandomState(0)
    root = draw.randn(6, 6)
    steps = draw.randn(9, 6)
    pairs = [(s, (root @ root.T + np.eye(6)) @ s) for s in steps]
    result = InverseHessian.updated(InverseHessian.updated(None, pairs[:4]), pairs[4:])
    assert result is not None
    s, y = pairs[3]
    dense = (s @ y) / (y @ y) * np.eye(6)
    for s, y in pairs:
        left = np.eye(6) - np.outer(s, y) / (s @ y)
        dense = left @ dense @ left.T + np.outer(s, s) / (s @ y)
    vector = draw.randn(6)
    np.testing.assert_allclose(result @ vector, dense @ vector, rtol=1e-10)
    np.testing.assert_allclose(result.diagonal(), np.diag(dense), rtol=1e-10)
    assert InverseHessian.updated(None, []) is None


def _deep(x: torch.Tensor, y: torch.Tensor, width: int) -> Model:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))
    return sketchgp.accelerate(Model(x, y, ZeroMean(), ScaleKernel(RBFKernel()), 1.0, network))


def test_many_parameters_take_no_square_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of all pairs of the 75,000 parameters would take 45 GB."""
    monkeypatch.setattr("sketchgp.fitting.run._FEW", 30)
    x, y = rows()
    history = sketchgp.fit(_deep(x, y, 15_000), iterations=1)
    assert history.subset is not None and history.losses[0] < history.subset.losses[0]


def test_no_memory_keeps_the_history() -> None:
    x, y = rows()
    model, losses = _deep(x, y, 4), []
    forward = model.through.forward

    def limited(z: torch.Tensor) -> torch.Tensor:
        if len(losses) > 3:
            raise MemoryError("Unable to allocate 1.80 TiB")
        return forward(z)

    monkey = model.through
    monkey.forward = limited
    with pytest.warns(UserWarning, match="ran out of memory after 4 steps"):
        history = sketchgp.fit(model, start="model", callback=lambda step, loss: losses.append(loss))
    assert history.losses == losses and history.reason == "ran out of memory"
    assert not model.training


@pytest.mark.parametrize("count", [2, 9])
def test_callback_and_iterations_are_heard_in_fits_to_some_of_the_rows(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_subsets(monkeypatch)
    for name, value in {"_FEW": 30, "_FEWEST": 20}.items():
        monkeypatch.setattr(f"sketchgp.fitting.run.{name}", value)
    x, y = rows(120)
    seen: list[int] = []

    def stop(step: int, loss: float) -> bool:
        seen.append(step)
        return len(seen) == count

    model = sketchgp.accelerate(Model(x, y, ZeroMean(), scaled()))
    before = [p.detach().clone() for p in model.parameters()]
    history = sketchgp.fit(model, start="subset", callback=stop)
    assert len(seen) == count
    assert history.reason == "stopped by the callback" and history.losses == []
    assert history.subset is not None and not model.training
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    limited = sketchgp.fit(model, start="subset", iterations=2)
    while limited is not None:
        assert 1 <= len(limited.losses) <= 2
        limited = limited.subset

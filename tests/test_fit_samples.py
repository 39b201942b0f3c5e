"""``fit`` where a solver of the user's choice serves: gradients by samples, compared with dense GPyTorch."""

from __future__ import annotations

import copy
import math
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import sketchgp
from gp_models import SOLVED, TORCH_WARNINGS, Plain, data, dense, iterative, marginal, relative

pytestmark = TORCH_WARNINGS
NEVER = -math.inf
SOLVERS = {
    "ASkotch": sketchgp.ASkotch(tol=1e-5, block_size=50),
    "Skotch": sketchgp.Skotch(tol=1e-5, block_size=50),
    "EigenPro2": sketchgp.EigenPro2(tol=1e-5),
}


def build(solver: Any, noise: float = 0.05, dtype: torch.dtype = torch.float64, n: int = 80) -> Any:
    x, y, _ = data(n=n, d=2, dtype=dtype)
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2))
    kernel.base_kernel.lengthscale = torch.tensor([0.4, 0.9])
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).to(dtype)
    model.likelihood.noise = noise
    return model if solver is None else sketchgp.accelerate(model, solver=solver)


def exact_path(steps: int, rate: float) -> list[float]:
    """Losses of Adam by GPyTorch's factorization and autograd."""
    model = build(None)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        with dense():
            value, gradient = marginal(model)
        losses.append(-float(value))
        for name, parameter in model.named_parameters():
            parameter.grad = -gradient[name]
        optimizer.step()
    return losses


@pytest.mark.parametrize("name", ["ASkotch", "EigenPro2"])
def test_losses_follow_the_exact_ones_but_for_a_constant(name: str) -> None:
    model = build(SOLVERS[name])
    with iterative(tol=1e-6), sketchgp.record_solves() as solves:
        history = sketchgp.fit(model, iterations=4, num_probes=150, tol=NEVER)
    assert (history.objective, history.optimizer) == ("samples", "adam")
    assert {solve.solver for solve in solves} == {name}
    assert model._sketchgp.cache.builds == 0
    expected = np.array(exact_path(4, 0.1))
    found = np.array(history.losses)
    assert expected[0] - expected[-1] > 0.1
    assert np.abs((found - found[0]) - (expected - expected[0])).max() < 4e-3
    assert min(history.products[1:]) >= 2  # the residual of the solutions before, and what a solve ends with


def test_the_gradient_is_the_exact_one_on_the_average() -> None:
    """Of many samples, beside dense autograd."""
    with dense():
        _, gradient = marginal(build(None))
    expected = math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))
    norms = []
    for seed in range(2):
        with iterative(tol=1e-6):
            history = sketchgp.fit(build(SOLVERS["ASkotch"]), iterations=1, num_probes=300, seed=seed)
        norms.append(history.gradients[0])
    assert norms[0] != norms[1]
    assert norms == pytest.approx([expected] * 2, rel=0.03)


def test_solutions_are_warm_started_and_fits_identical() -> None:
    runs = []
    for _ in range(2):
        model = build(sketchgp.ASkotch(tol=1e-3, block_size=30), dtype=torch.float32)
        with iterative(tol=1e-3), sketchgp.record_solves() as solves:
            losses = sketchgp.fit(model, iterations=5, learning_rate=1e-3, tol=NEVER).losses
        runs.append((losses, [solve.work["passes"] for solve in solves]))
    assert runs[0] == runs[1]
    first, *others = runs[0][1]
    assert sum(others) / 4 < 0.5 * first


class Dense:
    """A solver of the user's own, without tolerance."""

    problem_type = sketchgp.FullProblem
    name = "Dense"

    def validate(self, problem: sketchgp.FullProblem) -> None:
        pass

    def solve(self, problem: sketchgp.FullProblem) -> Any:
        found = sketchgp.Cholesky().solve(problem)
        return sketchgp.Solution(found.value, found.report)


def test_a_solver_of_ones_own_serves() -> None:
    with iterative(tol=1e-6):
        history = sketchgp.fit(build(Dense()), iterations=4, num_probes=100, tol=NEVER)
    expected = np.array(exact_path(4, 0.1))
    assert history.objective == "samples"
    assert "but for a constant" in str(history)
    assert np.abs(np.diff(history.losses) - np.diff(expected)).max() < 0.01


def test_missing_targets() -> None:
    model = build(SOLVERS["ASkotch"])
    targets = model.train_targets.clone()
    targets[::7] = torch.nan
    model.set_train_data(targets=targets)
    with iterative(tol=1e-6), gpytorch.settings.observation_nan_policy("mask"):
        history = sketchgp.fit(model, iterations=5, tol=NEVER)
    assert history.objective == "samples"
    assert history.losses[-1] < history.losses[0] - 0.1


class Unknown(kernels.RBFKernel):
    """A kernel whose functions cannot be drawn."""

    def forward(self, x1: Tensor, x2: Tensor, **options: Any) -> Tensor:
        return super().forward(x1, x2, **options) ** 2


def test_what_it_does_not_serve_is_by_probes() -> None:
    """L-BFGS, sums of covariances, unknown kernels, and conjugate gradients themselves: as without it."""
    solver = SOLVERS["ASkotch"]
    with iterative(tol=1e-4):
        assert sketchgp.fit(build(solver), optimizer="lbfgs", iterations=1).objective != "samples"
        assert sketchgp.fit(build(sketchgp.ConjugateGradients()), iterations=1).objective != "samples"
        x, y, _ = data(n=60)
        unknown = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), Unknown()).double()
        assert sketchgp.fit(sketchgp.accelerate(unknown, solver=solver), iterations=1).objective != "samples"
        lcm, _ = SOLVED["lcm"].build()
        assert sketchgp.fit(sketchgp.accelerate(lcm, solver=solver), iterations=1).objective != "samples"
    few = sketchgp.fit(build(solver), iterations=1)  # which GPyTorch factorizes
    assert few.objective != "samples"


def test_it_can_be_asked_for_and_is_refused_where_it_cannot_be() -> None:
    with iterative(tol=1e-4):
        assert sketchgp.fit(build(SOLVERS["ASkotch"]), objective="samples", iterations=1).bracket is None
        for choices in ({"optimizer": "lbfgs"}, {"solver": "auto"}):
            model = build(choices.pop("solver", SOLVERS["ASkotch"]))
            with pytest.raises(sketchgp.InputError, match="expects Adam, a solver"):
                sketchgp.fit(model, objective="samples", **choices)
        with pytest.raises(sketchgp.InputError, match="checkpoint"):
            sketchgp.fit(build(SOLVERS["ASkotch"]), checkpoint="kept", iterations=1)


def test_samples_of_a_fit_are_those_of_the_posterior() -> None:
    """What was solved for on the way serves afterwards: mean and functions of the same seed take hardly a step."""
    model, z = build(SOLVERS["ASkotch"]), data(n=10, d=2, m=20)[2]
    with iterative(tol=1e-6):
        sketchgp.fit(model, iterations=12, num_probes=8, seed=3)
        steps, values = [], []
        for one in (model, copy.deepcopy(model)):  # the copy knows nothing of the fit
            found = sketchgp.predict(one, z, variance=None)
            samples = sketchgp.sample_posterior(one, 8, seed=3)
            assert found.report is not None
            assert max(found.report.max_residual, samples.report.max_residual) <= 1e-5
            steps.append([found.report.iterations, samples.report.iterations])
            values.append((found.mean, samples(z)))
        other = sketchgp.sample_posterior(model, 8, seed=4).report
    assert 2 * max(steps[0]) < min(steps[1])
    assert other.iterations > 2 * max(steps[0])
    for warm, cold in zip(*values, strict=True):
        assert relative(warm, cold) < 1e-4


def test_what_a_fit_has_left_is_no_start_for_other_data() -> None:
    """The solution of other targets is farther from theirs than zero is."""
    model = build(SOLVERS["ASkotch"])
    x, y = model.train_inputs[0], model.train_targets
    with iterative(tol=1e-6):
        sketchgp.fit(model, iterations=2)
        model.set_train_data(x, -y)
        found = sketchgp.predict(model, x[:5], variance=None)
    assert found.report is not None and found.report.converged
    assert not found.report.notes

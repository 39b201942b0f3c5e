"""``noise_path``: what dense algebra finds at each noise, exactly, or within bounds and standard errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sketchgp
from gp_models import LEFT_ALONE, SOLVED, TORCH_WARNINGS, dense, iterative
from problems import identity, normal, points

pytestmark = TORCH_WARNINGS
GRID = [0.3, 1e-3, 0.03]
VALUES = ("mean_squared_error", "mean_log_density", "log_marginal_likelihood")


def build(name: str = "bare-matern", dtype: torch.dtype = torch.float64, **choices: Any) -> Any:
    model, _ = SOLVED[name].build(dtype)
    model.mean_module.constant = 0.4
    return sketchgp.accelerate(model, **choices)


def reference(name: str = "bare-matern") -> dict[str, Tensor]:
    """The three values at each noise of GRID, by inverses and determinants of dense matrices."""
    model, _ = SOLVED[name].build()
    with dense(), torch.no_grad():
        prior, y = model.train()(*model.train_inputs), model.train_targets
        kernel, residual = prior.covariance_matrix, y - 0.4
    found: dict[str, list[Tensor]] = {name: [] for name in VALUES}
    for noise in GRID:
        matrix = kernel + noise * identity(len(y))
        inverse = torch.linalg.inv(matrix)
        variance = 1 / inverse.diagonal()
        error = (inverse @ residual) * variance
        density = torch.distributions.Normal(0.0, variance.sqrt()).log_prob(error)
        joint = torch.distributions.MultivariateNormal(torch.zeros_like(y), matrix).log_prob(residual)
        for key, value in zip(VALUES, (error.square().mean(), density.mean(), joint / len(y)), strict=True):
            found[key].append(value)
    return {name: torch.stack(values) for name, values in found.items()}


def state(model: Any) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("name", ["bare-matern", "additive-forward"])
def test_exact_is_dense(name: str) -> None:
    model, right = build(name), reference(name)
    before = state(model)
    found = sketchgp.noise_path(model, GRID)
    assert found.exact and found.noises.tolist() == GRID and state(model) == before
    for value in VALUES:
        assert torch.allclose(getattr(found, value), right[value], rtol=1e-8, atol=1e-8), value
        assert not getattr(found, value + "_standard_error").any()
    assert torch.equal(found.lower, found.log_marginal_likelihood) and torch.equal(found.lower, found.upper)
    assert not found.products.any()
    assert found.best == {
        "mean_squared_error": GRID[int(right["mean_squared_error"].argmin())],
        "mean_log_density": GRID[int(right["mean_log_density"].argmax())],
        "log_marginal_likelihood": GRID[int(right["log_marginal_likelihood"].argmax())],
    }


def test_exact_agrees_with_leave_one_out_at_the_noise_of_the_model() -> None:
    model = build()
    one = sketchgp.leave_one_out(model)
    found = sketchgp.noise_path(model, model.likelihood.noise.detach())
    assert float(found.mean_squared_error) == pytest.approx(one.mean_squared_error, rel=1e-8)
    assert float(found.mean_log_density) == pytest.approx(one.mean_log_density, rel=1e-8)


@pytest.mark.parametrize(
    ("name", "choices", "bounded"),
    [
        ("bare-matern", {}, True),
        ("bare-matern", {"preconditioner": sketchgp.RPCholesky(rank=25)}, True),
        ("bare-matern", {"preconditioner": sketchgp.Nystrom(rank=25)}, False),
        ("bare-matern", {"preconditioner": None}, True),
        ("additive-forward", {}, True),
    ],
)
def test_probes_are_as_near_as_they_say(name: str, choices: dict[str, Any], bounded: bool) -> None:
    model, right = build(name, **choices), reference(name)
    with iterative(tol=1e-5):
        found = sketchgp.noise_path(model, GRID, exact=False, num_probes=64)
    assert not found.exact and found.noises.tolist() == GRID
    for value in VALUES[:2]:
        off, error = getattr(found, value) - right[value], getattr(found, value + "_standard_error")
        assert bool((off.abs() < 4 * error + 2e-4 * right[value].abs()).all()), value
        assert bool((error < 0.1 * right[value].abs().clamp(min=0.3)).all()), value
    off, error = found.log_marginal_likelihood - right[VALUES[2]], found.log_marginal_likelihood_standard_error
    assert bool((off.abs() < 4 * error + torch.where(error > 0, 1e-4, 0.0051)).all())
    assert bool((error < 0.04).all())
    assert bool((found.lower <= right[VALUES[2]] + 1e-9).all() and (found.upper >= right[VALUES[2]] - 1e-9).all())
    assert bool(found.lower.isfinite().all()) == bounded
    assert len(found.reports) == 3 and bool((found.products > 0).all() and (found.iterations > 0).all())


def test_bounds_that_are_near_each_other_take_the_place_of_probes() -> None:
    model = build(preconditioner=sketchgp.RPCholesky(rank=60))
    right = reference()[VALUES[2]]
    with iterative(tol=1e-6):
        found = sketchgp.noise_path(model, GRID, exact=False)
    near = found.upper - found.lower < 0.01
    assert bool(near.any()) and not bool(near.all())
    assert torch.equal(found.log_marginal_likelihood_standard_error == 0, near)
    assert torch.allclose(found.log_marginal_likelihood[near], right[near], atol=0.005)


def test_earlier_noises_start_the_later_ones() -> None:
    model, _ = SOLVED["bare-matern"].build()
    model.set_train_data(points(300, 5), normal(300), strict=False)
    sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=10))
    grid = [10 ** (-k / 3) for k in range(9)]
    with iterative():
        together = sketchgp.noise_path(model, grid, exact=False, num_probes=8)
        alone = [sketchgp.noise_path(model, [noise], exact=False, num_probes=8) for noise in grid[::2]]
    first = [reports[0].iterations for reports in together.reports[::2]]
    assert sum(first) < 0.55 * sum(one.reports[0][0].iterations for one in alone)
    assert all(report.converged for reports in together.reports for report in reports)


@pytest.mark.parametrize("rank", [80, 120])
def test_bounds_hold_where_solves_end_early(rank: int) -> None:
    choices = {"preconditioner": sketchgp.RPCholesky(rank=rank), "solver": sketchgp.ConjugateGradients(tol=0.3)}
    model, right = build(**choices), reference()[VALUES[2]]
    with iterative():
        found = sketchgp.noise_path(model, GRID, exact=False, num_probes=8)
    assert bool((found.lower <= right + 1e-12).all() and (found.upper >= right - 1e-12).all())
    assert float(right[2] - found.lower[2]) < 1e-3


def test_a_path_leaves_the_model_alone() -> None:
    model = build()
    x = points(5, 2)
    with iterative():
        before = state(model), sketchgp.predict(model, x, variance=None).mean
        sketchgp.noise_path(model, GRID, exact=False, num_probes=4)
        assert state(model) == before[0]
        with sketchgp.record_solves() as solves:
            assert torch.equal(sketchgp.predict(model, x, variance=None).mean, before[1])
        assert not solves


def test_the_table_has_a_line_for_each_noise_and_marks_the_best() -> None:
    found = sketchgp.noise_path(build(), [*GRID, 0.3])
    lines = str(found).splitlines()
    assert len(lines) == 5 and lines[1] == lines[4]
    assert sum(line.count("*") for line in lines[:4]) == 3
    assert f"{found.best['mean_log_density']:.3g}" in repr(found)
    assert math.isclose(float(found.mean_squared_error[0]), float(found.mean_squared_error[3]))


def test_other_models_are_refused() -> None:
    with pytest.raises(sketchgp.InputError, match="one noise for all points"):
        sketchgp.noise_path(sketchgp.accelerate(SOLVED["fixed-noise"].build()[0]), GRID)
    with pytest.raises(sketchgp.InputError, match="no batch"):
        sketchgp.noise_path(sketchgp.accelerate(SOLVED["batch-targets"].build()[0]), GRID)
    with pytest.raises(sketchgp.InputError, match="inverted by its structure"):
        sketchgp.noise_path(sketchgp.accelerate(LEFT_ALONE["sgpr"].build()[0]), GRID)
    x, y = points(30, 2), normal(30)
    model, _ = SOLVED["bare-matern"].build()
    sparse = sketchgp.InducingPointGP(x, y, model.likelihood, model.mean_module, model.covar_module, x[:5])
    with pytest.raises(sketchgp.InputError, match="InducingPointGP"):
        sketchgp.noise_path(sparse, GRID)


@pytest.mark.parametrize(
    "noises", [[], [0.1, 0.0], [-1.0], [math.inf], "abc", None, torch.ones(2, 2), torch.tensor(0.1), [0.1, None]]
)
def test_noises_that_are_none_are_refused(noises: Any) -> None:
    with pytest.raises(sketchgp.InputError, match="noises"):
        sketchgp.noise_path(build(), noises)


def test_what_does_not_fit_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sketchgp.memory.available_memory", lambda device: 1000)
    with pytest.raises(sketchgp.InputError, match=r"noise_path\(exact=True\) for n = 180 needs .*use exact=False"):
        sketchgp.noise_path(build(), GRID, exact=True)
    with pytest.raises(sketchgp.InputError, match=r"leave_one_out\(exact=True\) for n = 180 needs .*use exact=False"):
        sketchgp.leave_one_out(build(), exact=True)

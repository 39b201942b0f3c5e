"""Every kind of model that GPyTorch solves by conjugate gradients gets the dense answer after ``accelerate``."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import gpytorch
import pytest
import torch

import sketchgp
from cases import each
from gp_models import (
    KEOPS,
    LEFT_ALONE,
    SOLVED,
    TORCH_WARNINGS,
    Case,
    dense,
    gradient_error,
    iterative,
    marginal,
    posterior,
    relative,
)

pytestmark = TORCH_WARNINGS
ALL = {**SOLVED, **LEFT_ALONE, **KEOPS}
PRECONDITIONERS = {
    "rpcholesky": sketchgp.RPCholesky(),
    "block": sketchgp.RPCholesky(method="block", block_size=7, seed=2),
    "rank": sketchgp.RPCholesky(rank=25),
    "nystrom": sketchgp.Nystrom(),
    "nystrom-uniform": sketchgp.Nystrom(rank=60, sketch="uniform"),
    "eigenpro": sketchgp.NystromEigenPro(rank=20, subsample_size=100),
    "full scale": sketchgp.FullScale(),
    "none": None,
}


def case(name: str) -> Case:
    """The case of that name; skips where its library is missing."""
    if name in KEOPS:
        pytest.importorskip("pykeops")
        if shutil.which("g++") is None and shutil.which("clang++") is None:
            pytest.skip("KeOps needs a C++ compiler")
    return ALL[name]


@functools.cache
def reference(name: str) -> tuple[Any, ...]:
    """Mean, variance, marginal likelihood and its gradient of the untouched model, by Cholesky in float64."""
    model, test = case(name).build()
    with dense():
        return (*posterior(model, test), *marginal(model))


@pytest.mark.parametrize("name", [*SOLVED, *(pytest.param(name, marks=pytest.mark.slow) for name in KEOPS)])
def test_posterior_is_the_dense_one(name: str) -> None:
    mean, variance, *_ = reference(name)
    model, test = case(name).build()
    sketchgp.accelerate(model)
    with iterative(), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
    assert solves
    assert all(report.converged for report in solves)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5


@pytest.mark.parametrize("name", [*SOLVED, *(pytest.param(name, marks=pytest.mark.slow) for name in KEOPS)])
def test_marginal_likelihood_and_gradient_are_the_dense_ones(name: str) -> None:
    _, _, value, gradient = reference(name)
    model, _ = case(name).build()
    sketchgp.accelerate(model)
    with iterative(probes=60), sketchgp.record_solves() as solves:
        found, found_gradient = marginal(model)
    assert solves
    assert all(report.converged for report in solves)
    assert found.shape == value.shape
    assert float((found - value).abs().max()) < 5e-3
    assert gradient_error(found_gradient, gradient) < 3e-2


@each("name", list(LEFT_ALONE))
def test_structured_models_keep_gpytorchs_answers(name: str) -> None:
    mean, variance, value, gradient = reference(name)
    model, test = case(name).build()
    sketchgp.accelerate(model)
    with gpytorch.settings.max_cholesky_size(100), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
        found, found_gradient = marginal(model)
    assert not solves, "GPyTorch inverts these by their structure"
    plain, _ = case(name).build()
    with gpytorch.settings.max_cholesky_size(100):
        plain_mean, plain_variance = posterior(plain, test)
        plain_value, plain_gradient = marginal(plain)
    same = torch.testing.assert_close  # entries of the kernel alone are rounded otherwise
    same([found_mean, found_variance, found, found_gradient], [plain_mean, plain_variance, plain_value, plain_gradient])
    assert relative(found_mean, mean) < 1e-3
    assert relative(found_variance, variance) < 1e-2
    assert float((found - value).abs().max()) < 1e-3
    assert gradient_error(found_gradient, gradient) < 1e-2


@pytest.mark.parametrize(
    ("name", "matmul"),
    [("scale-rbf-ard", "dense"), ("scale-rbf-ard", "tiled"), ("scale-rbf-ard", "gpytorch"),
     ("additive-forward", "dense"), ("product-forward", "tiled"), ("batch", "gpytorch"), ("batch", "tiled"),
     ("hadamard", "dense"), ("deep", "gpytorch")],
)  # fmt: skip
def test_every_matmul_gives_the_dense_answer(name: str, matmul: str) -> None:
    mean, variance, value, gradient = reference(name)
    model, test = case(name).build()
    sketchgp.accelerate(model, matmul=matmul)
    with iterative(probes=60), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
        found, found_gradient = marginal(model)
    assert all(report.converged for report in solves)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5
    assert float((found - value).abs().max()) < 5e-3
    assert gradient_error(found_gradient, gradient) < 3e-2


@pytest.mark.parametrize(
    ("name", "choice"),
    [*(("scale-rbf-ard", choice) for choice in PRECONDITIONERS),
     ("batch", "rpcholesky"), ("batch", "nystrom"), ("fixed-noise", "rpcholesky"), ("fixed-noise", "none")],
)  # fmt: skip
def test_every_preconditioner_gives_the_dense_answer(name: str, choice: str) -> None:
    mean, variance, value, gradient = reference(name)
    model, test = case(name).build()
    sketchgp.accelerate(model, preconditioner=PRECONDITIONERS[choice])
    with iterative(probes=200), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
        found, found_gradient = marginal(model)
    assert all(report.converged for report in solves)
    expected = PRECONDITIONERS[choice]
    assert {report.preconditioner for report in solves} == {"none" if expected is None else expected.name}
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5
    assert float((found - value).abs().max()) < 2e-2
    assert gradient_error(found_gradient, gradient) < 5e-2


@pytest.mark.parametrize("name", ["scale-rbf-ard", "batch", "lcm", "ski"])
def test_the_cholesky_solver_serves_predictions(name: str) -> None:
    mean, variance, value, gradient = reference(name)
    model, test = case(name).build()
    sketchgp.accelerate(model, solver=sketchgp.Cholesky())
    with iterative(probes=60), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
        assert {report.solver for report in solves} == {"Cholesky"}
        found, found_gradient = marginal(model)
    assert relative(found_mean, mean) < 1e-9
    assert relative(found_variance, variance) < 1e-7
    assert float((found - value).abs().max()) < 5e-3
    assert gradient_error(found_gradient, gradient) < 3e-2


@pytest.mark.parametrize(
    "name",
    ["scale-rbf-ard", "fixed-noise", "additive-kernel", "product-forward", "batch", "hadamard", "lcm", "periodic"],
)
def test_float32_models(name: str) -> None:
    mean, variance, value, gradient = reference(name)
    model, test = case(name).build(torch.float32)
    sketchgp.accelerate(model)
    # a tolerance that solutions rounded to float32 meet on any processor
    with iterative(probes=60, tol=3e-4), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
        found, found_gradient = marginal(model)
    assert all(report.converged for report in solves)
    assert found_mean.dtype == found_variance.dtype == found.dtype == torch.float32
    assert relative(found_mean, mean) < 1e-3
    assert relative(found_variance, variance) < 1e-2
    assert float((found - value).abs().max()) < 1e-2
    assert gradient_error(found_gradient, gradient) < 5e-2


def test_default_settings_are_accurate_enough() -> None:
    """GPyTorch's own defaults (training tolerance 1) are tightened to 1e-3, without a setting of ours; the mean goes on
    until its error is a hundredth of a posterior deviation."""
    mean, variance, value, gradient = reference("scale-rbf-ard")
    model, test = case("scale-rbf-ard").build()
    sketchgp.accelerate(model)
    with gpytorch.settings.max_cholesky_size(20), sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
        found, found_gradient = marginal(model)
    assert [report.tol for report in solves if report.judged == "predictions"] == [1e-2]
    assert {report.tol for report in solves if report.judged == "residual"} == {1e-3}
    assert relative(found_mean, mean) < 1e-3
    assert relative(found_variance, variance) < 1e-2
    assert float((found - value).abs().max()) < 2e-2
    assert gradient_error(found_gradient, gradient) < 5e-2


@pytest.mark.slow
def test_above_gpytorchs_own_limit() -> None:
    """No setting at all: 900 points are beyond GPyTorch's Cholesky factorization."""
    from gp_models import rbf

    model, test = rbf(n=900)
    model = model.double()
    with dense():
        mean, variance = posterior(model, test)
        value, gradient = marginal(model)
    sketchgp.accelerate(model)
    with sketchgp.record_solves() as solves:
        found_mean, found_variance = posterior(model, test)
        found, found_gradient = marginal(model)
    assert solves
    assert relative(found_mean, mean) < 1e-2
    assert relative(found_variance, variance) < 2e-2
    assert float((found - value).abs().max()) < 1e-2
    assert gradient_error(found_gradient, gradient) < 5e-2


# --- gradients through predictions ------------------------------------------------------------------------------


def mean_gradients(model: Any, test: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Gradient of a weighted sum of posterior means for the test inputs and every parameter."""
    model.eval()
    model.zero_grad()
    x = test[0].detach().clone().requires_grad_()
    mean = model(x, *test[1:]).mean
    weights = torch.linspace(-1, 2, mean.shape[-1], dtype=mean.dtype)
    (mean * weights).sum().backward()
    gradient = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"x": x.grad.clone(), **gradient}


@pytest.mark.parametrize("name", list(SOLVED))
def test_gradient_of_the_mean(name: str) -> None:
    model, test = case(name).build()
    with dense():
        expected = mean_gradients(model, test)
    model, test = case(name).build()
    sketchgp.accelerate(model)
    with iterative():
        found = mean_gradients(model, test)
    assert relative(found.pop("x"), expected.pop("x")) < 1e-5
    assert gradient_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["scale-rbf-ard", "batch", "additive-forward", "hadamard"])
def test_gradient_of_the_variance(name: str) -> None:
    """With respect to test inputs, as acquisition functions need it."""
    gradients = []
    for accelerated in (False, True):
        model, test = case(name).build()
        if accelerated:
            sketchgp.accelerate(model)
        model.eval()
        x = test[0].clone().requires_grad_()
        with iterative() if accelerated else dense():
            model(x, *test[1:]).variance.sum().backward()
        gradients.append(x.grad)
    assert relative(gradients[1], gradients[0]) < 1e-4


# --- fantasies, fast variances, missing targets -----------------------------------------------------------------


def fantasy(model: Any, test: tuple[Any, ...], batch: bool) -> tuple[torch.Tensor, torch.Tensor]:
    model.eval()
    generator = torch.Generator().manual_seed(11)
    shape = (3, 4) if batch else (4,)
    new_x = torch.rand(4, test[0].shape[-1], generator=generator, dtype=torch.float64)
    new_y = torch.randn(*shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        model(*test)
        found = model.get_fantasy_model(new_x, new_y)(*test)
        return found.mean, found.variance


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("name", ["scale-rbf-ard", "additive-forward", "product-kernel", "deep"])
def test_fantasy_models(name: str, batch: bool) -> None:
    model, test = case(name).build()
    with dense():
        mean, variance = fantasy(model, test, batch)
    model, test = case(name).build()
    sketchgp.accelerate(model)
    with iterative(), gpytorch.settings.fast_pred_var(), gpytorch.settings.max_root_decomposition_size(400):
        found_mean, found_variance = fantasy(model, test, batch)
    assert relative(found_mean, mean) < 1e-4
    assert relative(found_variance, variance) < 2e-2


def test_fantasy_of_a_batch_model() -> None:
    def run(accelerated: bool) -> torch.Tensor:
        model, test = case("batch").build()
        if accelerated:
            sketchgp.accelerate(model)
        model.eval()
        new_x = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).view(3, 2).expand(2, 3, 2)
        new_y = torch.tensor([[0.1, 0.5, -0.3], [1.0, 0.2, 0.4]], dtype=torch.float64)
        with torch.no_grad(), iterative() if accelerated else dense():
            model(*test)
            return model.get_fantasy_model(new_x, new_y)(*test).mean

    assert relative(run(True), run(False)) < 1e-4


@pytest.mark.parametrize("name", ["scale-rbf-ard", "ski", "additive-kernel", "batch"])
def test_fast_predictive_variances(name: str) -> None:
    mean, variance, *_ = reference(name)
    model, test = case(name).build()
    sketchgp.accelerate(model)
    with iterative(), gpytorch.settings.fast_pred_var(), gpytorch.settings.max_root_decomposition_size(400):
        found_mean, found_variance = posterior(model, test)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 2e-2


def test_batch_targets_with_one_set_of_inputs() -> None:
    """Training inputs (n, d), targets (3, n): GPyTorch offers the marginal likelihood, and no prediction."""
    model, _ = case("batch-targets").build()
    model.set_train_data(model.train_inputs[0][0], strict=False)
    with dense():
        value, gradient = marginal(model)
    sketchgp.accelerate(model)
    with iterative(probes=60), sketchgp.record_solves() as solves:
        found, found_gradient = marginal(model)
    assert solves
    assert found.shape == value.shape == (3,)
    assert float((found - value).abs().max()) < 5e-3
    assert gradient_error(found_gradient, gradient) < 3e-2


@pytest.mark.parametrize("name", ["scale-rbf-ard", "lcm"])
def test_the_prior_at_test_points_is_asked_for_once(name: str) -> None:
    """A subclass may compute it as it likes; 16 of its rows tell the solve for the mean how exact it has to be."""
    model, test = SOLVED[name].build()
    asked = []

    class Counting(type(model)):  # type: ignore[misc]
        def _get_test_prior_mean_and_covariances(self, train_inputs: Any, test_inputs: Any, **kwargs: Any) -> Any:
            asked.append(len(test_inputs[0]))
            return super()._get_test_prior_mean_and_covariances(train_inputs, test_inputs, **kwargs)

    expected, _ = posterior(model, test)
    model.__class__ = Counting
    sketchgp.accelerate(model)
    with iterative(tol=0.01), torch.no_grad(), sketchgp.record_solves() as solves:
        mean = model(*test).mean
        assert asked == [len(test[0])]
        assert solves[0].converged
        model(*test)
        assert asked == 2 * [len(test[0])]
    assert relative(mean, expected) < 1e-2


def test_zero_mean_problem_scale_does_not_matter() -> None:
    """Targets and outputs of 1e5 are solved as well as standardised ones."""
    model, test = case("scale-rbf-ard").build()
    model.set_train_data(targets=model.train_targets * 1e5, strict=False)
    with torch.no_grad():
        model.likelihood.noise = model.likelihood.noise * 1e10
        model.covar_module.outputscale = model.covar_module.outputscale * 1e10
    with dense():
        mean, variance = posterior(model, test)
    sketchgp.accelerate(model)
    with iterative():
        found_mean, found_variance = posterior(model, test)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5

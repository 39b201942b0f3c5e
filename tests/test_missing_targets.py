"""``observation_nan_policy("mask")``: sketchgp solves for the targets that were observed."""

from __future__ import annotations

from typing import Any

import gpytorch
import pytest
import torch
from linear_operator.operators import LinearOperator, MaskedLinearOperator

import sketchgp
from gp_models import (
    LEFT_ALONE,
    SOLVED,
    TORCH_WARNINGS,
    dense,
    gradient_error,
    iterative,
    marginal,
    posterior,
    relative,
)

pytestmark = TORCH_WARNINGS
CASES = {**SOLVED, **LEFT_ALONE}


@pytest.mark.parametrize("matmul", ["auto", "tiled", "gpytorch"])
@pytest.mark.parametrize("name", ["scale-rbf-ard", "fixed-noise", "additive-forward", "ski", "hadamard", "linear"])
def test_the_answer_is_that_of_the_observed_rows(name: str, matmul: str) -> None:
    """Of the mask policy: the answer is that of the model without the points whose target is NaN."""
    model, test = CASES[name].build()
    missing = torch.arange(len(model.train_targets)) % 7 == 3
    full = model.train_targets.clone()
    inputs, targets = tuple(x[~missing] for x in model.train_inputs), full[~missing]
    model.set_train_data(inputs, targets, strict=False)
    if name == "fixed-noise":
        model.likelihood.noise_covar.noise = model.likelihood.noise_covar.noise[~missing]
    with dense():
        value, gradient = marginal(model)
        mean, variance = posterior(model, test)

    model, test = CASES[name].build()
    full[missing] = torch.nan
    model.set_train_data(targets=full, strict=False)
    sketchgp.accelerate(model, matmul=matmul)
    with iterative(probes=60), gpytorch.settings.observation_nan_policy("mask"), sketchgp.record_solves() as solves:
        found, found_gradient = marginal(model, sketchgp.ExactMarginalLogLikelihood)
        assert {report.preconditioner for report in solves} == {"RPCholesky"}
        found_mean, found_variance = posterior(model, test)
        assert relative(found_mean, mean) < 1e-6
        assert relative(found_variance, variance) < 1e-5
    model.train().eval()
    with gpytorch.settings.observation_nan_policy("mask"):  # so small, it is factorized
        found_mean, found_variance = posterior(model, test)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-6
    scale = len(full) / len(targets)  # GPyTorch divides by the number of all points
    assert float((found * scale - value).abs()) < 5e-3
    assert gradient_error({k: g * scale for k, g in found_gradient.items()}, gradient) < 3e-2


def test_the_mean_of_inducing_points() -> None:
    """Its bound has a term of every input, so that training is refused."""
    model, test = CASES["sgpr"].build()
    seen = torch.arange(len(model.train_targets)) % 7 != 3
    targets = torch.where(seen, model.train_targets, torch.nan)
    model.set_train_data(model.train_inputs[0][seen], model.train_targets[seen], strict=False)
    mean, variance = posterior(model, test)
    model, _ = CASES["sgpr"].build()
    model.set_train_data(targets=targets)
    sketchgp.accelerate(model)
    with iterative(), gpytorch.settings.observation_nan_policy("mask"):
        found = posterior(model, test)
        assert relative(found[0], mean) < 1e-6
        assert relative(found[1], variance) < 1e-6
        with pytest.raises(sketchgp.InputError, match="observed rows"):
            marginal(model, sketchgp.ExactMarginalLogLikelihood)


def several(name: str) -> tuple[Any, Any]:
    """A model of two outputs, some of which are missing at some of the points."""
    model, test = CASES[name].build()
    targets = model.train_targets.clone()
    targets[1::7, 0] = torch.nan
    targets[3::5, 1] = torch.nan
    model.set_train_data(targets=targets, strict=False)
    return model, test


@pytest.mark.parametrize(
    ("name", "variance"), [("scale-rbf-ard", "exact"), ("scale-rbf-ard", "low_rank"), ("additive-forward", "exact")]
)
def test_predictions_are_those_of_the_observed_rows(name: str, variance: str) -> None:
    found = []
    for whole in (False, True):
        model, (test,) = CASES[name].build()
        seen = torch.arange(len(model.train_targets)) % 7 != 3
        if whole:
            model.train_targets[~seen] = torch.nan
        else:
            model.set_train_data(model.train_inputs[0][seen], model.train_targets[seen], strict=False)
        sketchgp.accelerate(model)
        with iterative(), gpytorch.settings.observation_nan_policy("mask" if whole else "ignore"):
            found.append(sketchgp.predict(model, test, variance=variance))
    assert relative(found[1].mean, found[0].mean) < 1e-6
    assert relative(found[1].variance, found[0].variance) < 1e-5


@pytest.mark.parametrize("name", ["kronecker", "lcm"])
def test_outputs_missing_one_by_one(name: str) -> None:
    model, test = several(name)
    with torch.no_grad():  # the reference, from the whole covariance
        model.eval()
        targets = model.train_targets.reshape(-1)
        seen = ~torch.isnan(targets)
        x = model.train_inputs[0]
        k = model.covar_module(torch.cat([x, test[0]])).to_dense()
        noisy = model.likelihood(model.forward(x)).covariance_matrix[seen][:, seen]
        prior = model.forward(torch.cat([x, test[0]])).mean.reshape(-1)
        residual = targets[seen] - prior[: len(targets)][seen]
        c, latent = k[len(targets) :, : len(targets)][:, seen], k[len(targets) :, len(targets) :].diagonal()
        mean = prior[len(targets) :] + c @ torch.linalg.solve(noisy, residual)
        variance = latent - (c * torch.linalg.solve(noisy, c.mT).mT).sum(dim=-1)
    with dense(), gpytorch.settings.observation_nan_policy("mask"):
        value, gradient = marginal(model)
    sketchgp.accelerate(model)
    with iterative(probes=60), gpytorch.settings.observation_nan_policy("mask"), sketchgp.record_solves() as solves:
        found, found_gradient = marginal(model, sketchgp.ExactMarginalLogLikelihood)
        found_mean, found_variance = posterior(model, test)
        predicted = sketchgp.predict(model, test[0])
    assert relative(found_variance.reshape(-1), variance) < 1e-5
    assert relative(predicted.mean.reshape(-1), mean) < 1e-6
    assert relative(predicted.variance.reshape(-1), variance) < 1e-5
    assert len(solves) >= 2
    assert all(report.converged and report.preconditioner == "RPCholesky" for report in solves if report.columns != 12)
    assert relative(found_mean.reshape(-1), mean) < 1e-6
    assert float((found - value).abs()) < 5e-3
    assert gradient_error(found_gradient, gradient) < 3e-2


@pytest.mark.parametrize("name", ["scale-rbf-ard", "kronecker"])
def test_gpytorchs_loss_is_refused_and_fit_serves(name: str) -> None:
    """GPyTorch's would wrap the matrix and iterate without a preconditioner."""
    if name == "kronecker":
        model, _ = several(name)
    else:
        model, _ = CASES[name].build()
        model.train_targets[::5] = torch.nan
    sketchgp.accelerate(model)
    with gpytorch.settings.observation_nan_policy("mask"):
        expected = marginal(model)[0]  # small: factorized by GPyTorch
        with iterative(probes=60):
            with pytest.raises(sketchgp.InputError, match=r"sketchgp\.ExactMarginalLogLikelihood"):
                marginal(model)
            mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
            history = sketchgp.fit(model, mll, iterations=2)
    assert abs(history.losses[0] + float(expected)) < 5e-3


def test_noise_correlated_between_outputs_is_refused() -> None:
    model, test = several("kronecker")
    model.likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, rank=1).double()
    sketchgp.accelerate(model)
    with iterative(), gpytorch.settings.observation_nan_policy("mask"):
        with pytest.raises(sketchgp.InputError, match="rank=0"):
            posterior(model, test)
        with pytest.raises(sketchgp.InputError, match="rank=0"):
            marginal(model, sketchgp.ExactMarginalLogLikelihood)


def test_no_target_at_all() -> None:
    model, test = CASES["scale-rbf-ard"].build()
    model.train_targets[:] = torch.nan
    sketchgp.accelerate(model)
    mask = gpytorch.settings.observation_nan_policy("mask")
    with iterative(), mask, pytest.raises(sketchgp.InputError, match="not NaN"):
        posterior(model, test)


def test_a_gradient_of_the_mean_reaches_the_noise() -> None:
    """With caches that are not detached, as for the mean of targets that are all there."""
    gradients = []
    for accelerated in (False, True):
        model, test = CASES["scale-rbf-ard"].build()
        model.train_targets[::5] = torch.nan
        if accelerated:
            sketchgp.accelerate(model)
        model.eval()
        policy = gpytorch.settings.observation_nan_policy("mask"), gpytorch.settings.detach_test_caches(False)
        with iterative() if accelerated else dense(), policy[0], policy[1]:
            model(*test).mean.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradient_error(gradients[1], gradients[0]) < 1e-5


def test_filled_targets_give_the_same_mean() -> None:
    model, test = CASES["scale-rbf-ard"].build()
    model.train_targets[::5] = torch.nan
    sketchgp.accelerate(model)
    means = []
    skip = gpytorch.settings.skip_posterior_variances
    for policy in ("mask", "fill"):
        model.train().eval()
        with iterative(), gpytorch.settings.observation_nan_policy(policy), skip(), sketchgp.record_solves() as solves:
            means.append(model(*test).mean)
        assert len(solves) == 1
    assert torch.equal(*means)


def test_masks_of_other_models_are_gpytorchs() -> None:
    model, test = CASES["scale-rbf-ard"].build()
    model.train_targets[::5] = torch.nan
    sketchgp.accelerate(model)
    with iterative(), gpytorch.settings.observation_nan_policy("mask"):
        posterior(model, test)
    for name in ("solve", "evaluate_kernel", "inv_quad_logdet", "_solve", "_preconditioner"):
        assert getattr(MaskedLinearOperator, name) is getattr(LinearOperator, name), name
    assert not [name for name in vars(MaskedLinearOperator) if "sketchgp" in name]

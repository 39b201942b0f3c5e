"""What is built from the class of an accelerated model or likelihood is an ordinary GPyTorch object."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gpytorch
import pytest
import torch

import sketchgp
from gp_models import SOLVED, Plain, dense, iterative, marginal, posterior


def rebuilt(accelerated: Any) -> Any:
    """A refit: a new model and a new likelihood from the classes of the accelerated ones."""
    likelihood = type(accelerated.likelihood)()
    likelihood.load_state_dict(accelerated.likelihood.state_dict())
    kernel, mean = copy.deepcopy(accelerated.covar_module), copy.deepcopy(accelerated.mean_module)
    return type(accelerated)(accelerated.train_inputs[0], accelerated.train_targets, likelihood, kernel, mean).double()


def test_a_refit_is_a_plain_model() -> None:
    plain, test = SOLVED["scale-rbf-ard"].build()
    model, _ = SOLVED["scale-rbf-ard"].build()
    sketchgp.accelerate(model)
    refit = rebuilt(model)
    assert isinstance(refit, Plain)
    assert isinstance(refit.likelihood, gpytorch.likelihoods.GaussianLikelihood)
    with dense(), sketchgp.record_solves() as solves:
        value, gradient = marginal(plain)
        found, found_gradient = marginal(refit)
        expected = posterior(plain, test)
        for twin in (refit, copy.deepcopy(refit), pickle.loads(pickle.dumps(refit))):
            assert all(torch.equal(a, b) for a, b in zip(posterior(twin, test), expected, strict=True))
    assert torch.equal(found, value)
    assert all(torch.equal(found_gradient[name], gradient[name]) for name in gradient)
    with gpytorch.settings.max_cholesky_size(20):  # GPyTorch's own conjugate gradients
        posterior(refit.train(), test)
    assert not solves
    with pytest.raises(sketchgp.InputError):
        sketchgp.restore(refit)
    with pytest.raises(sketchgp.InputError):
        sketchgp.predict(refit, *test)


def test_a_refit_is_accelerated_and_restored_like_any_model() -> None:
    model, test = SOLVED["scale-rbf-ard"].build()
    sketchgp.accelerate(model)
    refit = rebuilt(model)
    with iterative(), sketchgp.record_solves() as solves:
        posterior(sketchgp.accelerate(refit), test)
    assert solves
    sketchgp.restore(refit)
    assert type(refit) is Plain
    assert type(refit.likelihood) is gpytorch.likelihoods.GaussianLikelihood
    assert hasattr(model, "_sketchgp"), "the model it came from is accelerated still"


def test_a_subclass_of_the_class_of_an_accelerated_model() -> None:
    model, test = SOLVED["scale-rbf-ard"].build()
    kind = type(sketchgp.accelerate(model))

    class Refit(kind):
        pass

    parts = gpytorch.likelihoods.GaussianLikelihood(), copy.deepcopy(model.covar_module)
    refit = Refit(model.train_inputs[0], model.train_targets, *parts).double()
    with iterative(), sketchgp.record_solves() as solves:
        posterior(sketchgp.accelerate(refit), test)
        assert solves
        posterior(copy.deepcopy(refit).train(), test)
        found = len(solves)
    sketchgp.restore(refit)
    assert type(refit) is Refit
    with dense(), sketchgp.record_solves() as solves:
        posterior(refit, test)
    assert not solves
    assert found == 4

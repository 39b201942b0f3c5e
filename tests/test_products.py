"""Products of covariances that GPyTorch approximates, in a model's forward, before the library sees them."""

from __future__ import annotations

import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import sketchgp
from gp_models import TORCH_WARNINGS, Hadamard, _likelihood, data, scaled

pytestmark = [*TORCH_WARNINGS, pytest.mark.filterwarnings("ignore:A not p.d.")]


def _model(lengthscale):
    x, y, xt = data(300)
    tasks, tt = ((torch.arange(len(z)) % 2).unsqueeze(-1) for z in (x, xt))
    model = Hadamard((x, tasks), y, _likelihood(0.01)).double()
    model.covar_module = ScaleKernel(
        scaled(RBFKernel(), lengthscale) + scaled(MaternKernel(nu=2.5), lengthscale)
    ).double()
    return model.eval(), (xt, tt)


def test_an_approximated_product_is_told():
    """The covariance of a sum of kernels times that of tasks: Lanczos with 100 columns, which rough kernels exceed."""
    model, test = _model(0.02)
    sketchgp.accelerate(model)
    with gpytorch.settings.max_cholesky_size(100), torch.no_grad():
        with pytest.warns(sketchgp.ConvergenceWarning, match="Multiply the kernels instead"):
            model(*test)
        model.train()
        with pytest.warns(sketchgp.ConvergenceWarning, match="Multiply the kernels instead"):
            model(*model.train_inputs)


def test_right_entries_do_not_hide_the_others():
    """Of a task of hardly any variance the diagonal is right, whatever is left out of the inputs' covariance."""
    model, test = _model(0.02)
    model.task_covar_module.covar_factor.data = torch.tensor([[1.0], [1e-6]], dtype=torch.float64)
    model.task_covar_module.var = torch.tensor([1e-2, 1e-9], dtype=torch.float64)
    sketchgp.accelerate(model)
    expected = pytest.warns(sketchgp.ConvergenceWarning, match="Multiply the kernels instead")
    with gpytorch.settings.max_cholesky_size(100), torch.no_grad(), expected:
        model(*test)


def test_a_product_that_is_right_is_not():
    model, test = _model(1.0)
    with torch.no_grad():
        expected = model(*test).mean
        sketchgp.accelerate(model, solver=sketchgp.ConjugateGradients(tol=1e-6))
        with gpytorch.settings.max_cholesky_size(100), warnings.catch_warnings():
            warnings.simplefilter("error", sketchgp.ConvergenceWarning)
            found = model(*test).mean
    assert float((found - expected).abs().max()) < 1e-4

"""Products of covariances that GPyTorch approximates, in a model's forward, before the library sees them."""

from __future__ import annotations

import contextlib
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import IndexKernel, LinearKernel, MaternKernel, ProductKernel, RBFKernel, RFFKernel, ScaleKernel

import sketchgp
from gp_models import TORCH_WARNINGS, Hadamard, Plain, _likelihood, data, scaled
from problems import points

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


@pytest.mark.parametrize(("n", "budget"), [(200, None), (900, None), (900, 2**20)])
@pytest.mark.parametrize("parts", ["linear", "tasks", "features"])
def test_products_of_low_rank_kernels_are_exact(parts, n, budget):
    """GPyTorch takes roots of both factors, with jitter or of too few columns, and multiplies those."""
    x = points(n, 3)
    if parts == "linear":
        factors = [LinearKernel(), LinearKernel(), LinearKernel()]
    elif parts == "tasks":
        factors = [IndexKernel(5, 2, active_dims=[0]), LinearKernel(active_dims=[1, 2])]
        x[:, 0] = torch.arange(n) % 5
    else:
        factors = [RFFKernel(20, num_dims=3), LinearKernel()]
    kernel = ScaleKernel(ProductKernel(*factors)).double()
    y = (x[:, 1] * x[:, 2]).sin()
    model = Plain(x, y, _likelihood(1e-4), kernel, gpytorch.means.ZeroMean()).double().eval()
    with torch.no_grad():
        matrix = kernel.outputscale * math.prod(part(x).to_dense() for part in factors)
        a = matrix + model.likelihood.noise * torch.eye(n, dtype=torch.float64)
        solved = torch.linalg.solve(a, torch.cat([y[:, None], matrix[:, :4]], dim=1))
        mean, variance = matrix[:4] @ solved[:, 0], (matrix[:4, :4] - matrix[:4] @ solved[:, 1:]).diagonal()
        sketchgp.accelerate(model, solver=sketchgp.Cholesky())
        with contextlib.nullcontext() if budget is None else sketchgp.settings.memory_budget(budget):
            found, posterior = sketchgp.predict(model, x[:4]), model(x[:4])
    for one, other in ((found.mean, found.variance), (posterior.mean, posterior.variance)):
        assert torch.allclose(one, mean, atol=1e-7) and torch.allclose(other, variance, atol=1e-7)

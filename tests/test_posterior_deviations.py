"""What samples of a posterior differ from its mean by, against dense float64 algebra."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel

from problems import points, relative, set_scales
from sketchgp import Cholesky, FullProblem, InputError
from sketchgp.inference.pathwise import Deviations

N, TEST = 30, points(5, seed=4)
NOISE = torch.linspace(0.01, 0.5, N, dtype=torch.float64)
KERNELS = {
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=(0,))) + MaternKernel(nu=2.5, active_dims=(1, 2)),
}


def _kernel(name):
    return set_scales(KERNELS[name](), 1.3, 0.5).double()


def _made(kernel, samples, dtype=torch.float64, **options):
    x = points(N)
    made = Deviations(copy.deepcopy(kernel).to(dtype), x.to(dtype), samples, **options)
    targets = made.targets(x.to(dtype), NOISE.to(dtype))
    assert targets.shape == (N, samples) and targets.dtype == torch.float64
    made.weights = Cholesky().solve(FullProblem(kernel, x, targets, NOISE)).value
    return made


def _posterior(kernel, test):
    x = points(N)
    c = kernel(x, test).to_dense()
    return kernel(test).to_dense() - c.mT @ torch.linalg.solve(kernel(x).to_dense() + NOISE.diag(), c)


@pytest.mark.parametrize("name", KERNELS)
def test_covariance(name):
    kernel, samples = _kernel(name), 20_000
    d = _made(kernel, samples, frequencies=2)(TEST)
    wanted = _posterior(kernel, TEST).detach()
    scale = wanted.diagonal().sqrt()
    error = (d @ d.mT / samples - wanted) / (scale.unsqueeze(0) * scale.unsqueeze(1))
    assert d.shape == (5, samples) and d.dtype == torch.float64
    assert float(error.abs().max()) < 4.5 * math.sqrt(2 / samples)
    assert float((d.mean(dim=1) / scale).abs().max()) < 4.5 / math.sqrt(samples)


def test_gradients_are_those_of_the_variance():
    kernel, samples, x = _kernel("sum"), 100_000, TEST[:2].clone().requires_grad_()
    d = _made(kernel, samples, frequencies=2)(x)
    (found,) = torch.autograd.grad(d.square().mean(dim=-1).sum(), x)
    (wanted,) = torch.autograd.grad(_posterior(kernel, x).diagonal().sum(), x)
    assert relative(found, wanted) < 0.05


def test_batches_and_seeds():
    kernel, x = _kernel("matern"), points(12, seed=5).reshape(2, 3, 2, 3)
    made = _made(kernel, 7)
    assert made.samples == 7 and made.weights.shape == (N, 7)
    assert relative(made(x).reshape(12, 7), made(x.reshape(12, 3))) < 1e-14
    assert torch.equal(_made(kernel, 7)(TEST), made(TEST))
    assert relative(_made(kernel, 7, seed=1)(TEST), made(TEST)) > 0.1


def test_float32_keeps_the_digits_of_the_correction():
    """Products with weights that cancel are float64: what differs is the rounding of the cosines."""
    kernel = _kernel("matern")
    found = _made(_kernel("matern"), 9, torch.float32)(TEST.float())
    assert found.dtype == torch.float64
    assert relative(found, _made(kernel, 9)(TEST)) < 1e-3


def test_kernels_without_random_features_are_refused():
    with pytest.raises(InputError, match="no random features"):
        _made(PolynomialKernel(power=2).double(), 3)

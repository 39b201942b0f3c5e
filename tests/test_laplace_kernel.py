"""``LaplaceKernel`` as a GPyTorch kernel: values, derivatives, options, and a model that uses it."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import sketchgp
from cases import each
from gp_models import Plain, data, dense, iterative, marginal, posterior
from problems import normal, points, relative
from sketchgp import LaplaceKernel
from sketchgp.operators import KernelMatrix


def formula(x, z, lengthscale):
    difference = x.unsqueeze(-2) - z.unsqueeze(-3)
    return (-(difference / lengthscale.unsqueeze(-2)).abs().sum(dim=-1)).exp()


def test_is_exported():
    assert sketchgp.LaplaceKernel is sketchgp.kernels.LaplaceKernel
    assert LaplaceKernel().is_stationary
    assert LaplaceKernel().has_lengthscale


@pytest.mark.parametrize("ard", [None, 3])
def test_values(ard):
    kernel = LaplaceKernel(ard_num_dims=ard).double()
    kernel.lengthscale = torch.tensor([0.3, 0.9, 2.0]) if ard else 0.7
    x, z = points(30), points(20, seed=1)
    assert relative(kernel(x, z).to_dense(), formula(x, z, kernel.lengthscale)) < 1e-14
    assert relative(kernel(x).to_dense(), formula(x, x, kernel.lengthscale)) < 1e-14
    assert torch.equal(kernel(x, diag=True).detach(), torch.ones(30, dtype=torch.float64))
    assert relative(kernel(x[:20], z, diag=True), formula(x[:20], z, kernel.lengthscale).diagonal()) < 1e-14
    assert relative(kernel(x).diagonal(), torch.ones(30, dtype=torch.float64)) < 1e-14


def test_one_value_by_hand():
    kernel = LaplaceKernel(ard_num_dims=2).double()
    kernel.lengthscale = torch.tensor([2.0, 0.5])
    found = kernel(torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[4.0, 0.5]]).double()).to_dense()
    assert float(found.detach()) == pytest.approx(2.718281828459045 ** -(3 / 2 + 0.5 / 0.5), rel=1e-6)


def test_in_one_dimension_it_is_matern12():
    x = points(40, 1)
    first, second = LaplaceKernel().double(), MaternKernel(nu=0.5).double()
    first.lengthscale = second.lengthscale = 0.4
    assert relative(first(x).to_dense(), second(x).to_dense()) < 1e-7


def test_is_positive_definite():
    kernel = LaplaceKernel().double()
    kernel.lengthscale = 0.5
    assert float(torch.linalg.eigvalsh(kernel(points(60)).to_dense()).min().detach()) > 0


def test_batches():
    shape = torch.Size([2])
    kernel = LaplaceKernel(ard_num_dims=3, batch_shape=shape).double()
    kernel.lengthscale = torch.tensor([[[0.3, 0.9, 2.0]], [[1.0, 0.5, 0.7]]])
    assert kernel.lengthscale.shape == (2, 1, 3)
    x, z, stacked = points(9), points(5, seed=1), points(18).reshape(2, 9, 3)
    for left, right in ((x, z), (stacked, z), (stacked, stacked)):
        assert relative(kernel(left, right).to_dense(), formula(left, right, kernel.lengthscale)) < 1e-14
    assert kernel(stacked, diag=True).shape == (2, 9)
    assert relative(kernel[1](x, z).to_dense(), formula(x, z, kernel.lengthscale[1])) < 1e-14


def test_each_dimension_alone():
    kernel = LaplaceKernel(ard_num_dims=3).double()
    kernel.lengthscale = torch.tensor([0.3, 0.9, 2.0])
    x, z = points(9), points(5, seed=1)
    each = torch.stack([formula(x[:, [k]], z[:, [k]], kernel.lengthscale[:, [k]]) for k in range(3)])
    assert relative(kernel.forward(x, z, last_dim_is_batch=True), each) < 1e-14
    assert (
        relative(kernel.forward(x[:5], z, diag=True, last_dim_is_batch=True), each[:, :5].diagonal(0, -2, -1)) < 1e-14
    )
    assert relative(each.prod(dim=0), kernel(x, z).to_dense()) < 1e-14


def test_active_dimensions():
    kernel = LaplaceKernel(ard_num_dims=2, active_dims=(2, 0)).double()
    kernel.lengthscale = torch.tensor([0.3, 0.9])
    x = points(9)
    assert relative(kernel(x).to_dense(), formula(x[:, [2, 0]], x[:, [2, 0]], kernel.lengthscale)) < 1e-14


def test_priors_and_constraints():
    kernel = LaplaceKernel(lengthscale_prior=GammaPrior(3.0, 6.0), lengthscale_constraint=Interval(0.1, 2.0))
    kernel.lengthscale = 0.4
    assert [name for name, *_ in kernel.named_priors()] == ["lengthscale_prior"]
    assert float(kernel.lengthscale.detach()) == pytest.approx(0.4, rel=1e-5)
    with pytest.raises(RuntimeError, match="out of bounds"):
        kernel.lengthscale = 5.0


def test_gradients():
    kernel = LaplaceKernel(ard_num_dims=3).double()
    x, z = points(5).requires_grad_(True), points(4, seed=1).requires_grad_(True)

    def evaluate(x, z, raw):
        return torch.func.functional_call(kernel, {"raw_lengthscale": raw}, (x, z)).to_dense()

    with gpytorch.settings.lazily_evaluate_kernels(False):
        assert torch.autograd.gradcheck(evaluate, (x, z, kernel.raw_lengthscale.detach().requires_grad_(True)))


def test_copies_and_pickles():
    kernel = ScaleKernel(LaplaceKernel(ard_num_dims=3))
    kernel.base_kernel.lengthscale = torch.tensor([0.3, 0.9, 2.0])
    x = points(5, dtype=torch.float32)
    for other in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert torch.equal(other(x).to_dense(), kernel(x).to_dense())
    other = ScaleKernel(LaplaceKernel(ard_num_dims=3))
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other(x).to_dense(), kernel(x).to_dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    kernel = LaplaceKernel()
    x = points(20, dtype=dtype)
    expected = formula(x.double(), x.double(), kernel.lengthscale.double())
    operator = KernelMatrix.of(kernel, x)
    assert operator.dtype == torch.float32
    assert relative(operator.to_dense(), expected) < 1e-6


@each("matmul", ["auto", "tiled", "dense", "gpytorch"])
def test_a_model_with_it(matmul):
    """Posterior and marginal likelihood as GPyTorch computes them by Cholesky."""
    x, y, xt = data(150, 3)

    def model():
        kernel = ScaleKernel(LaplaceKernel(ard_num_dims=3))
        kernel.base_kernel.lengthscale = torch.tensor([0.5, 0.8, 1.2])
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        likelihood.noise = 0.05
        return Plain(x, y, likelihood, kernel).double()

    with dense():
        mean, variance = posterior(model(), (xt,))
        value, gradient = marginal(model())
    with iterative():
        accelerated = sketchgp.accelerate(model(), matmul=matmul)
        found_mean, found_variance = posterior(accelerated, (xt,))
        found_value, found_gradient = marginal(accelerated)
    assert relative(found_mean, mean) < 1e-6
    assert relative(found_variance, variance) < 1e-5
    assert abs(float(found_value - value)) < 0.02 * abs(float(value)) + 0.02  # an estimate, from 30 probes
    assert found_gradient.keys() == gradient.keys()
    for name, wanted in gradient.items():
        assert relative(found_gradient[name], wanted) < 0.2


def test_right_hand_side_of_many_columns():
    kernel = ScaleKernel(LaplaceKernel()).double()
    x = points(60)
    expected = kernel.outputscale * formula(x, x, kernel.base_kernel.lengthscale)
    assert relative(KernelMatrix.of(kernel, x, engine="tiled") @ normal(60, 40), expected @ normal(60, 40)) < 1e-13

"""Products of covariances in a model's forward: exact where they fit in memory, and else approximated by GPyTorch."""

from __future__ import annotations

import contextlib
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    IndexKernel,
    Kernel,
    LinearKernel,
    ProductKernel,
    RBFKernel,
    RFFKernel,
    ScaleKernel,
)

import sketchgp
from gp_models import TORCH_WARNINGS, Combined, Hadamard, Plain, _likelihood, data, scaled
from problems import points

pytestmark = [*TORCH_WARNINGS, pytest.mark.filterwarnings("ignore:A not p.d.")]

_FULL = sketchgp.settings.memory_budget(2**18)  # bytes, less than a matrix of 300 rows


def _model(lengthscale):
    """Tasks times features of a rough kernel, or times a linear kernel for None."""
    x, y, xt = data(300)
    tasks, tt = ((torch.arange(len(z)) % 2).unsqueeze(-1) for z in (x, xt))
    model = Hadamard((x, tasks), y, _likelihood(0.01)).double()
    parts = [] if lengthscale is None else [scaled(RFFKernel(300, num_dims=x.shape[-1]), lengthscale) for _ in "12"]
    model.covar_module = ScaleKernel(parts[0] + parts[1] if parts else LinearKernel()).double()
    return model.eval(), (xt, tt)


def test_an_approximated_product_is_told():
    """The covariance of features times that of tasks: Lanczos with 100 columns, which rough kernels exceed."""
    model, test = _model(0.02)
    sketchgp.accelerate(model)
    with gpytorch.settings.max_cholesky_size(100), torch.no_grad(), _FULL:
        with pytest.warns(sketchgp.ConvergenceWarning, match="Multiply the kernels instead"):
            model(*test)
        model.train()
        with pytest.warns(sketchgp.ConvergenceWarning, match="Multiply the kernels instead"):
            model(*model.train_inputs)


def test_a_product_of_low_rank_is_not():
    """GPyTorch multiplies roots of both, which are exact."""
    model, test = _model(None)
    with torch.no_grad():
        expected = model(*test).mean
        sketchgp.accelerate(model, solver=sketchgp.ConjugateGradients(tol=1e-6))
        with gpytorch.settings.max_cholesky_size(100), warnings.catch_warnings(), _FULL:
            warnings.simplefilter("error", sketchgp.ConvergenceWarning)
            found = model(*test).mean
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("limit", [0, 800])
@pytest.mark.parametrize("lengthscale", [None, 0.02])
def test_products_that_fit_in_memory_are_exact(lengthscale, limit):
    """GPyTorch's factors, of a linear kernel and of tasks, have jitter: a variance was off by 5% of the noise."""
    model, test = _model(lengthscale)
    model.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.Positive())
    model.likelihood.noise = 1e-6
    noise, tasks = 1e-6 * torch.eye(300, dtype=torch.float64), model.task_covar_module
    with torch.no_grad():
        table = tasks.covar_factor @ tasks.covar_factor.mT + tasks.var.diag()

        def product(a, b):
            return model.covar_module(a[0], b[0]).to_dense() * table[a[1][:, 0]][:, b[1][:, 0]]

        train = model.train_inputs
        cross = product(train, test)
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(product(train, train) + noise), cross, upper=False)
        expected = product(test, test).diagonal() - half.square().sum(0)
        sketchgp.accelerate(model)
        with gpytorch.settings.max_cholesky_size(limit):
            found = model(*test).variance
    assert float(((found - expected) / (expected + 1e-6)).abs().max()) < 2e-3


class _Called(Kernel):
    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **options):
        return (-self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, **options)).exp()


def test_factors_of_a_product_keep_their_digits_beside_a_far_row():
    """GPyTorch's distances of equal rows are 0.0005 beside one at 1e5, and the gradient of the lengthscale was -3."""
    x = torch.tensor([[0.0060923, 0.0056112]], dtype=torch.float64).repeat(5, 1)
    x[-1] += 1e5
    model = Combined(x, 10 * torch.ones(5).double(), _likelihood(0.001), _Called(), RBFKernel(), True).double()
    sketchgp.accelerate(model)
    loss = -sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), model.train_targets)
    loss.backward()
    assert abs(float(model.first.raw_lengthscale.grad)) < 1e-6


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


def test_a_linear_kernel_in_float32():
    """The covariance is a root plus a diagonal: by Woodbury's identity its density cancels, and variances are far below
    the 1e-6 that GPyTorch raises them to."""
    x, (y, *_) = 100 * points(300, 3).float(), data(300)[1:]
    y = x @ torch.tensor([0.01, 0.02, -0.01]) + 0.03 * y.float()
    kernel = ScaleKernel(LinearKernel())
    model = Plain(x, y, _likelihood(1e-4), kernel, gpytorch.means.ZeroMean()).float()
    sketchgp.accelerate(model).train()
    found = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    scale = (kernel.outputscale * kernel.base_kernel.variance).double().squeeze()
    z, noise = x.double(), model.likelihood.noise.double()
    root = torch.linalg.cholesky(scale * z @ z.mT + noise * torch.eye(300))
    zero = torch.zeros(300, dtype=torch.float64)
    expected = torch.distributions.MultivariateNormal(zero, scale_tril=root).log_prob(y.double()) / 300
    raw = kernel.raw_outputscale
    assert abs(found - expected) < 1e-5
    gradient, exact = (torch.autograd.grad(value, raw, retain_graph=True)[0] for value in (found, expected))
    assert torch.allclose(gradient, exact, rtol=1e-3)
    cross = scale * z[:5] @ z.mT
    variance = scale * z[:5].square().sum(dim=-1) - torch.linalg.solve_triangular(
        root, cross.mT, upper=False
    ).square().sum(0)
    assert torch.allclose(model.eval()(x[:5]).variance.double(), variance, rtol=1e-3)

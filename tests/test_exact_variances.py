"""``predict(variance="exact")`` of every structure against dense float64: sums, products, batches, several tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from torch import Tensor

import sketchgp
from gp_models import TORCH_WARNINGS, Combined, Multitask, Plain, dense, scaled

pytestmark = TORCH_WARNINGS
N, M = 120, 5


class Times(Combined):
    """The first covariance and a multiple of the second."""

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.first(x) + 0.7 * self.second(x))


class Batch(gpytorch.models.ExactGP):
    """Two outputs, each with a sum of two kernels and a noise of its own."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, joint: bool = False) -> None:
        super().__init__(x, y, likelihood)
        two, self.joint = torch.Size([2]), joint
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=two)
        self.first = scaled(kernels.RBFKernel(batch_shape=two))
        self.second = scaled(kernels.MaternKernel(nu=2.5, batch_shape=two), 0.8)
        self.first.base_kernel.lengthscale = torch.tensor([0.5, 0.9]).reshape(2, 1, 1)

    def forward(self, x: Tensor) -> MultivariateNormal:
        prior = MultivariateNormal(self.mean_module(x), self.first(x) + self.second(x))
        return MultitaskMultivariateNormal.from_batch_mvn(prior) if self.joint else prior


def data(d: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x, z = (torch.rand(rows, d, generator=generator, dtype=torch.float64) for rows in (N, M))
    return x, torch.stack([x.sum(dim=1).sin(), (3 * x[:, 0]).cos()], dim=1), z


def noisy(likelihood: Any, noise: float) -> Any:
    likelihood.noise = noise
    return likelihood


def parts() -> tuple[Any, Any]:
    return scaled(kernels.RBFKernel(), 0.8), scaled(kernels.MaternKernel(nu=2.5), 1.2, 0.4)


def combined(cls: type, product: bool = False) -> Callable[..., Any]:
    return lambda x, y, noise: cls(x, y[:, 0], noisy(GaussianLikelihood(), noise), *parts(), product)


def batch(x: Tensor, y: Tensor, noise: float) -> Any:
    return Batch(x, y.mT.contiguous(), noisy(GaussianLikelihood(batch_shape=torch.Size([2])), noise))


def independent(x: Tensor, y: Tensor, noise: float) -> Any:
    likelihood = MultitaskGaussianLikelihood(num_tasks=2, rank=0)
    likelihood.noise, likelihood.task_noises = noise / 2, torch.full((2,), noise / 2)
    return Batch(x, y, likelihood, joint=True)


def lcm(x: Tensor, y: Tensor, noise: float) -> Any:
    likelihood = MultitaskGaussianLikelihood(num_tasks=2, rank=0)
    likelihood.noise, likelihood.task_noises = noise / 2, torch.full((2,), noise / 2)
    bases = [kernels.RBFKernel(), kernels.MaternKernel(nu=2.5)]
    bases[0].lengthscale, bases[1].lengthscale = 0.8, 1.2
    return Multitask(x, y, likelihood, kernels.LCMKernel(bases, num_tasks=2, rank=1))


def correlated(x: Tensor, y: Tensor, noise: float) -> Any:
    """Noise with a covariance between tasks: no diagonal to tie a tolerance to."""
    likelihood = MultitaskGaussianLikelihood(num_tasks=2, rank=1)
    likelihood.noise = noise
    return Multitask(x, y, likelihood, kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2, rank=1))


MODELS = {
    "sum": combined(Combined),
    "multiple": combined(Times),
    "product": combined(Combined, product=True),
    "batch": batch,
    "independent": independent,
    "lcm": lcm,
    "correlated": correlated,
}


def variances(name: str, d: int, noise: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exact variances as predicted, and dense ones in float64."""
    x, y, z = data(d)
    models = []
    for kind in (dtype, torch.float64):
        torch.manual_seed(3)  # where the covariances between tasks start
        models.append(MODELS[name](x.to(kind), y.to(kind), noise).to(kind))
    with gpytorch.settings.max_cholesky_size(20):
        prediction = sketchgp.predict(sketchgp.accelerate(models[0]), z.to(dtype))
    assert prediction.variance_method == "exact"
    with dense(), torch.no_grad():
        expected = models[1].eval()(z).variance
    assert prediction.variance is not None
    assert prediction.variance.shape == expected.shape == prediction.mean.shape
    return prediction.variance, expected


@pytest.mark.parametrize(
    ("name", "d", "noise"), [(n, *[(1, 1e-2), (1, 2e-4), (6, 2e-4)][i % 3]) for i, n in enumerate(MODELS)]
)
def test_exact_is_exact(name: str, d: int, noise: float) -> None:
    found, expected = variances(name, d, noise, torch.float64)
    assert float((found - expected).abs().max()) < 0.01 * noise


@pytest.mark.parametrize(("few", "height"), [(20, 30), (800, 1)])
def test_independent_tasks_far_from_the_origin(few: int, height: float) -> None:
    """Float32 entries would be off by more than the noise; and parameters stay as they are where those are float64."""
    x, y, z = data(2)
    y = height * y
    x, y, z = (1000 + x).float(), y.float(), (1000 + z).float()
    model = independent(x, y, 4e-4).float()
    twin = copy.deepcopy(model).double()
    twin.set_train_data(x.double(), y.double(), strict=False)
    sketchgp.accelerate(model).eval()
    with gpytorch.settings.max_cholesky_size(few), torch.no_grad():
        found = sketchgp.predict(model, z)
        mean, variance = model(z).mean, model(z).variance
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    with dense(), torch.no_grad():
        expected = twin.eval()(z.double())
    deviation = (expected.variance + 4e-4).sqrt()
    for one, other in ((found.mean, found.variance), (mean, variance)):
        assert float(((one - expected.mean).abs() / deviation).max()) < 0.01
        assert float(((other - expected.variance).abs() / deviation.square()).max()) < 0.02


@pytest.mark.parametrize("name", MODELS)
def test_exact_in_float32(name: str) -> None:
    """What is left is the rounding of parameters, data, and the variance itself."""
    found, expected = variances(name, 6, 1e-3, torch.float32)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 0.05e-3


def test_what_is_not_reached_is_said() -> None:
    x, y, z = data(6)
    model = sketchgp.accelerate(MODELS["sum"](x, y, 1e-3).double(), preconditioner=None)
    with (
        gpytorch.settings.max_cholesky_size(20),
        gpytorch.settings.max_cg_iterations(3),
        pytest.warns(sketchgp.ConvergenceWarning) as caught,
    ):
        sketchgp.predict(model, z, variance="exact")
    assert len(caught) == 2  # of the mean and of the variances


@pytest.mark.parametrize(
    ("kernel", "dtype", "noise", "options"),
    [
        (kernels.ScaleKernel(kernels.RBFKernel()), torch.float64, 1e-10, {"preconditioner": None}),
        (
            kernels.CosineKernel(active_dims=[0]) * kernels.MaternKernel(1.5) + kernels.PolynomialKernel(2),
            *(torch.float32, 1e-6, {}),
        ),
    ],
)
def test_exact_where_the_noise_is_tiny(kernel: Any, dtype: Any, noise: float, options: dict[str, Any]) -> None:
    """The squared residual over the noise is what a variance is off by, however small the residual is."""
    generator = torch.Generator().manual_seed(1)
    x, z = (torch.rand(rows, 1 if options else 2, generator=generator, dtype=torch.float64) for rows in (60, 3))
    x, z = x.to(dtype), torch.cat([x[:3], z]).to(dtype)
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive())
    model = Plain(x, x[:, 0].sin(), likelihood, kernel).to(dtype)
    likelihood.noise = noise
    with gpytorch.settings.max_cholesky_size(5), torch.no_grad():
        found = sketchgp.accelerate(model, **options).eval()(z).variance
        x, z, kernel = x.double(), z.double(), kernel.double()
        matrix, cross = kernel(x).to_dense(), kernel(x, z).to_dense()
        root = torch.linalg.cholesky(matrix + noise * torch.eye(60, dtype=torch.float64))
        expected = kernel(z, diag=True) - torch.linalg.solve_triangular(root, cross, upper=False).square().sum(dim=0)
    # of the noise at training rows, and elsewhere of what is far above it
    assert bool(((found - expected).abs() < 0.01 * noise + 1e-3 * (expected - noise).clamp(min=0)).all())


def test_a_bound_outlives_rounding() -> None:
    """Rounding leaves eigenvalues of ``P^-1 A`` a little below 1: their bound of 1 was lost, and 2.5% of a variance."""
    generator = torch.Generator().manual_seed(2)
    x, z = (torch.randn(rows, 1, generator=generator, dtype=torch.float64) / 2 - 26 for rows in (110, 60))
    piecewise, matern = kernels.PiecewisePolynomialKernel(q=1), kernels.MaternKernel(1.5)
    piecewise.lengthscale, matern.lengthscale = 3.0, 2.0
    linear = kernels.LinearKernel()
    linear.variance = 1 / 26**2
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive())
    model = Plain(x, x[:, 0].sin(), likelihood, linear * piecewise * matern).double()
    likelihood.noise = 1e-9
    sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=30, seed=4))
    with gpytorch.settings.max_cholesky_size(5), torch.no_grad():
        found = model.eval()(z).variance
        matrix, cross = (model.covar_module(x, other).to_dense() for other in (x, z))
        root = torch.linalg.cholesky(matrix + likelihood.noise * torch.eye(110, dtype=torch.float64))
        half = torch.linalg.solve_triangular(root, cross, upper=False)
        expected = model.covar_module(z, diag=True) - half.square().sum(dim=0)
    assert float(((found - expected).abs() / expected).max()) < 0.0101


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_diagonal_above_the_noise(dtype: Any) -> None:
    """Copies of rows, whose differences K knows nothing of, and of which EigenPro takes the rest of the spectrum."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 3, generator=generator, dtype=dtype).repeat(2, 1)
    noise = 1e-4 * 10 ** torch.rand(80, generator=generator, dtype=dtype)
    kernel = kernels.MaternKernel(2.5) + kernels.ConstantKernel()
    kernel.kernels[0].lengthscale = 0.1
    model = Plain(x, x[:, 0].sin(), FixedNoiseGaussianLikelihood(noise), kernel).to(dtype)
    sketchgp.accelerate(model, preconditioner=sketchgp.NystromEigenPro())
    with gpytorch.settings.max_cholesky_size(5), torch.no_grad():
        found = model.eval()(x[:6]).variance
        cross = kernel.double()(x.double(), x[:6].double()).to_dense()
        matrix = kernel(x.double()).to_dense() + noise.double().diag()
        expected = kernel(x[:6].double(), diag=True) - (cross * torch.linalg.solve(matrix, cross)).sum(dim=0)
    assert float(((found - expected).abs() / expected).max()) < 0.0101

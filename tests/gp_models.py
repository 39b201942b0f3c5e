"""Small GPyTorch models of every shape that ``accelerate`` promises to serve, and their dense reference.

GPyTorch factorizes matrices up to ``max_cholesky_size`` itself.  The tests lower that limit (:func:`iterative`), so
that a few hundred points are enough for the iterative path, and raise it (:func:`dense`) for the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean, MultitaskMean
from torch import Tensor

import sketchgp

TORCH_WARNINGS = [  # from linear_operator's interpolation (SKI, IndexKernel); linear_operator is theirs to change
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor"),
]
N = 180  # training points; far above the limit that iterative() sets


@contextlib.contextmanager
def iterative(probes: int = 30, tol: float = 1e-8) -> Iterator[None]:
    """GPyTorch's settings under which every solve with more than 20 points is iterative, and accurate.

    The fast computations are on by default, until ``import botorch`` turns them off for the whole process.
    """
    with (
        gpytorch.settings.fast_computations(True, True, True),
        gpytorch.settings.max_cholesky_size(20),
        gpytorch.settings.num_trace_samples(probes),
        gpytorch.settings.cg_tolerance(tol),
        gpytorch.settings.eval_cg_tolerance(tol),
    ):
        yield


def small_subsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits start from 10 rows, those of 40 and 80 rows then from half of theirs."""
    for name, value in {"_SUBSET": 10, "_LEVELS": ((40, 20), (80, 40))}.items():
        monkeypatch.setattr(f"sketchgp.fitting.plan.{name}", value)


@contextlib.contextmanager
def dense() -> Iterator[None]:
    """GPyTorch's settings under which every solve is a Cholesky factorization: the reference."""
    with gpytorch.settings.max_cholesky_size(10**6), gpytorch.settings.fast_computations(False, False, False):
        yield


def data(n: int = N, d: int = 2, m: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs in the unit cube (n, d), targets (n,), test inputs (m, d)."""
    generator = torch.Generator().manual_seed(7)
    x, xt = (torch.rand(rows, d, generator=generator, dtype=torch.float64) for rows in (n, m))
    y = torch.sin(6 * x[:, 0]) + x[:, -1] + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype), xt.to(dtype)


class Plain(gpytorch.models.ExactGP):
    """One kernel, one mean."""

    def __init__(self, x: Any, y: Tensor, likelihood: Any, kernel: Any, mean: Any = None) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean() if mean is None else mean
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def nearly_constant(dtype: torch.dtype, n: int = 300, **choices: Any) -> Any:
    """An accelerated model in training mode.  Its covariance is nearly constant, and of a size next to
    which float32 does not know the noise."""
    x, y, _ = data(n, dtype=dtype)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).to(dtype)
    kernel.base_kernel.lengthscale, kernel.outputscale, model.likelihood.noise = 100.0, 1e4, 2e-4
    return sketchgp.accelerate(model, **choices).train()


class Combined(gpytorch.models.ExactGP):
    """Two covariances, put together in ``forward`` rather than in a kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, first: Any, second: Any, product: bool) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean()
        self.first, self.second, self.product = first, second, product

    def forward(self, x: Tensor) -> MultivariateNormal:
        first, second = self.first(x), self.second(x)
        return MultivariateNormal(self.mean_module(x), first * second if self.product else first + second)


class Hadamard(gpytorch.models.ExactGP):
    """Tasks given as a second input; the kernel times an index kernel, in ``forward``."""

    def __init__(self, inputs: tuple[Tensor, Tensor], y: Tensor, likelihood: Any) -> None:
        super().__init__(inputs, y, likelihood)
        self.mean_module = ConstantMean()
        self.covar_module = kernels.RBFKernel()
        self.task_covar_module = kernels.IndexKernel(num_tasks=2, rank=1)

    def forward(self, x: Tensor, i: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).mul(self.task_covar_module(i)))


class Multitask(gpytorch.models.ExactGP):
    """Several outputs for each input."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = MultitaskMean(ConstantMean(), num_tasks=2)
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(gpytorch.models.ExactGP):
    """A network makes the kernel's inputs."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean()
        self.covar_module = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2))
        self.network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, x: Tensor) -> MultivariateNormal:
        z = self.network(x)
        return MultivariateNormal(self.mean_module(z), self.covar_module(z))


def _likelihood(noise: float = 0.05, batch: tuple[int, ...] = ()) -> GaussianLikelihood:
    likelihood = GaussianLikelihood(batch_shape=torch.Size(batch))
    likelihood.noise = noise
    return likelihood


def scaled(base: Any, lengthscale: float = 0.3, outputscale: float = 1.3) -> Any:
    """``ScaleKernel(base)`` with set values."""
    kernel = kernels.ScaleKernel(base, batch_shape=base.batch_shape)
    base.lengthscale, kernel.outputscale = lengthscale, outputscale
    return kernel


def rbf(d: int = 2, n: int = N) -> tuple[Any, Any]:
    """The plainest model: ScaleKernel(RBFKernel) with one lengthscale a dimension."""
    x, y, xt = data(n, d)
    kernel = scaled(kernels.RBFKernel(ard_num_dims=d))
    kernel.base_kernel.lengthscale = torch.linspace(0.25, 0.5, d)
    return Plain(x, y, _likelihood(), kernel), (xt,)


def _with_kernel(make: Callable[[], Any], d: int = 2) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        x, y, xt = data(d=d)
        return Plain(x, y, _likelihood(), make()), (xt,)

    return build


def _fixed_noise() -> tuple[Any, Any]:
    x, y, xt = data()
    noise = torch.linspace(0.01, 0.2, len(x), dtype=torch.float64)
    likelihood = FixedNoiseGaussianLikelihood(noise=noise, learn_additional_noise=True)
    likelihood.second_noise = 0.03
    return Plain(x, y, likelihood, scaled(kernels.MaternKernel(nu=1.5))), (xt,)


def _combined(product: bool) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        x, y, xt = data()
        first, second = scaled(kernels.RBFKernel(active_dims=[0])), scaled(kernels.MaternKernel(nu=2.5), 0.6)
        return Combined(x, y, _likelihood(), first, second, product), (xt,)

    return build


def _same_kernel_twice() -> tuple[Any, Any]:
    x, y, xt = data()
    kernel = scaled(kernels.RBFKernel())
    return Combined(x, y, _likelihood(), kernel, kernel, False), (xt,)


def _spectral_mixture() -> Any:
    kernel = kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=1)
    kernel.mixture_weights = torch.tensor([0.7, 0.4])
    kernel.mixture_means = torch.tensor([0.3, 1.1]).view(2, 1, 1)
    kernel.mixture_scales = torch.tensor([0.4, 0.8]).view(2, 1, 1)
    return kernel


def _sum_kernel() -> Any:
    return scaled(kernels.RBFKernel(active_dims=[0])) + scaled(kernels.MaternKernel(nu=0.5, active_dims=[1]), 0.8, 0.4)


def _product_kernel() -> Any:
    return kernels.ScaleKernel(kernels.RBFKernel(active_dims=[0]) * kernels.PeriodicKernel(active_dims=[1]))


def _ski() -> tuple[Any, Any]:
    x, y, xt = data(d=1)
    base = scaled(kernels.RBFKernel())
    kernel = kernels.GridInterpolationKernel(base, grid_size=64, num_dims=1, grid_bounds=[(-0.1, 1.1)])
    return Plain(x, y, _likelihood(), kernel), (xt,)


def _batch() -> tuple[Any, Any]:
    x, y, xt = data()
    shape = torch.Size([2])
    kernel = scaled(kernels.RBFKernel(batch_shape=shape))
    kernel.base_kernel.lengthscale = torch.tensor([0.25, 0.6]).view(2, 1, 1)
    kernel.outputscale = torch.tensor([0.8, 2.0])
    likelihood = _likelihood(batch=(2,))
    likelihood.noise = torch.tensor([[0.02], [0.1]])
    targets = torch.stack([y, y.square() - 0.3])
    return Plain(x.expand(2, *x.shape), targets, likelihood, kernel, ConstantMean(batch_shape=shape)), (
        xt.expand(2, -1, -1),
    )


def _batch_matern() -> tuple[Any, Any]:
    x, y, xt = data()
    other = torch.stack([x, x.flip(0).square()])
    kernel = scaled(kernels.MaternKernel(nu=2.5, batch_shape=torch.Size([2])))
    targets = torch.stack([y, -y])
    likelihood = _likelihood(batch=(2,))
    return Plain(other, targets, likelihood, kernel, ConstantMean(batch_shape=torch.Size([2]))), (xt.expand(2, -1, -1),)


def _batch_targets() -> tuple[Any, Any]:
    x, y, xt = data()
    targets = torch.stack([y, y.square(), -y])
    return Plain(x.expand(3, -1, -1), targets, _likelihood(), scaled(kernels.RBFKernel())), (xt.expand(3, -1, -1),)


def _two_tasks(y: Tensor) -> Tensor:
    return torch.stack([y, y.square() - 0.5 * y], dim=-1)


def _lcm() -> tuple[Any, Any]:
    x, y, xt = data(120)
    bases = [kernels.RBFKernel(), kernels.MaternKernel(nu=1.5)]
    bases[0].lengthscale, bases[1].lengthscale = 0.3, 0.7
    kernel = kernels.LCMKernel(bases, num_tasks=2, rank=1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2)
    likelihood.noise = 0.05
    return Multitask(x, _two_tasks(y), likelihood, kernel), (xt,)


def _kronecker() -> tuple[Any, Any]:
    x, y, xt = data(120)
    kernel = kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2, rank=1)
    kernel.data_covar_module.lengthscale = 0.3
    likelihood = MultitaskGaussianLikelihood(num_tasks=2)
    likelihood.noise = 0.05
    return Multitask(x, _two_tasks(y), likelihood, kernel), (xt,)


def _hadamard() -> tuple[Any, Any]:
    x, y, xt = data()
    tasks, tt = ((torch.arange(len(z)) % 2).unsqueeze(-1) for z in (x, xt))
    model = Hadamard((x, tasks), torch.where(tasks[:, 0] == 0, y, 0.5 * y + 0.2), _likelihood())
    model.covar_module.lengthscale = 0.3
    return model, (xt, tt)


def _deep() -> tuple[Any, Any]:
    x, y, xt = data()
    torch.manual_seed(3)
    model = Deep(x, y, _likelihood())
    model.covar_module.base_kernel.lengthscale = 0.2
    return model, (xt,)


def _sgpr() -> tuple[Any, Any]:
    x, y, xt = data()
    likelihood = _likelihood()
    kernel = kernels.InducingPointKernel(scaled(kernels.RBFKernel()), x[::6].clone(), likelihood)
    return Plain(x, y, likelihood, kernel), (xt,)


def _linear() -> tuple[Any, Any]:
    x, y, xt = data()
    kernel = kernels.ScaleKernel(kernels.LinearKernel(ard_num_dims=2))
    return Plain(x, y, _likelihood(), kernel, LinearMean(2)), (xt,)


def _keops() -> tuple[Any, Any]:
    x, y, xt = data()
    return Plain(x, y, _likelihood(), scaled(kernels.keops.RBFKernel())), (xt,)


@dataclass(frozen=True)
class Case:
    """A model with its test inputs; ``solved`` tells whether sketchgp solves its systems (False: GPyTorch does)."""

    make: Callable[[], tuple[Any, Any]]
    solved: bool = True

    def build(self, dtype: torch.dtype = torch.float64) -> tuple[Any, tuple[Tensor, ...]]:
        """A fresh model, the same each time, and its test inputs."""
        torch.manual_seed(5)
        model, test = self.make()
        model = model.to(dtype)
        cast = [t.to(dtype) if t.is_floating_point() else t for t in model.train_inputs]
        model.set_train_data(tuple(cast), model.train_targets.to(dtype), strict=False)
        return model, tuple(t.to(dtype) if t.is_floating_point() else t for t in test)


SOLVED = {
    "scale-rbf-ard": Case(rbf),
    "bare-matern": Case(_with_kernel(lambda: kernels.MaternKernel(nu=2.5))),
    "nested-scale": Case(_with_kernel(lambda: kernels.ScaleKernel(scaled(kernels.MaternKernel(nu=1.5))))),
    "active-dims": Case(_with_kernel(lambda: scaled(kernels.RBFKernel(active_dims=[2, 0], ard_num_dims=2)), d=3)),
    "active-dims-scale": Case(
        _with_kernel(lambda: kernels.ScaleKernel(kernels.MaternKernel(active_dims=[1]), active_dims=[0, 2]), d=3)
    ),
    "fixed-noise": Case(_fixed_noise),
    "additive-kernel": Case(_with_kernel(_sum_kernel)),
    "additive-forward": Case(_combined(False)),
    "additive-same-kernel": Case(_same_kernel_twice),
    "product-kernel": Case(_with_kernel(_product_kernel)),
    "product-forward": Case(_combined(True)),
    "ski": Case(_ski),
    "batch": Case(_batch),
    "batch-matern": Case(_batch_matern),
    "batch-targets": Case(_batch_targets),
    "lcm": Case(_lcm),
    "hadamard": Case(_hadamard),
    "deep": Case(_deep),
    "rational-quadratic": Case(_with_kernel(lambda: scaled(kernels.RQKernel()))),
    "periodic": Case(_with_kernel(lambda: scaled(kernels.PeriodicKernel(), 0.8))),
    "spectral-mixture": Case(_with_kernel(_spectral_mixture, d=1)),
}
LEFT_ALONE = {
    "kronecker": Case(_kronecker, solved=False),
    "sgpr": Case(_sgpr, solved=False),
    "linear": Case(_linear, solved=False),
}
KEOPS = {"keops-rbf": Case(_keops)}


def marginal(model: Any, mll: Any = gpytorch.mlls.ExactMarginalLogLikelihood) -> tuple[Tensor, dict[str, Tensor]]:
    """Marginal log likelihood (summed over a batch) and its gradient by parameter name."""
    model.train()
    model.zero_grad()
    value = mll(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
    value.sum().backward()
    gradient = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return value.detach(), gradient


def posterior(model: Any, test: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance, without gradients."""
    model.eval()
    with torch.no_grad():
        found = model(*test)
        return found.mean, found.variance


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error of the whole gradient; the two must cover the same parameters."""
    assert found.keys() == expected.keys()
    names = list(expected)
    a, b = (torch.cat([g[name].double().flatten() for name in names]) for g in (found, expected))
    return float((a - b).norm() / b.norm())


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest error relative to the largest entry."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())

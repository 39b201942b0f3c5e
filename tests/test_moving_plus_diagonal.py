"""The memory-lean differentiable preconditioner against autograd through the whole factor."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import sketchgp
from cases import each, pairwise
from problems import log_determinant, points, relative
from sketchgp import LaplaceKernel, Nystrom, NystromEigenPro, RPCholesky
from sketchgp.operators import (
    KernelMatrix,
    LowRankPlusDiagonal,
    MovingPlusDiagonal,
    moving_factors,
)
from sketchgp.operators.access import Access
from sketchgp.preconditioners import PreconditionerCache, nystrom_factor

N, RANK = 90, 12
CHOICES = {
    "rpcholesky": RPCholesky(RANK),
    "rpcholesky-block": RPCholesky(RANK, method="block"),
    "nystrom": Nystrom(RANK, sketch="uniform"),
    "eigenpro": NystromEigenPro(RANK, subsample_size=40),
    "gaussian": Nystrom(RANK),
}
KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "laplace": lambda: ScaleKernel(LaplaceKernel()),
    "sum": lambda: ScaleKernel(RBFKernel()) + ScaleKernel(MaternKernel(nu=1.5)),
}


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving_factors, "ENTRIES", 20 * RANK)


def _built(choice, kernel, x, noise):
    built = PreconditionerCache(choice).get(KernelMatrix.of(kernel, x, engine="tiled"), noise, differentiable=True)
    assert isinstance(built, MovingPlusDiagonal)
    return built


def _reference(built, kernel, x, noise):
    """The same matrix, with the factor differentiated by autograd."""
    access, moving = Access(KernelMatrix.of(kernel, x, engine="tiled")), built.moving
    if hasattr(moving, "test"):
        sketch = access.matmul(moving.test)
        factor = nystrom_factor(sketch, moving.test.mT @ sketch, access.resolution)
    elif moving.coefficients is None:
        pivots = moving.pivots
        factor = nystrom_factor(access.columns(pivots), access.block(pivots, pivots), access.resolution)
    else:
        factor = access.columns(moving.pivots) @ moving.coefficients
    return LowRankPlusDiagonal(factor, noise + (built.diagonal_part - noise).detach())


def _close(found, expected, tol):
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) <= tol, (a, b)


@each(("choice", "name", "inputs"), pairwise(CHOICES, KERNELS, [False, True]))
def test_gradients(choice, name, inputs):
    kernel = KERNELS[name]().double()
    x = points(N, d=3).requires_grad_(inputs)
    noise = torch.linspace(0.05, 0.2, N, dtype=torch.float64).requires_grad_(True)
    wanted = [*kernel.parameters(), noise, *([x] if inputs else [])]
    built = _built(CHOICES[choice], kernel, x, noise)
    reference = _reference(built, kernel, x, noise)
    _close([built.to_dense()], [reference.to_dense()], 1e-10)
    expected = torch.autograd.grad(log_determinant(reference), wanted, retain_graph=True)
    found = torch.autograd.grad(log_determinant(built), wanted, retain_graph=True)
    _close(found, expected, 1e-8)
    columns, weights = torch.randn(N, 4, dtype=torch.float64), torch.randn(1, 4, dtype=torch.float64)
    expected = torch.autograd.grad((columns * weights * reference.to_dense().matmul(columns)).sum(), wanted)
    none = [torch.zeros(rows, 1, dtype=torch.float64) for rows in (N, RANK, N)]
    result = built.sampled_derivative(built.tensors, columns, weights, *none, torch.zeros((), dtype=torch.float64))
    live = [(a, g) for a, g in zip(built.tensors, result, strict=True) if a.requires_grad]
    found = torch.autograd.grad([a for a, _ in live], wanted, [g for _, g in live])
    _close(found, expected, 1e-8)


def test_a_float32_kernel_has_gradients_in_float32():
    kernel, x = KERNELS["rbf"](), points(N, d=3, dtype=torch.float32)
    noise = torch.full((N,), 0.1)
    built = _built(CHOICES["rpcholesky"], kernel, x, noise)
    assert built.dtype == torch.float32 and built.factor.dtype == torch.float64
    log_determinant(built).backward()
    double = KERNELS["rbf"]().double()
    log_determinant(_reference(built, double, x.double(), noise.double())).backward()
    _close([p.grad.double() for p in kernel.parameters()], [p.grad for p in double.parameters()], 1e-5)


@pytest.mark.parametrize("choice", ["rpcholesky", "eigenpro", "gaussian"])
def test_a_factor_that_was_taken_away_comes_back(choice):
    """A second step releases the first one's factor; the first loss can still be differentiated."""
    kernel, x, noise = KERNELS["rbf"]().double(), points(N, d=3), torch.full((N,), 0.1, dtype=torch.float64)
    cache = PreconditionerCache(CHOICES[choice])
    first = cache.get(KernelMatrix.of(kernel, x), noise, differentiable=True)
    expected = torch.autograd.grad(log_determinant(first), list(kernel.parameters()))
    value = log_determinant(first)
    other = KERNELS["rbf"]().double()
    other.outputscale = 0.5
    second = cache.get(KernelMatrix.of(other, x), noise, differentiable=True)
    assert second.moving.factor is not None and first.moving.factor is None
    found = torch.autograd.grad(value, list(kernel.parameters()))
    _close(found, expected, 1e-10)


def test_a_drifted_selection_is_made_anew():
    x, noise = points(N, d=3), torch.full((N,), 0.1, dtype=torch.float64)
    cache = PreconditionerCache(CHOICES["rpcholesky"])
    smooth, rough = KERNELS["rbf"]().double(), KERNELS["rbf"]().double()
    smooth.base_kernel.lengthscale, rough.base_kernel.lengthscale = 3.0, 0.2
    first = cache.get(KernelMatrix.of(smooth, x), noise, differentiable=True)
    second = cache.get(KernelMatrix.of(rough, x), noise, differentiable=True)
    assert not torch.equal(first.moving.pivots, second.moving.pivots)
    reference = _reference(second, rough, x, noise)
    _close([second.to_dense()], [reference.to_dense()], 1e-10)


def test_other_operators_keep_the_plain_preconditioner():
    kernel, noise = KERNELS["rbf"]().double(), torch.full((N,), 0.1, dtype=torch.float64)
    x = points(N, d=3)
    dense = KernelMatrix.of(kernel, x, engine="tiled") + KernelMatrix.of(kernel, x, engine="tiled")
    for choice, operator in [
        (CHOICES["rpcholesky"], dense),
        (CHOICES["rpcholesky"], KernelMatrix.of(kernel, x.expand(2, N, 3))),
    ]:
        expanded = noise.expand(*operator.batch_shape, N)
        built = PreconditionerCache(choice).get(operator, expanded, differentiable=True)
        assert not isinstance(built, MovingPlusDiagonal) and built.factor.requires_grad


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = ScaleKernel(RBFKernel())
        self.likelihood.noise = 0.05
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_training_step_in_a_model_matches_the_dense_gradient():
    """Marginal likelihood of an accelerated model, two losses alive at once."""
    x = points(200, d=3)
    y = torch.sin(x.sum(dim=1))

    model = Model(x, y)
    sketchgp.accelerate(model.train(), matmul="tiled", preconditioner=RPCholesky(50))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.num_trace_samples(200), gpytorch.settings.max_cholesky_size(20):
        losses = []
        for lengthscale in (1.0, 1.3):
            model.covar_module.base_kernel.initialize(raw_lengthscale=torch.zeros(1, 1).double() + lengthscale)
            losses.append(-mll(model(x), y))
        losses[-1].backward()
    found = [p.grad.clone() for p in model.parameters()]
    sketchgp.restore(model)
    model.zero_grad()
    with gpytorch.settings.fast_computations(False, False, False):
        (-mll(model(x), y)).backward()
    for a, b in zip(found, [p.grad for p in model.parameters()], strict=True):
        assert relative(a, b) < 3e-2

"""Rows far from all others (1e5 where a value is missing) move no product, prediction or gradient of another row."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import (
    CosineKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    RBFKernelGrad,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMeanGrad, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.settings import max_cholesky_size
from torch import Tensor

import sketchgp
from cases import each, pairwise
from gp_models import Plain
from problems import normal, points, relative
from sketchgp.operators import KernelMatrix
from sketchgp.operators.centre import Centre
from sketchgp.operators.tall import TallMatrix

FAR = 1e5


class Derivatives(Plain):
    """Values and derivatives of a function."""

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=5)),
    "matern12": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "sum": lambda: ScaleKernel(RQKernel(active_dims=(0, 1, 3)) + MaternKernel(nu=2.5) * RBFKernel()),
}


def exactly(name: str, kernel: ScaleKernel, x: Tensor, z: Tensor) -> Tensor:
    """``kernel(x, z)`` from the differences of inputs, which GPyTorch's own distances in float64 are not."""

    def squared(part, dims=slice(None)):
        return ((x[:, None, dims] - z[:, dims]) / part.lengthscale).square().sum(dim=-1)

    def root(q):
        return torch.where(q > 0, q, 1).sqrt() * (q > 0)

    base = kernel.base_kernel
    if name == "rbf":
        return kernel.outputscale * (squared(base) * -0.5).exp()
    if name == "matern12":
        return kernel.outputscale * (-root(squared(base))).exp()
    rq, (matern, rbf) = base.kernels[0], base.kernels[1].kernels
    heavy = (1 + squared(rq, [0, 1, 3]) / (2 * rq.alpha)) ** -rq.alpha
    u = 5**0.5 * root(squared(matern))
    return kernel.outputscale * (heavy + (1 + u + u.square() / 3) * (-u - squared(rbf) / 2).exp())


def sides(where: str) -> tuple[Tensor, Tensor, slice, slice]:
    """Test and training points in float32, and which rows of each are not far."""
    z, x = points(12, 5, seed=1, dtype=torch.float32), points(300, 5, dtype=torch.float32)
    if where == "test":
        z[0] = FAR
    elif where == "two of three":
        z = torch.cat([torch.full((2, 5), FAR), z[:1]])
    elif where == "test, one feature":
        z[:10, 2] = -FAR
    elif where == "training":
        x[:100] = FAR  # a third, duplicated
    return z, x, slice(z.abs().amax(dim=1).gt(9).sum(), None), slice(x.abs().amax(dim=1).gt(9).sum(), None)


@each("where", ["test", "two of three", "test, one feature", "training"])
@each("engine", ["tiled", "dense"])
@each("name", KERNELS)
def test_products_and_gradients(name, engine, where):
    z, x, tests, training = sides(where)
    kernel, exact = KERNELS[name](), KERNELS[name]().double()
    u, v = normal(len(z), 2), normal(len(x), 2)
    matrix = KernelMatrix.of(kernel, z.requires_grad_(), x, engine=engine)
    whole = exact(z[tests].detach().double(), x.double()).to_dense().detach()
    assert relative((matrix @ v.float())[tests], whole @ v) < 2e-5
    assert relative(matrix.mT.to_dense().mT[tests], whole) < 1e-5
    assert relative(matrix.columns(torch.arange(len(x) - 5, len(x)))[tests], whole[:, -5:]) < 1e-5
    assert relative((matrix.mT @ u.float())[training], exact(x[training].double(), z.double()).to_dense() @ u) < 2e-5

    (matrix @ v.float())[tests].sum().backward()
    near = z[tests].detach().double().requires_grad_()
    (exact(near, x.double()).to_dense() @ v).sum().backward()
    assert relative(z.grad[tests], near.grad) < 1e-4


class Called(Kernel):
    """A kernel that the library does not know, which counts distances as GPyTorch does: from the mean of x1."""

    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **params):
        return (-0.5 * self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, square_dist=True, diag=diag)).exp()


@each("batch", [(), (2,)])
@each("square", [False, True])
def test_kernels_that_are_called(batch, square):
    x = points(300, 5, dtype=torch.float32)
    z = x.clone() if square else points(12, 5, seed=1, dtype=torch.float32)
    z[3] = FAR
    z = z.expand(*batch, *z.shape)
    x = z if square else x.expand(*batch, *x.shape)
    kernel, v = Called(), normal(x.shape[-2], 2)
    exact = (-0.5 * torch.cdist(z.double() / kernel.lengthscale, x.double() / kernel.lengthscale).square()).exp()
    exact = exact.detach()
    matrix = KernelMatrix.of(kernel, z, None if square else x, engine="tiled")
    near = torch.arange(z.shape[-2]) != 3
    assert relative((matrix @ v.float())[..., near, :], (exact @ v)[..., near, :]) < 2e-5
    assert relative(matrix.to_dense()[..., near, :], exact[..., near, :]) < 2e-5
    (matrix @ v.float())[..., near, :].sum().backward()
    other = Called().double()
    scaled = torch.cdist(z.double(), x.double()).square() * other.lengthscale**-2
    ((-0.5 * scaled).exp() @ v)[..., near, :].sum().backward()
    assert relative(kernel.raw_lengthscale.grad, other.raw_lengthscale.grad) < 1e-4


@each("kernel", [PiecewisePolynomialKernel(q=0), CosineKernel()])
def test_kernels_that_are_called_far_from_the_origin(kernel):
    x = 1e6 + points(60, 1)
    found = KernelMatrix.of(kernel.double(), x[:20], x, engine="tiled").to_dense()
    assert relative(found, kernel(x[:20] - 1e6, x - 1e6).to_dense()) < 1e-7


@each("inputs", [False, True])
@each("far", ["one", "copies", "cluster", "all"])
@each("name", KERNELS)
def test_square_matrices(name, far, inputs):
    """Far rows may be copies of one another, or a cluster of their own: k is not 0 among them.  Where the lengthscale
    is a small part of the field, almost all rows are far."""
    x = points(300, 5, dtype=torch.float32)
    if far == "all":
        x = 0.5 * x + 128 * points(30, 5, seed=3, dtype=torch.float32).repeat(10, 1)
    else:
        x[: 1 if far == "one" else 100] = FAR
    if far == "cluster":
        x[:100] += 64 * points(100, 5, seed=3, dtype=torch.float32)
    v = normal(300, 1)
    kernel, exact = KERNELS[name](), KERNELS[name]().double()
    z = x.double().requires_grad_(inputs)
    x.requires_grad_(inputs)
    found, expected = KernelMatrix.of(kernel, x, engine="tiled") @ v.float(), exactly(name, exact, z, z) @ v
    assert relative(found, expected) < (3e-5 if far == "cluster" else 1e-5)  # 1e5 has as many digits in float32
    (found * v.float()).sum().backward()
    (expected * v).sum().backward()
    for mine, theirs in zip(kernel.parameters(), exact.parameters(), strict=True):
        assert relative(mine.grad, theirs.grad) < 3e-3
    if inputs:
        assert relative(x.grad, z.grad) < 1e-4


@pytest.mark.parametrize("own", [False, True])
def test_tall_matrices_of_other_points(own):
    """A batch of a stream may be far where all inducing points are near; a batch of the points may, where some are."""
    near, far = (FAR * k + 64 * points(40, 5, seed=k, dtype=torch.float32) for k in (0, 1))
    both = torch.cat([near, far[:20]])
    kernel = KERNELS["rbf"]().requires_grad_(False)
    kernel.base_kernel.lengthscale = torch.tensor([30.0, 40.0, 50.0, 60.0, 70.0])
    tall = TallMatrix(kernel, torch.cat([near, far]) if own else near, near[:5]).at(far, both, own=own)
    v, exact = normal(60, 2), copy.deepcopy(kernel).double()
    assert relative(tall.matmul(v), exactly("rbf", exact, far.double(), both.double()) @ v) < 1e-3


@pytest.mark.parametrize("apart", [1e3, 1e4])
def test_tall_matrices_of_batches_far_from_the_inducing_points(apart):
    """Batches are counted from their own centre, which that of the inducing points need not be near."""
    kernel = RBFKernel().requires_grad_(False)
    z, batches = normal(60, 4, dtype=torch.float32), normal(300, 4, seed=1, dtype=torch.float32) + apart
    tall = TallMatrix(kernel, torch.cat([z, batches]), z)
    first, second, every = batches[:200], batches[200:], torch.arange(200)
    found = tall.at(first, second).part(every)
    assert relative(found, kernel.double()(first.double(), second.double()).to_dense()) < 1e-5


def test_parts():
    """Rows and columns of a part are far as they are in the whole, whatever their order."""
    x = 64 * points(60, 5, dtype=torch.float32)
    x[:20] += FAR
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    rows, columns = order[:30], order[30:]
    kernel = KERNELS["rbf"]().requires_grad_(False)
    kernel.base_kernel.lengthscale = torch.tensor([30.0, 40.0, 50.0, 60.0, 70.0])
    matrix, whole = KernelMatrix.of(kernel, x, engine="tiled"), x.double()
    exact = exactly("rbf", copy.deepcopy(kernel).double(), whole, whole)
    assert relative(matrix.rows(rows) @ normal(60, 1).float(), exact[rows] @ normal(60, 1)) < 1e-3
    assert relative(matrix.block(rows, columns), exact[rows][:, columns]) < 1e-3


def test_lengthscales_of_a_far_cluster():
    """Where far rows are a lengthscale or so apart, their pairs make most of its gradient."""
    x = points(300, 5, dtype=torch.float32)
    x[:100] = FAR + 64 * points(100, 5, seed=3, dtype=torch.float32)
    v = normal(300, 1)
    kernel = KERNELS["rbf"]()
    kernel.base_kernel.lengthscale = torch.tensor([30.0, 40.0, 50.0, 60.0, 70.0])
    exact = copy.deepcopy(kernel).double()
    (v.float().mT @ (KernelMatrix.of(kernel, x, engine="tiled") @ v.float())).sum().backward()
    (v.mT @ exactly("rbf", exact, x.double(), x.double()) @ v).sum().backward()
    assert relative(kernel.base_kernel.raw_lengthscale.grad, exact.base_kernel.raw_lengthscale.grad) < 1e-3


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("matmul", ["dense", "tiled", "auto"])
def test_predictions(matmul, rows):
    """Of a test batch with a far row: those of the other rows, mean and covariance, are as without it."""
    x = points(900, 5)
    y = torch.sin(5 * x.sum(dim=1))
    likelihood = GaussianLikelihood()
    likelihood.noise = 1e-2
    model = Plain(x.float(), y.float(), likelihood, ScaleKernel(RBFKernel()))
    sketchgp.accelerate(model.eval(), matmul=matmul)
    test = points(rows, 5, seed=4, dtype=torch.float32)
    with torch.no_grad():
        expected = model(test)
        found = model(torch.cat([test, torch.full((1, 5), FAR)]))
        mean, covariance = found.mean[:-1], found.covariance_matrix[:-1, :-1]
        assert float((mean - expected.mean).abs().max()) < 2e-3
        assert float((covariance - expected.covariance_matrix).abs().max()) < 2e-3
        assert float(found.mean[-1] - model.mean_module.constant) == pytest.approx(0, abs=1e-6)


def test_an_infinite_row_and_one_of_nan_spoil_their_own():
    x = points(20, 3, dtype=torch.float32)
    bad = torch.cat([x, torch.full((1, 3), torch.inf), torch.full((1, 3), torch.nan)])
    found = KernelMatrix.of(RBFKernel(), bad, points(6, 3, seed=2, dtype=torch.float32), engine="tiled").to_dense()
    exact = RBFKernel().double()(x.double(), points(6, 3, seed=2)).to_dense()
    assert relative(found[:20], exact) < 1e-6
    assert relative(KernelMatrix.of(RBFKernel(), x, bad, engine="tiled").to_dense()[:, :20], RBFKernel()(x).to_dense())


@each("where", ["test", "training", "two places", "half of the test rows", "most of the test rows"])
@each("name", ["rbf", "matern12 ard", "called", "with linear", "derivatives"])
def test_few_points_in_float64(name, where):
    """GPyTorch counts distances from the mean of the rows that a kernel is called with."""
    made = {
        "rbf": lambda: ScaleKernel(RBFKernel()),
        "matern12 ard": lambda: ScaleKernel(MaternKernel(nu=0.5, ard_num_dims=2)),
        "called": lambda: ScaleKernel(PiecewisePolynomialKernel(q=2)),
        "with linear": lambda: ScaleKernel(RBFKernel()) + LinearKernel(active_dims=[0]),
        "derivatives": lambda: ScaleKernel(RBFKernelGrad()),
    }
    x, test = points(60, 2), points(4, 2, seed=1)
    y = torch.sin(6 * x[:, 0])
    if name == "derivatives":
        x, test = x[:20], test
        y = torch.stack([y[:20], 6 * torch.cos(6 * x[:, 0]), torch.zeros(20, dtype=torch.float64)], dim=-1)
    far = torch.tensor([[0.0, 1e9], [0.0, -1e9], [1.8e9, -1.8e9], [1.8e9, -1.8e9], [1e12, 3e9]], dtype=torch.float64)
    far = far[
        {"two places": slice(2), "half of the test rows": slice(4), "most of the test rows": slice(5)}.get(
            where, slice(1)
        )
    ]

    def model(x, y):
        several = name == "derivatives"
        likelihood = MultitaskGaussianLikelihood(3, has_task_noise=False) if several else GaussianLikelihood()
        kind, mean = (Derivatives, ConstantMeanGrad()) if several else (Plain, ZeroMean())
        made_ = kind(x, y, likelihood, made[name](), mean).double()
        likelihood.noise = 1e-3
        return sketchgp.accelerate(made_).eval()

    # with gradients, GPyTorch computes the diagonal of k(z, z) from distances, too
    with torch.set_grad_enabled("rows" in where):
        expected = model(x, y)(test)
        mean, variance = expected.mean, expected.variance
        if "test" in where:
            found = model(x, y)(torch.cat([far, test]))
            rows = slice(len(far), None)
        else:
            zeros = torch.zeros(len(far), *y.shape[1:], dtype=torch.float64)
            found, rows = model(torch.cat([far, x]), torch.cat([zeros, y]))(test), slice(None)
    assert torch.allclose(found.mean[rows], mean, atol=1e-7)
    assert torch.allclose(found.variance[rows], variance, atol=1e-7)


def test_exact_variances_beside_far_test_rows():
    """Phases count from the training points, and not from test points most of which are far."""
    x, z = points(60, 2), torch.cat([1e9 + points(5, 2, seed=2), points(2, 2, seed=1)])
    model = Plain(x, x[:, 0].sin(), GaussianLikelihood(), ScaleKernel(PeriodicKernel()), ZeroMean()).double()
    sketchgp.accelerate(model)
    alone, beside = (sketchgp.predict(model, rows, variance="exact", progress=False) for rows in (z[5:], z))
    assert torch.allclose(beside.variance[5:], alone.variance, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("half", "dtype", "batch"),
    pairwise(["first", "second", "one of three"], [torch.float32, torch.float64], [(), (2,)]),
)
def test_clusters_far_from_each_other(half, dtype, batch):
    """A kernel that is called, of clusters none of which holds more than half of the rows."""
    near = points(40, 3, dtype=torch.float64)
    away = points(40 if half == "first" else 50, 3, seed=1, dtype=torch.float64) + 1e7
    x = torch.cat([near, away] if half == "first" else [away, near]).to(dtype)
    if half == "one of three":
        x = torch.cat([x[:85], -x[40:] - 1e6])
    x = x.expand(*batch, *x.shape)
    kernel = Called().to(dtype)
    kernel.lengthscale = 0.5  # GPyTorch divides by it before it counts from the mean
    found = KernelMatrix.of(kernel, x, engine="tiled").to_dense().double().detach()
    exact = (x.double().unsqueeze(-2) - x.double().unsqueeze(-3)).square().sum(dim=-1)
    exact = (-2 * exact).exp()
    assert relative(found, exact) < (1e-5 if dtype == torch.float32 else 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", ["every third", "every other", "four of five", "two columns"])
def test_rows_of_a_repeating_pattern_are_far(share, dtype):
    """A value stands where one is missing, in rows that a sample at even steps meets in the wrong proportion, or in
    most of them; the other column is in order."""
    x = points(1500, 2, dtype=torch.float64)
    x[:, 0] = torch.arange(1500) / 1500
    rows = torch.arange(1500)
    x[rows % 5 > 0 if share == "four of five" else rows % (2 if share == "every other" else 3) == 0, 1] = 9999999.0
    if share == "two columns":
        x[1::3, 0] = -9999999.0
    kernel = RBFKernel().to(dtype).requires_grad_(False)
    kernel.lengthscale = 0.1
    differences = (x.to(dtype).double()[::7, None] - x.to(dtype).double()) / kernel.lengthscale.double()
    v = normal(1500, 2).to(dtype)
    found = KernelMatrix.of(kernel, x.to(dtype), engine="tiled").matmul(v)[::7]
    expected = (-0.5 * differences.square().sum(dim=-1)).exp() @ v.double()
    assert relative(found, expected) < (1e-5 if dtype == torch.float32 else 1e-10)
    x[::4] = torch.nan
    assert Centre(x).value.abs().amax() < 1


def test_a_loss_of_few_points_with_a_far_row():
    """The far row is independent of the others."""
    x, y = points(60, 2), normal(60)
    far, targets = torch.cat([x, torch.full((1, 2), 1e9, dtype=torch.float64)]), torch.cat([y, y.new_zeros(1)])
    losses = []
    for rows, values in ((x, y), (far, targets)):
        likelihood = GaussianLikelihood()
        model = Plain(rows, values, likelihood, ScaleKernel(RBFKernel(ard_num_dims=2)), ZeroMean()).double()
        sketchgp.accelerate(model).train()
        loss = -ExactMarginalLogLikelihood(likelihood, model)(model(rows), values) * len(rows)
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        losses.append(loss.item())
    prior = (model.covar_module.outputscale + likelihood.noise).item()
    assert abs(losses[1] - losses[0] - 0.5 * math.log(2 * math.pi * prior)) < 1e-8


def test_groups_of_one_point_of_training_data():
    """Where half of the rows or more are one point, no distance is typical."""
    centre = Centre(torch.zeros(5, 2, dtype=torch.float64))
    x = torch.tensor([[0.0, 0.0], [1e-3, 0.0], [1e9, 0.0], [1e9, 1.0]], dtype=torch.float64)
    groups = centre.groups(x)
    assert sorted(row for group in groups for row in group.tolist()) == [0, 1, 2, 3]
    assert all(len(group) == 1 or 2 not in group for group in groups)


def test_groups_of_copies():
    x = torch.tensor([[0.0], [1e9], [0.0], [1e9]], dtype=torch.float64)
    groups = Centre(x).groups(x)
    assert sorted(group.tolist() for group in groups) == [[0, 2], [1, 3]]
    days = torch.arange(40, dtype=torch.float64).remainder(10).mul(86400).unsqueeze(-1)
    assert Centre(days).groups(days) is None  # one call for all categories


@pytest.mark.parametrize("loss", [ExactMarginalLogLikelihood, sketchgp.ExactMarginalLogLikelihood])
def test_the_loss_of_few_points_in_float32(loss):
    """GPyTorch's kernel loses the distances of rows that are alike beside one that is far: a gradient of 3,900."""
    x = torch.cat([1e-3 * points(1, 6).repeat(4, 1), torch.full((1, 6), 220.0, dtype=torch.float64)])
    y, found = torch.tensor([1.0, -1.0, 0.5, 0.2, 0.3], dtype=torch.float64), []
    for dtype in (torch.float32, torch.float64):
        model = Plain(x.to(dtype), y.to(dtype), GaussianLikelihood(), ScaleKernel(RQKernel()), ZeroMean()).to(dtype)
        model.covar_module.base_kernel.lengthscale, model.likelihood.noise = 0.5, 0.0035
        value = loss(model.likelihood, sketchgp.accelerate(model))(model(*model.train_inputs), model.train_targets)
        value.backward()
        found.append(torch.stack([value.detach(), *(p.grad.squeeze() for p in model.parameters())]).double())
    assert torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-4), found


@each("kernel", [RBFKernel, MaternKernel, Called])
@each("rows", [[-1e7, 0.3], [0.3, -1e7], [1e7, 0.3]])
def test_two_points_one_of_them_far(kernel: Any, rows: list[float]) -> None:
    """Counted from the far one, the others would have no digits; nor may a far row be among those asked for."""
    for d in (1, 3):
        covariance = kernel()
        covariance.lengthscale = 0.2 * d**0.5
        x, z = (torch.tensor(values)[:, None].expand(-1, d) for values in (rows, [0.25, 0.35, 2e6, 0.5, 0.31]))
        found = KernelMatrix.of(covariance, z, x, engine="tiled").to_dense()
        covariance.double()
        expected = [[covariance(a.double()[None], b.double()[None]).to_dense().item() for b in x] for a in z]
        assert (found - torch.tensor(expected)).abs().amax() < 1e-5


def test_a_far_row_beside_two_training_rows() -> None:
    """A kernel that GPyTorch calls counts from the mean of the test rows."""
    x, y = torch.tensor([[2.27e6], [-0.5679]]), torch.tensor([0.16, -0.71])
    model = Plain(x, y, GaussianLikelihood(), ScaleKernel(MaternKernel(nu=0.5) * RBFKernel()))
    model.covar_module.base_kernel.kernels[0].lengthscale = 0.24
    sketchgp.accelerate(model, matmul="gpytorch")
    z = torch.tensor([[2.27e6], [0.2163], [2743.0], [-0.6043]])
    with max_cholesky_size(1):
        together, alone = (sketchgp.predict(model, rows, variance=None).mean[-1] for rows in (z, z[3:]))
    assert together == pytest.approx(float(alone), abs=1e-6)

"""Kernels that know their points, that change their own parameters, or that bring another way to be multiplied."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    CosineKernel,
    GridKernel,
    IndexKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    ScaleKernel,
    keops,
)
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import to_dense
from linear_operator.operators import KroneckerProductLinearOperator

import sketchgp
from gp_models import TORCH_WARNINGS, Plain, data, dense, gradient_error, iterative, marginal
from problems import needs_keops, normal, points, relative
from sketchgp.operators import KernelMatrix
from sketchgp.operators.access import Access
from sketchgp.operators.lazies import evaluated
from sketchgp.settings import memory_budget

pytestmark = TORCH_WARNINGS
GRID = [torch.linspace(0, 1, 7, dtype=torch.float64), torch.linspace(0, 2, 6, dtype=torch.float64)]
ON_GRID = gpytorch.utils.grid.create_data_from_grid(GRID)


def modelled(kernel: Kernel, x: torch.Tensor, y: torch.Tensor) -> Plain:
    model = Plain(x, y, GaussianLikelihood(), kernel).to(x.dtype)
    model.likelihood.noise = 0.05
    return model


def compare(model: Plain, x: torch.Tensor, tolerance: float = 1e-6, **choices: str) -> Plain:
    """Loss, gradient and prediction of the accelerated model beside the dense answers; returns the former."""
    other = copy.deepcopy(model)
    with dense():
        value, gradient = marginal(other)
        with torch.no_grad():
            expected = other.eval()(x)
            mean, variance = expected.mean, expected.variance
    sketchgp.accelerate(model, **choices)
    with iterative(probes=60, tol=max(1e-8, tolerance / 10)):
        found, found_gradient = marginal(model)
        with torch.no_grad():
            prediction = model.eval()(x)
            assert relative(prediction.mean, mean) < tolerance
            assert relative(prediction.variance, variance) < 10 * tolerance
    assert float(found - value) == pytest.approx(0, abs=5e-3)
    assert gradient_error(found_gradient, gradient) < 3e-2
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert relative(mine, theirs) < 1e-6  # what forward does to them too
    return model


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_grid_kernel_on_its_own_grid(dtype, scaled):
    kernel = GridKernel(RBFKernel(ard_num_dims=2), grid=[g.to(dtype) for g in GRID])
    x = ON_GRID.to(dtype)
    y = torch.sin(4 * x[:, 0]) + x[:, 1]
    model = compare(modelled(ScaleKernel(kernel) if scaled else kernel, x, y), points(5, 2, dtype=dtype), 1e-4)
    with dense(), torch.no_grad(), pytest.warns(match="matches the stored training data"):
        variance = sketchgp.restore(copy.deepcopy(model)).eval()(x).variance
    with iterative(tol=1e-5), torch.no_grad(), pytest.warns(match="matches the stored training data"):
        assert relative(model(x).variance, variance) < 1e-3


def test_structure_is_judged_by_the_call_itself():
    kernel = ScaleKernel(GridKernel(RBFKernel(ard_num_dims=2), grid=GRID)).double()
    assert KernelMatrix.from_lazy(kernel(ON_GRID)) is None
    assert not hasattr(kernel.base_kernel, "_cached_kernel_mat")
    with memory_budget(1):
        assert KernelMatrix.from_lazy(kernel(ON_GRID)) is None
        assert KernelMatrix.from_lazy(kernel(ON_GRID[:-1])) is not None
    inner = kernel.base_kernel(ON_GRID).evaluate_kernel()
    assert isinstance(inner, KroneckerProductLinearOperator)
    both = (
        kernel + ScaleKernel(MaternKernel()).double()
    )  # structure that a sum has lost; the grid still ignores ``diag``
    matrix = KernelMatrix.from_lazy(both(ON_GRID))
    expected = to_dense(both(ON_GRID))
    assert relative(matrix @ torch.ones(42, 1).double(), expected.sum(dim=1, keepdim=True)) < 1e-12
    assert relative(matrix.diagonal(), expected.diagonal()) < 1e-12
    off = KernelMatrix.from_lazy(kernel(torch.cat([ON_GRID, ON_GRID[:1] + 0.1])))[:-1, :-1]
    assert relative(off.diagonal(), to_dense(kernel(ON_GRID)).diagonal()) < 1e-12


class Embedded(Kernel):
    """Categories as vectors that the lookup shortens to length 1."""

    def __init__(self):
        super().__init__()
        self.vectors = torch.nn.Embedding(4, 3, max_norm=1.0)
        self.vectors.weight.data.copy_(normal(4, 3) * torch.tensor([[0.1], [1.0], [3.0], [3.0]]))
        self.base = RBFKernel()

    def forward(self, x1, x2, diag=False, **params):
        x1, x2 = (torch.cat([self.vectors(x[..., 0].long()), x[..., 1:]], dim=-1) for x in (x1, x2))
        return self.base.forward(x1, x2, diag=diag, **params)


def categories(n: int) -> torch.Tensor:
    return torch.cat([torch.arange(n).unsqueeze(-1).double().sort(dim=0).values * 3 // n, points(n, 1)], dim=-1)


@pytest.mark.parametrize("matmul", ["tiled", "auto"])
def test_a_kernel_that_changes_its_parameters(matmul):
    """The last category is not among the points: its vector keeps its length."""
    x = categories(80)
    y = torch.sin(6 * x[:, 1]) + x[:, 0]
    model = compare(modelled(ScaleKernel(Embedded()), x, y), x[::9] + torch.tensor([0.0, 0.01]), matmul=matmul)
    weight = model.covar_module.base_kernel.vectors.weight
    assert weight[2].norm() < 1.0001 and weight[3].norm() > 1.5


def test_graphs_survive_later_calls():
    kernel, x, v = Embedded().double(), categories(60), normal(60, 2)
    product = (KernelMatrix.of(kernel, x, engine="tiled") @ v).square().sum()
    assert kernel.vectors.weight[2].norm() < 1.0001
    KernelMatrix.of(kernel, x[:9], engine="tiled").diagonal()
    product.backward()
    found = kernel.vectors.weight.grad.clone()
    kernel.zero_grad()
    (to_dense(kernel(x)) @ v).square().sum().backward()
    assert relative(found, kernel.vectors.weight.grad) < 1e-10


def test_a_users_kernel_in_inference_mode():
    kernel, x = Embedded().double(), categories(20)
    expected = to_dense(copy.deepcopy(kernel)(x))
    with torch.inference_mode():
        matrix = KernelMatrix.of(kernel, x.clone(), engine="tiled")
        assert relative(matrix.to_dense(), expected) < 1e-12


KEOPS = {
    "rbf": (keops.RBFKernel, RBFKernel, {"ard_num_dims": 3}),
    "matern": (keops.MaternKernel, MaternKernel, {"nu": 1.5, "active_dims": (0, 2)}),
    "periodic": (keops.PeriodicKernel, PeriodicKernel, {}),
}


@pytest.mark.parametrize("name", KEOPS)
def test_keops_kernels_are_those_they_stand_for(name):
    cls, plain, options = KEOPS[name]
    kernel = ScaleKernel(cls(**options)).double()
    kernel.base_kernel.lengthscale = 0.4
    other = ScaleKernel(plain(**options)).double()
    other.load_state_dict(kernel.state_dict())
    x, v = points(30), normal(30, 1)
    found, expected = (KernelMatrix.of(k, x, engine="tiled") @ v for k in (kernel, other))
    assert type(kernel.base_kernel) is cls
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(kernel.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_keops_kernels_in_a_users_kernel_and_twice():
    pytest.importorskip("pykeops")
    part = keops.RBFKernel()
    kernel = (ScaleKernel(part * part) + keops.MaternKernel(active_dims=(0,))).double()
    x = points(30)
    matrix = KernelMatrix.of(kernel, x, engine="tiled")
    assert matrix.expression is not None
    assert relative(matrix.to_dense(), to_dense(kernel(x))) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 40])
def test_the_diagonal_of_a_batch_of_products_with_categories(n):
    """GPyTorch's product cannot multiply the diagonals of one factor by the matrices of one that ignores ``diag``."""
    batch = torch.Size([3])
    kernel = RBFKernel(active_dims=(0,), batch_shape=batch) * IndexKernel(2, active_dims=(1,), batch_shape=batch)
    kernel.kernels[0].lengthscale = torch.tensor([0.3, 0.5, 0.8]).reshape(3, 1, 1)
    matrix = KernelMatrix.of(kernel.double(), torch.cat([points(n, 1), torch.arange(n).unsqueeze(1) % 2], dim=1))
    assert relative(matrix.diagonal(), matrix.to_dense().diagonal(dim1=-2, dim2=-1)) < 1e-12


@pytest.mark.parametrize("size", [0, 1])
def test_keops_kernels_below_every_threshold(size):
    x, y, xt = data(60)
    model = modelled(ScaleKernel(keops.RBFKernel()), x, y)
    with dense(), torch.no_grad():
        mean = copy.deepcopy(model).eval()(xt).mean
    sketchgp.accelerate(model)
    with iterative(), gpytorch.settings.max_cholesky_size(size), torch.no_grad():
        assert relative(model.eval()(xt).mean, mean) < 1e-6


@pytest.mark.slow  # KeOps compiles
@pytest.mark.parametrize("size", [0, 1])
def test_the_diagonal_of_a_keops_kernel_that_is_left_to_gpytorch(size):
    needs_keops()
    kernel = ScaleKernel(keops.RBFKernel()).double()
    with gpytorch.settings.max_cholesky_size(size), torch.no_grad():
        diagonal = Access(kernel(points(30)) + kernel(points(30))).diagonal()
    assert relative(diagonal, 2 * kernel.outputscale.expand(30)) < 1e-12


def test_additive_structure_on_grids():
    """Each feature interpolated on one grid, by GPyTorch's deprecated ``last_dim_is_batch``."""
    x, y, xt = data()
    bounds = [(-0.1, 1.1)]
    base = gpytorch.kernels.GridInterpolationKernel(
        ScaleKernel(RBFKernel()), grid_size=50, num_dims=1, grid_bounds=bounds
    )
    model = modelled(gpytorch.kernels.AdditiveStructureKernel(base, num_dims=2), x, y)
    compare(model, xt)


class Held(Kernel):
    """A kernel that multiplies by a matrix of its own, which is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = RBFKernel()
        self.register_buffer("held", torch.tensor([[1.0, 0.3], [0.0, 0.7]]))

    def forward(self, x1, x2, diag=False, **options):
        value = to_dense(self.base(x1 @ self.held, x2 @ self.held))
        return value.diagonal(dim1=-1, dim2=-2) if diag else value


def test_a_float32_kernel_with_a_buffer():
    """Its entries are checked in float64, where the buffer has to be of float64 too."""
    x, y, xt = data(dtype=torch.float32)
    model = compare(modelled(Held(), x, y), xt, 1e-3)
    assert model.covar_module.held.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The input matches the stored training data")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions_at_the_points_of_a_grid(dtype):
    """A grid kernel keeps its matrix in eval mode, in the dtype that it was evaluated in."""
    grid = [torch.linspace(0, 1, 20, dtype=dtype)]
    x, kernel = grid[0].unsqueeze(-1), GridKernel(RBFKernel(), grid)
    likelihood = GaussianLikelihood()
    model = sketchgp.accelerate(Plain(x, torch.sin(6 * x[:, 0]), likelihood, kernel).to(dtype)).eval()
    assert torch.allclose(model(x).mean.double(), dense_mean(model, x), atol=1e-5)
    with torch.no_grad():
        kernel.base_kernel.lengthscale = 0.2
    assert torch.allclose(model(x).mean.double(), dense_mean(model, x), atol=1e-5)
    assert torch.allclose(sketchgp.predict(model, x).mean, model(x).mean, atol=1e-6)


def dense_mean(model, x):
    """The mean at the training points by dense float64 algebra, with the kernel that a grid kernel holds."""
    with torch.no_grad():
        matrix = model.covar_module.base_kernel(x).to_dense().double()
        a = matrix + model.likelihood.noise.double() * torch.eye(len(x), dtype=torch.float64)
        constant = model.mean_module.constant.double()
        return constant + matrix @ torch.linalg.solve(a, model.train_targets.double() - constant)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kernel", [PiecewisePolynomialKernel(q=0), CosineKernel()])
def test_distances_of_kernels_that_are_called(kernel, graph):
    """Rows that are copies are at distance 0 of each other, and inputs may lie far from the origin."""
    kernel, x = kernel.double(), points(20, 1).repeat(2, 1)
    x = (2**10 * x).round() / 2**10  # so that a shift rounds nothing
    distance = (x - x.mT).abs() / getattr(kernel, "period_length", getattr(kernel, "lengthscale", None))
    expected = torch.cos(torch.pi * distance) if isinstance(kernel, CosineKernel) else (1 - distance).clamp(min=0)
    for rows in (slice(40), slice(30)):  # GPyTorch multiplies otherwise where both sets of rows are not the same
        inputs = (1000 + x).requires_grad_(graph)
        found = to_dense(evaluated(kernel(inputs, 1000 + x[rows])))
        assert relative(found, expected[:, rows]) < 1e-12
        if graph:
            slope = torch.autograd.grad(found[0].sum(), inputs, create_graph=True)[0]
            assert torch.isfinite(torch.autograd.grad(slope.sum(), inputs)[0]).all()


def test_the_gradient_of_a_kernel_that_is_called_knows_rows_next_to_each_other():
    """The slope of a distance is that of its square over itself, which the rounding of a product would drown."""
    kernel = PiecewisePolynomialKernel(q=0)
    kernel.lengthscale = 0.01
    near = 5 * points(20, 1).float()
    x = torch.cat([near, near + 2.0**-16])
    (found,) = torch.autograd.grad(to_dense(evaluated(kernel(x, x))).diagonal(20).sum(), kernel.raw_lengthscale)
    apart = (x[20:] - near).double().sum()
    expected = apart / 0.01**2 * torch.sigmoid(kernel.raw_lengthscale.detach().double())
    assert relative(found, expected) < 0.05


@pytest.mark.parametrize("order", range(3))
def test_an_arc_cosine_kernel_of_nearly_parallel_rows(order: int) -> None:
    """In float32 the arc cosine loses half of the digits, and its slope and the sine's cancel."""
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, 2 * x, 1.0003 * x])
    found, expected = [], []
    for dtype, results in ((torch.float32, found), (torch.float64, expected)):
        points = x.to(dtype).requires_grad_()
        value = sketchgp.ArcCosineKernel(order).to(dtype)(points, points.detach()).to_dense()
        results += [value.detach(), *torch.autograd.grad(value[:, :40].sum(), points)]
    assert relative(found[0], expected[0]) < 1e-6
    assert order == 0 or relative(found[1], expected[1]) < 1e-4  # a step has none

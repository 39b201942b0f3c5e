"""The engine of regular lattices: products and gradients are those of tiles, and no other points are taken for one."""

from __future__ import annotations

import warnings
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import ConstantKernel, MaternKernel, PeriodicKernel, PolynomialKernel, RBFKernel, ScaleKernel
from torch import Tensor

import sketchgp
from cases import pairwise
from gp_models import TORCH_WARNINGS, Plain, dense, gradient_error, iterative, marginal, relative
from sketchgp import InputError, LaplaceKernel
from sketchgp.operators import KernelMatrix
from sketchgp.operators.access import AccurateProduct
from sketchgp.operators.engines import LATTICE, TILED, choose

pytestmark = TORCH_WARNINGS

SHAPES = {1: (1500,), 2: (40, 45), 3: (11, 1, 12, 13)}
KERNELS: dict[str, Any] = {
    "matern": lambda d: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=d)),
    "product": lambda d: ScaleKernel(RBFKernel() * PeriodicKernel()) + ConstantKernel(),
    "sum": lambda d: ScaleKernel(MaternKernel(nu=0.5, active_dims=(0,))) + ScaleKernel(RBFKernel(ard_num_dims=d)),
    "laplace": lambda d: LaplaceKernel(ard_num_dims=d),
}
# how coordinates were rounded, after they were made in float64
ROUNDED: dict[str, Any] = {
    "float64": lambda x: x,
    "float32": lambda x: x.float(),
    "table": lambda x: (1e5 * x).round() / 1e5,
    "float32 in float64": lambda x: (x + 2).float().double(),
}


def cells(d: int, seed: int = 0) -> Tensor:
    """All cells of a lattice with its own step along each coordinate, float64."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.cartesian_prod(*[torch.arange(size) for size in SHAPES[d]]).reshape(-1, len(SHAPES[d]))
    steps, origin = (torch.rand(places.shape[1], dtype=torch.float64, generator=generator) for _ in range(2))
    return (origin - 0.5) + (0.01 + 0.02 * steps) * places[torch.randperm(len(places), generator=generator)]


def scattered(n: int = 3000, d: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(n, d, dtype=dtype, generator=torch.Generator().manual_seed(3))


def kernel_of(name: str, x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(4)
    kernel = KERNELS[name](x.shape[-1]).to(x.dtype)
    for parameter in kernel.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, dtype=x.dtype, generator=generator))
    return kernel


@pytest.mark.parametrize(("d", "name", "rounded"), pairwise(SHAPES, KERNELS, ROUNDED))
def test_products_and_gradients_are_those_of_tiles(d: int, name: str, rounded: str) -> None:
    """Of all rows, of some, and of others with these; a third of the cells are missing, some stand twice."""
    x = ROUNDED[rounded](cells(d))
    x, others = torch.cat([x[: 2 * len(x) // 3], x[:5]]), x[2 * len(x) // 3 :]
    kernel = kernel_of(name, x)
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(len(x), 2, dtype=torch.float64, generator=generator) for _ in range(2))
    close = 1e-6 if rounded == "float32" else 1e-12
    size = float(kernel(x[:1]).to_dense().detach()) * right.abs().sum(dim=0)

    def off(engine: Any, exact: Any) -> float:
        return float(((engine.product(right.to(x.dtype)) - exact.product(right)).abs() / size).max())

    lattice, tiles = (KernelMatrix.of(kernel, x, engine=engine) for engine in ("lattice", "tiled"))
    assert off(lattice, tiles.double()) < close
    some = torch.arange(0, len(x), 7)
    assert off(lattice.rows(some), tiles.double().rows(some)) < close
    mixed, tiled = (KernelMatrix.of(kernel, others, x, engine=engine) for engine in ("lattice", "tiled"))
    assert off(mixed, tiled.double()) < close
    found = lattice.derivative(left.to(x.dtype), right.to(x.dtype))[2:]
    expected = tiles.double().derivative(left, right)[2:]
    scale = max(float(g.abs().max()) for g in expected)
    exact = rounded == "float64"
    assert all(
        float((f - e).abs().max()) < (1e-9 if exact else 3e-4) * scale for f, e in zip(found, expected, strict=True)
    )


def test_it_is_taken_where_points_fill_a_lattice() -> None:
    x = cells(2)
    kernel = kernel_of("matern", x)
    assert choose(KernelMatrix.of(kernel, x).pairs) is LATTICE
    assert choose(KernelMatrix.of(kernel, x[:1000], x[1000:]).pairs) is TILED  # once: looking at them takes longer
    assert choose(KernelMatrix.of(kernel, x[:300]).pairs) is not LATTICE


def test_wide_products_are_left_to_others_where_those_are_faster() -> None:
    """A column takes as long as the others on a lattice, and far less than the first in a tile."""
    for n, faster in ((1500, False), (5000, True)):
        x = torch.cartesian_prod(torch.arange(100.0), torch.arange(100.0))[torch.randperm(10_000)[:n]].double()
        matrix = KernelMatrix.of(kernel_of("matern", x), x)
        for columns in (1, 100):
            matrix.product(torch.ones(n, columns, dtype=torch.float64))
            assert ("stored matrix" in matrix.pairs.memory) == (columns > 1 and not faster)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_other_points_are_no_lattice(d: int, dtype: torch.dtype) -> None:
    """Scattered ones, also next to rounding, cells with noise of a hundredth of a step, and few of very many cells."""
    step = cells(d).unique(dim=0)[:, -1].diff().abs()
    step = step[step > 0].min()
    noise = torch.rand(cells(d).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) - 0.5
    noisy = cells(d) + 0.01 * step * noise
    apart = (1e6 * scattered(d=d)).round()
    apart[0] += 0.5
    for x in (scattered(d=d), 1000 + 1e-4 * scattered(d=d), noisy, apart):
        x = x.to(dtype)
        assert choose(KernelMatrix.of(kernel_of("matern", x), x).pairs) is not LATTICE


def test_cheap_products_take_fewer_columns_of_a_preconditioner() -> None:
    x = torch.cartesian_prod(torch.arange(80.0), torch.arange(50.0)).double() / 50
    noise = torch.full((len(x),), 1e-3, dtype=torch.float64)
    ranks = []
    for engine in ("lattice", "tiled"):
        kernel = ScaleKernel(MaternKernel(nu=1.5)).double().requires_grad_(False)
        ranks.append(sketchgp.RPCholesky().build(KernelMatrix.of(kernel, x, engine=engine), noise).rank)
    assert ranks[0] < 0.8 * ranks[1]


def test_no_memory_for_a_preconditioner_is_no_reason_for_another_solver() -> None:
    x = cells(2)
    with sketchgp.settings.memory_budget(2**20):
        for points, expected in ((x, "ConjugateGradients"), (scattered(), "ASkotch")):
            model = Plain(points, points[:, 0], gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(RBFKernel()))
            model = sketchgp.accelerate(model.double()).eval()
            with sketchgp.record_solves() as solves, warnings.catch_warnings():
                warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
                model(points[:3]).mean  # noqa: B018
            assert solves[0].solver == expected


def test_what_it_cannot_take_is_refused() -> None:
    x = cells(2)
    kernel = kernel_of("matern", x)
    refused: list[tuple[Any, Tensor, str]] = [
        (kernel, scattered(), "no regular lattice"),
        (kernel, torch.cat([x, x[:1] + torch.inf]), "no regular lattice"),
        (kernel, x.clone().requires_grad_(), "inputs have gradients"),
        (kernel, x.expand(2, *x.shape), "one matrix"),
        (PolynomialKernel(power=2).double(), x, "a kernel with fast tiles"),
    ]
    for one, points, message in refused:
        with pytest.raises(InputError, match=message):
            KernelMatrix.of(one, points, engine="lattice")


def test_a_period_far_below_a_step_is_left_to_tiles() -> None:
    """Beside the cells of a table the kernel is then no polynomial."""
    x = ROUNDED["table"](cells(2))
    kernel = ScaleKernel(PeriodicKernel()).double()
    kernel.base_kernel.period_length = 1e-3
    lattice, tiles = (KernelMatrix.of(kernel, x, engine=engine) for engine in ("lattice", "tiled"))
    v = torch.ones(len(x), 1, dtype=torch.float64)
    assert relative(lattice.product(v), tiles.product(v)) < 1e-12
    found, expected = (matrix.derivative(v, v)[2:] for matrix in (lattice, tiles))
    assert all(torch.allclose(f, e, rtol=1e-9) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_are_not_taken_for_one_beside_a_far_row(dtype: torch.dtype) -> None:
    """A missing value may be written as a large number, next to whose rounding all others are alike."""
    x = scattered(1500, 1).to(dtype)
    x[0] = -999_999 if dtype == torch.float32 else 1e15
    matrix, v = KernelMatrix.of(kernel_of("matern", x), x), torch.ones(len(x), 1, dtype=dtype)
    assert relative(matrix.product(v), matrix.by("tiled").product(v)) < 1e-5


def test_a_period_far_below_a_step_is_seen_in_one_column_of_cells() -> None:
    """Points of other columns may be independent."""
    x = ROUNDED["table"](cells(2))
    kernel = (RBFKernel(active_dims=(0,)) * PeriodicKernel(active_dims=(1,))).double()
    kernel.kernels[0].lengthscale, kernel.kernels[1].period_length = 1e-3, 1e-5
    lattice, tiles = (KernelMatrix.of(kernel, x, engine=engine) for engine in ("lattice", "tiled"))
    v = torch.randn(len(x), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    assert relative(lattice.product(v), tiles.product(v)) < 1e-12


def test_grids_are_bounded_by_the_memory_budget() -> None:
    """Of products on lattices that were chosen for their speed, too."""
    x = cells(2)
    kernel = kernel_of("matern", x)
    with sketchgp.settings.memory_budget(2**10):
        assert choose(KernelMatrix.of(kernel, x).pairs) is not LATTICE
    for budget in (1, 2**10):
        with sketchgp.settings.memory_budget(budget), pytest.raises(InputError, match="no regular lattice"):
            KernelMatrix.of(kernel, x, engine="lattice")


def test_a_model_that_asks_for_it_predicts_anywhere() -> None:
    x, others = cells(2), scattered(20)
    model = Plain(x, x[:, 0], gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(RBFKernel())).double()
    means = []
    for matmul in ("lattice", "tiled"):
        sketchgp.accelerate(model, matmul=matmul)
        means.append(sketchgp.predict(model, others, variance=None).mean)
    assert relative(means[0], means[1]) < 1e-4


@pytest.mark.parametrize("n", [1, 2])
def test_few_points(n: int) -> None:
    x = cells(2)[:n]
    matrix = KernelMatrix.of(kernel_of("sum", x), x, engine="lattice")
    torch.testing.assert_close(matrix.product(torch.eye(n).double()), matrix.to_dense().detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_may_have_fewer_digits_than_parameters(dtype: torch.dtype) -> None:
    """Coordinates count as they are in the dtype of the product."""
    x = (torch.cartesian_prod(*map(torch.arange, (11, 12, 13))) / (10 if dtype == torch.float32 else 16)).to(dtype)
    kernel = kernel_of("matern", x.double())
    matrix, tiles = (KernelMatrix.of(kernel, x, engine=engine) for engine in ("auto", "tiled"))
    v = torch.randn(len(x), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    assert relative(matrix.product(v), tiles.product(v)) < 1e-10
    assert (choose(matrix.pairs) is LATTICE) == (dtype == torch.bfloat16)  # these are cells to the last digit


def test_residuals_of_float32_coordinates_are_those_of_the_coordinates_as_given() -> None:
    """In float64 they lie beside the cells."""
    x = cells(2).float()
    matrix, v = KernelMatrix.of(kernel_of("matern", x), x), torch.ones(len(x), 1, dtype=torch.float64)
    exact = matrix.double().by("tiled").product(v)
    assert relative(AccurateProduct(matrix)(v), exact) < 1e-10
    assert relative(matrix.product(v.float()).double(), exact) < 1e-5


def test_a_model_of_cells() -> None:
    """Mean and gradient of the marginal likelihood are the dense ones."""
    x = cells(2)
    x, others = x[:1300], x[1300:1500]
    y = torch.sin(30 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(len(x), generator=torch.Generator().manual_seed(7))
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5))).double()
    model.covar_module.base_kernel.lengthscale, model.likelihood.noise = 0.1, 0.01
    with dense():
        expected, gradient = model.eval()(others).mean.detach(), marginal(model)[1]
    sketchgp.accelerate(model)
    assert choose(KernelMatrix.of(model.covar_module, x).pairs) is LATTICE
    with iterative(probes=60):
        assert relative(model.eval()(others).mean.detach(), expected) < 1e-4
        assert gradient_error(marginal(model)[1], gradient) < 3e-2

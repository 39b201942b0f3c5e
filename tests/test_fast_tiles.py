"""Every kernel with fast tiles against its formula in dense float64: values, gradients, what is recognised.

The reference (:func:`reference`) takes differences of the inputs one by one, so it is exact for inputs far from the
origin and for points that coincide; one test holds it against GPyTorch's own kernels.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import unittest
from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    CosineKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from torch import Tensor

from cases import each, pairwise
from problems import normal, points, relative
from sketchgp import LaplaceKernel
from sketchgp.operators import KernelMatrix
from sketchgp.operators.engines import DENSE
from sketchgp.operators.expression import recognise
from sketchgp.operators.fast_tiles import Distances, FastTiles
from test_kernel_matrix import check_bilinear_derivative, evaluate, pytestmark, separate  # noqa: F401

# --- the reference ----------------------------------------------------------------------------------------------


def reference(kernel: Kernel, x: Tensor, z: Tensor) -> Tensor:
    """``k(x, z)`` from the formulas and the differences of the inputs, in float64; differentiable."""
    if kernel.active_dims is not None:
        x, z = x[..., kernel.active_dims.tolist()], z[..., kernel.active_dims.tolist()]
    return _forward(kernel, x.double(), z.double())


def _forward(kernel: Kernel, x: Tensor, z: Tensor) -> Tensor:
    """As GPyTorch's ``forward``: the kernel's own active dimensions were selected already."""
    if type(kernel) is ScaleKernel:
        return kernel.outputscale.double()[..., None, None] * _forward(kernel.base_kernel, x, z)
    if type(kernel) is AdditiveKernel:
        return sum(reference(part, x, z) for part in kernel.kernels)
    if type(kernel) is ProductKernel:
        return math.prod(reference(part, x, z) for part in kernel.kernels)
    difference = x.unsqueeze(-2) - z.unsqueeze(-3)
    if type(kernel) is ConstantKernel:
        return kernel.constant.double().unsqueeze(-1) + 0 * difference.sum(dim=-1)
    lengthscale = kernel.lengthscale.double().unsqueeze(-2)
    if type(kernel) is PeriodicKernel:
        angle = math.pi * difference / kernel.period_length.double().unsqueeze(-2)
        return (-2 * angle.sin().square() / lengthscale).sum(dim=-1).exp()
    if type(kernel) is LaplaceKernel:
        return (-(difference / lengthscale).abs().sum(dim=-1)).exp()
    q = (difference / lengthscale).square().sum(dim=-1)
    if type(kernel) is RBFKernel:
        return (-q / 2).exp()
    if type(kernel) is RQKernel:
        alpha = kernel.alpha.double().unsqueeze(-1)
        return (1 + q / (2 * alpha)) ** -alpha
    # the root has an infinite slope at 0, where that of the kernels is taken as 0
    s = torch.where(q > 0, 2 * kernel.nu * q, torch.ones_like(q)).sqrt() * (q > 0)
    return {0.5: 1.0, 1.5: 1 + s, 2.5: 1 + s + s.square() / 3}[kernel.nu] * (-s).exp()


def spread(kernel: Kernel, seed: int = 0) -> Kernel:
    """The kernel in float64 with parameters that all differ: scales and lengthscales between 0.5 and 1.3."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in kernel.double().parameters():
        parameter.data.copy_(1.3 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.4)
    return kernel


def twice(kernel: Kernel) -> Kernel:
    return kernel * kernel


NO_BATCH, BATCH = torch.Size(), torch.Size([2])
Make = Callable[[int, torch.Size], Kernel]

# name -> a kernel of so many input dimensions, and of a batch shape
KERNELS: dict[str, Make] = {
    "rbf": lambda d, b: RBFKernel(batch_shape=b),
    "rbf-ard": lambda d, b: ScaleKernel(RBFKernel(ard_num_dims=d, batch_shape=b), batch_shape=b),
    "scale-nested": lambda d, b: ScaleKernel(ScaleKernel(RBFKernel(batch_shape=b), batch_shape=b)),
    "matern12": lambda d, b: ScaleKernel(MaternKernel(nu=0.5, batch_shape=b), batch_shape=b),
    "matern12-ard": lambda d, b: MaternKernel(nu=0.5, ard_num_dims=d, batch_shape=b),
    "matern32": lambda d, b: MaternKernel(nu=1.5, batch_shape=b),
    "matern32-ard": lambda d, b: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=d, batch_shape=b), batch_shape=b),
    "matern52": lambda d, b: ScaleKernel(MaternKernel(nu=2.5, batch_shape=b), batch_shape=b),
    "matern52-ard": lambda d, b: MaternKernel(nu=2.5, ard_num_dims=d, batch_shape=b),
    "rq": lambda d, b: ScaleKernel(RQKernel(batch_shape=b), batch_shape=b),
    "rq-ard": lambda d, b: RQKernel(ard_num_dims=d, batch_shape=b),
    "periodic": lambda d, b: ScaleKernel(PeriodicKernel(batch_shape=b), batch_shape=b),
    "periodic-ard": lambda d, b: PeriodicKernel(ard_num_dims=d, batch_shape=b),
    "laplace": lambda d, b: ScaleKernel(LaplaceKernel(batch_shape=b), batch_shape=b),
    "laplace-ard": lambda d, b: LaplaceKernel(ard_num_dims=d, batch_shape=b),
    "constant": lambda d, b: ScaleKernel(ConstantKernel(batch_shape=b), batch_shape=b),
    "sum": lambda d, b: (
        ScaleKernel(RQKernel(batch_shape=b), batch_shape=b)
        + ScaleKernel(RBFKernel(ard_num_dims=d, batch_shape=b), batch_shape=b)
        + ConstantKernel(batch_shape=b)
    ),
    "product": lambda d, b: ScaleKernel(
        MaternKernel(nu=1.5, batch_shape=b)
        * MaternKernel(nu=2.5, ard_num_dims=d, batch_shape=b)
        * RQKernel(batch_shape=b),
        batch_shape=b,
    ),
    "multiplied-out": lambda d, b: (
        (ScaleKernel(MaternKernel(nu=0.5, batch_shape=b), batch_shape=b) + LaplaceKernel(batch_shape=b))
        * ScaleKernel(RBFKernel(ard_num_dims=d, batch_shape=b) + ConstantKernel(batch_shape=b), batch_shape=b)
    ),
    "gaussians": lambda d, b: RBFKernel(batch_shape=b) * ScaleKernel(RBFKernel(ard_num_dims=d, batch_shape=b)),
    "laplaces": lambda d, b: LaplaceKernel(batch_shape=b) * LaplaceKernel(ard_num_dims=d, batch_shape=b),
    "rbf-times-periodic": lambda d, b: ScaleKernel(RBFKernel(batch_shape=b) * PeriodicKernel(batch_shape=b)),
    "rbf-squared": lambda d, b: ScaleKernel(twice(RBFKernel(ard_num_dims=d, batch_shape=b))),
    "rq-squared": lambda d, b: twice(ScaleKernel(RQKernel(batch_shape=b))),
    "one-kernel-in-two-terms": lambda d, b: (
        lambda k: k * RQKernel(batch_shape=b) + ScaleKernel(k, batch_shape=b) + k * LaplaceKernel(batch_shape=b)
    )(MaternKernel(nu=2.5, batch_shape=b)),
}
# every profile, with one lengthscale or several, and every way to combine them; the others differ in values alone
FORMS = ["rbf", "rbf-ard", "matern12", "matern12-ard", "matern32", "matern52-ard", "rq", "periodic-ard", "laplace-ard",
         "constant", "sum", "product", "multiplied-out", "rq-squared", "one-kernel-in-two-terms"]  # fmt: skip
OF_EACH_FORM = ["rbf-ard", "matern12", "rq", "periodic", "laplace-ard", "constant", "sum", "multiplied-out"]

# kernels of three input dimensions that select some of them, at every level and out of order
SELECTING: dict[str, Callable[[], Kernel]] = {
    "select-leaf": lambda: RBFKernel(active_dims=(2, 0), ard_num_dims=2),
    "select-under-scale": lambda: ScaleKernel(MaternKernel(nu=1.5, active_dims=(2, 1), ard_num_dims=2)),
    "select-scale": lambda: ScaleKernel(MaternKernel(nu=1.5, active_dims=(1,)), active_dims=(2, 0)),
    "select-sum": lambda: (
        ScaleKernel(RBFKernel(active_dims=(1,)))
        + RQKernel(active_dims=(2, 0), ard_num_dims=2)
        + LaplaceKernel(active_dims=(2, 1), ard_num_dims=2)
    ),
    "select-product": lambda: (
        RBFKernel(active_dims=(2,)) * RBFKernel(active_dims=(1, 0), ard_num_dims=2) * PeriodicKernel(active_dims=(0,))
    ),
    "select-within-a-selection": lambda: ScaleKernel(
        RBFKernel(active_dims=(1,)) + MaternKernel(nu=0.5, active_dims=(0,)), active_dims=(2, 0)
    ),
    "select-within-a-selection-in-a-sum": lambda: (
        ScaleKernel(RQKernel())
        + ScaleKernel(
            RBFKernel(active_dims=(1,)) * LaplaceKernel(active_dims=(0,)) + MaternKernel(nu=1.5, active_dims=(0,)),
            active_dims=(2, 0),
        )
    ),
    "select-one-kernel-on-two-selections": lambda: RQKernel(active_dims=(0,)) * RQKernel(active_dims=(2,)),
}


def make(name: str, d: int = 3, batch: torch.Size = NO_BATCH, seed: int = 0) -> Kernel:
    """The kernel called ``name``, of ``KERNELS`` or ``SELECTING``, in float64."""
    kernel = SELECTING[name]() if name in SELECTING else KERNELS[name](d, batch)
    return spread(kernel, seed)


def error(found: Tensor, expected: Tensor) -> float:
    return relative(found.double(), expected)


def check_values(kernel: Kernel, x: Tensor, z: Tensor | None, limit: float = 1e-12, engine: str = "tiled") -> None:
    """Products with one and more vectors, the transposed product, the dense matrix, columns and a block."""
    wanted = reference(copy.deepcopy(kernel).double(), x, x if z is None else z).detach()
    operator = KernelMatrix.of(kernel, x, z, engine=engine)
    assert operator.shape == wanted.shape
    n, m = wanted.shape[-2:]
    for t in (1, 3, 16):
        rhs = normal(*wanted.shape[:-2], m, t, seed=t, dtype=operator.dtype)
        product = operator @ rhs
        assert product.dtype == operator.dtype
        assert error(product, wanted @ rhs.double()) < limit
    rhs = normal(n, 2, seed=7, dtype=operator.dtype)
    assert error(operator.mT @ rhs, wanted.mT @ rhs.double()) < limit
    assert error(operator.to_dense(), wanted) < limit
    rows, columns = torch.tensor([n // 3, 0, n - 1, n // 3]), torch.tensor([m - 1, m // 3, m // 2])
    assert error(operator.columns(columns), wanted[..., columns]) < limit
    assert error(operator.block(rows, columns), wanted[..., rows, :][..., columns]) < limit
    if z is None:
        assert error(operator.diagonal(), wanted.diagonal(dim1=-2, dim2=-1)) < limit


# --- values -----------------------------------------------------------------------------------------------------


@each("name", [*KERNELS, *SELECTING])
def test_the_reference_is_what_gpytorch_computes(name):
    kernel, x, z = make(name), points(20), points(15, seed=1)
    centre = x.mean(dim=0)
    assert relative(reference(kernel, x, z), kernel(x - centre, z - centre).to_dense()) < 1e-12
    assert relative(reference(kernel, x, x), kernel(x).to_dense()) < 1e-7  # its distances are at least 1e-15


@each(("name", "d"), [*((name, 3) for name in KERNELS), *zip(FORMS, [1, 20] * 8, strict=False)])
def test_values(name, d, many_tiles):
    kernel, x = make(name, d, seed=d), points(30, d, seed=d)
    for z in (None, points(17, d, seed=9), x.clone()):
        check_values(kernel, x, z)


@each("name", FORMS)
def test_values_in_one_tile(name):
    for d in (1, 3):
        check_values(make(name, d), points(70, d), None)
        check_values(make(name, d), points(30, d), points(41, d, seed=9))


@each("name", SELECTING)
def test_active_dimensions(name, many_tiles):
    check_values(make(name), points(70), None)
    check_values(make(name), points(70), points(41, seed=9))


def test_active_dimensions_of_a_sum():
    kernel = make("sum", 2)
    kernel.active_dims = torch.tensor([2, 0])  # of the sum itself
    check_values(kernel, points(30), None)
    check_values(kernel, points(30), points(11, seed=9))


@each("d", [7, 8, 63, 64])
@each("name", ["laplace-ard", "multiplied-out"])
def test_l1_distances_of_any_number_of_features(name, d, many_tiles):
    check_values(make(name, d), points(50, d), None)
    check_values(make(name, d), points(50, d), points(31, d, seed=9))


@each(
    ("name", "batch"),
    [*((name, "both") for name in FORMS), *((name, "crossed") for name in OF_EACH_FORM),
     *((name, batch) for name in OF_EACH_FORM for batch in ("kernels", "inputs", "left inputs"))],
)  # fmt: skip
def test_batches(name, batch, many_tiles):
    kernel = make(name, 3, BATCH if batch in ("kernels", "both") else NO_BATCH)
    x, z = points(27), points(18, seed=9)
    if batch in ("inputs", "both"):
        x, z = points(54).reshape(2, 27, 3), points(36, seed=9).reshape(2, 18, 3)
    elif batch == "crossed":  # a (2, 1) batch of kernels and three sets of inputs
        kernel = make(name, 3, torch.Size([2, 1]))
        x, z = points(81).reshape(3, 27, 3), points(54, seed=9).reshape(3, 18, 3)
    elif batch == "left inputs":
        x = points(54).reshape(2, 27, 3)
    for right in (None, z):
        wanted = reference(kernel, x, x if right is None else right).detach()
        operator = KernelMatrix.of(kernel, x, right, engine="tiled")
        size = operator.shape[-1]
        assert operator.shape == wanted.shape
        assert relative(operator.to_dense(), wanted) < 1e-12
        for shape in ((size, 3), (*wanted.shape[:-2], size, 3), (5, *wanted.shape[:-2], size, 1)):
            rhs = normal(*shape, seed=3)
            assert relative(operator @ rhs, wanted @ rhs) < 1e-12
        picked = torch.tensor([3, 0, 11])
        assert relative(operator.columns(picked), wanted[..., picked]) < 1e-12
        several = torch.stack([picked + i for i in range(wanted.shape[:-2].numel())]).reshape(*wanted.shape[:-2], 3)
        found = wanted.gather(-1, several.unsqueeze(-2).expand(*wanted.shape[:-1], 3))
        assert relative(operator.columns(several), found) < 1e-12


def test_a_matrix_repeated_along_a_batch_is_one_matrix():
    kernel, x = make("sum"), points(40)
    operator = KernelMatrix.of(kernel, x.expand(3, 40, 3)).detach()
    wanted, rhs = reference(kernel, x, x), normal(3, 40, 2)
    assert relative(operator._matmul(rhs), wanted @ rhs) < 1e-12
    assert relative(operator._matmul(2 * rhs), wanted @ (2 * rhs)) < 1e-12
    single = operator.pairs.remember("the repeated matrix", lambda: None)
    assert single.shape == (40, 40)
    assert DENSE.holds(single)  # and it is evaluated once, not for each product
    with torch.no_grad():
        kernel.kernels[0].raw_outputscale.add_(1.0)
    assert relative(operator._matmul(rhs), reference(kernel, x, x) @ rhs) < 1e-12


@each("name", [*FORMS, "select-sum", "select-product"])
def test_far_from_the_origin(name, many_tiles):
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        kernel, x = make(name).to(dtype), points(45, shift=1e4, dtype=dtype)
        check_values(kernel, x, None, limit)
    check_values(kernel, x, points(31, shift=1e4, seed=9, dtype=dtype), limit)


@each("name", FORMS)
def test_values_in_float32(name, many_tiles):
    kernel, x = make(name, 20).float(), points(45, 20, dtype=torch.float32)
    for z in (None, points(31, 20, seed=9, dtype=torch.float32)):
        check_values(kernel, x, z, 1e-5)


@each("lengthscale", [1e-1, 1e-3])
@each("d", [1, 2])
@each("name", ["rbf", "matern12", "matern32", "matern52", "rq", "laplace"])
def test_short_lengthscales_in_float32(name, d, lengthscale):
    """In one and two dimensions no distance is a difference of large numbers: what is left is the rounding of the
    inputs divided by the lengthscale, 3e-8 / lengthscale."""
    limit = 1e-5 if lengthscale > 1e-3 else 4e-5
    kernel = make(name, d).float()
    next(k for k in kernel.modules() if isinstance(k, Kernel) and k.has_lengthscale).lengthscale = lengthscale
    x = points(300, d, dtype=torch.float32)
    check_values(kernel, x, None, limit)
    near = x[:200] + lengthscale * normal(200, d, dtype=torch.float32)
    check_values(kernel, x, near, limit)


@each("shift", [0.0, 1e3])
@each("d", [1, 2])
def test_many_periods_in_float32(d, shift):
    """A thousand turns of the angle leave its fraction as many digits as the inputs have."""
    kernel = make("periodic").float()
    kernel.base_kernel.period_length = 1e-3
    twin = copy.deepcopy(kernel).double()
    twin.base_kernel.period_length = kernel.base_kernel.period_length.double()  # as it is rounded
    x, z = (points(n, d, seed=n, shift=shift, dtype=torch.float32) for n in (80, 40))
    for right in (None, z):
        found = KernelMatrix.of(kernel, x, right, engine="tiled").to_dense()
        assert error(found, reference(twin, x, x if right is None else right)) < 1e-5


@pytest.mark.parametrize(
    ("name", "lengthscale", "apart"),
    pairwise(["matern12-ard", "multiplied-out"], [1.0, 0.05], [1e-2, 1e-4, 1e-6, 0.0]),
)
def test_near_duplicates_under_the_matern12_kernel(name, lengthscale, apart, many_tiles):
    """The slope at 0 would turn errors eps of squared distances into sqrt(eps)."""
    kernel = make(name, 5).float()
    # the Gaussian kernel's distances keep errors eps |a|^2, here 500 eps, which no kink makes larger
    limit = 1e-5 if name == "matern12-ard" or lengthscale == 1.0 else 5e-5
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.has_lengthscale:
            part.lengthscale = lengthscale
    x = points(60, 5)
    x = torch.cat([x, x + apart * normal(60, 5)]).float()
    check_values(kernel, x, None, limit)
    check_values(kernel, x, x[30:90].clone(), limit)
    for inputs in (x, torch.stack([x, 0.5 * x])):
        wanted = reference(copy.deepcopy(kernel).double(), inputs, inputs).detach()
        for right in (None, inputs.clone()):
            found = KernelMatrix.of(kernel, inputs, right, engine="tiled").to_dense()
            assert float((found - wanted).detach().abs().max() / wanted.max()) < limit


@each("name", [*FORMS, "select-sum", "select-product"])
def test_the_variance_of_every_point_is_the_same(name, many_tiles):
    """Rounding errors of distances stay off the diagonal, of the matrix and of columns and blocks of it."""
    d = 3 if name in SELECTING else 20
    operator = KernelMatrix.of(make(name, d).float(), points(50, d, dtype=torch.float32), engine="tiled").detach()
    diagonal = operator.to_dense().diagonal()
    assert (diagonal == diagonal[0]).all()
    picked = torch.tensor([4, 49, 0, 17])
    assert (operator.columns(picked)[picked, torch.arange(4)] == diagonal[0]).all()
    assert (operator.block(picked, picked.flip(0)).flip(1).diagonal() == diagonal[0]).all()
    expected = reference(make(name, d), points(1, d), points(1, d))
    assert float(diagonal[0]) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_the_diagonal_of_a_tile_that_begins_left_of_it():
    """As the rows of a rank do; every entry beside the diagonal keeps its distance."""
    kernel, x = make("matern12"), points(30)
    operator = KernelMatrix.of(kernel, x, engine="tiled").detach()
    made = FastTiles(operator.expression, operator.pairs.prepared(), (30, 30), 0)
    for rows, columns in ((slice(7, 30), slice(0, 25)), (slice(4, 22), slice(9, 30))):
        assert relative(made.tile(rows, columns) * made.outputscale, reference(kernel, x, x)[rows, columns]) < 1e-12


def test_near_pairs_are_few_at_short_lengthscales(many_tiles):
    """Pairs whose covariance is nothing need no exact distance; all of them take twenty times as long."""
    kernel = MaternKernel(nu=0.5)
    kernel.lengthscale = 0.03
    x = points(300, 5, dtype=torch.float32)
    operator = KernelMatrix.of(kernel, x, engine="tiled").detach()
    distances = Distances(operator.expression.atoms[0].profile, operator.pairs.prepared().features[0])
    everything = slice(0, 300)
    distances.tile(everything, everything, torch.empty(300, 300), lambda: None)
    assert 300 <= len(distances.near[0]) < 0.05 * 300**2


@each("name", FORMS)
def test_duplicated_points_and_constant_columns(name, many_tiles):
    for d, dtype, limit in ((2, torch.float64, 1e-12), (4, torch.float32, 1e-5)):
        kernel, x = make(name, d).to(dtype), points(15, d).repeat(3, 1).to(dtype)
        x[:, 1] = 5.0
        check_values(kernel, x, None, limit)
        check_values(kernel, x, x[10:30].clone(), limit)


@each("n", [1, 2])
@each("name", [*OF_EACH_FORM, "select-sum", "select-product"])
def test_one_and_two_points(name, n):
    check_values(make(name), points(n), None)
    check_values(make(name), points(n), points(4, seed=9))
    check_values(make(name), points(4), points(n, seed=9))


@each("name", ["rbf-ard", "matern12", "laplace", "sum", "constant"])
def test_no_points_at_all(name):
    kernel, x = make(name), points(9)
    operator = KernelMatrix.of(kernel, x, points(5, seed=1), engine="tiled")
    none = torch.zeros(0, dtype=torch.long)
    assert operator.columns(none).shape == (9, 0)
    assert operator.block(none, torch.arange(5)).shape == (0, 5)
    assert operator[:0].to_dense().shape == (0, 5)
    assert (operator[:0] @ normal(5, 2)).shape == (0, 2)
    assert torch.equal((operator[:, :0] @ normal(0, 2)).detach(), torch.zeros(9, 2, dtype=torch.float64))
    assert (operator @ normal(5, 0)).shape == (9, 0)
    (operator[:0] @ normal(5, 2)).sum().backward()
    (operator[:, :0] @ normal(0, 2)).sum().backward()
    assert all(not parameter.grad.any() for parameter in kernel.parameters())


@each("name", FORMS)
def test_a_nan_is_not_lost(name, many_tiles):
    for d in (1, 3):
        x = points(40, d)
        x[7, -1] = float("nan")
        if name == "constant":
            continue  # looks at no input
        kernel = make(name, d)
        square, right = KernelMatrix.of(kernel, x), KernelMatrix.of(kernel, points(30, d), x)
        assert (square @ torch.ones(40, 1, dtype=torch.float64)).isnan().all()
        assert (right @ torch.ones(40, 1, dtype=torch.float64)).isnan().all()
        bad = (right.mT @ torch.ones(30, 1, dtype=torch.float64)).isnan().flatten()
        assert bad.nonzero().flatten().tolist() == [7]  # and the other rows are as they would be without it
        bad = KernelMatrix.of(kernel, x, points(30, d)) @ torch.ones(30, 1, dtype=torch.float64)
        assert bad.isnan().flatten().nonzero().flatten().tolist() == [7]
        tensors = {n: p for n, p in kernel.named_parameters() if "constant" not in n}
        found = torch.autograd.grad(square.to_dense().sum(), list(tensors.values()))
        assert all(gradient.isnan().any() for gradient in found)


# --- gradients --------------------------------------------------------------------------------------------------


def gradients(value: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(value, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


THROUGH = ("product", "batch of products", "to_dense", "columns", "block", "bilinear")


def check_gradients(
    kernel: Kernel, x: Tensor, z: Tensor | None, through: str, inputs: bool, limit: float = 1e-10
) -> None:
    """The gradient of one number for the parameters and, with ``inputs``, for x and z, against the reference."""
    twin = copy.deepcopy(kernel).double()
    exact_x, exact_z = x.double(), None if z is None else z.double()
    if inputs:
        x, exact_x = x.clone().requires_grad_(True), exact_x.clone().requires_grad_(True)
        if z is not None and exact_z is not None:
            z, exact_z = z.clone().requires_grad_(True), exact_z.clone().requires_grad_(True)
    operator = KernelMatrix.of(kernel, x, z, engine="tiled")
    matrix = reference(twin, exact_x, exact_x if exact_z is None else exact_z)
    *batch, n, m = matrix.shape
    tensors = [*kernel.parameters(), *([x] if inputs else []), *([z] if inputs and z is not None else [])]
    exact = [*twin.parameters(), *([exact_x] if inputs else []), *([exact_z] if inputs and z is not None else [])]
    dtype, rows, columns = operator.dtype, torch.arange(0, n, 3), torch.arange(0, m, 4)
    more = (3,) if through == "batch of products" else ()
    left, right = (normal(*more, *batch, size, 2, seed=size, dtype=dtype) for size in (n, m))
    if through == "bilinear":  # by the operator's own tensors: x1, x2 and the parameters
        found = [g for g in operator._bilinear_derivative(left, right) if g is not None]
        names = {id(p): g for p, g in zip(operator.parameters, found[len(found) - len(operator.parameters) :])}  # noqa: B905
        found = [*(names[id(p)] for p in kernel.parameters()), *found[: len(found) - len(operator.parameters)]]
        found = found[: len(tensors)]  # where x1 is x2, the first gradient is that of both
        value = (left.double() * (matrix @ right.double())).sum()
    else:
        if through == "to_dense":
            part, whole = operator.to_dense(), matrix
        elif through == "columns":
            part, whole = operator.columns(columns), matrix[..., columns]
        elif through == "block":
            part, whole = operator.block(rows, columns), matrix[..., rows, :][..., columns]
        else:
            part, whole = left * (operator @ right), left.double() * (matrix @ right.double())
        weights = torch.ones_like(part) if "product" in through else normal(*part.shape, seed=5, dtype=dtype)
        found = gradients((part * weights).sum(), tensors)
        value = (whole * weights.double()).sum()
    for tensor, gradient, wanted in zip(tensors, found, gradients(value, exact), strict=True):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape
        assert relative(gradient, wanted) < limit


@each(
    ("name", "d", "inputs"),
    [*((name, 3, True) for name in FORMS), *zip(FORMS, [1, 3] * 8, [True, False] * 8, strict=False),
     *((name, 20, True) for name in OF_EACH_FORM)],
)  # fmt: skip
def test_gradients(name, d, inputs, many_tiles):
    kernel, x = make(name, d), points(30, d)
    for z in (None, points(17, d, seed=9)):
        check_gradients(kernel, x, z, "product", inputs)
        check_gradients(kernel, x, z, "to_dense", inputs)
    if d <= 3:  # with 20 features, covariances other than those of equal points are below 1e-5
        check_gradients(kernel, x, x.clone(), "product", inputs)


WAYS = ["rbf-ard", "matern12-ard", "matern32", "rq", "laplace-ard", "sum", "multiplied-out"]


@each(
    ("name", "through"),
    [(name, list(THROUGH)[(i + j) % len(THROUGH)]) for i, name in enumerate(WAYS) for j in range(2)],
)
def test_every_way_to_a_gradient(name, through, many_tiles):
    for inputs in (False, True):
        for z in (None, points(31, 3, seed=9)):
            check_gradients(make(name), points(50), z, through, inputs)


@each("name", SELECTING)
def test_gradients_with_active_dimensions(name, many_tiles):
    for inputs in (False, True):
        for z in (None, points(31, seed=9)):
            check_gradients(make(name), points(50), z, "product", inputs)


@pytest.mark.parametrize("d", [8, 16, 64])
def test_gradients_of_l1_distances_of_many_features(d, many_tiles):
    for inputs in (False, True):
        for z in (None, points(31, d, seed=9)):
            check_gradients(make("laplace-ard", d), points(40, d), z, "product", inputs)
            check_gradients(make("laplaces", d), points(40, d), z, "product", inputs)


@each(
    ("name", "batch"),
    [*((name, "both") for name in FORMS),
     *((name, batch) for name in OF_EACH_FORM for batch in ("kernels", "inputs"))],
)  # fmt: skip
def test_gradients_of_batches(name, batch, many_tiles):
    kernel = make(name, 3, NO_BATCH if batch == "inputs" else BATCH)
    x, z = points(27), points(14, seed=9)
    if batch != "kernels":
        x, z = points(54).reshape(2, 27, 3), points(28, seed=9).reshape(2, 14, 3)
    for inputs in (False, True):
        check_gradients(kernel, x, None, "product", inputs)
        check_gradients(kernel, x, z, "batch of products", inputs)
    check_gradients(kernel, x, z, "to_dense", True)


@each("name", FORMS)
def test_gradients_of_two_tensors_of_equal_points(name, many_tiles):
    """Each of them gets its own part, though the matrix is known to be symmetric."""
    kernel = make(name)
    x, z = points(40).requires_grad_(True), points(40).requires_grad_(True)
    operator = KernelMatrix.from_lazy(kernel(x, z), engine="tiled")
    assert operator.same
    tensors, left, right = [*kernel.parameters(), x, z], normal(40, 2), normal(40, 2, seed=1)
    found = gradients((left * (operator @ right)).sum(), tensors)
    exact = gradients((left * (reference(kernel, x, z) @ right)).sum(), tensors)
    for gradient, wanted in zip(found, exact, strict=True):
        assert relative(gradient, wanted) < 1e-10


@each("inputs", [False, True], ids=["parameters", "inputs"])
@each("batch", [(), (3,), (2, 1)])
@each("name", ["matern12", "laplace", "sum"])
def test_gradients_of_a_repeated_matrix(name, batch, inputs, many_tiles):
    """A batch that is one matrix over and over is one matrix with more columns; not so under a batch of kernels."""
    kernel = make(name, 3, torch.Size(batch))
    base, other = points(40).requires_grad_(inputs), points(23, seed=9).requires_grad_(inputs)
    x, z = base.expand(2, 3, 40, 3), other.expand(2, 3, 23, 3)
    for right, tensor in ((None, base), (z, other)):
        tensors = [*kernel.parameters(), *([base, tensor] if inputs else [])]
        size = 40 if right is None else 23
        a, b = normal(2, 3, 40, 2), normal(2, 3, size, 2, seed=1)
        found = gradients((a * (KernelMatrix.of(kernel, x, right, engine="tiled") @ b)).sum(), tensors)
        exact = gradients((a * (reference(kernel, base, tensor) @ b)).sum(), tensors)
        for gradient, wanted in zip(found, exact, strict=True):
            assert relative(gradient, wanted) < 1e-11


@each(("d", "inputs"), [(2, False), (17, True)])
@each("name", FORMS)
def test_gradients_in_float32(name, d, inputs, many_tiles):
    kernel = make(name, d).float()
    x, z = points(45, d, shift=10.0, dtype=torch.float32), points(31, d, shift=10.0, seed=9, dtype=torch.float32)
    check_gradients(kernel, x, None, "product", inputs, 3e-4)
    check_gradients(kernel, x, z, "product", inputs, 3e-4)


@each("name", [k for k in FORMS if k != "constant"])
def test_gradients_of_duplicated_points(name, many_tiles):
    """At distance 0 kernels with a kink have the slope 0, whichever way the distance was found."""
    x = points(25, 3).repeat(2, 1)
    for inputs in (False, True):
        check_gradients(make(name), x, None, "product", inputs)
        check_gradients(make(name), x, x[10:40].clone(), "product", inputs)
        check_gradients(make(name), x, None, "columns", inputs)
        check_gradients(make(name).float(), x.float(), None, "product", inputs, 3e-4)


@pytest.mark.parametrize(("batch", "apart"), [(False, 1e-3), (True, 1e-3), (False, 1e-5), (True, 1e-7)])
def test_gradients_of_near_duplicates_under_the_matern12_kernel(batch, apart, many_tiles):
    """Its slope is 1/s: sums over pairs that are close would consist of rounding errors."""
    x = points(60, 5)
    x = torch.cat([x, x + apart * normal(60, 5)]).float()
    x = torch.stack([x, 0.8 * x]) if batch else x
    for name in ("matern12", "matern12-ard", "multiplied-out"):
        kernel = make(name, 5, BATCH if batch else NO_BATCH).float()
        check_gradients(kernel, x, None, "product", False, 3e-4)
        check_gradients(kernel, x, x.flip(-2).clone(), "product", False, 3e-4)
        if apart > 1e-4:  # the direction from one point to the other has as many digits as its coordinates left
            check_gradients(kernel, x, None, "product", True, 3e-4)
            check_gradients(kernel, x, x.flip(-2).clone(), "product", True, 3e-4)


def test_near_pairs_in_parts(monkeypatch, many_tiles):
    monkeypatch.setattr("sketchgp.operators.fast_tiles._PAIRS", 12)
    x = points(20, 5).repeat(2, 1)
    check_values(make("matern12-ard", 5), x, None)
    check_gradients(make("matern12-ard", 5), x, None, "product", False)
    check_gradients(make("matern12-ard", 5), x, None, "product", True)


def test_only_what_needs_a_gradient_gets_one():
    kernel, x = make("multiplied-out"), points(30)
    first, *others = kernel.parameters()
    for parameter in others:
        parameter.requires_grad_(False)
    operator = KernelMatrix.of(kernel, x)
    found = operator._bilinear_derivative(normal(30, 2), normal(30, 2, seed=1))
    assert [g is not None for g in found] == [t.requires_grad for t in operator.representation()]
    wanted = (normal(30, 2) * (reference(kernel, x, x) @ normal(30, 2, seed=1))).sum()
    index = next(i for i, t in enumerate(operator.representation()) if t is first)
    assert relative(found[index], torch.autograd.grad(wanted, first)[0]) < 1e-12
    assert operator.detach()._bilinear_derivative(normal(30), normal(30)) == (None,) * len(operator.representation())


@each("wanted", ["outputscale", "lengthscale", "x1", "x2"])
@each("name", ["rbf-ard", "matern12", "rq", "laplace"])
def test_one_gradient_alone(name, wanted, many_tiles):
    kernel, x, z = make(name), points(40), points(23, seed=9)
    for parameter in kernel.parameters():
        parameter.requires_grad_(False)
    if wanted in ("outputscale", "lengthscale"):
        tensor = (
            kernel.raw_outputscale if wanted == "outputscale" and name != "rbf" else kernel.base_kernel.raw_lengthscale
        )
        tensor.requires_grad_(True)
    else:
        tensor = (x if wanted == "x1" else z).requires_grad_(True)
    left, right = normal(40, 2), normal(23, 2)
    found = torch.autograd.grad((left * (KernelMatrix.of(kernel, x, z) @ right)).sum(), tensor)[0]
    exact = torch.autograd.grad((left * (reference(kernel, x, z) @ right)).sum(), tensor)[0]
    assert relative(found, exact) < 1e-12


def test_second_derivatives_are_refused():
    """A backward pass by tiles has no derivative of its own, which autograd must not take for zero."""
    kernel = make("rbf")
    value = KernelMatrix.of(kernel, points(9)).to_dense().square().sum()
    (gradient,) = torch.autograd.grad(value, [kernel.raw_lengthscale], create_graph=True)
    with pytest.raises(RuntimeError, match="Second derivatives"):
        (gradient.sum() + value).backward()


def test_parameters_in_float32_of_inputs_in_float64():
    """Lengthscales are taken to float64 before anything is divided by them, as GPyTorch does it."""
    kernel = make("rbf-ard").float()
    operator = KernelMatrix.of(kernel, points(30))
    assert operator.dtype == torch.float64
    with torch.no_grad():
        assert relative(operator.to_dense(), kernel(points(30)).to_dense()) < 1e-14


# --- one kernel object twice, and what a product leaves behind --------------------------------------------------


@pytest.mark.parametrize("name", ["rbf-squared", "rq-squared", "one-kernel-in-two-terms"])
def test_the_users_kernel_is_left_as_it_was(name):
    kernel, x = make(name), points(30)
    before = [(m, key, id(p), p.detach().clone()) for m in kernel.modules() for key, p in m._parameters.items()]
    operator = KernelMatrix.of(kernel, x, engine="tiled")
    (operator @ normal(30, 2)).sum().backward()
    operator.columns(torch.arange(3)).sum().backward()
    operator.type(torch.float32).detach() @ normal(30, 1, dtype=torch.float32)
    for module, key, number, value in before:
        assert id(module._parameters[key]) == number
        assert torch.equal(module._parameters[key], value)
    assert kernel(x).to_dense().dtype == torch.float64


# --- what is recognised -----------------------------------------------------------------------------------------


def _shape(kernel: Kernel) -> tuple[list[str], list[tuple[int, ...]], list[int], list[int]] | None:
    """Names and numbers of leaves of the atoms, the terms and the numbers of their scales."""
    found = recognise(kernel)
    if found is None:
        return None
    names = [atom.profile.name for atom in found.atoms]
    leaves = [len(atom.leaves) for atom in found.atoms]
    return names, list(found.terms), leaves, [len(scales) for scales in found.scales]


RECOGNISED = {
    "rbf-ard": (["gauss"], [(0,)], [1], [1]),
    "scale-nested": (["gauss"], [(0,)], [1], [2]),
    "matern12": (["matern12"], [(0,)], [1], [1]),
    "matern32": (["matern32"], [(0,)], [1], [0]),
    "matern52": (["matern52"], [(0,)], [1], [1]),
    "rq": (["rational_quadratic"], [(0,)], [1], [1]),
    "periodic": (["gauss"], [(0,)], [1], [1]),
    "laplace": (["laplace"], [(0,)], [1], [1]),
    "constant": ([], [()], [], [2]),
    "sum": (["rational_quadratic", "gauss"], [(0,), (1,), ()], [1, 1], [1, 1, 1]),
    "product": (["matern32", "matern52", "rational_quadratic"], [(0, 1, 2)], [1, 1, 1], [1]),
    "multiplied-out": (
        ["gauss", "matern12", "laplace"],
        [(0, 1), (1,), (0, 2), (2,)],
        [1, 1, 1],
        [2, 3, 1, 2],
    ),
    "gaussians": (["gauss"], [(0,)], [2], [1]),
    "laplaces": (["laplace"], [(0,)], [2], [0]),
    "rbf-times-periodic": (["gauss"], [(0,)], [2], [1]),
    "rbf-squared": (["gauss"], [(0,)], [2], [1]),
    "rq-squared": (["rational_quadratic"], [(0, 0)], [1], [2]),
    "one-kernel-in-two-terms": (
        ["matern52", "rational_quadratic", "laplace"],
        [(0, 1), (0,), (0, 2)],
        [1, 1, 1],
        [0, 1, 0],
    ),
}


@each("name", RECOGNISED)
def test_recognised(name):
    assert _shape(make(name)) == RECOGNISED[name]


def test_the_same_kernel_on_other_dimensions_is_another_atom():
    kernel = RQKernel()
    expression = recognise(ScaleKernel(kernel, active_dims=(0,)) * ScaleKernel(kernel, active_dims=(1,)))
    assert [atom.leaves[0].dims for atom in expression.atoms] == [(0,), (1,)]


class _Subclass(RBFKernel):
    """Might compute something else."""


class _OwnMatern(MaternKernel):
    pass


class _OwnRQ(RQKernel):
    pass


class _OwnScale(ScaleKernel):
    pass


class _OwnLaplace(LaplaceKernel):
    pass


class Triangle(Kernel):
    """A kernel of a user's own, with a lengthscale and a parameter that is a plain torch one."""

    has_lengthscale = True

    def __init__(self, **options):
        super().__init__(**options)
        self.register_parameter("power", torch.nn.Parameter(torch.tensor(2.0)))

    def forward(self, x1, x2, diag=False, **params):
        return (-self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, square_dist=True)).exp() ** (
            self.power
        )


class Deep(Kernel):
    """A network in front of a kernel."""

    def __init__(self, base: Kernel) -> None:
        super().__init__()
        self.base = base
        self.network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, x1, x2, diag=False, **params):
        return self.base(self.network(x1), self.network(x2), diag=diag, **params)


def _mixture() -> Kernel:
    kernel = SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3)
    torch.manual_seed(1)
    for parameter in kernel.parameters():
        parameter.data.uniform_(-1, 1)
    return kernel


def _seventeen() -> Kernel:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3))
    for _ in range(16):
        kernel = kernel + ScaleKernel(RQKernel())
    return spread(kernel)


def _many_terms_of_one_kernel() -> Kernel:
    base = RBFKernel(ard_num_dims=3)
    return spread(AdditiveKernel(*(ScaleKernel(base) for _ in range(17))))


UNRECOGNISED: dict[str, Callable[[], Kernel]] = {
    "subclass": lambda: ScaleKernel(_Subclass()),
    "subclass-in-a-sum": lambda: RBFKernel() + _OwnMatern(nu=1.5),
    "subclass-of-rq": lambda: ScaleKernel(_OwnRQ()),
    "subclass-of-scale": lambda: _OwnScale(RBFKernel()),
    "subclass-of-laplace": lambda: _OwnLaplace(),
    "cosine": lambda: ScaleKernel(CosineKernel()),
    "cosine-in-a-product": lambda: RBFKernel() * CosineKernel(),
    "polynomial": lambda: PolynomialKernel(power=2),
    "linear-plus-rbf": lambda: ScaleKernel(RBFKernel()) + PolynomialKernel(power=1),
    "spectral-mixture": _mixture,
    "own": lambda: ScaleKernel(Triangle()),
    "deep": lambda: ScaleKernel(Deep(ScaleKernel(RBFKernel(ard_num_dims=2)))),
    "seventeen-terms": _seventeen,
    "seventeen-terms-of-one-kernel": _many_terms_of_one_kernel,
    "product-of-sums": lambda: spread(
        math.prod((ScaleKernel(RBFKernel()) + RQKernel() for _ in range(5)), start=ConstantKernel())
    ),
}


@pytest.mark.parametrize("name", UNRECOGNISED)
def test_unrecognised_kernels_are_called(name, many_tiles):
    kernel = UNRECOGNISED[name]().double()
    assert recognise(kernel) is None
    x, z = points(50), points(31, seed=9)
    for right in (None, z):
        wanted = kernel(x, right).to_dense()
        size = wanted.shape[-1]
        operator = KernelMatrix.of(kernel, x, right, engine="tiled")
        assert operator.expression is None
        assert relative(operator @ normal(size, 3), wanted @ normal(size, 3)) < 1e-11
        assert relative(operator.columns(torch.arange(4)), wanted[:, :4]) < 1e-11
        for inputs in (False, True):
            a, b = (None if t is None else t.clone().requires_grad_(inputs) for t in (x, right))
            tensors = [*kernel.parameters(), *(t for t in (a, b) if inputs and t is not None)]
            left, vectors = normal(50, 2), normal(size, 2, seed=1)
            found = gradients((left * (KernelMatrix.of(kernel, a, b, engine="tiled") @ vectors)).sum(), tensors)
            exact = gradients((left * (kernel(a, b).to_dense() @ vectors)).sum(), tensors)
            for gradient, expected in zip(found, exact, strict=True):  # some are nothing but rounding errors
                assert float((gradient - expected).norm()) < 1e-9 * float(expected.norm()) + 1e-12


def test_a_linear_kernel_in_a_product_is_called():
    kernel, x = (LinearKernel() * RBFKernel()).double(), points(5)
    assert recognise(kernel) is None
    wanted = (x @ x.mT) * kernel.kernels[0].variance * kernel.kernels[1](x).to_dense()
    assert relative(KernelMatrix.of(kernel, x).to_dense(), wanted) < 1e-12


def test_sixteen_terms_are_fast():
    kernel = ScaleKernel(RBFKernel())
    for _ in range(15):
        kernel = kernel + ScaleKernel(RQKernel())
    spread(kernel)
    assert len(recognise(kernel).terms) == 16
    check_values(kernel, points(20), None)
    check_gradients(kernel, points(20), None, "product", False)


# --- linear_operator's own cases --------------------------------------------------------------------------------


class _Square(LinearOperatorTestCase):
    seed = 0
    should_test_sample = True
    make: Callable[[], Kernel]

    def create_linear_op(self):
        return KernelMatrix.of(self.make(), separate(6), engine="tiled")

    def evaluate_linear_op(self, linear_op):
        return evaluate(linear_op)

    def test_bilinear_derivative(self):
        check_bilinear_derivative(self, self.create_linear_op())  # see test_kernel_matrix.py


def _separated(kernel: Kernel) -> Kernel:
    """With lengthscales for which no two eigenvalues are so near that rounding mixes their eigenvectors."""
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.has_lengthscale:
            part.lengthscale = 0.8
    return kernel


class TestSquareBatchOfSums(_Square, unittest.TestCase):
    """A batch of kernels, each a sum of a rational quadratic kernel and a constant."""

    def create_linear_op(self):
        kernel = ScaleKernel(RQKernel(batch_shape=BATCH), batch_shape=BATCH) + ConstantKernel(batch_shape=BATCH)
        kernel.kernels[0].base_kernel.lengthscale = torch.tensor([0.2, 0.3]).view(2, 1, 1)
        kernel.kernels[0].outputscale = torch.tensor([0.7, 2.0])
        kernel.kernels[1].constant = torch.tensor([[0.1], [0.3]])
        return KernelMatrix.of(kernel, separate(5), engine="tiled")


class TestRectangularSum(RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def create_linear_op(self):
        kernel = _separated(ScaleKernel(MaternKernel(nu=2.5) * RBFKernel()) + LaplaceKernel())
        return KernelMatrix.of(kernel, separate(5), separate(7) + 0.2, engine="tiled")

    def evaluate_linear_op(self, linear_op):
        return evaluate(linear_op)


@each("dtype", [torch.float32, torch.float64])
@each("features", [1, 4, 70])
@each("name", ["rbf", "laplace", "matern12", "matern32", "matern52"])
def test_far_points_have_normal_numbers(name, features, dtype):
    """Denormal ones make CPUs take many times as long; products with vectors have some room above them."""
    kernel = {"rbf": RBFKernel, "laplace": LaplaceKernel}.get(name, lambda: MaternKernel(nu=int(name[6]) / 2))()
    ladder = torch.linspace(0, 1, 60, dtype=dtype).unsqueeze(-1).expand(-1, features)
    for lengthscale in (0.5, 1e-2, 1e-3):
        kernel.lengthscale = lengthscale
        near, apart = ladder[:30].contiguous(), ladder[30:].contiguous()
        for x, z in ((ladder.contiguous(), None), (near, apart), (apart, near)):
            found = KernelMatrix.of(kernel.to(dtype), x, z, engine="tiled").to_dense().detach()
            assert float(found.min()) > 1e8 * torch.finfo(dtype).tiny
            expected = reference(kernel, x, x if z is None else z).detach()
            assert float((found - expected).abs().max()) < 1e-3


@pytest.mark.parametrize("intel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_profiles_on_either_processor(intel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and slopes by natural exponents and roots, and in base 2 without roots."""
    monkeypatch.setattr("sketchgp.devices.by_intel", lambda: intel)
    spec = importlib.util.find_spec("sketchgp.operators.profiles")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert intel == (module.RATE == 1)
    q, a = torch.logspace(-6, 2, 50, dtype=torch.float64), 1.7
    s = q.sqrt()
    decay, power = (-s).exp(), 1 + q / (2 * a)
    expected = {
        "gauss": ((-q / 2).exp(), -(-q / 2).exp() / 2),
        "matern12": (decay, -decay / (2 * s)),
        "matern32": ((1 + s) * decay, -decay / 2),
        "matern52": ((1 + s + q / 3) * decay, -(1 + s) * decay / 6),
        "rational_quadratic": (power**-a, -(power ** (-a - 1)) / 2),
        "laplace": ((-q).exp(), -(-q).exp()),
    }
    for profile in (module.GAUSS, *module.MATERN.values(), module.RATIONAL_QUADRATIC, module.LAPLACE):
        alpha = torch.tensor(a, dtype=dtype) if profile is module.RATIONAL_QUADRATIC else None
        t = q.to(dtype) * (profile.factor if alpha is None else profile.factor / alpha)
        found, slope, _ = profile.derivative(t, torch.empty_like(t), alpha, lambda: torch.empty(50, dtype=dtype))
        values = profile.at(q.to(dtype), alpha), profile.gain * found, profile.gain * profile.slope * slope
        for value, right in zip(values, (expected[profile.name][i] for i in (0, 0, 1)), strict=True):
            assert relative(value, right) < 50 * torch.finfo(dtype).eps, profile.name

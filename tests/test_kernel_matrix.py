"""``KernelMatrix`` against dense matrices: linear_operator's own cases first, then values, gradients and memory."""

from __future__ import annotations

import unittest

import pytest
import torch
from gpytorch.kernels import (
    InducingPointKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import to_dense
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from torch.func import functional_call

from cases import each
from problems import GENERIC, RADIAL, dense, normal, points, radial, relative, set_scales
from sketchgp import InputError, settings
from sketchgp.operators import KernelMatrix
from sketchgp.operators.engines import DENSE
from sketchgp.operators.engines.tiled import Tiled

# Other libraries' warnings, which pyproject makes errors: linear_operator's about its Lanczos, torch's about sparse.
pytestmark = [
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


class _Call(torch.nn.Module):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, a, b):
        return to_dense(self.kernel.forward(a, b))


def evaluate(operator: KernelMatrix) -> torch.Tensor:
    """The dense matrix by calling the kernel once, with the operator's own tensors as inputs and parameters."""
    named = {f"kernel.{name}": value for name, value in zip(operator.pairs.names, operator.parameters, strict=True)}
    return functional_call(_Call(operator.kernel), named, (operator.x1, operator.x2))


def fast() -> Kernel:
    return set_scales(ScaleKernel(RBFKernel(ard_num_dims=2)), lengthscale=0.4)


class _Own(RQKernel):
    """A user's kernel, which is called: only GPyTorch's own class is recognised."""


def generic() -> Kernel:
    return set_scales(ScaleKernel(_Own()), lengthscale=0.3)


def separate(n: int, d: int = 2) -> torch.Tensor:
    """Well separated points, so that the kernel matrix is safely positive definite in float32 without jitter."""
    grid = torch.arange(n, dtype=torch.float32)
    return torch.stack([0.8 * grid, (3.3 * grid).sin()], dim=1)[:, :d]


class _Square(LinearOperatorTestCase):
    seed = 0
    should_test_sample = True
    kernel = staticmethod(fast)
    engine = "tiled"

    def create_linear_op(self):
        return KernelMatrix.of(self.kernel(), separate(6), engine=self.engine)

    def evaluate_linear_op(self, linear_op):
        return evaluate(linear_op)

    def test_bilinear_derivative(self):
        # linear_operator's case takes its reference from autograd through the operator's own _matmul; KernelMatrix
        # computes products outside autograd (the derivative is a pass over tiles), so that reference is None.
        # The same comparison with the dense matrix instead:
        check_bilinear_derivative(self, self.create_linear_op())


def check_bilinear_derivative(case, operator):
    """The operator's bilinear derivative against autograd through ``case.evaluate_linear_op``."""
    operator = operator.detach().requires_grad_(True)
    copy = torch.clone(operator).detach().requires_grad_(True)
    left = torch.randn(*operator.batch_shape, operator.size(-2), 2)
    right = torch.randn(*operator.batch_shape, operator.size(-1), 2)
    (left * (case.evaluate_linear_op(copy) @ right)).sum().backward()
    found = operator._bilinear_derivative(left, right)
    for gradient, argument in zip(found, copy.representation(), strict=True):
        case.assertAllClose(gradient, argument.grad)


class TestSquareFast(_Square, unittest.TestCase):
    pass


class TestSquareGeneric(_Square, unittest.TestCase):
    kernel = staticmethod(generic)


class TestSquareBatchOfKernels(_Square, unittest.TestCase):
    """A batch of kernels, each with parameters of its own."""

    def create_linear_op(self):
        shape = torch.Size([2])
        kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
        kernel.outputscale = torch.tensor([0.7, 2.0])
        kernel.base_kernel.lengthscale = torch.tensor([[[0.4]], [[0.6]]])
        return KernelMatrix.of(kernel, separate(5), engine=self.engine)


class _Rectangular(RectangularLinearOperatorTestCase):
    seed = 0
    kernel = staticmethod(fast)

    def create_linear_op(self):
        return KernelMatrix.of(self.kernel(), separate(5), separate(7) + 0.2, engine="tiled")

    def evaluate_linear_op(self, linear_op):
        return evaluate(linear_op)


class TestRectangularFast(_Rectangular, unittest.TestCase):
    pass


class TestRectangularBatch(_Rectangular, unittest.TestCase):
    def create_linear_op(self):
        x, z = separate(5), separate(6) + 0.2
        return KernelMatrix.of(self.kernel(), torch.stack([x, 1.2 * x]), torch.stack([z, z - 0.3]), engine="tiled")


# --- values ---------------------------------------------------------------------------------------------------


def _inputs(shift, dtype, same):
    x = points(131, seed=1, shift=shift, dtype=dtype)
    return (x, None) if same else (x, points(70, seed=2, shift=shift, dtype=dtype))


def _reference(name, kernel, x, z):
    z = x if z is None else z
    return radial(kernel, x, z).detach() if name in RADIAL else dense(kernel, x, z)


# GPyTorch's own kernels scale before they subtract: at 1e4 they lose all digits in float32, some in float64.
_FLOAT32 = [(name, shift) for name in RADIAL for shift in (0.0, 1e4)] + [(name, 0.0) for name in GENERIC]
_FLOAT64 = [*_FLOAT32, ("rational-quadratic", 1e4), ("sum", 1e4), ("product", 1e4)]
# Each with one of the four ways, in turn, and one with all: test_fast_tiles.py has every kernel with either side.
_WAYS = [(True, "tiled"), (False, "dense"), (True, "dense"), (False, "tiled")]
_PAIRED = [(*one, *_WAYS[(i + i // 4) % 4]) for i, one in enumerate(_FLOAT64)]
_PAIRED = list(dict.fromkeys([*_PAIRED, *(("rbf-ard", 0.0, *way) for way in _WAYS)]))


@each(("name", "shift", "same", "engine"), _PAIRED)
def test_product_in_float64(name, shift, same, engine, many_tiles):
    kernel = set_scales({**RADIAL, **GENERIC}[name]().double())
    x, z = _inputs(shift, torch.float64, same)
    expected = _reference(name, kernel, x, z)
    operator = KernelMatrix.of(kernel, x, z, engine=engine)
    rhs = normal(expected.shape[1], 3)
    limit = 1e-12 if name in RADIAL or not shift else 1e-9
    assert relative(operator @ rhs, expected @ rhs) < limit
    assert relative(operator._matmul(rhs[:, 0]), expected @ rhs[:, 0]) < limit
    assert relative(operator._t_matmul(normal(131, 2)), expected.mT @ normal(131, 2)) < limit
    assert relative(operator.to_dense(), expected) < limit
    if same:
        assert relative(operator.diagonal(), expected.diagonal()) < limit


@each(("name", "shift", "engine"), [(*one, ("dense", "tiled")[(i + i // 2) % 2]) for i, one in enumerate(_FLOAT32)])
def test_product_in_float32(name, shift, engine, many_tiles):
    kernel = set_scales({**RADIAL, **GENERIC}[name]())
    x, _ = _inputs(shift, torch.float32, True)
    rhs = normal(131, 3, dtype=torch.float32)
    product = KernelMatrix.of(kernel, x, engine=engine) @ rhs
    assert product.dtype == torch.float32
    expected = _reference(name, kernel, x, None)
    error = (product.detach().double() - expected @ rhs.double()).norm()
    assert float(error / (expected.norm() * rhs.norm())) < 1e-5


@each("engine", ["dense", "tiled"])
@each(("dtype", "subnormal"), [(torch.float32, 1e-40), (torch.float64, 1e-310)])
def test_subnormal_numbers_count_as_zero_beside_larger_ones(engine, dtype, subnormal):
    """CPUs multiply them many times slower than other numbers."""
    kernel, x = PiecewisePolynomialKernel().to(dtype), torch.cat([points(5), points(5) + 9]).to(dtype)  # 0 far away
    rhs = torch.full((10, 2), subnormal, dtype=dtype)
    rhs[0] = 1
    product = KernelMatrix.of(kernel, x, engine=engine)._matmul(rhs)
    assert bool(product[:5].any())
    assert not bool(product[5:].any())


@each("name", ["rbf-ard", "matern12", "matern32", "matern52-ard", "rational-quadratic"])
def test_dense_and_tiled_engines_agree(name, many_tiles):
    kernel = set_scales({**RADIAL, **GENERIC}[name]().double())
    x, rhs = points(200), normal(200, 4)
    stored, tiled = (KernelMatrix.of(kernel, x, engine=engine) for engine in ("dense", "tiled"))
    assert relative(stored._matmul(rhs), tiled._matmul(rhs)) < 1e-13
    assert DENSE.holds(stored.pairs)
    assert not DENSE.holds(tiled.pairs)


def test_auto_engine_follows_the_memory_budget():
    x = points(50)
    with settings.memory_budget(50 * 50 * 8):
        operator = KernelMatrix.of(RBFKernel().double(), x)
        operator._matmul(x)
        assert DENSE.holds(operator.pairs)
    with settings.memory_budget(50 * 50 * 8 - 1):
        operator = KernelMatrix.of(RBFKernel().double(), x)
        operator._matmul(x)
        assert not DENSE.holds(operator.pairs)


@each("name", ["rbf", "matern12", "matern32", "matern52", "rational-quadratic"])
@each("n", [1, 2])
def test_one_and_two_points(name, n):
    cases = {**RADIAL, **GENERIC, "matern52": lambda: MaternKernel(nu=2.5)}
    kernel = set_scales(cases[name]().double())
    x = points(n, d=3)
    operator = KernelMatrix.of(kernel, x, engine="tiled")
    expected = dense(kernel, x)
    assert relative(operator.to_dense(), expected) < 1e-12
    assert relative(operator @ normal(n, 2), expected @ normal(n, 2)) < 1e-12


@pytest.mark.parametrize("name", ["rbf-ard", "matern32", "matern52-ard"])
def test_duplicated_points(name, many_tiles):
    kernel = set_scales(RADIAL[name]().double())
    x = points(70).repeat(3, 1)
    operator = KernelMatrix.of(kernel, x, engine="tiled")
    expected = dense(kernel, x)
    assert relative(operator @ normal(210, 3), expected @ normal(210, 3)) < 1e-12
    assert float((operator.to_dense() - expected).detach().abs().max()) < 1e-12


def test_duplicates_under_the_matern12_kernel():
    """Its slope at distance 0 turns rounding errors eps in squared distances into sqrt(eps)."""
    kernel = set_scales(MaternKernel(nu=0.5).double())
    x = points(70).repeat(2, 1)
    found = KernelMatrix.of(kernel, x, engine="tiled").detach().to_dense()
    assert float((found - dense(kernel, x)).abs().max()) < 1e-7
    assert torch.equal(found.diagonal(), torch.ones(140, dtype=torch.float64))


@pytest.mark.parametrize("name", ["matern12", "matern12-ard"])
def test_a_pivot_column_agrees_with_the_product(name):
    """Columns are what direct solves and factors read, products what CG applies: one matrix, to rounding."""
    kernel = set_scales(RADIAL[name]().double())
    x = points(60)
    operator = KernelMatrix.of(kernel, x).detach()
    everything = torch.arange(60)
    expected = dense(kernel, x)
    assert float((operator.to_dense() - expected).abs().max()) < 1e-12
    assert float((operator.columns(everything) - expected).abs().max()) < 1e-12
    assert float((operator.block(everything, everything) - expected).abs().max()) < 1e-12


def test_far_apart_points_have_nothing_in_common():
    kernel = RBFKernel().double()
    x = torch.tensor([[0.0], [1e6], [-1e6]], dtype=torch.float64)
    difference = KernelMatrix.of(kernel, x).to_dense().detach() - torch.eye(3, dtype=torch.float64)
    assert torch.equal(difference.diagonal(), torch.zeros(3, dtype=torch.float64))
    assert float(difference.abs().max()) < 1e-100


@each("batch", ["inputs", "kernels", "both", "rhs"])
def test_batches(batch, many_tiles):
    shape = torch.Size([2]) if batch in ("kernels", "both") else torch.Size()
    kernel = ScaleKernel(MaternKernel(nu=1.5, batch_shape=shape), batch_shape=shape).double()
    if shape:
        kernel.outputscale = torch.tensor([0.5, 2.0])
        kernel.base_kernel.lengthscale = torch.tensor([[[0.3]], [[0.9]]])
    x = points(180).reshape(2, 90, 3) if batch in ("inputs", "both") else points(90)
    expected = kernel(x).to_dense().detach()
    operator = KernelMatrix.of(kernel, x, engine="tiled")
    rhs = normal(3, 90, 2) if batch == "rhs" else normal(2, 90, 2)
    assert operator.shape == expected.shape
    # GPyTorch takes distances at coinciding points as up to sqrt(1e-15)
    assert relative(operator._matmul(rhs), expected @ rhs) < 1e-9
    assert relative(operator.to_dense(), expected) < 1e-9
    assert relative(operator.diagonal(), expected.diagonal(dim1=-2, dim2=-1)) < 1e-9
    for index in range(2 if operator.batch_shape else 0):
        assert relative(operator.element((index,)).to_dense(), expected[index]) < 1e-9
        assert relative(operator[index].to_dense(), expected[index]) < 1e-9


# --- gradients ------------------------------------------------------------------------------------------------


def _gradients(value, inputs):
    return torch.autograd.grad(value, inputs, allow_unused=True)


_THROUGH = ("product", "to_dense", "columns")
_TURNS = [
    (name, bool(i % 2), _THROUGH[i % 3]) for i, name in enumerate([*RADIAL, "rational-quadratic", "sum", "product"])
]
_TURNS = list(dict.fromkeys([*_TURNS, *(("matern12", same, way) for same in (True, False) for way in _THROUGH)]))


@each(("name", "same", "through"), _TURNS)
def test_gradients_by_tiles(name, same, through, many_tiles):
    kernel = set_scales({**RADIAL, **GENERIC}[name]().double())
    x = points(150, seed=1).requires_grad_(True)
    z = x if same else points(90, seed=2).requires_grad_(True)
    inputs = [*kernel.parameters(), x, *([] if same else [z])]
    expected_matrix = radial(kernel, x, z) if name in RADIAL else kernel(x, z).to_dense()
    operator = KernelMatrix.of(kernel, x, None if same else z, engine="tiled")
    if through == "product":
        left, right = normal(150, 4, seed=3), normal(len(z), 4, seed=4)
        found, expected = (left * (operator @ right)).sum(), (left * (expected_matrix @ right)).sum()
    elif through == "to_dense":
        weights = normal(150, len(z), seed=3)
        found, expected = (weights * operator.to_dense()).sum(), (weights * expected_matrix).sum()
    else:
        pivots, weights = torch.arange(0, len(z), 7), normal(150, len(range(0, len(z), 7)), seed=3)
        found, expected = (weights * operator.columns(pivots)).sum(), (weights * expected_matrix[:, pivots]).sum()
    # the Matern-1/2 kernel has no slope at distance 0, where rounding decides which one is taken
    limit = 1e-6 if name.startswith("matern12") else 1e-10
    for a, b in zip(_gradients(found, inputs), _gradients(expected, inputs), strict=True):
        assert a is not None
        assert relative(a, b) < limit


@pytest.mark.parametrize("name", ["rbf-ard", "matern32", "rational-quadratic"])
def test_gradients_of_hyperparameters_alone(name, many_tiles):
    """Where inputs need no gradient only half of the tiles are visited."""
    kernel = set_scales({**RADIAL, **GENERIC}[name]().double())
    x = points(150, seed=1)
    left, right = normal(150, 4, seed=3), normal(150, 4, seed=4)
    inputs = list(kernel.parameters())
    found = (left * (KernelMatrix.of(kernel, x, engine="tiled") @ right)).sum()
    matrix = radial(kernel, x, x) if name in RADIAL else kernel(x).to_dense()
    for a, b in zip(_gradients(found, inputs), _gradients((left * (matrix @ right)).sum(), inputs), strict=True):
        assert relative(a, b) < 1e-11


def test_gradients_in_float32(many_tiles):
    kernel = set_scales(RADIAL["rbf-ard"]())
    x, left, right = (t.float() for t in (points(200), normal(200, 3, seed=1), normal(200, 3, seed=2)))
    found = _gradients((left * (KernelMatrix.of(kernel, x, engine="tiled") @ right)).sum(), list(kernel.parameters()))
    twin = set_scales(RADIAL["rbf-ard"]().double())
    wanted = _gradients((left.double() * (radial(twin, x, x) @ right.double())).sum(), list(twin.parameters()))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert relative(a, b) < 1e-4


@each("kernel", ["rbf-ard", "matern32", "matern52-ard", "rational-quadratic"])
def test_gradcheck(kernel):
    kernel = set_scales({**RADIAL, **GENERIC}[kernel]().double())
    names, parameters = zip(*kernel.named_parameters(), strict=True)

    def product(x, z, rhs, *values):
        return KernelMatrix(x, z, *values, kernel=kernel, names=names, engine="tiled") @ rhs

    tensors = [points(4), points(3, seed=1), normal(3, 2), *(p.detach().clone() for p in parameters)]
    assert torch.autograd.gradcheck(product, [t.requires_grad_(True) for t in tensors])


def test_gradient_of_a_batch_of_right_hand_sides(many_tiles):
    kernel = set_scales(RADIAL["rbf-ard"]().double())
    x, left, right = points(80), normal(2, 80, 3, seed=1), normal(2, 80, 3, seed=2)
    inputs = list(kernel.parameters())
    found = (left * (KernelMatrix.of(kernel, x, engine="tiled") @ right)).sum()
    expected = (left * (radial(kernel, x, x) @ right)).sum()
    for a, b in zip(_gradients(found, inputs), _gradients(expected, inputs), strict=True):
        assert relative(a, b) < 1e-11


# --- memory and errors ----------------------------------------------------------------------------------------


@each("what", ["product", "derivative"])
@each("name", ["rbf-ard", "rational-quadratic"])
def test_tiled_passes_stay_far_below_the_matrix(name, what):
    """Peak of tensor memory in a pass over n = 4000 points, where the matrix would take 64 MB in float32."""
    n = 4000
    kernel = {**RADIAL, **GENERIC}[name]()
    operator = KernelMatrix.of(kernel, points(n, dtype=torch.float32), engine="tiled")
    vectors = normal(n, 1, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        if what == "product":
            operator._matmul(vectors)
        else:
            operator._bilinear_derivative(vectors, vectors)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0 < peak < 0.5 * 4 * n * n, peak  # some tiles of 4 MB


@pytest.mark.slow
def test_a_large_tiled_product_never_makes_the_matrix(monkeypatch):
    def refuse(self, pairs):
        raise AssertionError("the whole matrix was evaluated")

    monkeypatch.setattr(Tiled, "dense", refuse)
    kernel = set_scales(RADIAL["rbf-ard"]())
    x = points(20_000, dtype=torch.float32)
    rhs = normal(20_000, 1, dtype=torch.float32)
    product = KernelMatrix.of(kernel, x, engine="tiled").detach()._matmul(rhs)
    rows = torch.tensor([0, 9_999, 19_999])
    expected = radial(kernel, x[rows], x).detach() @ rhs.double()
    assert relative(product[rows], expected) < 1e-4


@pytest.mark.parametrize("convert", ["type", "to", "double"])
def test_conversion_leaves_the_users_kernel_alone(convert):
    kernel = set_scales(ScaleKernel(RBFKernel()))
    operator = KernelMatrix.of(kernel, points(5, dtype=torch.float32))
    other = operator.double() if convert == "double" else getattr(operator, convert)(torch.float64)
    assert other.dtype == torch.float64
    assert all(parameter.dtype == torch.float32 for parameter in kernel.parameters())
    assert relative(other.to_dense(), operator.to_dense()) < 1e-6


@torch.no_grad()
def test_columns_after_a_parameter_changed():
    kernel, x, everything = ScaleKernel(RBFKernel()).double(), points(5), torch.arange(5)
    operator = KernelMatrix.of(kernel, x)
    operator.columns(everything)
    kernel.base_kernel.raw_lengthscale.add_(1.0)
    assert relative(operator.columns(everything), dense(kernel, x)) < 1e-12


def test_a_structured_kernel_is_left_to_gpytorch():
    kernel = InducingPointKernel(RBFKernel(), points(3, dtype=torch.float32), GaussianLikelihood())
    with pytest.raises(InputError, match="structure of its own"):
        KernelMatrix.of(kernel, points(5, dtype=torch.float32))
    assert KernelMatrix.from_lazy(kernel(points(5, dtype=torch.float32))) is None


def test_from_lazy_knows_equal_inputs():
    kernel = ScaleKernel(PeriodicKernel()).double()
    x = points(5)
    assert KernelMatrix.from_lazy(kernel(x, x.clone())).same
    assert not KernelMatrix.from_lazy(kernel(x, x + 1)).same

"""The engine ``"triton"``: on a CUDA device where there is one, else in Triton's interpreter (slow: tiny sizes)."""

from __future__ import annotations

import copy
import dataclasses
import os

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)

from sketchgp.errors import InputError
from sketchgp.kernels import LaplaceKernel
from sketchgp.operators import KernelMatrix
from sketchgp.operators.engines import self_check
from sketchgp.operators.engines.triton import Triton
from sketchgp.operators.expression import recognise

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
VARIABLE = "TRITON_INTERPRET"  # read when Triton's own functions are defined, so it must be set before the first import
_before = os.environ.get(VARIABLE)
if not CUDA:
    os.environ[VARIABLE] = "1"
triton = pytest.importorskip("triton", minversion="3.2")  # the oldest that the engine takes
import triton.language as tl  # noqa: E402

from sketchgp.operators.engines.triton import kernels, launch  # noqa: E402, F401
from sketchgp.operators.engines.triton.launch import (  # noqa: E402
    Blocks,
    _Problem,
    _shares,
    differentiate,
    multiply,
)
from sketchgp.operators.engines.triton.source import compiled  # noqa: E402

if not CUDA:
    del os.environ[VARIABLE]
    if _before is not None:
        os.environ[VARIABLE] = _before
    if type(tl.zeros).__name__ == "JITFunction":
        pytest.skip("Triton was imported before its interpreter was chosen", allow_module_level=True)

_patched = []  # what Triton's own functions see of the language, which stays patched
SMALL = Blocks(32, 16, 4, 1)  # several blocks of rows and columns of tiny matrices


@pytest.fixture
def own_blocks():
    """Let the engine take blocks of its own size."""


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch, request):
    """Run the interpreter on small blocks, mended for loops to a number that came as an argument."""
    if CUDA:
        return
    monkeypatch.setattr(self_check, "_SIZE", (37, 21))
    if "own_blocks" not in request.fixturenames:
        monkeypatch.setattr(launch, "PRODUCT", SMALL)
        monkeypatch.setattr(launch, "GRADIENT", SMALL)
    from triton.runtime import interpreter

    monkeypatch.setenv(VARIABLE, "1")
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, *rest):
        patch_tensor(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # NumPy 2.4 takes no array of one entry for this

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    builder = interpreter.interpreter_builder  # it computes whether sums overflow, and looks only when debugging
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))

    # each call of a function patches the language anew, which takes most of the time: once is enough
    def called(function, *args, **kwargs):
        if tl not in function.fn.__globals__.values() and not _patched:
            _patched.append(interpreter._patch_lang(function.fn))
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)


def _scale(kernel, p, **values):
    """A lengthscale at which some of the values are neither 0 nor 1, and a scale."""
    lengthscale = torch.linspace(0.7, 1.3, kernel.lengthscale.numel()).reshape(kernel.lengthscale.shape)
    kernel.initialize(lengthscale=lengthscale * p**0.5, **values)
    kernel = ScaleKernel(kernel)
    kernel.initialize(outputscale=1.7)
    return kernel


def _composite(p):
    matern, laplace = _scale(MaternKernel(nu=2.5, ard_num_dims=p), p), _scale(LaplaceKernel(), p * p)
    return ProductKernel(AdditiveKernel(_scale(RQKernel(), p), matern), laplace)


def _with_constant(p):
    constant = ConstantKernel()
    constant.initialize(constant=torch.tensor(0.3))
    return AdditiveKernel(_scale(RBFKernel(), p), _scale(MaternKernel(nu=1.5), p), constant)


KERNELS = {
    "rbf": lambda p: _scale(RBFKernel(ard_num_dims=p), p),
    "matern12": lambda p: _scale(MaternKernel(nu=0.5), p),
    "matern32": lambda p: _scale(MaternKernel(nu=1.5, ard_num_dims=p), p),
    "matern52": lambda p: _scale(MaternKernel(nu=2.5), p),
    "laplace": lambda p: _scale(LaplaceKernel(ard_num_dims=p), p * p),
    "rq": lambda p: _scale(RQKernel(), p, alpha=0.8),
    "periodic": lambda p: _scale(PeriodicKernel(), p),
    "active": lambda p: AdditiveKernel(_scale(RBFKernel(active_dims=[0, p - 1]), 2), _scale(MaternKernel(nu=0.5), p)),
    "square": lambda p: (lambda k: ProductKernel(k, k))(_scale(MaternKernel(nu=1.5), p)),
    "product": lambda p: ProductKernel(_scale(RBFKernel(), p), _scale(PeriodicKernel(), p), _scale(RQKernel(), p)),
    "composite": _composite,
    "constant": _with_constant,
}


def _formula(expression, prepared):
    """The matrix as ``Features`` and ``Expression`` define it."""
    values = []
    for atom, f in zip(expression.atoms, prepared.features, strict=True):
        step = f.left.unsqueeze(-2) - f.right.unsqueeze(-3)
        q = step.abs().sum(-1) if atom.profile.l1 else step.square().sum(-1)
        s = q.sqrt()
        values.append(
            {
                "gauss": lambda q=q: torch.exp(-q / 2),
                "matern12": lambda s=s: torch.exp(-s),
                "matern32": lambda s=s: (1 + s) * torch.exp(-s),
                "matern52": lambda s=s, q=q: (1 + s + q / 3) * torch.exp(-s),
                "rational_quadratic": lambda q=q, f=f: (1 + q / (2 * f.alpha)) ** -f.alpha,
                "laplace": lambda q=q: torch.exp(-q),
            }[atom.profile.name]()
        )
    total = 0
    for t, term in enumerate(expression.terms):
        part = prepared.coefficients[..., t, None, None]
        for a in term:
            part = part * values[a]
        total = total + part
    return total


def _prepare(expression, x1, x2, same=False):
    """Features and coefficients in the dtype of the inputs, counted from the median of x2."""
    centre = x2.detach().median(dim=-2, keepdim=True).values
    return expression.prepare(x1, x2, same, torch.Size(), x1.dtype, centre)


class Case:
    """A kernel at random float32 points, in float32 on the device and in float64."""

    def __init__(self, kernel, p, n, m, same=False, spread=1.0):
        self.kernel = kernel.float().to(DEVICE)
        self.exact = copy.deepcopy(kernel).double()
        self.same = same
        x1 = torch.randn(n, p) * spread
        x2 = x1 if same else torch.randn(m, p) * spread
        self.x1 = x1.to(DEVICE, copy=True).requires_grad_()
        self.x2 = self.x1 if same else x2.to(DEVICE, copy=True).requires_grad_()
        self.y1 = x1.double().requires_grad_()
        self.y2 = self.y1 if same else x2.double().requires_grad_()
        self.expression = recognise(self.kernel)
        self.prepared = _prepare(self.expression, self.x1, self.x2, same)
        exact = _prepare(recognise(self.exact), self.y1.detach(), self.y2.detach(), same)
        self.dense = _formula(recognise(self.exact), exact).detach().expand(n, n if same else m)

    def multiply(self, v, precision="float32"):
        prepared = self.prepared.converted(torch.Tensor.detach)
        with torch.no_grad():
            found = multiply(self.expression, prepared, self.x1.shape[0], v.to(DEVICE), self.same, precision)
        return found.double().cpu()

    def gradients(self, left, right, precision="float32"):
        """Pairs ``(found, expected)``, for inputs and parameters."""
        with torch.no_grad():
            pairs = differentiate(
                self.expression, self.prepared, left.to(DEVICE), right.to(DEVICE), self.same, precision
            )
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        dense = self.exact(self.y1, self.y2).to_dense()
        (left.double() * (dense @ right.double())).sum().backward()
        inputs = [(self.x1, self.y1)] if self.same else [(self.x1, self.y1), (self.x2, self.y2)]
        everything = [*inputs, *zip(self.kernel.parameters(), self.exact.parameters(), strict=True)]
        return [(a.grad.double().cpu(), b.grad) for a, b in everything]


def _close(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape
    error = (found - expected).norm() / expected.norm()
    assert error <= tolerance, f"relative error {error:.1e}"


# One of both sides for each kernel, both for one of each kind of distance.
SIDES = [(name, i % 2 == 0) for i, name in enumerate(KERNELS)]
SIDES = list(dict.fromkeys([*SIDES, *((n, same) for n in ("rbf", "matern12", "laplace") for same in (True, False))]))


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "same"), SIDES)
def test_product(name, same):
    case = Case(KERNELS[name](5), 5, 37, 21, same)
    v = torch.randn(37 if same else 21, 2)
    found = case.multiply(v)
    _close(found, case.dense @ v.double())
    _close(found, case.exact(case.y1, case.y2).to_dense().detach() @ v.double())


@pytest.mark.parametrize(("p", "t"), [(1, 1), (3, 40), (20, 16), (130, 1), (130, 70)])
def test_product_of_any_width(p, t):
    case = Case(KERNELS["matern32"](p), p, 35, 20)
    v = torch.randn(20, t)
    _close(case.multiply(v), case.dense @ v.double())


@pytest.mark.parametrize("p", [1, 6, 21])
def test_product_of_l1_distances(p):
    case = Case(KERNELS["laplace"](p), p, 20, 41)
    v = torch.randn(41, 12)
    _close(case.multiply(v), case.dense @ v.double())


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 40), (40, 1)])
def test_single_row_or_column(n, m):
    case = Case(KERNELS["rbf"](6), 6, n, m)
    v = torch.randn(m, 1)
    _close(case.multiply(v), case.dense @ v.double())


@pytest.mark.usefixtures("own_blocks")
def test_product_on_blocks_of_the_engine():
    case = Case(KERNELS["matern52"](20), 20, 150, 140)
    v = torch.randn(140, 2)
    _close(case.multiply(v), case.dense @ v.double())


def test_nothing_to_multiply():
    case = Case(KERNELS["rbf"](3), 3, 4, 5)
    assert case.multiply(torch.randn(5, 0)).shape == (4, 0)


def test_constant_alone():
    constant = ConstantKernel()
    constant.initialize(constant=torch.tensor(0.3))
    case = Case(constant, 2, 33, 20)
    v = torch.rand(20, 1)
    _close(case.multiply(v), case.dense @ v.double())
    case.x1, case.x2 = case.x1.detach(), case.x2.detach()
    with torch.no_grad():
        pairs = differentiate(
            case.expression, case.prepared, torch.ones(33, 1, device=DEVICE), v.to(DEVICE), False, "float32"
        )
    _close(pairs[0][1].double().cpu(), 33 * v.double().sum().reshape(1))


def test_many_atoms():
    parts = [_scale(MaternKernel(nu=nu), p) for nu, p in zip([0.5, 1.5, 2.5], [20, 21, 22], strict=True)]
    case = Case(AdditiveKernel(*parts), 20, 33, 20)
    v = torch.randn(20, 2)
    _close(case.multiply(v), case.dense @ v.double())
    for found, expected in case.gradients(torch.randn(33, 1), torch.randn(20, 1)):
        _close(found, expected, 2e-5)


def test_repeated_product_is_the_same_bit_by_bit():
    case = Case(KERNELS["rbf"](6), 6, 20, 200)
    v = torch.randn(200, 3)
    assert torch.equal(case.multiply(v), case.multiply(v))


def test_columns_are_shared_out_where_rows_are_few():
    splits, steps = _shares(1, 13, DEVICE)
    assert splits > 1
    assert (splits - 1) * steps < 13 <= splits * steps


def test_kernels_do_not_depend_on_the_numbers_of_points():
    def plan(n, p, t):
        case = Case(KERNELS["rbf"](p), p, n, n)
        return _Problem(case.expression, case.prepared.converted(torch.Tensor.detach), "float32").plan(False, t)

    assert plan(10, 17, 3) == plan(300, 31, 4)
    assert plan(10, 70, 11) == plan(300, 300, 16)
    assert compiled(plan(10, 17, 3), False) is compiled(plan(300, 31, 4), False)


# --- precisions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 2e-3)])
def test_every_precision(precision, tolerance):
    case = Case(KERNELS["rbf"](20), 20, 50, 50, same=True)
    v = torch.randn(50, 3)
    _close(case.multiply(v, precision), case.dense @ v.double(), tolerance)


# --- accuracy -------------------------------------------------------------------------------------------------------

BOUNDS = {"float32": 2.0**-20, "tf32": 2.0**-9}


@pytest.mark.parametrize("precision", BOUNDS)
def test_error_of_distances(precision):
    p, n, m = 20, 60, 8
    kernel = RBFKernel()
    kernel.initialize(lengthscale=1.0)
    case = Case(kernel, p, n, m, spread=0.5)
    found = -2 * case.multiply(torch.eye(m), precision).log()
    f = _prepare(recognise(case.exact), case.y1.detach(), case.y2.detach()).features[0]
    exact = (f.left.unsqueeze(1) - f.right.unsqueeze(0)).square().sum(-1)
    norms = f.left.square().sum(-1).unsqueeze(1) + f.right.square().sum(-1)
    error = ((found - exact).abs() / norms).max()
    assert error <= BOUNDS[precision]
    if precision == "tf32":  # and it is what was asked for, not something more costly
        assert error > BOUNDS[precision] / 100


@pytest.mark.parametrize("precision", BOUNDS)
def test_points_that_coincide_are_at_distance_zero(precision):
    x = torch.randn(40, 24) * 6
    kernel = RBFKernel()
    kernel.initialize(lengthscale=1.0)
    matrix = KernelMatrix.of(
        kernel.to(DEVICE), x.to(DEVICE), x.clone().to(DEVICE), engine="triton", precision=precision
    )
    assert not matrix.same
    found = (matrix @ torch.ones(40, 1, device=DEVICE)).detach().cpu()
    assert (found - 1).abs().max() < 3e-3  # |x|^2 is about 900; all other points are far away


@pytest.mark.parametrize("precision", BOUNDS)
def test_diagonal_is_exact(precision):
    kernel = MaternKernel(nu=0.5)
    kernel.initialize(lengthscale=0.1)
    case = Case(kernel, 12, 30, 30, same=True, spread=10.0)
    assert (case.multiply(torch.ones(30, 1), precision) == 1).all()


def test_few_features_do_not_cancel():
    kernel = MaternKernel(nu=0.5)
    kernel.initialize(lengthscale=1.0)
    case = Case(kernel, 1, 40, 40, spread=3e4)
    with torch.no_grad():
        case.x2.copy_(case.x1 + 0.25)
        case.y2.copy_(case.x2)
        case.prepared = _prepare(case.expression, case.x1, case.x2)
    expected = (-(case.y1 - case.y2.mT).abs()).exp().detach().sum(1, keepdim=True)
    assert ((case.multiply(torch.ones(40, 1)) - expected).abs() < 5e-3).all()  # features of 1e5 are rounded to 4e-3


@pytest.mark.parametrize("t", [1, 16])
def test_lower_precision(t):
    case = Case(KERNELS["matern52"](20), 20, 40, 40)
    v = torch.randn(40, t)
    _close(case.multiply(v, "tf32"), case.dense @ v.double(), 2e-3)
    for found, expected in case.gradients(torch.rand(40, t), torch.rand(40, t), "tf32"):
        _close(found, expected, 8e-3)


def test_not_a_number_is_passed_on():
    for name in ("matern52", "rq", "rbf"):
        case = Case(KERNELS[name](6), 6, 20, 20)
        case.prepared.features[0].left.data[3] = float("nan")
        found = case.multiply(torch.ones(20, 12))
        assert found[3].isnan().all() and not found[4].isnan().any()


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "same"), SIDES)
def test_gradient(name, same):
    case = Case(KERNELS[name](5), 5, 37, 21, same)
    for found, expected in case.gradients(torch.rand(37, 2), torch.rand(37 if same else 21, 2)):
        _close(found, expected, 3e-5)


@pytest.mark.parametrize(("p", "t"), [(1, 70), (20, 16), (130, 70)])
def test_gradient_of_any_width(p, t):
    case = Case(KERNELS["matern32"](p), p, 35, 20)
    for found, expected in case.gradients(torch.randn(35, t), torch.randn(20, t)):
        _close(found, expected)


def test_gradient_of_many_features_by_differences():
    case = Case(KERNELS["laplace"](70), 70, 20, 20)
    for found, expected in case.gradients(torch.randn(20, 1), torch.randn(20, 1)):
        _close(found, expected)


@pytest.mark.usefixtures("own_blocks")
def test_gradient_on_blocks_of_the_engine():
    case = Case(KERNELS["rq"](20), 20, 150, 140)
    for found, expected in case.gradients(torch.randn(150, 2), torch.randn(140, 2)):
        _close(found, expected)


@pytest.mark.parametrize("p", [3, 5])
@pytest.mark.parametrize("name", ["matern12", "laplace"])
def test_gradient_has_no_slope_at_a_kink(name, p):
    case = Case(KERNELS[name](p), p, 20, 20, same=True)
    with torch.no_grad():
        pairs = differentiate(
            case.expression,
            case.prepared,
            torch.eye(20, device=DEVICE)[:, :3],
            torch.eye(20, device=DEVICE)[:, :3],
            True,
            "float32",
        )
    assert all(not gradient.any() for tensor, gradient in pairs if tensor.shape == (20, p))


def test_coefficients_alone():
    """The distances of two sets of points need no gradient."""
    case = Case(KERNELS["rbf"](5), 5, 20, 30)
    case.kernel.base_kernel.requires_grad_(False)
    prepared = _prepare(case.expression, case.x1.detach(), case.x2.detach())
    ones = [torch.ones(n, 1, device=DEVICE) for n in (20, 30)]
    with torch.no_grad():
        ((_, gradient),) = differentiate(case.expression, prepared, *ones, False, "float32")
    _close(gradient.double().cpu() * 1.7, case.dense.sum().reshape(gradient.shape))


def test_only_what_needs_a_gradient():
    case = Case(KERNELS["rq"](5), 5, 20, 20)
    case.kernel.requires_grad_(False)
    x1 = case.x1.detach()
    prepared = _prepare(case.expression, x1, x1, True)
    assert differentiate(case.expression, prepared, torch.ones(20, 1), torch.ones(20, 1), True, "float32") == []


# --- the operator ---------------------------------------------------------------------------------------------------


def _operator_case(kernel, x1, x2, t=2):
    """Product and gradients by the engine, and densely in float64, of float32 inputs."""
    exact = copy.deepcopy(kernel).double()
    kernel = kernel.to(DEVICE)
    a1 = x1.to(DEVICE, copy=True).requires_grad_()
    a2 = None if x2 is None else x2.to(DEVICE, copy=True).requires_grad_()
    b1 = x1.double().requires_grad_()
    b2 = None if x2 is None else x2.double().requires_grad_()
    matrix = KernelMatrix.of(kernel, a1, a2, engine="triton", precision="float32")
    v = torch.randn(*matrix.shape[:-2], matrix.shape[-1], t)
    weights = torch.randn(*matrix.shape[:-1], t)
    found = matrix @ v.to(DEVICE)
    (found * weights.to(DEVICE)).sum().backward()
    expected = exact(b1, b1 if b2 is None else b2).to_dense() @ v.double()
    (expected * weights.double()).sum().backward()
    pairs = [(a1, b1), *([] if a2 is None else [(a2, b2)]), *zip(kernel.parameters(), exact.parameters(), strict=True)]
    return [(found.detach().double().cpu(), expected.detach())] + [(a.grad.double().cpu(), b.grad) for a, b in pairs]


@pytest.mark.parametrize(("name", "rectangular"), [("rbf", True), ("composite", False)])
def test_operator(name, rectangular):
    for found, expected in _operator_case(
        KERNELS[name](6), torch.randn(30, 6), torch.randn(20, 6) if rectangular else None
    ):
        _close(found, expected, 2e-5)


def test_operator_for_a_batch():
    kernel = ScaleKernel(
        AdditiveKernel(MaternKernel(nu=1.5, batch_shape=[2]), RQKernel(batch_shape=[2])), batch_shape=[2]
    )
    kernel.kernel_parameters = None
    for parameter in kernel.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for found, expected in _operator_case(kernel, torch.randn(2, 30, 5), None, 10):
        _close(found, expected, 2e-5)


def test_operator_far_from_the_origin():
    x = (torch.randn(40, 6) + 1e4).float()
    for found, expected in _operator_case(KERNELS["matern52"](6), x, None):
        _close(found, expected, 1e-4)


def test_operator_with_a_far_row():
    v = torch.ones(30, 2)
    for side in (0, 1):
        inputs = [torch.randn(20, 6), torch.randn(30, 6)]
        inputs[side][0] = 1e5
        kernel = KERNELS["matern52"](6)
        expected = copy.deepcopy(kernel).double()(*(x.double() for x in inputs)).to_dense() @ v.double()
        matrix = KernelMatrix.of(kernel.to(DEVICE), *(x.to(DEVICE) for x in inputs), engine="triton").detach()
        _close((matrix @ v.to(DEVICE)).double().cpu(), expected.detach(), 2e-5)


def test_operator_in_bfloat16_and_with_another_right_hand_side():
    x = torch.randn(30, 6, device=DEVICE)
    kernel = KERNELS["rbf"](6).to(DEVICE)
    matrix = KernelMatrix.of(kernel, x, engine="triton")
    dense = kernel(x).to_dense().detach()
    v = torch.randn(30, 2, device=DEVICE)
    with torch.no_grad():
        assert (matrix @ v).dtype == torch.float32
        _close(matrix @ v, dense @ v)
        half = matrix.to(torch.bfloat16) @ v.bfloat16()
    assert half.dtype == torch.bfloat16
    _close(half.float(), dense @ v, 0.02)


def test_reasons():
    x = torch.randn(5, 2, device=DEVICE)
    engine = Triton()
    assert engine.missing(KernelMatrix.of(RBFKernel().to(DEVICE), x).pairs) is None
    with pytest.raises(InputError, match="PolynomialKernel is none of the kernels"):
        KernelMatrix.of(gpytorch.kernels.PolynomialKernel(power=2).to(DEVICE), x, engine="triton")
    with pytest.raises(InputError, match="computes in float32"):
        KernelMatrix.of(RBFKernel().double().to(DEVICE), x.double(), engine="triton")


def test_reason_without_a_device(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(InputError, match="needs a CUDA device, and the inputs are on cpu"):
        KernelMatrix.of(RBFKernel(), torch.randn(5, 2), engine="triton")


def test_reason_without_triton(monkeypatch):
    from sketchgp.operators.engines import triton as module

    monkeypatch.setattr(module, "installed", lambda package: False)
    with pytest.raises(InputError, match="Triton is not installed"):
        KernelMatrix.of(RBFKernel(), torch.randn(5, 2), engine="triton")


def test_reason_with_an_old_triton(monkeypatch):
    from sketchgp.operators.engines import triton as module

    monkeypatch.setattr(module, "_recent", lambda: False)
    with pytest.raises(InputError, match=r"older than 3\.2"):
        KernelMatrix.of(RBFKernel().to(DEVICE), torch.randn(5, 2, device=DEVICE), engine="triton")


def test_reason_for_an_old_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "compute capability 8.0" in Triton().absent(torch.device("cuda"), torch.float32)


@pytest.mark.cuda
class TestOnADevice:
    """Sizes with many blocks, on the blocks of the engine."""

    @pytest.mark.parametrize("precision", BOUNDS)
    @pytest.mark.parametrize("p", [2, 9, 40, 90, 300])
    @pytest.mark.parametrize("t", [1, 8, 20, 150])
    def test_product(self, p, t, precision):
        case = Case(KERNELS["matern52"](p), p, 1500, 2100)
        v = torch.randn(2100, t)
        tolerance = {"float32": 1e-5, "tf32": 2e-3}[precision]
        _close(case.multiply(v, precision), case.dense @ v.double(), tolerance)

    @pytest.mark.parametrize("same", [True, False], ids=["same", "rectangular"])
    @pytest.mark.parametrize("name", KERNELS)
    def test_kernels(self, name, same):
        case = Case(KERNELS[name](12), 12, 1500, 2100, same)
        v = torch.randn(1500 if same else 2100, 3)
        _close(case.multiply(v), case.dense @ v.double())
        for found, expected in case.gradients(torch.rand(1500, 3), v.abs()):
            _close(found, expected, 5e-5)

    @pytest.mark.parametrize("precision", BOUNDS)
    @pytest.mark.parametrize("p", [2, 9, 40, 90, 300])
    @pytest.mark.parametrize("t", [1, 20, 60])
    def test_gradient(self, p, t, precision):
        case = Case(KERNELS["rbf"](p), p, 1000, 1300)
        tolerance = {"float32": 5e-5, "tf32": 1e-2}[precision]
        for found, expected in case.gradients(torch.rand(1000, t), torch.rand(1300, t), precision):
            _close(found, expected, tolerance)

    def test_many_points(self):
        x = torch.randn(200_000, 3, device=DEVICE)
        kernel = KERNELS["rbf"](3).to(DEVICE)
        v = torch.randn(200_000, 1, device=DEVICE)
        with torch.no_grad():
            found = KernelMatrix.of(kernel, x, engine="triton") @ v
            few = kernel(x[:500], x).to_dense() @ v
        _close(found[:500], few, 1e-4)

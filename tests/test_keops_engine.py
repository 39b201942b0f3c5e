"""The KeOps engine against dense float64.

A formula takes seconds to compile where KeOps has not kept it from an earlier run: the tests share five.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch import Tensor

from problems import needs_keops
from sketchgp.errors import InputError
from sketchgp.kernels import LaplaceKernel
from sketchgp.operators.engines import KEOPS, TILED, keops, self_check
from sketchgp.operators.expression import recognise
from sketchgp.operators.kernel_matrix import KernelMatrix

pytestmark = pytest.mark.slow  # a formula takes seconds to compile


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def spread(kernel: Kernel, seed: int = 0) -> Kernel:
    """The kernel with parameters that all differ."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in kernel.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)
    return kernel


def mixture(*batch: int) -> Kernel:
    """A sum of a product, the other profiles without a kink, and a constant."""
    shape = torch.Size(batch)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3, batch_shape=shape) * RQKernel(batch_shape=shape), batch_shape=shape)
    kernel = kernel + ScaleKernel(MaternKernel(nu=1.5, batch_shape=shape), batch_shape=shape)
    kernel = kernel + MaternKernel(nu=2.5, batch_shape=shape) + PeriodicKernel(ard_num_dims=3, batch_shape=shape)
    return spread(kernel + ConstantKernel(batch_shape=shape)).double()


def rough() -> Kernel:
    """The profiles with a kink where points are the same, and one kernel object twice in a term."""
    twice = MaternKernel(nu=1.5)
    return spread(ScaleKernel(MaternKernel(nu=0.5)) + LaplaceKernel(ard_num_dims=2) + twice * twice).double()


def points(n: int, d: int, *batch: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*batch, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(kernel: Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """``k(x1, x2)`` in float64; the kernel is left in float64."""
    return kernel.double()(x1.double(), x2.double()).to_dense()


def error(value: Tensor, exact: Tensor) -> float:
    assert value.shape == exact.shape
    return float(((value.double() - exact).norm() / exact.norm()).detach())


def check_product(kernel: Kernel, x1: Tensor, x2: Tensor | None, t: int) -> None:
    """``K v``, for v of ``t`` columns, against the dense matrix."""
    x2 = x1 if x2 is None else x2
    v = points(x2.shape[-2], t, *x2.shape[:-2], dtype=x1.dtype, seed=3)
    value = (KernelMatrix.of(kernel.to(x1.dtype), x1, x2, engine="keops") @ v).detach()
    assert value.dtype == x1.dtype
    assert error(value, dense(kernel, x1, x2) @ v.double()) < TOLERANCE[x1.dtype]


def check_gradients(kernel: Kernel, x1: Tensor, x2: Tensor | None, t: int) -> None:
    """Every gradient of ``sum_t left_t^T K right_t`` against that of the dense matrix."""
    dtype = x1.dtype
    inputs = [x1] if x2 is None else [x1, x2]
    left = points(x1.shape[-2], t, *x1.shape[:-2], dtype=dtype, seed=4)
    right = points(inputs[-1].shape[-2], t, *x1.shape[:-2], dtype=dtype, seed=5)
    matrix = KernelMatrix.of(kernel.to(dtype), inputs[0], inputs[-1], engine="keops")
    found = KEOPS.derivative(matrix.pairs, left, right)
    copies = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    value = (left.double() * (dense(kernel, copies[0], copies[-1]) @ right.double())).sum()
    tensors = [t for t in (*copies, *kernel.parameters()) if t.requires_grad]
    exact = torch.autograd.grad(value, tensors)
    places = found if x2 is not None else (found[0], *found[2:])  # one tensor has its whole gradient at one place
    values = [g for g in places if g is not None]
    assert len(values) == len(exact)
    for gradient, reference in zip(values, exact, strict=True):
        assert gradient.dtype == dtype
        assert error(gradient, reference) < 3 * TOLERANCE[dtype]


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formulas that are reduced from here on, as KeOps compiles them; without those of checks."""
    needs_keops()
    monkeypatch.setattr(type(KEOPS), "resolution", lambda self, matrix: None)
    from pykeops.torch.utils import torchtools

    seen: list[str] = []
    original = torchtools.Genred

    def record(formula: str, *args: object, **options: object) -> object:
        seen.append(formula)
        return original(formula, *args, **options)

    monkeypatch.setattr(torchtools, "Genred", record)
    return seen


# --- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "m", "shift"),
    [("rbf", 40, None, 0), ("rbf", 30, 17, 0), ("rbf", 1, None, 0), ("rbf", 1, 1, 0), ("rbf", 40, 17, 1e4),
     ("periodic", 40, 17, 0)],
)  # fmt: skip
def test_product_float32(formulas: list[str], name: str, n: int, m: int | None, shift: float) -> None:
    """One formula for all, as a periodic kernel of one input is the RBF kernel of two features."""
    kernel = RBFKernel(ard_num_dims=2) if name == "rbf" else PeriodicKernel(active_dims=(1,))
    x1 = points(n, 2, dtype=torch.float32) + shift
    x2 = None if m is None else points(m, 2, dtype=torch.float32, seed=1) + shift
    check_product(spread(ScaleKernel(kernel)), x1, x2, t=49)
    assert len(set(formulas)) == 1


def test_product_of_a_batch(formulas: list[str]) -> None:
    shape = torch.Size((3, 2))
    kernel = spread(ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape))
    x1, x2 = (points(n, 2, 3, 2, dtype=torch.float32, seed=seed) for seed, n in enumerate((20, 7)))
    check_product(kernel, x1, x2, 49)
    assert len(formulas) == 6
    assert len(set(formulas)) == 1


def test_one_formula_for_many_widths_sizes_and_hyperparameters(formulas: list[str]) -> None:
    """Wide right-hand sides go in chunks."""
    for t, n, m, seed, chunks in ((49, 20, None, 0, 1), (64, 5, 7, 1, 1), (65, 40, 70, 2, 2), (150, 33, None, 3, 3)):
        formulas.clear()
        x2 = None if m is None else points(m, 2, dtype=torch.float32, seed=1)
        check_product(spread(ScaleKernel(RBFKernel(ard_num_dims=2)), seed), points(n, 2, dtype=torch.float32), x2, t)
        assert len(formulas) == chunks
        assert set(formulas) == set(formulas[:1])


def test_product_of_a_sum_of_products(formulas: list[str]) -> None:
    check_product(mixture(), points(30, 3), points(21, 3, seed=1), t=1)
    assert len(formulas) == 1


def test_constant_kernel_and_no_columns_need_no_formula(formulas: list[str]) -> None:
    x = points(6, 3)
    check_product(spread(ConstantKernel()).double(), x, points(4, 3, seed=1), t=2)
    check_gradients(spread(ConstantKernel()).double(), x, points(4, 3, seed=1), t=2)
    matrix = KernelMatrix.of(mixture(), x, engine="keops")
    assert (matrix @ x[:, :0]).shape == (6, 0)
    assert not formulas


# --- derivatives --------------------------------------------------------------------------------------------


def test_gradients_of_the_same_points(formulas: list[str]) -> None:
    """One reduction, for parameters and inputs."""
    check_gradients(mixture(), points(30, 3), None, t=1)
    check_gradients(mixture(), points(30, 3).requires_grad_(), None, t=1)
    assert len(formulas) == 2
    assert len(set(formulas)) == 1


def test_gradients_of_a_rectangle(formulas: list[str]) -> None:
    """One reduction for each side, of the same formula."""
    check_gradients(mixture(), points(30, 3).requires_grad_(), points(21, 3, seed=1).requires_grad_(), t=2)
    check_gradients(mixture(), points(30, 3), points(21, 3, seed=1).requires_grad_(), t=2)
    assert len(formulas) == 4
    assert len(set(formulas)) == 1


def test_gradients_of_a_batch() -> None:
    needs_keops()
    check_gradients(mixture(2), points(12, 3, 2).requires_grad_(), points(9, 3, 2, seed=1), t=2)
    check_gradients(mixture(2), points(12, 3, 2), None, t=1)


def test_coincident_points_have_slope_zero() -> None:
    needs_keops()
    x1, x2 = points(30, 2), points(21, 2, seed=1)
    x2[:5] = x1[:5]
    x1, x2 = x1.requires_grad_(), x2.requires_grad_()
    matrix = KernelMatrix.of(rough(), x1, x2, engine="keops")
    left, right = points(30, 2, seed=2), points(21, 2, seed=3)
    for found, other in zip(
        KEOPS.derivative(matrix.pairs, left, right), TILED.derivative(matrix.pairs, left, right), strict=True
    ):
        assert found is not None and other is not None
        assert error(found, other) < 1e-9


def test_backward_through_the_operator() -> None:
    needs_keops()
    x, v, w = points(30, 3), points(30, 1, seed=1), points(30, 1, seed=2)
    kernel = mixture()
    expected = torch.autograd.grad((w * (dense(kernel, x, x) @ v)).sum(), list(kernel.parameters()))
    value = (w * (KernelMatrix.of(kernel, x, engine="keops") @ v)).sum()
    value.backward()
    for parameter, gradient in zip(kernel.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert error(parameter.grad, gradient) < 1e-11


def test_fixed_parameters_need_no_formula(formulas: list[str]) -> None:
    matrix = KernelMatrix.of(mixture().requires_grad_(False), points(9, 3), engine="keops")
    assert all(gradient is None for gradient in KEOPS.derivative(matrix.pairs, points(9, 1), points(9, 1)))
    assert not formulas


# --- the check before the first product ----------------------------------------------------------------------


def test_it_is_checked_by_the_formulas_that_it_needs_anyway(
    formulas: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(KEOPS), "resolution", lambda self, matrix: 1e-13)
    self_check.forget()
    matrix = KernelMatrix.of(mixture(), points(30, 3), engine="keops")
    for count in (4, 6):  # a product and a gradient, and before the first of each its check
        (matrix @ points(30, 1)).sum().backward()
        assert len(formulas) == count
        assert len(set(formulas)) == 2
    self_check.forget()
    monkeypatch.setattr(keops, "_reduce", lambda one, formula: torch.zeros(150, 1, dtype=torch.float64))
    with pytest.raises(InputError, match=r"matmul='keops' cannot be used here: a product .* Use matmul='tiled'"):
        matrix @ points(30, 1)
    self_check.forget()


# --- when it cannot be used ---------------------------------------------------------------------------------


def test_without_pykeops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pykeops", None)
    with pytest.raises(InputError, match=r"the extra sketchgp\[keops\] is not installed"):
        KernelMatrix.of(RBFKernel(), points(5, 2), engine="keops")


def test_kernels_and_dtypes_that_it_lacks() -> None:
    needs_keops()
    with pytest.raises(InputError, match="not a sum of products"):
        KernelMatrix.of(CosineKernel().double(), points(5, 2), engine="keops")
    with pytest.raises(InputError, match="not in float16"):
        KernelMatrix.of(RBFKernel().half(), points(5, 2, dtype=torch.float16), engine="keops")
    elsewhere = SimpleNamespace(expression=object(), dtype=torch.float32, device=torch.device("mps"))
    assert KEOPS.missing(elsewhere) == "it has no code for devices of type 'mps'"


# --- hard cases ---------------------------------------------------------------------------------------------


def test_kinks_and_a_kernel_times_itself() -> None:
    """In float64: compiling is what takes the time, and only constants differ between dtypes."""
    needs_keops()
    kernel = rough()
    assert any(len(term) > len(set(term)) for term in recognise(kernel).terms)  # type: ignore[union-attr]
    x1, x2 = points(50, 2), points(23, 2, seed=1)
    check_product(kernel, x1, None, t=1)
    check_gradients(kernel, x1, None, t=1)
    check_gradients(kernel, x1.requires_grad_(), x2.requires_grad_(), t=2)


def test_rational_quadratic_of_large_alpha() -> None:
    """It tends to the RBF kernel, and log(1 + t) to t, of which 1 + t keeps few digits."""
    needs_keops()
    kernel, x, v = mixture(), points(50, 3), points(50, 1, seed=3)
    part = next(part for part in kernel.modules() if isinstance(part, RQKernel))
    part.alpha = 1e14
    found = KernelMatrix.of(kernel, x, engine="keops") @ v
    limit = RBFKernel().double()
    limit.lengthscale = part.lengthscale.detach()
    part.forward = limit.forward  # type: ignore[method-assign]
    assert error(found.detach(), (dense(kernel, x, x) @ v).detach()) < 1e-12


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("make", [lambda: mixture(), lambda: RQKernel(), lambda: MaternKernel(nu=2.5)])
def test_cuda(make, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    needs_keops()
    import pykeops

    if not pykeops.config.gpu_available:
        pytest.skip("KeOps found no CUDA toolkit")
    kernel = make().cuda()
    x1, x2 = points(300, 3, dtype=dtype).cuda(), points(200, 3, dtype=dtype, seed=1).cuda()
    v = points(200, 2, dtype=dtype).cuda()
    value = (KernelMatrix.of(kernel.to(dtype), x1, x2, engine="keops") @ v).detach()
    assert error(value, dense(kernel, x1, x2) @ v.double()) < TOLERANCE[dtype]

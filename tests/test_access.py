"""``Access`` and ``AccurateProduct``: columns, blocks, diagonals and float64 products of any operator."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    InterpolatedLinearOperator,
    MulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    ToeplitzLinearOperator,
)

from cases import each
from problems import dense, normal, points, relative, set_scales
from sketchgp.operators import KernelMatrix
from sketchgp.operators.access import Access, AccurateProduct, columns, element, entry_rounding
from sketchgp.operators.engines import DENSE

N = 30


def _kernel():
    return set_scales(ScaleKernel(RBFKernel(ard_num_dims=3)))


def _kernel_matrix(dtype):
    return KernelMatrix.of(_kernel().to(dtype), points(N, dtype=dtype), engine="tiled").detach()


def _dense(dtype, seed=0):
    root = normal(N, 2 * N, seed=seed, dtype=dtype)
    return DenseLinearOperator(root @ root.mT)


OPERATORS = {
    "kernel-matrix": _kernel_matrix,
    "dense": _dense,
    "sum": lambda dtype: SumLinearOperator(_kernel_matrix(dtype), _dense(dtype)),
    "constant-times": lambda dtype: ConstantMulLinearOperator(_kernel_matrix(dtype), torch.tensor(2.5, dtype=dtype)),
    "product": lambda dtype: MulLinearOperator(_dense(dtype), _dense(dtype, seed=1)),
    "nested": lambda dtype: SumLinearOperator(
        ConstantMulLinearOperator(_dense(dtype), torch.tensor(0.5, dtype=dtype)), _kernel_matrix(dtype), _dense(dtype)
    ),
    "lazy-kernel": lambda dtype: _kernel().to(dtype)(points(N, dtype=dtype)).detach(),
    "toeplitz": lambda dtype: ToeplitzLinearOperator(0.5 ** torch.arange(N, dtype=dtype)),
    "diagonal": lambda dtype: DiagLinearOperator(torch.arange(1, N + 1, dtype=dtype)),
    "root": lambda dtype: RootLinearOperator(normal(N, 4, dtype=dtype)),
}


def _matrix(name):
    """The operator's matrix in float64 from its float64 twin."""
    if name == "product":
        return _dense(torch.float64).tensor * _dense(torch.float64, seed=1).tensor
    return OPERATORS[name](torch.float64).to_dense()


@each("dtype", [torch.float32, torch.float64])
@each("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_parts_of_an_operator(name, dtype):
    access, matrix = Access(OPERATORS[name](dtype)), _matrix(name)
    limit = 1e-13 if dtype == torch.float64 else 1e-6
    rows, columns = torch.tensor([3, 0, 29]), torch.tensor([7, 7, 0, 12])
    assert (access.n, access.batch_shape) == (N, torch.Size())
    for part in (access.diagonal(), access.columns(columns), access.block(rows, columns)):
        assert part.dtype == torch.float64
    assert relative(access.diagonal(), matrix.diagonal()) < limit
    assert relative(access.columns(columns), matrix[:, columns]) < limit
    assert relative(access.block(rows, columns), matrix[rows][:, columns]) < limit
    if name != "product":  # GPyTorch approximates products with elementwise products by Lanczos
        assert relative(access.matmul(normal(N, 2)), matrix @ normal(N, 2)) < limit


@each("dtype", [torch.float32, torch.float64])
@each("name", [name for name in OPERATORS if name != "product"])
def test_accurate_product_of_the_stored_entries(name, dtype):
    """Float64 arithmetic on the operator as it is: float32 data are not better than they are, nor worse."""
    operator = OPERATORS[name](dtype)
    found = AccurateProduct(operator)(normal(N, 3))
    assert found.dtype == torch.float64
    twin = OPERATORS[name](dtype).evaluate_kernel().double()
    if name == "kernel-matrix":  # in float64 from the float32 inputs and parameters
        kernel = _kernel().to(dtype).double()
        expected = dense(kernel, points(N, dtype=dtype).double())
    elif name == "dense":
        expected = twin.to_dense()
    else:
        assert relative(found, _matrix(name) @ normal(N, 3)) < (1e-13 if dtype == torch.float64 else 1e-6)
        return
    assert relative(found, expected @ normal(N, 3)) < 1e-13


def test_no_columns():
    """What a preconditioner of rank 0 reads, of an operator that cannot be indexed by nothing too."""
    interpolated = InterpolatedLinearOperator(_dense(torch.float64), torch.arange(N).unsqueeze(1))
    none = torch.empty(0, dtype=torch.long)
    for operator in (*(make(torch.float32) for make in OPERATORS.values()), interpolated):
        access = Access(operator)
        assert access.columns(none).shape == (N, 0) and access.block(none, none).shape == (0, 0)
        assert access.columns(none).dtype == torch.float64


def test_accurate_product_stores_no_float64_matrix():
    operator = KernelMatrix.of(_kernel(), points(N, dtype=torch.float32), engine="dense").detach()
    product = AccurateProduct(operator)
    product(normal(N, 1))
    assert not any(DENSE.holds(term.pairs) for _, term in product._terms)


def test_accurate_product_by_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("sketchgp.operators.access._CONVERTED", 3 * N)
    operator = _dense(torch.float32)
    assert relative(AccurateProduct(operator)(normal(N, 2)), operator.tensor.double() @ normal(N, 2)) < 1e-14


def test_float32_kernel_matrix_is_read_in_float64():
    access = Access(_kernel_matrix(torch.float32))
    assert access.exact
    assert access.resolution == torch.finfo(torch.float64).eps
    expected = dense(_kernel().double(), points(N, dtype=torch.float32).double())
    assert relative(access.columns(torch.arange(N)), expected) < 1e-13
    assert Access(_dense(torch.float32)).resolution == torch.finfo(torch.float32).eps


@pytest.mark.parametrize("stored", [True, False], ids=["dense", "kernel-matrix"])
def test_batches(stored):
    kernel = set_scales(ScaleKernel(RBFKernel()).double())
    x = points(2 * N).reshape(2, N, 3)
    matrix = kernel(x).to_dense().detach()
    operator = DenseLinearOperator(matrix) if stored else KernelMatrix.of(kernel, x)
    access = Access(operator)
    shared, own = torch.tensor([1, 5, 2]), torch.tensor([[1, 5, 2], [0, 9, 9]])
    picked = torch.stack([matrix[b][:, own[b]] for b in range(2)])
    assert relative(access.columns(shared), matrix[:, :, shared]) < 1e-12
    assert relative(access.columns(own), picked) < 1e-12
    assert relative(access.block(own, own), torch.stack([picked[b][own[b]] for b in range(2)])) < 1e-12
    assert relative(columns(element(access.operator, (1,)), shared), matrix[1][:, shared]) < 1e-12


def test_columns_of_a_matrix_for_each_task_take_no_products(monkeypatch):
    kernel = ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])).double()
    kernel.outputscale = torch.tensor([1.0, 3.0])
    operator = BlockInterleavedLinearOperator(KernelMatrix.of(kernel, points(N).expand(2, N, 3)))
    whole, indices = operator.to_dense().detach(), torch.tensor([4, 0, 9, 2 * N - 1])
    for name in ("_matmul", "product"):
        monkeypatch.setattr(KernelMatrix, name, None)
    assert relative(Access(operator).columns(indices), whole[:, indices]) < 1e-14


def test_columns_carry_gradients_to_the_hyperparameters():
    kernel = set_scales(ScaleKernel(RBFKernel()))  # float32 parameters
    access = Access(KernelMatrix.of(kernel, points(N, dtype=torch.float32)))
    access.columns(torch.tensor([0, 3])).sum().backward()
    twin = set_scales(ScaleKernel(RBFKernel()).double())
    twin(points(N, dtype=torch.float32).double()).to_dense()[:, [0, 3]].sum().backward()
    for found, expected in zip(kernel.parameters(), twin.parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        assert relative(found.grad, expected.grad) < 1e-5


def test_rounding_of_many_turns():
    """Digits of a phase are lost to the turns before it, however near the inputs are to nought."""
    kernel = PeriodicKernel().double()
    kernel.period_length, kernel.lengthscale = 2.0**-10, 0.1
    x, z = points(30, 1), points(7, 1, seed=1)
    exact = KernelMatrix.of(kernel, *(1024 * side % 1 / 1024 for side in (x, z))).to_dense()  # in binary, no digit less
    left, right = entry_rounding(KernelMatrix.of(kernel, x, z))
    off = (KernelMatrix.of(kernel, x, z).to_dense() - exact).abs()
    assert bool((off <= left.unsqueeze(1) + right).all())
    assert float(right.max()) < 1e-9

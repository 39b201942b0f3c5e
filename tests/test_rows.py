"""Rows of symmetric matrices times vectors, blocks and their inverses, and how blocks are drawn: against dense ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel
from linear_operator.operators import (
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    MulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    ToeplitzLinearOperator,
)

from cases import each, pairwise
from problems import GENERIC, RADIAL, dense, identity, matrices, normal, points, relative, set_scales, with_spectrum
from sketchgp import LaplaceKernel, NumericalError
from sketchgp.operators import KernelMatrix, access
from sketchgp.operators.access import RowProduct
from sketchgp.preconditioners import smoothness
from sketchgp.random_streams import generator
from sketchgp.settings import memory_budget
from sketchgp.solvers import System
from sketchgp.solvers.full.blocks import Partition, block_inverse, draw_rows, next_block
from sketchgp.solvers.system import automatic_block_size

KERNELS = {**RADIAL, **GENERIC, "laplace": lambda: ScaleKernel(LaplaceKernel(ard_num_dims=3))}
DTYPES = [torch.float64, torch.float32]
INDICES = {
    "some": torch.tensor([40, 3, 17, 4, 89]),
    "one": torch.tensor([7]),
    "all": torch.randperm(90, generator=torch.Generator().manual_seed(5)),
    "repeated": torch.tensor([2, 2, 60, 2]),
}


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _exact(name, kernel, a, b=None):
    """The kernel in float64 without sketchgp; the kernel is left as it was."""
    b = a if b is None else b
    dtype = next(kernel.parameters()).dtype
    kernel.double()
    if name == "laplace":
        distances = ((a.double().unsqueeze(1) - b.double()).abs() / kernel.base_kernel.lengthscale).sum(-1)
        found = kernel.outputscale * (-distances).exp()
    else:
        found = dense(kernel, a.double(), b.double())
    kernel.to(dtype)
    return found.detach()


def _case(name, dtype=torch.float64, n=90, twice=False, lengthscale=0.7):
    """Kernel, inputs (with duplicates where asked for), and the dense float64 matrix of exactly these numbers."""
    kernel = set_scales(KERNELS[name](), lengthscale=lengthscale).to(dtype)
    x = points(n // 2).repeat(2, 1).to(dtype) if twice else points(n, dtype=dtype)
    return kernel, x, _exact(name, kernel, x)


def _close(found, expected, matrix, vectors, dtype):
    """Within the rounding of entries of that dtype."""
    eps = torch.finfo(dtype).eps
    scale = (matrix.abs() @ vectors.abs()).max()
    return float((found - expected).abs().max() / scale) < 40 * eps


# --- RowProduct -----------------------------------------------------------------------------------------------


@each(("name", "dtype", "engine", "which"), pairwise(KERNELS, DTYPES, ["dense", "tiled"], INDICES))
def test_rows_of_a_kernel_matrix(name, dtype, engine, which):
    kernel, x, matrix = _case(name, dtype)
    indices, vectors = INDICES[which], normal(90, 2, seed=3)
    before = indices.clone(), vectors.clone()
    found = RowProduct(KernelMatrix.of(kernel, x, engine=engine))(indices, vectors)
    assert found.dtype == torch.float64
    assert found.shape == (len(indices), 2)
    assert _close(found, matrix[indices] @ vectors, matrix[indices], vectors, dtype)
    assert torch.equal(indices, before[0])
    assert torch.equal(vectors, before[1])


COLUMNS = [torch.tensor([88, 3, 41]), torch.tensor([17]), torch.arange(89, -1, -1)]


@each("accurate", [False, True])
@each("engine", ["dense", "tiled"])
@each("dtype", DTYPES)
@each("name", ["rbf-ard", "matern12", "matern52", "rational-quadratic", "sum", "laplace"])
def test_some_columns_of_rows_of_a_kernel_matrix(name, dtype, engine, accurate):
    kernel, x, matrix = _case(name, dtype)
    product = RowProduct(KernelMatrix.of(kernel, x, engine=engine), accurate=accurate)
    for indices in INDICES.values():
        for columns in COLUMNS:
            block, vectors = matrix[indices][:, columns], normal(len(columns), 2, seed=3)
            found = product(indices, vectors, columns)
            assert found.dtype == torch.float64
            assert _close(found, block @ vectors, block + 0.1, vectors, torch.float64 if accurate else dtype)


@each("engine", ["dense", "tiled"])
@each("dtype", DTYPES)
def test_rows_by_many_tiles(dtype, engine, many_tiles, monkeypatch):
    monkeypatch.setattr(access, "_GATHERED", {"cpu": 200})  # two rows at a time
    for name in ("rbf-ard", "matern12", "rational-quadratic", "polynomial"):
        kernel, x, matrix = _case(name, dtype)
        for indices in INDICES.values():
            vectors = normal(90, 3, seed=4)
            found = RowProduct(KernelMatrix.of(kernel, x, engine=engine))(indices, vectors)
            assert _close(found, matrix[indices] @ vectors, matrix[indices], vectors, dtype)


@each("engine", ["dense", "tiled"])
@each("name", KERNELS)
def test_accurate_rows_of_float32_are_float64(name, engine):
    kernel, x, matrix = _case(name, torch.float32)
    operator, vectors = KernelMatrix.of(kernel, x, engine=engine), normal(90, 2, seed=3)
    indices = INDICES["some"]
    expected = matrix[indices] @ vectors
    assert relative(RowProduct(operator, accurate=True)(indices, vectors), expected) < 1e-13
    assert relative(RowProduct(operator)(indices, vectors), expected) > 1e-10
    assert operator.dtype == torch.float32


def _sums(dtype):
    """Operators with their dense forms, made of the same numbers."""
    first, x, k1 = _case("rbf-ard", dtype)
    second, _, k2 = _case("rational-quadratic", dtype)
    a, b = KernelMatrix.of(first, x), KernelMatrix.of(second, x, engine="dense")
    stored = with_spectrum(torch.linspace(0, 2, 90, dtype=torch.float64)).to(dtype)
    diagonal = normal(90, seed=6, dtype=dtype).abs()
    c, d = DenseLinearOperator(stored), DiagLinearOperator(diagonal)
    two, three = torch.tensor(2.5, dtype=dtype), torch.tensor(-0.75, dtype=dtype)
    times = ConstantMulLinearOperator
    k3, k4 = stored.double(), diagonal.double().diag()
    return {
        "sum": (SumLinearOperator(a, b), k1 + k2),
        "with stored and diagonal": (SumLinearOperator(a, c, d), k1 + k3 + k4),
        "scaled": (times(a, two), 2.5 * k1),
        "scaled sum of scaled": (times(SumLinearOperator(times(a, three), c, b), two), 2.5 * (-0.75 * k1 + k3 + k2)),
        "sum of sums": (SumLinearOperator(SumLinearOperator(a, d), SumLinearOperator(b, c)), k1 + k4 + k2 + k3),
        "twice the same": (SumLinearOperator(a, a), 2 * k1),
    }


@each("accurate", [False, True])
@each("dtype", DTYPES)
def test_rows_of_sums_and_multiples(dtype, accurate):
    vectors = normal(90, 2, seed=3)
    for (operator, matrix), indices in itertools.product(_sums(dtype).values(), INDICES.values()):
        found = RowProduct(operator, accurate=accurate)(indices, vectors)
        kept = torch.float64 if accurate else dtype
        assert found.dtype == torch.float64
        assert _close(found, matrix[indices] @ vectors, matrix.abs()[indices] + 1, vectors, kept)
        for columns in COLUMNS:
            block, some = matrix[indices][:, columns], vectors[columns]
            found = RowProduct(operator, accurate=accurate)(indices, some, columns)
            assert found.dtype == torch.float64
            assert _close(found, block @ some, block.abs() + 1, some, kept)


def _others(dtype):
    column = (-torch.arange(24, dtype=dtype) / 3).exp()
    factor = normal(24, 5, seed=1, dtype=dtype)
    small = [with_spectrum(torch.linspace(1, 2, k, dtype=torch.float64)).to(dtype) for k in (4, 6)]
    return {
        "stored": DenseLinearOperator(with_spectrum(torch.linspace(0, 2, 24, dtype=torch.float64)).to(dtype)),
        "toeplitz": ToeplitzLinearOperator(column),
        "root": RootLinearOperator(factor),
        "kronecker": KroneckerProductLinearOperator(*(DenseLinearOperator(m) for m in small)),
        "diagonal": DiagLinearOperator(column),
        "product": MulLinearOperator(
            *(DenseLinearOperator(with_spectrum(1 + column, seed=k).to(dtype)) for k in (2, 3))
        ),
    }


@each("accurate", [False, True])
@each("dtype", DTYPES)
@each("name", list(_others(torch.float64)))
def test_rows_of_other_operators(name, dtype, accurate):
    operator, vectors = _others(dtype)[name], normal(24, 3, seed=2)
    matrix = _others(dtype)[name].double().to_dense() if name != "stored" else operator.tensor.double()
    for indices in (torch.tensor([5]), torch.tensor([20, 1, 7, 7]), torch.arange(24)):
        found = RowProduct(operator, accurate=accurate)(indices, vectors)
        assert found.dtype == torch.float64
        kept = torch.float64 if accurate else dtype
        assert _close(found, matrix[indices] @ vectors, matrix[indices].abs() + 0.1, vectors, kept)
        for columns in (torch.tensor([23, 0, 7]), torch.tensor([1])):
            block, some = matrix[indices][:, columns], vectors[columns]
            found = RowProduct(operator, accurate=accurate)(indices, some, columns)
            assert found.dtype == torch.float64
            assert _close(found, block @ some, block.abs() + 0.1, some, kept)


def test_rows_of_what_the_matrices_of_the_other_tests_are():
    for name, (matrix, _) in matrices().items():
        n = len(matrix)
        indices, vectors = torch.arange(n - 1, -1, -2), normal(n, 2, seed=1)
        found = RowProduct(DenseLinearOperator(matrix))(indices, vectors)
        assert relative(found, matrix[indices] @ vectors) < 1e-14, name


def test_rows_do_not_change_what_was_given():
    kernel, x, matrix = _case("matern32-ard", torch.float32)
    operator = KernelMatrix.of(kernel, x, engine="dense")
    product, vectors = RowProduct(operator), normal(90, 1, seed=3).expand(90, 2)
    first = product(INDICES["some"], vectors)
    for _ in range(3):
        assert torch.equal(product(INDICES["some"], vectors), first)
    assert relative(operator.to_dense(), matrix) < 1e-6
    assert not first.requires_grad


def test_stored_blocks():
    """Exactly what is stored; None where some of the matrix is not."""
    kernel, x, matrix = _case("rbf-ard", torch.float32)
    a, b = (KernelMatrix.of(kernel, x, engine=engine) for engine in ("dense", "tiled"))
    c = DenseLinearOperator(with_spectrum(torch.linspace(0, 2, 90, dtype=torch.float64)))
    scaled = SumLinearOperator(ConstantMulLinearOperator(a, torch.tensor(2.5)), c)
    for indices in INDICES.values():
        block = matrix[indices][:, indices]
        for operator, expected in ((a, block), (scaled, 2.5 * block + c.tensor[indices][:, indices])):
            found = RowProduct(operator).stored_block(indices)
            assert found.dtype == torch.float64
            assert relative(found, expected) < 1e-6
        found.fill_(7.0)  # a copy, which solvers factorize in place
        assert relative(RowProduct(a).stored_block(indices), block) < 1e-6
        stored = RowProduct(c).stored_block(indices)
        assert torch.equal(stored, c.tensor[indices][:, indices])
        stored.fill_(7.0)
        assert relative(RowProduct(c).stored_block(indices), c.tensor[indices][:, indices]) == 0
        for operator in (b, SumLinearOperator(a, b), DiagLinearOperator(torch.ones(90))):
            assert RowProduct(operator).stored_block(indices) is None


def test_engines_go_round():
    kernel, x, _ = _case("rbf-ard")
    other = set_scales(KERNELS["rational-quadratic"]())
    a, b, c = (KernelMatrix.of(k, x, engine=e) for k, e in ((kernel, "dense"), (other, "tiled"), (kernel, "auto")))
    operator = SumLinearOperator(a, DiagLinearOperator(torch.ones(90, dtype=torch.float64)), b, c)
    product = RowProduct(operator)
    assert product.engines[:2] == ["dense", "tiled"]
    assert product.engines[2] in ("dense", "tiled")  # decided: nothing is left to the memory that is free later
    again = RowProduct(operator, engines=product.engines)
    assert again.engines == product.engines
    vectors = normal(90, 2, seed=3)
    for indices in INDICES.values():
        assert torch.equal(again(indices, vectors), product(indices, vectors))
    for chosen in (["tiled", "dense", "tiled"], ["dense", "dense", "dense"], ["tiled", "tiled", "dense"]):
        other_way = RowProduct(operator, engines=chosen)
        assert other_way.engines == chosen
        assert relative(other_way(INDICES["some"], vectors), product(INDICES["some"], vectors)) < 1e-13
    assert [part.engine for part in (a, b, c)] == ["dense", "tiled", "auto"]


def test_engines_of_what_is_not_a_kernel_matrix():
    assert RowProduct(DenseLinearOperator(identity(4))).engines == []
    assert RowProduct(DenseLinearOperator(identity(4)), engines=[]).engines == []


def test_named_engines_are_kept():
    kernel, x, _ = _case("rbf-ard")
    for name in ("dense", "tiled"):
        assert RowProduct(KernelMatrix.of(kernel, x, engine=name)).engines == [name]


@each("kernel", [RBFKernel(), LaplaceKernel(), PolynomialKernel(power=2)])
@each("features", [2, 200])
def test_nothing_is_stored_beyond_the_budget(kernel, features):
    x = points(60, features)
    operator = KernelMatrix.of(kernel.double(), x)
    with memory_budget(8 * 60 * 60 - 1):
        assert RowProduct(operator).engines == ["tiled"]
    with memory_budget(8 * 60 * 60):
        stored = RowProduct(operator).engines
    cheap = features == 2 and not isinstance(kernel, PolynomialKernel)
    assert stored == (["tiled"] if cheap else ["dense"])  # cheap entries are faster evaluated than fetched


# --- KernelMatrix.rows ----------------------------------------------------------------------------------------


@each(("name", "dtype", "twice", "engine"), pairwise(KERNELS, DTYPES, [False, True], ["auto", "dense", "tiled"]))
def test_kernel_matrix_rows(name, dtype, twice, engine):
    """Duplicated points included, where distances must come out as 0: a Matern-1/2 kernel has a kink there."""
    kernel, x, matrix = _case(name, dtype, twice=twice)
    whole = KernelMatrix.of(kernel, x, engine=engine)
    for indices in INDICES.values():
        part = whole.rows(indices)
        assert part.shape == (len(indices), 90)
        assert part.dtype == dtype
        scale, bound = float(matrix.abs().max()), 40 * torch.finfo(dtype).eps
        found = part.to_dense().detach().double()
        assert float((found - matrix[indices]).abs().max()) < bound * scale
        columns = torch.tensor([60, 2, 2, 89, 17])
        block = whole.rows(indices, columns).to_dense().detach().double()
        assert float((block - matrix[indices][:, columns]).abs().max()) < bound * scale
        vectors = normal(90, 2, seed=7, dtype=dtype)
        product = part._matmul(vectors).double()
        assert _close(product, matrix[indices] @ vectors.double(), matrix[indices], vectors.double(), dtype)


@each("dtype", DTYPES)
@each("name", ["matern12", "matern52-ard", "rbf-ard", "laplace"])
def test_kernel_matrix_rows_far_from_the_origin(name, dtype):
    kernel = set_scales(KERNELS[name]()).to(dtype)
    x = points(40, shift=1000.0).repeat(2, 1).to(dtype)
    matrix = _exact(name, kernel, x)
    for indices in (torch.tensor([3, 43, 10]), torch.arange(80)):
        found = KernelMatrix.of(kernel, x).rows(indices).to_dense().detach().double()
        assert float((found - matrix[indices]).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-11)


def test_kernel_matrix_rows_of_a_rectangular_matrix():
    kernel = set_scales(KERNELS["matern32"]()).double()
    a, b = points(30), points(50, seed=9)
    matrix = _exact("matern32", kernel, a, b)
    indices = torch.tensor([29, 0, 5])
    part = KernelMatrix.of(kernel, a, b).rows(indices)
    assert relative(part.to_dense(), matrix[indices]) < 1e-14
    columns = torch.tensor([49, 0, 20, 20])
    block = KernelMatrix.of(kernel, a, b).rows(indices, columns)
    assert block.shape == (3, 4)
    assert relative(block.to_dense(), matrix[indices][:, columns]) < 1e-14
    assert relative(part @ identity(50), matrix[indices]) < 1e-14


def test_rows_of_rows_and_blocks_of_rows():
    kernel, x, matrix = _case("matern12", twice=True)
    whole, some = KernelMatrix.of(kernel, x), torch.tensor([80, 35, 2, 60])
    again = torch.tensor([2, 0])
    assert relative(whole.rows(some).rows(again).to_dense(), matrix[some[again]]) < 1e-14
    columns = torch.tensor([1, 80, 35, 35])
    assert relative(whole.rows(some).block(again, columns), matrix[some[again]][:, columns]) < 1e-14


@pytest.mark.parametrize("name", ["rbf-ard", "matern52-ard", "rational-quadratic"])
def test_kernel_matrix_rows_are_differentiable(name):
    kernel, x, _ = _case(name)
    indices, weights = INDICES["some"], normal(5, 90, seed=8)
    gradients = []
    for evaluate in (
        lambda x: KernelMatrix.of(kernel, x).rows(indices).to_dense(),
        lambda x: kernel(x).to_dense()[indices],
    ):
        inputs = x.clone().requires_grad_()
        kernel.zero_grad()
        (evaluate(inputs) * weights).sum().backward()
        gradients.append([inputs.grad, *(p.grad.clone() for p in kernel.parameters())])
    for found, expected in zip(*gradients, strict=True):
        assert relative(found, expected) < 1e-7


# --- System ----------------------------------------------------------------------------------------------


def _system(name="rbf-ard", dtype=torch.float64, engine="auto"):
    """Noise of its own for each point; the dense matrices without and with it."""
    kernel, x, matrix = _case(name, dtype)
    noise = torch.linspace(0.1, 2, 90, dtype=torch.float64)
    return System(KernelMatrix.of(kernel, x, engine=engine), noise), matrix, matrix + noise.diag()


@each("engine", ["dense", "tiled"])
@each("dtype", DTYPES)
@each("name", ["rbf-ard", "matern12", "sum"])
def test_block_system(name, dtype, engine):
    system, matrix, shifted = _system(name, dtype, engine)
    vectors = normal(90, 2, seed=3)
    before = vectors.clone()
    assert (system.n, system.dtype, system.device.type) == (90, dtype, "cpu")
    for indices in INDICES.values():
        expected = shifted[indices] @ vectors
        assert _close(system.rows(indices, vectors), expected, shifted[indices], vectors, dtype)
        assert relative(system.rows(indices, vectors, accurate=True), expected) < 1e-13
        block = system.block(indices, INDICES["some"])
        assert block.dtype == torch.float64  # of a float32 kernel too: blocks are factorized
        assert relative(block, matrix[indices][:, INDICES["some"]]) < 1e-13
        assert relative(system.block(indices, indices), matrix[indices][:, indices]) < 1e-13
    assert relative(system.accurate_product(vectors), shifted @ vectors) < 1e-13
    assert torch.equal(vectors, before)


@each("engine", ["dense", "tiled"])
@each("dtype", DTYPES)
def test_block_system_cross(dtype, engine):
    """``(K + noise)[rows, columns] v``: the noise belongs to rows that are among the columns, in whatever order."""
    system, _, shifted = _system("matern12", dtype, engine)
    shuffled = INDICES["all"]
    for rows_, columns in (
        (torch.tensor([3, 50, 7]), torch.tensor([50, 8, 3, 9])),
        (torch.tensor([3, 50, 7]), torch.tensor([4, 51])),
        (shuffled, shuffled.flip(0)),
        (shuffled[:40], torch.arange(90)),
        (torch.tensor([0]), torch.tensor([0])),
        (torch.tensor([89, 0]), torch.tensor([0])),
    ):
        vectors, before = normal(len(columns), 2, seed=3), system.entries
        block = shifted[rows_][:, columns]
        assert _close(system.cross(rows_, columns, vectors), block @ vectors, block + 0.1, vectors, dtype)
        assert system.entries == before + len(rows_) * len(columns)


@each("dtype", DTYPES)
@each("engine", ["dense", "tiled"])
@each("noise", [1.0, 1e-6])
def test_block_system_square_block(noise, engine, dtype):
    """Float32 entries are good enough for a block beside noise that is far above their rounding, else float64."""
    kernel, x, matrix = _case("rbf-ard", dtype)
    vector = torch.full((90,), 1e3, dtype=torch.float64)
    vector[30] = noise  # the least counts
    for index in ("some", "all"):
        indices = INDICES[index]
        system = System(KernelMatrix.of(kernel, x, engine=engine), vector)
        found, block = system.square_block(indices), matrix[indices][:, indices]
        assert found.dtype == torch.float64
        assert relative(found, block) < 1e-6
        rounded = relative(found, block) > 1e-10
        assert rounded == (dtype == torch.float32 and engine == "dense" and noise == 1.0)
        assert system.entries == len(indices) ** 2
        found.fill_(float("nan"))  # a copy
        assert relative(system.square_block(indices), block) < 1e-6


def test_block_system_counts_entries():
    system, _, _ = _system()
    vectors, some = normal(90, 5, seed=3), INDICES["some"]
    assert system.entries == 0
    steps = [
        (lambda: system.rows(some, vectors), 5 * 90),
        (lambda: system.rows(some, vectors, accurate=True), 5 * 90),
        (lambda: system.block(some, INDICES["repeated"]), 5 * 4),
        (lambda: system.accurate_product(vectors), 90 * 90),
    ]
    total = 0
    for do, entries in steps:
        do()
        total += entries
        assert system.entries == total


def test_block_system_with_other_engines():
    """Those of the file are taken; but an engine that was asked for by name is, and the difference is told."""
    for engine, own, made in (("auto", "tiled", "dense"), ("dense", "dense", "dense"), ("tiled", "tiled", "tiled")):
        system, _, shifted = _system("matern32", engine=engine)
        assert system.engines == [own]
        assert system.use_engines(["dense"]) == (made != "dense")
        assert system.engines == [made]
        vectors = normal(90, 2, seed=3)
        assert relative(system.rows(INDICES["some"], vectors), shifted[INDICES["some"]] @ vectors) < 1e-13


def test_automatic_block_size():
    device = torch.device("cpu")
    for n in (1, 2, 100, 512):
        assert automatic_block_size(n, device) == n
    assert automatic_block_size(600, device) == 512
    for n in (30_000, 100_000, 1_000_000):
        for engines, operations in ((("tiled",), 10), (("fused",), 4), (("fused", "tiled"), 10)):
            size = automatic_block_size(n, device, engines)
            assert abs(size**3 / 3 - operations * n * size) < 0.03 * size**3
        with memory_budget(2**40):
            assert abs(automatic_block_size(n, torch.device("cuda")) ** 2 - 60 * n) < 0.03 * 60 * n
    # eight bytes an entry, four arrays of the block's size
    with memory_budget(4 * 8 * 50**2):
        assert automatic_block_size(1_000_000, device) == 50
    with memory_budget(4 * 8 * 50**2 - 1):
        assert automatic_block_size(1_000_000, device) == 49
    with memory_budget(1):
        assert automatic_block_size(1_000_000, device) == 1


# --- smoothness -----------------------------------------------------------------------------------------------


def _smoothness(h, p=None, **options):
    inverse = (lambda v: v) if p is None else (lambda v: torch.linalg.solve(p, v))
    options = {"generator": _generator(), "device": torch.device("cpu"), **options}
    return smoothness(lambda v: h @ v, inverse, len(h), **options)


def _largest(h, p):
    root = torch.linalg.cholesky(p)
    whitened = torch.linalg.solve_triangular(root, torch.linalg.solve_triangular(root, h, upper=False).mT, upper=False)
    return float(torch.linalg.eigvalsh((whitened + whitened.mT) / 2)[-1])


@each("scale", [1e-12, 1.0, 1e12])
@each("seed", [0, 1])
def test_smoothness(seed, scale):
    h = scale * (with_spectrum(torch.logspace(0, -6, 40, dtype=torch.float64), seed=seed) + 1e-3 * identity(40))
    p = with_spectrum(torch.logspace(1, -1, 40, dtype=torch.float64), seed=seed + 5)
    for preconditioner in (identity(40), p, h):
        exact = _largest(h, preconditioner)
        found = _smoothness(h, preconditioner, iterations=300, generator=_generator(seed))
        assert found == pytest.approx(exact, rel=1e-6)
        quick = _smoothness(h, preconditioner, generator=_generator(seed))
        assert 0.7 * exact <= quick <= exact * (1 + 1e-9)  # from below, and enough: a step wants half of it


def test_smoothness_of_kernel_blocks():
    """The estimate that the solvers use, for their matrices: steps of 1 / estimate contract where it is over half."""
    for name in ("rbf-ard", "matern12", "laplace", "periodic"):
        _, _, matrix = _case(name)
        h = matrix + 1e-3 * identity(90)
        for seed in range(5):
            estimate = _smoothness(h, generator=_generator(seed))
            assert 0.9 * float(torch.linalg.eigvalsh(h)[-1]) < estimate <= float(torch.linalg.eigvalsh(h)[-1]) * 1.0001


def test_smoothness_of_one_and_of_nothing():
    assert _smoothness(torch.tensor([[3.0]], dtype=torch.float64), iterations=1) == pytest.approx(3.0)
    assert _smoothness(torch.zeros(5, 5, dtype=torch.float64)) == 0
    assert _smoothness(4 * identity(6), 0.5 * identity(6)) == pytest.approx(8.0)


# --- block_inverse --------------------------------------------------------------------------------------------


def _block(name="rbf-ard", n=90, noise=1e-2):
    _, _, matrix = _case(name, n=n)
    return matrix, noise * torch.linspace(0.5, 2, n, dtype=torch.float64)


@each("rank", [None, 90, 200])
@each("name", ["rbf-ard", "matern12", "periodic"])
def test_exact_inverse(name, rank):
    matrix, noise = _block(name)
    inverse, g = block_inverse(matrix.clone(), noise, rank, _generator()), normal(90, 3, seed=4)
    assert inverse.smoothness == 1
    kept = g.clone()
    assert relative(inverse.apply(g), torch.linalg.solve(matrix + noise.diag(), g)) < 1e-9
    assert torch.equal(g, kept)


def _nystrom(matrix, noise, rank, stream):
    """P from its definition: the projection of the block on the range of a random basis, its least eigenvalue added."""
    basis = torch.linalg.qr(torch.randn(len(matrix), rank, dtype=torch.float64, generator=stream)).Q
    sketch = matrix @ basis
    approximation = sketch @ torch.linalg.pinv(basis.mT @ sketch, hermitian=True) @ sketch.mT
    least = torch.linalg.eigvalsh((approximation + approximation.mT) / 2)[-rank].clamp(min=0)
    return approximation + noise.diag() + least * identity(len(matrix))


@each("seed", [0, 1])
@each("rank", [1, 10, 30])
@each("name", ["matern12", "laplace", "matern32-ard"])
def test_nystrom_inverse(name, rank, seed):
    matrix, noise = _block(name)
    inverse = block_inverse(matrix.clone(), noise, rank, _generator(seed))
    expected = _nystrom(matrix, noise, rank, _generator(seed))
    g = normal(90, 2, seed=4)
    assert relative(inverse.apply(g), torch.linalg.solve(expected, g)) < 1e-6
    exact = _largest(matrix + noise.diag(), expected)
    assert 0.8 * exact <= inverse.smoothness <= exact * (1 + 1e-6)


def test_nystrom_inverse_of_a_block_of_low_rank():
    """Eigenvalues of the approximation that are zero must not be inverted."""
    for name in ("constant", "rank-deficient", "zero", "duplicated"):
        matrix, true_rank = matrices()[name]
        noise = torch.full((len(matrix),), 0.1, dtype=torch.float64)
        rank = min(len(matrix) - 1, true_rank + 3)
        inverse = block_inverse(matrix.clone(), noise, rank, _generator())
        shifted, g = matrix + noise.diag(), normal(len(matrix), 1, seed=4)
        assert relative(inverse.apply(g), torch.linalg.solve(shifted, g)) < 1e-6, name  # the approximation is exact
        assert inverse.smoothness == pytest.approx(1.0, rel=1e-6), name


def test_no_preconditioner():
    matrix, noise = _block("matern52-ard")
    inverse, g = block_inverse(matrix.clone(), noise, 0, _generator()), normal(90, 2, seed=4)
    assert torch.equal(inverse.apply(g), g)
    largest = float(torch.linalg.eigvalsh(matrix + noise.diag())[-1])
    assert 0.95 * largest <= inverse.smoothness <= largest * (1 + 1e-9)


@each("rank", [None, 0, 5, 40])
@each("name", ["rbf-ard", "matern12", "laplace"])
def test_a_step_shrinks_the_error(name, rank):
    """``e -> e - P^-1 A e / L`` in the norm of A, for random errors and the worst one."""
    matrix, noise = _block(name, noise=1e-4)
    shifted = matrix + noise.diag()
    for seed in range(3):
        inverse = block_inverse(matrix.clone(), noise, rank, _generator(seed))
        errors = torch.cat([normal(90, 5, seed=seed), torch.linalg.eigh(shifted).eigenvectors[:, [0, -1]]], dim=1)
        moved = errors - inverse.apply(shifted @ errors) / inverse.smoothness
        before, after = ((e * (shifted @ e)).sum(0) for e in (errors, moved))
        assert bool((after <= before).all())


@pytest.mark.parametrize("rank", [None, 10])
def test_blocks_that_are_not_positive_definite(rank):
    with pytest.raises(NumericalError, match="positive"):
        block_inverse(-identity(20), torch.full((20,), 0.1, dtype=torch.float64), rank, _generator()).checked()
    broken = identity(20)
    broken[3, 3] = float("nan")
    with pytest.raises(NumericalError):
        block_inverse(broken, torch.full((20,), 0.1, dtype=torch.float64), rank, _generator()).checked()


# --- drawing blocks -------------------------------------------------------------------------------------------


def _pass(n, size, generator):
    """The blocks of one pass."""
    rest, blocks = torch.empty(0, dtype=torch.long), []
    while not blocks or (len(rest) and len(blocks) <= n):
        block, rest = next_block(n, size, rest, generator, torch.device("cpu"))
        blocks.append(block)
    return blocks


def test_shuffled_blocks_are_a_partition():
    for n in (*range(1, 25), 100, 1000, 1001):
        for size in {1, 2, 3, 5, 7, n // 3, n // 2, (2 * n) // 3, n - 1, n} & set(range(1, n + 1)):
            blocks = _pass(n, size, _generator(n))
            assert torch.equal(torch.cat(blocks).sort().values, torch.arange(n)), (n, size)
            lengths = [len(block) for block in blocks]
            assert 0.5 * size <= min(lengths) <= max(lengths) <= 1.5 * size, (n, size, lengths)


def test_passes_are_shuffled_anew():
    generator = _generator()
    first, second = _pass(100, 20, generator), _pass(100, 20, generator)
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert {frozenset(block.tolist()) for block in first} != {frozenset(block.tolist()) for block in second}
    assert torch.equal(torch.cat(_pass(100, 20, _generator())), torch.cat(first))


def _counts(sampling, n, size, draws):
    generator, counts = _generator(1), torch.zeros(n)
    for _ in range(draws):
        if sampling == "uniform":
            block = draw_rows(n, size, generator, torch.device("cpu"))
        else:
            block, _ = next_block(n, size, torch.empty(0, dtype=torch.long), generator, torch.device("cpu"))
        counts[block] += 1
    return counts


@each("sampling", ["uniform", "shuffled"])
@each(("n", "size"), [(40, 2), (40, 4), (40, 5), (40, 10), (40, 39), (400, 8)])
def test_every_row_is_as_likely(sampling, n, size):
    """By the first block of a pass; within five standard deviations."""
    draws = 1000
    counts = _counts(sampling, n, size, draws)
    length = float(counts.sum()) / draws
    p = length / n
    assert float((counts - draws * p).abs().max()) < 5 * math.sqrt(draws * p * (1 - p)) + 1e-9


def test_uniform_blocks_are_of_distinct_rows():
    generator, device = _generator(), torch.device("cpu")
    for n, size in [(1, 1), (2, 1), (10, 10), (50, 3), (50, 6), (50, 7), (1000, 120), (1000, 125), (100_000, 500)]:
        seen = set()
        for _ in range(20):
            block = draw_rows(n, size, generator, device)
            assert len(block) == size
            assert len(block.unique()) == size
            assert 0 <= int(block.min()) <= int(block.max()) < n
            seen.add(tuple(block.sort().values.tolist()))
        assert len(seen) > 1 or size == n


def test_uniform_pairs_are_independent():
    """Rows of one block are no likelier together than apart: pairs of a block of 3 of 30, drawn by rejection."""
    generator, counts, draws = _generator(2), torch.zeros(30, 30), 6000
    for _ in range(draws):
        block = draw_rows(30, 3, generator, torch.device("cpu"))
        counts[block.unsqueeze(1), block] += 1
    counts.fill_diagonal_(0)
    p = 3 * 2 / (30 * 29)
    pairs = counts[~torch.eye(30, dtype=torch.bool)]
    assert float((pairs - draws * p).abs().max()) < 5.5 * math.sqrt(draws * p)


# --- Partition ------------------------------------------------------------------------------------------------


def _partition(size=20, rank=None, seed=0, name="rbf-ard"):
    system, matrix, shifted = _system(name)
    tensors = {}
    partition = Partition(system, size, rank, seed)
    partition.prepare(tensors)
    return partition, tensors, matrix, shifted


@each("size", [1, 7, 20, 60, 61, 89, 90])
def test_partition(size):
    partition, tensors, _, _ = _partition(size)
    blocks = [partition.block(number, tensors)[0] for number in range(partition.count)]
    assert partition.count == -(-90 // size)
    assert len(tensors["smoothness"]) == partition.count
    assert torch.equal(torch.cat(blocks).sort().values, torch.arange(90))
    lengths = [len(block) for block in blocks]
    assert max(lengths) - min(lengths) <= 1
    assert 0.5 * size <= min(lengths) <= max(lengths) <= 1.5 * size


def test_partitions_are_random_and_fixed():
    (_, a, *_), (_, b, *_), (_, c, *_) = _partition(seed=0), _partition(seed=0), _partition(seed=1)
    assert torch.equal(a["order"], b["order"])
    assert not torch.equal(a["order"], c["order"])
    assert not torch.equal(a["order"], torch.arange(90))


@pytest.mark.parametrize("rank", [None, 0, 6])
def test_partition_inverts_blocks(rank):
    partition, tensors, matrix, shifted = _partition(rank=rank)
    assert tensors["smoothness"].dtype == torch.float64
    for number in range(partition.count):
        block, inverse = partition.block(number, tensors)
        part, g = shifted[block][:, block], normal(len(block), 2, seed=1)
        assert inverse.smoothness == tensors["smoothness"][number]  # the same sketch at every visit
        again = partition.block(number, tensors)
        assert torch.equal(again[0], block)
        assert torch.equal(again[1].apply(g), inverse.apply(g))
        if rank is None:
            assert relative(inverse.apply(g), torch.linalg.solve(part, g)) < 1e-10
            assert inverse.smoothness == 1
        elif rank == 0:
            largest = float(torch.linalg.eigvalsh(part)[-1])
            assert 0.9 * largest < inverse.smoothness <= largest * 1.0001
        else:
            noise = part.diagonal() - matrix[block][:, block].diagonal()
            stream = generator(0, f"inverse of block {number} of a fixed partition")
            expected = _nystrom(matrix[block][:, block], noise, rank, stream)
            assert relative(inverse.apply(g), torch.linalg.solve(expected, g)) < 1e-6


def test_blocks_of_a_partition_are_sketched_from_seeds_of_their_own():
    """With one seed for all, blocks of equal entries would have equal inverses, whose errors add up."""
    ones = torch.ones(8, dtype=torch.float64)
    system = System(DenseLinearOperator(with_spectrum(ones)), ones)
    flat = Partition(system, 4, 1, 0)
    flat.prepare(tensors := {})
    one, two = (flat.block(number, tensors)[1].apply(identity(4)) for number in (0, 1))
    assert relative(one, two) > 1e-3


def test_a_prepared_partition_is_left_alone():
    partition, tensors, _, _ = _partition(rank=6)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    entries = partition.system.entries
    partition.prepare(tensors)
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())
    assert partition.system.entries == entries


def test_matern_kernels_are_what_they_are_called():
    """The references above are only as good as this: the nu that problems.radial reads."""
    assert [KERNELS[name]().base_kernel.nu for name in ("matern12", "matern32-ard", "matern52-ard")] == [0.5, 1.5, 2.5]
    assert isinstance(KERNELS["matern32"](), MaternKernel)

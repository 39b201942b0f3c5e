"""ASkotch, Skotch and EigenPro 2 against dense float64 solves, and their steps against the printed recursions."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from gpytorch.kernels import ConstantKernel, MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel
from linear_operator.operators import DenseLinearOperator, SumLinearOperator

from cases import each, pairwise
from problems import (
    GENERIC,
    RADIAL,
    dense,
    identity,
    normal,
    points,
    quiet,
    relative,
    set_scales,
    true_residual,
    with_spectrum,
)
from sketchgp import (
    ASkotch,
    ConvergenceWarning,
    EigenPro2,
    FullProblem,
    InputError,
    LaplaceKernel,
    NumericalError,
    Skotch,
)
from sketchgp.datasets import load_diamonds
from sketchgp.operators import KernelMatrix
from sketchgp.solvers import System
from sketchgp.solvers.full import blocks, eigenpro2

KERNELS = {**RADIAL, **GENERIC, "laplace": lambda: ScaleKernel(LaplaceKernel(ard_num_dims=3))}
VARIANTS = {
    "askotch": (ASkotch, {}),
    "askotch-uniform": (ASkotch, {"sampling": "uniform"}),
    "askotch-mu": (ASkotch, {"mu": 0.1}),
    "askotch-nystrom": (ASkotch, {"rank": 8}),
    "askotch-identity": (ASkotch, {"rank": 0}),
    "askotch-v1": (ASkotch, {"version": 1}),
    "askotch-v1-nystrom": (ASkotch, {"version": 1, "rank": 8}),
    "skotch": (Skotch, {}),
    "skotch-uniform": (Skotch, {"sampling": "uniform"}),
    "skotch-nystrom": (Skotch, {"rank": 8}),
    "skotch-identity": (Skotch, {"rank": 0}),
    "skotch-v1": (Skotch, {"version": 1}),
    "skotch-v1-nystrom": (Skotch, {"version": 1, "rank": 8}),
    "eigenpro2": (EigenPro2, {"subsample_size": 40}),
    "eigenpro1": (EigenPro2, {"subsample_size": 100}),
    "eigenpro2-rank": (EigenPro2, {"rank": 3, "subsample_size": 60}),
}
FAST = ["askotch", "askotch-uniform", "askotch-mu", "askotch-nystrom", "skotch", "eigenpro2", "eigenpro1"]
FEW = ["askotch", "askotch-nystrom", "skotch", "eigenpro2"]
EVERY_KERNEL = ["rbf-ard", "matern12", "matern52-ard", "rational-quadratic", "sum", "product", "laplace"]
F64, F32 = DTYPES = [torch.float64, torch.float32]


def _solver(variant, **options):
    kind, own = VARIANTS[variant]
    return kind(**{"block_size": 34, "max_passes": 2000, **own, **options})


def _problem(n=100, columns=None, noise=1.0, dtype=torch.float64, name="rbf-ard", lengthscale=0.3, smooth=False):
    """Targets are white noise, whose solution has entries far larger than y, or (smooth) functions of the inputs."""
    kernel = set_scales(KERNELS[name](), lengthscale=lengthscale).to(dtype)
    x, y = points(n), normal(n, columns or 1, seed=1)
    if smooth:
        y = (x @ (3 * normal(3, columns or 1, seed=2))).sin() + 0.03 * y
    y = y[:, 0] if columns is None else y
    return FullProblem(kernel, x.to(dtype), y.to(dtype), noise)


def _matrix(problem):
    """``K + noise`` in float64 from the float64 forms of the problem's inputs and raw parameters."""
    kernel, x, dtype = problem.kernel, problem.x.double(), problem.x.dtype
    kernel.double()
    base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else kernel
    if isinstance(base, LaplaceKernel):
        matrix = kernel.outputscale * (-((x.unsqueeze(1) - x).abs() / base.lengthscale).sum(-1)).exp()
    else:
        matrix = dense(kernel, x)
    kernel.to(dtype)
    return matrix.detach() + torch.diag(problem.noise_vector)


def _true_residual(problem, value, matrix=None):
    return true_residual(_matrix(problem) if matrix is None else matrix, problem.y, value)


def _check(problem, solution, tol):
    """The solution is that of a dense solve, as closely as its residual makes it."""
    assert solution.report.converged, solution.report
    assert solution.value.dtype == problem.y.dtype
    assert solution.value.shape == problem.y.shape
    matrix = _matrix(problem)
    true = _true_residual(problem, solution.value, matrix)
    assert float(true.max()) <= 1.01 * tol
    assert torch.allclose(solution.report.residual, true, rtol=1e-3, atol=1e-13)
    expected = torch.linalg.solve(matrix, problem.y.double())
    assert relative(solution.value, expected) <= 1.01 * tol * float(torch.linalg.cond(matrix))


# --- accuracy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variant"), [*zip(EVERY_KERNEL, ["askotch", "eigenpro2"] * 4, strict=False)])
def test_against_a_dense_solve(name, variant):
    problem = _problem(name=name, noise=2.0, columns=2)
    _check(problem, _solver(variant, tol=1e-8).solve(problem), 1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant):
    problem = _problem(name="laplace", noise=8.0)
    solution = _solver(variant, tol=1e-4).solve(problem)
    _check(problem, solution, 1e-4)
    report = solution.report
    assert (report.n, report.columns, report.dtype) == (100, 1, "float64")
    assert report.notes == []  # no step was too large
    assert report.solver == {"askotch-v1": "ASkotch v1", "skotch-v1": "Skotch v1"}.get(
        variant.removesuffix("-nystrom"), VARIANTS[variant][0].__name__
    )


@pytest.mark.parametrize("variant", ["askotch-uniform", "askotch-nystrom", "skotch-identity", "eigenpro2"])
def test_every_variant_in_float32(variant):
    problem = _problem(name="product", noise=2.0, dtype=torch.float32, columns=2)
    _check(problem, _solver(variant, tol=1e-4).solve(problem), 1e-4)


@pytest.mark.parametrize(
    ("variant", "matmul"), [("askotch", "dense"), ("skotch-nystrom", "tiled"), ("eigenpro2", "dense")]
)
def test_engines_differ_by_rounding(variant, matmul):
    fixed = {"mu": 0.1} if variant == "askotch" else {}  # when growing momentum restarts, rounding may decide
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        problem = _problem(name="matern12", noise=2.0, dtype=dtype, columns=3)
        solver = _solver(variant, tol=1e-12, max_passes=6, **fixed)
        with quiet():
            value, base = (solver.solve(problem, matmul=engine).value for engine in (matmul, "auto"))
        assert relative(value, base) < bound
        _check(problem, _solver(variant, tol=1e-3).solve(problem, matmul=matmul), 1e-3)


@pytest.mark.parametrize("variant", ["askotch-nystrom", "eigenpro2"])
def test_seeds_change_the_way_not_the_answer(variant):
    problem = _problem(name="laplace", noise=2.0, columns=2)
    found = [_solver(variant, tol=1e-4, seed=seed).solve(problem) for seed in (1, 2, 1)]
    for solution in found:
        _check(problem, solution, 1e-4)
    assert torch.equal(found[0].value, found[2].value)
    assert torch.equal(found[0].report.history, found[2].report.history)
    assert not torch.equal(found[0].report.history, found[1].report.history)


@pytest.mark.parametrize("variant", ["askotch-v1", "skotch-nystrom", "eigenpro1", "eigenpro2"])
def test_noise_of_its_own_for_each_point(variant):
    noise = torch.logspace(0, 1, 100, dtype=torch.float64)[torch.randperm(100)]
    problem = _problem(name="laplace", noise=noise, columns=2)
    _check(problem, _solver(variant, tol=1e-4).solve(problem), 1e-4)


@pytest.mark.parametrize("variant", ["askotch", "skotch", "askotch-nystrom"])
def test_noise_of_very_different_sizes(variant):
    noise = torch.logspace(-3, 3, 100, dtype=torch.float64)[torch.randperm(100)]
    problem = _problem(name="matern12", noise=noise, columns=2)
    _check(problem, _solver(variant, tol=1e-5).solve(problem), 1e-5)


@pytest.mark.parametrize(("variant", "block_size"), [*zip(FEW, [1, 25, None, 25], strict=True), ("skotch", 25)])
def test_every_block_size(variant, block_size):
    problem = _problem(n=40, name="laplace", noise=2.0, columns=2)
    _check(problem, _solver(variant, tol=1e-4, block_size=block_size).solve(problem), 1e-4)


def test_defaults():
    problem = _problem(n=600, name="matern52-ard", columns=2, smooth=True)
    for solver in (ASkotch(), Skotch(), EigenPro2()):
        solution = solver.solve(problem)
        _check(problem, solution, 1e-3)
        assert solution.report.tol == 1e-3
        assert "512" in solution.report.preconditioner


def test_bundled_diamonds():
    data = load_diamonds()
    chosen = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:200]
    _check_real(data.x[chosen], data.y[chosen])


def test_real_data(data_directory):
    with np.load(data_directory / "uci_airfoil.npz", allow_pickle=False) as arrays:
        x, y = (torch.from_numpy(arrays[key][:200]).double() for key in ("X", "y"))
    _check_real(x, y)


def _check_real(x, y):
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-12)
    y = (y.reshape(-1) - y.mean()) / y.std()
    for dtype, tol, rank in ((torch.float64, 1e-8, None), (torch.float32, 1e-4, 30)):
        kernel = ScaleKernel(MaternKernel(nu=2.5)).to(dtype)
        kernel.base_kernel.lengthscale = 2.0
        problem = FullProblem(kernel, x.to(dtype), y.to(dtype), 0.1)
        matrix = _matrix(problem)
        solution = ASkotch(tol=tol, block_size=60, rank=rank).solve(problem)
        assert solution.report.converged, solution.report
        residual = float(_true_residual(problem, solution.value, matrix).max())
        assert residual <= 1.01 * tol + 1e-9  # duplicated rows are at distance sqrt(eps), not 0, in the product


# --- the synthetic problem of arXiv:2407.10070, appendix C.4 --------------------------------------------------


@pytest.mark.parametrize("variant", ["askotch", "skotch-nystrom", "skotch-v1"])
def test_linear_convergence(variant):
    """Relative suboptimality falls below 1e-10, geometrically: no ten passes on the way that gain less than half of
    what passes gain on average."""
    n = 150
    x = normal(n, 10, seed=3)
    y = (x @ normal(10, seed=4)).sign()
    kernel = RBFKernel().double()
    kernel.lengthscale = 1.0
    problem = FullProblem(kernel, x, y, 0.1)
    matrix = _matrix(problem)
    best = torch.linalg.solve(matrix, y)

    def objective(w):
        return float(0.5 * w @ (matrix @ w) - w @ y)

    def suboptimality(w):  # from the error, as f(w) - f(best) cancels
        return float(0.5 * (w - best) @ (matrix @ (w - best))) / abs(objective(best))

    passes, seen = [0.0], [suboptimality(torch.zeros_like(y))]

    def callback(state):
        w = state.weights()[:, 0]
        passes.append(state.passes)
        seen.append(suboptimality(w))
        assert objective(w) >= objective(best) * (1 + 1e-12)  # the optimum is negative
        return seen[-1] < 1e-12

    solver = _solver(variant, tol=1e-12, block_size=n // 10, max_passes=300)
    with quiet():
        value = solver.solve(problem, callback=callback).value
    assert seen[0] == pytest.approx(1.0)
    assert suboptimality(value) < 1e-10
    assert abs(objective(value) - objective(best)) < 1e-10 * abs(objective(best))
    rate = math.log(seen[0] / seen[-1]) / len(seen[1:])
    for start in range(len(seen) - 10):
        gained = math.log(seen[start] / seen[start + 10]) / 10
        assert gained > rate / 2, (start, gained, rate)


def test_acceleration_pays():
    """On problems that are hard for blocks the default is far faster than no acceleration, and never much slower."""
    for noise, rank, share in ((2.0, 0, 0.6), (0.5, None, 1.15)):
        problem = _problem(noise=noise, lengthscale=0.4)
        options = {"rank": rank, "tol": 1e-3, "block_size": 20, "max_passes": 4000}
        fast, plain = (kind(**options).solve(problem).report for kind in (ASkotch, Skotch))
        assert fast.converged
        assert fast.passes <= share * plain.passes, (noise, rank, fast.passes, plain.passes)


# --- hard and odd problems ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lengthscale", "variant"),
    [("matern32", 1.0, "askotch-uniform"), ("matern32", 1.0, "askotch-nystrom"),
     ("matern52-ard", 0.3, "skotch"), ("rbf-ard", 0.16, "askotch")],
)  # fmt: skip
def test_ill_conditioned(name, lengthscale, variant):
    """Noise of 1e-6, condition numbers of 10^4 to 2 10^5."""
    problem = _problem(name=name, noise=1e-6, lengthscale=lengthscale)
    assert float(torch.linalg.cond(_matrix(problem))) > 9e3
    rank = {"rank": 35} if "nystrom" in variant else {}
    _check(problem, _solver(variant, tol=1e-6, block_size=50, **rank).solve(problem), 1e-6)


@pytest.mark.parametrize("kind", [ASkotch, Skotch])
def test_very_ill_conditioned(kind):
    """A smooth kernel and noise of 1e-6: what is reported is what was reached, and progress is made."""
    problem = _problem(noise=1e-6, smooth=True, lengthscale=0.7)
    matrix = _matrix(problem)
    assert float(torch.linalg.cond(matrix)) > 1e7
    with quiet():
        solution = kind(block_size=50, tol=1e-6, max_passes=400).solve(problem)
    true = _true_residual(problem, solution.value, matrix)
    assert torch.allclose(solution.report.residual, true, rtol=1e-4)
    assert float(true.max()) < 1e-4
    assert solution.report.converged == bool((true <= 1e-6).all())


@pytest.mark.parametrize(("variant", "dtype"), [("askotch", F32), ("askotch-nystrom", F64), ("eigenpro2", F64)])
def test_duplicated_points(variant, dtype):
    kernel = set_scales(ScaleKernel(MaternKernel(nu=0.5)), lengthscale=0.4).to(dtype)
    x = points(34).repeat(3, 1)[:100].to(dtype)
    problem = FullProblem(kernel, x, normal(100, 2, seed=1, dtype=dtype), 1.0)
    tol = 1e-8 if dtype == torch.float64 else 1e-4
    _check(problem, _solver(variant, tol=tol).solve(problem), tol)


@pytest.mark.parametrize(
    ("variant", "n", "dtype"),
    [(v, 1 + i % 3, DTYPES[i % 2]) for i, v in enumerate(v for v in VARIANTS if not v.startswith("eigenpro"))],
)
def test_few_points(variant, n, dtype):
    problem = _problem(n=n, noise=0.3, dtype=dtype, columns=2)
    tol = 1e-10 if dtype == torch.float64 else 1e-5
    _check(problem, _solver(variant, tol=tol, block_size=None).solve(problem), tol)


@pytest.mark.parametrize(("n", "dtype", "block_size"), pairwise([1, 2, 3], DTYPES, [None, 1, 2])[::3])
def test_few_points_one_by_one(n, block_size, dtype):
    problem = _problem(n=n, noise=0.3, dtype=dtype)
    tol = 1e-10 if dtype == torch.float64 else 1e-5
    for solver in (ASkotch, Skotch, EigenPro2):
        if block_size is None or block_size <= n:
            _check(problem, solver(tol=tol, block_size=block_size, max_passes=1000).solve(problem), tol)


# A window of n rows drawn with replacement can be of rows that were all solved in the steps before.  Its estimate of
# the residual is then near zero: the next one looks like divergence, and the target that the estimate has to meet is
# lowered by as much.
@pytest.mark.parametrize(
    ("variant", "n", "block_size", "seed"),
    [("askotch-uniform", 3, 1, 0), ("skotch-v1", 3, 1, 0), ("skotch-uniform", 60, 30, 2), ("askotch-v1", 60, 30, 2)],
)
def test_few_blocks_drawn_with_replacement(n, block_size, seed, variant):
    problem = _problem(n=n, name="matern12", noise=1.0, lengthscale=0.5)
    _check(problem, _solver(variant, tol=1e-6, block_size=block_size, seed=seed).solve(problem), 1e-6)


LOW_RANK = {
    "constant": ConstantKernel,
    "quadratic": lambda: PolynomialKernel(power=2, active_dims=(0, 1)),
    "one-dimensional": lambda: RBFKernel(active_dims=(0,)),
}


@pytest.mark.parametrize("variant", ["askotch", "askotch-nystrom", "eigenpro2"])
@pytest.mark.parametrize("name", LOW_RANK)
def test_kernels_of_low_rank(name, variant):
    kernel = LOW_RANK[name]().double()
    problem = FullProblem(kernel, points(100), normal(100, 2, seed=1), 3.0)
    rank = int(torch.linalg.matrix_rank(_matrix(problem) - 3.0 * identity(100), rtol=1e-10))
    assert rank <= 12
    _check(problem, _solver(variant, tol=1e-7).solve(problem), 1e-7)


def test_a_kernel_that_is_zero():
    """``(0 + noise) w = y`` is solved block by block, at once."""
    noise = torch.linspace(0.5, 2, 60, dtype=torch.float64)
    y = normal(60, 2, seed=1)
    system = System(DenseLinearOperator(torch.zeros(60, 60, dtype=torch.float64)), noise)
    for variant in ("askotch", "askotch-nystrom", "skotch", "skotch-nystrom"):
        value, report = _solver(variant, tol=1e-12).run(system, y)
        assert report.converged
        assert relative(value, y / noise.unsqueeze(1)) < 1e-10


@each(("variant", "columns", "dtype"), [(v, *((None, F64) if i % 2 else (3, F32))) for i, v in enumerate(VARIANTS)])
def test_zero_right_hand_side(variant, columns, dtype):
    problem = _problem(columns=columns, dtype=dtype)
    problem.y.zero_()
    solution = _solver(variant).solve(problem)
    assert torch.equal(solution.value, problem.y)
    assert (solution.report.iterations, solution.report.converged) == (0, True)
    assert solution.report.max_residual == 0


@pytest.mark.parametrize(("variant", "dtype"), [("askotch", F32), ("skotch-v1", F64), ("eigenpro2", F64)])
def test_columns_of_very_different_scale(variant, dtype):
    """Each column meets the tolerance relative to its own size; a zero column stays zero."""
    problem = _problem(name="laplace", columns=6, dtype=dtype)
    scales = torch.tensor([1e-12, 1e-6, 0, 1, 1e6, 1e12], dtype=dtype)
    problem.y.mul_(scales)
    tol = 1e-8 if dtype == torch.float64 else 1e-4
    solution = _solver(variant, tol=tol).solve(problem)
    assert solution.report.converged
    assert float(_true_residual(problem, solution.value).max()) <= 1.01 * tol
    assert torch.equal(solution.value[:, 2], torch.zeros(100, dtype=dtype))
    expected = torch.linalg.solve(_matrix(problem), problem.y.double())
    for found, exact in zip(solution.value.mT, expected.mT, strict=True):
        assert relative(found, exact) < 100 * tol


@pytest.mark.parametrize(
    ("variant", "scale", "targets"),
    [("askotch", 1e6, 1.0), ("askotch-nystrom", 1.0, 1e-8), ("skotch", 1e-6, 1e8), ("eigenpro2", 1e6, 1.0)],
)
def test_scaling_changes_nothing(variant, scale, targets):
    x, y, kernel = points(100), normal(100, 2, seed=1), ScaleKernel(MaternKernel(nu=0.5)).double()

    def solve(scale, targets, dtype=torch.float64):
        kernel.outputscale = 1.7 * scale
        problem = FullProblem(kernel.to(dtype), x.to(dtype), (y * targets).to(dtype), 0.5 * scale)
        with quiet():
            return _solver(variant, tol=1e-10, max_passes=5).solve(problem)

    base, other = solve(1.0, 1.0), solve(scale, targets)
    assert other.report.iterations == base.report.iterations
    assert relative(other.value * (scale / targets), base.value) < 1e-7  # output scales are set in float32


@pytest.mark.parametrize(("variant", "dtype"), [*zip([*FAST, "skotch-nystrom", "skotch-v1"], DTYPES * 5, strict=False)])
def test_scaling_by_a_power_of_two_changes_no_bit(dtype, variant):
    matrix, y = (_matrix(_problem()) - 0.5 * identity(100)).to(dtype), normal(100, 2, seed=1, dtype=dtype)

    def solve(scale, targets):
        noise = torch.full((100,), 0.5 * scale, dtype=torch.float64)
        with quiet():
            system = System(DenseLinearOperator(scale * matrix), noise)
            return _solver(variant, tol=1e-10, max_passes=6).run(system, targets * y)[0]

    base = solve(1.0, 1.0)
    for scale, targets in ((2.0**40, 1.0), (2.0**-40, 1.0), (1.0, 2.0**-30), (2.0**20, 2.0**30)):
        assert torch.equal(solve(scale, targets) * (scale / targets), base)


# --- starting points ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "dtype"), [("askotch", F32), ("skotch-nystrom", F64), ("eigenpro2", F64)])
def test_warm_start(variant, dtype):
    problem = _problem(name="laplace", noise=2.0, columns=2, dtype=dtype)
    tol = 1e-4
    solver = _solver(variant, tol=tol)
    first = solver.solve(problem)
    again = solver.solve(problem, initial=first.value)
    assert (again.report.iterations, again.report.converged) == (0, True)
    assert torch.equal(again.value, first.value)
    assert torch.allclose(again.report.residual, first.report.residual, rtol=1e-3)
    start = 10 * normal(100, 2, seed=8, dtype=dtype)
    kept = start.clone()
    far = solver.solve(problem, initial=start)
    assert torch.equal(start, kept)
    assert far.report.converged
    assert float(_true_residual(problem, far.value).max()) <= 1.01 * tol
    assert torch.allclose(far.report.history[0], _true_residual(problem, start), rtol=1e-4)  # of the start
    near = first.value + 1e-3 * normal(100, 2, seed=8, dtype=dtype)
    closer = solver.solve(problem, initial=near)
    assert closer.report.converged
    assert closer.report.iterations < first.report.iterations


def test_a_warm_start_in_float64_is_reported_as_it_is_returned():
    problem = _problem(noise=1e-6, dtype=torch.float32, lengthscale=0.5)
    exact = torch.linalg.solve(_matrix(problem), problem.y.double())
    with quiet():
        solution = _solver("askotch", tol=1e-3, max_passes=10).solve(problem, initial=exact)
    true = float(_true_residual(problem, solution.value).max())
    assert solution.report.max_residual == pytest.approx(true, rel=1e-3)
    assert solution.report.converged == (true <= 1e-3)
    assert true > 1e-2


def test_a_solve_in_two_parts():
    """Going on from the last iterate ends where one solve ends."""
    problem = _problem(columns=2)
    with quiet():
        half = _solver("askotch", tol=1e-8, max_passes=5).solve(problem)
    assert not half.report.converged
    rest = _solver("askotch", tol=1e-8).solve(problem, initial=half.value)
    _check(problem, rest, 1e-8)
    assert float(rest.report.history[0].max()) == pytest.approx(half.report.max_residual, rel=1e-6)


# --- float32 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "dtype", "limit", "noise"),
    pairwise(["askotch", "skotch", "askotch-v1", "eigenpro2"], DTYPES, [0.5, 16], [0.5, 1e-6]),
)
def test_reported_residual_is_the_true_one(variant, dtype, limit, noise):
    problem = _problem(noise=noise, dtype=dtype, columns=3)
    with quiet():
        solution = _solver(variant, tol=1e-5, max_passes=limit).solve(problem)
    report, true = solution.report, _true_residual(problem, solution.value)
    # float64 products of entries that agree to 1e-15 of the largest
    slack = 1e-13 * float(solution.value.double().norm() / problem.y.double().norm()) * 100
    assert torch.allclose(report.residual, true, rtol=1e-6, atol=slack)
    if not report.converged:
        assert report.reason in ("ran out of passes", "was rounded", "stagnated")
    else:
        assert float(true.max()) <= 1e-5


# A solve whose residual is below the tolerance has converged, whatever ended it.
@pytest.mark.parametrize("kind", [ASkotch, Skotch])
def test_converged_means_that_the_residual_meets_the_tolerance(kind):
    problem = _problem()
    solver = kind(block_size=100, tol=1e-6, max_passes=2)  # the first step solves it, and spends the budget
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        report = solver.solve(problem).report
    assert report.max_residual < 1e-10
    assert report.converged


def _plateau(matrix, y, size, passes):
    """The least true residual of block Gauss-Seidel with products in float32, and float64 otherwise."""
    n, rounded = len(y), matrix.float()
    w, least = torch.zeros(n, dtype=torch.float64), 1.0
    for _ in range(passes):
        for rows in torch.randperm(n).split(size):
            g = (rounded[rows] @ w.float()).double() - y[rows]
            w[rows] -= torch.linalg.solve(matrix[rows][:, rows], g)
        least = min(least, float((y - matrix @ w).norm() / y.norm()))
    return least


@pytest.mark.parametrize("variant", ["askotch", "skotch", "askotch-uniform"])
def test_refinement_beyond_what_float32_products_can(variant):
    """The iterate, which is float64, reaches a tolerance far below the plateau of plain float32 products."""
    problem = _problem(noise=1e-4, dtype=torch.float32, name="matern12", lengthscale=1.5)
    matrix, tol = _matrix(problem), 3e-7
    plateau = _plateau(matrix, problem.y.double(), 30, 200)
    seen = []

    def callback(state):
        seen.append(float(_true_residual(problem, state.weights(), matrix).max()))

    with quiet():
        solution = _solver(variant, tol=tol, block_size=30).solve(problem, callback=callback)
    report = solution.report
    assert plateau > 3 * tol
    assert report.reason in ("reached the tolerance", "was rounded")
    assert min(seen) <= 1.01 * tol  # what was not reached without corrections
    corrections = [note for note in report.notes if note.startswith("float32 products corrected at residual ")]
    assert corrections
    levels = [float(note.split()[-1]) for note in corrections]
    assert all(later <= 0.5 * earlier for earlier, later in zip(levels, levels[1:], strict=False))
    true = _true_residual(problem, solution.value, matrix)
    assert report.residual == pytest.approx(true, rel=1e-4)
    assert report.converged == (float(true) <= tol)


def test_refinement_meets_tolerances_that_float32_can_hold():
    for variant in ("askotch", "skotch", "eigenpro2"):
        problem = _problem(name="matern12", noise=0.3, dtype=torch.float32, columns=2, smooth=True)
        _check(problem, _solver(variant, tol=3e-6).solve(problem), 3e-6)


def test_float64_needs_no_correction():
    problem = _problem(noise=1e-3, name="matern12")
    assert _solver("askotch", tol=1e-9).solve(problem).report.notes == []


def test_rounding_is_reported():
    """To a tolerance below the spacing of float32, which float64 iterates meet."""
    problem = _problem(noise=0.1, dtype=torch.float32, name="matern12")
    with pytest.warns(ConvergenceWarning, match=r"was rounded .* use float64"):
        solution = _solver("askotch", tol=1e-9, block_size=40).solve(problem)
    assert solution.report.reason == "was rounded"
    assert not solution.report.converged
    assert solution.report.max_residual > 1e-9


@pytest.mark.parametrize("kind", [ASkotch, Skotch])
def test_what_float32_cannot_do_is_not_claimed(kind):
    """Noise at the level of float32's rounding: an error that names the method, or a warning and the true residual."""
    problem = _problem(n=200, noise=1e-8, dtype=torch.float32, lengthscale=0.6)
    try:
        with quiet():
            solution = kind(block_size=50, tol=1e-6, max_passes=100).solve(problem)
    except NumericalError as error:
        assert kind.__name__ in str(error)
        assert "float64" in str(error)
    else:
        assert not solution.report.converged
        assert solution.report.residual == pytest.approx(_true_residual(problem, solution.value), rel=1e-3)


# --- the mathematics of a step --------------------------------------------------------------------------------


class _Spy:
    """Records what blocks are inverted by: ``P^-1`` as a matrix, and L."""

    def __init__(self, monkeypatch):
        self.calls = []
        original = blocks.block_inverse

        def block_inverse(block, noise, rank, generator):
            shifted = block + noise.diag()
            inverse = original(block, noise, rank, generator)
            self.calls.append((shifted, inverse.apply(identity(len(noise))), inverse.smoothness))
            return inverse

        monkeypatch.setattr(blocks, "block_inverse", block_inverse)


@pytest.fixture
def spy(monkeypatch):
    return _Spy(monkeypatch)


def _begin(solver, problem, size=20, columns=2):
    """The solver's method at work, with the dense matrix and targets; ``step()`` gives rows and the residual there."""
    method = solver.method(problem.system(), size)
    method.begin(columns)
    generator, y = torch.Generator().manual_seed(7), problem.y.double().reshape(len(problem.y), -1)

    def step():
        found = method.step(y, generator)
        method.answer([float(asked) for asked in method.asks()])
        return found

    return method, step, _matrix(problem), y


def _error_norm(matrix, w, exact):
    return ((w - exact) * (matrix @ (w - exact))).sum(dim=0).sqrt()


def test_one_block_of_all_rows_is_solved_in_one_step():
    for version in (1, 2):
        problem = _problem(columns=2, noise=1e-3)
        method, step, matrix, y = _begin(Skotch(version=version), problem, size=100)
        step()
        assert relative(method.value, torch.linalg.solve(matrix, y)) < 1e-9
    report = Skotch(block_size=100, tol=1e-9).solve(problem).report
    assert report.converged
    assert report.iterations <= 2  # the second one sees that the first one solved it


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rank", [None, 6, 0])
def test_the_error_of_skotch_never_grows(rank, version):
    problem = _problem(noise=0.1, columns=2)
    method, step, matrix, y = _begin(Skotch(rank=rank, version=version), problem)
    exact = torch.linalg.solve(matrix, y)
    before = first = _error_norm(matrix, method.value, exact)
    for _ in range(60):
        rows, g = step()
        after = _error_norm(matrix, method.value, exact)
        assert bool((after <= before * (1 + 1e-12)).all())
        before = after
        assert len(rows.unique()) == len(rows) == len(g)
    assert bool((after < 0.9 * first).all())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rank", [None, 6, 0])
def test_steps_of_skotch(spy, rank, version):
    """``w_b -= P^-1 ((A w)_b - y_b) / L``; with rank None, P is the block and L is 1."""
    problem = _problem(noise=torch.linspace(0.1, 2, 100, dtype=torch.float64), columns=2)
    method, step, matrix, y = _begin(Skotch(rank=rank, version=version), problem)
    w = torch.zeros_like(y)
    for _ in range(25):
        rows, g = step()
        expected = matrix[rows] @ w - y[rows]
        assert float((g - expected).abs().max()) < 1e-11
        shifted, inverse, smooth = spy.calls[-1]
        assert relative(shifted, matrix[rows][:, rows]) < 1e-12  # noise included
        if rank is None:
            w[rows] -= torch.linalg.solve(matrix[rows][:, rows], expected)
        else:
            w[rows] -= inverse @ expected / smooth
            assert smooth > 1.001
        assert relative(method.value, w) < 1e-10
        assert relative(method.evaluation_point(), w) < 1e-10


@pytest.mark.parametrize(
    ("mu", "rank", "sampling"),
    [*((mu, None, "shuffled") for mu in (0.3, 1e-2, 1e-4, 0.19, 5.0)),
     *((mu, rank, sampling) for mu in (1e-2, 5.0) for rank in (6, 0) for sampling in ("shuffled", "uniform"))],
)  # fmt: skip
def test_steps_of_askotch(spy, mu, rank, sampling):
    """The recursion as it is printed for the authors' later version, with w, v, y dense."""
    n, size = 100, 20
    problem = _problem(noise=torch.linspace(0.1, 2, n, dtype=torch.float64), columns=2)
    method, step, matrix, target = _begin(ASkotch(rank=rank, mu=mu, sampling=sampling), problem, size)
    nu = n / size
    clipped = min(mu, nu, 1 / nu)  # mu <= nu and mu nu <= 1
    beta, gamma = 1 - math.sqrt(clipped / nu), 1 / math.sqrt(clipped * nu)
    alpha = 1 / (1 + gamma * nu)
    w, v, y = (torch.zeros_like(target) for _ in range(3))
    for _ in range(30):
        assert relative(method.evaluation_point(), y) < 1e-9
        rows, g = step()
        residual = matrix[rows] @ y - target[rows]  # the ridge at y, too
        assert float((g - residual).abs().max()) < 1e-10
        shifted, inverse, smooth = spy.calls[-1]
        assert relative(shifted, matrix[rows][:, rows]) < 1e-12
        if rank is None:
            inverse, smooth = torch.linalg.inv(matrix[rows][:, rows]), 1.0
        d = inverse @ residual / smooth
        w = y.clone()
        w[rows] -= d
        v = beta * v + (1 - beta) * y
        v[rows] -= gamma * d
        y = alpha * v + (1 - alpha) * w
        assert relative(method.value, w) < 1e-9


@pytest.mark.parametrize("case", [("rbf-ard", 0, 2.0, 20), ("rbf-ard", 6, 0.1, 20), ("matern12", 6, 0.1, 20),
                                  ("rbf-ard", None, 0.5, 20), ("rbf-ard", None, 0.01, 20), ("matern12", None, 2.0, 10)],
                         ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")  # fmt: skip
def test_steps_of_askotch_without_mu(spy, case):
    """The momentum is that of ``mu = (2 / (2 + passes since the restart))^2 / nu``.  It starts anew where the slope
    of the objective along ``v - w``, added up over half a pass, is positive, but not in the first pass."""
    (name, rank, noise, size), n = case, 100
    problem = _problem(name=name, noise=noise, columns=2, lengthscale=0.4)
    method, step, matrix, target = _begin(ASkotch(rank=rank), problem, size)
    nu = n / size
    w, v = torch.zeros_like(target), torch.zeros_like(target)
    since, judged, slope, size_of_slope, restarts, kept, too_early = 0, 0, 0.0, 0.0, [], 0, 0
    for number in range(150):
        mu = (2 / (2 + since / n)) ** 2 / nu
        gamma = 1 / math.sqrt(mu * nu)
        beta, alpha = 1 - math.sqrt(mu / nu), 1 / (1 + gamma * nu)
        y = alpha * v + (1 - alpha) * w
        assert relative(method.evaluation_point(), y) < 1e-9
        rows, _ = step()
        g = matrix[rows] @ y - target[rows]
        slope += float((g * (v - w)[rows]).sum())
        size_of_slope += float((g * w[rows]).abs().sum())
        _, inverse, smooth = spy.calls[-1]
        d = inverse @ g / smooth
        w = y.clone()
        w[rows] -= d
        v = beta * v + (1 - beta) * y
        v[rows] -= gamma * d
        assert relative(method.value, w) < 1e-9
        since, judged = since + len(rows), judged + len(rows)
        if judged >= n / 2:
            if since > n:
                if abs(slope) < 1e-10 * size_of_slope:
                    break  # zero but for rounding
                if slope > 0:
                    v, since = w.clone(), 0
                    restarts.append(number)
                else:
                    kept += 1
            elif slope > 1e-10 * size_of_slope:
                too_early += 1
            judged, slope, size_of_slope = 0, 0.0, 0.0
    assert restarts  # or the test has not seen one
    assert number > restarts[0] + 3
    assert kept or rank is None  # both outcomes,
    assert too_early or (rank, noise) not in ((None, 0.01), (None, 2.0))  # and a slope that is not acted upon


@pytest.mark.parametrize("size", [14])
def test_restarts_do_not_depend_on_rounding(size):
    """Targets three times as large: a solution three times as large, to rounding, after any number of passes.  The
    slope along rows that no step has moved since a restart is 0, or that of rounding errors."""
    problem = _problem(noise=0.5, columns=2, lengthscale=0.4)
    other = FullProblem(problem.kernel, problem.x, 3 * problem.y, 0.5)
    with quiet():
        for passes in (8, 16):
            solver = ASkotch(block_size=size, tol=1e-14, max_passes=passes, seed=3)
            assert relative(solver.solve(other).value / 3, solver.solve(problem).value) < 1e-11


@pytest.mark.parametrize(("mu", "rank"), [(None, None), (0.02, 6), (None, 0)])
def test_steps_of_the_printed_algorithm(spy, mu, rank):
    """NU_ACDM with beta = 0, in the paper's names but for x, z, w; mu is the least noise unless it is given."""
    noise = torch.linspace(0.1, 2, 100, dtype=torch.float64)
    problem = _problem(noise=noise, columns=2)
    method, step, matrix, target = _begin(ASkotch(version=1, rank=rank, mu=mu), problem)
    constants = [smooth for _, _, smooth in spy.calls]
    assert len(constants) == 5
    lam = float(noise.min()) if mu is None else mu
    total = sum(math.sqrt(smooth) for smooth in constants)
    tau = 2 / (1 + math.sqrt(4 * total**2 / lam + 1))
    gamma = 1 / (tau * total**2)
    x, z, w = (torch.zeros_like(target) for _ in range(3))
    for _ in range(40):
        assert relative(method.evaluation_point(), w) < 1e-9
        rows, g = step()
        residual = matrix[rows] @ w - target[rows]
        assert float((g - residual).abs().max()) < 1e-10
        shifted, inverse, smooth = spy.calls[-1]
        assert relative(shifted, matrix[rows][:, rows]) < 1e-12
        assert smooth in constants
        if rank is None:
            inverse, smooth = torch.linalg.inv(matrix[rows][:, rows]), 1.0
        d = inverse @ residual
        p = math.sqrt(smooth) / total
        x = w.clone()
        x[rows] -= d / smooth
        z = (z + gamma * lam * w) / (1 + gamma * lam)
        z[rows] -= gamma / p / (1 + gamma * lam) * d
        w = tau * z + (1 - tau) * x
        assert relative(method.value, x) < 1e-9


@pytest.mark.parametrize("kind", [ASkotch])
def test_blocks_of_version_1_are_drawn_by_their_smoothness(spy, kind):
    noise = torch.full((12,), 0.1, dtype=torch.float64)
    noise[:2] = torch.tensor([300.0, 60.0])
    problem = _problem(n=12, noise=noise, columns=1, name="laplace")
    _, step, _, _ = _begin(kind(version=1, rank=0, seed=4), problem, size=3, columns=1)
    weights = torch.tensor([smooth for _, _, smooth in spy.calls]).sqrt()
    expected = weights / weights.sum()
    assert len(expected) == 4
    assert float(expected.max()) > 3 * float(expected.min())
    counts: dict[frozenset, int] = {}
    draws = 300
    for _ in range(draws):
        rows, _ = step()
        counts[key] = counts.get(key := frozenset(rows.tolist()), 0) + 1
    assert sorted(row for block in counts for row in block) == list(range(12))  # a partition
    found = torch.tensor(sorted(counts.values()), dtype=torch.float64) / draws
    p = expected.double().sort().values
    assert bool(((found - p).abs() < 5 * (p * (1 - p) / draws).sqrt()).all())


@pytest.mark.parametrize(("sampling", "rank"), [("uniform", None), ("shuffled", 6)])
def test_without_momentum_askotch_is_skotch(sampling, rank):
    """``mu nu = 1`` gives gamma = 1, and v, w and y are one."""
    problem = _problem(columns=2, noise=0.1)
    options = {"sampling": sampling, "rank": rank, "block_size": 20, "max_passes": 6, "seed": 3, "tol": 1e-12}
    with quiet():
        plain = Skotch(**options).solve(problem)
        for mu in (20 / 100, 1.0, 1e9):
            other = ASkotch(mu=mu, **options).solve(problem)
            assert relative(other.value, plain.value) < 1e-11
            assert other.report.iterations == plain.report.iterations
        assert relative(ASkotch(mu=0.05, **options).solve(problem).value, plain.value) > 1e-3


@each("variant", VARIANTS)
def test_the_solution_is_a_fixed_point(variant):
    problem = _problem(columns=2)
    method, step, matrix, y = _begin(_solver(variant), problem)
    exact = torch.linalg.solve(matrix, y)
    for name in {"w", "v", "z"} & set(method.tensors):
        method.tensors[name] = exact.clone()
    for _ in range(10):
        _, g = step()
        assert float(g.abs().max()) < 1e-11
        assert relative(method.value, exact) < 1e-12
        assert relative(method.evaluation_point(), exact) < 1e-12
    method.begin(2)
    assert float(method.value.abs().max()) == 0  # and forgotten
    assert float(method.evaluation_point().abs().max()) == 0


@each("variant", VARIANTS)
def test_steps_do_not_change_the_right_hand_side(variant):
    problem = _problem(columns=2)
    _, step, _, y = _begin(_solver(variant), problem)
    kept = y.clone()
    for _ in range(5):
        step()
    assert torch.equal(y, kept)


# --- EigenPro 2 -----------------------------------------------------------------------------------------------


def _beta(matrix, some, points, q, noise=None):
    """``max_x k'(x, x) - |F^T K'(Xs, x)|^2`` over the points, ``l_{q+1} / s`` and F, from the definitions.

    :param noise: where it differs, the largest stands for that of every point: it could be one that was not drawn.
    """
    values, vectors = (t.flip(-1) for t in torch.linalg.eigh(matrix[some][:, some]))
    tail = values[q] if q < len(values) else values[-1]
    factor = vectors[:, :q] * (1 / values[:q] - tail / values[:q].square()).clamp(min=0).sqrt()
    extra = 0.0 if noise is None else (noise.max() - noise)[points]
    left = matrix.diagonal()[points] + extra - (factor.mT @ matrix[some][:, points]).square().sum(dim=0)
    return float(left.max()), float(tail / len(some)), factor


@pytest.fixture
def subsample(monkeypatch):
    """The subsample that a method has drawn last."""
    found, original = [], eigenpro2.top_eigensystem

    def top_eigensystem(*args, **options):
        found.append(original(*args, **options))
        return found[-1]

    monkeypatch.setattr(eigenpro2, "top_eigensystem", top_eigensystem)
    return found


@each("name", ["rbf-ard", "matern12"])
@each(("batch", "rank"), [(20, 3), (20, None), (5, 1), (90, 2), (100, None), (1, None), (40, 50)])
def test_steps_of_eigenpro2(subsample, batch, rank, name):
    """With half of the points as the subsample, beta is over all points: the others are as many."""
    n, s = 100, 50
    problem = _problem(name=name, noise=torch.linspace(0.1, 0.6, n, dtype=torch.float64), columns=2)
    method, step, matrix, y = _begin(EigenPro2(rank=rank, subsample_size=s), problem, batch)
    some, everywhere = subsample[0].indices, torch.arange(n)
    assert len(some.unique()) == s
    critical = [
        b / lam
        for b, lam, _ in (_beta(matrix, some, everywhere, q, problem.noise_vector) for q in range(1, s // 4 + 1))
    ]
    if rank is None:  # the least for which the batch is critical
        enough = [q for q, size in enumerate(critical, start=1) if size >= batch]
        assert method.rank == (enough[0] if enough else s // 4)
    else:
        assert method.rank == rank
    beta, lam, factor = _beta(matrix, some, everywhere, method.rank, problem.noise_vector)
    wanted = 1 / beta if batch < beta / lam else 2 / (beta + batch * lam)
    w = torch.zeros_like(y)
    for _ in range(6):
        rows, g = step()
        expected = matrix[rows] @ w - y[rows]
        assert float((g - expected).abs().max()) < 1e-10
        w[rows] -= wanted * expected
        w[some] += wanted * factor @ (factor.mT @ (matrix[some][:, rows] @ expected))
        assert relative(method.value, w) < 1e-8


def test_batches_below_and_above_the_critical_one(subsample):
    """Both formulas of the step occur in the test above."""
    seen = set()
    for batch in (1, 100):
        problem = _problem(columns=2)
        method, *_ = _begin(EigenPro2(rank=2, subsample_size=50), problem, batch)
        beta, lam, _ = _beta(_matrix(problem), subsample[-1].indices, torch.arange(100), method.rank)
        seen.add(batch < beta / lam)
    assert seen == {True, False}


def test_beta_is_over_as_many_points_beside_the_subsample(subsample):
    """The step of a small batch, 1 / beta, read off the weights of a point that is not in the subsample."""
    problem = _problem(columns=1, name="matern12", noise=0.1)
    matrix, lower = _matrix(problem), 0
    for seed in range(5):
        method, step, *_ = _begin(EigenPro2(rank=4, subsample_size=25, seed=seed), problem, 1, columns=1)
        some = subsample[-1].indices
        outside = torch.tensor([i not in some for i in range(100)])
        for _ in range(20):
            before = method.value.clone()
            rows, g = step()
            if outside[rows]:
                break
        found = float((before - method.value)[rows] / g)
        over_some, over_all = (1 / _beta(matrix, some, p, 4)[0] for p in (some, torch.arange(100)))
        assert over_all * (1 - 1e-9) <= found < over_some * (1 + 1e-9)
        lower += found < 0.99 * over_some
        betas = [1 / _beta(matrix, some, torch.tensor([i]), 4)[0] for i in range(100)]
        assert min(abs(found / beta - 1) for beta in betas) < 1e-9  # that of one of the points
    assert lower >= 3  # the largest of all may be in the subsample


def test_eigenpro_subsamples_and_ranks(subsample):
    problem = _problem(columns=2)
    wide = _problem(n=600, columns=2)
    for solver, n, s in (
        (EigenPro2(), 100, 100),
        (EigenPro2(), 600, 500),
        (EigenPro2(subsample_size=7), 100, 7),
        (EigenPro2(rank=60), 100, 100),
    ):
        method, *_ = _begin(solver, problem if n == 100 else wide)
        assert len(subsample[-1].indices) == s
        assert 1 <= method.rank <= max(1, s // 4) or solver.rank == method.rank
    first, second = (_begin(EigenPro2(subsample_size=30, seed=s), problem) for s in (0, 1))
    assert not torch.equal(subsample[-1].indices, subsample[-2].indices)
    assert first[0].rank >= 1 <= second[0].rank


@each("rank", [1, 5, None, 100])
@each("name", ["rbf-ard", "matern12", "laplace"])
def test_batches_of_all_points_contract(name, rank):
    """With the exact eigensystem a step of all rows is ``e -> (1 - step (A - A F F^T A)...) e``: every eigenvalue of
    the error's map lies within (-1, 1), however the rows are ordered."""
    problem = _problem(name=name, noise=1e-2, columns=1)
    solver = EigenPro2(rank=rank, subsample_size=100)
    matrix = _matrix(problem)
    generator, images = torch.Generator(), []
    method = solver.method(problem.system(), 100)
    method.begin(100)
    method.step(-identity(100), generator)  # w = -step (I - F F^T A) A's argument: the map, column by column
    images = method.value
    values = torch.linalg.eigvals(identity(100) + images @ matrix).real
    assert float(values.max()) < 1
    assert float(values.min()) > -1


def _enlarge(monkeypatch, factor):
    original = eigenpro2.step_size
    monkeypatch.setattr(eigenpro2, "step_size", lambda *args: factor * original(*args))


def test_a_diverging_step_is_halved(monkeypatch):
    problem = _problem(columns=2)
    _enlarge(monkeypatch, 50)
    solver = EigenPro2(block_size=50, subsample_size=100, tol=1e-6, max_passes=2000)
    solution = solver.solve(problem)
    _check(problem, solution, 1e-6)
    notes = [note for note in solution.report.notes if "went on with a smaller step" in note]
    assert 4 <= len(notes) == solution.report.work["halvings"] <= 7  # 50 times too large is about 2^5.6
    own = solver.solve(problem).report.details
    assert own["block_size"] == 50 and own["subsample_size"] == 100
    assert all("the residual grew" in note for note in notes)


def test_a_diverging_step_is_halved_in_float32_and_from_a_start(monkeypatch):
    problem = _problem(columns=2, dtype=torch.float32)
    _enlarge(monkeypatch, 50)
    solver = EigenPro2(block_size=50, subsample_size=100, tol=1e-4, max_passes=2000)
    solution = solver.solve(problem, initial=normal(100, 2, seed=5, dtype=torch.float32))
    _check(problem, solution, 1e-4)
    assert any("went on with a smaller step" in note for note in solution.report.notes)


def test_divergence_without_end_is_an_error(monkeypatch):
    _enlarge(monkeypatch, 1e5)
    with pytest.raises(NumericalError, match=r"EigenPro2 diverges: the relative residual grew .* subsample_size"):
        EigenPro2(block_size=50, subsample_size=100).solve(_problem())


# A residual that overflows between two estimates is no fault of the inputs or the kernel.
def test_divergence_within_one_window_is_called_divergence(monkeypatch):
    _enlarge(monkeypatch, 100)
    with quiet():
        try:
            report = EigenPro2(block_size=1, subsample_size=100, max_passes=10).solve(_problem()).report
        except NumericalError as error:
            assert "EigenPro2 diverges" in str(error)
        else:
            assert any("went on with a smaller step" in note for note in report.notes)


@pytest.mark.parametrize("kind", [ASkotch, Skotch])
def test_divergence_of_the_others_is_an_error(kind, monkeypatch):
    original = blocks.block_inverse

    def block_inverse(*args):
        inverse = original(*args)
        inverse.smoothness = 0.1
        return inverse

    monkeypatch.setattr(blocks, "block_inverse", block_inverse)
    with pytest.raises(NumericalError, match=rf"{kind.__name__} diverges: the relative residual grew .* block_size"):
        kind(block_size=20).solve(_problem())


# --- sums of operators, and reports ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["askotch", "skotch-v1", "eigenpro2"])
def test_operators_that_are_not_kernel_matrices(variant):
    """A sum of a kernel matrix and a stored one, solved as a system."""
    problem = _problem(name="matern12", columns=2)
    stored = with_spectrum(torch.linspace(0, 3, 100, dtype=torch.float64))
    system = System(SumLinearOperator(problem.system().operator, DenseLinearOperator(stored)), problem.noise_vector)
    value, report = _solver(variant, tol=1e-5).run(system, problem.y)
    assert report.converged
    assert relative(value, torch.linalg.solve(_matrix(problem) + stored, problem.y)) < 1e-4


# --- arguments ------------------------------------------------------------------------------------------------

SOLVERS = pytest.mark.parametrize("kind", [ASkotch, Skotch, EigenPro2])


@SOLVERS
@each("tol", [0, 1, -1e-3, float("nan"), 5, "1e-3", True])
def test_refuses_tolerances(kind, tol):
    with pytest.raises(InputError, match="tol expects a number between 0 and 1"):
        kind(tol=tol)


@SOLVERS
@each("name", ["max_passes", "max_seconds", "every"])
@each("value", [0, -1, float("nan"), "10", True])
def test_refuses_budgets(kind, name, value):
    with pytest.raises(InputError, match=f"{name} expects a positive number"):
        kind(**{name: value})


@SOLVERS
@each("seed", [0.5, None, "0", True])
def test_refuses_seeds(kind, seed):
    with pytest.raises(InputError, match="seed expects an integer"):
        kind(seed=seed)


@SOLVERS
@each("size", [0, -3, 2.0, "10", True])
def test_refuses_block_sizes(kind, size):
    with pytest.raises(InputError, match="block_size expects a positive integer"):
        kind(block_size=size)


@SOLVERS
def test_refuses_blocks_larger_than_the_problem(kind):
    with pytest.raises(InputError, match=rf"{kind.__name__}\(block_size=101\) exceeds the 100 points.* at most 100"):
        kind(block_size=101).solve(_problem())


@each("kind", [ASkotch, Skotch])
@each("rank", [-1, 2.5, "10", True])
def test_refuses_ranks(kind, rank):
    with pytest.raises(InputError, match="rank expects an integer of at least 0"):
        kind(rank=rank)


@pytest.mark.parametrize("name", ["rank", "subsample_size"])
def test_refuses_sizes_of_the_eigensystem(name):
    for value in (0, -1, 2.5, "10", True):
        with pytest.raises(InputError, match=f"{name} expects a positive integer"):
            EigenPro2(**{name: value})
    reports = [EigenPro2(tol=1e-2, **{name: size}).solve(_problem()).report for size in (100, 101)]
    assert reports[0].max_residual == reports[1].max_residual and reports[0].rank == reports[1].rank <= 100
    assert [f"{name} 101 was asked for; 100 points have 100" in report.notes for report in reports] == [False, True]


@pytest.mark.parametrize("kind", [ASkotch, Skotch])
def test_refuses_versions_and_samplings(kind):
    for version in (0, 3, "2", None):
        with pytest.raises(InputError, match="version expects 1 or 2"):
            kind(version=version)
    for sampling in ("random", None, 1):
        with pytest.raises(InputError, match="sampling expects 'shuffled' or 'uniform'"):
            kind(sampling=sampling)


@each("mu", [0, -1e-3, float("nan"), "0.1"])
def test_refuses_mu(mu):
    with pytest.raises(InputError, match="mu expects a positive number"):
        ASkotch(mu=mu)


@SOLVERS
def test_refuses_starting_points_of_another_shape(kind):
    for shape in ((3,), (100, 1), (100, 2), (1, 100)):
        with pytest.raises(InputError, match=r"initial expects the solution's shape \(100,\), got"):
            kind().solve(_problem(), initial=torch.zeros(shape, dtype=torch.float64))


@SOLVERS
def test_refuses_held_out_data_that_does_not_fit(kind):
    problem, x, y = _problem(), points(7, seed=5), normal(7)
    for held_out, message in (
        ((x[:, :2], y), "held_out points expects 3 features, torch.float64"),
        ((x.float(), y), "held_out points expects 3 features, torch.float64"),
        ((x[0], y), "held_out points expects shape"),
        ((x, y[:6]), "held_out targets expect"),
        ((x, y.unsqueeze(1)), "held_out targets expect"),
        ((x, [1.0] * 7), "held_out targets expects a tensor"),
        ((x, y * float("nan")), "held_out targets holds NaN"),
    ):
        with pytest.raises(InputError, match=message):
            kind().solve(problem, held_out=held_out)


@SOLVERS
def test_refuses_unknown_engines(kind):
    with pytest.raises(InputError, match="matmul expects"):
        kind().solve(_problem(), matmul="sparse")


# --- NaN ------------------------------------------------------------------------------------------------------


class _Broken(RBFKernel):
    """NaN for pairs of which one is far to the right."""

    def forward(self, x1, x2, diag=False, **options):
        value = super().forward(x1, x2, diag=diag, **options)
        far = (x1[..., 0] > 0.9).unsqueeze(-1) | (x2[..., 0] > 0.9).unsqueeze(-2)
        return value if diag else torch.where(far, torch.full_like(value, float("nan")), value)


# EigenPro 2 is left without an eigenvalue.
@each("dtype", DTYPES)
@each("variant", VARIANTS)
def test_nan_in_the_kernel_is_an_error(variant, dtype):
    problem = _problem(dtype=dtype)
    problem.kernel = _Broken().to(dtype)
    with pytest.raises(NumericalError):
        _solver(variant).solve(problem)


def test_nan_in_a_right_hand_side_is_an_error():
    system = _problem().system()
    for variant in VARIANTS:
        with pytest.raises(NumericalError, match="right-hand side"):
            _solver(variant).run(system, torch.full((100, 1), float("nan"), dtype=torch.float64))


def test_matrices_that_are_not_positive_definite_are_an_error():
    values = torch.linspace(-5, 2, 60, dtype=torch.float64)
    system = System(DenseLinearOperator(with_spectrum(values)), torch.full((60,), 0.1, dtype=torch.float64))
    for variant in ("askotch", "skotch", "askotch-v1"):
        with pytest.raises(NumericalError, match="positive definite"):
            _solver(variant).run(system, normal(60, 1))


def test_kernel_matrices_keep_their_engine():
    """What the solvers make of the operator leaves it as it was."""
    problem = _problem()
    system = problem.system()
    assert isinstance(system.operator, KernelMatrix)
    before = system.operator.engine
    _solver("askotch", tol=1e-3).run(system, problem.y.unsqueeze(-1))
    assert system.operator.engine == before

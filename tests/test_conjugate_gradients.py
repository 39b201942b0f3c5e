"""Conjugate gradients against dense float64 solves: accuracy, stopping, honesty of the residual, Lanczos matrices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator.operators import DenseLinearOperator

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
    ConjugateGradients,
    ConvergenceWarning,
    FullProblem,
    FullScale,
    InputError,
    NumericalError,
    Nystrom,
    NystromEigenPro,
    RPCholesky,
    record_solves,
)
from sketchgp.datasets import load_diamonds
from sketchgp.operators import KernelMatrix
from sketchgp.preconditioners import PreconditionerCache
from sketchgp.solvers import System

PRECONDITIONERS = [None, RPCholesky(40), Nystrom(40), Nystrom(40, sketch="uniform"),
                   NystromEigenPro(20, subsample_size=80), FullScale(10, neighbors=10)]  # fmt: skip


def _kernel(dtype=torch.float64, lengthscale=0.5, outputscale=1.3):
    return set_scales(ScaleKernel(RBFKernel(ard_num_dims=3)), outputscale, lengthscale).to(dtype)


def _problem(n=200, columns=None, noise=1e-2, dtype=torch.float64, kernel=None, smooth=False):
    """Targets are white noise, whose solution has entries far larger than y, or (smooth) functions of the inputs."""
    kernel = _kernel(dtype) if kernel is None else kernel
    x = points(n)
    y = normal(n, columns or 1, seed=1)
    if smooth:
        y = (x @ (3 * normal(3, columns or 1, seed=2))).sin() + noise**0.5 * y
    y = y[:, 0] if columns is None else y
    return FullProblem(kernel, x.to(dtype), y.to(dtype), noise)


def _matrix(problem):
    """``K + noise`` in float64 from the float64 forms of the problem's inputs and raw parameters."""
    dtype = problem.x.dtype
    matrix = dense(problem.kernel.double(), problem.x.double()) + torch.diag(problem.noise_vector)
    problem.kernel.to(dtype)
    return matrix


def _true_residual(problem, value, matrix=None):
    return true_residual(_matrix(problem) if matrix is None else matrix, problem.y, value)


# --- accuracy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "columns"),
    [
        ("rbf-ard", torch.float32, 70),
        ("rbf-ard", torch.float64, 3),
        ("matern12", torch.float64, None),
        ("matern32", torch.float32, None),
        ("matern52-ard", torch.float64, 70),
        ("rational-quadratic", torch.float32, 3),
        ("sum", torch.float64, 3),
    ],
)
def test_against_a_dense_solve(name, dtype, columns):
    kernel = set_scales({**RADIAL, **GENERIC}[name]()).to(dtype)
    problem = _problem(columns=columns, noise=0.1, dtype=dtype, kernel=kernel)
    tol = 1e-10 if dtype == torch.float64 else 1e-4
    solution = ConjugateGradients(tol=tol).solve(problem)
    assert solution.report.converged
    assert solution.value.dtype == dtype
    assert solution.value.shape == problem.y.shape
    matrix = _matrix(problem)
    assert float(_true_residual(problem, solution.value, matrix).max()) <= 1.01 * tol
    expected = torch.linalg.solve(matrix, problem.y.double())
    condition = float(torch.linalg.cond(matrix))
    assert relative(solution.value, expected) < condition * tol


@pytest.mark.parametrize(
    ("preconditioner", "dtype", "matmul"),
    [(p, (torch.float32, torch.float64)[i % 2], ("dense", "tiled")[i // 2 % 2]) for i, p in enumerate(PRECONDITIONERS)],
)
def test_every_preconditioner(preconditioner, dtype, matmul):
    problem = _problem(columns=2, noise=1e-2, dtype=dtype, smooth=True)
    solution = ConjugateGradients(tol=1e-4).solve(problem, preconditioner=preconditioner, matmul=matmul)
    report = solution.report
    assert report.converged
    assert report.rank == (0 if preconditioner is None else preconditioner.rank)
    assert float(_true_residual(problem, solution.value).max()) <= 1.01e-4
    if preconditioner is not None:
        plain = ConjugateGradients(tol=1e-4).solve(problem, preconditioner=None).report
        assert report.iterations < plain.iterations


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_seeds_change_the_work_not_the_answer(seed):
    problem = _problem(noise=1e-3)
    solution = ConjugateGradients(tol=1e-9).solve(problem, preconditioner=RPCholesky(30, seed=seed))
    assert relative(solution.value, torch.linalg.solve(_matrix(problem), problem.y)) < 1e-5


def test_noise_of_its_own_for_each_point():
    noise = torch.logspace(-4, 1, 200, dtype=torch.float64)
    problem = _problem(noise=noise, columns=2)
    solution = ConjugateGradients(tol=1e-9).solve(problem)
    matrix = dense(_kernel(), problem.x) + torch.diag(noise)
    assert relative(solution.value, torch.linalg.solve(matrix, problem.y)) < 1e-5


@each("n", [1, 2])
@each("preconditioner", ["auto", None])
def test_one_and_two_points(n, preconditioner):
    problem = _problem(n=n)
    solution = ConjugateGradients(tol=1e-10).solve(problem, preconditioner=preconditioner)
    assert relative(solution.value, torch.linalg.solve(_matrix(problem), problem.y)) < 1e-10


@pytest.mark.slow
def test_real_data(data_directory):
    with np.load(data_directory / "uci_airfoil.npz", allow_pickle=False) as arrays:
        x, y = (torch.from_numpy(arrays[key][:400]).double() for key in ("X", "y"))
    _check_real(x, y)


def test_bundled_diamonds():
    data = load_diamonds()
    chosen = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:400]
    _check_real(data.x[chosen], data.y[chosen])


def _check_real(x, y):
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-12)
    y = (y.reshape(-1) - y.mean()) / y.std()
    for dtype, tol in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        kernel = ScaleKernel(MaternKernel(nu=2.5)).to(dtype)
        kernel.base_kernel.lengthscale = 2.0
        problem = FullProblem(kernel, x.to(dtype), y.to(dtype), 1e-2)
        solution = ConjugateGradients(tol=tol).solve(problem)
        assert solution.report.converged, solution.report
        residual = float(_true_residual(problem, solution.value).max())
        # duplicated rows are at distance sqrt(eps), not 0, in the product; hence the second term
        assert residual <= 1.01 * tol + 1e-9
        assert solution.report.max_residual == pytest.approx(residual, rel=0.01, abs=1e-9)


# --- stopping -------------------------------------------------------------------------------------------------


def test_each_column_stops_by_itself():
    """A hard column beside many easy ones: its iterations are those it needs alone, and the easy ones are met too."""
    problem = _problem(noise=1e-4)
    values, vectors = torch.linalg.eigh(_matrix(problem))
    hard, easy = normal(200, 1, seed=9), vectors[:, -2:-1]  # an eigenvector is solved in one step
    alone = ConjugateGradients(tol=1e-8).solve(
        FullProblem(_kernel(), problem.x, hard, 1e-4), preconditioner=None).report  # fmt: skip
    many = torch.cat([easy.expand(-1, 30), hard, torch.zeros(200, 5, dtype=torch.float64)], dim=1)
    block = ConjugateGradients(tol=1e-8).solve(FullProblem(_kernel(), problem.x, many, 1e-4), preconditioner=None)
    assert block.report.converged
    assert abs(block.report.iterations - alone.iterations) <= 0.05 * alone.iterations
    assert relative(block.value, torch.linalg.solve(_matrix(problem), many)) < 1e-4
    assert block.report.residual.shape == (36,)
    assert torch.equal(block.value[:, 31:], torch.zeros(200, 5, dtype=torch.float64))
    assert float(block.report.history[2:, :30].max()) < 1e-6
    assert values[0] > 0


def test_a_warm_start_in_float64_is_reported_as_it_is_returned():
    """The residual is that of the float32 value handed back, not of the float64 start it was rounded from."""
    problem = _problem(noise=1e-6, dtype=torch.float32)
    exact = torch.linalg.solve(_matrix(problem), problem.y.double())
    with quiet():
        solution = ConjugateGradients(tol=1e-3).solve(problem, initial=exact)
    true = float(_true_residual(problem, solution.value).max())
    assert solution.report.max_residual == pytest.approx(true, rel=0.05)
    assert solution.report.converged == (true <= 1e-3)


@pytest.mark.parametrize(("what", "factor"), [("kernel and noise", 1e12), ("targets", 1e-12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("preconditioner", [None, RPCholesky(30)], ids=["plain", "rpcholesky"])
def test_scaling_changes_nothing(preconditioner, dtype, what, factor):
    scale = factor if what != "targets" else 1.0
    targets = factor if what != "kernel and noise" else 1.0
    solver, x = ConjugateGradients(tol=1e-4), points(200, dtype=dtype)
    y = normal(200, 2, seed=1)
    base = solver.solve(FullProblem(_kernel(dtype, outputscale=1.0), x, y.to(dtype), 0.1), preconditioner)
    other = solver.solve(
        FullProblem(_kernel(dtype, outputscale=scale), x, (y * targets).to(dtype), 0.1 * scale), preconditioner
    )
    assert base.report.converged
    assert other.report.converged
    # 1e12 is no power of two, so rounding differs; the next test leaves nothing to rounding
    assert abs(other.report.iterations - base.report.iterations) <= 0.1 * base.report.iterations
    assert relative(other.value.double() * (scale / targets), base.value) < 1e-3


@pytest.mark.parametrize(("what", "factor"), [("kernel and noise", 2.0**40), ("targets", 2.0**-40), ("both", 2.0**-40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("preconditioner", [None, RPCholesky(30), RPCholesky()], ids=["plain", "rank-30", "automatic"])
def test_scaling_by_a_power_of_two_changes_no_bit(preconditioner, dtype, what, factor):
    scale = factor if what != "targets" else 1.0
    targets = factor if what != "kernel and noise" else 1.0
    matrix, y = dense(_kernel(), points(200)).to(dtype), normal(200, 2, seed=1, dtype=dtype)

    def solve(scale, targets):
        operator, noise = DenseLinearOperator(scale * matrix), torch.full((200,), 0.01 * scale, dtype=torch.float64)
        built = None if preconditioner is None else preconditioner.build(operator, noise)
        with quiet():
            return ConjugateGradients(tol=1e-3).run(System(operator, noise), targets * y, built)[:2]

    (value, report), (other, other_report) = solve(1.0, 1.0), solve(scale, targets)
    assert report.converged
    assert other_report.iterations == report.iterations
    assert torch.equal(other * (scale / targets), value)


@pytest.mark.parametrize("factor", [1e30, 1e-30, 1e-36])
def test_extreme_targets_in_float32(factor):
    """Near the ends of float32's range, where the vectors of the recurrence would leave it."""
    solver, x, y = ConjugateGradients(tol=1e-4), points(200, dtype=torch.float32), normal(200, seed=1)
    base, other = (
        solver.solve(FullProblem(_kernel(torch.float32), x, (y * f).float(), 0.1), None) for f in (1.0, factor)
    )
    assert other.report.converged
    assert other.report.iterations <= 1.5 * base.report.iterations
    assert relative(other.value.double() / factor, base.value) < 1e-3


# --- the residual is the true one -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit_noise_columns", "dtype", "preconditioner"),
    pairwise(
        [(3, 1e-1, None), (30, 1e-4, 66), (250, 1e-4, None), (250, 1e-8, 66)],
        [torch.float32, torch.float64],
        [None, RPCholesky(25)],
    ),
)
def test_reported_residual_is_the_true_one(preconditioner, dtype, limit_noise_columns):
    limit, noise, columns = limit_noise_columns
    problem = _problem(n=80, columns=columns, noise=noise, dtype=dtype)
    with quiet():
        solution = ConjugateGradients(tol=1e-6, max_iterations=limit).solve(problem, preconditioner)
    report, true = solution.report, _true_residual(problem, solution.value)
    # float64 products of entries that agree to 1e-15 of the largest
    slack = 1e-13 * float(solution.value.double().norm() / problem.y.double().norm()) * 200
    assert torch.allclose(report.residual, true, rtol=1e-6, atol=slack)
    assert report.converged == bool((report.residual <= 1e-6).all())
    assert report.iterations <= limit
    assert report.history.shape == (report.iterations + 1, report.columns)
    reasons = ("reached the tolerance",) if report.converged else ("ran out of iterations", "stagnated", "was rounded")
    assert report.reason in reasons


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_what_is_returned_is_no_worse_than_the_start(limit):
    """Residuals of conjugate gradients rise before they fall: here tenfold."""
    with quiet():
        report = (
            ConjugateGradients(tol=1e-9, max_iterations=limit).solve(_problem(noise=1e-4), preconditioner=None).report
        )
    assert float(report.history.max()) > 5
    assert report.max_residual <= 1


def test_float32_refinement_where_the_plain_recurrence_fails():
    """Products in float32 alone stop at a true residual far above the tolerance, whatever their recurrence says."""
    problem = _problem(n=400, noise=1e-5, dtype=torch.float32)
    matrix = _matrix(problem)
    tol = 1e-3
    fast = matrix.float()

    def recurrence(steps):
        w, r = torch.zeros(400), problem.y.clone()
        p, rr = r.clone(), r @ r
        for _ in range(steps):
            product = fast @ p
            alpha = rr / (p @ product)
            w, r = w + alpha * p, r - alpha * product
            new = r @ r
            p, rr = r + (new / rr) * p, new
            if float(r.norm() / problem.y.norm()) <= tol:
                break
        return w

    plain = float(_true_residual(problem, recurrence(3000), matrix).max())
    with quiet():
        report = ConjugateGradients(tol=tol, max_iterations=3000).solve(problem).report
    assert plain > 5 * tol
    # the float64 iterate meets the tolerance; its rounding to float32 may not, which is said
    assert report.reason in ("reached the tolerance", "was rounded")
    assert report.max_residual < plain or report.reason == "was rounded"


def test_float32_refinement_reaches_the_tolerance():
    problem = _problem(n=300, noise=1e-4, dtype=torch.float32, columns=2, smooth=True)
    solution = ConjugateGradients(tol=1e-3).solve(problem)
    assert solution.report.converged
    assert float(_true_residual(problem, solution.value).max()) <= 1.01e-3


@pytest.mark.parametrize("kind", ["kernel", "sum", "stored", "batch"])
def test_rows_of_accurate_products(kind):
    problem = _problem(n=90, columns=2, dtype=torch.float32)
    matrix = KernelMatrix.of(problem.kernel, problem.x)
    noise = problem.noise_vector
    if kind == "sum":
        matrix = matrix + DenseLinearOperator(torch.eye(90)) * 0.5
    if kind == "stored":
        matrix = DenseLinearOperator(dense(problem.kernel, problem.x).detach())
    if kind == "batch":
        matrix, noise = KernelMatrix.of(problem.kernel, torch.stack([problem.x, 2 * problem.x])), noise.expand(2, -1)
    system, rows = System(matrix, noise), torch.tensor([0, 7, 88])
    vectors = problem.y.double()
    assert relative(system.sampled_rows(rows, vectors), system.accurate_product(vectors)[..., rows, :]) < 1e-12


def test_rounding_is_reported():
    problem = _problem(n=300, noise=1e-7, dtype=torch.float32)
    with pytest.warns(ConvergenceWarning, match=r"was rounded .* use float64"):
        solution = ConjugateGradients(tol=1e-5, max_iterations=5000).solve(problem)
    assert solution.report.reason == "was rounded"
    assert not solution.report.converged
    assert solution.report.max_residual > 1e-5


def test_stagnation_is_reported():
    problem = _problem(n=300, noise=1e-13, kernel=_kernel(lengthscale=2.0))
    with pytest.warns(ConvergenceWarning, match="stagnated"):
        solution = ConjugateGradients(tol=1e-14, max_iterations=20_000).solve(problem)
    assert solution.report.reason == "stagnated"
    assert relative(solution.report.residual, _true_residual(problem, solution.value)) < 0.5


def test_stagnation_is_an_end(tmp_path):
    """A larger budget does not make a new attempt of it."""
    problem = _problem(n=60, noise=1e-13, kernel=_kernel(lengthscale=2.0))
    solver = ConjugateGradients(tol=1e-15, max_iterations=5_000, checkpoint=tmp_path / "solve.pt")
    with quiet():
        first = solver.solve(problem)
        assert first.report.reason == "stagnated"
        second = dataclasses.replace(solver, max_iterations=10_000).solve(problem)
    assert second.report.reason == "stagnated"
    assert second.report.iterations == first.report.iterations
    assert torch.equal(second.value, first.value)


@pytest.mark.parametrize("precision", ["auto", "float64"])
def test_precision(precision):
    problem = _problem(n=200, noise=1e-3, dtype=torch.float32, smooth=True)
    report = ConjugateGradients(tol=1e-4, precision=precision).solve(problem).report
    assert report.converged
    assert report.dtype == "float32"


# --- callbacks and interruptions ------------------------------------------------------------------------------


class _Interrupting(DenseLinearOperator):
    """A matrix one of whose products, the fourth unless told, is interrupted."""

    at = 4

    def _matmul(self, rhs):
        self.count = getattr(self, "count", 0) + 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return super()._matmul(rhs)


def test_interrupt_in_a_product_keeps_the_iterate():
    problem = _problem(noise=1e-4)
    matrix = dense(problem.kernel, problem.x)
    system = System(_Interrupting(matrix), problem.noise_vector)
    with pytest.warns(ConvergenceWarning, match="interrupted after 3 iterations"):
        value, report = ConjugateGradients().run(system, problem.y.unsqueeze(-1), None, keep_interrupted=True)
    assert relative(report.residual, _true_residual(problem, value)) < 1e-9
    with quiet():
        expected = ConjugateGradients(max_iterations=3).solve(problem, preconditioner=None).value
    assert relative(value[:, 0], expected) < 1e-12


def test_interrupt_in_the_checking_product_keeps_the_iterate():
    problem = _problem(noise=1e-4)
    with quiet():
        plain = ConjugateGradients(max_iterations=5).solve(problem, preconditioner=None)
    system = System(_Interrupting(dense(problem.kernel, problem.x)), problem.noise_vector)
    system.operator.at = plain.report.work["products"]  # five iterations, then the product that gives the true residual
    try:
        with quiet():
            value, report = ConjugateGradients(max_iterations=5).run(
                system, problem.y.unsqueeze(-1), None, keep_interrupted=True
            )
    except KeyboardInterrupt:
        pytest.fail("the iterate was lost")  # pytest itself would stop at the interruption
    assert relative(value[:, 0], plain.value) < 1e-12
    assert not report.converged
    assert relative(report.residual, _true_residual(problem, value)) < 1e-9


def test_an_interrupted_training_step_stops():
    """Where Lanczos matrices were asked for, a half-done solve would give a wrong gradient."""
    problem = _problem(noise=1e-4)
    system = System(_Interrupting(dense(problem.kernel, problem.x)), problem.noise_vector)
    with pytest.raises(KeyboardInterrupt):
        ConjugateGradients().lanczos(system, problem.y.unsqueeze(-1), None)


# --- matrices that are not what was promised ------------------------------------------------------------------


def _run(matrix, rhs, noise=1e-3, **options):
    vector = torch.full((matrix.shape[-1],), noise, dtype=matrix.dtype)
    return ConjugateGradients(**options).run(System(DenseLinearOperator(matrix), vector), rhs, None)


@each("dtype", [torch.float32, torch.float64])
@each("negative", [1, 25, 50])
def test_indefinite_matrix(negative, dtype):
    values = torch.linspace(1, 2, 50, dtype=torch.float64)
    values[:negative] *= -1
    matrix = with_spectrum(values).to(dtype)
    with pytest.warns(ConvergenceWarning):
        value, report = _run(matrix, normal(50, 2, dtype=dtype), max_iterations=500)
    assert not report.converged
    assert bool(torch.isfinite(value).all())
    assert any("non-positive curvature" in note for note in report.notes)
    # advice to factorize would be in vain where that has been tried
    with pytest.warns(ConvergenceWarning, match=r"not positive definite .*;.* raise the noise") as seen:
        _run(matrix, normal(50, 2, dtype=dtype))
    assert "Cholesky" not in str(seen[0].message)


def test_nan_is_an_error():
    matrix = with_spectrum(torch.linspace(1, 2, 20, dtype=torch.float64))
    with pytest.raises(NumericalError, match="right-hand side"):
        _run(matrix, torch.full((20, 1), float("nan"), dtype=torch.float64))
    matrix[3, 4] = float("nan")
    with pytest.raises(NumericalError, match="NaN or infinity"):
        _run(matrix, normal(20, 1))


# --- batches and Lanczos matrices -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("preconditioner", [None, RPCholesky(10)], ids=["plain", "rpcholesky"])
def test_batches_of_systems(preconditioner, dtype):
    kernel = _kernel(dtype)
    x = torch.stack([points(60, seed=s, dtype=dtype) * (s + 1) for s in range(3)])
    noise = torch.tensor([[0.1], [1e-3], [1.0]], dtype=dtype).expand(3, 60)
    operator = KernelMatrix.of(kernel, x)
    built = None if preconditioner is None else preconditioner.build(operator, noise)
    rhs = normal(3, 60, 4, dtype=dtype)
    tol = 1e-4 if dtype == torch.float64 else 1e-3  # which float32 values can meet
    value, report = ConjugateGradients(tol=tol).run(System(operator, noise), rhs, built)
    assert value.shape == rhs.shape
    assert report.converged
    assert report.columns == 12
    matrices = kernel.double()(x.double()).to_dense().detach() + torch.diag_embed(noise.double())
    residual = (rhs.double() - matrices @ value.double()).norm(dim=-2) / rhs.double().norm(dim=-2)
    assert float(residual.max()) <= 1.01 * tol
    assert torch.allclose(report.residual, residual.reshape(-1), rtol=1e-3, atol=1e-8)


def test_a_batch_of_right_hand_sides_for_one_matrix():
    problem = _problem(n=60)
    rhs = normal(2, 60, 3)
    value, report = ConjugateGradients(tol=1e-8).run(problem.system(), rhs, RPCholesky(10).build(
        problem.system().operator, problem.noise_vector))  # fmt: skip
    assert relative(value, torch.linalg.solve(_matrix(problem), rhs)) < 1e-6
    assert report.columns == 6


def _quadrature(lanczos):
    """``e1^T log(T) e1`` of each Lanczos matrix."""
    values, vectors = torch.linalg.eigh(lanczos.double())
    return (vectors[..., 0, :].square() * values.log()).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("preconditioner", [None, RPCholesky(8)], ids=["plain", "rpcholesky"])
def test_log_determinant_from_lanczos_matrices(preconditioner, dtype):
    """Probes that are a full orthogonal basis make stochastic Lanczos quadrature exact."""
    n = 40
    problem = _problem(n=n, noise=0.1, dtype=dtype)
    system, matrix = problem.system(), _matrix(problem)
    if preconditioner is None:
        built, start, probes = None, 0.0, identity(n)
    else:
        built = preconditioner.build(system.operator, problem.noise_vector)
        values, vectors = torch.linalg.eigh(built.to_dense())
        probes = vectors * values.sqrt()  # P^(1/2) e_i up to a rotation: quadrature of P^(-1/2) A P^(-1/2)
        start = float(built.log_determinant())
    solver = ConjugateGradients(tol=1e-9 if dtype == torch.float64 else 1e-4, max_iterations=n)
    with quiet():
        lanczos, _ = solver.lanczos(system, probes.to(dtype), built)
    assert lanczos.shape[0] == n
    assert lanczos.dtype == dtype
    # probe i has norm 1 in the inner product of P^-1, so each quadrature has weight 1
    found = start + float(_quadrature(lanczos).sum())
    expected = float(torch.linalg.slogdet(matrix).logabsdet)
    assert found == pytest.approx(expected, rel=1e-6 if dtype == torch.float64 else 1e-3)


def test_lanczos_matrices_of_columns_that_end_early():
    """Rows past a column's end are unit rows, which add nothing to a logarithm."""
    values = torch.tensor([1.0, 2.0, 4.0] + [8.0] * 17, dtype=torch.float64)
    matrix, noise = with_spectrum(values), 0.5
    basis = torch.linalg.eigh(matrix).eigenvectors
    rhs = torch.stack([basis[:, 0], basis[:, 0] + basis[:, 1], basis.sum(1)], dim=1)
    system = System(DenseLinearOperator(matrix), torch.full((20,), noise, dtype=torch.float64))
    lanczos, _ = ConjugateGradients(tol=1e-10).lanczos(system, rhs, None)
    assert lanczos.shape == (3, 4, 4)
    assert torch.allclose(lanczos, lanczos.mT)
    unit = rhs / rhs.norm(dim=0)
    exact = ((basis.mT @ unit).square() * (torch.linalg.eigvalsh(matrix) + noise).log().unsqueeze(1)).sum(0)
    assert relative(_quadrature(lanczos), exact) < 1e-9
    assert torch.allclose(lanczos[0, 1:, 1:], identity(3))
    assert torch.allclose(lanczos[0, 0, 1:], torch.zeros(3, dtype=torch.float64))


def test_lanczos_matrices_of_zero_columns():
    system = _problem(n=20).system()
    lanczos, _ = ConjugateGradients().lanczos(system, torch.zeros(20, 2, dtype=torch.float64), None)
    assert torch.equal(lanczos, torch.ones(2, 1, 1, dtype=torch.float64))


def test_lanczos_matrices_of_a_batch():
    x = torch.stack([points(30, seed=s) for s in range(2)])
    operator, noise = KernelMatrix.of(_kernel(), x), torch.full((2, 30), 0.2, dtype=torch.float64)
    rhs = identity(30).expand(2, 30, 30)
    lanczos, _ = ConjugateGradients(tol=1e-10).lanczos(System(operator, noise), rhs, None)
    matrices = _kernel()(x).to_dense().detach() + 0.2 * identity(30)
    assert relative(_quadrature(lanczos).sum(0), torch.linalg.slogdet(matrices).logabsdet) < 1e-7


# --- arguments ------------------------------------------------------------------------------------------------


@each("tol", [0, 1, -1e-3, float("nan"), 5])
def test_refuses_tolerances(tol):
    with pytest.raises(InputError, match="tol expects"):
        ConjugateGradients(tol=tol)


@each("limit", [0, -1, 2.5, "10"])
def test_refuses_iteration_limits(limit):
    with pytest.raises(InputError, match="max_iterations expects"):
        ConjugateGradients(max_iterations=limit)


def test_refuses_other_arguments():
    with pytest.raises(InputError, match="precision expects"):
        ConjugateGradients(precision="float16")
    with pytest.raises(InputError, match="preconditioner expects"):
        ConjugateGradients().solve(_problem(), preconditioner="rpcholesky")
    with pytest.raises(InputError, match="preconditioner expects"):
        ConjugateGradients().solve(_problem(), preconditioner=RPCholesky)
    with pytest.raises(InputError, match="initial expects the solution's shape"):
        ConjugateGradients().solve(_problem(), initial=torch.zeros(3))
    with pytest.raises(InputError, match="matmul expects"):
        ConjugateGradients().solve(_problem(), matmul="sparse")


def test_defaults():
    report = ConjugateGradients().solve(_problem()).report
    assert report.tol == 1e-3
    assert report.preconditioner == "RPCholesky"


def test_progress_bar_on_request(capsys):
    ConjugateGradients().solve(_problem(), progress=True)
    ConjugateGradients().solve(_problem())
    assert "error" not in capsys.readouterr().err.lower()


def test_cached_preconditioner_serves_the_solver():
    problem = _problem(noise=1e-3)
    cache = PreconditionerCache(RPCholesky(40))
    system = problem.system()
    built = cache.get(system.operator, problem.noise_vector)
    with record_solves() as solves:
        value, _ = ConjugateGradients(tol=1e-8).run(system, problem.y.unsqueeze(-1), built, name="RPCholesky")
    assert solves[0].rank == 40
    assert relative(value[:, 0], torch.linalg.solve(_matrix(problem), problem.y)) < 1e-4

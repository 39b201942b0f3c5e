"""The inducing-point problem and its solvers by normal equations: sparse sign embedding, KRILL, Falkon, QR."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel

from cases import each, pairwise
from problems import Largest, normal, points, quiet, relative, set_scales
from sketchgp import (
    KRILL,
    QR,
    ConvergenceWarning,
    Falkon,
    InducingPointProblem,
    InputError,
    LaplaceKernel,
    NumericalError,
    record_solves,
)
from sketchgp.operators.expression import Features
from sketchgp.operators.tall import TallMatrix
from sketchgp.preconditioners.krill import SparseSignEmbedding, distinct, krill_preconditioner, sketch_rows
from sketchgp.solvers.inducing.split_gradients import SplitGradients

N, M = 300, 40
KERNELS = {
    "rbf-ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern12": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "matern32": lambda: MaternKernel(nu=1.5),
    "laplace": LaplaceKernel,
    "periodic + rbf": lambda: PeriodicKernel() + ScaleKernel(RBFKernel(active_dims=(0, 2))),
}
SOLVERS = {
    "krill": KRILL(tol=1e-9),
    "krill, wide": KRILL(tol=1e-9, sketch_size=4 * M, nonzeros=3, seed=1),
    "falkon": Falkon(tol=1e-9, max_iterations=500),
    "falkon, counts": Falkon(tol=1e-9, max_iterations=500, counts=torch.linspace(1, 20, M)),
    "qr": QR(),
}
every_solver = pytest.mark.parametrize("name", SOLVERS)


def _problem(dtype=torch.float64, noise=0.1, kernel="rbf-ard", columns=2, n=N, m=M, seed=0):
    x = points(n, seed=seed)
    y = (x @ (3 * normal(3, columns or 1, seed=2))).sin() + 0.2 * normal(n, columns or 1, seed=seed + 1)
    y = y.squeeze(1) if columns is None else y
    z = x[:: max(1, n // m)][:m] if seed == 0 else points(m, seed=seed + 5)
    made = set_scales(KERNELS[kernel](), 1.3, 0.6).to(dtype)
    return InducingPointProblem(made, x.to(dtype), y.to(dtype), noise, z.to(dtype))


def _dense(problem):
    """Kzz and diag(noise)^-1/2 Kxz, and the targets alike, in float64 by the kernel itself."""
    with torch.no_grad():
        kernel = copy.deepcopy(problem.kernel).double()
        x, z = problem.x.double(), problem.inducing_points.double()
        kzz, kxz = kernel(z).to_dense(), kernel(x, z).to_dense()
    noise = torch.as_tensor(problem.noise, dtype=torch.float64).expand(len(x)).sqrt().unsqueeze(1)
    return kzz, kxz / noise, problem.y.double().reshape(len(x), -1) / noise, kxz


def _predictions(problem):
    """The mean at the training points, by least squares with ``[D^-1/2 Kxz; Kzz^1/2]``."""
    kzz, tall, y, kxz = _dense(problem)
    values, vectors = torch.linalg.eigh(kzz)
    root = values.clamp(min=0).sqrt().unsqueeze(1) * vectors.mT
    stacked = torch.cat([tall, root]), torch.cat([y, y.new_zeros(len(root), y.shape[1])])
    return kxz @ torch.linalg.lstsq(*stacked, driver="gelsd").solution


def _found(problem, solution):
    return _dense(problem)[3] @ solution.value.reshape(problem.m, -1)


# --- the sparse sign embedding --------------------------------------------------------------------------------


def _embedded(embedding, vectors):
    out = vectors.new_zeros(embedding.shape[0], vectors.shape[1])
    embedding.add_product(out, slice(0, len(vectors)), vectors)
    return out


@pytest.mark.parametrize(
    ("rows", "columns", "nonzeros", "dtype"),
    [(30, 4500, 8, torch.float32), (8, 17, 8, torch.float64), (3, 4500, 1, torch.float64), (1, 1, 1, torch.float32)],
)
def test_columns_of_the_embedding(rows, columns, nonzeros, dtype):
    """As many entries as promised, in distinct rows, of the one size; products are those of the dense matrix."""
    embedding = SparseSignEmbedding(rows=rows, columns=columns, nonzeros=nonzeros, seed=3)
    dense = _embedded(embedding, torch.eye(columns, dtype=dtype))
    assert dense.shape == embedding.shape == (rows, columns)
    assert dense.dtype == dtype
    assert torch.equal((dense != 0).sum(dim=0), torch.full((columns,), nonzeros))
    torch.testing.assert_close(dense[dense != 0].abs(), torch.full((nonzeros * columns,), nonzeros**-0.5, dtype=dtype))
    right = normal(columns, 3, seed=1, dtype=dtype)
    tight = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {}
    torch.testing.assert_close(_embedded(embedding, right), dense @ right, **tight)


def test_the_embedding_by_parts():
    """However the columns are cut, across the chunks that they are drawn in; and another seed draws others."""
    embedding = SparseSignEmbedding(rows=20, columns=9000, seed=5)
    right, out = normal(9000, 2, seed=1), torch.zeros(20, 2, dtype=torch.float64)
    for start, stop in ((0, 1), (1, 4100), (4100, 8192), (8192, 9000)):
        embedding.add_product(out, slice(start, stop), right[start:stop])
    torch.testing.assert_close(out, _embedded(embedding, right))
    assert relative(_embedded(SparseSignEmbedding(rows=20, columns=9000, seed=6), right), out) > 0.1


def test_chunks_of_columns_differ():
    embedding, first = SparseSignEmbedding(rows=50, columns=9000), torch.arange(4)
    units = torch.zeros(9000, 12, dtype=torch.float64)
    for chunk in range(3):
        units[4096 * chunk + first, 4 * chunk + first] = 1.0
    drawn = _embedded(embedding, units).split(4, dim=1)
    assert all(not torch.equal(drawn[i], drawn[j]) for i, j in ((0, 1), (1, 2), (0, 2)))


def test_rows_and_signs_are_uniform():
    rows = distinct(20_000, 3, 7, torch.Generator().manual_seed(0))
    assert bool((rows.sort(dim=1).values.diff(dim=1) > 0).all())
    for column in rows.unbind(1):
        counts = column.bincount(minlength=7).double()
        assert float(((counts - 20_000 / 7) ** 2 / (20_000 / 7)).sum()) < 22  # chi-square, 6 degrees: 0.1%
    dense = _embedded(SparseSignEmbedding(rows=7, columns=2000, nonzeros=3), torch.eye(2000))
    assert abs(float(dense.sign().sum(dim=1).mean())) < 4 * (3 * 2000 / 7) ** 0.5


def test_lengths_are_kept():
    """A subspace of 20 dimensions in 5,000 is embedded in 40 rows within the bounds of a Gaussian matrix."""
    basis = torch.linalg.qr(normal(5000, 20, seed=0)).Q
    for seed in range(5):
        values = torch.linalg.svdvals(_embedded(SparseSignEmbedding(rows=40, columns=5000, seed=seed), basis))
        assert 0.15 < float(values[-1]) <= float(values[0]) < 2.0  # 1 -+ sqrt(1/2), and what chance adds


# --- products -------------------------------------------------------------------------------------------------


@each(("kernel", "dtype", "accurate"), pairwise(KERNELS, [torch.float32, torch.float64], [True, False]))
def test_products_of_the_tall_matrix(kernel, dtype, accurate, monkeypatch):
    monkeypatch.setattr("sketchgp.operators.tall._CPU_ENTRIES", 100 * M)  # three tiles
    monkeypatch.setattr("sketchgp.operators.tall._INPUTS", 1)  # each from inputs of its own
    problem = _problem(dtype, kernel=kernel, noise=torch.linspace(0.05, 0.3, N, dtype=torch.float64))
    _, tall, _, _ = _dense(problem)
    scale = float(torch.as_tensor(problem.noise).log().mean().exp()) ** 0.5
    matrix = problem.tall(accurate)
    assert matrix.dtype == (torch.float64 if accurate else dtype)
    v, u = normal(M, 2, seed=1), normal(N, 3, seed=2)
    tight = 1e-8 if accurate or dtype == torch.float64 else 1e-5  # coincident points: distances of 1e-8
    assert relative(matrix.matmul(v), scale * tall @ v) < tight
    assert relative(matrix.t_matmul(u), scale * tall.mT @ u) < tight
    assert relative(matrix.gram(v)[0], scale**2 * tall.mT @ (tall @ v)) < tight
    assert matrix.gram(v)[0].dtype == torch.float64
    assert matrix.evaluated.entries == 4 * N * M


@pytest.mark.parametrize("features", [2, 3])  # by differences, by a matrix product
def test_tiles_prepare_the_inducing_points_once(features, monkeypatch):
    monkeypatch.setattr("sketchgp.operators.tall._CPU_ENTRIES", 20 * M)
    made = []

    def once(features, name, make, original=Features.once):
        if name not in ("direct", "augmented"):  # what is known of the points besides
            return original(features, name, make)
        return original(features, name, lambda: made.append(name) or make())

    monkeypatch.setattr(Features, "once", once)
    x, kernel = points(N, features).float(), MaternKernel(nu=1.5)
    matrix, v = TallMatrix(kernel, x, x[:M]), normal(M, 2)
    wanted = copy.deepcopy(kernel).double()(x.double(), x[:M].double()).to_dense() @ v
    for _ in range(2):
        assert relative(matrix.matmul(v), wanted) < 1e-5
    assert len(made) == 2
    whole, seven = matrix._matrix(x, slice(None)), torch.arange(7)
    assert relative(whole.rows(seven).to_dense() @ v.float(), wanted[:7]) < 1e-5
    other = whole.rows(seven, torch.arange(M, 0, -1) - 1)  # not the same right side
    assert relative(other.to_dense() @ v.flip(0).float(), wanted[:7]) < 1e-5
    assert len(made) == 4
    monkeypatch.setattr("sketchgp.operators.tall._INPUTS", 160 * features)  # for two tiles at once
    assert relative(matrix.matmul(v), wanted) < 1e-5
    assert len(made) == 4 + math.ceil(N / 160)


def _applied(factors, vectors):
    return factors.inverse(factors.inverse_t(vectors))


def _stored(matrix):
    """The normal matrix, from its residual of no targets."""
    return -matrix.residual(torch.zeros(N, 1).double(), torch.eye(M).double())


def test_the_normal_matrix():
    problem = _problem(noise=torch.linspace(0.05, 0.3, N, dtype=torch.float64))
    kzz, tall, _, _ = _dense(problem)
    dense = problem.level * (kzz + tall.mT @ tall)
    matrix = problem.normal_matrix()
    assert matrix.shape == (M, M)
    assert relative(_stored(matrix), dense) < 1e-13


def test_krill_is_close_to_the_matrix():
    """Its condition number is that of a sketch of 2m rows, whatever the noise; the exact matrix is for many rows."""
    for noise in (1e-1, 1e-4, 1e-8):
        problem = _problem(noise=noise, kernel="matern32")
        matrix = problem.normal_matrix()
        inverse = _applied(krill_preconditioner(matrix), torch.eye(M, dtype=torch.float64))
        values = torch.linalg.eigvals(inverse @ _stored(matrix)).real
        assert float(values.max() / values.min()) < 60
    for noise in (1e-8, 1e-2, 100.0):
        matrix = _problem(noise=noise, kernel="matern32").normal_matrix()
        dense = _stored(matrix)
        wide = _applied(krill_preconditioner(matrix, sketch_size=40 * M), dense)
        values = torch.linalg.eigvals(wide).real
        assert 0.6 < float(values.min()) < float(values.max()) < 1.6


@pytest.mark.parametrize("counts", [None, torch.linspace(1, 20, M, dtype=torch.float64)])
def test_falkons_preconditioner(counts):
    """``Kzz diag(counts) Kzz + level Kzz``, where each point stands for n / m unless it is told otherwise."""
    problem = _problem(kernel="matern12", noise=torch.linspace(0.5, 2.0, N, dtype=torch.float64))
    matrix = problem.normal_matrix()
    stands = torch.full((M,), N / M, dtype=torch.float64) if counts is None else counts
    stands = stands * (problem.level / problem.noise).mean()
    kzz = matrix.kzz
    dense = kzz @ stands.diag() @ kzz + problem.level * kzz
    built = Falkon(counts=counts).preconditioner(matrix, problem.y)
    assert relative(_applied(built, dense), torch.eye(M).double()) < 1e-8


# --- solutions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kernel", "dtype"),
    [
        (name, kernel, (torch.float32, torch.float64)[(i + j) % 2])
        for i, name in enumerate(SOLVERS)
        for j, kernel in enumerate(KERNELS)
        if name in ("krill", "qr") or (i + j) % 3 == 0
    ],
)
def test_solutions(name, kernel, dtype):
    for noise, columns, seed in (
        (0.1, 2, 0),
        (1e-3, None, 1),
        (torch.linspace(0.05, 0.3, N, dtype=torch.float64), 1, 2),
    ):
        problem = _problem(dtype, noise, kernel, columns, seed=seed)
        solution = SOLVERS[name].solve(problem)
        assert solution.value.shape == ((M,) if columns is None else (M, columns))
        assert solution.value.dtype == torch.float64
        assert relative(_found(problem, solution), _predictions(problem)) < 1e-7
        kzz, tall, y, _ = _dense(problem)
        rhs = tall.mT @ y
        residual = (rhs - (kzz + tall.mT @ tall) @ solution.value.reshape(M, -1)).norm(dim=0) / rhs.norm(dim=0)
        assert solution.report.converged
        torch.testing.assert_close(solution.report.residual, residual, rtol=0.2, atol=2e-9)


@pytest.mark.parametrize(("name", "noise"), [(n, [1e-2, 1e-5, 1e-8][i % 3]) for i, n in enumerate(SOLVERS)])
def test_error_in_the_norm_of_the_problem(name, noise):
    """Ill-conditioned as it may be: ``||w - w*||_M / ||w*||_M`` with the reference by QR of the stacked matrix."""
    problem = _problem(noise=noise, columns=1)
    kzz, tall, y, _ = _dense(problem)
    root = torch.linalg.cholesky(kzz, upper=True)
    stacked = torch.cat([tall, root])
    expected = torch.linalg.lstsq(stacked, torch.cat([y, torch.zeros(M, 1).double()])).solution
    solution = dataclasses.replace(SOLVERS[name], tol=1e-11) if name != "qr" else SOLVERS[name]
    with quiet():
        found = solution.solve(problem).value
    assert float((stacked @ (found - expected)).norm() / (stacked @ expected).norm()) < 1e-6


@pytest.mark.parametrize("solver", [KRILL(), Falkon()], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("noise", [1e-3, 1e-7])
def test_a_small_residual_is_not_the_end(solver, noise):
    """Targets far from 0, and rows that crowd in one corner: the residual is of the largest eigenvalues alone."""
    problem = _problem(noise=noise, columns=1, kernel="matern32")
    crowded = dataclasses.replace(problem, x=problem.x**4, y=problem.y + 100)
    solution = solver.solve(crowded)
    first = int((solution.report.history <= solver.tol).nonzero()[0, 0])
    assert solution.report.converged and solution.report.iterations > first
    kzz, tall, *_ = _dense(crowded)
    error = solution.value - QR().solve(crowded).value
    assert float((error.mT @ (kzz + tall.mT @ tall) @ error).sqrt()) < 0.1  # posterior deviations


@pytest.mark.parametrize("seed", [15, 17, 20])
def test_a_step_that_takes_nearly_all_is_not_the_last(seed):
    """Crowded rows, and points that do not represent them: two eigenvalues are a billionth of the others."""
    kernel, x, z = set_scales(RBFKernel(), 1.0, 0.5).double(), normal(3, 2, seed=seed), normal(5, 2, seed=99 - seed)
    problem = InducingPointProblem(kernel, 0.05 * x, normal(3, 1, seed=seed + 20), 1e-7, z)
    kzz, tall, *_ = _dense(problem)
    error = Falkon().solve(problem).value - QR().solve(problem).value
    assert float((error.mT @ (kzz + tall.mT @ tall) @ error).sqrt()) < 0.3  # posterior deviations


@pytest.mark.parametrize("solver", [KRILL(), Falkon()], ids=lambda solver: type(solver).__name__)
def test_directions_below_the_roundoff_of_the_matrix(solver):
    """Points on a short line and next to no noise: the normal equations alone do not hold what far predictions need."""
    x = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(1)
    kernel = set_scales(RBFKernel(), 1.0, 1.5).double()
    problem = InducingPointProblem(kernel, x, (6 * x).sin() + 30, 1e-9, x[:10:2])
    with quiet():
        solution, exact = solver.solve(problem), QR().solve(problem)
    error, matrix = solution.value - exact.value, problem.normal_matrix()
    squares = matrix.tall.gram(error)[1] + problem.noise * (error * matrix.kzz_matmul(error)).sum()
    assert exact.report.converged
    right = float((squares / problem.noise).sqrt()) < 0.5  # posterior deviations
    assert right or (solution.report.reason == "met the limits of float64" and solver.name == "Falkon")


@every_solver
def test_degenerate_points(name):
    """Duplicated inducing points, and duplicated rows; the prediction is that of the distinct ones."""
    problem = _problem()
    twice = torch.cat([problem.inducing_points, problem.inducing_points[:7]])
    solver = SOLVERS[name]
    if name == "falkon, counts":
        solver = dataclasses.replace(solver, counts=torch.ones(M + 7))
    more = dataclasses.replace(problem, inducing_points=twice)
    with quiet():
        solution = solver.solve(more)
    assert relative(_found(more, solution), _predictions(problem)) < 1e-5
    same = dataclasses.replace(problem, x=problem.x[:1].expand(N, 3).clone(), y=torch.ones(N, 1).double())
    found = _found(same, SOLVERS[name].solve(same))
    assert relative(found, found[:1].expand(N, 1)) < 1e-9


@each(("n", "m"), [(1, 1), (2, 1), (2, 2), (1, 2), (5, 9), (50, 50)])
@pytest.mark.parametrize("solver", [KRILL(tol=1e-8), Falkon(tol=1e-8), QR()], ids=lambda solver: type(solver).__name__)
def test_tiny_and_wide(solver, n, m):
    x, z = points(n), points(m, seed=3)
    problem = InducingPointProblem(MaternKernel(nu=1.5).double(), x, normal(n, seed=1), 0.1, z)
    assert relative(_found(problem, solver.solve(problem)), _predictions(problem)) < 1e-6


def test_zero_targets_of_the_direct_solver():
    problem = dataclasses.replace(_problem(), y=torch.zeros(N, 2).double())
    assert torch.equal(QR().solve(problem).value, torch.zeros(M, 2).double())


def test_iterations():
    """KRILL's do not depend on the noise or on how the points were chosen; Falkon's do."""
    counts = {}
    for noise in (1e-2, 1e-6):
        problem = _problem(noise=noise, n=1200, m=120, kernel="matern32", columns=1, seed=0)
        skewed = dataclasses.replace(problem, inducing_points=problem.x[problem.x[:, 0].argsort()[:120]])
        for case, one in (("uniform", problem), ("skewed", skewed)):
            for solver in (KRILL(), Falkon(max_iterations=1000)):
                with quiet():
                    counts[type(solver).__name__, case, noise] = solver.solve(one).report.iterations
    assert max(value for key, value in counts.items() if key[0] == "KRILL") <= 40
    assert counts["Falkon", "skewed", 1e-6] > 2 * counts["KRILL", "skewed", 1e-6]


def test_entries_of_float32_data_are_float64():
    problem = _problem(torch.float32, noise=1e-3)
    with record_solves() as solves:
        solution = KRILL(tol=1e-8).solve(problem)
    assert solves == [solution.report]
    assert (solution.report.dtype, solution.report.converged) == ("float64", True)
    assert relative(_found(problem, solution), _predictions(problem)) < 1e-6


def test_the_automatic_sketch_is_larger_where_it_costs_little():
    assert [sketch_rows(40_000, m) // m for m in (200, 1131, 1132, 2262, 2263)] == [8, 8, 4, 4, 2]
    assert sketch_rows(10**8, 4000) == 32_000 and sketch_rows(10**8, 4001) == 8002
    report = KRILL().solve(_problem()).report
    assert report.preconditioner == f"sparse sign embedding of {sketch_rows(N, M)} rows"


def test_a_report():
    report = KRILL(sketch_size=100).solve(_problem()).report
    assert (report.solver, report.preconditioner) == ("KRILL", "sparse sign embedding of 100 rows")
    assert (report.size, report.columns, report.rank, report.converged) == (M, 2, 0, True)
    assert report.reason == "reached the tolerance"
    assert len(report.history) == report.iterations + 1
    assert Falkon().solve(_problem()).report.solver == "Falkon"
    direct = QR().solve(_problem()).report
    assert (direct.solver, direct.iterations, direct.converged) == ("QR", 0, True)


def test_the_best_iterate_is_returned(monkeypatch):
    """Where a cycle makes things worse, what was there before."""
    problem = _problem()
    exact = KRILL(tol=1e-9).solve(problem).value

    close = SplitGradients.close_cycle

    def worse(self):
        self.u = self.u + 1
        close(self)

    monkeypatch.setattr(SplitGradients, "close_cycle", worse)
    with pytest.warns(ConvergenceWarning, match="stagnated"):
        solution = KRILL(tol=1e-15).solve(problem, initial=exact)
    assert torch.equal(solution.value, exact)
    assert solution.report.max_residual < 1e-8


def test_seeds():
    problem = _problem(columns=1)
    first, again, other = (KRILL(tol=1e-3, seed=seed).solve(problem).value for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("solver", [KRILL(tol=1e-2), Falkon(tol=1e-2), QR()], ids=lambda solver: type(solver).__name__)
def test_nothing_n_by_m_is_made(solver, monkeypatch):
    monkeypatch.setattr("sketchgp.operators.tall._CPU_ENTRIES", 200 * M)
    problem = _problem(n=6000, columns=1)
    with Largest() as largest:
        solver.solve(problem)
    assert largest.entries < 6000 * M / 4


# --- what is refused ------------------------------------------------------------------------------------------


def _wrong(**changes):
    given = {"kernel": RBFKernel().double(), "x": points(9), "y": normal(9), "noise": 0.1, "inducing_points": points(4)}
    return {**given, **changes}


@each(
    ("changes", "message"),
    [
        ({"kernel": "rbf"}, "gpytorch kernel"),
        ({"kernel": RBFKernel(batch_shape=torch.Size([2]))}, "batch_shape"),
        ({"x": points(9)[:, :2]}, "3 features, torch.float64 on cpu, as inducing_points; got 2 features"),
        ({"inducing_points": points(4).float()}, "kernel has dtype"),
        ({"inducing_points": points(4).float(), "kernel": RBFKernel()}, "as inducing_points; got"),
        ({"inducing_points": points(4)[:0]}, "at least one row"),
        ({"inducing_points": points(4) / 0}, "inducing_points holds NaN"),
        ({"inducing_points": [[1.0]]}, "inducing_points expects a tensor"),
        ({"x": points(9)[0]}, "x expects shape"),
        ({"x": points(9) * math.nan}, "x holds NaN"),
        ({"y": normal(8)}, "one row per row"),
        ({"y": None}, "expects the targets"),
        ({"y": normal(9) / 0}, "y holds NaN"),
        ({"noise": -1.0}, "positive, finite"),
        ({"noise": math.nan}, "positive, finite"),
        ({"noise": torch.ones(4)}, "noise expects a number"),
        ({"noise": torch.tensor([1.0] * 8 + [0.0])}, "or 0 for all"),
        ({"x": 3}, "a tensor or an iterable"),
        ({"x": [(points(9), normal(9))]}, "y expects None"),
        ({"x": iter([(points(9), normal(9))]), "y": None}, "starts anew at every epoch"),
    ],
)
def test_problems_that_do_not_fit(changes, message):
    with pytest.raises(InputError, match=message):
        InducingPointProblem(**_wrong(**changes))


@each(
    ("batches", "message"),
    [
        ([points(9)], r"Batch 0 .* not a pair"),
        ([(points(9), normal(9)), (points(9), normal(8))], "one row per row"),
        ([(points(9), normal(9)), (points(9) / 0, normal(9))], "x of batch 1 holds NaN"),
        ([(points(9).float(), normal(9).float())], "x of batch 0 expects 3 features, torch.float64"),
        ([(points(9)[:, :1], normal(9))], "x of batch 0 expects 3 features, torch.float64"),
    ],
)
def test_streams_that_do_not_fit(batches, message):
    problem = InducingPointProblem(**_wrong(x=batches, y=None))
    assert problem.streamed
    with pytest.raises(InputError, match=message):
        list(problem.batches())


@every_solver
def test_what_these_solvers_do_not_take(name):
    solver = SOLVERS[name]
    with pytest.raises(InputError, match="as tensors; for a stream"):
        solver.solve(InducingPointProblem(**_wrong(x=[(points(9), normal(9))], y=None)))
    with pytest.raises(InputError, match="noise above 0"):
        solver.solve(dataclasses.replace(_problem(), noise=0.0))


@each(
    ("make", "message"),
    [
        (lambda: KRILL(tol=0.0), "tol expects"),
        (lambda: KRILL(tol=2.0), "tol expects"),
        (lambda: Falkon(max_iterations=0), "max_iterations expects"),
        (lambda: KRILL(nonzeros=0), "nonzeros expects"),
        (lambda: KRILL(sketch_size=-1), "sketch_size expects"),
        (lambda: Falkon(counts=[1.0]), "counts expects a tensor"),
        (lambda: Falkon(counts=torch.zeros(3)), "counts expects positive"),
        (lambda: Falkon(counts=torch.ones(3)).solve(_problem()), "one number for each of 40"),
        (lambda: KRILL(sketch_size=M - 1).solve(_problem()), "below the 40 inducing points"),
    ],
)
def test_choices_that_do_not_fit(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_choices_with_counts_compare():
    counts = torch.linspace(1, 2, 5)
    assert Falkon() == Falkon() != Falkon(counts=counts) != KRILL()
    assert Falkon(counts=counts) == Falkon(counts=counts.clone()) != Falkon(counts=counts + 1)
    assert Falkon(counts=counts) != Falkon(counts=counts, tol=1e-5)
    assert hash(Falkon(counts=counts)) == hash(Falkon(counts=counts.clone()))


def test_too_little_memory(monkeypatch):
    def free(count):
        for name in ("memory.available_memory", "solvers.inducing.krill.free_memory"):
            monkeypatch.setattr(f"sketchgp.{name}", lambda device: count)

    many, few = (KRILL(sketch_size=rows).bytes_needed(_problem()) for rows in (sketch_rows(N, M), 2 * M))
    free(2 * many)
    assert KRILL().solve(_problem()).report.preconditioner == f"sparse sign embedding of {sketch_rows(N, M)} rows"
    free(many - 1)
    assert KRILL().solve(_problem()).report.preconditioner == f"sparse sign embedding of {2 * M} rows"
    with pytest.raises(InputError, match=r"2 column\(s\)"):
        KRILL(sketch_size=sketch_rows(N, M)).solve(_problem())
    free(few - 1)
    with pytest.raises(InputError, match=r"m = 40 and .* needs 0\..* MiB and .* fewer inducing points"):
        KRILL().solve(_problem())
    free(8 * M * M - 1)
    with pytest.raises(InputError, match=r"k\(z, z\) for m = 40 needs"):
        _problem().kzz()
    with pytest.raises(InputError, match=r"QR\(\) for m = 40 needs"):
        QR().solve(_problem())


def test_a_kernel_that_gives_nan():
    kernel = RBFKernel().double()
    problem = InducingPointProblem(kernel, points(9), normal(9), 0.1, points(4))
    kernel.raw_lengthscale.data.fill_(math.nan)
    for solver in (KRILL(), Falkon(), QR()):
        with pytest.raises(NumericalError):
            solver.solve(problem)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["krill", "falkon", "qr"])
def test_on_a_device(name):
    problem = _problem(torch.float32)
    there = InducingPointProblem(problem.kernel.cuda(), problem.x.cuda(), problem.y.cuda(), 0.1,
                                 problem.inducing_points.cuda())  # fmt: skip
    value = SOLVERS[name].solve(there).value
    assert value.device.type == "cuda"
    problem = _problem(torch.float32)
    assert relative(_dense(problem)[3] @ value.cpu(), _predictions(problem)) < 1e-5

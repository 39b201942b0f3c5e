"""SketchySAGA against the direct solution, and its damping, its divergence, its checkpoints, its bad input."""

from __future__ import annotations

import dataclasses
import math

import gpytorch
import pytest
import torch

import sketchgp
from cases import each
from problems import Crash, Largest, normal, points, quiet, relative
from sketchgp import ConvergenceWarning, InducingPointProblem, InputError, NumericalError, record_solves
from sketchgp.operators import KernelMatrix
from sketchgp.operators.tall import TallMatrix
from sketchgp.preconditioners.row_nystrom import DampedNystrom, damped_nystrom
from sketchgp.solvers.inducing.sketchysaga import Saga, SketchySAGA


def ard(dtype=torch.float64):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=3)).to(dtype)
    kernel.base_kernel.lengthscale = torch.tensor([0.3, 0.5, 1.0])
    kernel.outputscale = 1.7
    return kernel


def matern(dtype=torch.float64, nu=1.5):
    kernel = gpytorch.kernels.MaternKernel(nu=nu).to(dtype)
    kernel.lengthscale = 0.5
    return kernel


def laplace(dtype=torch.float64):
    kernel = sketchgp.LaplaceKernel().to(dtype)
    kernel.lengthscale = 1.0
    return kernel


KERNELS = {"RBF ARD": ard, "Matern": matern, "Laplace": laplace}


def problem(kernel=None, n=400, m=40, noise=1.0, columns=None, dtype=torch.float64, x=None, z=None):
    x = points(n, dtype=dtype) if x is None else x
    y = x.sum(dim=1).sin() + 0.1 * normal(len(x), dtype=dtype)
    if columns is not None:
        y = torch.stack([y * (k + 1) + normal(len(x), seed=k, dtype=dtype) for k in range(columns)], dim=1)
    z = x[:: max(1, len(x) // m)][:m] if z is None else z
    return InducingPointProblem(matern(dtype) if kernel is None else kernel, x, y, noise, z)


def dense(one):
    """The matrix of the problem and its right-hand side, dense, by the kernel itself, in float64."""
    kernel, x, z = one.kernel.double(), one.x.double(), one.inducing_points.double()
    tall, inner = kernel(x, z).to_dense().detach(), kernel(z).to_dense().detach()
    noise = torch.as_tensor(one.noise, dtype=torch.float64).expand(len(x))
    scaled = tall / noise.unsqueeze(1)
    level = float(noise.log().mean().exp())  # the problem's own scale
    y = one.y.double().reshape(len(x), -1)
    return level * (tall.mT @ scaled + inner), level * (scaled.mT @ y)


def error(matrix, found, expected):
    """The largest error of a column in the matrix's norm, relative."""
    found, expected = found.reshape(len(matrix), -1), expected.reshape(len(matrix), -1)
    difference = found - expected
    return float(((difference * (matrix @ difference)).sum(0) / (expected * (matrix @ expected)).sum(0)).max().sqrt())


def solve(one, **choices):
    return SketchySAGA(**{"tol": 1e-8, "max_epochs": 300, **choices}).solve(one)


def too_long(monkeypatch):
    """Steps that diverge, so that some are taken back."""
    honest = DampedNystrom.batch_smoothness
    monkeypatch.setattr(DampedNystrom, "batch_smoothness", lambda *a: honest(*a) / 100)
    monkeypatch.setattr("sketchgp.solvers.inducing.sketchysaga.smoothness", lambda *a, **b: 1e-3)


@pytest.mark.parametrize(("name", "columns"), list(zip(KERNELS, (None, 3, 1), strict=True)))
def test_the_direct_answer(name, columns):
    one = problem(KERNELS[name](), columns=columns)
    matrix, rhs = dense(one)
    solution = solve(one)
    report = solution.report
    assert solution.value.shape == (40,) if columns is None else (40, columns)
    assert error(matrix, solution.value, torch.linalg.solve(matrix, rhs)) < 1e-6
    assert error(matrix, solution.value, sketchgp.QR().solve(one).value) < 1e-6
    value = solution.value.reshape(40, -1)
    true = (matrix @ value - rhs).norm(dim=0) / rhs.norm(dim=0)
    assert report.converged and relative(report.residual, true) < 1e-3
    assert report.columns == (columns or 1) and report.size == 40 and report.history.shape[1] == report.columns
    assert float(report.history[0].max()) == pytest.approx(1.0)  # W = 0
    assert relative(report.history[-1], report.residual) < 1e-12


def test_convergence_is_linear():
    """Equal factors in equal numbers of epochs, down to 1e-9 of the start, whatever the size of the error."""
    one = problem()
    matrix, rhs = dense(one)
    exact, errors = torch.linalg.solve(matrix, rhs), []
    SketchySAGA(tol=1e-11, max_epochs=400).solve(
        one, callback=lambda step: errors.append(math.log(error(matrix, step.weights(), exact)))
    )
    first = next(i for i, e in enumerate(errors) if e < math.log(1e-3))
    second = next(i for i, e in enumerate(errors) if e < math.log(1e-6))
    third = next(i for i, e in enumerate(errors) if e < math.log(1e-9))
    assert third - second < 2.5 * (second - first) + 5


def test_steps_are_those_of_the_formula(monkeypatch):
    one = problem(n=60, m=8, noise=0.7)
    run = Saga(one, SketchySAGA(block_size=10, rho=1.0))
    run.begin(None)
    run.every = 1
    batches = iter([torch.arange(10), torch.arange(5, 15), torch.arange(10)])
    monkeypatch.setattr("sketchgp.solvers.inducing.sketchysaga.draw_rows", lambda *_: next(batches))
    tall, inner = torch.cat([tile for _, tile in one.tall(True).tiles()]), one.kzz()
    w, psi, y = torch.zeros(8, 1, dtype=torch.float64), -one.y.unsqueeze(1), one.y.unsqueeze(1)
    for rows in (torch.arange(10), torch.arange(5, 15), torch.arange(10)):
        new, old = tall[rows] @ w - y[rows], psi[rows]
        gradient = tall.mT @ psi + 6 * tall[rows].mT @ (new - old) + 0.7 * inner @ w
        psi[rows] = new
        w = w - run.length * run.p.apply_inverse(gradient)
        run.step()
        assert relative(run.w, w) < 1e-9 and relative(run.psi, psi) < 1e-9
    assert relative(run.total, tall.mT @ psi) < 1e-9 and run.epochs == pytest.approx(0.5)


@pytest.mark.parametrize("seed", [-3])
def test_every_seed(seed):
    one = problem()
    matrix, rhs = dense(one)
    assert error(matrix, solve(one, seed=seed).value, torch.linalg.solve(matrix, rhs)) < 1e-6


def test_the_same_bits_again_and_others_by_another_seed():
    one = problem()
    first, again, other = (solve(one, tol=1e-2, seed=seed).value for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_float32_is_corrected_by_float64_sweeps():
    kernel = matern(torch.float32)
    one = problem(kernel, dtype=torch.float32)
    solution = solve(one)
    matrix, rhs = dense(one)  # converts the kernel: last
    assert solution.value.dtype == torch.float64 and solution.report.dtype == "float32"
    assert solution.report.converged
    assert error(matrix, solution.value, torch.linalg.solve(matrix, rhs)) < 1e-6


def test_a_noise_for_every_point():
    noise = 0.3 + 3 * points(400, 1, seed=4).squeeze(1)
    one = problem(noise=noise)
    matrix, rhs = dense(one)
    assert error(matrix, solve(one).value, torch.linalg.solve(matrix, rhs)) < 1e-6
    same = problem(noise=torch.full((400,), 1.0, dtype=torch.float64))
    assert torch.equal(solve(same, tol=1e-2).value, solve(problem(), tol=1e-2).value)


@pytest.mark.parametrize("choices", [{"block_size": 1}, {"rank": 5}, {"rho": 1.0}])
def test_any_choice_gets_there(choices):
    one = problem(m=6, n=60)
    matrix, rhs = dense(one)
    solution = solve(one, tol=1e-5, max_epochs=3000, **choices)
    assert error(matrix, solution.value, torch.linalg.solve(matrix, rhs)) < 1e-4
    assert solution.report.rank == choices.get("rank", 6)
    if "block_size" in choices:
        assert f"batches of {choices['block_size']}" in solution.report.preconditioner
    assert all(solution.report.details[name] == value for name, value in choices.items() if name != "rank")
    if "rho" in choices:
        assert "damping 1.00e+00" in solution.report.preconditioner


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (2, 2), (5, 5), (60, 60)])
def test_few_points_and_all_points(n, m):
    one = problem(n=n, m=m)
    matrix, rhs = dense(one)
    assert one.m == m
    assert error(matrix, solve(one, tol=1e-8, max_epochs=5000).value, torch.linalg.solve(matrix, rhs)) < 1e-6


def test_one_row_and_many_inducing_points():
    one = problem(n=1, z=points(6, seed=3))
    matrix, rhs = dense(one)
    assert error(matrix, solve(one, tol=1e-6, max_epochs=20000).value, torch.linalg.solve(matrix, rhs)) < 1e-4


def test_duplicated_rows_and_inducing_points():
    x, z = points(40).repeat(10, 1), points(15).repeat(2, 1)
    one = problem(x=x, z=z)
    matrix, rhs = dense(one)
    solution = solve(one, tol=1e-8)
    assert solution.report.converged
    expected = torch.linalg.lstsq(matrix, rhs, driver="gelsd").solution
    assert error(matrix, solution.value, expected) < 1e-6


# ------------------------------------------------------------------------------------------------ ends, and reports


def test_out_of_epochs_is_a_warning_with_the_true_residual():
    one = problem()
    matrix, rhs = dense(one)
    with pytest.warns(ConvergenceWarning, match="ran out of epochs"), record_solves() as solves:
        solution = SketchySAGA(tol=1e-12, max_epochs=3).solve(one)
    assert solves == [solution.report] and not solution.report.converged
    true = float((matrix @ solution.value - rhs.squeeze(1)).norm() / rhs.norm())
    assert solution.report.max_residual == pytest.approx(true, rel=1e-6) and true < 0.5
    assert solution.report.iterations == 3 * 400 / 20
    assert 3 < solution.report.passes < 12


def test_passes_count_every_evaluation(monkeypatch):
    counted = [0]

    def evaluated(self, matrix, weights, original=TallMatrix._dense):
        counted[0] += matrix.shape.numel()
        return original(self, matrix, weights)

    def product(self, rhs, original=KernelMatrix.product):
        counted[0] += self.shape[0] * (self.shape[0] + 1) / 2
        return original(self, rhs)

    monkeypatch.setattr(TallMatrix, "_dense", evaluated)
    monkeypatch.setattr(KernelMatrix, "product", product)
    report = solve(problem(), tol=1e-4).report
    assert report.passes == pytest.approx(counted[0] / (400 * 40))


def test_the_best_iterate_is_returned(monkeypatch):
    """A solve that ends where the residual is larger than at its last sweep returns what it had there."""
    one = problem()
    start = sketchgp.QR().solve(one).value * (1 + 1e-6 * normal(40))
    monkeypatch.setattr(DampedNystrom, "apply_inverse", lambda self, v: -v)  # uphill
    monkeypatch.setattr("sketchgp.solvers.inducing.sketchysaga.smoothness", lambda *a, **b: 1.0)
    with pytest.warns(ConvergenceWarning, match="ran out of epochs"):
        solution = SketchySAGA(tol=1e-12, max_epochs=0.1).solve(one, initial=start)
    assert solution.report.iterations == 2 and torch.equal(solution.value, start)
    assert solution.report.max_residual < 1e-5


def test_divergence_is_cured_with_a_note(monkeypatch):
    too_long(monkeypatch)
    one = problem(n=100, m=10)
    matrix, rhs = dense(one)
    solution = solve(one, tol=1e-6)
    halved = [note for note in solution.report.notes if "halved" in note]
    assert solution.report.converged and len(halved) == solution.report.work["halvings"] > 0
    assert error(matrix, solution.value, torch.linalg.solve(matrix, rhs)) < 1e-3


def test_divergence_that_no_step_cures_is_an_error(monkeypatch):
    monkeypatch.setattr(DampedNystrom, "apply_inverse", lambda self, v: -v)  # uphill
    with pytest.raises(NumericalError, match=r"diverges.*Raise rho"):
        solve(problem())


def test_an_unreachable_tolerance_stagnates():
    with pytest.warns(ConvergenceWarning, match="stagnated"):
        report = solve(problem(n=60, m=6), tol=1e-40).report
    assert report.max_residual < 1e-12 and len(report.history) < 500


def test_nan_from_the_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(
        TallMatrix, "part", lambda self, rows: torch.full((len(rows), self.shape[1]), math.nan).double()
    )
    with pytest.raises(NumericalError, match="NaN"):
        solve(problem())


def test_nothing_m_by_m_or_n_by_m(monkeypatch, many_tiles):
    monkeypatch.setattr("sketchgp.operators.tall._CPU_ENTRIES", 2000)
    monkeypatch.setattr("sketchgp.preconditioners.row_nystrom._COLUMNS", 8000)
    monkeypatch.setattr("sketchgp.solvers.inducing.sketchysaga._LEAST_ROWS", 100)
    monkeypatch.setattr("sketchgp.solvers.inducing.sketchysaga._LEAST_SAMPLE", 50)
    one = problem(n=600, m=300)
    with Largest() as largest, pytest.warns(ConvergenceWarning):
        SketchySAGA(tol=1e-6, max_epochs=1, rank=10, block_size=10).solve(one)
    assert 3000 <= largest.entries <= 12_000  # m^2 = 90,000; n m = 180,000


# ------------------------------------------------------------------------------------------------------ checkpoints

ALWAYS = 1e-9  # seconds between two writes: one every step


def crashing(one, path, **choices):
    """Every epoch ends in a crash, and the solve is called again."""
    seen = set()

    def callback(step):
        if step.iteration not in seen:
            seen.add(step.iteration)
            raise Crash

    while True:
        try:
            solution = SketchySAGA(checkpoint=path, every=ALWAYS, **choices).solve(one, callback=callback)
            return solution, len(seen)
        except Crash:
            continue


def piecewise(one, path, max_epochs, **choices):
    """Every call has half an epoch more to go, or two."""
    for number in range(100):
        epochs = min(max_epochs, (number + 1) * (0.5 if number < 12 else 2))
        with quiet():
            solution = SketchySAGA(checkpoint=path, max_epochs=epochs, **choices).solve(one)
        if epochs == max_epochs or solution.report.reason == "reached the tolerance":
            return solution, number
    raise AssertionError


@pytest.mark.parametrize(
    ("variant", "way"),
    [("columns", crashing), ("float32", piecewise), ("diverging", piecewise), ("out of epochs", crashing)],
)
def test_the_same_bits_after_interruptions(way, variant, tmp_path, monkeypatch):
    columns, dtype = (3 if variant == "columns" else None), torch.float32 if variant == "float32" else torch.float64
    one = problem(matern(dtype), columns=columns, dtype=dtype, n=210)
    choices = {"tol": 1e-3, "max_epochs": 200}
    if variant == "diverging":
        too_long(monkeypatch)
        choices["max_epochs"] = 8
    if variant == "out of epochs":
        choices = {"tol": 1e-12, "max_epochs": 7}
    with quiet():
        whole = SketchySAGA(**choices).solve(one)
        solution, times = way(one, tmp_path / "solve", **choices)
    found, expected = solution.report, whole.report
    assert times >= 6 and any("resumed" in note for note in found.notes)
    assert torch.equal(solution.value, whole.value)
    assert torch.equal(found.history, expected.history)
    assert torch.equal(found.residual, expected.residual)
    assert torch.equal(found.deviations, expected.deviations)
    assert found.work == expected.work
    assert (found.reason, found.converged) == (expected.reason, expected.converged)
    own = [note for note in found.notes if "resumed" not in note]
    assert own == expected.notes and (variant == "diverging") == any("halved" in note for note in own)


def test_a_solve_that_was_over_goes_on_where_more_is_asked_for(tmp_path):
    one, path = problem(), tmp_path / "solve"
    first = SketchySAGA(tol=1e-2, deviations=10, checkpoint=path).solve(one)
    again = SketchySAGA(tol=1e-2, deviations=10, checkpoint=path).solve(one)
    assert torch.equal(again.value, first.value) and again.report.iterations == first.report.iterations
    assert again.report.converged and again.report.reason == "reached the tolerance"
    for choices in ({"tol": 1e-6, "deviations": 10}, {"tol": 1e-6, "deviations": 1e-3}):
        more = SketchySAGA(checkpoint=path, **choices).solve(one).report
        assert more.converged and more.max_residual <= choices["tol"] and more.max_deviations <= choices["deviations"]
        assert more.iterations > first.report.iterations
    assert more.history.shape[0] == more.iterations / 20 + 1  # and none is told of twice


@each(
    ("changed", "choices", "message"),
    [
        ({"kernel": laplace()}, {}, "the kernel changed"),
        ({"noise": 2.0}, {}, "the noise changed"),
        ({"x": points(400, seed=5)}, {}, "the training inputs and the inducing points and the targets"),
        ({"z": points(40, seed=5)}, {}, "another problem: the inducing points"),
        ({}, {"seed": 1}, "the solver's choices changed"),
        ({}, {"block_size": 30}, "the solver's choices changed"),
        ({}, {"rank": 7}, "the solver's choices changed"),
        ({}, {"rho": 3.0}, "the solver's choices changed"),
    ],
)
def test_a_checkpoint_of_another_problem_is_refused(changed, choices, message, tmp_path):
    path = tmp_path / "solve"
    solver = SketchySAGA(tol=1e-12, max_epochs=0.5, checkpoint=path)
    with pytest.warns(ConvergenceWarning, match="ran out of epochs"):
        solver.solve(problem())
    before = path.read_bytes()
    with pytest.raises(InputError) as found:
        dataclasses.replace(solver, **choices).solve(problem(**changed))
    assert message in str(found.value) and path.read_bytes() == before


# ----------------------------------------------------------------------------------------------- the preconditioner


def nystrom(one, rank, rows, sample):
    kzz = KernelMatrix.of(one.kernel, one.inducing_points, engine="tiled").detach()
    generator = torch.Generator().manual_seed(0)
    return damped_nystrom(one.tall(False), kzz, one.level, rank, rows, sample, generator)


def test_the_preconditioner_is_the_matrix_at_full_rank_and_rows():
    one = problem(n=100, m=15)
    matrix, _ = dense(one)
    p = nystrom(one, 15, 100, 100)
    p.damping = 0.3
    found = p.apply_inverse(torch.eye(15, dtype=torch.float64))
    assert relative(found, torch.linalg.inv(matrix + 0.3 * torch.eye(15, dtype=torch.float64))) < 1e-6


def test_few_rows_count_for_all():
    """Of one row a hundred times, any thirty are as good as all: P and the second sample are scaled to n rows."""
    one = problem(x=points(1).repeat(100, 1), z=points(6, seed=2))
    matrix, _ = dense(one)
    p = nystrom(one, 6, 30, 20)
    p.damping = 0.3
    found = p.apply_inverse(torch.eye(6, dtype=torch.float64))
    assert relative(found, torch.linalg.inv(matrix + 0.3 * torch.eye(6, dtype=torch.float64))) < 1e-6
    whole = nystrom(one, 6, 100, 100)
    assert p.batch_smoothness(2.0, 10) == pytest.approx(whole.batch_smoothness(2.0, 10), rel=1e-6)


@pytest.mark.parametrize("block_size", [1, 10, 100])
@pytest.mark.parametrize("noise", [1.0, "each"])
def test_batch_smoothness_is_that_of_its_formula(block_size, noise):
    noise = 0.3 + points(100, 1, seed=4).squeeze(1) if noise == "each" else noise
    one = problem(n=100, m=15, noise=noise)
    p = nystrom(one, 5, 40, 100)  # the second sample is then all rows
    p.damping = 2.0
    inverse = p.apply_inverse(torch.eye(15, dtype=torch.float64))
    tall = torch.cat([tile for _, tile in one.tall(True).tiles()])
    second = torch.zeros(15, 15, dtype=torch.float64)  # E[H P^-1 H] over batches without replacement, and H
    squares = ((tall @ inverse) * tall).sum(dim=1) * 100
    share = (100 - block_size) / 99 / block_size
    second = tall.mT @ (tall * (1 + share * squares).unsqueeze(1))
    expected = torch.linalg.eigvals(inverse @ second).real.max()
    assert p.batch_smoothness(2.0, block_size) == pytest.approx(float(expected), rel=1e-8)


def test_the_automatic_damping_is_the_least_that_suits():
    p = nystrom(problem(), 10, 100, 200)
    for target in (2.0, 5.0, 20.0):
        rho = p.choose_damping(10, target)
        assert p.batch_smoothness(rho, 10) <= target < p.batch_smoothness(rho / 1.2, 10)
    assert p.choose_damping(10, 1e30) == p.least_damping()


@pytest.mark.slow
def test_the_automatic_damping_is_near_the_best():
    one = problem(matern(nu=0.5), n=600, m=100, noise=0.1)

    def report(rho, epochs):
        return SketchySAGA(tol=1e-3, deviations=math.inf, max_epochs=epochs, rank=30, rho=rho).solve(one).report

    own = len(report(None, 60).history) - 1
    with pytest.warns(ConvergenceWarning):  # of a grid none gets there in less than half of the epochs
        assert not any(report(10.0**power, (own - 1) // 2).converged for power in range(-2, 4))


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tol": 0}, "tol expects a number between 0 and 1, got 0"),
        ({"tol": True}, "tol expects"),
        ({"max_epochs": 0}, "max_epochs expects a positive number, got 0"),
        ({"max_epochs": None}, "max_epochs expects a positive number, got None"),
        ({"max_seconds": -1}, "max_seconds expects a positive number"),
        ({"rho": 0.0}, "rho expects a positive number below infinity, or None, got 0.0"),
        ({"rho": math.inf}, "rho expects a positive number"),
        ({"rho": math.nan}, "rho expects a positive number"),
        ({"block_size": 0}, "block_size expects a positive integer"),
        ({"rank": 1.5}, "rank expects a positive integer"),
        ({"seed": 1.5}, "seed expects an integer"),
    ],
)
def test_choices_that_make_no_sense(choices, message):
    with pytest.raises(InputError) as found:
        SketchySAGA(**choices)
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("choices", "arguments", "message"),
    [
        ({"block_size": 401}, {}, "SketchySAGA(block_size=401) exceeds the 400 points; choose at most 400"),
        ({}, {"initial": torch.zeros(39)}, "initial expects the solution's shape (40,), got (39,)"),
        ({}, {"initial": torch.full((40,), math.nan)}, "initial holds NaN"),
        ({}, {"held_out": (torch.zeros(3, 2).double(), torch.zeros(3).double())}, "held_out points expects 3 features"),
        ({}, {"held_out": (torch.zeros(3, 3).double(), torch.zeros(4).double())}, "held_out targets expect (3,)"),
    ],
)
def test_arguments_that_do_not_fit(choices, arguments, message):
    with pytest.raises(InputError) as found:
        SketchySAGA(**choices).solve(problem(), **arguments)
    assert message in str(found.value)


def test_a_stream_and_noise_zero_are_refused():
    one = problem()
    stream = InducingPointProblem(one.kernel, [(one.x, one.y)], None, 1.0, one.inducing_points)
    with pytest.raises(InputError, match=r"SketchySAGA\(\) expects x and y as tensors"):
        SketchySAGA().solve(stream)
    with pytest.raises(InputError, match="noise above 0"):
        SketchySAGA().solve(InducingPointProblem(one.kernel, one.x, one.y, 0.0, one.inducing_points))


@pytest.mark.cuda
def test_on_a_device():
    one = problem()
    moved = InducingPointProblem(one.kernel.cuda(), one.x.cuda(), one.y.cuda(), 1.0, one.inducing_points.cuda())
    solution = solve(moved)
    assert solution.value.is_cuda
    assert relative(solution.value.cpu(), sketchgp.QR().solve(problem()).value) < 1e-4

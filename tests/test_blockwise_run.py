"""The loop of the solvers by blocks of rows: budgets, residuals, callbacks, held-out points, progress, Ctrl-C."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import os
import signal
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from cases import each
from problems import normal, points, radial, relative, set_scales
from sketchgp import (
    ASkotch,
    ConvergenceWarning,
    EigenPro2,
    FullProblem,
    InputError,
    Skotch,
    record_solves,
)
from sketchgp.operators import KernelMatrix
from sketchgp.solvers import System
from sketchgp.solvers.full import askotch, eigenpro2, refinement, skotch
from sketchgp.solvers.loop import run

N, BLOCK = 300, 50
SOLVERS = {
    "askotch": ASkotch(block_size=BLOCK),
    "askotch-nystrom": ASkotch(block_size=BLOCK, rank=15),
    "askotch-uniform": ASkotch(block_size=BLOCK, sampling="uniform", mu=0.1),
    "askotch-v1": ASkotch(block_size=BLOCK, version=1),
    "skotch": Skotch(block_size=BLOCK),
    "skotch-v1": Skotch(block_size=BLOCK, version=1),
    "eigenpro2": EigenPro2(block_size=BLOCK, subsample_size=80),
}
TOLERANCE = {"askotch-v1": 0.1, "skotch-v1": 0.1}  # fixed partitions are slow; 1e-2 for the others
METHODS = (askotch._Fresh, askotch._Fixed, skotch._Skotch, eigenpro2._EigenPro2)
every_solver = pytest.mark.parametrize("name", SOLVERS)


def _kernel(lengthscale=0.6):
    return set_scales(ScaleKernel(RBFKernel(ard_num_dims=3)), 1.3, lengthscale)


def _problem(columns=2, noise=0.3, dtype=torch.float64, n=N, lengthscale=0.6):
    x, width = points(n), columns or 1
    y = (x @ (3 * normal(3, width, seed=2))).sin() + 0.2 * normal(n, width, seed=1)
    y = y * torch.logspace(0, 1, width, dtype=torch.float64)  # residuals are relative to each column
    y = y[:, 0] if columns is None else y
    return FullProblem(_kernel(lengthscale).to(dtype), x.to(dtype), y.to(dtype), noise)


def _matrix(problem):
    """``K + noise`` in float64 from the formula, and from the float64 forms of the raw parameters."""
    return _covariance(problem, problem.x) + torch.diag(problem.noise_vector)


def _covariance(problem, x):
    matrix = radial(copy.deepcopy(problem.kernel).double(), x, problem.x)
    return matrix.detach()


def _residual(problem, value):
    """The true relative residual of each column, by a dense product."""
    y = problem.y.double().reshape(len(problem.y), -1)
    return (y - _matrix(problem) @ value.double().reshape(y.shape)).norm(dim=0) / y.norm(dim=0)


def _quietly(solver, problem, **options):
    """The solution of a solve that is meant to end early."""
    with pytest.warns(ConvergenceWarning):
        return solver.solve(problem, **options)


def _with(name, **choices):
    return dataclasses.replace(SOLVERS[name], **choices)


def _converging(name):
    return _with(name, tol=TOLERANCE.get(name, 1e-2))


@pytest.fixture
def after_step(monkeypatch):
    """``after_step(f)``: ``f(method, rows, g)`` is called after every step of any method; what it returns replaces
    the step's result, unless it is None."""

    def install(follow):
        for kind in METHODS:
            original = kind.step

            def step(self, r, generator, original=original):
                rows, g = original(self, r, generator)
                return follow(self, rows, g) or (rows, g)

            monkeypatch.setattr(kind, "step", step)

    return install


@pytest.fixture
def steps(after_step):
    """``(rows, squares of the residual)`` of every step."""
    found = []
    after_step(lambda method, rows, g: found.append((rows.clone(), g.square().sum(dim=0))))
    return found


def _ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


# --- ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [(n, (torch.float32, torch.float64)[i % 2]) for i, n in enumerate(SOLVERS)])
def test_the_tolerance(name, dtype):
    """Columns of different norms all meet it, and the residual reported is that of the value returned."""
    problem = _problem(columns=3, dtype=dtype)
    solver = _converging(name)
    solution = solver.solve(problem)
    report = solution.report
    assert (report.converged, report.reason, report.tol) == (True, "reached the tolerance", solver.tol)
    assert solution.value.dtype == dtype
    assert solution.value.shape == problem.y.shape
    torch.testing.assert_close(report.residual, _residual(problem, solution.value), rtol=1e-6, atol=1e-12)
    assert report.max_residual <= solver.tol
    assert report.history.shape[1] == 3
    assert torch.equal(report.history[0], torch.ones(3, dtype=torch.float64))


def _clock(monkeypatch, after_step):
    """A clock that every step moves on by a second."""
    now = SimpleNamespace(seconds=1000.0)

    def tick(method, rows, g):
        now.seconds += 1.0

    after_step(tick)
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_max_seconds(monkeypatch, after_step):
    _clock(monkeypatch, after_step)
    problem = _problem()
    solution = _quietly(ASkotch(block_size=BLOCK, tol=1e-12, max_seconds=7.5), problem)
    report = solution.report
    assert (report.converged, report.reason, report.iterations, report.seconds) == (False, "ran out of time", 8, 8.0)
    torch.testing.assert_close(report.residual, _residual(problem, solution.value), rtol=1e-9, atol=0)


def test_max_seconds_are_seconds():
    solver = Skotch(block_size=BLOCK, tol=1e-15, max_seconds=0.1, max_passes=1e9)
    report = _quietly(solver, _problem(noise=1e-5)).report  # takes many times as long to what rounding allows
    assert report.reason == "ran out of time"
    assert 0.1 <= report.seconds + report.setup_seconds < 60


def test_a_budget_that_was_enough():
    """Where the residual of all rows is at the tolerance when the budget ends, there is nothing to warn of."""
    problem = _problem()
    solution = ASkotch(block_size=BLOCK, tol=0.9, max_passes=0.9).solve(problem)
    assert float(_residual(problem, solution.value).max()) < 0.9
    assert solution.report.converged
    assert solution.report.passes < 2.1


def test_rounding_to_float32_is_an_end():
    problem = _problem(dtype=torch.float32, lengthscale=2.0, noise=0.01)
    solution = _quietly(ASkotch(block_size=BLOCK, tol=1e-7), problem)
    report = solution.report
    assert (report.converged, report.reason) == (False, "was rounded")
    residual = _residual(problem, solution.value)
    torch.testing.assert_close(report.residual, residual, rtol=1e-4, atol=0)
    assert float(residual.max()) > 1e-7
    # the iterate before it was rounded does meet it: float64 data (the same numbers) converge to a value close to it
    finer = FullProblem(problem.kernel.double(), problem.x.double(), problem.y.double(), 0.01)
    assert relative(solution.value, torch.linalg.solve(_matrix(finer), finer.y)) < 1e-6


def test_stagnation():
    """Where K in float32 is too far from K, corrections do not help, and the solve says so early."""
    problem = _problem(n=200, dtype=torch.float32, lengthscale=2.0, noise=3e-6)
    report = _quietly(ASkotch(block_size=BLOCK, tol=1e-6), problem).report
    assert not report.converged and report.reason in ("stagnated", "was rounded")
    assert report.passes < 100


def test_a_residual_that_rises_before_it_falls():
    """The first looks at rounding errors find it above that of the start: that is no stagnation."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(1500, 2, generator=generator), torch.randn(1500, generator=generator)
    problem = FullProblem(set_scales(RBFKernel(), 1.0, 0.2), x, y, 1e-5)
    report = _quietly(ASkotch(block_size=150, max_passes=60), problem).report
    assert report.reason == "ran out of passes"
    assert len([note for note in report.notes if "corrected" in note]) > 1
    assert report.max_residual < 0.3  # it was above 3 at first


def test_what_is_returned_is_no_worse_than_the_start():
    """Where float32 cannot solve at all: W = 0, or the start, column by column."""
    problem = _problem(n=200, dtype=torch.float32, lengthscale=2.0, noise=1e-7)
    problem.y.copy_(normal(200, 2, seed=3, dtype=torch.float32))
    solver = ASkotch(block_size=BLOCK, tol=1e-6, max_passes=40)
    for start in (None, torch.full_like(problem.y, 1e-4)):
        solution = _quietly(solver, problem, initial=start)
        residual = _residual(problem, solution.value)
        torch.testing.assert_close(solution.report.residual, residual, rtol=1e-3, atol=0)
        first = torch.ones(2) if start is None else _residual(problem, start)
        assert bool((residual <= first * 1.001).all())


def test_the_best_of_several_corrections_is_returned(monkeypatch):
    """Column by column, whatever the later ones were."""
    found, keep = [], refinement.Refinement.keep

    def kept(self, value, residual):
        found.append(residual)
        return keep(self, value, residual)

    monkeypatch.setattr(refinement.Refinement, "keep", kept)
    problem = _problem(n=200, dtype=torch.float32, lengthscale=2.0, noise=3e-6)
    solution = _quietly(ASkotch(block_size=BLOCK, tol=1e-6), problem)
    least = torch.stack(found).amin(dim=0)
    assert len(found) > 2
    assert bool((solution.report.residual <= least).all())
    torch.testing.assert_close(solution.report.residual, _residual(problem, solution.value), rtol=1e-3, atol=0)
    method = SimpleNamespace(best=torch.zeros(3, 2), best_true=torch.ones(2))
    assert keep(method, torch.full((3, 2), 5.0), torch.tensor([0.5, 2.0])) == 1
    assert keep(method, torch.full((3, 2), 7.0), torch.tensor([0.6, 0.9])) == 1
    assert method.best.tolist() == [[5.0, 7.0]] * 3
    torch.testing.assert_close(method.best_true, torch.tensor([0.5, 0.9]))


def test_the_plateau_of_float64():
    """A tolerance that rounding does not allow ends the solve long before its passes do."""
    report = _quietly(ASkotch(block_size=BLOCK, tol=1e-17, max_passes=1000), _problem(noise=0.01)).report
    assert report.reason == "stagnated"
    assert report.passes < 400
    assert report.max_residual < 1e-10
    assert "ASkotch gets no further in float64; use Cholesky()" in report.advice()


def test_no_block_exceeds_the_block_size(steps):
    for n in (149, 101, 51):
        steps.clear()
        _quietly(ASkotch(block_size=BLOCK, tol=1e-12, max_passes=4), _problem(n=n))
        assert max(len(rows) for rows, _ in steps) <= BLOCK
        assert min(len(rows) for rows, _ in steps) >= BLOCK // 2


@pytest.mark.parametrize("rank", [BLOCK, 2 * BLOCK])
def test_blocks_of_full_rank_are_exact(rank):
    report = _quietly(ASkotch(block_size=BLOCK, rank=rank, max_passes=2), _problem()).report
    assert (report.preconditioner, report.rank) == (f"blocks of {BLOCK}, exact", 0)


def test_ctrl_c_when_the_solve_has_just_ended(interruptible, monkeypatch):
    """In a model it must not be lost; alone, the solution is there."""
    problem = _problem()
    monkeypatch.setattr(run.Run, "save", lambda self: _ctrl_c() if self.reason else None)
    solver = ASkotch(block_size=BLOCK, tol=1e-3)
    assert solver.solve(problem).report.converged
    with pytest.raises(KeyboardInterrupt):
        solver.run(problem.system(), problem.y)


REASONS = {
    "ran out of passes": {"max_passes": 2},
    "ran out of time": {"max_seconds": 1e-9},
    "was stopped by the callback": {},
    "was interrupted": {},
}


def test_advice_for_the_limits_of_float32():
    base = _quietly(ASkotch(block_size=BLOCK, tol=1e-12, max_passes=2), _problem()).report
    stagnated = dataclasses.replace(base, reason="stagnated", dtype="float32").advice()
    assert "stagnated after" in stagnated and "float64" in stagnated and "initial=" not in stagnated
    rounded = dataclasses.replace(base, reason="was rounded", dtype="float32").advice()
    assert "was rounded after" in rounded and "float64" in rounded and "initial=" not in rounded


def test_a_tolerance_met_at_the_start():
    problem = _problem()
    exact = torch.linalg.solve(_matrix(problem), problem.y)
    solution = ASkotch(tol=1e-6).solve(problem, initial=exact)
    assert (solution.report.iterations, solution.report.converged) == (0, True)
    assert torch.equal(solution.value, exact)
    assert solution.report.passes == 1.0  # the product that checks the end; that of the start is not charged for


# --- residuals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "window"), [(n, (50_000, 120)[i % 2]) for i, n in enumerate(SOLVERS)])
def test_estimates_are_those_of_the_rows_that_were_seen(monkeypatch, steps, name, window):
    """One a window: a pass, or fewer rows; the root of n times the mean square residual of its rows."""
    monkeypatch.setattr(refinement, "_WINDOW", window)
    problem = _problem()
    report = _quietly(_with(name, tol=1e-12, max_passes=8), problem).report
    expected, rows, squares = [], 0, torch.zeros(2, dtype=torch.float64)
    for seen, square in steps:
        rows, squares = rows + len(seen), squares + square
        if rows >= min(N, window):
            expected.append((squares * N / rows).sqrt() / problem.y.norm(dim=0))
            rows, squares = 0, torch.zeros(2, dtype=torch.float64)
    assert len(expected) == len(report.history) - 1 >= (5 if window > N else 10)
    torch.testing.assert_close(report.history[1:], torch.stack(expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "dtype"), [(n, (torch.float32, torch.float64)[i % 2]) for i, n in enumerate(SOLVERS)])
def test_estimates_follow_the_true_residual(name, dtype):
    problem, ratios = _problem(noise=0.01, dtype=dtype), []
    matrix, norm = _matrix(problem), problem.y.double().norm(dim=0)

    def callback(progress):
        true = (problem.y.double() - matrix @ progress.weights()).norm(dim=0) / norm
        ratios.append(progress.residual / true)

    _quietly(_with(name, tol=1e-12, max_passes=20), problem, callback=callback)
    logs = torch.stack(ratios).log2()
    assert len(logs) >= 10
    assert abs(float(logs.mean())) < 1
    assert float(logs.abs().max()) < 2.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_residual_is_exact(dtype):
    problem = _problem(dtype=dtype)
    start = normal(N, 2, seed=5, dtype=dtype)
    report = _quietly(ASkotch(block_size=BLOCK, tol=1e-12, max_passes=3), problem, initial=start).report
    torch.testing.assert_close(report.history[0], _residual(problem, start), rtol=1e-6, atol=0)


@pytest.mark.parametrize("early", [True, False])
def test_a_sampled_residual(monkeypatch, early):
    """Of more than _ALL_ROWS points, after fewer than 5 passes, the residual is that of a sample of rows, and said to
    be: close to the true one, and the value is the same.  After 5 passes it is of all rows again."""
    monkeypatch.setattr(refinement, "_ALL_ROWS", 200)
    monkeypatch.setattr(refinement, "_SAMPLE", 150)
    solver, problem = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=2.5 if early else 5.5), _problem(columns=4)
    solution = _quietly(solver, problem)
    report, true = solution.report, _residual(problem, solution.value)
    assert not report.converged
    assert any("estimated from 150 random rows" in note for note in report.notes) == early
    if early:
        assert float((report.residual / true).log().abs().max()) < 0.25  # 1 / sqrt(2 * 150) = 0.06 is usual
        assert not torch.allclose(report.residual, true, rtol=1e-6)
        assert report.work["products"] == 0
    else:
        torch.testing.assert_close(report.residual, true, rtol=1e-9, atol=0)
    monkeypatch.undo()
    everything = _quietly(solver, problem)
    assert torch.equal(everything.value, solution.value)
    torch.testing.assert_close(everything.report.residual, true, rtol=1e-9, atol=0)
    assert everything.report.notes == []


def test_a_sample_of_float32_is_in_float64(monkeypatch):
    """The rows of the sample are evaluated in float64, at the rounded value that is returned."""
    monkeypatch.setattr(refinement, "_ALL_ROWS", 200)
    monkeypatch.setattr(refinement, "_SAMPLE", N - 1)  # nearly all rows: then it is nearly the true residual
    problem = _problem(dtype=torch.float32)
    solution = _quietly(ASkotch(block_size=BLOCK, tol=1e-12, max_passes=4), problem)
    assert solution.report.notes == [f"residual estimated from {N - 1} random rows, in float64"]
    assert solution.report.residual_rows == N - 1
    torch.testing.assert_close(solution.report.residual, _residual(problem, solution.value), rtol=0.05, atol=0)


def test_a_sample_never_converges(monkeypatch):
    """However low the residual of the sample: only all rows can tell that the tolerance was met."""
    monkeypatch.setattr(refinement, "_ALL_ROWS", 200)
    monkeypatch.setattr(refinement, "_SAMPLE", 150)
    report = _quietly(ASkotch(block_size=BLOCK, tol=0.9, max_passes=0.9), _problem()).report
    assert report.max_residual < 0.9
    assert not report.converged


def test_many_points_converge_by_all_rows(monkeypatch):
    monkeypatch.setattr(refinement, "_ALL_ROWS", 200)
    monkeypatch.setattr(refinement, "_SAMPLE", 20)
    problem = _problem()
    solution = ASkotch(block_size=BLOCK, tol=0.3).solve(problem)
    assert solution.report.converged
    assert solution.report.passes < 5
    assert solution.report.notes == []
    torch.testing.assert_close(solution.report.residual, _residual(problem, solution.value), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype"), [("askotch", torch.float32), ("skotch", torch.float64), ("eigenpro2", torch.float64)]
)
def test_an_optimistic_estimate_is_not_believed(after_step, name, dtype):
    """Estimates of a fifth of the residual: the true one is looked at too early, and then aimed at."""
    after_step(lambda method, rows, g: (rows, 0.2 * g))
    problem = _problem(dtype=torch.float64)
    solution = _with(name, tol=1e-3).solve(problem)
    report = solution.report
    assert report.converged
    assert float(_residual(problem, solution.value).max()) <= 1e-3
    early = int((report.history.max(dim=1).values <= 1e-3).nonzero()[0])
    assert early < len(report.history) - 1
    assert 2 <= report.work["products"] <= 4
    if name != "eigenpro2":
        steps = report.iterations * (BLOCK / N + (BLOCK / N) ** 2)
        assert report.passes == pytest.approx(steps + report.work["products"])


# --- work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["askotch", "askotch-nystrom", "askotch-uniform", "skotch", "eigenpro2"])
def test_passes_count_entries(monkeypatch, steps, name):
    """Rows and blocks of every step, the set-up, and the products that verify; not that of a start."""
    problem = _problem()
    solver = _with(name, tol=1e-2)
    for start in (None, torch.ones_like(problem.y)):
        steps.clear()
        report = solver.solve(problem, initial=start).report
        sizes = [len(rows) for rows, _ in steps]
        assert report.iterations == len(sizes)
        if name == "eigenpro2":
            entries = 80**2 + 80 * 80 + sum(size * (N + 80) for size in sizes)  # the subsample, and other points
        else:
            entries = sum(size * N + size**2 for size in sizes)
        assert report.work["products"] >= (2 if start is not None else 1)
        entries += (report.work["products"] - (start is not None)) * N**2
        assert report.passes == pytest.approx(entries / N**2, rel=1e-12)


@pytest.mark.parametrize("name", ["askotch-v1", "skotch-v1"])
def test_passes_of_a_fixed_partition(steps, name):
    report = _quietly(_with(name, tol=1e-12, max_passes=4), _problem()).report
    assert all(len(rows) == BLOCK for rows, _ in steps)
    entries = N * BLOCK + report.iterations * (N * BLOCK + BLOCK**2) + N**2
    assert report.passes == pytest.approx(entries / N**2, rel=1e-12)


@pytest.mark.parametrize("checked", [256, 20])
def test_passes_of_float32(monkeypatch, steps, checked):
    """Once a pass some rows of a block in float64 too, and a product for every correction."""
    looks = []
    monkeypatch.setattr(refinement, "_CHECKED", checked)
    residual = System.residual

    def looked(self, rows, v, r, accurate=False):
        looks.extend([len(rows)] * accurate)
        return residual(self, rows, v, r, accurate)

    monkeypatch.setattr(System, "residual", looked)
    report = ASkotch(block_size=BLOCK, tol=3e-5).solve(_problem(dtype=torch.float32, noise=0.01)).report
    assert len(report.notes) >= 1
    assert all("float32 products corrected" in note for note in report.notes)
    assert report.work["products"] == len(report.notes) + 1
    assert report.work["corrections"] == len(report.notes)
    assert looks == [min(checked, BLOCK)] * (report.iterations // (N // BLOCK + 1))
    entries = report.iterations * (N * BLOCK + BLOCK**2) + sum(looks) * N + report.work["products"] * N**2
    assert report.passes == pytest.approx(entries / N**2, rel=1e-12)


def test_corrections_reach_what_float32_products_cannot():
    """With float32 products alone the residual would stay near 1e-4."""
    problem = _problem(dtype=torch.float32, noise=0.01)
    solution = ASkotch(block_size=BLOCK, tol=3e-5).solve(problem)
    assert solution.report.converged
    assert float(_residual(problem, solution.value).max()) <= 3.0001e-5
    corrected = [float(note.split()[-1]) for note in solution.report.notes]
    assert corrected == sorted(corrected, reverse=True)
    assert corrected[0] > 2e-5


# --- divergence -----------------------------------------------------------------------------------------------


# --- callbacks ------------------------------------------------------------------------------------------------


def test_a_callback_every_window(monkeypatch):
    """With more points than _WINDOW, that many rows pass between two calls."""
    monkeypatch.setattr(refinement, "_WINDOW", 2 * BLOCK)
    iterations = []
    _quietly(
        ASkotch(block_size=BLOCK, tol=1e-12, max_passes=3),
        _problem(),
        callback=lambda progress: iterations.append(progress.iteration),
    )
    assert iterations == list(range(2, iterations[-1] + 1, 2))
    assert len(iterations) > 5


@pytest.mark.parametrize(
    ("name", "dtype", "columns"),
    [
        ("askotch", torch.float32, 2),
        ("askotch", torch.float64, None),
        ("askotch-v1", torch.float64, 2),
        ("skotch", torch.float32, None),
        ("eigenpro2", torch.float64, 2),
    ],
)
def test_weights_are_the_solution_of_that_time(name, dtype, columns):
    """Those of the k-th call are what is returned by a solve that ends there; they are the caller's own."""
    problem, weights = _problem(dtype=dtype, columns=columns, noise=0.01), []

    def callback(progress):
        found = progress.weights()
        assert found.dtype == torch.float64
        assert found.shape == (N, columns or 1)
        weights.append(found.clone())
        found.fill_(float("nan"))

    solver = _with(name, tol=1e-12, max_passes=30 if dtype == torch.float32 else 12)
    notes = _quietly(solver, problem, callback=callback).report.notes
    if name == "askotch":  # across corrections of float32 products too
        assert bool(notes) == (dtype == torch.float32)
    for k in (0, 4, len(weights) - 1):
        calls = iter(range(k + 1))
        stopped = _quietly(solver, problem, callback=lambda progress, calls=calls, k=k: next(calls) == k)
        assert torch.equal(stopped.value.reshape(N, -1), weights[k].to(dtype))


# --- held-out points ------------------------------------------------------------------------------------------


def test_held_out_errors_take_a_tenth_of_the_work(steps):
    """With half as many held-out points as points, an error is computed every fifth pass or so; between, it stays."""
    problem, seen = _problem(noise=0.01), []
    held_out = points(N // 2, seed=8), normal(N // 2, 2, seed=9)
    solver = Skotch(block_size=BLOCK, tol=1e-12, max_passes=40)
    report = _quietly(solver, problem, callback=lambda p: seen.append((p.passes, p.held_out)), held_out=held_out).report
    cost, spent, expected = 0.5, 0.0, []
    for passes, error in seen:
        if not expected or spent <= 0.1 * passes:
            expected.append(passes)
            spent += cost
        assert torch.equal(error, report.held_out[len(expected) - 1][2])
    assert [passes for passes, _, _ in report.held_out] == [*expected, report.passes]
    assert 5 <= len(expected) <= 9
    assert len(seen) > 30


@each(
    ("x", "y", "message"),
    [
        (points(5, 2), normal(5, 2), "held_out points expects 3 features"),
        (points(5).float(), normal(5, 2), "held_out points expects 3 features"),
        (points(5), normal(4, 2), "held_out targets expect"),
        (points(5), normal(5), "held_out targets expect"),
        (points(5)[0], normal(5, 2), "held_out points expects shape"),
        (points(5), normal(5, 2) / 0, "held_out targets holds NaN"),
    ],
    ids=["features", "dtype", "rows", "columns", "shape", "infinite"],
)
def test_held_out_points_that_do_not_fit(x, y, message):
    with pytest.raises(InputError, match=message):
        ASkotch().solve(_problem(), held_out=(x, y))


# --- progress -------------------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _shown(monkeypatch, stream, **options):
    """What a solve of 20 passes writes to stderr, with no least time between two drawings of the bar."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(run, "tqdm", functools.partial(run.tqdm, mininterval=0.0))
    _quietly(Skotch(block_size=BLOCK, tol=1e-12, max_passes=20), _problem(), **options)
    return stream.getvalue()


def test_no_progress_bar_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(run, "_DELAY", 0.0)
    assert _shown(monkeypatch, io.StringIO()) == ""
    assert _shown(monkeypatch, _Terminal(), progress=False) == ""


@pytest.mark.parametrize("asked", [True, False])
def test_a_progress_bar(monkeypatch, asked):
    monkeypatch.setattr(run, "_DELAY", 0.0)
    held_out = points(5, seed=8), normal(5, 2, seed=9)
    if asked:
        text = _shown(monkeypatch, io.StringIO(), progress=True, held_out=held_out)
    else:
        text = _shown(monkeypatch, _Terminal(), held_out=held_out)
    assert "Skotch, n = 300" in text
    assert "/20" in text
    assert "residual about " in text
    assert "held-out RMSE " in text


def test_a_short_solve_shows_no_progress_bar(monkeypatch):
    assert run._DELAY == 2.0
    monkeypatch.setattr(run, "_DELAY", 60.0)  # as if on a machine that is not busy
    assert _shown(monkeypatch, _Terminal()) == ""


# --- reports and batches --------------------------------------------------------------------------------------


def _batch(dtype=torch.float64):
    """Two kernels, three noises: the operator has batch shape (2,), the noise (3, 2), the right-hand side (3, 1)."""
    lengthscales, noise = (0.5, 0.9), torch.tensor([[0.1, 0.2], [0.3, 0.5], [1.0, 2.0]]).double()
    kernel = ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])).double()
    kernel.base_kernel.lengthscale = torch.tensor(lengthscales).double().reshape(2, 1, 1)
    kernel.outputscale = torch.tensor([1.3, 0.7]).double()
    n = 120
    x = points(n)
    operator = KernelMatrix.of(kernel, x.expand(2, n, 3))
    rhs = normal(3, 1, n, 2, seed=3)
    return operator, noise.unsqueeze(-1).expand(3, 2, n), rhs.expand(3, 2, n, 2), lengthscales, x


@pytest.mark.parametrize("solver", [EigenPro2(block_size=40, tol=1e-3)])
def test_each_of_a_batch_is_solved_as_if_alone(solver):
    operator, noise, rhs, lengthscales, x = _batch()
    with record_solves() as solves:
        value, report = solver.run(System(operator, noise), rhs[:, :1])
    assert value.shape == rhs.shape
    assert solves == [report] and report.converged
    steps = 0
    for i in range(3):
        for j in range(2):
            kernel = ScaleKernel(RBFKernel()).double()
            kernel.base_kernel.lengthscale, kernel.outputscale = lengthscales[j], (1.3, 0.7)[j]
            problem = FullProblem(kernel, x, rhs[i, j], noise[i, j])
            alone = solver.solve(problem)
            assert relative(value[i, j], alone.value) < 1e-9
            steps += alone.report.iterations
            true = _residual(problem, value[i, j])
            assert float(true.max()) <= solver.tol
            columns = slice(2 * (2 * i + j), 2 * (2 * i + j) + 2)
            torch.testing.assert_close(report.residual[columns], true, rtol=1e-6, atol=1e-12)
    assert report.iterations == steps and report.columns == 12


def test_a_batch_warns_once():
    operator, noise, rhs, _, _ = _batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, report = ASkotch(block_size=40, tol=1e-4, max_passes=14).run(System(operator, noise), rhs)
    failed = report.residual > 1e-4
    assert bool(failed.any()) and not bool(failed.all())
    assert not report.converged and report.reason == "ran out of passes"
    assert [str(warning.message) for warning in caught] == [report.advice()]


def test_no_checkpoint_of_a_batch(tmp_path):
    operator, noise, rhs, _, _ = _batch()
    with pytest.raises(InputError, match="single system"):
        ASkotch(checkpoint=tmp_path / "c.pt").run(System(operator, noise), rhs)
    assert list(tmp_path.iterdir()) == []


# --- Ctrl-C ---------------------------------------------------------------------------------------------------

LONG = Skotch(block_size=BLOCK, tol=1e-30, max_passes=1e9, max_seconds=60)


def _interrupted(solver, problem, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            solution = solver.solve(problem, **options)
        except KeyboardInterrupt:  # which would end all tests
            pytest.fail("the interrupt was not kept until the step had ended")
    report = solution.report
    assert [(warning.category, str(warning.message)) for warning in caught] == [(ConvergenceWarning, report.advice())]
    assert (report.converged, report.reason) == (False, "was interrupted")
    assert report.seconds < 30
    torch.testing.assert_close(report.residual, _residual(problem, solution.value), rtol=1e-3, atol=1e-12)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return solution


def test_ctrl_c_where_the_iterate_is_not_kept(interruptible, after_step):
    """As within a model: nothing half done is returned, and nothing is recorded."""
    after_step(lambda method, rows, g: _ctrl_c())
    problem = _problem()
    with record_solves() as solves, pytest.raises(KeyboardInterrupt):
        LONG.run(problem.system(), problem.y)
    assert solves == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_raises(interruptible, monkeypatch):
    """At once, in the middle of a step."""
    calls = []
    original = System.rows

    def rows(self, *args):
        calls.append(0)
        if len(calls) == 8:
            _ctrl_c()
            _ctrl_c()
        return original(self, *args)

    monkeypatch.setattr(System, "rows", rows)
    with pytest.raises(KeyboardInterrupt):
        LONG.solve(_problem())
    assert len(calls) == 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_while_the_residual_is_computed(interruptible, monkeypatch, after_step):
    after_step(lambda method, rows, g: _ctrl_c())
    monkeypatch.setattr(System, "accurate_product", lambda self, v: _ctrl_c())
    problem = _problem()
    solution = _quietly(LONG, problem)
    assert (solution.report.converged, solution.report.reason) == (False, "was interrupted")
    assert any("what the last steps estimated" in note for note in solution.report.notes)
    assert solution.report.residual_rows == 0
    assert float(solution.value.norm()) > 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_ctrl_c_a_sample_is_enough(interruptible, monkeypatch, after_step):
    """Somebody waits: however many passes were done, no product with all rows follows."""
    monkeypatch.setattr(refinement, "_SAMPLE", 150)
    after_step(lambda method, rows, g: _ctrl_c() if len(done) == 60 else done.append(1))
    done = []
    report = _quietly(LONG, _problem()).report
    assert report.passes > refinement._WORTH_ALL_ROWS
    assert "residual estimated from 150 random rows, in float64" in report.notes and report.residual_rows == 150


def test_ctrl_c_while_the_end_is_verified(interruptible, monkeypatch):
    """What has been reached is not called interrupted."""
    verify = refinement.Refinement._verify

    def verified(self):
        verify(self)
        _ctrl_c()

    monkeypatch.setattr(refinement.Refinement, "_verify", verified)
    report = ASkotch(block_size=BLOCK, tol=1e-3).solve(_problem()).report
    assert (report.converged, report.reason) == (True, "reached the tolerance")


def test_ctrl_c_before_the_first_step(interruptible, monkeypatch):
    """There is no iterate yet that would be worth returning."""
    monkeypatch.setattr(eigenpro2, "top_eigensystem", lambda *args, **options: _ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        EigenPro2().solve(_problem())


def test_signals_are_handled_only_during_the_loop(interruptible):
    during = []
    _quietly(
        ASkotch(block_size=BLOCK, tol=1e-12, max_passes=5),
        _problem(),
        callback=lambda progress: during.append(signal.getsignal(signal.SIGINT)),
    )
    assert len(during) > 1
    assert signal.default_int_handler not in during
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_is_left_in_place(interruptible, after_step):
    caught = []

    def mine(number, frame):
        caught.append(number)

    signal.signal(signal.SIGINT, mine)
    after_step(lambda method, rows, g: _ctrl_c())
    problem = _problem()
    solution = ASkotch(block_size=BLOCK, tol=1e-2).solve(problem)
    assert solution.report.converged
    assert caught == [signal.SIGINT] * solution.report.iterations
    assert signal.getsignal(signal.SIGINT) is mine


def test_in_another_thread(interruptible):
    """Handlers of signals cannot be set there; the solve is the same."""
    problem, solver, found = _problem(), ASkotch(block_size=BLOCK, tol=1e-3), []

    def work():
        try:
            found.append(solver.solve(problem))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert torch.equal(found[0].value, solver.solve(problem).value)
    assert found[0].report.converged

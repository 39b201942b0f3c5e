"""EigenPro 3 and 4 for the inducing-point problem, against dense float64 algebra and the papers' fixed points."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch.utils.data import DataLoader, TensorDataset

from cases import each
from problems import Largest, normal, points, relative
from sketchgp import QR, InducingPointProblem, choose_inducing_points
from sketchgp.errors import ConvergenceWarning, InputError, NumericalError
from sketchgp.kernels import LaplaceKernel
from sketchgp.operators import tall
from sketchgp.report import Reason, record_solves
from sketchgp.settings import memory_budget
from sketchgp.solvers.full.eigenpro2 import step_size
from sketchgp.solvers.inducing import eigenpro, epochs, projection
from sketchgp.solvers.inducing.eigenpro import EigenPro3, EigenPro4
from sketchgp.solvers.inducing.preconditioned_gradient import Model, find_directions
from sketchgp.solvers.inducing.projection import ExactProjection, InexactProjection
from sketchgp.solvers.loop import HeldOut

KERNELS = {
    "rbf": (lambda: RBFKernel(), 0.6),
    "matern": (lambda: MaternKernel(nu=1.5), 1.0),
    "laplace": (lambda: LaplaceKernel(), 1.5),
}
PLAIN = {"averaging": False, "cooldown": 0.0, "projection": "exact"}


def _kernel(name="matern", scale=1.0, dtype=torch.float64):
    make, lengthscale = KERNELS[name]
    kernel = make().to(dtype)
    kernel.lengthscale = lengthscale * scale
    kernel = ScaleKernel(kernel).to(dtype)
    kernel.outputscale = 1.3
    return kernel.requires_grad_(False)


def _dense(kernel, a, b):
    return kernel.double()(a.double(), b.double()).to_dense()


def _data(n, columns=None, seed=0, dtype=torch.float64, wobble=0.0):
    """Points and smooth targets of different columns."""
    x = points(n, 3, seed=seed)
    base = torch.sin(4 * x[:, 0]) + torch.cos(5 * x[:, 1] * x[:, 2])
    y = base if columns is None else torch.stack([base * (j + 1) + x[:, j % 3] for j in range(columns)], dim=1)
    y = y + wobble * normal(*y.shape, seed=seed + 1)
    return x.to(dtype), y.to(dtype)


def _problem(n=400, m=40, name="matern", noise=0.0, columns=None, seed=0, dtype=torch.float64, scale=1.0, wobble=0.0):
    x, y = _data(n, columns, seed, dtype, wobble)
    return InducingPointProblem(_kernel(name, scale, dtype), x, y, noise, x[:m].clone())


def _fit(problem, weights, x):
    return _dense(problem.kernel, x, problem.inducing_points) @ weights


# --- a step, a projection, the step rule ----------------------------------------------------------------------


@each("kind", ["projected", "among", "paper"])
@each("name", KERNELS)
@each(("columns", "dtype", "tol"), [(None, torch.float64, 1e-9), (3, torch.float32, 1e-4)])
def test_steps_are_those_of_dense_algebra(kind, name, columns, dtype, tol, monkeypatch):
    """Values of f at all points follow ``f -= step P K(., B) g + decay P f``, then its projection."""
    monkeypatch.setattr(tall, "_CPU_ENTRIES", 100)
    problem = _problem(60, 15, name, columns=columns, dtype=dtype, scale=0.5)
    x, z = problem.x, problem.inducing_points
    y = problem.y.reshape(60, -1).double()
    projection = ExactProjection(problem, y.shape[1])
    rows = torch.randperm(15, generator=torch.Generator().manual_seed(2))[:12] if kind == "among" else None
    subsample = x[:30] if rows is None else z[rows]
    directions = find_directions(problem, projection, subsample, x[30:], 4, 10, kind != "paper", rows)
    base = normal(15, y.shape[1], seed=3)
    model = Model(problem, directions, projection, base)
    everywhere = torch.cat([z, x])
    kernel = _dense(problem.kernel, everywhere, everywhere)
    at_z, at_x = torch.arange(15), torch.arange(15, 75)

    kss = _dense(problem.kernel, subsample, subsample)
    values, vectors = torch.linalg.eigh(kss)
    values, vectors = values.flip(0), vectors.flip(1)
    factor = vectors[:, :4] * (1 / values[:4] - values[4] / values[:4] ** 2).sqrt()
    at_s = torch.arange(15, 45) if rows is None else rows
    kzz = kernel[:15, :15]
    if kind == "projected":
        factor, at_c = torch.linalg.solve(kzz, kernel[:15, 15:45] @ factor), at_z
    else:
        at_c = at_s
    preconditioner = torch.eye(75, dtype=torch.float64)
    preconditioner[:, at_c] -= kernel[:, at_c] @ factor @ factor.mT
    judged = torch.cat([at_s, torch.arange(45, 75)])
    diagonal = (kernel - kernel[:, at_c] @ factor @ factor.mT @ kernel[at_c]).diagonal()[judged]
    block = (kernel - kernel[:, at_c] @ factor @ factor.mT @ kernel[at_c])[45:, 45:]
    assert directions.beta == pytest.approx(float(diagonal.max()), rel=tol)
    assert directions.lam == pytest.approx(float(torch.linalg.eigvalsh(block)[-1]) / 30, rel=10 * tol)

    f = kernel[:, :15] @ base
    for number, (step, decay) in enumerate([(1.0, 0.1), (0.5, 0.0), (0.8, 0.2), (0.7, 0.3)]):
        rows = torch.arange(10) + 9 * number
        g = model.step(x[rows], y[rows], step, decay, last=number in (2, 3))
        expected = f[at_x[rows]] - y[rows]
        assert relative(g, expected) < tol
        f = f - preconditioner @ (step * kernel[:, at_x[rows]] @ expected + decay * f)
        if number in (2, 3):
            model.project()
            f = kernel[:, :15] @ torch.linalg.solve(kzz, f[:15])
            assert relative(kernel[:, :15] @ model.base, f) < tol
            assert not model.points
        else:
            assert len(model.points) == 1  # parts of one size become one


def test_the_step_of_small_and_large_batches():
    assert step_size(0.5, 0.01, 49) == 2
    assert step_size(0.5, 0.01, 50) == pytest.approx(2.0)
    assert step_size(0.5, 0.01, 150) == pytest.approx(1.0)


@pytest.mark.parametrize("name", KERNELS)
def test_projections_agree(name, monkeypatch):
    monkeypatch.setattr(projection, "_RANK", 20)
    problem = _problem(100, 100, name)
    h = normal(100, 3, seed=5)
    h = _dense(problem.kernel, problem.inducing_points, problem.inducing_points) @ h
    h[:, 1] = 0
    exact, product = ExactProjection(problem, 3).solve(h)
    assert torch.equal(product, h)
    inexact = InexactProjection(problem, 0)
    theta, product = inexact.solve(h, tol=1e-6)
    kzz = _dense(problem.kernel, problem.inducing_points, problem.inducing_points)
    assert relative(kzz @ exact, h) < 1e-8
    assert relative(kzz @ theta, h) < 1e-5
    assert relative(kzz @ theta, product) < 1e-8  # what it says that it solved
    assert not theta[:, 1].any()
    assert inexact.iterations <= 150 and not inexact.worst
    assert torch.isfinite(inexact.solve(torch.zeros_like(h))[0]).all()
    inexact.shift = 0.5
    shifted = kzz + 0.5 * torch.eye(100, dtype=torch.float64)
    assert relative(shifted @ inexact.solve(h, tol=1e-6)[0], h) < 1e-5


def test_an_inexact_projection_takes_its_directions_from_the_inducing_points():
    problem = _problem(400, 40)
    report = EigenPro4(projection="inexact", epochs=2, rank=20).solve(problem).report
    assert report.preconditioner == "20 of 40 directions"
    few = InducingPointProblem(problem.kernel, problem.x[:20], problem.y[:20], 0.0, problem.inducing_points)
    assert EigenPro4(projection="inexact", subsample_size=20).solve(few).report.rank <= 20
    as_many, more = (EigenPro4(projection="inexact", rank=rank, epochs=1).solve(problem) for rank in (40, 50))
    assert torch.equal(as_many.value, more.value)
    assert "rank 50 was asked for; 40 inducing points have 40" in more.report.notes
    assert not any("asked for" in note for note in as_many.report.notes)


def test_an_inexact_projection_that_does_not_converge_is_an_error(monkeypatch):
    problem = _problem(300, 100, "laplace", scale=0.3)
    monkeypatch.setattr(projection, "_ITERATIONS", 1)
    monkeypatch.setattr(projection, "_RANK", 1)
    with pytest.raises(NumericalError, match=r"projection does not converge.*float64 data"):
        EigenPro4(projection="inexact").solve(problem)


def test_a_projection_that_falls_short_is_told_of(monkeypatch):
    problem = _problem(300, 100, "laplace", scale=0.3)
    monkeypatch.setattr(projection, "_ITERATIONS", 3)
    monkeypatch.setattr(projection, "_RANK", 10)
    report = EigenPro4(projection="inexact", epochs=2).solve(problem).report
    assert 1e-2 < report.details["projection_residual"] <= 0.5
    assert "projections ended above their tolerance" in report.notes
    assert "projection_residual" not in EigenPro4(epochs=1).solve(problem).report.details


@pytest.mark.parametrize("case", ["exact", "inexact", "equal rows", "stream"])
def test_the_step_is_computed_on_points_that_are_no_inducing_points(case, monkeypatch):
    """Not on those that the same seed drew, nor on rows that equal them: the step would be too large, and diverge."""
    seen = []

    def find(*args):
        seen.append(args[3])
        return find_directions(*args)

    monkeypatch.setattr(eigenpro, "find_directions", find)
    (x, y), kernel = _data(300), _kernel("laplace")
    z = choose_inducing_points(kernel, x, 100).points
    if case == "equal rows":
        x, y = torch.cat([z, -0.0 * z + z, x]), torch.cat([y[:200], y])
    problem = InducingPointProblem(kernel, x, y, 0.0, z)
    if case == "stream":
        batches = [(x[:40], y[:40]), (z, y[:100]), (x[40:], y[40:])]
        problem = InducingPointProblem(kernel, batches, None, 0.0, z)
    projection = "exact" if case == "exact" else "inexact"
    EigenPro4(projection=projection, epochs=2, subsample_size=50).solve(problem)
    fresh = seen[0]
    assert len(fresh) > 90
    assert not (fresh.unsqueeze(1) == z).all(dim=-1).any()


def test_the_automatic_projection_follows_the_memory_budget():
    problem = _problem(100, 50)
    assert EigenPro3(epochs=1).solve(problem).report.details["projection"] == "exact"
    with memory_budget(8 * 50**2 - 1):
        assert EigenPro3(epochs=1).solve(problem).report.details["projection"] == "inexact"


def test_the_delay(monkeypatch):
    assert EigenPro4.delay_for(20_000, 1000, 1.0) == 28  # (m / batch) sqrt(2 T_ep2)
    assert EigenPro4.delay_for(20_000, 1000, 4.0) == 57
    assert EigenPro4.delay_for(100, 1000, 1.0) == 1  # clipped
    problem = _problem(400, 40)
    for delay, projections in ((1, 40), (3, 14), (100, 2)):  # twenty batches an epoch
        report = EigenPro4(delay=delay, epochs=2, block_size=20).solve(problem).report
        assert report.iterations == 40
        assert report.work["projections"] == projections
    harder = _problem(400, 40, "laplace", scale=0.2)
    monkeypatch.setattr(projection, "_RANK", 1)
    report = EigenPro4(projection="inexact", block_size=20, epochs=1).solve(harder).report
    often = 20 // EigenPro4.delay_for(40, 20, 4.0) + 1  # ten products or so: projected rarely
    assert report.work["projections"] <= often
    assert report.work["projection_iterations"] > 4 * report.work["projections"]
    assert EigenPro3(epochs=2, block_size=20).solve(problem).report.work["projections"] == 40


# --- fixed points ---------------------------------------------------------------------------------------------


def test_the_delay_follows_the_cost_of_projections():
    asked = []

    class Watched(EigenPro4):
        @staticmethod
        def delay_for(m, batch, cost):
            asked.append(cost)
            return EigenPro4.delay_for(m, batch, cost)

    report = Watched(projection="inexact", epochs=3).solve(_problem(400, 40)).report
    assert len(asked) == report.work["projections"] + 1
    assert asked[0] == 10 != asked[-1]  # a guess, then what was counted


def test_held_out_errors_have_float64_entries():
    problem = _problem(100, 40, "rbf", dtype=torch.float32)
    weights = 1e6 * normal(40, 1)
    found = HeldOut(problem.predicting(problem.x), problem.x, problem.y)(weights)
    wanted = (_fit(problem, weights, problem.x).squeeze(1) - problem.y.double()).square().mean().sqrt()
    assert float(found) == pytest.approx(float(wanted), rel=1e-9)


def _lemma_6(problem, rank):
    """``(Kzx (I - Q) Kxz)^-1 Kzx (I - Q) y``, ``Q = E (I - l_{q+1} L^-1) E^T``."""
    kernel = _dense(problem.kernel, problem.x, problem.x)
    kxz = _dense(problem.kernel, problem.x, problem.inducing_points)
    values, vectors = torch.linalg.eigh(kernel)
    values, vectors = values.flip(0), vectors.flip(1)
    q = vectors[:, :rank] * (1 - values[rank] / values[:rank]) @ vectors[:, :rank].mT
    weighted = kxz.mT @ (torch.eye(len(kernel), dtype=torch.float64) - q)
    return torch.linalg.solve(weighted @ kxz, weighted @ problem.y)


@pytest.mark.parametrize("name", ["laplace", "matern"])
def test_eigenpro_3_exact_projection_ends_at_the_papers_fixed_point(name):
    problem = _problem(50, 8, name, scale=0.3, columns=2, wobble=1.0)
    solver = EigenPro3(preconditioner="paper", rank=6, subsample_size=50, block_size=50, epochs=100, **PLAIN)
    found = solver.solve(problem).value
    least_squares = torch.linalg.lstsq(_dense(problem.kernel, problem.x, problem.inducing_points), problem.y).solution
    wanted = _lemma_6(problem, 6)
    assert relative(found, wanted) < 1e-6
    assert relative(wanted, least_squares) > 1e-3  # the two are not the same
    projected = EigenPro3(rank=6, subsample_size=50, block_size=50, epochs=100, **PLAIN).solve(problem).value
    assert relative(projected, least_squares) < 1e-6


def test_eigenpro_4_exact_is_approached_by_a_long_delay():
    """Proposition 1 of the EigenPro 4 paper: fit the residual with all points, project, again."""
    problem = _problem(40, 6, "laplace", scale=0.15, wobble=1.0)
    x, y = problem.x, problem.y
    kernel, kxz = _dense(problem.kernel, x, x), _dense(problem.kernel, x, problem.inducing_points)
    solved = torch.linalg.solve(kernel, kxz)
    exact = torch.linalg.solve(kxz.mT @ solved, solved.mT @ y)
    beta, kzz = torch.zeros(6, dtype=torch.float64), kxz[:6]
    for _ in range(200):  # the paper's Algorithm 2
        beta = beta + torch.linalg.solve(kzz, solved.mT @ (y - kxz @ beta))
    assert relative(beta, exact) < 1e-8
    stream = InducingPointProblem(problem.kernel, [(x, y)] * 15, None, 0.0, problem.inducing_points)
    solver = EigenPro4(delay=15, preconditioner="paper", rank=39, subsample_size=40, epochs=10, **PLAIN)
    assert relative(solver.solve(stream).value, exact) < 1e-3
    least_squares = torch.linalg.lstsq(kxz, y.unsqueeze(1)).solution.squeeze(1)
    assert relative(exact, least_squares) > 1e-2


@pytest.mark.parametrize(("name", "noise"), list(zip(KERNELS, (0.5, 5.0, 500.0), strict=True)))
def test_the_ridge_is_exact(name, noise):
    """One batch of all points: no noise of sampling, so the fixed point is that of the objective."""
    problem = _problem(60, 8, name, noise=noise, columns=2, scale=0.4, wobble=0.5)
    found = EigenPro3(rank=5, subsample_size=30, block_size=60, epochs=120, **PLAIN).solve(problem).value
    assert relative(found, QR().solve(problem).value) < 1e-6


@pytest.mark.parametrize(("projection", "delay"), [("exact", 4), ("inexact", 1)])
def test_the_ridge_by_batches(projection, delay):
    problem = _problem(600, 30, noise=3.0, columns=2, wobble=0.5)
    wanted = _fit(problem, QR().solve(problem).value, problem.x)
    solver = EigenPro4(projection=projection, delay=delay, epochs=20, block_size=50)
    found = _fit(problem, solver.solve(problem).value, problem.x)
    assert relative(found, wanted) < 0.02
    unpenalised = torch.linalg.lstsq(_dense(problem.kernel, problem.x, problem.inducing_points), problem.y).solution
    assert relative(_fit(problem, unpenalised, problem.x), wanted) > 0.03


def test_a_stream_counts_its_points_for_the_noise():
    problem = _problem(600, 30, noise=3.0, wobble=0.5)
    wanted = _fit(problem, QR().solve(problem).value, problem.x)
    stream = list(zip(problem.x.split(50), problem.y.split(50), strict=True))
    streamed = InducingPointProblem(problem.kernel, stream, None, 3.0, problem.inducing_points)
    found = EigenPro3(epochs=30).solve(streamed).value
    assert found.shape == (30,)
    assert relative(_fit(problem, found, problem.x), wanted) < 0.02
    with pytest.raises(InputError, match="at least 2 for a stream with noise"):
        EigenPro3(epochs=1).solve(streamed)
    with pytest.warns(ConvergenceWarning):
        report = EigenPro3(epochs=3).solve(streamed, callback=lambda progress: True).report
    assert any("without the noise" in note for note in report.notes)


# --- held-out error -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "name", "dtype", "seed"),
    [
        (EigenPro3(), "matern", torch.float64, 0),
        (EigenPro3(), "laplace", torch.float32, 1),
        (EigenPro4(delay=4), "laplace", torch.float32, 1),
        (EigenPro4(projection="inexact"), "rbf", torch.float32, 0),
    ],
    ids=["3-matern", "3-laplace", "4", "4-inexact"],
)
def test_within_five_percent_of_the_optimum(solver, seed, name, dtype):
    x, y = _data(2500, seed=seed, dtype=dtype, wobble=0.3)
    kernel = _kernel(name, 0.6, dtype)
    problem = InducingPointProblem(kernel, x[:1500], y[:1500], 0.0, x[:60].clone())
    held_out = x[1500:], y[1500:]

    def error(weights):
        return float((_fit(problem, weights, x[1500:]) - y[1500:].double()).square().mean().sqrt())

    ridge = InducingPointProblem(kernel, x[:1500], y[:1500], 1e-8, x[:60].clone())
    optimum = error(QR().solve(ridge).value)
    solution = type(solver)(**{**vars(solver), "seed": seed}).solve(problem, held_out=held_out)
    assert solution.value.dtype == torch.float64
    assert error(solution.value) < 1.05 * optimum
    assert min(float(e) for _, _, e in solution.report.held_out) == pytest.approx(error(solution.value), rel=1e-3)


def test_averaging_and_a_falling_step_help():
    x, y = _data(500, wobble=1.0)
    problem = InducingPointProblem(_kernel(), x, y, 0.0, x[:40].clone())
    kxz = _dense(problem.kernel, x, problem.inducing_points)
    wanted = kxz @ torch.linalg.lstsq(kxz, y.unsqueeze(1)).solution.squeeze(1)

    def distance(**choices):
        return relative(_fit(problem, EigenPro3(block_size=50, **choices).solve(problem).value, x), wanted)

    constant = distance(averaging=False, cooldown=0.0)
    assert distance(cooldown=0.0) < 0.6 * constant
    assert distance(averaging=False) < 0.6 * constant
    assert distance() < 0.6 * constant


def test_a_stream_is_as_good_as_tensors():
    x, y = _data(2000, columns=2, wobble=0.3)
    kernel, z = _kernel(), x[:50].clone()
    held_out = x[1500:], y[1500:]
    tensors = InducingPointProblem(kernel, x[:1500], y[:1500], 0.0, z)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=128, shuffle=True)
    streamed = InducingPointProblem(kernel, loader, None, 0.0, z)
    errors = []
    for problem in (tensors, streamed):
        solution = EigenPro4().solve(problem, held_out=held_out)
        assert solution.value.shape == (50, 2)
        errors.append(float((_fit(problem, solution.value, x[1500:]) - y[1500:]).square().mean()))
    assert errors[1] == pytest.approx(errors[0], rel=0.03)


def test_batches_of_different_sizes_count_alike():
    """A large batch and small ones, whose own step would be larger: the fixed point is that of all points."""
    x, y = _data(1010, wobble=0.5)
    kernel, z = _kernel("laplace"), x[:30].clone()
    stream = [(x[:910], y[:910])] + list(zip(x[910:].split(10), y[910:].split(10), strict=True))
    kxz = _dense(kernel, x, z)
    wanted = kxz @ torch.linalg.lstsq(kxz, y.unsqueeze(1)).solution.squeeze(1)
    problem = InducingPointProblem(kernel, stream, None, 0.0, z)
    assert relative(kxz @ EigenPro3(epochs=60).solve(problem).value, wanted) < 0.02


def test_a_stream_says_how_long_it_is():
    problem = _problem(100, 5)
    assert problem.expected_rows == 100
    loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=10)
    assert InducingPointProblem(problem.kernel, loader, None, 0.0, problem.inducing_points).expected_rows == 100
    plain = InducingPointProblem(problem.kernel, list(loader), None, 0.0, problem.inducing_points)
    assert plain.expected_rows == 0


def test_the_epoch_without_noise_is_not_the_best_one():
    problem = _problem(400, 30, noise=3000.0, wobble=0.5)
    stream = list(zip(problem.x.split(50), problem.y.split(50), strict=True))
    streamed = InducingPointProblem(problem.kernel, stream, None, 3000.0, problem.inducing_points)
    held_out = problem.x, problem.y
    found = EigenPro3(epochs=20).solve(streamed, held_out=held_out)
    *errors, last = (float(error) for _, _, error in found.report.held_out)  # the last is of what is returned
    assert errors[0] == min(errors)  # the fit without a ridge is nearer to these points
    error = (_fit(problem, found.value, problem.x) - problem.y).square().mean().sqrt()
    assert float(error) == pytest.approx(min(errors[1:]))
    assert last == pytest.approx(min(errors[1:]))
    assert min(errors[1:]) > 1.05 * errors[0]


def test_the_best_weights_are_kept():
    """Held-out targets that the fit leaves behind: the error is least after the first epoch."""
    x, y = _data(600, wobble=0.1)
    problem = InducingPointProblem(_kernel(), x, y, 0.0, x[:60].clone())
    seen = []

    def callback(progress):
        seen.append((float(progress.held_out), progress.weights()))

    solution = EigenPro3(epochs=20, patience=4).solve(problem, held_out=(x, 0.1 * y), callback=callback)
    errors = [error for error, _ in seen]
    best = errors.index(min(errors))
    assert solution.report.reason is Reason.EARLY
    assert not solution.report.converged
    assert len(seen) == best + 9 < 20  # four in vain, four in which the step falls
    constant = EigenPro3(epochs=20, patience=4, cooldown=0.0).solve(problem, held_out=(x, 0.1 * y)).report
    assert len(constant.held_out) == best + 6  # and what is returned
    assert float(constant.held_out[-1][2]) == min(errors)
    assert torch.equal(solution.value, seen[best][1].squeeze(1))
    assert not torch.equal(solution.value, seen[-1][1].squeeze(1))
    seen.clear()
    EigenPro3(epochs=10, patience=3).solve(problem, held_out=(x, 0.1 * y), callback=callback)
    assert len(seen) >= 7  # the falling step has its epochs
    everything = EigenPro3(epochs=8, patience=None).solve(problem, held_out=(x, 0.1 * y))
    assert len(everything.report.held_out) == 9


def test_what_the_report_says():
    problem = _problem(400, 40, columns=2, wobble=0.2)
    with record_solves() as solves:
        solution = EigenPro4(epochs=4, rank=7, block_size=40).solve(problem, held_out=(problem.x, problem.y))
    report = solution.report
    assert solves == [report]
    assert report.solver == "EigenPro4" and not report.converged and report.reason is Reason.FINISHED
    assert report.history.shape == (5, 2) and report.rank == 7 and report.iterations == 40
    found = _fit(problem, solution.value, problem.x)
    true = (found - problem.y).norm(dim=0) / problem.y.norm(dim=0)
    assert torch.allclose(report.residual, true, rtol=1e-6)
    passes, seconds, error = report.held_out[-1]
    assert passes == report.passes and 0 < seconds <= report.seconds + report.setup_seconds
    assert torch.allclose(error, (found - problem.y).square().mean(dim=0).sqrt(), rtol=1e-6)
    assert "not of the normal equations" in report.table() and report.residual_rows == 400
    assert (report.size, report.n, report.details["block_size"], report.details["delay"]) == (40, 400, 40, 1)
    assert report.details["subsample_size"] == 200 and 0 < report.details["step"] < 100
    assert "no tolerance, finished its epochs" in str(report) and "inf" not in str(report)


def test_the_same_seed_gives_the_same_weights():
    problem = _problem(300, 30)
    one, two, other = (EigenPro4(epochs=2, seed=seed).solve(problem).value for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


# --- what ends a solve ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [EigenPro3(step_scale=40.0), EigenPro4(step_scale=40.0, delay=3)], ids=["3", "4"])
def test_divergence_is_an_error(solver):
    with pytest.raises(NumericalError, match=r"diverges: after .* batches.*projection='exact'.*step_scale"):
        solver.solve(_problem(500, 40))


def test_a_fit_that_ends_worse_than_none_is_an_error(monkeypatch):
    monkeypatch.setattr(epochs, "_DIVERGED", 1e300)  # so that no batch is an error by itself
    problem = _problem(500, 40, "laplace", scale=0.2, wobble=2.0)
    with pytest.raises(NumericalError, match=r"diverges.*at the start and .* at the end"):
        EigenPro3(step_scale=8.0, epochs=2).solve(problem)


def test_ctrl_c_returns_the_best_weights(interruptible):
    problem = _problem(400, 40)
    seen = []

    def interrupt(progress):
        seen.append((float(progress.held_out), progress.weights()))
        if progress.epochs == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.warns(ConvergenceWarning, match=r"was interrupted after \d+ iter.*best so far\. Go on.*initial=\."):
        solution = EigenPro4(epochs=50).solve(problem, held_out=(problem.x, problem.y), callback=interrupt)
    best = min(seen, key=lambda one: one[0])
    assert torch.equal(solution.value, best[1].squeeze(1))
    assert len(seen) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- memory, odd data, bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_no_matrix_of_all_points_is_made(streamed, many_tiles, monkeypatch):
    monkeypatch.setattr(tall, "_CPU_ENTRIES", 1500)
    x, y = _data(600)
    kernel, z = _kernel("matern"), x[:150].clone()
    if streamed:
        problem = InducingPointProblem(kernel, list(zip(x.split(100), y.split(100), strict=True)), None, 0.1, z)
    else:
        problem = InducingPointProblem(kernel, x, y, 0.1, z)
    choices = {} if streamed else {"block_size": 100}
    solver = EigenPro4(epochs=2, rank=5, subsample_size=40, projection="inexact", delay=5, **choices)
    monkeypatch.setattr(projection, "_RANK", 10)
    monkeypatch.setattr(eigenpro, "_FRESH", 40)
    with Largest() as largest:
        solver.solve(problem, held_out=(x[:400], y[:400]))  # the bytes of 400 points are hashed
    assert largest.entries < 150**2 / 2  # below m x m, and far below n x m


@pytest.mark.parametrize(
    ("solver", "n", "projection"),
    [
        (EigenPro3(epochs=40), 1, "exact"),
        (EigenPro3(epochs=40), 3, "inexact"),
        (EigenPro4(epochs=40), 1, "inexact"),
        (EigenPro4(epochs=40), 2, "exact"),
    ],
)
def test_tiny_problems(solver, n, projection):
    x, y = _data(n)
    problem = InducingPointProblem(_kernel(), x, y, 0.0, x.clone())
    value = type(solver)(**{**vars(solver), "projection": projection}).solve(problem).value
    assert relative(_fit(problem, value, x), y) < 0.05


@pytest.mark.parametrize(("projection", "dtype"), [("exact", torch.float64), ("inexact", torch.float32)])
def test_inducing_points_that_are_duplicated(projection, dtype):
    x, y = _data(500, dtype=dtype)
    z = torch.cat([x[:30], x[:30], x[:3]])
    problem = InducingPointProblem(_kernel(dtype=dtype), x, y, 0.0, z)
    single = InducingPointProblem(_kernel(dtype=dtype), x, y, 0.0, x[:30].clone())
    choices = {"projection": projection, "epochs": 10}
    found = _fit(problem, EigenPro4(**choices).solve(problem).value, x)
    wanted = _fit(single, EigenPro4(**choices).solve(single).value, x)
    assert math.isfinite(float(found.norm()))
    assert relative(found, wanted) < 0.05


def _stream(*batches):
    x, _ = _data(40)
    return InducingPointProblem(_kernel(), list(batches), None, 0.0, x[:10].clone())


def test_batches_that_do_not_fit():
    x, y = _data(40)
    good = (x[:20], y[:20])
    bad = x[20:].clone()
    bad[3, 1] = float("nan")
    for batch, match in [
        ((bad, y[20:]), "x of batch 1.*NaN"),
        ((x[20:, :2], y[20:]), "x of batch 1.*features"),
        ((x[20:].float(), y[20:].float()), "x of batch 1.*float32"),
        ((x[20:], y[21:]), "one row per row"),
        ((x[20:], y[20:].unsqueeze(1).expand(-1, 2)), r"y of batch 1.*1 column"),
        ((x[20:],), "Batch 1.*not a pair"),
    ]:
        with pytest.raises(InputError, match=match):
            EigenPro4().solve(_stream(good, batch))
    with pytest.raises(InputError, match="at least one batch"):
        EigenPro4().solve(_stream())
    with pytest.raises(InputError, match="iterator"):
        InducingPointProblem(_kernel(), iter([good]), None, 0.0, x[:10])


def test_a_stream_that_does_not_start_anew():
    x, y = _data(40)

    class Once:
        left = 4  # the problem, its columns, the set-up, epoch 1

        def __iter__(self):
            self.left -= 1
            return iter([(x, y)] if self.left >= 0 else [])

    with pytest.raises(InputError, match="gave no batch in epoch 2"):
        EigenPro4(epochs=3).solve(InducingPointProblem(_kernel(), Once(), None, 0.0, x[:10].clone()))


@pytest.mark.parametrize("name", ["rank", "subsample_size"])
@pytest.mark.parametrize("streamed", [False, True])
def test_more_directions_than_points_are_as_many(name, streamed):
    problem = _problem(100, 20)
    if streamed:
        problem = InducingPointProblem(problem.kernel, [(problem.x, problem.y)], None, 0.0, problem.inducing_points)
    as_many, more = (EigenPro3(epochs=1, **{name: size}).solve(problem) for size in (100, 101))
    assert torch.equal(as_many.value, more.value)
    assert f"{name} 101 was asked for; 100 points have 100" in more.report.notes
    assert not any("asked for" in note for note in as_many.report.notes)


def test_arguments_that_do_not_fit():
    problem = _problem(100, 20)
    x, y = problem.x, problem.y
    for choices, match in [
        ({"rank": 30, "subsample_size": 20}, "subsample_size of as many"),
    ]:
        with pytest.raises(InputError, match=match):
            EigenPro4(**choices).solve(problem)
    for choices in (
        {"epochs": 0},
        {"epochs": None},
        {"delay": 0},
        {"projection": "cholesky"},
        {"preconditioner": "none"},
        {"step_scale": -1.0},
        {"max_seconds": 0},
        {"cooldown": 1.5},
        {"patience": 0},
        {"block_size": 2.5},
    ):
        with pytest.raises(InputError, match=next(iter(choices))):
            EigenPro4(**choices)
    uneven = InducingPointProblem(problem.kernel, x, y, torch.linspace(0.1, 1, 100), problem.inducing_points)
    with pytest.raises(InputError, match=r"EigenPro3\(\) expects one noise"):
        EigenPro3().solve(uneven)
    stream = InducingPointProblem(problem.kernel, [(x, y)], None, 0.0, problem.inducing_points)
    with pytest.raises(InputError, match="block_size"):
        EigenPro3(block_size=10).solve(stream)
    with pytest.raises(InputError, match="initial"):
        EigenPro3().solve(problem, initial=y)
    with pytest.raises(InputError, match=r"initial .*NaN"):
        EigenPro3().solve(problem, initial=torch.full((problem.m,), float("nan")).double())
    for held_out, match in [
        ((x[:, :2], y), "features"),
        ((x.float(), y.float()), "float32"),
        ((x, y[:50]), "targets"),
        ((x, y.unsqueeze(1)), "targets"),
    ]:
        with pytest.raises(InputError, match=match):
            EigenPro3().solve(problem, held_out=held_out)

"""Reports, their recorders, and the memory budget."""

from __future__ import annotations

import threading

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from problems import normal, points
from sketchgp import (
    Cholesky,
    ConjugateGradients,
    ConvergenceWarning,
    FullProblem,
    InputError,
    RPCholesky,
    SketchGPError,
    record_solves,
    settings,
)
from sketchgp.errors import NumericalError
from sketchgp.report import merged


def _problem(n=50, columns=None, dtype=torch.float64):
    shape = (n,) if columns is None else (n, columns)
    kernel = ScaleKernel(RBFKernel()).to(dtype)
    return FullProblem(kernel, points(n, dtype=dtype), normal(*shape, dtype=dtype), 0.1)


def _solve(**options):
    return ConjugateGradients(**options).solve(_problem())


# --- reports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fields(dtype):
    report = ConjugateGradients(tol=1e-4).solve(_problem(columns=3, dtype=dtype), preconditioner=RPCholesky(4)).report
    assert (report.solver, report.preconditioner, report.rank) == ("ConjugateGradients", "RPCholesky", 4)
    assert (report.n, report.columns, report.tol) == (50, 3, 1e-4)
    assert report.residual.shape == (3,)
    assert report.residual.dtype == report.history.dtype == torch.float64
    assert report.history.shape == (report.iterations + 1, 3)
    assert torch.equal(report.history[0], torch.ones(3, dtype=torch.float64))
    assert report.converged is True
    assert report.reason == "reached the tolerance"
    assert report.work["products"] > report.iterations > 0
    assert 0 < report.seconds < 60
    assert 0 < report.setup_seconds < 60
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert report.device == "cpu"
    assert report.peak_memory > 2**20
    assert report.max_residual == float(report.residual.max()) <= 1e-4


def test_products_are_counted():
    """One product an iteration, and one that checks the result."""
    report = ConjugateGradients(tol=1e-3).solve(_problem(), preconditioner=None).report
    assert report.work["products"] == report.iterations + 1


def test_text():
    report = _solve(tol=1e-5).report
    text = str(report)
    assert "\n" not in text
    solver = f"ConjugateGradients (RPCholesky, rank {report.rank}): converged"
    work = f"{report.iterations} iterations"
    for part in (solver, "n = 50", work, f"relative residual {report.max_residual:.2e} (tolerance 1e-05)", " s"):
        assert part in text and len(text) < 220
    table = report.table()
    for part in (f"{work}, {report.work['products']} products", "float64 on cpu", "GiB", " s set-up"):
        assert part in table and part not in text
    assert repr(report) == table and table.count("\n") > 5
    with pytest.warns(ConvergenceWarning):
        failed = _solve(tol=1e-10, max_iterations=1).report
    assert "NOT converged, ran out of iterations" in str(failed)


def test_a_solve_without_columns():
    report = Cholesky().solve(_problem(columns=0)).report
    assert report.max_residual == 0.0
    assert "0 columns" in report.table()


def test_several_solves_are_one_report():
    """The columns after each other, the work of all, and what is wrong with the one that fell short."""
    first, second = _solve(tol=1e-5).report, Cholesky().solve(_problem(columns=2)).report
    assert merged([first]) is first
    whole = merged([first, second])
    assert (whole.columns, whole.size, whole.n, whole.converged) == (3, 50, 50, True)
    assert whole.residual.tolist() == [*first.residual.tolist(), *second.residual.tolist()]
    assert whole.history.shape == (first.iterations + 1, 3)
    assert torch.equal(whole.history[:, 0], first.history[:, 0])
    assert torch.equal(whole.history[-1, 1:], second.residual)
    assert whole.passes == first.passes + second.passes and whole.iterations == first.iterations
    assert whole.seconds == first.seconds + second.seconds
    assert whole.setup_seconds == first.setup_seconds + second.setup_seconds
    with pytest.warns(ConvergenceWarning):
        failed = _solve(tol=1e-10, max_iterations=1).report
    failed.notes.append("a note")
    whole = merged([first, failed, failed])
    assert not whole.converged and (whole.reason, whole.tol) == ("ran out of iterations", 1e-10)
    assert whole.notes == ["a note"] and whole.iterations == first.iterations + 2
    assert "max_iterations" in whole.advice()


def test_warning_has_the_residual_and_advice():
    with pytest.warns(ConvergenceWarning) as caught:
        solution = _solve(tol=1e-10, max_iterations=2)
    message = str(caught[0].message)
    assert f"{solution.report.max_residual:.1e}" in message
    assert "tolerance 1e-10" in message
    assert "after 2 iterations" in message
    assert "max_iterations" in message
    assert caught[0].filename == __file__  # the user's line, not one of ours


def test_kinds_of_errors():
    assert issubclass(ConvergenceWarning, UserWarning)
    assert issubclass(InputError, (SketchGPError, ValueError))
    assert issubclass(InputError, ValueError)
    assert issubclass(NumericalError, SketchGPError)
    assert issubclass(NumericalError, RuntimeError)


# --- record_solves --------------------------------------------------------------------------------------------


def test_records_every_solve_in_order():
    with record_solves() as solves:
        assert solves == []
        first = _solve()
        second = Cholesky().solve(_problem())
    _solve()
    assert len(solves) == 2
    assert solves[0] is first.report
    assert solves[1] is second.report


def test_nested_recorders():
    with record_solves() as outer:
        _solve()
        with record_solves() as inner:
            _solve()
        _solve()
    assert (len(outer), len(inner)) == (3, 1)
    assert inner[0] is outer[1]


def test_equal_recorders_are_told_apart():
    """Two empty lists are equal; closing one must not close the other."""
    with record_solves() as outer:
        with record_solves():
            pass
        _solve()
    assert len(outer) == 1


def test_recorder_closes_after_an_error():
    with pytest.raises(ZeroDivisionError), record_solves() as solves:
        raise ZeroDivisionError
    _solve()
    assert solves == []


def test_records_the_solves_of_all_threads():
    threads = [threading.Thread(target=_solve) for _ in range(4)]
    with record_solves() as solves:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(solves) == 4
    assert all(report.converged for report in solves)


def test_records_failed_convergence_too():
    with record_solves() as solves, pytest.warns(ConvergenceWarning):
        _solve(tol=1e-10, max_iterations=1)
    assert [report.converged for report in solves] == [False]


# --- settings -------------------------------------------------------------------------------------------------


def test_available_memory():
    assert 2**20 < settings.available_memory() < 2**50
    assert settings.memory_budget.value() <= settings.available_memory() // 2


def test_memory_budget_in_force():
    with settings.memory_budget(1000):
        assert settings.memory_budget.value() == 1000
        with settings.memory_budget(10):
            assert settings.memory_budget.value() == 10
        assert settings.memory_budget.value() == 1000
    assert settings.memory_budget.value() > 2**20


def test_memory_budget_nested_with_a_repeated_value():
    with settings.memory_budget(1), settings.memory_budget(2):
        with settings.memory_budget(1):
            assert settings.memory_budget.value() == 1
        assert settings.memory_budget.value() == 2


def test_memory_budget_after_an_error():
    with pytest.raises(ZeroDivisionError), settings.memory_budget(7):
        raise ZeroDivisionError
    assert settings.memory_budget.value() != 7


@pytest.mark.parametrize("budget", [0, -1])
def test_memory_budget_refuses(budget):
    with pytest.raises(InputError, match="budget expects a number of at least 1"):
        settings.memory_budget(budget)

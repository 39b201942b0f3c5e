"""What every iterative solver can do, whatever its mathematics: one table, one test a power.

``docs/solvers.md`` holds the table that :func:`powers` makes; a test compares the two.  Run as a script, this file is
the process that forks solves and kills them: see :func:`_kill_and_restart`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import sketchgp
from forks import CAN_FORK, die, ended, fork, one_thread, run_script
from problems import Crash, normal, points, quiet
from sketchgp import FullProblem, InducingPointProblem, InputError, RandomFeatureProblem, record_solves
from sketchgp.report import Reason, SolveReport
from sketchgp.solvers import Progress
from sketchgp.solvers.loop import Run

N, M = 240, 40
# name -> choices of few rows a step, so that the small problems take several windows; and what a solver's budget is
FULL = {
    "ConjugateGradients": (sketchgp.ConjugateGradients(tol=1e-8), "max_iterations"),
    "ASkotch": (sketchgp.ASkotch(block_size=60, tol=1e-8), "max_passes"),
    "Skotch": (sketchgp.Skotch(block_size=60, tol=1e-8), "max_passes"),
    "EigenPro2": (sketchgp.EigenPro2(block_size=60, subsample_size=80, tol=1e-8), "max_passes"),
}
INDUCING = {
    "KRILL": (sketchgp.KRILL(tol=1e-10, sketch_size=M), "max_iterations"),
    "Falkon": (sketchgp.Falkon(tol=1e-10), "max_iterations"),
    "NystromPCG": (sketchgp.NystromPCG(rank=5, tol=1e-6), "max_iterations"),
    "SketchySAGA": (sketchgp.SketchySAGA(tol=1e-10, deviations=3, rank=M, block_size=40), "max_epochs"),
    "EigenPro3": (sketchgp.EigenPro3(block_size=60), "epochs"),
    "EigenPro4": (sketchgp.EigenPro4(block_size=60, projection="inexact"), "epochs"),
}
STREAMS = {"DoublyStochastic": (sketchgp.DoublyStochastic(num_features=64, block_size=16, batch_size=60), "epochs")}
SOLVERS = FULL | INDUCING | STREAMS
UNENDING = ("EigenPro3", "EigenPro4", *STREAMS)  # have epochs instead of a tolerance
DIRECT = {"Cholesky": sketchgp.Cholesky(), "QR": sketchgp.QR()}
every_solver = pytest.mark.parametrize("name", SOLVERS)
every_one_with_a_start = pytest.mark.parametrize("name", FULL | INDUCING)


def make(name, columns=2, dtype=torch.float64, zero=()):
    x, width = points(N, 3), 1 if columns is None else columns
    y = torch.sin(4 * x @ normal(3, width, seed=2)) + 0.1 * normal(N, width, seed=1)
    y[:, list(zero)] = 0
    y = (y[:, 0] if columns is None else y).to(dtype)
    kernel = ScaleKernel(MaternKernel(nu=1.5)).to(dtype).requires_grad_(False)
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.3, 0.7
    if name in FULL:
        return FullProblem(kernel, x.to(dtype), y, 0.1)
    if name in STREAMS:
        return RandomFeatureProblem(kernel, x.to(dtype), y, 0.1)
    return InducingPointProblem(kernel, x.to(dtype), y, 0.1, x[::6].to(dtype).clone())


def solve(name, problem, callback=None, initial=None, held_out=None, **choices):
    """Quietly; the solver's own choices but for some."""
    solver = dataclasses.replace(SOLVERS[name][0], **choices)
    with quiet():
        options = {"preconditioner": None} if name == "ConjugateGradients" else {}
        options |= {} if name in STREAMS else {"initial": initial}
        return solver.solve(problem, callback=callback, held_out=held_out, progress=False, **options)


def unknowns(name):
    return 64 if name in STREAMS else N if name in FULL else M


def columns_at(name, problem, x):
    """The functions whose coefficients a solution is, at x: float64."""
    if name in STREAMS:
        learner = SOLVERS[name][0].learner(problem)
        members = learner.features.pairs(learner.features.prepare(x.to(problem.x.dtype)), 0, learner.total)
        return torch.stack(members, dim=2).flatten(1).double()
    where = problem.x if name in FULL else problem.inducing_points
    return problem.kernel.double()(x.double(), where.double()).to_dense()


def residual(name, problem, value):
    """Of the solution, by dense algebra; of the fit, where a solver has no tolerance."""
    kernel, x = problem.kernel.double(), problem.x.double()
    y, w = problem.y.double().reshape(N, -1), value.double().reshape(len(value), -1)
    if name in FULL:
        return (kernel(x).to_dense() @ w + 0.1 * w - y).norm(dim=0) / y.norm(dim=0).clamp_min(1e-300)
    tall = columns_at(name, problem, x)
    if name in UNENDING:
        return (tall @ w - y).norm(dim=0) / y.norm(dim=0).clamp_min(1e-300)
    square = kernel(problem.inducing_points.double()).to_dense()
    rhs = tall.mT @ y
    return (tall.mT @ (tall @ w) + 0.1 * square @ w - rhs).norm(dim=0) / rhs.norm(dim=0).clamp_min(1e-300)


def assert_honest(name, problem, solution):
    """The residual that is reported is that of what is returned, however the solve ended."""
    if name not in UNENDING:
        true = residual(name, problem, solution.value)
        torch.testing.assert_close(solution.report.residual, true, rtol=0.05, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "columns"), [(n, (None, 2)[i % 2]) for i, n in enumerate([*FULL, *INDUCING, *DIRECT])]
)
def test_a_solution_predicts(name, columns):
    """k(x, points) W, in y's shape and the points' dtype, from whatever x is kept in."""
    problem = make(name if name in SOLVERS else "ASkotch" if name == "Cholesky" else "KRILL", columns, torch.float32)
    solution = DIRECT[name].solve(problem) if name in DIRECT else solve(name, problem, **{SOLVERS[name][1]: 5})
    assert solution.problem is problem
    assert float(solution.value.abs().max()) > 0
    x, where = points(30, 3, seed=4), getattr(problem, "inducing_points", problem.x)
    found = solution.predict(x.numpy())  # float64
    assert found.dtype == torch.float32 and torch.equal(found, solution.predict(x.float()))
    kernel = problem.kernel.double()
    weights = solution.value.double().reshape(len(where), -1)
    expected = kernel(x.float().double(), where.double()).to_dense() @ weights
    torch.testing.assert_close(found.double(), expected.reshape(30, *problem.y.shape[1:]), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match=r"x expects shape \(m, 3\)"):
        solution.predict(x[:, :2])


def test_a_solution_without_points_does_not_predict():
    problem = make("DoublyStochastic")
    for solution in (solve("DoublyStochastic", problem), sketchgp.Solution(problem.y, None)):
        with pytest.raises(InputError, match="expects a solution of a FullProblem or an InducingPointProblem"):
            solution.predict(problem.x)


@pytest.mark.parametrize(
    ("name", "columns", "dtype"),
    [(n, *case) for n in SOLVERS for case in [(None, torch.float64), (3, torch.float32)]],
)
def test_solutions_and_reports(name, columns, dtype):
    problem = make(name, columns, dtype)
    choices = {} if name in UNENDING else {"tol": 1e-3}
    solution = solve(name, problem, **choices)
    report = solution.report
    width = columns or 1
    rows = unknowns(name)
    assert solution.value.shape == ((rows,) if columns is None and name not in STREAMS else (rows, width))
    assert type(report) is SolveReport and report.solver.startswith(name) and (report.size, report.n) == (rows, N)
    assert report.columns == width and report.residual.shape == (width,) and report.history.shape[1] == width
    assert len(report.history) >= 2 and report.iterations > 0 and report.passes > 0
    assert type(report.reason) is Reason and str(report.reason) in str(report)
    assert report.seconds > 0 and report.setup_seconds >= 0
    assert report.converged == (name not in UNENDING)
    true = residual(name, problem, solution.value)
    if name in UNENDING:
        assert float(true.max()) < 0.5
    else:
        assert report.reason == Reason.REACHED
    assert_honest(name, problem, solution)


@pytest.mark.parametrize(("name", "zero"), [(n, ((0, 1), (1,))[i % 2]) for i, n in enumerate(SOLVERS)])
def test_zero_targets(name, zero):
    solution = solve(name, make(name, zero=zero), **({} if name in UNENDING else {"tol": 1e-4}))
    report, columns = solution.report, list(zero)
    assert not solution.value[:, columns].any() and not report.residual[columns].any()
    assert not report.history[:, columns].any() or name in UNENDING
    assert report.converged != (name in UNENDING)
    assert solution.value[:, 0].any() == (0 not in zero)


WORK = {  # name -> what a report counts beside iterations and passes
    **{name: {"products"} for name in ("ConjugateGradients", "KRILL", "Falkon", "NystromPCG")},
    **{name: {"products", "epochs"} for name in ("ASkotch", "Skotch")},
    "EigenPro2": {"products", "epochs", "halvings"},
    "SketchySAGA": {"epochs", "sweeps", "halvings"},
    "EigenPro3": {"epochs", "projections"},
    "EigenPro4": {"epochs", "projections", "projection_iterations"},
    "DoublyStochastic": {"epochs", "sweeps"},
}


@every_solver
def test_a_report_counts_what_means_something(name):
    seen = []
    choices = {} if name in UNENDING else {"tol": 1e-3}
    report = solve(name, make(name), lambda progress: seen.append(progress), **choices).report
    assert set(report.work) == WORK[name] | {"iterations", "passes"}
    assert report.work["iterations"] == report.iterations == seen[-1].iteration
    assert report.work["passes"] == report.passes >= seen[-1].passes
    if "epochs" in report.work:
        assert report.work["epochs"] == seen[-1].epochs
    table = " ".join(report.table().split())  # without the ends of its lines
    for count, value in report.work.items():
        assert f"{value if isinstance(value, int) else format(value, '.1f')} {count.replace('_', ' ')}" in table


@pytest.mark.parametrize("name", DIRECT)
def test_direct_solvers_report_as_all_do(name):
    problem = make("KRILL" if name == "QR" else "ASkotch")
    report = DIRECT[name].solve(problem).report
    assert (report.size, report.n, report.columns) == (M if name == "QR" else N, N, 2)
    assert report.work == {"passes": 2.0 if name == "QR" else 1.0} and report.iterations == 0
    assert report.converged and report.reason == Reason.DIRECT
    assert report.setup_seconds > 0 and report.seconds > 0


@pytest.mark.parametrize("name", DIRECT)
def test_direct_solvers_time_the_factorization_apart(name, monkeypatch):
    """By a clock that is looked at when they begin, have a factor, and end."""
    problem, times = make("KRILL" if name == "QR" else "ASkotch"), iter((1.0, 10.0, 100.0))
    monkeypatch.setattr(sketchgp.solvers.loop.run, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    report = DIRECT[name].solve(problem).report
    assert (report.setup_seconds, report.seconds) == (9, 90)


@every_solver
def test_set_up_and_steps_are_timed_apart(name, monkeypatch, tmp_path):
    """By a clock that only the set-up, the start and the steps move; a solve that was resumed counts all its runs."""
    now, problem = [0.0], make(name)

    def ticking(seconds, function):
        def moved(*arguments):
            now[0] += seconds
            return function(*arguments)

        return moved

    def slow(run, method, *arguments, **options):
        now[0] += 10
        method.begin, method.step = ticking(100, method.begin), ticking(1, method.step)
        init(run, method, *arguments, **options)

    init = Run.__init__
    monkeypatch.setattr(Run, "__init__", slow)
    monkeypatch.setattr(sketchgp.solvers.loop.run, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    saving = {"checkpoint": tmp_path / "state.pt", "every": 1e-9}
    seen = []
    report = solve(name, problem, lambda progress: seen.append(0) or len(seen) == 2, **saving).report
    assert (report.setup_seconds, report.seconds) == (110, report.iterations)
    report = solve(name, problem, lambda progress: seen.append(0) or len(seen) == 4, **saving).report
    assert (report.setup_seconds, report.seconds) == (120, report.iterations)


STOPPED = (Reason.TIME, Reason.CALLBACK, Reason.INTERRUPTED)
ENDS = {  # how solves can end
    "ConjugateGradients": (*STOPPED, Reason.ITERATIONS, Reason.REACHED, Reason.ROUNDED, Reason.STAGNATED),
    **dict.fromkeys(
        ("ASkotch", "Skotch", "EigenPro2"),
        (*STOPPED, Reason.PASSES, Reason.REACHED, Reason.ROUNDED, Reason.STAGNATED),
    ),
    **dict.fromkeys(
        ("KRILL", "Falkon", "NystromPCG"),
        (*STOPPED, Reason.ITERATIONS, Reason.REACHED, Reason.STAGNATED, Reason.SINGULAR),
    ),
    "SketchySAGA": (*STOPPED, Reason.EPOCHS, Reason.REACHED, Reason.STAGNATED),
    **dict.fromkeys(UNENDING, (*STOPPED, Reason.FINISHED, Reason.EARLY)),
    "Cholesky": (Reason.DIRECT,),
    "QR": (Reason.DIRECT, Reason.SINGULAR),
}


def parameters(solver):
    """Of a solver, and of its solve."""
    return {f.name for f in dataclasses.fields(solver)} | set(inspect.signature(type(solver).solve).parameters)


@pytest.mark.parametrize("name", ENDS)
def test_advice_is_of_what_the_solver_has(name):
    """Whatever it says to raise, lower or give is a parameter, and whom it says to use solves the same problem."""
    solvers = {key: solver for key, (solver, _) in SOLVERS.items()} | DIRECT
    full = name in (*FULL, "Cholesky")
    if name in DIRECT:
        report = DIRECT[name].solve(make("ASkotch" if full else "KRILL")).report
    else:
        report = solve(name, make(name), **{SOLVERS[name][1]: 2}).report
    own, words = parameters(solvers[name]), set().union(*map(parameters, solvers.values()))
    words = {word for word in words if "_" in word} | {"rank", "initial", "checkpoint", "tol", "mu"}
    if name == "ConjugateGradients":
        own |= {"rank"}  # of its preconditioner=
    found = set()
    for reason, dtype in itertools.product(ENDS[name], ("float32", "float64")):
        advice = dataclasses.replace(report, reason=reason, dtype=dtype, converged=False).advice()
        advised = advice.split(": ", maxsplit=1)[1]
        named = (words & set(re.findall(r"\w+", advised))) | set(re.findall(r"(\w+)=", advised))
        assert named <= own, advice
        others = set(re.findall(r"([A-Z]\w+)\(", advised)) - ({"RPCholesky"} if "preconditioner" in named else set())
        assert others <= set(solvers) - {name} and all((one in (*FULL, "Cholesky")) == full for one in others), advice
        assert not others or not re.search("allows no less|cannot do better", advised), advice
        assert reason in STOPPED[1:] or "initial" not in named or "max_" in advised
        assert name not in STREAMS or reason not in STOPPED or "learn again" in advised  # of the models
        assert (f" after {report.iterations} iterations: " in advice) == (name not in DIRECT)
        assert "last iterate" not in advice
        found |= named
    assert name in DIRECT or name in STREAMS or {"max_seconds", "initial", "checkpoint"} <= found


@every_solver
def test_no_columns(name):
    solution = solve(name, make(name, columns=0))
    assert solution.value.shape == (unknowns(name), 0) and solution.report.max_residual == 0


@every_one_with_a_start
def test_warm_start(name):
    """From the solution, nothing is left to do; it is not changed in place."""
    problem = make(name)
    first = solve(name, problem, **({} if name in UNENDING else {"tol": 1e-6}))
    start = first.value.clone()
    again = solve(name, problem, initial=start, **({"epochs": 1} if name in UNENDING else {"tol": 1e-4}))
    assert torch.equal(start, first.value)
    if name != "SketchySAGA":  # which has to look several times at what the function still changes
        assert again.report.iterations <= 0.5 * first.report.iterations
    assert float(residual(name, problem, again.value).max()) <= 1.05 * max(
        float(residual(name, problem, start).max()), 1e-4
    )


@every_solver
def test_callbacks_see_progress_and_end_a_solve(name):
    problem, seen = make(name), []

    def callback(progress):
        seen.append((progress, progress.weights().clone()))
        return int(len(seen) == 2)  # whatever is true

    solution = solve(name, problem, callback)
    assert [type(progress) for progress, _ in seen] == [Progress] * 2
    first, second = (progress for progress, _ in seen)
    assert 0 < first.iteration < second.iteration and 0 < first.passes < second.passes
    assert 0 < first.epochs < second.epochs and 0 < first.seconds < second.seconds
    assert first.residual.shape == (2,) and first.held_out is None
    assert seen[0][1].shape == solution.value.shape and not torch.equal(seen[0][1], seen[1][1])
    assert solution.report.reason == Reason.CALLBACK and not solution.report.converged
    assert solution.report.iterations == second.iteration
    assert torch.equal(torch.stack([first.residual, second.residual]), solution.report.history[1:3])
    torch.testing.assert_close(solution.value, seen[1][1], rtol=1e-12, atol=1e-12)
    assert_honest(name, problem, solution)


@every_solver
def test_held_out_errors(name):
    problem, x = make(name), points(30, 3, seed=8)
    y = torch.sin(4 * x @ normal(3, 2, seed=2))
    seen = []
    few = {SOLVERS[name][1]: 5}
    solution = solve(name, problem, lambda progress: seen.append(progress.held_out), held_out=(x, y), **few)
    error = (columns_at(name, problem, x) @ solution.value - y).square().mean(dim=0).sqrt()
    passes, seconds, last = solution.report.held_out[-1]
    torch.testing.assert_close(last, error, rtol=1e-6, atol=1e-9)
    assert passes > 0 and seconds > 0 and all(one is not None and one.shape == (2,) for one in seen)


@every_solver
def test_budgets(name):
    problem, budget = make(name), SOLVERS[name][1]
    little = solve(name, problem, **{budget: 2})
    more = solve(name, problem, **{budget: 4})
    assert little.report.iterations < more.report.iterations
    if name not in UNENDING:
        assert (
            little.report.reason
            == {
                "max_iterations": Reason.ITERATIONS,
                "max_passes": Reason.PASSES,
                "max_epochs": Reason.EPOCHS,
            }[budget]
        )
    timed = solve(name, problem, max_seconds=1e-9)
    assert timed.report.reason == Reason.TIME and not timed.report.converged
    assert_honest(name, problem, little)
    assert timed.report.iterations <= 1 or name in UNENDING


@every_solver
def test_ctrl_c_keeps_an_iterate(name, interruptible):
    problem = make(name)

    def callback(progress):
        if progress.iteration >= 3:
            os.kill(os.getpid(), signal.SIGINT)

    solution = solve(name, problem, callback)
    assert solution.report.reason == Reason.INTERRUPTED
    assert 0 < float(residual(name, problem, solution.value).max()) < 1.5
    assert_honest(name, problem, solution)


@every_solver
def test_a_solve_that_crashed_goes_on_to_the_same_bits(name, tmp_path, interruptible):
    problem, path = make(name), tmp_path / "state.pt"
    work = {} if name in UNENDING else {SOLVERS[name][1]: 12}
    expected = solve(name, problem, **work)
    left = iter(range(3))

    def callback(progress):
        if next(left, None) is None:
            raise Crash

    saving = {**work, "checkpoint": path, "every": 1e-9}
    with record_solves() as solves, pytest.raises(Crash):
        solve(name, problem, callback, **saving)
    assert solves == [] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    found = solve(name, problem, lambda progress: progress.weights().sum() > 1e9, **saving)  # looking changes nothing
    assert any(note.startswith("resumed after") for note in found.report.notes)
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found.report.history, expected.report.history)
    assert torch.equal(found.report.residual, expected.report.residual)
    assert found.report.work == expected.report.work and found.report.reason == expected.report.reason
    assert found.report.details.pop("resumed_after") > 0 and found.report.details == expected.report.details
    other = make(name)
    other.y = 2 * other.y
    with pytest.raises(InputError, match="targets changed"):
        solve(name, other, **saving)


# Two of all: every one crashes and goes on in one process, too, and they share what writes the file.
KILLED = ("ConjugateGradients", "EigenPro4")


def _kill_and_restart(directory):
    """Each of KILLED: once without a checkpoint, then with one in processes of their own, killed twice at its third
    window and started again, the last time to the end.  Writes what differs, by solver."""
    one_thread()
    found = {}
    for name in KILLED:
        problem, saved, end = make(name), directory / f"{name}.saved", directory / f"{name}.end"
        work = {} if name in UNENDING else {SOLVERS[name][1]: 12}

        def result(callback=None, name=name, problem=problem, **choices):
            solution = solve(name, problem, callback, **choices)
            report = solution.report
            return {
                "value": solution.value,
                "history": report.history,
                "residual": report.residual,
                "steps": torch.tensor(report.iterations),
                "reason": torch.tensor(list(Reason).index(report.reason)),
            }, report

        def killed(work=work, saved=saved, result=result):
            left = iter(range(2))
            result(lambda progress: die() if next(left, None) is None else None, checkpoint=saved, every=1e-9, **work)

        def last(work=work, saved=saved, end=end, result=result):
            parts, report = result(checkpoint=saved, every=1e-9, **work)
            resumed = [int(note.split()[2]) for note in report.notes if note.startswith("resumed after")]
            torch.save(parts | {"resumed": torch.tensor(resumed)}, end)

        expected, report = result(**work)
        signals = [ended(fork(killed)), ended(fork(killed)), ended(fork(last))]
        parts = torch.load(end)
        steps = [0, *parts.pop("resumed").tolist(), report.iterations]
        found[name] = [part for part in expected if not torch.equal(parts[part], expected[part])]
        found[name] += ["deaths"] * (signals != [signal.SIGKILL, signal.SIGKILL, 0])
        found[name] += [f"resumed after {steps}"] * (len(steps) != 4 or steps != sorted(set(steps)))
        found[name] += sorted({file.name for file in directory.glob(f"{name}.saved*")} - {saved.name})
    (directory / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.skipif(not CAN_FORK, reason="this system has no fork")
def test_solves_that_are_killed_go_on_to_the_same_bits(tmp_path):
    run_script(__file__, tmp_path)
    assert json.loads((tmp_path / "found.json").read_text()) == {name: [] for name in KILLED}


def test_a_checkpoint_of_another_preconditioner_is_refused(tmp_path):
    problem, solver = make("ConjugateGradients"), sketchgp.ConjugateGradients(checkpoint=tmp_path / "state.pt")
    solver.solve(problem, preconditioner=sketchgp.RPCholesky(rank=10), progress=False)
    with pytest.raises(InputError, match="the preconditioner changed"):
        solver.solve(problem, preconditioner=sketchgp.RPCholesky(rank=10, seed=1), progress=False)
    with pytest.raises(InputError, match="the preconditioner changed"):
        solver.solve(problem, preconditioner=None, progress=False)


def powers():
    """The table solver x power for the docs: what the choices and arguments of each are."""
    names = ("tol", "budget", "max_seconds", "callback", "held_out", "initial", "checkpoint")
    rows = ["| solver | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for name, (solver, budget) in SOLVERS.items():
        fields = {f.name for f in dataclasses.fields(solver)}
        arguments = type(solver).solve.__annotations__
        cells = []
        for power in names:
            has = power in fields or power in arguments
            cells.append(f"`{budget}`" if power == "budget" else "yes" if has else "no")
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def test_the_table_in_the_docs():
    text = (Path(__file__).resolve().parents[1] / "docs" / "solvers.md").read_text()
    assert powers() in text


if __name__ == "__main__":
    _kill_and_restart(Path(sys.argv[1]))

"""Saving a solve by blocks of rows and going on with it: the same bits, whatever ended the process before."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import math
import os
import pickle
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import MaternKernel, PolynomialKernel, RBFKernel, RQKernel, ScaleKernel

from cases import each
from forks import CAN_FORK, ended, fork
from problems import Crash, normal, points, quiet, radial, set_scales
from sketchgp import (
    ASkotch,
    EigenPro2,
    FullProblem,
    InputError,
    NumericalError,
    Skotch,
    record_solves,
    settings,
    tensor_file,
)
from sketchgp.solvers import System
from sketchgp.solvers.full import askotch, eigenpro2, refinement
from sketchgp.solvers.loop import checkpoint, run

N, BLOCK = 300, 50
ALWAYS = 1e-9  # seconds between two writes: one every window

VARIANTS = {
    "askotch": ASkotch(block_size=BLOCK, tol=1e-4),
    "askotch-float32": ASkotch(block_size=BLOCK, tol=5e-5),  # with a correction of float32 products
    "askotch-float32-rounded": ASkotch(block_size=BLOCK, tol=1e-8),  # ends where float32 cannot hold the solution
    "askotch-float32-stagnates": ASkotch(block_size=BLOCK, tol=1e-6),  # float32 cannot do better
    "askotch-optimistic": ASkotch(block_size=BLOCK, tol=1e-3),  # its target is lowered, as its estimates are wrong
    "askotch-v1": ASkotch(block_size=BLOCK, version=1, rank=15, max_passes=5, tol=1e-8),
    "skotch-uniform": Skotch(block_size=BLOCK, sampling="uniform", tol=1e-3),
    "eigenpro2": EigenPro2(block_size=BLOCK, subsample_size=80, tol=1e-3),
    "eigenpro2-halved": EigenPro2(block_size=BLOCK, subsample_size=80, max_passes=12, tol=1e-8),  # its step diverged
}
WAYS = {  # how a variant ends, what its notes say, and how many products it takes at least
    "askotch-float32-rounded": ("was rounded", "", 1),
    "askotch-float32-stagnates": ("", "float32 products corrected", 2),
    "askotch-optimistic": ("reached the tolerance", "", 2),
    "eigenpro2-halved": ("", "went on with", 1),
}


def _kernel(lengthscale=0.6):
    return set_scales(ScaleKernel(RBFKernel(ard_num_dims=3)), 1.3, lengthscale)


def _problem(dtype=torch.float64, noise=0.1, kernel=None, n=N):
    x = points(n)
    y = (x @ (3 * normal(3, 2, seed=2))).sin() + 0.2 * normal(n, 2, seed=1)
    y = y.mT.contiguous().mT  # as users transpose: columns are contiguous
    return FullProblem((kernel or _kernel()).to(dtype), x.to(dtype), y.to(dtype), noise)


def _problem_of(name):
    if name == "askotch-float32-stagnates":
        return _problem(torch.float32, noise=3e-6, kernel=_kernel(2.0), n=200)
    return _problem(torch.float32 if "float32" in name else torch.float64, 0.01 if name == "askotch-float32" else 0.1)


def _solve(solver, problem, **options):
    """The solution, whether it converges or not."""
    with quiet():
        return solver.solve(problem, **options)


def _own_notes(report):
    """Those that do not say that the solve was resumed."""
    return [note for note in report.notes if "resumed" not in note]


def _same(found, expected):
    """The same bits, by the same work."""
    assert torch.equal(found.value, expected.value)
    assert found.report.iterations == expected.report.iterations
    assert torch.equal(found.report.history, expected.report.history)
    assert torch.equal(found.report.residual, expected.report.residual)
    assert found.report.reason == expected.report.reason
    assert _own_notes(found.report) == _own_notes(expected.report)


def _header(path):
    """Numbers and text of a checkpoint; it is a file that ``torch.load`` reads with ``weights_only``."""
    return json.loads(bytes(torch.load(path, weights_only=True)["header"].numpy()))


def _steps_in(path):
    """How many steps a checkpoint holds."""
    return _header(path)["state"]["method"]["iterations"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "solve.pt"


@pytest.fixture(autouse=True)
def _spoiled(request, monkeypatch):
    """Two variants start with a step that is too long, or estimate a fifth of the residual."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name == "eigenpro2-halved":
        original = eigenpro2.step_size
        monkeypatch.setattr(eigenpro2, "step_size", lambda *args: 2 * original(*args))
    if name == "askotch-optimistic":
        step = askotch._Fresh.step

        def optimistic(self, *args):
            rows, g = step(self, *args)
            return rows, 0.2 * g

        monkeypatch.setattr(askotch._Fresh, "step", optimistic)


class _Clock:
    """A clock that every step moves on by a second."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        original = refinement.Refinement.step

        def step(this):
            closed = original(this)
            self.now += 1.0
            return closed

        monkeypatch.setattr(refinement.Refinement, "step", step)
        monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: self.now))


# --- the same bits --------------------------------------------------------------------------------------------


def test_a_restart_of_the_momentum_is_on_the_way(monkeypatch):
    """Else a checkpoint that forgets its age would not be missed."""
    restarts = []
    told = askotch._Fresh.answer

    def watched(self, answers):
        age = self.numbers["rows"]
        told(self, answers)
        restarts.append(age > 0 and self.numbers["rows"] == 0)

    monkeypatch.setattr(askotch._Fresh, "answer", watched)
    _solve(VARIANTS["askotch"], _problem_of("askotch"))
    assert any(restarts)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("askotch", "askotch-float32", "eigenpro2")])
def test_a_solve_that_crashes_again_and_again(monkeypatch, name, path):
    """Every process dies in its third window, having saved two at best; the last one's answer is kept."""
    solver, problem = VARIANTS[name], _problem_of(name)
    expected = _solve(solver, problem)
    report = expected.report
    if name in WAYS:  # a variant goes the way that it is there for
        reason, note, products = WAYS[name]
        assert reason in report.reason and note in str(report.notes) and report.work["products"] >= products
    saving = dataclasses.replace(solver, checkpoint=path, every=ALWAYS)

    def crashing():
        left = iter(range(2))

        def callback(progress):
            if next(left, None) is None:
                raise Crash

        return callback

    reached = []
    for _ in range(100):
        try:
            found = _solve(saving, problem, callback=crashing())
            break
        except Crash:
            reached.append(_steps_in(path))
    assert len(reached) >= 1 or len(expected.report.history) <= 3
    assert reached == sorted(set(reached))
    assert all(0 < steps < expected.report.iterations for steps in reached)
    _same(found, expected)
    assert found.report.work == expected.report.work
    assert len(found.report.notes) == len(expected.report.notes) + len(reached)
    contents = path.read_bytes()
    monkeypatch.setattr(refinement.Refinement, "step", None)
    for _ in range(2):
        _same(_solve(saving, problem), expected)
    assert path.read_bytes() == contents


@pytest.mark.parametrize("name", ["askotch-float32", "eigenpro2"])
def test_a_solve_that_stops_after_many_steps(monkeypatch, name, path):
    """By its budget, which cuts through windows and passes."""
    solver, problem = VARIANTS[name], _problem_of(name)
    passes = []
    original = refinement.Refinement.step

    def step(self):
        closed = original(self)
        passes.append(self.work)
        return closed

    monkeypatch.setattr(refinement.Refinement, "step", step)
    expected = _solve(solver, problem)
    stops = passes[:-1]
    for count in range(0, len(stops), max(1, len(stops) // 3)):
        stopped = _solve(dataclasses.replace(solver, checkpoint=path, max_passes=stops[count]), problem)
        reached = bool((stopped.report.residual <= stopped.report.tol).all())
        assert stopped.report.reason == ("reached the tolerance" if reached else "ran out of passes")
        assert stopped.report.iterations == count + 1 == _steps_in(path)
    found = _solve(dataclasses.replace(solver, checkpoint=path), problem)
    _same(found, expected)
    assert found.report.passes == expected.report.passes


@pytest.mark.parametrize(("name", "end"), [("askotch-float32", "stop"), ("eigenpro2", "interrupt")])
def test_a_solve_that_is_stopped_in_any_window(name, end, path):
    """By its callback, or by Ctrl-C in there: also in the window in which the tolerance is met."""
    solver, problem = VARIANTS[name], _problem_of(name)
    expected = _solve(solver, problem)
    saving = dataclasses.replace(solver, checkpoint=path)
    windows = len(expected.report.history) - 1
    for window in sorted({1, windows}):
        path.unlink(missing_ok=True)
        left = iter(range(window - 1))

        def callback(progress, left=left):
            if next(left, None) is None:
                if end == "interrupt":
                    raise KeyboardInterrupt
                return True

        stopped = _solve(saving, problem, callback=callback)
        assert stopped.report.reason == {"stop": "was stopped by the callback", "interrupt": "was interrupted"}[end]
        found = _solve(saving, problem)
        assert found.report.iterations == expected.report.iterations, f"stopped in window {window} of {windows}"
        _same(found, expected)


@pytest.mark.slow
def test_every_crash_within_a_save(monkeypatch, path):
    """The n-th file is half written, or whole but not yet in place, or just in place, for each n."""
    solver, problem = VARIANTS["askotch"], _problem_of("askotch")
    expected = _solve(solver, problem)
    saving = dataclasses.replace(solver, checkpoint=path, every=ALWAYS)

    def half(contents, file):
        whole = io.BytesIO()
        save(contents, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        raise Crash

    def before(*args):
        raise Crash

    def after(*args):
        replace(*args)
        raise Crash

    save, replace = torch.save, os.replace
    for where, what, crash in ((torch, "save", half), (os, "replace", before), (os, "replace", after)):
        original = getattr(where, what)
        for number in (1, 2):
            path.unlink(missing_ok=True)
            left = iter(range(number - 1))

            def crashing(*args, left=left, original=original, crash=crash):
                return crash(*args) if next(left, None) is None else original(*args)

            with monkeypatch.context() as patch:
                patch.setattr(where, what, crashing)
                with pytest.raises(Crash):
                    saving.solve(problem)
            assert path.exists() == (number > 1 or crash is after)
            found = saving.solve(problem)
            _same(found, expected)
            assert found.report.passes == expected.report.passes


@pytest.mark.parametrize("name", ["askotch"])
def test_held_out_errors_go_on(name, path):
    solver, problem = VARIANTS[name], _problem_of(name)
    held_out = points(100, seed=8), normal(100, 2, seed=9)
    expected = _solve(solver, problem, held_out=held_out)
    saving, left = dataclasses.replace(solver, checkpoint=path, every=ALWAYS), iter(range(3))

    def callback(progress):
        if next(left, None) is None:
            raise Crash

    with pytest.raises(Crash):
        saving.solve(problem, callback=callback, held_out=held_out)
    found = _solve(saving, problem, held_out=held_out)
    _same(found, expected)
    pairs = list(zip(found.report.held_out, expected.report.held_out, strict=True))
    assert len(pairs) > 2
    assert len(pairs) < len(expected.report.history) - 1  # 100 points are too many for every window
    for (passes, _, error), (passes_then, _, error_then) in pairs:
        assert passes == passes_then
        assert torch.equal(error, error_then)
        assert error.dtype == torch.float64
    times = [seconds for _, seconds, _ in found.report.held_out]
    assert times == sorted(times)


def test_a_start_is_kept(path):
    """The residual of ``initial`` is part of the state, and not computed again."""
    solver, problem = VARIANTS["askotch"], _problem_of("askotch")
    start = normal(N, 2, seed=4)
    expected = solver.solve(problem, initial=start)
    _solve(dataclasses.replace(solver, checkpoint=path, max_passes=4), problem, initial=start)
    found = dataclasses.replace(solver, checkpoint=path).solve(problem)
    _same(found, expected)
    assert found.report.passes == expected.report.passes


# --- several processes -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not CAN_FORK, reason="this system has no fork")
def test_processes_that_write_at_once_leave_a_whole_file(path):
    """The file is of one of them, and nothing is beside it."""

    def write(number):
        for _ in range(30):
            tensor_file.save(path, {"number": number}, {"x": torch.full((20_000,), float(number))})

    children = [fork(lambda number=number: write(number)) for number in (1, 2)]
    while not path.exists():
        time.sleep(0.001)
    for _ in range(30):
        described, tensors = tensor_file.load(path)
        assert bool((tensors["x"] == described["number"]).all())
    assert [ended(child) for child in children] == [0, 0]
    assert os.listdir(path.parent) == [path.name]


# --- when it is saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "expected"),
    [(1e-9, list(range(29))), (7, [0, 7, 14, 21, 28]), (12, [0, 12, 24, 28]), (13, [0, 13, 26, 28]), (1e9, [0, 28])],
)
def test_when_it_is_saved(monkeypatch, path, every, expected):
    """At the start, then after a step if ``every`` seconds have gone by, and at the end."""
    _Clock(monkeypatch)
    saved = []
    save = checkpoint.Checkpoint.save

    def watched(self, plain, tensors):
        save(self, plain, tensors)
        saved.append(_steps_in(path))

    monkeypatch.setattr(checkpoint.Checkpoint, "save", watched)
    solver = ASkotch(block_size=BLOCK, tol=1e-12, max_seconds=28, checkpoint=path, every=every)
    assert _solve(solver, _problem()).report.iterations == 28
    assert saved == expected


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_of_tensors(path, kind):
    """Also where the path is text; nothing lies beside it afterwards."""
    _solve(ASkotch(block_size=BLOCK, tol=1e-12, max_passes=3, checkpoint=kind(path)), _problem())
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    contents = torch.load(path, weights_only=True)
    assert all(torch.is_tensor(value) for value in contents.values())


def test_memory_of_a_checkpoint(path):
    """A few vectors of the size of y, not more."""
    _solve(ASkotch(block_size=BLOCK, tol=1e-12, max_passes=30, checkpoint=path), _problem())
    assert path.stat().st_size < 6 * 8 * N * 2 + 20_000


def test_seconds_of_all_runs_count(monkeypatch, path):
    clock = _Clock(monkeypatch)
    solver = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=1e9, checkpoint=path)
    first = _solve(dataclasses.replace(solver, max_seconds=10), _problem()).report
    assert (first.iterations, first.seconds) == (10, 10.0)
    clock.now += 1e6
    second = _solve(dataclasses.replace(solver, max_seconds=25), _problem()).report
    assert (second.iterations, second.seconds, second.reason) == (25, 25.0, "ran out of time")
    seen = []
    third = _solve(dataclasses.replace(solver, max_seconds=40), _problem(), callback=lambda p: seen.append(p.seconds))
    assert third.report.seconds == 40.0
    assert seen[0] == 30.0
    again = _solve(dataclasses.replace(solver, max_seconds=40), _problem()).report
    assert (again.iterations, again.seconds) == (40, 40.0)


def test_what_a_resumed_solve_does_with_its_arguments(path):
    """A start is no longer needed; errors on another held-out set are not those on the first; an engine asked for by
    name is taken.  The report says so."""
    solver, problem = ASkotch(block_size=BLOCK, tol=1e-4, checkpoint=path), _problem()
    first = points(9, seed=8), normal(9, 2, seed=9)
    _solve(dataclasses.replace(solver, max_passes=4), problem, held_out=first, matmul="dense")
    kept = path.read_bytes()
    same = _solve(solver, problem, held_out=first).report
    assert len(same.held_out) > 4
    path.write_bytes(kept)
    other = _solve(solver, problem, held_out=(first[0], first[1] + 100), initial=problem.y, matmul="tiled").report
    assert all(float(error.min()) > 90 for _, _, error in other.held_out)
    assert "initial= was not used: the checkpoint is ahead of it" in other.notes
    assert any(note.startswith("matmul= is another than before") for note in other.notes)
    assert not any("initial" in note or "matmul" in note for note in same.notes)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError("no memory"),
                                   OSError(5, "Input/output error")], ids=repr)  # fmt: skip
def test_a_file_that_cannot_be_read_now(monkeypatch, path, valid, error):
    """It may be whole: nobody is told to delete it."""

    def load(*args, **options):
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(InputError, match="cannot be read now") as caught:
        valid[0].solve(valid[1])
    assert "delete" not in str(caught.value).lower()


def test_the_report_of_a_resumed_solve(path):
    solver, problem = ASkotch(block_size=BLOCK, tol=1e-4), _problem()
    whole = solver.solve(problem).report
    _solve(dataclasses.replace(solver, checkpoint=path, max_passes=4), problem)
    with record_solves() as solves:
        report = dataclasses.replace(solver, checkpoint=path).solve(problem).report
    assert solves == [report]
    assert report.notes == [f"resumed after {_steps(4)} steps"]
    assert (report.iterations, report.passes, report.converged) == (whole.iterations, whole.passes, True)
    assert torch.equal(report.history, whole.history)
    assert (report.solver, report.preconditioner, report.rank) == (whole.solver, whole.preconditioner, whole.rank)


def _steps(passes):
    """Of ASkotch with exact blocks."""
    work = BLOCK * (N + BLOCK)
    return -(-passes * N**2 // work)


# --- after the end --------------------------------------------------------------------------------------------


def test_a_smaller_tolerance_goes_on(path):
    """From the end of the first solve, with no more steps than one that had this tolerance from the start."""
    problem = _problem()
    solver = ASkotch(block_size=BLOCK, tol=1e-2, checkpoint=path)
    first = solver.solve(problem)
    direct = ASkotch(block_size=BLOCK, tol=1e-5).solve(problem)
    second = dataclasses.replace(solver, tol=1e-5).solve(problem)
    assert second.report.converged
    assert second.report.tol == 1e-5
    assert first.report.iterations < second.report.iterations
    true = problem.y - radial(problem.kernel, problem.x, problem.x).detach() @ second.value - 0.1 * second.value
    residual = true.norm(dim=0) / problem.y.norm(dim=0)
    torch.testing.assert_close(second.report.residual, residual, rtol=1e-6, atol=0)
    assert second.report.iterations <= direct.report.iterations


def test_a_larger_tolerance_is_met_at_once(path):
    problem = _problem()
    first = ASkotch(block_size=BLOCK, tol=1e-5, checkpoint=path).solve(problem)
    second = ASkotch(block_size=BLOCK, tol=1e-2, checkpoint=path).solve(problem)
    assert second.report.converged
    assert torch.equal(first.value, second.value)
    assert first.report.iterations == second.report.iterations


def test_a_larger_budget_goes_on(path):
    """Passes and seconds; neither is part of the problem, nor is how often it is saved."""
    solver, problem = ASkotch(block_size=BLOCK, tol=1e-4, checkpoint=path), _problem()
    assert _solve(dataclasses.replace(solver, max_passes=3), problem).report.reason == "ran out of passes"
    assert _solve(dataclasses.replace(solver, max_seconds=1e-6), problem).report.reason == "ran out of time"
    found = dataclasses.replace(solver, max_passes=100, max_seconds=100.0, every=5.0).solve(problem)
    _same(found, ASkotch(block_size=BLOCK, tol=1e-4).solve(problem))


def test_stagnation_is_an_end(path):
    """It does not become a new attempt by being looked at again, but a tolerance that it meets is met."""
    name = "askotch-float32-stagnates"
    solver, problem = dataclasses.replace(VARIANTS[name], checkpoint=path), _problem_of(name)
    first = _solve(solver, problem)
    assert first.report.reason in ("stagnated", "was rounded") and first.report.max_residual < 0.9
    for tol in (1e-6, 1e-5):
        _same(_solve(dataclasses.replace(solver, tol=tol), problem), first)
    met = _solve(dataclasses.replace(solver, tol=0.99), problem)
    assert met.report.converged
    assert torch.equal(met.value, first.value)


# --- Ctrl-C ---------------------------------------------------------------------------------------------------


def _interrupting(monkeypatch, count, times=1):
    """Ctrl-C, so many times, in the middle of the ``count``-th step."""
    calls, original = [], System.rows

    def rows(self, indices, vectors, accurate=False):
        result = original(self, indices, vectors, accurate)
        calls.extend([0] * (not accurate))  # one a step
        if len(calls) == count and not accurate:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(System, "rows", rows)


@pytest.mark.parametrize("name", ["askotch-float32"])
def test_ctrl_c_saves_the_step_under_way(interruptible, monkeypatch, name, path):
    """Also where the iterate is not returned; then the solve goes on as if nothing had happened."""
    solver, problem = dataclasses.replace(VARIANTS[name], checkpoint=path), _problem_of(name)
    expected = _solve(VARIANTS[name], problem)
    with monkeypatch.context() as patch:
        _interrupting(patch, 9)
        try:
            stopped = _solve(solver, problem)
        except KeyboardInterrupt:  # which would end all tests
            pytest.fail("the interrupt was not kept until the step had ended")
    assert stopped.report.reason == "was interrupted"
    assert stopped.report.iterations == 9 == _steps_in(path)
    with monkeypatch.context() as patch:
        _interrupting(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            solver.run(problem.system(), problem.y)
    assert _steps_in(path) == 12
    _same(_solve(solver, problem), expected)


@pytest.mark.parametrize(("name", "handler"), [("askotch", "ours"), ("eigenpro2", "the user's")])
def test_a_step_that_is_cut_in_the_middle(interruptible, monkeypatch, name, handler, path):
    """By a second Ctrl-C, or by a handler of the user's that raises: what the file keeps is a state before it."""

    def mine(number, frame):
        raise KeyboardInterrupt

    if handler == "the user's":
        signal.signal(signal.SIGINT, mine)
    solver, problem = dataclasses.replace(VARIANTS[name], checkpoint=path, every=ALWAYS), _problem_of(name)
    expected = _solve(VARIANTS[name], problem)
    with monkeypatch.context() as patch:
        _interrupting(patch, 9, times=2 if handler == "ours" else 1)
        with contextlib.suppress(KeyboardInterrupt):
            _solve(solver, problem)
    assert 0 < _steps_in(path) < 9
    _same(_solve(solver, problem), expected)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_residual_is_verified(interruptible, monkeypatch, times, path):
    """In the window at the end of which the tolerance is met: afterwards it is, by the same step."""
    solver, problem = dataclasses.replace(VARIANTS["askotch"], checkpoint=path), _problem_of("askotch")
    expected = _solve(VARIANTS["askotch"], problem)
    original = System.accurate_product

    def product(self, vectors):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, vectors)

    with monkeypatch.context() as patch:
        patch.setattr(System, "accurate_product", product)
        with contextlib.suppress(KeyboardInterrupt):
            _solve(solver, problem)
    _same(_solve(solver, problem), expected)


# --- another problem ------------------------------------------------------------------------------------------


def _replace(problem, **parts):
    return FullProblem(**{"kernel": problem.kernel, "x": problem.x, "y": problem.y, "noise": problem.noise, **parts})


def _radial(name="rbf", lengthscale=0.6, outputscale=1.3, **options):
    kind = {"rbf": RBFKernel, "matern": MaternKernel, "rq": RQKernel}[name]
    return set_scales(ScaleKernel(kind(**options)), outputscale, lengthscale).double()


CHANGES = {
    "a point": ("the training inputs", lambda p: _replace(p, x=_moved(p.x, 3))),
    "the last point": ("the training inputs", lambda p: _replace(p, x=_moved(p.x, N - 1))),
    "two points swapped": ("the training inputs", lambda p: _replace(p, x=p.x[_swapped()], y=p.y)),
    "fewer points": ("the training inputs", lambda p: _replace(p, x=p.x[:-1], y=p.y[:-1])),
    "a target": ("the targets", lambda p: _replace(p, y=_moved(p.y, 7))),
    "a column": ("the targets", lambda p: _replace(p, y=p.y[:, :1])),
    "columns swapped": ("the targets", lambda p: _replace(p, y=p.y.flip(1))),
    "one dimension": ("the targets", lambda p: _replace(p, y=p.y[:, :1].expand(-1, 3))),
    "the noise": ("the noise", lambda p: _replace(p, noise=0.1000001)),
    "the noise of one point": ("the noise", lambda p: _replace(p, noise=_moved(p.noise_vector, 5))),
    "the lengthscale": ("the kernel", lambda p: _replace(p, kernel=_radial(lengthscale=0.6000001))),
    "the outputscale": ("the kernel", lambda p: _replace(p, kernel=_radial(outputscale=1.3000001))),
    "the kernel's class": ("the kernel", lambda p: _replace(p, kernel=_radial("rq"))),
    "another class": ("the kernel", lambda p: _replace(p, kernel=_radial("matern", nu=2.5))),
    "its dimensions": ("the kernel", lambda p: _replace(p, kernel=_radial(active_dims=(0, 1)))),
    "its dtype": ("the training inputs", lambda p: _replace(p, kernel=p.kernel.float(), x=p.x.float(), y=p.y.float())),
}


def _moved(tensor, row):
    tensor = tensor.clone()
    tensor[row] += 1e-9
    return tensor


def _swapped():
    order = torch.arange(N)
    order[1], order[2] = 2, 1
    return order


def _refusal(path, solver, problem):
    """The message with which the checkpoint is refused; it is left as it was."""
    before = path.read_bytes()
    with record_solves() as solves, pytest.raises(InputError) as caught:
        solver.solve(problem)
    assert solves == []
    assert path.read_bytes() == before
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("what", CHANGES)
def test_another_problem_is_refused(path, what):
    part, change = CHANGES[what]
    solver = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=3, checkpoint=path)
    problem = _problem(kernel=_radial())
    _solve(solver, problem)
    message = _refusal(path, solver, change(_problem(kernel=_radial())))
    assert part in message and "changed since it was written" in message
    if what not in ("its dimensions", "its dtype", "fewer points"):  # nothing else is blamed
        others = {"the training inputs", "the kernel", "the noise", "the targets", "the solver's choices"} - {part}
        assert not any(other in message for other in others)
    assert _solve(solver, _problem(kernel=_radial())).report.iterations > 0  # its own problem is not refused


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: _radial("matern", nu=2.5), lambda: _radial("matern", nu=1.5)),
        (lambda: PolynomialKernel(power=2).double(), lambda: PolynomialKernel(power=3).double()),
        (lambda: _radial() + _radial("matern"), lambda: _radial() * _radial("matern")),
        (lambda: _radial() + _radial("matern"), lambda: _radial() + _radial("matern", outputscale=1.5)),
    ],
    ids=["nu", "power", "sum or product", "a part"],
)
def test_kernels_are_told_apart(path, one, other):
    solver = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=2, checkpoint=path)
    _solve(solver, _problem(kernel=one(), noise=1.0))
    assert "the kernel" in _refusal(path, solver, _problem(kernel=other(), noise=1.0))


class _Hidden(RBFKernel):
    """A kernel whose power is no parameter, nor a plain setting; it refuses points outside of its domain."""

    def __init__(self, power, domain=(-math.inf, math.inf)):
        super().__init__()
        self.options = {"power": power}
        self.domain = domain

    def forward(self, x1, x2, diag=False, **params):
        if not bool((x1 >= self.domain[0]).all() and (x1 <= self.domain[1]).all()):
            raise ValueError("outside of the domain")
        return super().forward(x1, x2, diag=diag, **params) ** self.options["power"]


@pytest.mark.parametrize(
    ("options", "shift"),
    [({}, 0.0), ({"domain": (-1.0, 1.0)}, 0.0), ({"domain": (2.0, 5.0)}, 3.0)],
    ids=["everywhere", "near the origin", "far from it"],
)
def test_unknown_kernels_are_told_apart_by_their_values(path, options, shift):
    solver = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=2, checkpoint=path)
    problem = _problem(kernel=_radial(), noise=1.0)
    problem = _replace(problem, x=problem.x + shift, kernel=_Hidden(2, **options).double())
    _solve(solver, problem)
    other = _Hidden(4, **options).double()
    assert "problem: the kernel changed" in _refusal(path, solver, _replace(problem, kernel=other))
    if not shift:  # else the inputs are part of the kernel's mark
        moved = _replace(problem, x=_moved(problem.x, 3))
        assert "problem: the training inputs changed" in _refusal(path, solver, moved)
    assert _solve(solver, _replace(problem, kernel=_Hidden(2, **options).double())).report.iterations > 0


def test_transforms_of_parameters_are_told_apart(path):
    def kernel(transform, inverse):
        made = RBFKernel(lengthscale_constraint=Positive(transform, inverse)).double()
        made.raw_lengthscale.data.fill_(0.1)
        return made

    solver = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=2, checkpoint=path)
    _solve(solver, _problem(kernel=kernel(torch.exp, torch.log), noise=1.0))
    other = _problem(kernel=kernel(torch.nn.functional.softplus, torch.log), noise=1.0)
    assert "problem: the kernel changed" in _refusal(path, solver, other)


SOLVER_CHANGES = {
    "rank": (ASkotch(rank=10), ASkotch(rank=11)),
    "exact": (ASkotch(), ASkotch(rank=10)),
    "seed": (ASkotch(seed=1), ASkotch(seed=2)),
    "block_size": (ASkotch(block_size=50), ASkotch(block_size=51)),
    "automatic block_size": (ASkotch(block_size=256), ASkotch()),
    "version": (ASkotch(), ASkotch(version=1)),
    "mu": (ASkotch(mu=0.1), ASkotch(mu=0.2)),
    "sampling": (ASkotch(), ASkotch(sampling="uniform")),
    "solver": (ASkotch(), Skotch()),
    "another solver": (Skotch(), EigenPro2()),
    "subsample_size": (EigenPro2(subsample_size=100), EigenPro2(subsample_size=101)),
}


@pytest.mark.parametrize("what", SOLVER_CHANGES)
def test_another_solver_is_refused(path, what):
    first, second = (dataclasses.replace(solver, max_passes=1, tol=1e-12, checkpoint=path)
                     for solver in SOLVER_CHANGES[what])  # fmt: skip
    _solve(first, _problem())
    message = _refusal(path, second, _problem())
    assert "the solver's choices changed" in message
    assert not any(part in message for part in ("inputs", "kernel", "noise", "targets"))


USED = {
    "rbf": lambda: _radial(ard_num_dims=3),
    "matern": lambda: _radial("matern", nu=2.5),
    "rq": lambda: _radial("rq"),
    "sum": lambda: _radial("rq") + _radial("matern"),
    "product": lambda: _radial() * _radial("matern", nu=1.5),
    "polynomial": lambda: PolynomialKernel(power=2).double(),
}


@pytest.mark.parametrize("kind", USED)
def test_the_same_problem_is_not_refused(path, kind):
    """Whether the kernel is the same object, or was used, or is another with the same numbers."""
    solver = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=2, checkpoint=path)
    kernel = USED[kind]()
    _solve(solver, _problem(kernel=kernel, noise=1.0))
    kernel(points(5)).to_dense().sum().backward()
    kernel.eval()
    _solve(solver, _problem(kernel=kernel, noise=1.0))
    again = USED[kind]()
    again.load_state_dict(kernel.state_dict())
    again.requires_grad_(False)
    _solve(solver, _problem(kernel=again, noise=torch.ones(N, dtype=torch.float64)))
    _solve(solver, _problem(kernel=copy.deepcopy(kernel), noise=1.0), matmul="tiled")


# --- settings of the other run --------------------------------------------------------------------------------

AUTOMATIC = {
    "askotch": ASkotch(max_passes=5, tol=1e-12),
    "skotch-v1": Skotch(version=1, max_passes=5, tol=1e-12),
    "eigenpro2": EigenPro2(max_passes=5, tol=1e-12),
}


@pytest.mark.parametrize(
    ("solver", "first", "second"),
    [("askotch", 4 * 8 * 60**2, 2**30), ("skotch-v1", 2**30, 4 * 8 * 60**2), ("eigenpro2", 4 * 8 * 60**2, 2**30)],
    ids=["askotch-more", "skotch-v1-less", "eigenpro2-more"],
)
def test_another_memory_budget(path, solver, first, second):
    """Block size and engine are those that the solve began with, whatever they would be now."""
    choices, problem = AUTOMATIC[solver], _problem(n=600)
    with settings.memory_budget(first):
        expected = _solve(choices, problem)
        _solve(dataclasses.replace(choices, checkpoint=path, max_passes=2.5), problem)
    with settings.memory_budget(second):
        other = _solve(choices, problem)
        found = _solve(dataclasses.replace(choices, checkpoint=path), problem)
    assert other.report.preconditioner != expected.report.preconditioner
    assert found.report.preconditioner == expected.report.preconditioner
    assert found.report.iterations == expected.report.iterations
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found.report.history, expected.report.history)


@pytest.mark.parametrize(("first", "second"), [(2**30, 2**20), (2**20, 2**30)], ids=["less", "more"])
def test_another_engine(path, first, second):
    """With many features the matrix is stored where it fits, else evaluated: other bits."""
    x = points(600, 120)
    y = (x @ normal(120, 2, seed=2)).sin()
    problem = FullProblem(_radial(lengthscale=5.0), x, y, 0.1)
    solver = ASkotch(block_size=BLOCK, max_passes=5, tol=1e-12)
    with settings.memory_budget(first):
        expected = _solve(solver, problem)
        _solve(dataclasses.replace(solver, checkpoint=path, max_passes=2.5), problem)
    with settings.memory_budget(second):
        other = _solve(solver, problem)
        found = _solve(dataclasses.replace(solver, checkpoint=path), problem)
    assert not torch.equal(other.value, expected.value)  # else this test could not fail
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found.report.history, expected.report.history)


# --- files that are none --------------------------------------------------------------------------------------


@pytest.fixture
def valid(path):
    """A checkpoint in the middle of a solve, that solve, its problem, and how it ends."""
    solver, problem = ASkotch(block_size=BLOCK, tol=1e-12, max_passes=6, checkpoint=path), _problem()
    _solve(dataclasses.replace(solver, max_passes=3), problem)
    contents = path.read_bytes()
    expected = _solve(solver, problem)
    path.write_bytes(contents)
    return solver, problem, expected


def _refused(path, solver, problem):
    message = _refusal(path, solver, problem)
    assert "no checkpoint that this version of sketchgp can read" in message
    assert "delete it or use another path" in message


def test_truncated_files_are_refused(path, valid):
    solver, problem, expected = valid
    contents = path.read_bytes()
    for length in (0, 1, 100, len(contents) // 2, len(contents) - 1000, len(contents) - 1):
        path.write_bytes(contents[:length])
        _refused(path, solver, problem)
    path.write_bytes(contents)
    _same(_solve(solver, problem), expected)


@each(
    "contents",
    [
        torch.zeros(3),
        {},
        {"header": torch.zeros(3)},
        {"header": torch.frombuffer(bytearray(b"[1, 2]"), dtype=torch.uint8)},
        {"header": torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)},
        {"header": "text"},
        [1, 2],
    ],
    ids=["tensor", "empty", "numbers", "list", "dictionary", "text", "a list"],
)
def test_files_of_something_else_are_refused(path, valid, contents):
    torch.save(contents, path)
    _refused(path, *valid[:2])


def test_bytes_and_directories_are_refused(path, valid):
    solver, problem, _ = valid
    for contents in (b"", b"hello", b"PK\x03\x04" + bytes(200), random.Random(0).randbytes(5000)):
        path.write_bytes(contents)
        _refused(path, solver, problem)
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"solve\.pt"):
        solver.solve(problem)


def test_a_later_format_is_refused(monkeypatch, path, valid):
    """One that is whole: nothing is wrong with it but its number."""
    solver, problem, _ = valid
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_FORMAT", checkpoint._FORMAT + 1)
        _solve(dataclasses.replace(solver, max_passes=3), problem)
        assert _header(path)["format"] == checkpoint._FORMAT
    _refused(path, solver, problem)


def test_files_with_parts_missing_are_refused(path, valid):
    solver, problem, _ = valid
    contents = torch.load(path)
    for name in reversed(list(contents)):
        torch.save({key: value for key, value in contents.items() if key != name}, path)
        _refused(path, solver, problem)


def test_corrupt_files_are_refused(path, valid):
    """One bit that flipped, anywhere: either it does not matter, or the file is refused."""
    solver, problem, expected = valid
    contents, chance, wrong = path.read_bytes(), random.Random(1), []
    for _ in range(40):
        position, bit = chance.randrange(len(contents)), chance.randrange(8)
        changed = bytearray(contents)
        changed[position] ^= 1 << bit
        path.write_bytes(changed)
        try:
            if not torch.equal(_solve(solver, problem).value, expected.value):
                wrong.append((position, "another solution"))
        except InputError:
            continue
        except Exception as error:
            wrong.append((position, repr(error)[:80]))
    assert not wrong


class _Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (self.marker,))


@pytest.mark.parametrize("form", ["torch", "legacy", "pickle", "beside tensors"])
def test_code_in_a_file_is_not_executed(path, valid, form):
    solver, problem, _ = valid
    marker = path.parent / "executed"
    payload = _Malicious(str(marker))
    if form == "beside tensors":
        torch.save({**torch.load(path), "extra": payload}, path)
    elif form == "pickle":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "torch")
    _refused(path, solver, problem)
    assert not marker.exists()
    if form == "pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert marker.exists()  # the payload does work where it is let


# --- writing fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["absent/solve.pt", "file/solve.pt"])
def test_a_place_that_cannot_be_written(tmp_path, monkeypatch, place):
    """It is found before the first step."""
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setattr(refinement.Refinement, "step", None)
    with pytest.raises(InputError, match="cannot be written"):
        ASkotch(block_size=BLOCK, checkpoint=tmp_path / place).solve(_problem())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(refinement.Refinement, "step", None)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be written"):
            ASkotch(block_size=BLOCK, checkpoint=tmp_path / "solve.pt").solve(_problem())
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_failure_while_writing(monkeypatch, path, valid, kind):
    """The file of before survives; torch raises RuntimeError where its own writer fails."""
    solver, problem, expected = valid
    before = path.read_bytes()

    def half(contents, file):
        whole = io.BytesIO()
        save(contents, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        raise kind("no space left")

    save = torch.save
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(InputError if kind is OSError else (InputError, RuntimeError), match="no space left"):
            solver.solve(problem)
    assert path.read_bytes() == before
    _same(_solve(solver, problem), expected)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk(monkeypatch, path, valid):
    solver, problem, expected = valid
    before = path.read_bytes()

    def full(name, mode):
        return open("/dev/full", "wb") if str(name).endswith(".partial") else open(name, mode)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "open", full, raising=False)
        with pytest.raises(InputError, match=r"cannot be written.*space"):
            solver.solve(problem)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    _same(_solve(solver, problem), expected)


def test_a_disk_that_fills_up_later(monkeypatch, path):
    """The solve goes on, with a warning: what it can no longer keep is not what it found."""
    expected, writes = _solve(ASkotch(block_size=BLOCK), _problem()), []
    replace = os.replace

    def replaced(source, target):
        writes.append(target)
        if len(writes) == 3:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.warns(UserWarning, match=r"cannot be written.*goes on without"):
        found = ASkotch(block_size=BLOCK, checkpoint=path, every=1e-9).solve(_problem())
    assert len(writes) > 4
    assert torch.equal(found.value, expected.value)


def test_it_is_on_the_disk_before_it_is_renamed(monkeypatch, path):
    """Else a machine that loses power could be left with an empty file."""
    order, names = [], {}
    fsync, replace = os.fsync, os.replace

    def synced(number):
        order.append("fsync")
        names[len(order)] = os.fstat(number).st_size
        fsync(number)

    def replaced(source, target):
        order.append("replace")
        assert os.path.getsize(source) == names[len(order) - 1]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    _solve(ASkotch(block_size=BLOCK, tol=1e-12, max_passes=2, checkpoint=path), _problem())
    assert order == ["fsync", "replace"] * 2


def test_an_error_in_the_solve_leaves_the_file(monkeypatch, path, valid):
    solver, problem, expected = valid
    before = path.read_bytes()

    def nan(self, *args):
        return rows(self, *args) * float("nan")

    rows = System.rows
    with monkeypatch.context() as patch:
        patch.setattr(System, "rows", nan)
        with pytest.raises(NumericalError, match="NaN"):
            solver.solve(problem)
    assert path.read_bytes() == before
    _same(_solve(solver, problem), expected)

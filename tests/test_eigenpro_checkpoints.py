"""Saving a solve of EigenPro 3 or 4 in the middle of an epoch and going on with it: the same bits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import warnings
from types import SimpleNamespace

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch.utils.data import DataLoader, TensorDataset

from problems import Crash, normal, points, quiet
from sketchgp import ConvergenceWarning, EigenPro3, EigenPro4, InducingPointProblem, InputError
from sketchgp.report import Reason
from sketchgp.settings import memory_budget
from sketchgp.solvers.inducing import eigenpro
from sketchgp.solvers.inducing.preconditioned_gradient import Model
from sketchgp.solvers.loop import run

N, M, BATCH = 300, 40, 20  # fifteen batches an epoch
ALWAYS = 1e-9  # seconds between two writes: one every step

VARIANTS = {
    "3": EigenPro3(epochs=4),
    "4-exact": EigenPro4(epochs=4, delay=4, projection="exact"),
    "4-exact-paper": EigenPro4(epochs=3, delay=4, projection="exact", preconditioner="paper"),
    "4-inexact": EigenPro4(epochs=4, projection="inexact"),  # the delay follows what is counted
    "4-inexact-paper": EigenPro4(epochs=3, delay=6, projection="inexact", preconditioner="paper"),
    "4-plain": EigenPro4(epochs=3, delay=7, averaging=False, cooldown=0.0, seed=3),
}


class Stream:
    """Batches that are parts of larger tensors, as of data that are read once."""

    def __init__(self, x, y, batches=None):
        self.x, self.y, self.batches = x, y, batches

    def __iter__(self):
        return iter(list(zip(self.x.split(BATCH), self.y.split(BATCH), strict=True))[: self.batches])


def _data(columns=2, seed=0, dtype=torch.float64):
    x = points(N, 3, seed=seed)
    y = (x @ (3 * normal(3, columns, seed=2))).sin() + 0.2 * normal(N, columns, seed=1)
    return x.to(dtype), y.to(dtype)


def _problem(streamed=False, noise=1.0, dtype=torch.float64, shift=0.0, batches=None):
    kernel = ScaleKernel(MaternKernel(nu=0.5)).to(dtype).requires_grad_(False)
    x, y = _data(dtype=dtype)
    z = x[:M].clone()
    if streamed:
        return InducingPointProblem(kernel, Stream(x, y + shift, batches), None, noise, z)
    return InducingPointProblem(kernel, x, y + shift, noise, z)


def _held_out(problem):
    x, y = _data(seed=7, dtype=problem.inducing_points.dtype)
    return x[:100], 0.3 * y[:100]  # which the fit leaves behind: the best weights are not the last


def _fitting(solver, streamed):
    return solver if streamed else dataclasses.replace(solver, block_size=BATCH)


def _solve(solver, problem, **options):
    with quiet():
        return solver.solve(problem, **options)


def _same(found, expected):
    """The same bits, by the same work."""
    one, other = found.report, expected.report
    assert torch.equal(found.value, expected.value)
    assert torch.equal(one.history, other.history)
    assert torch.equal(one.residual, other.residual)
    for name in ("reason", "work", "rank"):
        assert getattr(one, name) == getattr(other, name)
    assert [note for note in one.notes if "resumed" not in note] == other.notes
    assert [passes for passes, _, _ in one.held_out] == [passes for passes, _, _ in other.held_out]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(one.held_out, other.held_out, strict=True))


def _state(path):
    """Numbers and text of the method in a checkpoint."""
    return json.loads(bytes(torch.load(path, weights_only=True)["header"].numpy()))["state"]["method"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "solve.pt"


@pytest.fixture
def at_step(monkeypatch):
    """Has something happen in every k-th step of all solves."""
    original = Model.step

    def install(k, happens):
        done = iter(range(1, 10**9))

        def step(self, *args, **options):
            if next(done) % k == 0:
                happens()
            return original(self, *args, **options)

        monkeypatch.setattr(Model, "step", step)

    yield install
    monkeypatch.setattr(Model, "step", original)


def _crash():
    raise Crash


def test_what_goes_on_without_time_for_a_step_tells_of_those_before(path, at_step):
    problem, solver = _problem(), dataclasses.replace(_fitting(VARIANTS["3"], False), checkpoint=path, every=ALWAYS)
    at_step(5, _crash)
    with pytest.raises(Crash):
        _solve(solver, problem)
    found = _solve(dataclasses.replace(solver, max_seconds=ALWAYS), problem)
    assert found.report.iterations == 4
    assert bool((found.report.history[-1] > 0).all())


@pytest.mark.parametrize(
    ("name", "streamed", "dtype"),
    [
        ("3", True, torch.float32),
        ("4-exact-paper", True, torch.float32),
        ("4-inexact", True, torch.float64),
    ],
)
def test_a_solve_that_crashes_again_and_again(name, streamed, dtype, path, at_step):
    """In every seventeenth step: between projections, at all places of an epoch."""
    problem, solver = _problem(streamed, dtype=dtype), _fitting(VARIANTS[name], streamed)
    expected = _solve(solver, problem, held_out=_held_out(problem))
    saving = dataclasses.replace(solver, checkpoint=path, every=ALWAYS)
    at_step(17, _crash)
    reached, pending = [], 0
    for _ in range(100):
        try:
            found = _solve(saving, problem, held_out=_held_out(problem))
            break
        except Crash:
            state = _state(path)
            reached.append(state["iterations"])
            pending += state["unprojected"] > 0
            assert state["seen"] == state["iterations"] % 15
    assert reached == list(range(16, expected.report.iterations, 16))
    assert pending or name == "3"
    _same(found, expected)
    assert sum("resumed" in note for note in found.report.notes) == len(reached)


@pytest.mark.parametrize(("name", "streamed"), [("4-exact", True), ("4-inexact", False)])
def test_ctrl_c_in_the_middle_of_an_epoch(name, streamed, path, at_step, interruptible):
    problem, solver = _problem(streamed), _fitting(VARIANTS[name], streamed)
    expected = _solve(solver, problem)
    saving = dataclasses.replace(solver, checkpoint=path)  # saved at the interrupt, and not before
    at_step(37, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.warns(ConvergenceWarning, match="was interrupted after 37 iterations"):
        assert saving.solve(problem).report.reason is Reason.INTERRUPTED
    assert _state(path)["seen"] == 7
    at_step(10**6, _crash)
    _same(_solve(saving, problem), expected)


def test_an_interrupt_while_a_callback_is_told(path):
    """By a handler of the user's: the epoch is not judged yet, so what was saved before it ended is gone on from."""
    problem, solver = _problem(), _fitting(VARIANTS["4-exact"], False)
    expected = _solve(solver, problem, held_out=_held_out(problem))

    def interrupted(progress):
        if progress.epochs == 4:
            raise KeyboardInterrupt

    saving = dataclasses.replace(solver, checkpoint=path, every=ALWAYS)
    found = _solve(saving, problem, held_out=_held_out(problem), callback=interrupted)
    assert found.report.reason is Reason.INTERRUPTED
    _same(_solve(saving, problem, held_out=_held_out(problem)), expected)


@pytest.mark.parametrize("streamed", [False, True], ids=["tensors", "stream"])
def test_a_solve_that_runs_out_of_time_tells_of_a_part_of_an_epoch(streamed, path, at_step, monkeypatch):
    """And judges what it found; a larger budget goes on as if there had been none."""
    now = SimpleNamespace(value=0.0, perf_counter=lambda: now.value)
    monkeypatch.setattr(run, "time", now)

    def tick():
        now.value += 1

    at_step(1, tick)
    problem, held_out = _problem(streamed, noise=0.0), _held_out(_problem())
    held_out = held_out[0], held_out[1] / 0.3
    solver = _fitting(dataclasses.replace(VARIANTS["4-plain"], patience=None), streamed)
    expected = _solve(solver, problem, held_out=held_out)
    seen = []
    saving = dataclasses.replace(solver, checkpoint=path, max_seconds=20)
    with pytest.warns(ConvergenceWarning, match=r"ran out of time after 20 .*best so far\. Raise max_seconds"):
        found = saving.solve(problem, held_out=held_out, callback=lambda p: seen.append((p.epochs, p.held_out)))
    assert found.report.iterations == 20 and len(found.report.history) == 3
    assert [epochs for epochs, _ in seen] == pytest.approx([1, 1 + 1 / 3])
    assert found.report.work["projections"] == 4  # 7, 14, 15, and what was open after 20
    best = min(seen, key=lambda one: float(one[1].square().mean()))
    assert torch.equal(found.report.held_out[-1][2], best[1])
    assert best is seen[-1]  # that of the part
    _same(_solve(dataclasses.replace(saving, max_seconds=1e6), problem, held_out=held_out), expected)


def test_the_step_falls_with_the_time_that_is_used(at_step, monkeypatch):
    now = SimpleNamespace(value=0.0, perf_counter=lambda: now.value)
    monkeypatch.setattr(run, "time", now)
    steps = []
    original = Model.step

    def step(self, x, y, size, *args, **options):
        steps.append(size)
        now.value += 1
        return original(self, x, y, size, *args, **options)

    monkeypatch.setattr(Model, "step", step)
    _solve(EigenPro4(epochs=1000, max_seconds=40, block_size=BATCH, cooldown=0.25), _problem())
    shares = torch.tensor(steps) / steps[0]
    assert torch.allclose(shares[:31], torch.ones(31))
    assert torch.allclose(shares[31:], torch.linspace(0.9, 0.1, 9))


def test_a_solve_that_has_ended_stays_ended(path, at_step):
    problem = _problem()
    solver = EigenPro4(epochs=2, checkpoint=path)
    first = solver.solve(problem)
    at_step(1, _crash)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        again = solver.solve(problem)
    assert again.report.reason is Reason.FINISHED
    assert torch.equal(first.value, again.value)
    path.unlink()
    solver = dataclasses.replace(solver, epochs=50, patience=1)
    x, y = _data()
    at_step(10**6, _crash)
    early = solver.solve(problem, held_out=(x, 0.1 * y))
    at_step(1, _crash)
    again = solver.solve(problem, held_out=(x, 0.1 * y))
    assert early.report.reason is again.report.reason is Reason.EARLY
    assert torch.equal(early.value, again.value)


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(path, at_step):
    """A checkpoint in the middle of the second epoch."""

    def save(streamed=False, **choices):
        solver = _fitting(EigenPro4(**{"epochs": 3, "checkpoint": path, "every": ALWAYS, **choices}), streamed)
        at_step(21, _crash)
        with pytest.raises(Crash):
            solver.solve(_problem(streamed))
        at_step(10**6, _crash)
        return solver

    return save


def test_a_checkpoint_of_another_problem_is_refused(saved, path):
    solver = saved()
    before = path.read_bytes()
    x, y = _data()
    for problem, match in [
        (_problem(shift=1e-9), "the targets changed"),
        (_problem(noise=2.0), "the noise changed"),
        (InducingPointProblem(_problem().kernel, x + 1e-9, y, 1.0, x[:M].clone()), "the training inputs changed"),
        (InducingPointProblem(_problem().kernel, x, y, 1.0, x[:30].clone()), "problem: the inducing points changed"),
    ]:
        with pytest.raises(InputError, match=match):
            solver.solve(problem)
    for choices in ({"epochs": 4}, {"delay": 3}, {"cooldown": 0.1}, {"seed": 1}, {"patience": None}):
        with pytest.raises(InputError, match="the solver's choices changed"):
            dataclasses.replace(solver, **choices).solve(_problem())
    with pytest.raises(InputError, match="other held-out points"):
        solver.solve(_problem(), held_out=_held_out(_problem()))
    with (
        pytest.raises(InputError, match=r"what projection='auto' chose by free memory .* changed"),
        memory_budget(1),
    ):
        solver.solve(_problem())
    with pytest.raises(InputError, match="set 'exact' or 'inexact'"):
        dataclasses.replace(solver, projection="inexact").solve(_problem())
    assert path.read_bytes() == before
    with memory_budget(1):
        found = dataclasses.replace(solver, projection="exact").solve(_problem())
    assert torch.equal(found.value, dataclasses.replace(solver, checkpoint=None).solve(_problem()).value)


def test_a_stream_must_repeat_itself(saved, path, monkeypatch):
    monkeypatch.setattr(eigenpro, "_FRESH", 20)  # so that the set-up reads three batches
    solver = saved(True, rank=5, subsample_size=20, preconditioner="paper")
    with pytest.raises(InputError, match=r"ends within the 5 batches.*repeat itself"):
        solver.solve(_problem(True, batches=4))
    problem, (x, y) = _problem(), _data()
    x[30] += 1e-9
    changed = InducingPointProblem(problem.kernel, Stream(x, y), None, 1.0, problem.inducing_points)
    with pytest.raises(InputError, match="stream, which must repeat itself, changed"):
        solver.solve(changed)
    path.unlink()
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    shuffled = InducingPointProblem(problem.kernel, loader, None, 1.0, problem.inducing_points)
    with pytest.raises(InputError, match="checkpoint expects a stream that repeats itself"):
        solver.solve(shuffled)
    assert not path.exists()

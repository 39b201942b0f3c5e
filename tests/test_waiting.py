"""How often a solve waits for its device: once an iteration at the most, counted on a device that is simulated.

A wait is counted wherever it comes from: a solver, a preconditioner, a product.  What a solve does once, before and
after its iterations, is not limited: twice as many iterations may only add as many waits.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpytorch.kernels import MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel

import sketchgp
from problems import normal, points, quiet, relative
from simulated_device import DEVICE, OnDevice, moved, moved_module, simulated_device
from sketchgp.devices import here, sent
from sketchgp.operators import KernelMatrix, tiles
from sketchgp.operators.access import Access
from sketchgp.operators.engines import TRITON
from sketchgp.preconditioners import rpcholesky
from test_solver_contract import FULL, SOLVERS, STREAMS, make

CASES = {
    "ConjugateGradients": {"tol": 1e-12},
    "ConjugateGradients, posterior": {"tol": "posterior"},
    "ASkotch": {"block_size": 40, "tol": 1e-12},
    "EigenPro2": {"block_size": 40, "tol": 1e-12},
    "NystromPCG": {"rank": 5, "tol": 1e-9},
    "EigenPro4": {"projection": "inexact"},
    "EigenPro4, exact": {"projection": "exact"},
    "ConjugateGradients, far": {"tol": 1e-12},
    "ASkotch, far, version 1": {"block_size": 80, "tol": 1e-12, "version": 1, "rank": 0},
    "ASkotch, far": {"block_size": 80, "tol": 1e-12},
    "KRILL": {"tol": 1e-14},
    "KRILL, far, dims": {"tol": 1e-14},
    "DoublyStochastic, dims": {"num_features": 64, "block_size": 16, "batch_size": 60},
}
KERNELS = {
    "dims": lambda: RBFKernel(active_dims=(0, 1)) + MaternKernel(nu=1.5, active_dims=(1, 2)),
    "called": lambda: PolynomialKernel(power=2),
}


@pytest.fixture
def waits(monkeypatch):
    """The device, and what waited for it; Triton's engine, which needs a real one, is not there."""
    monkeypatch.setattr(type(TRITON), "missing", lambda self, matrix: "it needs a real device")
    with simulated_device(monkeypatch) as counter:
        yield counter


def _problem(name, dtype, device):
    kind, *words = name.split(", ")
    problem = make(kind, dtype=dtype)
    kernel, x, y, z = problem.kernel, problem.x, problem.y, getattr(problem, "inducing_points", None)
    for word in set(words) & set(KERNELS):
        kernel = ScaleKernel(KERNELS[word]()).to(dtype).requires_grad_(False)
    if "far" in words:
        x = x.clone()
        x[:5] = 1e5
        z = None if z is None else torch.cat([x[:2], z[2:]])
    if device:
        kernel, x, y, z = moved_module(kernel), moved(x), moved(y), None if z is None else moved(z)
    with sketchgp.settings.memory_budget(1000):
        if kind in STREAMS:
            return sketchgp.RandomFeatureProblem(kernel, x, y, 0.1)
        if z is None:
            return sketchgp.FullProblem(kernel, x, y, 0.1)
        return sketchgp.InducingPointProblem(kernel, x, y, 0.1, z)


def _solved(name, budget, dtype, device, **more):
    kind, *words = name.split(", ")
    solver, unit = SOLVERS[kind]
    options = {"preconditioner": sketchgp.RPCholesky(rank=20)} if kind == "ConjugateGradients" else {}
    options |= {"matmul": "tiled"} if "far" in words and kind in FULL else {}
    with quiet():
        solver = dataclasses.replace(solver, **CASES[name] | more, **{unit: budget})
        return solver.solve(_problem(name, dtype, device), progress=False, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_solver_waits_once_an_iteration(name, waits):
    steps, counts = [], []
    few = 1 if SOLVERS[name.split(",")[0]][1] == "epochs" else 2
    for budget in (few, 2 * few):
        waits.clear()
        solution = _solved(name, budget, torch.float32, device=True)
        work = solution.report.work
        steps.append(work["iterations"] + work.get("projection_iterations", 0))
        counts.append(waits.copy())
    assert isinstance(solution.value, OnDevice)
    more = counts[1] - counts[0]
    assert steps[1] > steps[0]
    assert more.total() <= steps[1] - steps[0], more
    assert relative(solution.value.cpu(), _solved(name, 2 * few, torch.float32, device=False).value) < 1e-3


@pytest.mark.parametrize("method", ["accelerated", "block"])
def test_pivots_wait_once_a_round(method, waits, monkeypatch):
    """In tiles of the matrix, of which it takes several to hold the columns of a round."""
    monkeypatch.setattr(tiles, "_LEAST_ENTRIES", 400)
    monkeypatch.setattr(tiles, "_CUDA_ENTRIES", 400)
    kernel = moved_module(make("ASkotch", dtype=torch.float32).kernel)
    x = moved(points(100, 3, dtype=torch.float32))
    rounds, counts = [], []
    for rank in (20, 60):
        waits.clear()
        asked = []

        def enough(done, left, asked=asked):
            asked.append(done)
            return False

        matrix = Access(KernelMatrix.of(kernel, x, engine="tiled"))
        stream = torch.Generator().manual_seed(1)
        found = rpcholesky(matrix, rank, generator=stream, method=method, block_size=10, enough=enough)
        assert found.factor.shape == (100, rank)
        rounds.append(len(asked))
        counts.append(waits.copy())
        chosen = matrix.columns(found.pivots).inner
        assert relative(found.factor.inner @ found.factor.inner[found.pivots.inner].mT, chosen) < 1e-10
    assert rounds[1] > rounds[0] + 3
    assert (more := counts[1] - counts[0]).total() <= rounds[1] - rounds[0], more


def test_pivots_that_are_not_needed_take_no_random_numbers():
    kernel = make("ASkotch").kernel
    matrix, stream = Access(KernelMatrix.of(kernel, points(50, 3))), torch.Generator().manual_seed(1)
    before = stream.get_state()
    assert rpcholesky(matrix, 10, generator=stream, enough=lambda *_: True).factor.shape == (50, 0)
    assert torch.equal(stream.get_state(), before)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x + torch.tensor([1.0, 2.0]).to(DEVICE),
        lambda x: x + x.new_tensor(3.0),
        lambda x: torch.equal(x, x),
        lambda x: torch.linalg.eigh(x.diag()),
    ],
)  # fmt: skip
def test_what_waits_is_counted(wait, waits):
    x = moved(normal(2))
    x = (x * 2 + torch.ones(2, dtype=x.dtype, device=DEVICE)).where(x > 0, x[:])
    assert not waits
    wait(x)
    assert waits.total() == 1


def test_what_the_cpu_knows_is_not_fetched(waits):
    """What was sent, and what was fetched once, until it is changed."""
    values = torch.arange(3)
    there = sent(values, DEVICE)
    assert here(there) is values and not waits
    other = there + 1
    assert here(other).tolist() == here(other).tolist() == [1, 2, 3] and waits.total() == 1
    there[0] = 7
    assert here(there).tolist() == [7, 1, 2] and waits.total() == 2
    assert here(values) is values is sent(values, torch.device("cpu"))


def test_two_devices_do_not_mix(waits):
    with pytest.raises(RuntimeError, match="same device"):
        moved(normal(3)) + normal(3)

"""Ranks that die, and are started again from a checkpoint: by as many, by others, and by one alone.

Run as a script, this file forks the ranks and kills them: see :func:`_kill_and_restart`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
import torch.distributed as dist
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from forks import CAN_FORK, die, fork_rank, one_thread, run_script
from gp_models import iterative
from problems import normal, points, quiet, relative, set_scales
from sketchgp import (
    KRILL,
    ASkotch,
    ConjugateGradients,
    DoublyStochastic,
    EigenPro4,
    FullProblem,
    InducingPointProblem,
    RandomFeatureProblem,
    RPCholesky,
)
from sketchgp.distributed import RankError, sharded
from sketchgp.distributed.block import meet

N = 101  # no multiple of 2 or 3
ALWAYS = 1e-9  # seconds between two writes: one every window
SAME, OTHER = 2, 3  # ranks that die and are started again; ranks that go on in their place
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CAN_FORK and dist.is_available() and dist.is_gloo_available()), reason="no gloo, no fork"),
]
Call = Callable[..., Any]


def _kernel():
    return set_scales(ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3)), 1.3, 0.6).double()


def _data() -> tuple[Tensor, Tensor]:
    x = points(N)
    return x, (x @ (3 * normal(3, 2, seed=2))).sin() + 0.2 * normal(N, 2, seed=1)


def _full(solver: Call, callback: Call | None, **options: Any) -> Tensor:
    problem = FullProblem(_kernel(), *_data(), 1e-3)
    return solver().solve(problem, callback=callback, **options).value


def _inducing(solver: Call, callback: Call | None) -> Tensor:
    x, y = _data()
    return solver().solve(InducingPointProblem(_kernel(), x, y, 0.05, x[:20].clone()), callback=callback).value


def _random_features(solver: Call, callback: Call | None) -> Tensor:
    return solver().solve(RandomFeatureProblem(_kernel(), *_data(), 0.05), callback=callback).value


class _Model(gpytorch.models.ExactGP):
    def __init__(self) -> None:
        x, y = _data()
        super().__init__(x, y[:, 0], gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), _kernel()
        self.double()
        self.likelihood.noise = 0.05

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _fit(options: Call, callback: Call | None) -> Tensor:
    model = sketchgp.accelerate(_Model())
    with iterative(tol=1e-12, probes=5):
        sketchgp.fit(
            model,
            objective="probes",
            iterations=4,
            progress=False,
            callback=callback and (lambda *_: callback()),
            **options(),
        )
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# what is solved, and by what, given its checkpoint
CASES: dict[str, tuple[Call, Call]] = {
    "gradients": (
        lambda s, c: _full(s, c, preconditioner=RPCholesky(rank=40)),
        lambda **o: ConjugateGradients(tol=1e-12, **o),
    ),
    "askotch": (_full, lambda **o: ASkotch(block_size=25, max_passes=8, **o)),
    "krill": (_inducing, lambda **o: KRILL(tol=1e-12, sketch_size=22, **o)),
    "eigenpro4": (_inducing, lambda **o: EigenPro4(epochs=3, **o)),
    "doubly stochastic": (
        _random_features,
        lambda **o: DoublyStochastic(num_features=64, block_size=16, batch_size=20, epochs=3, **o),
    ),
    "fit": (_fit, lambda **o: o),
}
MOVED = ("gradients", "eigenpro4")  # what three ranks go on with, too; one rank goes on with all
DEATHS = {  # the rank that is killed, and when
    "gradients": (1, "a step"),
    "askotch": (0, "half written"),
    "krill": (0, "before renaming"),
    "eigenpro4": (1, "a step"),
    "doubly stochastic": (1, "a step"),
    "fit": (0, "before renaming"),
}


def _solved(name: str, path: Path | None = None, every: float = 60.0, callback: Call | None = None) -> Tensor:
    run, solver = CASES[name]
    options = {} if path is None else {"checkpoint": path, "every": every}
    with quiet():
        return run(lambda: solver(**options), callback)


# --- the script -----------------------------------------------------------------------------------------------


def _ranks(count: int, store: Path, work: Callable[[int], None]) -> list[int]:
    """The exit statuses of forked ranks, or the signals that ended them, negative."""
    children = [fork_rank(count, rank, store, partial(work, rank), limit=150) for rank in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _save_all(target: Path, paths: Mapping[str, Path | None]) -> Callable[[int], None]:
    """Of each, what a solve comes to that goes on from its path."""

    def work(rank: int) -> None:
        with sharded():
            torch.save({name: _solved(name, path) for name, path in paths.items()}, f"{target}-{rank}")

    return work


def _dying(name: str, path: Path, target: Path) -> Callable[[int], None]:
    """One rank is killed; the others say how they ended."""

    def work(rank: int) -> None:
        victim, moment = DEATHS[name]
        seen = [0]

        def count(*_: Any) -> None:
            seen[0] += 1
            if rank == victim and seen[0] == 3:
                die()

        if moment == "half written" and rank == victim:
            save = torch.save

            def half(contents: Any, file: Any) -> None:
                if seen[0] == 2:
                    file.write(b"PK")
                    file.flush()
                count()
                save(contents, file)

            torch.save = half  # type: ignore
        elif moment == "before renaming" and rank == victim:
            replace = os.replace
            os.replace = lambda *names: (count(), replace(*names))  # type: ignore
        began = time.perf_counter()
        try:
            with sharded():
                _solved(name, path, ALWAYS, count if moment == "a step" else None)
        except RankError as error:
            torch.save({"error": str(error), "seconds": time.perf_counter() - began}, f"{target}-{rank}")

    return work


def _kill_and_restart(directory: Path) -> None:
    """Solve by two ranks; begin anew with checkpoints, kill one of the ranks, and go on by two, and by three."""
    one_thread()
    names = list(CASES)
    for name in (*names, "fit"):  # children inherit all that is imported by it
        _solved(name, directory / f"{name}.warm")
    assert _ranks(SAME, directory / "store", _save_all(directory / "expected", dict.fromkeys(names))) == [0, 0]
    for name in names:
        path = directory / f"{name}.pt"
        found = _ranks(SAME, directory / f"{name}.store", _dying(name, path, directory / f"{name}.died"))
        victim = DEATHS[name][0]
        assert found[victim] == -signal.SIGKILL, (name, found)
        assert found[1 - victim] == 0, (name, found)
        for count in (1, OTHER):
            shutil.copy(path, directory / f"{name}.{count}.pt")
    for count, marked, some in ((SAME, "", names), (OTHER, f".{OTHER}", MOVED)):
        paths = {name: directory / f"{name}{marked}.pt" for name in some}
        statuses = _ranks(count, directory / f"store of {count}", _save_all(directory / f"{count}", paths))
        assert not any(statuses), (count, statuses)


# --- tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    found = tmp_path_factory.mktemp("faults")
    run_script(__file__, found, limit=300)
    return found


every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_other_ranks_end_when_one_is_killed(directory, name):
    died = torch.load(directory / f"{name}.died-{1 - DEATHS[name][0]}")
    assert "gone" in died["error"]
    assert died["seconds"] < 30


@every_case
def test_as_many_ranks_end_with_the_same_bits(directory, name):
    expected = torch.load(directory / "expected-0")[name]
    for rank in range(SAME):
        assert torch.equal(torch.load(directory / f"{SAME}-{rank}")[name], expected)


@every_case
def test_another_number_of_ranks_comes_to_the_same_answer(directory, name):
    expected = torch.load(directory / "expected-0")[name]
    close = 1e-6 if name == "fit" else 1e-9
    assert relative(_solved(name, directory / f"{name}.1.pt"), expected) < close
    if name in MOVED:
        assert relative(torch.load(directory / f"{OTHER}-0")[name], expected) < close


def test_ranks_that_are_started_again_do_not_meet_those_that_are_gone():
    """They share a store with what those have left in it; rank 1 comes late."""
    store, limit, found = dist.HashStore(), timedelta(seconds=30), []
    for _ in range(3):
        with ThreadPoolExecutor() as pool:
            ranks = [pool.submit(meet, store, 0, 3, limit), pool.submit(meet, store, 2, 3, limit)]
            time.sleep(0.05)
            ranks.append(pool.submit(meet, store, 1, 3, limit))
            names = {rank.result() for rank in ranks}
        assert len(names) == 1
        found += names
    assert len(set(found)) == 3


def test_a_rank_that_does_not_come_is_told():
    with pytest.raises(RankError, match=r"gone: \[1\] did not come within 0.05 s"):
        meet(dist.HashStore(), 0, 2, timedelta(seconds=0.05))


if __name__ == "__main__":
    _kill_and_restart(Path(sys.argv[1]))

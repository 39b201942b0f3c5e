"""The ablations of the ASkotch paper (its appendix C.5 to C.8) on real data: held-out error against time and work.

What are acceleration, preconditioned blocks, the size of the blocks and the rank worth?  Every run starts from zero,
in float32 with ``matmul="auto"``, and ends after the same time.  The clock stands still while the held-out error is
computed (from a stored matrix of test against training points); what a solver does before its first step is on it,
storing the kernel matrix too.  The work is the number of entries of the kernel matrix that were evaluated or read.

    python benchmarks/ablation.py --data DIRECTORY            # three quarters of an hour; resumes
    python benchmarks/ablation.py --data DIRECTORY --quick    # two small problems, half a second a run
    python benchmarks/ablation.py --report                    # tables and pictures again, nothing measured
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import sketchgp
from ablation_report import GROUPS, pictures, report
from blockwise import Trace, follow_blockwise, follow_conjugate_gradients, warm_up
from common import load_arrays, standardise
from runner import Benchmark, Group
from sketchgp.operators import KernelMatrix
from sketchgp.solvers.system import automatic_block_size

BUDGET = 4 * 2**30  # bytes of one stored matrix, so that what "auto" chooses does not depend on free memory
RANKS = (10, 100, 500)
SHARE = 20  # blocks of n / SHARE in the ablation of the rank
LOOKS = 4  # at the held-out error, a pass


@dataclass(frozen=True)
class Split:
    """Raw arrays: training part, test part."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


@dataclass(frozen=True)
class Case:
    """One problem.  ``metric``: "smape" (and "mae"), "error" (rate of wrong signs) or "rmse" (standardised targets).

    :ivar load: directory, training rows, test rows -> Split.
    :ivar files: what the directory must hold.
    """

    name: str
    words: str
    load: Callable[[Path, int, int], Split]
    files: tuple[str, ...]
    kernel: Callable[[], gpytorch.kernels.Kernel]
    lengthscale: float
    noise: float
    metric: str
    train: int
    test: int
    seconds: float


def _take(arrays: dict[str, np.ndarray], train: np.ndarray, test: np.ndarray, positive: int | None) -> Split:
    x, y = arrays["X"], arrays["y"].astype(np.float64)
    if positive is not None:
        y = np.where(y == positive, 1.0, -1.0)
    return Split(x[train], y[train], x[test], y[test])


def _random_split(name: str, positive: int | None = None) -> Callable[[Path, int, int], Split]:
    def load(directory: Path, train: int, test: int) -> Split:
        arrays = load_arrays(directory, name)
        rows = np.random.RandomState(0).permutation(len(arrays["y"]))
        return _take(arrays, rows[:train], rows[train : train + test], positive)

    return load


def _cod_rna(directory: Path, train: int, test: int) -> Split:
    """Training rows from the set's training part, test rows from its test part."""
    arrays, draw = load_arrays(directory, "cod_rna"), np.random.RandomState(0)
    parts = [draw.permutation(np.flatnonzero(arrays["is_test"] == part)) for part in (0, 1)]
    return _take(arrays, parts[0][:train], parts[1][:test], 1)


def _homo(directory: Path, train: int, test: int) -> Split:
    """The 435 entries of the sorted Coulomb matrix, by the ``make_cm.py`` beside the geometries; HOMO energies, eV."""
    spec = importlib.util.spec_from_file_location("make_cm", directory / "make_cm.py")
    assert spec is not None and spec.loader is not None
    make_cm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_cm)
    y = load_arrays(directory, "qm9_homo_cmeig")["y"].astype(np.float64)
    rows = np.random.RandomState(0).permutation(len(y))[: train + test]
    x = make_cm.build(rows, str(directory / "qm9_geometry.npz"))
    return Split(x[:train], y[rows[:train]], x[train:], y[rows[train:]])


CASES = (
    Case("homo", "QM9 HOMO, l1 Laplace 5120, 435 inputs", _homo, ("qm9_geometry", "qm9_homo_cmeig"),
         sketchgp.LaplaceKernel, 5120, 1e-3, "smape", 8_000, 10_000, 45),
    Case("higgs", "higgs, RBF 3.8, 28 inputs", _random_split("higgs_18k", 1), ("higgs_18k",),
         gpytorch.kernels.RBFKernel, 3.8, 0.315, "error", 15_000, 3_484, 25),
    Case("cod_rna", "cod_rna, RBF 2, 8 inputs", _cod_rna, ("cod_rna",),
         gpytorch.kernels.RBFKernel, 2, 0.1, "error", 25_000, 10_000, 35),
    Case("taxi", "nyc_green_taxi, RBF 1, 10 inputs", _random_split("nyc_green_taxi"), ("nyc_green_taxi",),
         gpytorch.kernels.RBFKernel, 1, 0.1, "rmse", 25_000, 10_000, 35),
)  # fmt: skip


QUICK = ("higgs", "taxi")


class Loaded:
    """A case, ready: the problem in float32, and what an iterate is worth on the test points."""

    def __init__(self, case: Case, directory: Path, train: int, test: int) -> None:
        split = case.load(directory, train, test)
        inputs, test_inputs = (torch.as_tensor(part).float() for part in standardise(split.x, split.test_x))
        # Signs stay -1 and +1, so that the sign of a prediction is the class.
        self.shift, self.scale = (0.0, 1.0) if case.metric == "error" else (split.y.mean(), split.y.std())
        self.metric, self.test_y = case.metric, torch.as_tensor(split.test_y)
        kernel = case.kernel()
        kernel.lengthscale = case.lengthscale
        y = torch.as_tensor((split.y - self.shift) / self.scale).float()
        self.problem = sketchgp.FullProblem(kernel, inputs, y, case.noise)
        self.cross = KernelMatrix.of(kernel, test_inputs, inputs, engine="tiled").detach().to_dense()
        warm_up(kernel, inputs.shape[1])

    def measure(self, weights: Tensor) -> dict[str, float]:
        predicted = (self.cross @ weights.to(self.cross.dtype)).double().squeeze(-1) * self.scale + self.shift
        wrong = (predicted - self.test_y).abs()
        if self.metric == "error":
            return {"error": float((predicted * self.test_y <= 0).double().mean())}
        if self.metric == "rmse":
            return {"rmse": float(wrong.square().mean().sqrt() / self.scale)}
        size = (predicted.abs() + self.test_y.abs()) / 2
        return {"smape": float((wrong / size).mean()), "mae": float(wrong.mean())}


def solvers(n: int, noise: float) -> dict[str, Any]:
    """Every method, by its label."""
    same: dict[str, Any] = {"tol": 1e-4, "max_passes": 1e9}
    automatic = automatic_block_size(n, torch.device("cpu"))
    ranked = same | {"block_size": max(1, n // SHARE)}
    authors = {"block_size": max(1, n // 100), "rank": 100, "mu": noise, "sampling": "uniform"}
    found = {
        "ASkotch": sketchgp.ASkotch(**same),
        "Skotch": sketchgp.Skotch(**same),
        "CG, RPCholesky": sketchgp.ConjugateGradients(tol=1e-4),
        "EigenPro2": sketchgp.EigenPro2(**same),
        "ASkotch, version 1": sketchgp.ASkotch(version=1, **same),
        "ASkotch, authors' defaults": sketchgp.ASkotch(**same, **authors),
        "ASkotch, no preconditioner": sketchgp.ASkotch(rank=0, **same),
        "Skotch, no preconditioner": sketchgp.Skotch(rank=0, **same),
        "ASkotch, blocks / 4": sketchgp.ASkotch(block_size=max(1, automatic // 4), **same),
        "ASkotch, blocks x 4": sketchgp.ASkotch(block_size=min(n, 4 * automatic), **same),
        f"ASkotch, b = n/{SHARE}, exact": sketchgp.ASkotch(**ranked),
        f"Skotch, b = n/{SHARE}, exact": sketchgp.Skotch(**ranked),
    }
    found |= {f"ASkotch, b = n/{SHARE}, rank {rank}": sketchgp.ASkotch(rank=rank, **ranked) for rank in RANKS}
    found |= {f"Skotch, b = n/{SHARE}, rank {rank}": sketchgp.Skotch(rank=rank, **ranked) for rank in (10, 100)}
    return found


def measure(loaded: Loaded, solver: Any, seconds: float) -> dict[str, Any]:
    """One run from zero."""
    trace = Trace(loaded.measure, limit=seconds, spacing=0.02)
    with sketchgp.settings.memory_budget(BUDGET):
        if isinstance(solver, sketchgp.ConjugateGradients):
            run = follow_conjugate_gradients(solver, sketchgp.RPCholesky(), loaded.problem, trace)
        else:
            run = follow_blockwise(solver, loaded.problem, trace, len(loaded.problem.x) // LOOKS)
    return run | {"solver": repr(solver), "course": trace.columns}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, help="a run (25 to 45)")


def problem(options: argparse.Namespace) -> dict[str, Any]:
    return {"dtype": "float32", "matmul": "auto", "memory_budget": BUDGET, "row_seed": 0, "solver_seed": 0,
            "tolerance": 1e-4, "rank_blocks": f"n/{SHARE}"}  # fmt: skip


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for case in CASES:
        if options.quick and case.name not in QUICK:
            continue
        if case.name == "homo" and not (directory / "make_cm.py").is_file():
            tqdm.write(f"{case.name}: no make_cm.py in the data directory, left out")
            continue
        seconds = options.seconds or (0.5 if options.quick else case.seconds)
        train, test = (min(case.train, 1500), 500) if options.quick else (case.train, case.test)
        yield Group(
            ("problems", case.name, "runs"),
            [(label, (case, solver, seconds)) for label, solver in solvers(train, case.noise).items()],
            load=partial(Loaded, case, directory, train, test),
            needs=case.files,
            same={"words": case.words, "noise": case.noise, "lengthscale": case.lengthscale, "n_train": train,
                  "n_test": test, "metric": case.metric, "seconds": seconds},
            facts={"automatic_block_size": automatic_block_size(train, torch.device("cpu"))},
        )  # fmt: skip


def words(run: dict[str, Any]) -> str:
    course = run["course"]
    metric = next(name for name in ("smape", "error", "rmse") if name in course)
    return (
        f"{metric} {min(course[metric]):.5g} at best, {course[metric][-1]:.5g} at the end, residual "
        f"{course['residual'][-1]:.1e}, {course['seconds'][-1]:.1f} s ({run['reason']})"
    )


BENCHMARK = Benchmark(
    doc=__doc__,
    name="ablation",
    quick="two small problems, half a second a run",
    problem=problem,
    groups=groups,
    perform=lambda loaded, task: measure(loaded, *task[1:]),
    report=report,
    picture=pictures,
    say=words,
    what="problems",
    options=add_options,
    head={"groups": GROUPS},
)


if __name__ == "__main__":
    BENCHMARK.main()

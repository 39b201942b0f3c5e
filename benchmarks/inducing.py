"""KRILL against Falkon and plain conjugate gradients on the inducing-point problem (Figure 3 of the KRILL paper), and
the time of each against the number of points (the shape of its Figure 9).

Problem (Diaz, Epperly, Frangella, Tropp and Webber, arXiv:2304.12465, section 3): N = 40,000 rows drawn at random (or
all), inputs standardised, squared exponential kernel with bandwidth 3, mu / N = 1e-7, k = sqrt(N) and N / 10 inducing
points drawn uniformly, 100 iterations, relative residual of the normal equations 1e-4.  Everything in float64.

    python benchmarks/inducing.py --data DIRECTORY            # half an hour on one core; resumes
    python benchmarks/inducing.py --data DIRECTORY --quick    # three sets, N = 1500
    python benchmarks/inducing.py --report                    # tables and pictures again, nothing measured
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from common import has_data, load_arrays, standardise, subsample, targets
from inducing_report import picture, report, time_picture
from runner import Benchmark, Group
from sketchgp.solvers import InducingPointProblem, NormalEquationsSolver
from testbed import QUICK_SETS, SETS, DataSet

ROWS = 40_000
BANDWIDTH = 3.0
MU_OVER_N = 1e-7
TOLERANCE = 1e-4
MAX_ITERATIONS = 100
TINY = {"cod_rna": 2e-10, "higgs_18k": 2e-10}  # mu / N of the paper's large example
TIMED = ("uci_kin40k", 20_000, 1e-7, (250, 500, 1000, 2000, 4000))  # set, N, mu / N, k
DIRECT_LIMIT = 2000  # k up to which the direct solve is timed


class Plain(NormalEquationsSolver):
    """Without a preconditioner."""

    def _bytes(self, problem: InducingPointProblem) -> int:
        return 16 * problem.m**2

    def preconditioner(self, matrix: Any, targets: Tensor) -> None:
        return None

    def _words(self, problem: InducingPointProblem) -> tuple[str, str]:
        return "none", ""


def solvers(tolerance: float, iterations: int) -> dict[str, Any]:
    same: dict[str, Any] = {"tol": tolerance, "max_iterations": iterations}
    return {"KRILL": sketchgp.KRILL(**same), "Falkon": sketchgp.Falkon(**same), "none": Plain(**same)}


def load(directory: Path, data: DataSet, rows: int, k: int, mu_over_n: float) -> sketchgp.InducingPointProblem:
    """Rows by seed 0, standardised; the inducing points are k of them, by seed 1."""
    x, y = subsample(load_arrays(directory, data.name), rows, seed=0)
    (inputs,), (outputs,) = standardise(x), standardise(targets(y, data.positive))
    points = torch.as_tensor(inputs).double()
    chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(1))[:k]
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = BANDWIDTH
    return sketchgp.InducingPointProblem(
        kernel, points, torch.as_tensor(outputs).double(), mu_over_n * len(points), points[chosen]
    )


def measure(problem: sketchgp.InducingPointProblem, solver: Any) -> dict[str, Any]:
    """One solve: iterations, the true residual at the end, the course of the recurrence's, seconds."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        report_ = solver.solve(problem).report
    history = report_.history.max(dim=1).values
    reached = (history <= TOLERANCE).nonzero()  # solvers go on from there where predictions are still off
    return {
        "iterations": int(reached[0]) if len(reached) else report_.iterations,
        "true_residual": report_.max_residual,
        "converged": report_.max_residual <= TOLERANCE,
        "seconds": time.perf_counter() - start,
        "setup_seconds": report_.setup_seconds,
        "history": history.tolist(),
    }


def about(options: Any) -> dict[str, Any]:
    return {"rows": 1500 if options.quick else ROWS, "bandwidth": BANDWIDTH, "mu_over_n": MU_OVER_N,
            "tolerance": TOLERANCE, "max_iterations": MAX_ITERATIONS, "row_seed": 0, "point_seed": 1,
            "dtype": "float64"}  # fmt: skip


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    rows = about(options)["rows"]
    for data in SETS:
        if options.quick and data.name not in QUICK_SETS:
            continue
        n = min(rows, len(load_arrays(directory, data.name)["y"])) if has_data(directory, data.name) else rows
        settings = [("sqrt", math.isqrt(n), MU_OVER_N), ("tenth", n // 10, MU_OVER_N)]
        if data.name in TINY:
            settings += [("tiny", math.isqrt(n), TINY[data.name]), ("tiny tenth", n // 10, TINY[data.name])]
        for label, k, mu_over_n in settings:
            yield Group(
                ("sets", data.name, "runs"),
                [(f"{name}, {label}", ({"k": k, "mu_over_n": mu_over_n}, solver))
                 for name, solver in solvers(TOLERANCE, MAX_ITERATIONS).items()],
                load=partial(load, directory, data, rows, k, mu_over_n),
                needs=(data.name,),
                same={"n": n},
                about=lambda loaded: {"inputs": loaded.inducing_points.shape[1]},
            )  # fmt: skip
    if not options.quick:
        yield from timed(directory)


def timed(directory: Path) -> Iterator[Group]:
    """Seconds to the tolerance against k, on one set."""
    name, rows, mu_over_n, sizes = TIMED
    for k in sizes:
        candidates = {**solvers(TOLERANCE, 1000), "QR": sketchgp.QR()}
        del candidates["none"]
        if k > DIRECT_LIMIT:
            del candidates["QR"]
        tasks = [(label, ({}, solver)) for label, solver in candidates.items()]
        yield Group(("times", str(k)), tasks, partial(load, directory, DataSet(name, None, ""), rows, k, mu_over_n),
                    needs=(name,))  # fmt: skip


def pictures(results: dict[str, Any], path: Path) -> None:
    picture(results, path.with_suffix(".png"))
    if results.get("times"):
        time_picture(results, path.with_name("inducing_times.png"))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="inducing",
    quick="three sets, N = 1500",
    problem=about,
    groups=groups,
    perform=lambda problem, task: {**task[0], **measure(problem, task[1])},
    report=report,
    picture=pictures,
    say=lambda run: f"{run['iterations']} iterations, residual {run['true_residual']:.1e}, {run['seconds']:.1f} s",
    what="sets",
)


if __name__ == "__main__":
    BENCHMARK.main()

"""KRILL against Falkon and plain conjugate gradients on the inducing-point problem (Figure 3 of the KRILL paper), and
the time of each against the number of points (the shape of its Figure 9).

Problem (Diaz, Epperly, Frangella, Tropp and Webber, arXiv:2304.12465, section 3): N = 40,000 rows drawn at random (or
all), inputs standardised, squared exponential kernel with bandwidth 3, mu / N = 1e-7, k = sqrt(N) and N / 10 inducing
points drawn uniformly, 100 iterations, relative residual of the normal equations 1e-4.  Everything in float64.

    python benchmarks/inducing.py --data DIRECTORY            # an hour on two cores; resumes
    python benchmarks/inducing.py --data DIRECTORY --quick    # three sets, N = 1500
    python benchmarks/inducing.py --report                    # tables and pictures again, nothing measured
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import warnings
from pathlib import Path
from typing import Any

import gpytorch
import torch
from tqdm import tqdm

import sketchgp
from common import (
    arguments,
    data_directory,
    has_data,
    load_arrays,
    load_average,
    machine,
    now,
    publish,
    read_json,
    results_directory,
    standardise,
    subsample,
    targets,
    write_json,
)
from inducing_report import picture, report, time_picture
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

    def preconditioner(self, matrix: Any) -> None:
        return None

    def _describe(self, problem: InducingPointProblem) -> str:
        return "none"


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
    return {
        "iterations": report_.iterations,
        "true_residual": report_.max_residual,
        "converged": report_.converged,
        "seconds": time.perf_counter() - start,
        "setup_seconds": report_.setup_seconds,
        "history": [float(value) for value in report_.history.max(dim=1).values],
    }


def main() -> None:
    parser = arguments(__doc__, "three sets, N = 1500")
    parser.add_argument("--only", help="only the sets whose name contains this text")
    options = parser.parse_args()
    path = results_directory(options.out, options.quick) / "inducing.json"
    results = {} if options.fresh else read_json(path)
    if not options.report:
        results = run_all(options, path, results)
    publish(path, results, report, "sets")
    picture(results, path.with_suffix(".png"))
    if results["times"]:
        time_picture(results, path.with_name("inducing_times.png"))


def run_all(options: argparse.Namespace, path: Path, old: dict[str, Any]) -> dict[str, Any]:
    directory = data_directory(options.data)
    rows = 1500 if options.quick else ROWS
    parameters = {"rows": rows, "bandwidth": BANDWIDTH, "mu_over_n": MU_OVER_N, "tolerance": TOLERANCE,
                  "max_iterations": MAX_ITERATIONS, "row_seed": 0, "point_seed": 1, "dtype": "float64"}  # fmt: skip
    if old and old.get("problem") != parameters:
        raise SystemExit(f"{path.name} holds results of other parameters; use --fresh or another --out.")
    results = {"machine": machine(), "problem": parameters, "sets": old.get("sets", {}), "times": old.get("times", {})}
    chosen = [data for data in SETS if not options.quick or data.name in QUICK_SETS]
    chosen = [data for data in chosen if not options.only or options.only in data.name]
    for data in tqdm(chosen, disable=None, unit="set"):
        if not has_data(directory, data.name):
            tqdm.write(f"{data.name}: not in the data directory, left out")
            continue
        n = min(rows, len(load_arrays(directory, data.name)["y"]))
        item = results["sets"].setdefault(data.name, {"n": n, "runs": {}})
        settings = [("sqrt", math.isqrt(n), MU_OVER_N), ("tenth", n // 10, MU_OVER_N)]
        if data.name in TINY:
            settings += [("tiny", math.isqrt(n), TINY[data.name]), ("tiny tenth", n // 10, TINY[data.name])]
        for label, k, mu_over_n in settings:
            todo = {name: s for name, s in solvers(TOLERANCE, MAX_ITERATIONS).items()
                    if f"{name}, {label}" not in item["runs"]}  # fmt: skip
            if not todo:
                continue
            problem = load(directory, data, rows, k, mu_over_n)
            item["inputs"] = problem.inducing_points.shape[1]
            for name, solver in todo.items():
                load_before = load_average()
                run = measure(problem, solver)
                item["runs"][f"{name}, {label}"] = {"k": k, "mu_over_n": mu_over_n, **run, "date": now(),
                                                    "load_before": load_before}  # fmt: skip
                write_json(path, results)
                tqdm.write(
                    f"{data.name}, k = {k}, mu/N = {mu_over_n:g}, {name}: {run['iterations']} iterations, residual "
                    f"{run['true_residual']:.1e}, {run['seconds']:.1f} s"
                )
            del problem
            gc.collect()
    if not options.quick and not options.only and has_data(directory, TIMED[0]):
        measure_times(directory, path, results)
    write_json(path, results)
    return results


def measure_times(directory: Path, path: Path, results: dict[str, Any]) -> None:
    """Seconds to the tolerance against k, on one set."""
    name, rows, mu_over_n, sizes = TIMED
    for k in sizes:
        problem = load(directory, DataSet(name, None, ""), rows, k, mu_over_n)
        runs = results["times"].setdefault(str(k), {})
        candidates = {**solvers(TOLERANCE, 1000), "QR": sketchgp.QR()}
        for label, solver in candidates.items():
            if label == "none" or label in runs or (label == "QR" and k > DIRECT_LIMIT):
                continue
            load_before = load_average()
            runs[label] = {**measure(problem, solver), "date": now(), "load_before": load_before}
            write_json(path, results)
            tqdm.write(f"{name}, k = {k}, {label}: {runs[label]['seconds']:.1f} s")


if __name__ == "__main__":
    main()

"""SketchySAGA with more inducing points than Falkon's matrices have room for: 311,000 taxi trips, 1 GiB of matrices.

Falkon and KRILL get as many inducing points as their m x m matrices fit into the budget with; SketchySAGA, which has
none, gets as many and more, up to ten times as many; EigenPro 4, which has none either but no tolerance, stands beside
it.  Kernel, hyperparameters and rows are those of ``taxi.py``, whose
results must be there; all run for the same time (or end earlier, at a residual of 1e-4); each is a process of its own,
whose peak memory is recorded.  The error is that of 10,000 test trips.

    python benchmarks/sketchysaga.py --data DIRECTORY            # half an hour on one core; resumes
    python benchmarks/sketchysaga.py --data DIRECTORY --quick    # 3,000 rows, three seconds a run
    python benchmarks/sketchysaga.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import sketchgp
from common import RESULTS, describe, number, read_json, table
from measure import current_memory_mb, high_water_mb
from runner import Benchmark, Group
from sketchgp.operators.tall import TallMatrix
from taxi import FULL, QUICK, Data, covariance

BUDGET = 2**30  # bytes for m x m matrices
BYTES = {"Falkon": 48, "KRILL": 64}  # times m^2, as their docstrings say
SECONDS = 240.0
SIZES = (4700, 10_000, 20_000, 47_000)  # of SketchySAGA
TOLERANCE = 1e-4


def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One solve, in this process; float32 data, the solver's own precision."""
    data = Data(directory, QUICK if task["quick"] else FULL)
    x, y, test_x = data.x.float(), data.y.float(), data.test_x.float()
    test_y, data = data.test_y, None
    gc.collect()
    kernel = covariance(x.shape[1], task["hyperparameters"]).float()
    z = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: task["m"]]].clone()
    problem = sketchgp.InducingPointProblem(kernel, x, y, task["hyperparameters"]["noise"], z)
    seconds, before, started = task["seconds"], current_memory_mb(), time.perf_counter()

    def late(_: Any) -> bool:
        return time.perf_counter() - started >= seconds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        if task["method"] == "SketchySAGA":
            solver = sketchgp.SketchySAGA(tol=TOLERANCE, max_seconds=seconds)
            solution = solver.solve(problem, progress=False)
        elif task["method"] == "EigenPro4":
            solver = sketchgp.EigenPro4(epochs=100, max_seconds=seconds, projection="inexact")
            solution = solver.solve(problem, progress=False)
        else:
            kind = {"Falkon": sketchgp.Falkon, "KRILL": sketchgp.KRILL}[task["method"]]
            solution = kind(tol=TOLERANCE).solve(problem, callback=late, progress=False)
    spent, report = time.perf_counter() - started, solution.report
    mean = TallMatrix(kernel, test_x, z).matmul(solution.value.unsqueeze(1)).squeeze(1)
    return {
        "rmse": float((mean - test_y).square().mean().sqrt()),
        "true_residual": report.max_residual,
        "reason": report.reason,
        "iterations": report.iterations,
        "seconds": spent,
        "setup_seconds": report.setup_seconds,
        "peak_memory_mb": high_water_mb(),
        "grown_mb": (high_water_mb() or 0.0) - (before or 0.0),
        "notes": report.notes,
    }


def report(results: dict[str, Any]) -> str:
    problem = results["problem"]
    rows = [[run["method"], f"{run['m']:,}", f"{run['rmse']:.4f}",
             None if run["method"] == "EigenPro4" else number(run["true_residual"], 2), run["iterations"],
             number(run["seconds"]), number(run["peak_memory_mb"]), number(run["grown_mb"])]
            for run in results["runs"].values() if "rmse" in run]  # fmt: skip
    return "\n".join([
        "# SketchySAGA where Falkon's matrices do not fit", "", describe(results["machine"]), "",
        f"Taxi trips, {problem['train']:,} training rows, the hyperparameters of taxi.json, uniform inducing points; "
        f"{problem['budget_bytes'] / 2**30:.3g} GiB for m x m matrices; {problem['seconds']:g} seconds each, or a "
        f"residual of {problem['tolerance']:g}. RMSE of {problem['test']:,} test rows, in deviations of the target.",
        "",
        table(["method", "m", "RMSE", "residual", "iterations", "seconds", "peak memory, MB", "above the data's, MB"],
              rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    known = read_json(RESULTS / "taxi.json").get("hyperparameters")
    if known is None:
        raise SystemExit("There are no hyperparameters in taxi.json; run taxi.py first.")
    sizes = QUICK if options.quick else FULL
    return {"train": sizes["train"], "test": sizes["test"],
            "budget_bytes": BUDGET // 1000 if options.quick else BUDGET,
            "seconds": 3.0 if options.quick else SECONDS, "tolerance": TOLERANCE, "seed": 0, "dtype": "float32",
            "hyperparameters": {name: known[name] for name in ("lengthscale", "outputscale", "noise")}}  # fmt: skip


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    about = problem(options)
    runs = [(method, math.isqrt(about["budget_bytes"] // factor)) for method, factor in BYTES.items()]
    runs += [("SketchySAGA", m // 30 if options.quick else m) for m in SIZES]
    runs += [("EigenPro4", m // 30 if options.quick else m) for m in SIZES[1:3]]
    common = {"seconds": about["seconds"], "quick": options.quick, "hyperparameters": about["hyperparameters"]}
    tasks = [(f"{method}, {m}", {"method": method, "m": m, **common}) for method, m in runs]
    yield Group(("runs",), tasks, needs=("nyc_green_taxi",))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="sketchysaga",
    quick="3,000 rows, three seconds a run",
    problem=problem,
    groups=groups,
    perform=lambda task, directory: {"method": task["method"], "m": task["m"], **perform(task, directory)},
    report=report,
    say=str,
    alone=Path(__file__),
)


if __name__ == "__main__":
    BENCHMARK.main()

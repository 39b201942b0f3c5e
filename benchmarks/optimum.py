"""How near EigenPro 3 and 4 come to the least-squares optimum on the same inducing points, with their default settings.

Ten epochs, noise 0, no held-out points to stop by; the optimum is the exact float64 fit with a ridge of 1e-8 n, next to
none.  Real sets, up to 10,000 training rows (seed 0) and a fifth of as many test rows, standardised, 500 uniform
inducing points (two seeds), squared exponential and Matern-3/2 kernels with lengthscale 3.  A number is the test RMSE
over that of the optimum.

    python benchmarks/optimum.py --data DIRECTORY            # ten minutes on one core; resumes
    python benchmarks/optimum.py --data DIRECTORY --quick    # one set, 1,000 rows
    python benchmarks/optimum.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from common import describe, load_arrays, median, standardise, subsample, table, targets
from runner import Benchmark, Group
from sketchgp.operators.tall import TallMatrix

SETS = {"uci_kin40k": None, "cpu_small": None, "ailerons": None, "diamonds": None, "nyc_green_taxi": None,
        "cod_rna": 1, "higgs_18k": 1, "covtype_40k": 1}  # fmt: skip
SOLVERS = {
    "EigenPro3": sketchgp.EigenPro3(),
    "EigenPro4": sketchgp.EigenPro4(),
    "EigenPro4, inexact": sketchgp.EigenPro4(projection="inexact"),
}
KERNELS = ("squared exponential", "Matern-3/2")
ROWS, POINTS, LENGTHSCALE, RIDGE, SEEDS = 12_000, 500, 3.0, 1e-8, (0, 1)


def load(directory: Path, name: str, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and targets, then test ones, float32."""
    x, y = subsample(load_arrays(directory, name), rows, seed=0)
    y, cut = targets(y, SETS[name]), len(y) * 5 // 6
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).numpy()
    x, y = x[order], y[order]
    (train_x, test_x), (train_y, test_y) = standardise(x[:cut], x[cut:]), standardise(y[:cut], y[cut:])
    a, b, c, d = (torch.as_tensor(part).float() for part in (train_x, train_y, test_x, test_y))
    return a, b, c, d


def measure(data: tuple[Tensor, Tensor, Tensor, Tensor], kernel_name: str, points: int, seed: int) -> dict[str, Any]:
    """Test RMSE of the optimum, and of each solver."""
    x, y, test_x, test_y = data
    kernel = gpytorch.kernels.MaternKernel(nu=1.5) if kernel_name == "Matern-3/2" else gpytorch.kernels.RBFKernel()
    kernel.lengthscale = LENGTHSCALE
    z = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(10 + seed))[:points]].clone()
    tall = TallMatrix(kernel, test_x, z, accurate=True)

    def rmse(weights: Tensor) -> float:
        return float((tall.matmul(weights.unsqueeze(1)).squeeze(1) - test_y).square().mean().sqrt())

    ridge = sketchgp.InducingPointProblem(kernel, x, y, RIDGE * len(x), z)
    found: dict[str, Any] = {"optimum": rmse(sketchgp.QR().solve(ridge).value)}
    problem = sketchgp.InducingPointProblem(kernel, x, y, 0.0, z)
    for name, solver in SOLVERS.items():
        started = time.perf_counter()
        solution = type(solver)(**{**vars(solver), "seed": seed}).solve(problem, progress=False)
        found[name] = {"rmse": rmse(solution.value), "seconds": time.perf_counter() - started,
                       "rank": solution.report.rank}  # fmt: skip
    return found


def report(results: dict[str, Any]) -> str:
    rows, worst = [], dict.fromkeys(SOLVERS, 0.0)
    for name in SETS:
        for kernel in KERNELS:
            runs = [r for r in results["runs"].values() if (r["set"], r["kernel"]) == (name, kernel)]
            if not runs:
                continue
            ratios = {solver: [r[solver]["rmse"] / r["optimum"] for r in runs] for solver in SOLVERS}
            worst = {solver: max(worst[solver], *ratios[solver]) for solver in SOLVERS}
            rows.append([name, kernel, f"{median([r['optimum'] for r in runs]):.4f}",
                         *(f"{median(ratios[solver]):.4f}" for solver in SOLVERS)])  # fmt: skip
    rows.append(["the worst", "", "", *(f"{worst[solver]:.4f}" for solver in SOLVERS)])
    problem = results["problem"]
    return "\n".join([
        "# EigenPro beside the least-squares optimum", "", describe(results["machine"]), "",
        f"{problem['points']} inducing points, ten epochs, default settings, {problem['dtype']}; test RMSE over that "
        "of the optimum on the same points, the median of two seeds.", "",
        table(["set", "kernel", "optimum: RMSE", *SOLVERS], rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    rows, points = (1200, 50) if options.quick else (ROWS, POINTS)
    return {"rows": rows, "points": points, "lengthscale": LENGTHSCALE, "ridge_over_n": RIDGE, "dtype": "float32"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = problem(options)
    for name in list(SETS)[: 1 if options.quick else None]:
        cells = [(kernel, seed) for kernel in KERNELS for seed in SEEDS]
        tasks = [(f"{name}, {kernel}, {seed}", (name, kernel, sizes["points"], seed)) for kernel, seed in cells]
        yield Group(("runs",), tasks, load=partial(load, directory, name, sizes["rows"]), needs=(name,))


def perform(data: tuple[Tensor, Tensor, Tensor, Tensor], task: tuple[str, str, int, int]) -> dict[str, Any]:
    name, kernel, points, seed = task
    return {"set": name, "kernel": kernel, "seed": seed, **measure(data, kernel, points, seed)}


BENCHMARK = Benchmark(
    doc=__doc__,
    name="optimum",
    quick="one set, 1,000 rows",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
)


if __name__ == "__main__":
    BENCHMARK.main()

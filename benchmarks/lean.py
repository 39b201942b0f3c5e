"""Solvers of the inducing-point problem that need no m x m matrix, at equal numbers of kernel evaluations.

How far are the predictions of Nystrom PCG, SketchySAGA and EigenPro 4 from the exact ones of the same points (QR) after
10, 20 and 40 passes?  A pass is n m kernel evaluations; those of Kzz, of projections and of the start count, too.  Real
sets, 10,000 training rows (seed 0), 1,000 uniform points, float64; Nystrom PCG with ranks 300 and 100, SketchySAGA with
300, EigenPro 4 as it chooses (316 for its projections, up to 250 directions).  Distances are measured at 2,000 test
points in deviations of the posterior (of DTC).  What the solvers that judge themselves said of it stands beside.

    python benchmarks/lean.py --data DIRECTORY            # ten minutes on one core; resumes
    python benchmarks/lean.py --data DIRECTORY --quick    # one set, 1,000 rows
    python benchmarks/lean.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from common import describe, median, number, table
from optimum import load
from runner import Benchmark, Group
from sketchgp.operators.tall import TallMatrix


@dataclass(frozen=True)
class Problem:
    """A data set, the kernel's smoothness (None: squared exponential), lengthscale and noise."""

    name: str
    nu: float | None
    lengthscale: float
    noise: float

    def __str__(self) -> str:
        kernel = "squared exponential" if self.nu is None else f"Matern-{int(2 * self.nu)}/2"
        return f"{self.name}, {kernel}, noise {self.noise:g}"


PROBLEMS = (
    Problem("cod_rna", None, 3.0, 4e-4),
    Problem("uci_kin40k", None, 2.0, 1e-2),
    Problem("uci_kin40k", 1.5, 2.0, 1e-2),
    Problem("nyc_green_taxi", 1.5, 3.0, 0.1),
    Problem("higgs_18k", None, 3.0, 0.3),
    Problem("covtype_40k", 1.5, 3.0, 1e-2),
)
ROWS, POINTS, RANKS, BUDGETS = 12_000, 1000, (300, 100), (10, 20, 40)
START = 1.5  # passes before the first iteration of Nystrom PCG: right-hand side, rows and Kzz of its preconditioner


class Exact:
    """The exact fit, and how far other weights predict from it, in posterior deviations of the test points."""

    def __init__(self, problem: sketchgp.InducingPointProblem, test_x: Tensor, test_y: Tensor) -> None:
        z, level = problem.inducing_points, problem.level
        self.tall = TallMatrix(problem.kernel, test_x, z, accurate=True)
        self.test_y = test_y.double()
        self.value = sketchgp.QR().solve(problem).value
        self.mean = self._mean(self.value)
        rows = torch.cat([tile for _, tile in self.tall.tiles()])
        kzz = problem.kzz()
        values, vectors = torch.linalg.eigh(kzz)
        root = values.clamp(min=torch.finfo(torch.float64).eps * float(values[-1])).sqrt()
        data = torch.cat([tile for _, tile in problem.tall(True).tiles()])
        factor = torch.linalg.qr(torch.cat([data, level**0.5 * root.unsqueeze(1) * vectors.mT]), mode="r").R
        within = level * torch.linalg.solve_triangular(factor.mT, rows.mT, upper=False).square().sum(dim=0)
        beyond = 1 - ((rows @ vectors) / root).square().sum(dim=1)  # kernels of variance 1
        self.deviation = (within + beyond.clamp(min=0)).sqrt()

    def _mean(self, value: Tensor) -> Tensor:
        return self.tall.matmul(value.unsqueeze(1)).squeeze(1)

    def rmse(self, mean: Tensor) -> float:
        return float((mean - self.test_y).square().mean().sqrt())

    def look(self, value: Tensor) -> dict[str, float]:
        mean = self._mean(value)
        far = (mean - self.mean).abs() / self.deviation
        return {"furthest": float(far.max()), "typical": float(far.square().mean().sqrt()),
                "rmse_over_exact": self.rmse(mean) / self.rmse(self.mean)}  # fmt: skip


def nystrom_pcg(problem: Any, exact: Exact, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pass_of_one = 1 + (problem.m + 1) / (2 * len(problem.x))
    for budget in BUDGETS:
        iterations = max(1, round((budget - START) / pass_of_one))
        solver = sketchgp.NystromPCG(rank=rank, tol=1e-3, max_iterations=iterations)
        started = time.perf_counter()
        solution = solver.solve(problem, progress=False)
        found[str(budget)] = {**exact.look(solution.value), "claimed": solution.report.max_deviations,
                              "residual": solution.report.max_residual, "iterations": solution.report.iterations,
                              "seconds": time.perf_counter() - started}  # fmt: skip
    return found


def sketchy_saga(problem: Any, exact: Exact) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for budget in BUDGETS:
        solver = sketchgp.SketchySAGA(tol=1e-6, deviations=1e-3, rank=min(RANKS[0], problem.m), max_epochs=1000)
        started = time.perf_counter()

        def late(seen: Any, budget: int = budget) -> bool:
            return seen.passes >= budget

        solution = solver.solve(problem, callback=late, progress=False)
        found[str(budget)] = {**exact.look(solution.value), "claimed": solution.report.max_deviations,
                              "residual": solution.report.max_residual, "passes": solution.report.passes,
                              "seconds": time.perf_counter() - started}  # fmt: skip
    return found


def eigenpro4(problem: Any, exact: Exact) -> dict[str, Any]:
    found = {}
    first = sketchgp.EigenPro4(epochs=2, projection="inexact").solve(problem, progress=False).report
    for budget in BUDGETS:
        epochs = max(1, round(2 * budget / first.passes))  # the step falls to 0 at the end, so each is a run of its own
        started = time.perf_counter()
        solution = sketchgp.EigenPro4(epochs=epochs, projection="inexact").solve(problem, progress=False)
        found[str(budget)] = {**exact.look(solution.value), "epochs": epochs, "passes": solution.report.passes,
                              "seconds": time.perf_counter() - started}  # fmt: skip
    return found


def measure(directory: Path, case: Problem, rows: int, points: int) -> dict[str, Any]:
    x, y, test_x, test_y = (part.double() for part in load(directory, case.name, rows))
    kernel = gpytorch.kernels.RBFKernel() if case.nu is None else gpytorch.kernels.MaternKernel(nu=case.nu)
    kernel = kernel.double().requires_grad_(False)
    kernel.lengthscale = case.lengthscale
    z = sketchgp.choose_inducing_points(kernel, x, points).points
    problem = sketchgp.InducingPointProblem(kernel, x, y, case.noise, z)
    exact = Exact(problem, test_x, test_y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        return {
            "exact_rmse": exact.rmse(exact.mean),
            "start": exact.look(torch.zeros_like(exact.value)),
            **{f"NystromPCG, {rank}": nystrom_pcg(problem, exact, min(rank, points)) for rank in RANKS},
            "SketchySAGA": sketchy_saga(problem, exact),
            "EigenPro4": eigenpro4(problem, exact),
        }


def report(results: dict[str, Any]) -> str:
    names = (*(f"NystromPCG, {rank}" for rank in RANKS), "SketchySAGA", "EigenPro4")
    rows, claims = [], []
    for label, run in results["runs"].items():
        for budget in map(str, BUDGETS):
            cells = [f"{number(run[name][budget]['typical'], 2)} ({run[name][budget]['rmse_over_exact']:.3f})"
                     for name in names]  # fmt: skip
            rows.append([label, budget, *cells])
            claims += [(run[name][budget]["claimed"], run[name][budget]["furthest"]) for name in names[:3]]
    known = [(a, b) for a, b in claims if a is not None]
    ratios = [b / a for a, b in known]
    problem = results["problem"]
    return "\n".join([
        "# Solvers without m x m matrices", "", describe(results["machine"]), "",
        f"{problem['points']} uniform inducing points, float64. Root mean square distance of 2,000 test means from the "
        "exact ones, in posterior deviations; in brackets the test RMSE over the exact one's.", "",
        table(["problem", "passes", *names], rows), "",
        f"Of {len(claims)} solves by Nystrom PCG and SketchySAGA, {len(known)} gave an estimate of how far any "
        f"prediction is off. The furthest test point was at {max(ratios):.2g} times that at the most, at "
        f"{median(ratios):.2g} times in the median.", "",
    ])  # fmt: skip


def sizes(options: Any) -> tuple[int, int]:
    return (1200, 100) if options.quick else (ROWS, POINTS)


def problem(options: Any) -> dict[str, Any]:
    rows, points = sizes(options)
    return {"rows": rows, "points": points, "ranks": RANKS, "budgets": BUDGETS, "dtype": "float64"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for case in PROBLEMS[: 1 if options.quick else None]:
        yield Group(("runs",), [(str(case), (directory, case, *sizes(options)))], needs=(case.name,))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="lean",
    quick="one set, 1,000 rows",
    problem=problem,
    groups=groups,
    perform=lambda loaded, task: measure(*task),
    report=report,
)


if __name__ == "__main__":
    BENCHMARK.main()

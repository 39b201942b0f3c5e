"""Iterations and processor seconds with neighbours in the preconditioner, on maps and on data of more features.

8,000 rows (seed 0), standardised, Matern-3/2 kernel with output scale 1, noise 0.01, lengthscale 0.2 on maps (two or
three features) and sqrt(d) elsewhere; float32 data, conjugate gradients to a relative residual of 1e-3, one
right-hand side.  ``RPCholesky(160)`` takes the memory of the neighbours of ``FullScale(rank=0)``.  Iterations and
seconds, set-up included, are medians of three seeds.  The gap is that of log det / 2 a row: how far the determinant of
``FullScale(rank=0)``, an upper bound, and the bound by the trace of ``RPCholesky()`` lie above that of ``K + noise``.

    python benchmarks/full_scale.py --data DIRECTORY            # ten minutes on one core; resumes
    python benchmarks/full_scale.py --data DIRECTORY --quick    # two sets, 1,000 rows
    python benchmarks/full_scale.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import sketchgp
import testbed
from common import describe, load_arrays, median, standardise, table
from runner import Benchmark, Group
from sketchgp.operators.access import Access
from sketchgp.space import square_norms

WITH_GAPS = ("bcef_canopy", "argo2016_temp100", "modis_temps_heaton", "uci_pol", "kin8nm", "uci_kin40k",
             "california_housing", "mnist")  # fmt: skip
SETS = (*WITH_GAPS, *(each.name for each in testbed.SETS if each.name not in WITH_GAPS))
ROWS, NOISE, TOL, SEEDS = 8000, 0.01, 1e-3, (0, 1, 2)
CHOICES: dict[str, Any] = {
    "auto": "auto",
    "RPCholesky()": sketchgp.RPCholesky(),
    "RPCholesky(160)": sketchgp.RPCholesky(160),
    "FullScale()": sketchgp.FullScale(),
    "FullScale(rank=0)": sketchgp.FullScale(rank=0),
    "FullScale(rank=0, neighbors=16)": sketchgp.FullScale(rank=0, neighbors=16),
    "FullScale(neighbors=16)": sketchgp.FullScale(neighbors=16),
    "FullScale(neighbors=64)": sketchgp.FullScale(neighbors=64),
}
STYLES = {
    "RPCholesky()": ("o", "#888888"),
    "RPCholesky(160)": ("x", "#888888"),
    "FullScale()": ("o", "#1f77b4"),
    "FullScale(rank=0)": ("s", "#d62728"),
    "FullScale(rank=0, neighbors=16)": ("^", "#ff7f0e"),
}
BOUNDS = ("RPCholesky()", "FullScale(rank=0)")


def load(directory: Path, name: str, n: int) -> sketchgp.FullProblem:
    """Return the problem of a set."""
    arrays = load_arrays(directory, name)
    x, y = arrays["X"].astype("float64"), arrays["y"].astype("float64").reshape(len(arrays["X"]), -1)[:, 0]
    x = x[:, :2] if name == "bcef_canopy" else x  # the third is a covariate
    known = np.flatnonzero(np.isfinite(y) & np.isfinite(x).all(axis=1))
    rows = known[np.random.RandomState(0).permutation(len(known))[:n]]
    x, y = (torch.as_tensor(part).float() for part in (*standardise(x[rows]), *standardise(y[rows])))
    kernel = ScaleKernel(MaternKernel(nu=1.5)).requires_grad_(False)
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.2 if x.shape[1] <= 3 else x.shape[1] ** 0.5
    return sketchgp.FullProblem(kernel, x, y, NOISE)


def perform(problem: sketchgp.FullProblem, task: tuple[str, bool]) -> dict[str, Any]:
    """Solve with one choice for every seed, and take the gap of its bound where that is asked for."""
    name, gap = task
    solver, runs = sketchgp.ConjugateGradients(tol=TOL), []
    for seed in SEEDS:
        start = time.process_time()
        choice = CHOICES[name] if name == "auto" else dataclasses.replace(CHOICES[name], seed=seed)
        report = solver.solve(problem, preconditioner=choice).report
        runs.append({"seconds": time.process_time() - start, "iterations": report.iterations, "rank": report.rank,
                     "converged": report.converged})  # fmt: skip
    found: dict[str, Any] = {"runs": runs}
    if gap:
        system = problem.system("auto")
        built = CHOICES[name].build(system.operator, system.noise)
        matrix = system.operator.type(torch.float64).to_dense() + torch.diag(system.noise.double())
        exact = 2 * float(torch.linalg.cholesky(matrix).diagonal().log().sum())
        bound = float(built.log_determinant())
        if name == "RPCholesky()":
            left = Access(system.operator).diagonal() - square_norms(built.factor)
            bound += float((left.clamp(min=0) / system.noise).log1p().sum())
        found["gap"] = (bound - exact) / 2 / system.n
    return found


def seconds(found: dict[str, Any]) -> float:
    """Return the median seconds of solves by one choice; infinity where one did not converge."""
    return median([run["seconds"] if run["converged"] else float("inf") for run in found["runs"]])


def report(results: dict[str, Any]) -> str:
    rows, ratios = [], []
    for name, runs in results["runs"].items():
        cells = []
        for choice in CHOICES:
            parts = runs[choice]["runs"] if choice in runs else []
            each = [median([part[key] for part in parts]) for key in ("iterations", "seconds", "rank")] if parts else []
            mark = "" if all(part["converged"] for part in parts) else "*"
            cells.append(f"{each[0]:.0f}{mark}, {each[1]:.1f} s, {each[2]:.0f}" if parts else "")
        gaps = [f"{runs[choice]['gap']:.2g}" if "gap" in runs.get(choice, {}) else "" for choice in BOUNDS]
        best = min((seconds(runs[choice]) for choice in CHOICES if choice != "auto" and choice in runs), default=None)
        ratio = seconds(runs["auto"]) / best if best and "auto" in runs else None
        ratios += [] if ratio is None else [ratio]
        rows.append([name, *cells, "" if ratio is None else f"{ratio:.2f}", *gaps])
    problem = results["problem"]
    return "\n".join([
        "# Neighbours in the preconditioner", "", describe(results["machine"]), "",
        f"{problem['rows']:,} rows, Matern-3/2, noise {problem['noise']:g}, float32 data. Iterations to "
        f"{problem['tol']:g}, processor seconds and rank, medians of three seeds (*: not converged), and the gap of "
        "bounds of log det / 2 a row.", "",
        table(["set", *CHOICES, "auto / best", *(f"gap, {choice}" for choice in BOUNDS)], rows), "",
        f"Seconds of auto over those of the best choice that is always the same: {median(ratios):.2f} in the median of "
        f"{len(ratios)} sets, at most {max(ratios, default=0.0):.2f}.", "",
    ])  # fmt: skip


def picture(results: dict[str, Any], path: Path) -> None:
    """Iterations, a row a set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4.2))
    names = list(results["runs"])
    for row, name in enumerate(names):
        for choice, (marker, color) in STYLES.items():
            runs = results["runs"][name].get(choice, {}).get("runs", [])
            if runs:
                value = median([run["iterations"] for run in runs])
                axis.scatter(value, row, marker=marker, color=color, s=45, label=None if row else choice)
    axis.set(xscale="log", xlabel=f"iterations of conjugate gradients to {results['problem']['tol']:g}")
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9, frameon=False)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=150)
    plt.close(figure)


def problem(options: Any) -> dict[str, Any]:
    return {"rows": 1000 if options.quick else ROWS, "noise": NOISE, "tol": TOL, "seeds": SEEDS}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for name in ("bcef_canopy", "kin8nm") if options.quick else SETS:
        tasks = [(choice, (choice, name in WITH_GAPS and choice in BOUNDS)) for choice in CHOICES]
        yield Group(("runs", name), tasks, load=partial(load, directory, name, problem(options)["rows"]), needs=(name,))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="full_scale",
    quick="two sets, 1,000 rows",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    picture=picture,
)

if __name__ == "__main__":
    BENCHMARK.main()

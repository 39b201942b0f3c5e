"""Does SketchySAGA's automatic damping hold?  Epochs to a residual, beside a grid of dampings, on real data.

Every run solves the same inducing-point problem (uniform points) at the same block size, rank and seed; only rho
differs: the automatic one, and a grid of numbers times n times the kernel's variance squared, the scale of the
Hessian (the authors search such a grid by hand, and used about 0.03 n in one place; arXiv:2407.10070, section B.5).
What counts is not time but epochs of steps, and passes: all kernel evaluations over n m.  The promise to check: at most
twice the epochs of the best of the grid.

    python benchmarks/sketchysaga_rho.py --data DIRECTORY            # ten minutes on one core; resumes
    python benchmarks/sketchysaga_rho.py --data DIRECTORY --quick    # two problems, n = 1000
    python benchmarks/sketchysaga_rho.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sketchgp
from acceleration import KERNELS, Case
from common import describe, load_arrays, number, standardise, subsample, table, targets
from runner import Benchmark, Group
from sketchgp.inducing_points import choose_inducing_points
from sketchgp.solvers.inducing.sketchysaga import SketchySAGA

ROWS, POINTS = 10_000, 1000
TOL = 1e-3
CAP = 60  # epochs
GRID = (1e-5, 1e-4, 3e-4, 1e-3, 1e-2)  # rho / n
PROMISE = 2.0


CASES = (
    Case("uci_kin40k", "RBF", 2, 0.1),
    Case("california_housing", "Matern-3/2", 2, 0.1),
    Case("nyc_green_taxi", "RBF", 1, 0.1),
    Case("uci_bike", "Laplace", 20, 0.1),
    Case("uci_kin40k", "Matern-1/2", 4, 0.01),
    Case("uci_pol", "Matern-3/2", 4, 0.01),
    Case("ijcnn1", "RBF", 2, 0.1, positive=1),
)
QUICK = (0, 1)


def load(directory: Path, case: Case, rows: int, m: int) -> sketchgp.InducingPointProblem:
    """Rows drawn by seed 0, standardised, float32; inducing points drawn uniformly by seed 0."""
    x, y = subsample(load_arrays(directory, case.data), rows, seed=0)
    (inputs,), (outputs,) = standardise(x), standardise(targets(y, case.positive))
    x32, y32 = torch.as_tensor(inputs).float(), torch.as_tensor(outputs).float()
    kernel = KERNELS[case.kernel]()
    kernel.lengthscale = case.lengthscale
    points = choose_inducing_points(kernel, x32, m, "uniform", seed=0).points
    return sketchgp.InducingPointProblem(kernel, x32, y32, case.noise, points)


def measure(problem: sketchgp.InducingPointProblem, rho: float | None) -> dict[str, Any]:
    """One run to the tolerance or the cap; ``epochs`` is None where it did not get there."""
    solver = SketchySAGA(tol=TOL, deviations=math.inf, max_epochs=CAP, rho=rho)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        try:
            done = solver.solve(problem, progress=False).report
        except sketchgp.NumericalError as error:
            return {"rho": rho, "epochs": None, "reason": "diverged", "error": str(error)[:300]}
    return {
        "rho": rho,
        "epochs": len(done.history) - 1 if done.converged else None,
        "passes": done.passes,
        "residual": done.max_residual,
        "reason": done.reason,
        "described": done.preconditioner,
        "seconds": done.seconds,
        "notes": done.notes,
        "history": [float(h.max()) for h in done.history],
    }


def _epochs(run: dict[str, Any]) -> str:
    if run["epochs"] is not None:
        return str(run["epochs"])
    return "diverged" if run["reason"] == "diverged" else f">{CAP} ({run['residual']:.0e})"


def ratio(runs: dict[str, Any]) -> float | None:
    """Epochs of the automatic damping over those of the best of the grid; None where no rho got there."""
    found = [run["epochs"] for label, run in runs.items() if label != "automatic" and run["epochs"] is not None]
    own = runs["automatic"]["epochs"]
    if not found:
        return None if own is None else 0.0
    return math.inf if own is None else own / min(found)


def report(results: dict[str, Any]) -> str:
    """The table, in Markdown."""
    labels = ["automatic", *(f"{rho:g} n" for rho in GRID)]
    rows, ratios = [], []
    for name, item in results["problems"].items():
        runs = item["runs"]
        if any(label not in runs for label in labels):
            continue
        found = ratio(runs)
        ratios.append(found)
        chosen = runs["automatic"].get("described", "").split("damping ")[-1].split(",")[0]
        share = float(chosen) / item["n"] if chosen else None
        rows.append(
            [name, _epochs(runs["automatic"]), number(runs["automatic"].get("passes")), f"{number(share, 2)} n"]
            + [_epochs(runs[label]) for label in labels[1:]]
            + ["-" if found is None else "no rho of the grid" if found == 0 else f"{found:.2f}"]
        )
    held = sum(found is not None and found <= PROMISE for found in ratios)
    problem = results["problem"]
    head = ["problem", "automatic: epochs", "passes", "its rho", *labels[1:], "automatic / best"]
    return "\n".join(
        [
            "# SketchySAGA: the automatic damping beside a grid",
            "",
            f"Epochs until the true residual is {problem['tol']:g}, checked at sweeps; n = {problem['rows']:,} at "
            f"most, {problem['points']:,} uniform inducing points, {problem['dtype']}, at most {problem['cap']} epochs "
            "(the residual then in brackets). Passes are all kernel evaluations over n m, of set-up and checks too.",
            "",
            table(head, rows),
            "",
            f"At most {PROMISE:g} times the epochs of the best of the grid: {held} of {len(ratios)} problems.",
            "",
            describe(results["machine"]),
            "",
        ]
    )


def problem(options: Any) -> dict[str, Any]:
    rows, m = (1000, 100) if options.quick else (ROWS, POINTS)
    return {"rows": rows, "points": m, "tol": TOL, "cap": CAP, "dtype": "float32", "seed": 0}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = problem(options)
    for number_, case in enumerate(CASES):
        if not options.quick or number_ in QUICK:
            yield Group(
                ("problems", case.name, "runs"),
                [("automatic", None), *((f"{rho:g} n", rho) for rho in GRID)],
                load=partial(load, directory, case, sizes["rows"], sizes["points"]),
                needs=(case.data,),
                about=lambda loaded: {"n": len(loaded.x), "m": loaded.m},
            )


BENCHMARK = Benchmark(
    doc=__doc__,
    name="sketchysaga_rho",
    quick="two problems, n = 1000",
    problem=problem,
    groups=groups,
    perform=lambda loaded, rho: measure(loaded, None if rho is None else rho * len(loaded.x)),
    report=report,
    say=lambda run: f"epochs {run['epochs']}, {run['reason']}",
    what="problems",
)


if __name__ == "__main__":
    BENCHMARK.main()

"""Is what ``solver="auto"`` takes ever the worst choice?

Every solver of the posterior mean solves the same problems, from 2,000 to 100,000 points, to the residual 1e-3 that a
model asks for by default, or until time is up.  The slowest to arrive is the worst; where not all arrive, the one that
ends with the largest residual is.

    python benchmarks/automatic.py --data DIRECTORY            # half an hour; resumes
    python benchmarks/automatic.py --data DIRECTORY --quick    # small problems
    python benchmarks/automatic.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sketchgp
from ablation import CASES as ABLATION
from ablation import Case as Problem
from ablation import Loaded
from blockwise import Trace, follow_blockwise, follow_conjugate_gradients
from common import describe, number, table
from runner import Benchmark, Group
from sketchgp.solvers.automatic import automatic_solver

TOL = 1e-3
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A problem of ablation.py at another size and noise, in so many bytes a stored matrix, for so long a run."""

    problem: str
    n: int
    noise: float
    budget: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.problem}, n = {self.n}, noise {self.noise:g}"


CASES = (
    Case("taxi", 2_000, 0.1, 4 * GIB, 20),
    Case("higgs", 2_000, 0.315, 4 * GIB, 20),
    Case("cod_rna", 5_000, 0.01, 4 * GIB, 20),
    Case("homo", 5_000, 1e-3, 4 * GIB, 30),
    Case("higgs", 15_000, 0.315, 4 * GIB, 40),
    Case("taxi", 20_000, 0.1, 4 * GIB, 60),
    Case("taxi", 20_000, 1e-3, 4 * GIB, 60),
    Case("cod_rna", 20_000, 1e-3, 4 * GIB, 60),
    Case("cod_rna", 50_000, 0.1, 4 * GIB, 120),
    Case("taxi", 50_000, 0.1, 4 * GIB, 150),
    Case("taxi", 50_000, 0.1, GIB // 4, 150),
    Case("taxi", 100_000, 0.1, GIB, 150),
)
QUICK = (0, 1)
CHOLESKY_ROWS = 15_000  # beyond, n^3 / 3 operations in float64 are minutes


def solvers(n: int) -> dict[str, Any]:
    """Every solver, by name."""
    same: dict[str, Any] = {"tol": TOL, "max_passes": 1e9}
    found = {
        "ConjugateGradients": sketchgp.ConjugateGradients(tol=TOL),
        "ASkotch": sketchgp.ASkotch(**same),
        "Skotch": sketchgp.Skotch(**same),
        "EigenPro2": sketchgp.EigenPro2(**same),
        "Cholesky": sketchgp.Cholesky(),
    }
    if n > CHOLESKY_ROWS:
        del found["Cholesky"]
    return found


def measure(loaded: Loaded, solver: Any, seconds: float) -> dict[str, Any]:
    """One run from zero: seconds, residual and held-out error at the end, and whether the tolerance was reached."""
    n, trace = len(loaded.problem.x), Trace(loaded.measure, limit=seconds, spacing=0.05)
    if isinstance(solver, sketchgp.Cholesky):
        trace.begin(n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
            solution = solver.solve(loaded.problem)
        trace.limit = 0.0  # so that the one iterate is noted
        trace.note(solution.value.reshape(n, 1).double(), n**2, solution.report.max_residual)
        run: dict[str, Any] = {"reason": solution.report.reason, "true_residual": solution.report.max_residual}
    elif isinstance(solver, sketchgp.ConjugateGradients):
        run = follow_conjugate_gradients(solver, sketchgp.RPCholesky(), loaded.problem, trace)
    else:
        run = follow_blockwise(solver, loaded.problem, trace, n // 2)
    course = trace.columns
    residual = run.get("true_residual") or course["residual"][-1]
    return run | {
        "solver": repr(solver),
        "seconds": max(course["seconds"][-1], trace.seconds),  # with the verification at the end
        "residual": residual,
        loaded.metric: course[loaded.metric][-1],
    }


def arrived(run: dict[str, Any]) -> bool:
    """Whether the tolerance was reached, if only by the float64 iterate before it was rounded to float32."""
    return run["residual"] <= 1.05 * TOL or run["reason"] == "was rounded"


def order(runs: dict[str, Any]) -> list[str]:
    """The solvers, best first: those that arrived by their seconds, then the rest by their residual."""

    def key(name: str) -> tuple[bool, float]:
        run = runs[name]
        return (False, run["seconds"]) if arrived(run) else (True, run["residual"])

    return sorted(runs, key=key)


def report(results: dict[str, Any]) -> str:
    lines = [
        "# What solver=\"auto\" takes", "", describe(results["machine"]), "",
        f"float32, residual {results['problem']['tolerance']:g}, everything else automatic; rows by seed 0, solvers' "
        "seed 0. A number is the seconds until the solver was done, with its verification; of a solver that did not "
        "arrive, \"over\" the time it had and the residual it ended with. \"Memory\" is the budget of one stored "
        "matrix. Load of the minute before a run: "
        f"{min(loads(results), default=0):g} to {max(loads(results), default=0):g}.", "",
    ]  # fmt: skip
    names = list(solvers(1))
    rows = []
    for name, item in results["problems"].items():
        runs, best = item["runs"], order(item["runs"])
        chosen = item["automatic"]
        rank = best.index(chosen) + 1
        cells = [cell(runs[solver], item["seconds"]) if solver in runs else None for solver in names]
        rows.append([name.split(", memory")[0], f"{item['budget'] / GIB:g} GiB", *cells, chosen,
                     f"{rank} of {len(best)}"])  # fmt: skip
    lines.append(table(["problem", "memory", *names, "auto takes", "which is number"], rows))
    worst = [name for name, item in results["problems"].items() if order(item["runs"])[-1] == item["automatic"]]
    lines += ["", f"The worst choice: {'; '.join(worst) or 'never'}.", ""]
    return "\n".join(lines)


def cell(run: dict[str, Any], limit: float) -> str:
    if arrived(run):
        return number(run["seconds"])
    return f"over {limit:g} ({number(run['residual'], 2)})" if run["reason"] != "diverged" else "diverged"


def loads(results: dict[str, Any]) -> list[float]:
    runs = [run for item in results["problems"].values() for run in item["runs"].values()]
    return [run["load_before"] for run in runs if run["load_before"] is not None]


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    problems: dict[str, Problem] = {problem.name: problem for problem in ABLATION}
    for number_, case in enumerate(CASES):
        if options.quick and number_ not in QUICK:
            continue
        problem = problems[case.problem]
        with sketchgp.settings.memory_budget(case.budget):
            chosen, why = automatic_solver(case.n, torch.device("cpu"), sketchgp.RPCholesky())
        yield Group(
            ("problems", f"{case.name}, memory {case.budget / GIB:g} GiB", "runs"),
            [(name, (solver, case)) for name, solver in solvers(case.n).items()],
            load=partial(load, directory, problem, case),
            needs=problem.files,
            same={"n": case.n, "noise": case.noise, "budget": case.budget, "seconds": case.seconds},
            facts={"words": problem.words, "automatic": type(chosen).__name__, "why": why},
        )


def load(directory: Path, problem: Problem, case: Case) -> Loaded:
    return Loaded(dataclasses.replace(problem, noise=case.noise), directory, case.n, 2_000)


def perform(loaded: Loaded, task: tuple[Any, Case]) -> dict[str, Any]:
    with sketchgp.settings.memory_budget(task[1].budget):
        return measure(loaded, task[0], task[1].seconds)


BENCHMARK = Benchmark(
    doc=__doc__,
    name="automatic",
    quick="the smallest two problems",
    problem=lambda options: {"dtype": "float32", "matmul": "auto", "row_seed": 0, "solver_seed": 0, "tolerance": TOL},
    groups=groups,
    perform=perform,
    report=report,
    say=lambda run: f"{run['seconds']:.1f} s, residual {run['residual']:.1e}",
    what="problems",
)


if __name__ == "__main__":
    BENCHMARK.main()

"""Two checkouts of the library beside each other: is a solver slower than it was?

Each checkout has a process of its own that holds the data.  They take turns, one solve each, in an order that changes
from turn to turn; what counts is the ratio of the two times of a turn, and its median.  Times are processor seconds of
one thread, which other work on the machine disturbs less than it does the clock.  The allocator of the C library keeps
the pages that it has: whether it asks for them anew changed a solve on mnist by 1.7 times.  Both solve the same problem
with the same seed and the same fixed work: so many iterations, passes or epochs, with no tolerance that could end them
early.  The last few are whole solves to a tolerance instead, with what the library chooses by itself.

    python benchmarks/paired.py --before CHECKOUT --data DIRECTORY            # some ten minutes; resumes
    python benchmarks/paired.py --before CHECKOUT --data DIRECTORY --large    # kin40k, 20,000 rows: five minutes
    python benchmarks/paired.py --before CHECKOUT --data DIRECTORY --quick    # small problems, one turn
    python benchmarks/paired.py --report                                      # the table again, nothing measured
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

from common import describe, load_arrays, median, standardise, table
from runner import Benchmark, Group

TURNS = 7
MARK = "measured"  # what a result begins with, among what packages print
HERE = Path(__file__).resolve()
# set -> rows, inducing points, noise; of the quick run: an eighth
SETS = {"uci_kin40k": (3000, 300, 1e-2), "mnist": (1200, 200, 1e-2), "nyc_green_taxi": (4000, 300, 1e-2)}
# the same for whole solves with all choices left open, the rank among them; what comes after the set's name is a remark
OPEN = {f"{name}, noise {noise:g}": (rows, 1, noise)
        for name, rows in (("uci_kin40k", 8000), ("mnist", 3000)) for noise in (1e-1, 1e-4)}  # fmt: skip
# the problem of kin40k.py, with its lengthscale of 2, and fewer turns
LARGE = {"uci_kin40k, 20,000 rows, noise 0.0001": (20_000, 1, 1e-4)}
LARGE_TURNS = 3
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}  # bytes, by the C library
FULL = {
    "ConjugateGradients": "sketchgp.ConjugateGradients(tol=1e-14, max_iterations=25)",
    "ASkotch": "sketchgp.ASkotch(tol=1e-14, max_passes=10)",
    "Skotch": "sketchgp.Skotch(tol=1e-14, max_passes=10)",
    "EigenPro2": "sketchgp.EigenPro2(tol=1e-14, max_passes=10)",
}
INDUCING = {
    "QR": "sketchgp.QR()",
    "KRILL": "sketchgp.KRILL(tol=1e-14, max_iterations=10)",
    "Falkon": "sketchgp.Falkon(tol=1e-14, max_iterations=10)",
    "NystromPCG": "sketchgp.NystromPCG(tol=1e-14, max_iterations=10, rank=100)",
    "SketchySAGA": "sketchgp.SketchySAGA(tol=1e-14, max_epochs=4)",
    "EigenPro3": "sketchgp.EigenPro3(epochs=2)",
    "EigenPro4": "sketchgp.EigenPro4(epochs=2)",
}
WHOLE = {"ConjugateGradients to 1e-3": "sketchgp.ConjugateGradients(tol=1e-3)"}
TASKS = [f"{data}/{name}" for data in SETS for name in (*FULL, *INDUCING)]
TASKS += [f"{data}/{name}" for data in OPEN for name in WHOLE]
LARGE_TASKS = [f"{data}/{name}" for data in LARGE for name in WHOLE]


def load(directory: Path, name: str, quick: bool) -> tuple[Any, Any, Any]:
    """Full problem, the same without noise for interpolation, and inducing-point problems of both kinds."""
    import sketchgp

    arrays, (rows, points, noise) = load_arrays(directory, name.split(",")[0]), {**SETS, **OPEN, **LARGE}[name]
    rows = rows // 8 if quick else rows
    x, y = arrays["X"][:rows], arrays["y"][:rows].astype("float64").reshape(-1)
    x, y = (torch.as_tensor(part).float() for part in (*standardise(x), *standardise(y)))
    kernel = ScaleKernel(RBFKernel() if name.startswith("uci_kin40k") else MaternKernel(nu=1.5))
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 2.0 if name in LARGE else x.shape[1] ** 0.5
    z = x[torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: min(points, rows // 4)]].clone()
    kernel.requires_grad_(False)
    return (
        sketchgp.FullProblem(kernel, x, y, noise),
        sketchgp.InducingPointProblem(kernel, x, y, noise, z),
        sketchgp.InducingPointProblem(kernel, x, y, 0.0, z),
    )


def serve(directory: Path, quick: bool) -> None:
    """Of a worker: a task a line in, its seconds a line out."""
    import sketchgp  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    held: tuple[str, Any] = ("", None)
    for line in sys.stdin:
        data, name = line.strip().split("/")
        if held[0] != data:
            held = (data, load(directory, data, quick))
        full, inducing, interpolating = held[1]
        solver = eval({**FULL, **WHOLE, **INDUCING}[name])
        problem = full if name in FULL or name in WHOLE else interpolating if name.startswith("EigenPro") else inducing
        began = time.process_time()
        report = solver.solve(problem).report
        print(MARK, json.dumps([time.process_time() - began, report.iterations]), flush=True)


class Worker:
    """A checkout's process."""

    def __init__(self, checkout: Path, directory: Path, quick: bool) -> None:
        environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{HERE.parent}"}
        command = [sys.executable, str(HERE), "serve", str(directory), str(int(quick))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def seconds(self, task: str) -> tuple[float, int]:
        """Seconds and iterations of a task."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(task, file=self.process.stdin, flush=True)
        while line := self.process.stdout.readline():
            if line.startswith(MARK):
                seconds, iterations = json.loads(line.removeprefix(MARK))
                return seconds, iterations
        raise RuntimeError(f"{task}: the worker ended")


def workers(before: Path, directory: Path, quick: bool) -> tuple[Worker, Worker]:
    """Of the earlier checkout, and of this one."""
    return Worker(before, directory, quick), Worker(HERE.parents[1], directory, quick)


def perform(pair: tuple[Worker, Worker], task: tuple[str, int]) -> dict[str, Any]:
    name, turns = task
    for worker in pair:  # what is allocated and compiled at the first call
        worker.seconds(name)
    times: tuple[list[float], list[float]] = ([], [])
    steps = [0, 0]
    for turn in range(turns):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds, steps[which] = pair[which].seconds(name)
            times[which].append(seconds)
    ratios = [after / before for before, after in zip(*times, strict=True)]
    return {"before": times[0], "after": times[1], "ratio": median(ratios), "iterations": steps}


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, run in results["runs"].items():
        spread = sorted(b / a for a, b in zip(run["before"], run["after"], strict=True))
        seconds = (f"{median(run[which]):.2f}" for which in ("before", "after"))
        span, steps = f"{spread[0]:.2f} to {spread[-1]:.2f}", " → ".join(map(str, run["iterations"]))
        rows.append([*name.split("/"), *seconds, f"{run['ratio']:.3f}", span, steps])
    ratios = [run["ratio"] for run in results["runs"].values()]
    turns = results["problem"]["turns"]
    return "\n".join([
        "# The same solves by an earlier checkout and by this one", "", describe(results["machine"]), "",
        f"Commits {' and '.join(results['commits'])}. Processor seconds of one thread, medians of {turns} turns, "
        "set-up included, and the ratio of the two times of a turn: its median and range. "
        f"Median of all ratios: {median(ratios):.3f}.", "",
        table(["set", "solver", "before", "after", "after / before", "range", "iterations"], rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    turns = LARGE_TURNS if options.large else TURNS
    return {"turns": 1 if options.quick else turns, "sets": LARGE if options.large else {**SETS, **OPEN}}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    turns, before = problem(options)["turns"], Path(options.before or ".")
    tasks = [(name, (name, turns)) for name in (LARGE_TASKS if options.large else TASKS)]
    sets = LARGE if options.large else SETS
    start = partial(workers, before, directory, options.quick)
    needs = tuple(name.split(",")[0] for name in sets)
    yield Group(("runs",), tasks, load=start, needs=needs, facts={"commits": [commit(before), commit(HERE.parent)]})


def commit(checkout: Path) -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def options(parser: Any) -> None:
    parser.add_argument("--before", metavar="CHECKOUT", help="the earlier state of the library")
    parser.add_argument("--large", action="store_true", help="20,000 rows, in a JSON of their own")


BENCHMARK = Benchmark(
    doc=__doc__,
    name="paired",
    quick="problems of an eighth, one turn",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    options=options,
    variant=lambda options: "_large" if options.large else "",
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), bool(int(sys.argv[3])))
    else:
        BENCHMARK.main()

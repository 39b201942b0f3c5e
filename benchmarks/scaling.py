"""One process and two, of one thread each: products, gradients and solvers inside ``sharded()``.

Processes of either kind wait beside each other, and take turns, in an order that changes from turn to turn; what
counts is the ratio of the two times of a turn, by the clock, and its median.  Strong scaling has the same rows, weak
scaling as many pairs of rows for each process.  The bytes that a rank says it sent stand beside the formula, and beside
what the loopback interface counted meanwhile, on a Linux machine where nothing else uses it.  Inputs are normal
numbers, 8 features, Matern-3/2, float32; work is fixed: so many iterations or passes, whatever they reach.

    python benchmarks/scaling.py            # ten minutes on two cores that nothing else uses; resumes
    python benchmarks/scaling.py --quick    # 2,000 rows, one turn: whether it runs
    python benchmarks/scaling.py --report   # the table again, nothing measured
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, median, table
from rank_processes import Ranks, main, served
from runner import Benchmark, Group
from sketchgp.distributed import sharded
from sketchgp.operators import KernelMatrix

TURNS, COUNTS, FEATURES, COLUMNS, RANK, ITERATIONS, BATCH = 7, (1, 2), 8, 16, 500, 5, 1024
ROWS = {"product": 50_000, "gradient": 20_000, "conjugate gradients": 20_000, "askotch": 50_000,
        "eigenpro 4": 50_000}  # fmt: skip
QUICK = 2000  # rows of a quick run
HERE = Path(__file__).resolve()


# ------------------------------------------------------------------------------- what a rank does
def _problem(n: int) -> sketchgp.FullProblem:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(n, FEATURES, generator=stream)
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    kernel.base_kernel.lengthscale = 3.0
    return sketchgp.FullProblem(kernel, x, x.sum(dim=1).sin() + 0.1 * torch.randn(n, generator=stream), 1e-2)


def _product(n: int) -> Callable[[], Any]:
    problem = _problem(n)
    matrix = KernelMatrix.of(problem.kernel, problem.x, engine="tiled").detach()
    vectors = torch.randn(n, COLUMNS, generator=torch.Generator().manual_seed(1))
    return lambda: matrix._matmul(vectors)


def _gradient(n: int) -> Callable[[], Any]:
    problem = _problem(n)
    vectors = torch.randn(n, COLUMNS, generator=torch.Generator().manual_seed(1))

    def work() -> Tensor:
        value = KernelMatrix.of(problem.kernel, problem.x, engine="tiled") @ vectors
        return torch.autograd.grad((value * vectors).sum(), list(problem.kernel.parameters()))[0]

    return work


def _solved(solver: Any, **options: Any) -> Callable[[int], Callable[[], Any]]:
    def prepared(n: int) -> Callable[[], Any]:
        problem = _problem(n)
        return lambda: solver.solve(problem, matmul="tiled", **options)

    return prepared


def _streamed(n: int) -> Callable[[], Any]:
    """One epoch of EigenPro 4, with every twentieth row as a point; the inexact projection at the end of a cycle."""
    full = _problem(n)
    problem = sketchgp.InducingPointProblem(full.kernel, full.x, full.y, 0.0, full.x[::20].clone())
    solver = sketchgp.EigenPro4(epochs=1, block_size=BATCH, averaging=False, patience=None)
    return lambda: solver.solve(problem, progress=False)


WORK = {
    "product": _product,
    "gradient": _gradient,
    "conjugate gradients": _solved(
        sketchgp.ConjugateGradients(tol=1e-14, max_iterations=ITERATIONS),
        preconditioner=sketchgp.RPCholesky(rank=RANK),
    ),
    "askotch": _solved(sketchgp.ASkotch(tol=1e-14, max_passes=1)),
    "eigenpro 4": _streamed,
}


def measured(name: str, n: int) -> dict[str, float]:
    """Of a rank: seconds, bytes and memory of one task."""
    import resource

    with sharded() as shards:
        work = WORK[name](n)
        wire = _loopback()
        shards.agree(0)  # all begin together
        sent, began, processor = shards.bytes_sent, time.perf_counter(), time.process_time()
        work()
        found = {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}
        shards.agree(0)
        found |= {"sent": shards.bytes_sent - sent, "wire": _loopback() - wire}
        found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def _loopback() -> int:
    """Bytes that the loopback interface has sent; 0 where nothing says it."""
    try:
        lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    own = [line.split(":")[1].split() for line in lines if line.strip().startswith("lo:")]
    return int(own[0][8]) if own else 0


# ------------------------------------------------------------------------------- what is measured
def expected_bytes(name: str, n: int, count: int) -> float | None:
    """What a rank sends by the formulas of docs/several-devices.md; None where it depends on the solve."""
    share = (count - 1) / count
    one = 4 * n * COLUMNS
    if name == "product":
        return 2 * share * one
    if name == "gradient":  # the product, and two parameters in float64
        return 2 * share * (one + 16)
    return None


def perform(loaded: dict[int, Ranks], task: tuple[str, int, int, int]) -> dict[str, Any]:
    name, alone, together, turns = task
    sizes, groups = (alone, together), [loaded[count] for count in COUNTS]
    for ranks, n in zip(groups, sizes, strict=True):  # what is allocated and compiled at the first call
        ranks.run((name, n))
    found: tuple[list[Any], list[Any]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append(groups[which].run((name, sizes[which])))
    seconds = [[max(rank["seconds"] for rank in run) for run in runs] for runs in found]
    last = found[1][-1]
    return {
        "rows": sizes,
        "seconds": seconds,
        "ratio": median([two / one for one, two in zip(*seconds, strict=True)]),
        "processor": [median([sum(rank["processor"] for rank in run) for run in runs]) for runs in found],
        "sent": [rank["sent"] for rank in last],
        "wire": max(rank["wire"] for rank in last),
        "formula": expected_bytes(name, together, COUNTS[1]),
        "peak": [[rank["peak"] for rank in runs[-1]] for runs in found],
    }


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, run in results["runs"].items():
        each = [f"{median(seconds):.2f}" for seconds in run["seconds"]]
        formula = "" if run["formula"] is None else f"{run['formula'] / 2**20:.2f}"
        peak = " → ".join(f"{max(part) / 2**30:.2f}" for part in run["peak"])
        rows.append([name, " → ".join(f"{n:,}" for n in run["rows"]), *each, f"{run['ratio']:.2f}",
                     f"{run['processor'][1] / run['processor'][0]:.2f}", f"{max(run['sent']) / 2**20:.2f}", formula,
                     f"{run['wire'] / 2**20:.2f}", peak])  # fmt: skip
    header = ["work", "rows", "1: s", "2: s", "ratio", "processor time", "MiB a rank", "formula", "MiB on the wire",
              "GiB a process"]  # fmt: skip
    note = (
        "Seconds by the clock; the ratio is the median over turns of two processes' over one's, 0.5 for perfect strong "
        "scaling and 1 for perfect weak scaling. Processor time of both together over that of one. Bytes of the data "
        "alone; on the wire, of both ranks, with headers and what ranks tell each other."
    )
    return "\n".join(["# One process and two", "", describe(results["machine"]), "", note, "", table(header, rows), ""])


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    turns, rows = (problem(options)[key] for key in ("turns", "rows"))
    tasks = []
    for name, n in rows.items():
        fewer = round(n / math.sqrt(COUNTS[1]))
        tasks += [(f"{name}, strong", (name, n, n, turns)), (f"{name}, weak", (name, fewer, n, turns))]
    return served(HERE, COUNTS, tasks, subprocess.DEVNULL)


def problem(options: Any) -> dict[str, Any]:
    return {
        "turns": 1 if options.quick else TURNS,
        "rows": dict.fromkeys(ROWS, QUICK) if options.quick else ROWS,
        "columns": COLUMNS,
        "features": FEATURES,
        "rank": RANK,
        "iterations": ITERATIONS,
        "batch": BATCH,
    }


BENCHMARK = Benchmark(
    __doc__ or "",
    "scaling",
    "2,000 rows, one turn",
    problem,
    groups,
    perform,
    report,
    say=lambda run: f"ratio {run['ratio']:.2f}",
    reads_data=lambda options: False,
)  # fmt: skip

if __name__ == "__main__":
    main(BENCHMARK, measured)

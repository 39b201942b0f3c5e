"""What a rank holds inside ``sharded()``: memory of one, two and four processes, beside the formulas.

Processes of one thread do the same work, alone and together.  Of each, what its memory has grown by when the result is
there is *held*, and by how much at the most meanwhile the *peak*, as Linux counts resident memory; of several, the one
that has most.  Inputs are normal numbers, 4 features, Matern-3/2, float64.

    python benchmarks/shares.py            # some minutes, 2 GiB of memory
    python benchmarks/shares.py --quick    # a tenth of the rows: whether it runs
    python benchmarks/shares.py --report   # the table again, nothing measured
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, table
from rank_processes import Ranks, main, served
from runner import Benchmark, Group
from sketchgp.distributed import sharded
from sketchgp.operators import KernelMatrix

COUNTS, FEATURES, COLUMNS = (1, 2, 4), 4, 192
ROWS = {"stored matrix": 8000, "RPCholesky": 40_000, "Nystrom": 8000, "vectors": 8000,
        "vectors of ASkotch": 8000}  # fmt: skip
RANKS = {"RPCholesky": 300, "Nystrom": 500}
# vectors at the peak: of one process; of several, those that are whole, and those of which each has its rows
WHOLE = {"vectors": (15, 3, 11), "vectors of ASkotch": (8, 4, 5)}
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back
HERE = Path(__file__).resolve()


# ------------------------------------------------------------------------------- what a rank does
def _data(n: int) -> tuple[Any, Tensor]:
    kernel = ScaleKernel(MaternKernel(nu=1.5)).double()
    return kernel, torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _stored(n: int) -> Any:
    matrix = KernelMatrix.of(*_data(n), engine="dense").detach()
    return matrix, matrix._matmul(torch.ones(n, 1, dtype=torch.float64))


def _factor(name: str) -> Callable[[int], Any]:
    def made(n: int) -> Any:
        matrix = KernelMatrix.of(*_data(n), engine="tiled").detach()
        return getattr(sketchgp, name)(rank=RANKS[name]).build(matrix, torch.full((n,), 0.1, dtype=torch.float64))

    return made


def _vectors(solver: Any, **options: Any) -> Callable[[int], Any]:
    """The peak is what counts: the vectors of a solve are gone in the end, but for targets and solution."""

    def solved(n: int) -> Any:
        kernel, x = _data(n)
        y = torch.randn(n, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return y, solver.solve(sketchgp.FullProblem(kernel, x, y, 0.1), matmul="tiled", **options)

    return solved


WORK = {
    "stored matrix": _stored,
    "vectors": _vectors(sketchgp.ConjugateGradients(tol=1e-14, max_iterations=2), preconditioner=None),
    "vectors of ASkotch": _vectors(sketchgp.ASkotch(tol=1e-14, block_size=100, max_passes=0.05)),
    **{name: _factor(name) for name in RANKS},
}


def _resident(field: str) -> int:
    """VmRSS, or VmHWM, the most since it was reset, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field}")


def measured(name: str, n: int) -> dict[str, int]:
    """Of a rank: the memory of one task."""
    with sharded():
        WORK[name](64 if name == "stored matrix" else 600)  # what is imported and allocated at the first call
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS")
        kept = WORK[name](n)
        gc.collect()
        found = {"held": _resident("VmRSS") - before, "peak": _resident("VmHWM") - before}
        del kept
    return found


# ------------------------------------------------------------------------------- what is measured
def expected(name: str, n: int, count: int) -> float:
    """Bytes of the arrays that the work is about, by the formulas of docs/several-devices.md."""
    if name == "stored matrix":
        return 8 * n**2 // count
    if name in WHOLE:
        alone, whole, own = WHOLE[name]
        return 8 * n * COLUMNS * (alone if count == 1 else whole + own / count)
    return 8 * n * RANKS[name] // count


def perform(loaded: dict[int, Ranks], task: tuple[str, int]) -> dict[str, Any]:
    found = {}
    for count, together in loaded.items():
        ranks = together.run(task)
        found[str(count)] = {key: max(rank[key] for rank in ranks) for key in ("held", "peak")}
    return {"rows": task[1], "processes": found}


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, run in results["runs"].items():
        for key in ("held", "peak"):
            each = [f"{run['processes'][str(count)][key] / 2**20:.0f}" for count in COUNTS]
            rows.append([name, f"{run['rows']:,}", key, *each])
        formula = (expected(name, run["rows"], count) / 2**20 for count in COUNTS)
        rows.append([name, f"{run['rows']:,}", "by the formula", *(f"{size:.0f}" for size in formula)])
    header = ["work", "rows", "MiB", *(f"{count} process(es)" for count in COUNTS)]
    note = (
        "Of the process that has most. The formulas are of the matrix, the factor or the vectors alone; inputs, tiles "
        f"and what is temporary come on top. Vectors are those of conjugate gradients, and of ASkotch, with {COLUMNS} "
        "columns, and the targets, the solution and the product that are whole on each."
    )
    return "\n".join(["# What a rank holds", "", describe(results["machine"]), "", note, "", table(header, rows), ""])


def problem(options: Any) -> dict[str, Any]:
    rows = {name: n // 10 if options.quick else n for name, n in ROWS.items()}
    return {"rows": rows, "features": FEATURES, "columns": COLUMNS, "ranks": RANKS}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    tasks = [(name, (name, n)) for name, n in problem(options)["rows"].items()]
    return served(HERE, COUNTS, tasks, **ALLOCATOR)


BENCHMARK = Benchmark(
    __doc__ or "",
    "shares",
    "a tenth of the rows",
    problem,
    groups,
    perform,
    report,
    say=lambda run: ", ".join(f"{one['held'] / 2**20:.0f} MiB" for one in run["processes"].values()),
    reads_data=lambda options: False,
)  # fmt: skip

if __name__ == "__main__":
    main(BENCHMARK, measured)

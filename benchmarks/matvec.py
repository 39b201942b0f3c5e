"""Products with k(X, Z) as a fraction of what the machine allows, beside KeOps and dense torch in the same run.

A cell is a kernel, a dimension d, a number of columns t and a dtype; in it every contestant computes K @ V (and the
gradient of sum(L * (K @ V))) in turn, round after round, so that drift of the machine hits all alike.  The limit is
made of rates measured in the same run (``matvec_limit.py``).  Sampled rows of every product, and every gradient at
fewer rows, are compared with dense float64.  ``--memory`` measures the peak memory of whole model calls instead.

    python benchmarks/matvec.py                      # CPU: about a quarter of an hour, and KeOps' compilations
    python benchmarks/matvec.py --device cuda        # n = 100,000, and one product at n = 10^6
    python benchmarks/matvec.py --memory --data DIRECTORY
    python benchmarks/matvec.py --quick              # few cells, n = 2000
    python benchmarks/matvec.py --report             # tables and picture again; each run measures what is missing
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import matvec_limit
from common import load_average, now, sources
from matvec_cells import CHECKED_ROWS, FAMILIES, OURS, RIVALS, Cell, Contestant, Problem, contestants
from matvec_report import picture, report
from runner import Benchmark, Group

DIMENSIONS = (2, 8, 32, 90, 435, 784)
FEW_DIMENSIONS = (8, 90)  # float64, and the kernels other than RBF and Matern-5/2
COLUMNS = (1, 16)
WARM_ROWS = 300
ROUNDS_AT_MOST = 9
FAILURES: list[str] = []  # what broke, of all cells
MANY = 200_000  # rows beyond which a cell is a single product
# As installed, KeOps compiles for any x86 processor; these flags let it use this one, which is up to 8 times as fast.
KEOPS_FLAGS = "-march=native -ffast-math"


def plan(options: argparse.Namespace) -> list[Cell]:
    """The cells wanted, in the order in which they are measured: those of every dimension first."""
    cuda = options.device == "cuda"

    def rows(d: int) -> int:
        if options.n:
            return options.n
        if options.quick:
            return 2000
        return 100_000 if cuda else (20_000 if d <= 90 else 8_000)

    dims = options.dims or ([8, 90] if options.quick else list(DIMENSIONS))
    few = [d for d in dims if d in FEW_DIMENSIONS]
    columns = options.columns or list(COLUMNS)
    main = [name for name in options.kernels if FAMILIES[name].main]
    others = [name for name in options.kernels if not FAMILIES[name].main]
    triples = [(name, d, "float32") for d in dims for name in main]
    triples += [(name, d, "float64") for d in few for name in main]
    if options.quick:
        few = few[:1]
    triples += [(name, d, "float32") for d in few for name in others]
    cells = [Cell(name, d, t, dtype, rows(d)) for name, d, dtype in triples if dtype in options.dtypes for t in columns]
    if cuda and not options.quick and not options.n and "rbf" in main and 8 in dims and "float32" in options.dtypes:
        cells.append(Cell("rbf", 8, 1, "float32", 1_000_000))
    return cells


# ---------------------------------------------------------------------------------------------- measurement
def clock(call: Any, device: torch.device) -> tuple[float, float, Any]:
    """Wall seconds, processor seconds, result."""
    matvec_limit.synchronise(device)
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    matvec_limit.synchronise(device)
    return time.perf_counter() - wall, time.process_time() - processor, result


def reason_of(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:300] if lines else ''}"


def expected(problem: Exception) -> bool:
    """Whether it says that this engine is not to be had here, rather than that it broke."""
    from sketchgp import InputError

    return isinstance(problem, InputError | ImportError | NotImplementedError | torch.cuda.OutOfMemoryError)


def rows_at_most(contestant: Contestant, cell: Cell, device: torch.device, longest: float) -> int:
    """The cell's n, or fewer rows: where a call would outlast ``longest`` seconds or a full matrix the memory."""
    from sketchgp.settings import available_memory

    n = cell.n
    if contestant.engine in ("dense", "torch-dense"):
        copies = 5 if contestant.engine == "torch-dense" else 3
        n = min(n, math.isqrt(available_memory(device) // (2 * copies * cell.torch_dtype.itemsize)))
    probe = min(n, 20_000 if device.type == "cuda" else 2000)
    seconds, _, _ = clock(contestant.prepare(probe), device)
    whole = seconds * (n / probe) ** 2
    if whole > longest:
        n = max(probe, int(n * math.sqrt(longest / whole)))
    return n if n == cell.n or n < 500 else n // 500 * 500


class Bench:
    """Runs cells; the options, the device and the run's limits."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.limits: dict[str, Any] = {}
        self.device = torch.device(options.device)

    def cell(self, cell: Cell) -> dict[str, Any]:
        """Time every contestant of a cell, in rounds; check what they computed."""
        options, device = self.options, self.device
        record: dict[str, Any] = {"kernel": cell.kernel, "d": cell.d, "t": cell.t, "dtype": cell.dtype, "n": cell.n,
                                  "runs": {}}  # fmt: skip
        problem = Problem(cell, device, options.seed)
        gradients = not options.no_gradients and cell.n <= MANY
        engines = [engine for engine in options.engines if cell.n <= MANY or engine != "dense"]
        entrants: list[tuple[Contestant, int]] = []
        for contestant in contestants(problem, engines, gradients):
            run: dict[str, Any] = {"engine": contestant.engine, "measure": contestant.measure,
                                   "case": contestant.case, "wrt": contestant.wrt or None}  # fmt: skip
            record["runs"][contestant.key] = run
            try:  # the first call compiles and loads; the second tells how many rows are affordable
                run["first_call_seconds"], _, _ = clock(contestant.prepare(min(WARM_ROWS, cell.n)), device)
                if contestant.measure == "stored product" and entrants:  # of the matrix that the one before made
                    run["n"] = entrants[-1][1]
                else:
                    run["n"] = rows_at_most(contestant, cell, device, self._allowance(contestant, cell))
                entrants.append((contestant, run["n"]))
            except Exception as error:
                self._excuse(cell, contestant, run, error)
        checks = self._rounds(cell, problem, entrants, record["runs"])
        again = {key: statistics.median(check[key] for check in checks) for key in checks[0]}
        rates = matvec_limit.rates_of(self.limits[cell.dtype], again)
        record |= {"rates_again": again, "rates": dataclasses.asdict(rates)}
        for contestant, n in entrants:
            run = record["runs"][contestant.key]
            if run.get("seconds"):
                self._summarise(cell, contestant, n, run, problem, rates)
        return record

    def _allowance(self, contestant: Contestant, cell: Cell) -> float:
        """Seconds that one call may take; ours stay at the cell's n unless they are hopeless there."""
        if cell.n > MANY:
            return 60.0
        ours = contestant.engine.partition("/")[0] in ("tiled", "triton")
        return self.options.longest * (5 if ours else 1)

    def _excuse(self, cell: Cell, contestant: Contestant, run: dict[str, Any], error: Exception) -> None:
        """Record why a contestant gave no time: not available here, or failed."""
        run["unavailable" if expected(error) else "failed"] = reason_of(error)
        if "failed" in run:
            FAILURES.append(f"{cell.key}, {contestant.key}: {run['failed']}")
            tqdm.write(f"FAILED {FAILURES[-1]}")

    def _rounds(
        self, cell: Cell, problem: Problem, entrants: list[tuple[Contestant, int]], runs: dict[str, Any]
    ) -> list[dict[str, float]]:
        """A, B, C, A, B, C, ...: ``repetitions`` rounds, more of them in cells where they are short.

        Every round begins with the rates measured again, which are returned.
        """
        options, device = self.options, self.device
        once = cell.n > MANY
        repetitions = 1 if once else options.repetitions
        started, rounds, checks = time.perf_counter(), 0, []
        while rounds < repetitions or (
            not once and rounds < ROUNDS_AT_MOST and time.perf_counter() - started < options.seconds
        ):
            checks.append(matvec_limit.spot_check(self.limits[cell.dtype], cell.torch_dtype, device))
            for contestant, n in entrants:
                run = runs[contestant.key]
                if "failed" in run or "unavailable" in run:
                    continue
                try:
                    wall, processor, result = clock(contestant.prepare(n), device)
                    run.setdefault("seconds", []).append(wall)
                    run.setdefault("cpu_seconds", []).append(processor)
                    if rounds == 0 and contestant.measure != "gradient":
                        run["error"] = problem.error(result, n, contestant.case)
                    del result
                except Exception as error:
                    self._excuse(cell, contestant, run, error)
            rounds += 1
        return checks

    def _summarise(
        self, cell: Cell, contestant: Contestant, n: int, run: dict[str, Any], problem: Problem,
        rates: matvec_limit.Rates,
    ) -> None:  # fmt: skip
        """Medians, rates, fractions of the limit; for gradients their error."""
        seconds = statistics.median(run["seconds"])
        run |= {"median_seconds": seconds, "smallest_seconds": min(run["seconds"]),
                "largest_seconds": max(run["seconds"]), "pairs_per_second": n * n / seconds}  # fmt: skip
        if contestant.measure == "gradient":
            if contestant.engine in RIVALS:
                return
            try:
                run["error"] = problem.gradient_error(contestant.engine, contestant.case, contestant.wrt == "inputs")
            except Exception as error:
                self._excuse(cell, contestant, run, error)
        elif contestant.measure != "stored product":
            limit = matvec_limit.limits(problem.family.work, cell.d, cell.t, rates)
            run |= matvec_limit.fractions(run["pairs_per_second"], limit, contestant.case == "square")
            run["limit_pairs_per_second"] = limit


# --------------------------------------------------------------------------------------------------- command
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="of torch and of KeOps (torch's default)")
    parser.add_argument("--n", type=int, help="rows (CPU: 20,000, beyond 90 dimensions 8,000; CUDA: 100,000)")
    parser.add_argument("--dims", type=int, nargs="*", help=f"only these (of {', '.join(map(str, DIMENSIONS))})")
    parser.add_argument("--columns", type=int, nargs="*", help="of V (1 and 16)")
    parser.add_argument("--kernels", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "float64"), default=["float32", "float64"])
    parser.add_argument("--engines", nargs="*", default=[*OURS, *RIVALS], metavar="ENGINE",
                        help=f"of {', '.join([*OURS, *RIVALS])}; a precision may follow: triton/tf32")  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=3, help="rounds at least")
    parser.add_argument("--seconds", type=float, default=3.0, help="more rounds while a cell took less than this")
    parser.add_argument(
        "--longest",
        type=float,
        default=1.0,
        help="seconds; a call that would take longer gets fewer rows (tiled, triton: 5 times longer)",
    )
    parser.add_argument("--no-gradients", action="store_true", help="products only")
    parser.add_argument("--keops-flags", default=KEOPS_FLAGS, help=f"of its C++ compiler ({KEOPS_FLAGS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of model calls, not the cells")
    parser.add_argument("--memory-gpytorch", action="store_true", help="GPyTorch's default beside it, if it fits")


def prepare(options: argparse.Namespace) -> None:
    """Check the options; one number of threads for torch and KeOps, and KeOps' compiler flags: start again with both in
    the environment.

    They are read when the libraries are loaded, which importing GPyTorch has done already (it imports pykeops).
    """
    if options.report:
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here; leave out --device cuda.")
    known = {*OURS, *RIVALS}
    if wrong := [engine for engine in options.engines if engine.partition("/")[0] not in known]:
        raise SystemExit(f"Unknown engines: {', '.join(wrong)}; known are {', '.join([*OURS, *RIVALS])}.")
    wanted = {"OMP_NUM_THREADS": str(options.threads or torch.get_num_threads())}
    if options.device == "cpu":
        wanted["CXXFLAGS"] = options.keops_flags
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    torch.set_num_threads(int(wanted["OMP_NUM_THREADS"]))
    with contextlib.suppress(ImportError):
        import pykeops

        pykeops.set_verbose(False)


def parameters_of(options: argparse.Namespace) -> dict[str, Any]:
    """What two runs must share for their cells to stand in one table."""
    return {"device": options.device, "threads": torch.get_num_threads(), "seed": options.seed,
            "repetitions": options.repetitions, "seconds_a_cell": options.seconds, "longest_call": options.longest,
            "checked_rows": CHECKED_ROWS, "inputs": "standard normal",
            "keops_flags": options.keops_flags if options.device == "cpu" else None,
            "work": {name: family.how for name, family in FAMILIES.items()},
            "labels": {name: family.label for name, family in FAMILIES.items()}}  # fmt: skip


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    if options.device == "cuda":
        results["machine"]["device"] = torch.cuda.get_device_name()
    for key in ("limits", "cells", "memory"):
        results.setdefault(key, [] if key == "limits" else {})
    if options.memory:
        from matvec_alone import memory_tasks

        yield Group(("memory",), memory_tasks(options, directory), needs=("uci_kin40k",))
        return
    cells = plan(options)
    bench = Bench(options)

    def limits() -> None:
        """Each run of this script measures its own limit, and its cells are held against that."""
        print("rates of the machine ...", flush=True)
        bench.limits = {"date": now(), "sources": sources(), "load_before": load_average()}
        for dtype in sorted({cell.dtype for cell in cells if cell.key not in results["cells"]}):
            bench.limits[dtype] = matvec_limit.measure(getattr(torch, dtype), bench.device, options.quick)
        results["limits"].append(bench.limits)

    def measure(cell: Cell) -> dict[str, Any]:
        return bench.cell(cell) | {"limit": len(results["limits"]) - 1}

    yield Group(("cells",), [(cell.key, partial(measure, cell)) for cell in cells], load=limits)
    if options.device == "cpu" and "keops-lazy" in options.engines:
        from matvec_alone import keops_as_installed

        dims = sorted({cell.d for cell in cells})
        yield Group((), [("keops_as_installed", partial(keops_as_installed, options, dims))])


def one_line(record: dict[str, Any]) -> str:
    parts = [
        f"{key} {run['pairs_per_second'] / 1e9:.3g} G/s"
        + (f" ({run['fraction_of_limit']:.2f})" if "fraction_of_limit" in run else "")
        for key, run in record.get("runs", {}).items()
        if "pairs_per_second" in run
    ]
    return "; ".join(parts)


def pictures(results: dict[str, Any], path: Path) -> None:
    if results.get("cells"):
        picture(results, path.with_suffix(".png"))
    if FAILURES:
        raise SystemExit("Failed:\n" + "\n".join(FAILURES))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="matvec",
    quick="few cells, n = 2000",
    problem=parameters_of,
    groups=groups,
    perform=lambda loaded, measure: measure(),
    report=report,
    picture=pictures,
    say=one_line,
    what="problem",
    options=add_options,
    versions=("pykeops", "triton"),
    prepare=prepare,
    variant=lambda options: "" if options.device == "cpu" else "-cuda",
    reads_data=lambda options: options.memory,
)


if __name__ == "__main__":
    BENCHMARK.main()

"""Everything that is to be known about one GPU, in one programme of at most 25 minutes.

Items come in order of worth, each in a process of its own, and each is written to the JSON when it is done: the
programme may be stopped at any time, and goes on where it was when it is started again.  It measures the tests marked
``cuda``; the device's limits (matrix products, exponentials, copies); products and gradients by every engine and
precision, with their errors; the fused kernel's ways to one product; kin40k by every solver, beside GPyTorch;
posterior means of 1,000,000 points; EigenPro 4 with 100,000 inducing points; a training step of 100,000 points; and
the peak memory of each.

    PYTHONPATH=src python benchmarks/device.py --dry-run                   # the plan, with estimated minutes
    PYTHONPATH=src python benchmarks/device.py --data DIRECTORY            # 25 minutes on one GPU; resumes
    PYTHONPATH=src python benchmarks/device.py --data DIRECTORY --minutes 9    # items that fit into so many
    PYTHONPATH=src python benchmarks/device.py --small                     # tiny, on a CPU too
    PYTHONPATH=src python benchmarks/device.py --report                    # tables and picture again, nothing measured
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import DATA_VARIABLE, data_directory, plain, table
from device_items import ITEMS, forget_peaks, highest_peak
from device_report import picture, report
from runner import Benchmark, Group, find

DIMENSIONS = (8, 90, 32, 2, 784, 435)  # in order of worth
COLUMNS = (1, 16, 64)
PRECISIONS = ("float32", "tf32")
ROWS = 2**17
MILLION = 1_000_000


@dataclass(frozen=True)
class Item:
    """One process.

    :ivar kind: of ``ITEMS``; :ivar what: its arguments; :ivar small: those for ``--small``, beside them.
    :ivar minutes: an estimate for one H200, the start of the process included; it may take a minute more than
        three times that.
    :ivar needs: data sets.
    """

    name: str
    kind: str
    minutes: float
    what: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def plan() -> list[Item]:
    """All items, in order of worth."""
    engines = ["triton", *(f"triton/{name}" for name in PRECISIONS[1:]), "tiled", "torch-dense"]
    few = {"n": 200, "columns": [1, 3], "engines": ["tiled", "torch-dense"], "gradients": ["tiled"], "processes": 0}

    def products(d: int) -> Item:
        what = {"d": d, "n": ROWS, "columns": COLUMNS, "engines": engines, "gradients": engines[:-1], "processes": 8}
        return Item(f"products d={d}", "products", 0.9 if d < 400 else 1.4, what, few)

    means = [
        Item(f"mean {data} {solver}", "mean", 1.8, {"data": data, "n": MILLION, "solver": solver, "seconds": 65.0},
             {"n": 1200, "seconds": 2.0})
        for data in ("synthetic", "taxi-like") for solver in ("ASkotch", "ConjugateGradients")
    ]  # fmt: skip
    kin40k = [
        Item(f"kin40k {group}", "kin40k", minutes,
             {"group": group, "rows": 20_000, "noises": [1e-2, 1e-4], "m": 2000, "seconds": seconds},
             {"rows": 200, "noises": [1e-2], "m": 20, "seconds": 0.3, "solvers": solvers}, ("uci_kin40k",))
        for group, minutes, seconds, solvers in (
            ("full", 1.2, 7.0, None), ("gpytorch", 0.8, 0.0, ["GPyTorch's defaults", "sketchgp.accelerate"]),
            ("inducing", 1.2, 4.0, None))
    ]  # fmt: skip
    million = {"d": 8, "n": MILLION, "columns": [1, 16], "engines": engines[:-1], "gradients": ["triton"],
               "processes": 8}  # fmt: skip
    return [
        Item("limits", "limits", 0.6),
        products(8),
        Item("tests", "tests", 2.5, {"processes": 8}),
        products(90),
        Item("products of a million points", "products", 1.3, million, few),
        means[0],
        kin40k[0],
        kin40k[1],
        Item("training step", "training", 1.0, {"n": 100_000, "steps": 2}, {"n": 1000}),
        Item("EigenPro4 with 100,000 points", "eigenpro", 2.0,
             {"n": 200_000, "m": 100_000, "epochs": 1, "seconds": 75.0}, {"n": 300, "m": 60, "seconds": 1.0}),
        *(products(d) for d in DIMENSIONS[2:]),
        *means[1:],
        kin40k[2],
    ]  # fmt: skip


def tasks(options: argparse.Namespace) -> list[tuple[Item, dict[str, Any]]]:
    """Items and what their processes are told."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for item in plan():
        what = {**item.what, **(item.small if options.quick else {}), "small": options.quick, "device": device}
        found.append((item, {**what, "kind": item.kind, "limit": 60 + 180 * item.minutes}))
    return found


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    started = time.monotonic()
    if options.again:
        results["items"] = {name: one for name, one in results.get("items", {}).items() if "failed" not in one}
    for item, what in tasks(options):
        left = options.minutes - (time.monotonic() - started) / 60
        if find(results, ("items", item.name)) is None and item.minutes > left and not options.quick:
            left = max(left, 0.0)
            tqdm.write(f"{item.name}: {item.minutes} minutes do not fit into the {left:.1f} that are left")
            continue
        if item.kind == "products":
            what["rates"] = find(results, ("items", "limits", "rates", "float32"))
        yield Group(("items",), [(item.name, what)], needs=item.needs)


def problem(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"small": options.quick, "device": device, "seed": 0}


def dry_run(options: argparse.Namespace) -> str:
    """The plan as a table."""
    total, rows = 0.0, []
    for number, (item, what) in enumerate(tasks(options), 1):
        total += item.minutes
        told = {key: value for key, value in what.items() if key not in ("kind", "small", "device", "limit")}
        rows.append([number, item.name, f"{item.minutes:.1f}", f"{total:.1f}",
                     ", ".join(f"{key} {_words(value)}" for key, value in told.items())])  # fmt: skip
    text = table(["", "item", "minutes", "in all", "what"], rows)
    return f"{text}\n\n{total:.1f} minutes in all, estimated for one H200; nothing was measured."


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", dest="quick", action="store_true", help="the same as --quick")
    parser.add_argument("--minutes", type=float, default=25.0, help="start no item that is estimated to end later (25)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and measure nothing")
    parser.add_argument("--again", action="store_true", help="try again what failed")


def prepare(options: argparse.Namespace) -> None:
    if not (options.quick or options.report or torch.cuda.is_available()):
        raise SystemExit("torch finds no CUDA device here; --small runs on a CPU, --dry-run prints the plan.")
    if options.data is None and not os.environ.get(DATA_VARIABLE):
        options.data = "."  # items that need data sets are left out, with a line that says so


def perform(what: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One item, in this process: its results, or why there are none; seconds; peak memory."""
    device = torch.device(what["device"])
    if device.type == "cuda":
        forget_peaks(device)
    started = time.perf_counter()
    try:
        found = ITEMS[what["kind"]](what, device, directory)
    except Exception as error:
        lines = str(error).strip().splitlines()
        found = {"failed": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}
    found["seconds"] = time.perf_counter() - started
    if device.type == "cuda":
        found["peak_memory_gb"] = highest_peak(device) / 1e9
    return plain(found)


BENCHMARK = Benchmark(
    doc=__doc__,
    name="device",
    quick="tiny, in one process, on a CPU too",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    picture=lambda results, path: picture(results, path.with_suffix(".png")),
    say=lambda run: f"{run['seconds']:.0f} s",
    alone=Path(__file__),
    failures=True,
    what="items",
    options=add_options,
    versions=("triton", "pykeops"),
    prepare=prepare,
)


def main(given: Sequence[str] | None = None) -> None:
    options = BENCHMARK.parse(given)
    if options.dry_run:
        print(dry_run(options))
        return
    benchmark = BENCHMARK
    if options.quick and not options.task:  # a process for each would take longer than what is measured
        prepare(options)
        directory = data_directory(options.data)
        benchmark = dataclasses.replace(BENCHMARK, alone=None, perform=lambda loaded, what: perform(what, directory))
    benchmark.main(given)


if __name__ == "__main__":
    main()

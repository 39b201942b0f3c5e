"""What 8 and 64 GPUs may bring: a projection, from counted bytes and messages and from rates that are assumed.

Counted, on two and on four processes of this machine: the bytes that a rank sends, the messages and the rounds of words
of one product, one iteration of conjugate gradients and one step of ASkotch; they stand beside the formulas of
docs/several-devices.md.  Nothing is timed, so that it does not matter what else the machine does.  Calculated, by
those formulas and by the rates below: seconds on 1, 8 and 64 GPUs.

    python benchmarks/projection.py            # a minute
    python benchmarks/projection.py --quick    # fewer rows: whether it runs
    python benchmarks/projection.py --report   # the tables again, nothing counted
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import sketchgp
from common import describe, table
from rank_processes import Ranks, main, served
from runner import Benchmark, Group
from sketchgp.distributed import sharded
from sketchgp.operators import KernelMatrix

COUNTS, ROWS, QUICK, FEATURES, COLUMNS, RANK, BLOCK = (2, 4), 4000, 1200, 8, 16, 100, 200
UNITS = {"product": (1, 2), "conjugate gradients": (3, 6), "ASkotch": (1, 2)}  # of work, of which the difference counts
HERE = Path(__file__).resolve()

# --------------------------------------------------------------------------- what is assumed of the machines
PAIRS = 1e12  # float32 entries of K that a GPU evaluates and multiplies in a second
FLOPS = 2e13  # float64 operations of a factorization a second
WITHIN, ACROSS = 4e11, 4e10  # bytes a second that a GPU sends, in a machine of eight and between machines
MESSAGE = {1: 0.0, 8: 3e-5, 64: 1e-4}  # seconds that a message takes, however short it is
WORD = {1: 0.0, 8: 1.5e-4, 64: 5e-4}  # the same of a round of words, over gloo
GPUS, LARGE, FACTOR = (1, 8, 64), (10**6, 10**7), 1000  # the last: the rank of the preconditioner


class Unit(NamedTuple):
    """One product, iteration or step, of all ranks together but for what is sent.

    :ivar pairs: entries of K; :ivar flops: of float64 factorizations and products with a factor.
    :ivar sent: bytes of a rank; :ivar messages: of data; :ivar words: rounds of them.
    """

    pairs: float
    flops: float
    sent: float
    messages: int
    words: int


def unit(name: str, n: int, count: int, rank: int, block: int) -> Unit:
    """By the formulas of docs/several-devices.md, for a float32 kernel matrix of which each rank takes rows."""
    share, t = (count - 1) / count, COLUMNS
    if name == "product":
        return Unit(n**2, 0, 4 * n * t * share, 1, 1)
    if name == "conjugate gradients":
        sums = 2 * 8 * (rank * t + 3 * t) * share
        return Unit(n**2, 4 * n * rank * t, 12 * n * t * share + sums, 5, 6)
    return Unit(n * block, block**3 / 3, 8 * block * (4 * share + (count > 1) / count), 2, 1)


def memory(name: str, n: int, count: int, rank: int, block: int) -> float:
    """Bytes of a rank, by the same page: inputs, vectors, the factor, blocks."""
    inputs, t = 3 * 4 * n * FEATURES, COLUMNS
    if name == "product":
        return inputs + 3 * 4 * n * t
    if name == "conjugate gradients":
        return inputs + 8 * n * (rank / count + t * (15 if count == 1 else 3 + 11 / count))
    return inputs + 8 * n * (8 if count == 1 else 4 + 5 / count) + 4 * 8 * block**2


# ------------------------------------------------------------------------------- what a rank does
def _work(name: str, n: int, units: int) -> None:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(n, FEATURES, generator=stream)
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    if name == "product":
        matrix = KernelMatrix.of(kernel, x, engine="dense").detach()
        for _ in range(units):
            matrix._matmul(torch.ones(n, COLUMNS))
        return
    y = torch.randn(n, COLUMNS if name == "conjugate gradients" else 1, generator=stream)
    problem = sketchgp.FullProblem(kernel, x, y, 1.0)
    if name == "conjugate gradients":
        solver = sketchgp.ConjugateGradients(tol=1e-14, max_iterations=units)
        solver.solve(problem, sketchgp.RPCholesky(rank=RANK), matmul="dense")
        return
    sketchgp.ASkotch(tol=1e-14, max_passes=1.05 * units, block_size=BLOCK).solve(problem, matmul="tiled")


def counted(name: str, n: int) -> dict[str, float]:
    """Of a rank and a unit of work: bytes, messages, words."""
    found = []
    for units in UNITS[name]:
        with sharded() as shards:
            words = shards.exchange.words
            _work(name, n, units)
            found.append((shards.bytes_sent, shards.messages, shards.exchange.words - words))
    first, second = UNITS[name]
    steps = (second - first) * (math.ceil(n / BLOCK) if name == "ASkotch" else 1)
    return dict(zip(("sent", "messages", "words"), ((b - a) / steps for a, b in zip(*found, strict=True)), strict=True))


# ------------------------------------------------------------------------------- what is counted
def perform(loaded: dict[int, Ranks], task: tuple[str, int]) -> dict[str, Any]:
    name, n = task
    found = {}
    for count, together in loaded.items():
        ranks = together.run(task)
        mean = {key: sum(rank[key] for rank in ranks) / count for key in ranks[0]}
        found[str(count)] = {**mean, "formula": unit(name, n, count, RANK, BLOCK).sent}
    return {"rows": n, "processes": found}


def block_size(n: int) -> int:
    """That of automatic_block_size, where memory allows it."""
    return math.ceil(math.sqrt(60 * n))


def seconds(name: str, n: int, count: int) -> tuple[float, float, float]:
    """Of computing, of sending, and of waiting for messages; of a pass of ASkotch."""
    block = block_size(n)
    one = unit(name, n, count, FACTOR, block)
    times = math.ceil(n / block) if name == "ASkotch" else 1
    computing = one.pairs / (PAIRS * count) + one.flops / (FLOPS * count)
    sending = one.sent / (WITHIN if count <= 8 else ACROSS)
    waiting = one.messages * MESSAGE[count] + one.words * WORD[count]
    return times * computing, times * sending, times * waiting


def report(results: dict[str, Any]) -> str:
    found = []
    for name, run in results["runs"].items():
        for count, one in run["processes"].items():
            kib = (f"{one[key] / 2**10:.2f}" for key in ("sent", "formula"))
            found.append([name, f"{run['rows']:,}", count, *kib, f"{one['messages']:.1f}", f"{one['words']:.1f}"])
    projected = []
    for name in UNITS:
        for n in LARGE:
            alone = sum(seconds(name, n, 1))
            for count in GPUS:
                each = seconds(name, n, count)
                work = "a pass of ASkotch" if name == "ASkotch" else f"{name}, t = {COLUMNS}"
                gib = memory(name, n, count, FACTOR, block_size(n)) / 2**30
                gain = "" if count == 1 else f"{alone / sum(each):.1f}"
                projected.append([work, f"{n:.0e}".replace("e+0", "e"), str(count), *(f"{s:.3g}" for s in each),
                                  f"{sum(each):.3g}", gain, f"{gib:.2g}"])  # fmt: skip
    counts = table(["work", "rows", "processes", "KiB a rank sends", "by the formula", "messages", "words"], found)
    rates = (
        f"Assumed: {PAIRS:.0e} pairs and {FLOPS:.0e} float64 operations a second and GPU; {WITHIN / 1e9:.0f} GB/s "
        f"sent by a GPU in a machine of eight, {ACROSS / 1e9:.0f} GB/s between machines; "
        f"{1e6 * MESSAGE[8]:.0f} and {1e6 * MESSAGE[64]:.0f} µs for a message of data to 8 and to 64, "
        f"{1e6 * WORD[8]:.0f} and {1e6 * WORD[64]:.0f} µs for a round of words. A preconditioner of rank {FACTOR:,}; "
        "blocks of ASkotch of the automatic size."
    )
    header = [
        "work",
        "rows",
        "GPUs",
        "computing, s",
        "sending, s",
        "waiting, s",
        "together, s",
        "times as fast",
        "GiB a GPU",
    ]
    return "\n".join(
        ["# A projection to 8 and 64 GPUs", "", describe(results["machine"]), "",
         "## Counted", "", "Of one product, iteration or step of float32, the mean of the ranks.", "", counts, "",
         "## Projected, not measured", "", rates, "", table(header, projected), ""]
    )  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    rows = QUICK if options.quick else ROWS
    return {"rows": rows, "features": FEATURES, "columns": COLUMNS, "rank": RANK, "block_size": BLOCK}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    n = problem(options)["rows"]
    return served(HERE, COUNTS, [(name, (name, n)) for name in UNITS])


BENCHMARK = Benchmark(
    __doc__ or "",
    "projection",
    f"{QUICK:,} rows",
    problem,
    groups,
    perform,
    report,
    say=lambda run: ", ".join(f"{one['sent'] / one['formula']:.3f}" for one in run["processes"].values()),
    reads_data=lambda options: False,
)  # fmt: skip

if __name__ == "__main__":
    main(BENCHMARK, counted)

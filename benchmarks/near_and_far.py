"""Products and posterior means of scattered points in one to three dimensions, to a tolerance.

Uniform points, noise 0.09, kernels with lengthscales of some tenths of the side.  Processor seconds of what the engine
``"near_and_far"`` makes before the first product, of products with 1 and 8 columns, and of the gradient of a product
with 8 columns; those of tiles, from 500 rows of the same matrix
(all rows together take half, since tiles use each pair twice).  The largest error of an entry, of two columns, and
what the engine states; entries over k(0).  Then the posterior mean of a float32 model with sketchgp's defaults at 2,000
other places: seconds, iterations, and the error against the known field.

    python benchmarks/near_and_far.py            # fifteen minutes on one core; resumes
    python benchmarks/near_and_far.py --quick    # a fiftieth of the points
    python benchmarks/near_and_far.py --report   # the table again, nothing measured
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import sketchgp
from common import describe, number, table
from lattice import Cells, Field, clocked, field_at
from runner import Benchmark, Group
from sketchgp.operators import KernelMatrix
from sketchgp.operators.engines import NEAR_AND_FAR

SHAPES = {"map": (100_000, 2), "large map": (1_000_000, 2), "series": (1_000_000, 1), "volume": (100_000, 3)}
KERNELS = {"matern12": (0.5, 0.2), "matern32": (1.5, 0.15), "rbf": (None, 0.1)}  # smoothness, lengthscale
ALONE = ("series", "volume")  # of which Matern-3/2 alone is measured
MEANS = ("map", "large map")
NOISE, ROWS, TEST, QUICK = 0.09, 500, 2000, 50


def load(name: str, share: int) -> Cells:
    """Return random places, those of a test, and a known field with noise, float64."""
    n, d = SHAPES[name]
    stream = torch.Generator().manual_seed(0)
    x, test = (torch.rand(rows, d, dtype=torch.float64, generator=stream) for rows in (n // share, TEST))
    y = field_at(x) + math.sqrt(NOISE) * torch.randn(len(x), dtype=torch.float64, generator=stream)
    return Cells(x, y, test, field_at(test))


def mean(cells: Cells) -> dict[str, Any]:
    model = sketchgp.accelerate(Field(cells.x.float(), cells.y.float()).float())
    start = time.process_time()
    found = sketchgp.predict(model, cells.test.float(), variance=None, progress=False)
    seconds = time.process_time() - start
    error = float((found.mean.double() - cells.truth).square().mean().sqrt())
    report = found.report
    return {"seconds": seconds, "iterations": report.iterations if report else 0, "error": error}


def perform(cells: Cells, task: tuple[str, str]) -> dict[str, Any]:
    if task[0] == "mean":
        return mean(cells)
    (nu, lengthscale), dtype = KERNELS[task[0]], getattr(torch, task[1])
    kernel = ScaleKernel(RBFKernel() if nu is None else MaternKernel(nu=nu)).to(dtype).requires_grad_(False)
    kernel.base_kernel.lengthscale, kernel.outputscale, x = lengthscale, 1.0, cells.x.to(dtype)
    matrix = KernelMatrix.of(kernel, x, engine="near_and_far")
    start = time.process_time()
    parts = NEAR_AND_FAR.parts(matrix.pairs)
    making = time.process_time() - start
    vectors = torch.randn(len(x), 8, dtype=dtype, generator=torch.Generator().manual_seed(1))
    one, _ = clocked(lambda: matrix.product(vectors[:, :1]))
    eight, _ = clocked(lambda: matrix.product(vectors))
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))[:ROWS]
    some = KernelMatrix.of(kernel, x[rows], x, engine="tiled")
    tiles_one, _ = clocked(lambda: some.product(vectors[:, :1]))
    tiles_eight, _ = clocked(lambda: some.product(vectors))
    units = torch.zeros(len(x), 2, dtype=dtype)
    units[rows[:2], [0, 1]] = 1
    columns = KernelMatrix.of(kernel, x, x[rows[:2]], engine="tiled").double().to_dense()
    error = float((matrix.product(units).double() - columns).abs().max())
    wanted = KernelMatrix.of(kernel.requires_grad_(True), x, engine="near_and_far")
    gradient, _ = clocked(lambda: wanted.derivative(vectors, vectors))
    scale = len(x) / ROWS
    return {"n": len(x), "making": making, "one": one, "eight": eight, "gradient": gradient, "error": error,
            "stated": parts.error, "delta": math.sqrt(parts.problem.split.t),
            "neighbours": 0 if parts.near is None else parts.near.nnz / len(x),
            "coefficients": 0 if parts.far is None else parts.far.coefficients.size,
            "tiles_one": tiles_one * scale, "tiles_eight": tiles_eight * scale}  # fmt: skip


def report(results: dict[str, Any]) -> str:
    rows, means = [], []
    for name, runs in results["runs"].items():
        for task, run in runs.items():
            if task == "mean":
                means.append([name, number(run["seconds"]), f"{run['iterations']:.0f}", number(run["error"])])
                continue
            times = [number(run[key]) for key in ("making", "one", "tiles_one", "eight", "tiles_eight", "gradient")]
            rows.append([name, task, number(run["n"]), number(run["neighbours"]), number(run["coefficients"]), *times,
                         f"{run['error']:.1g}", f"{run['stated']:.1g}"])  # fmt: skip
    header = ["points", "kernel", "rows", "neighbours", "coefficients", "making, s", "1 column, s", "by tiles, s",
              "8 columns, s", "by tiles, s", "gradient, s", "error", "stated"]  # fmt: skip
    return "\n".join([
        "# Scattered points", "", describe(results["machine"]), "",
        "Processor seconds. Tiles: from 500 rows; all rows together take half, as tiles use each pair twice. "
        "Error: largest of an entry of two columns, over k(0).", "",
        table(header, rows), "", "Posterior means, float32, Matern-3/2:", "",
        table(["points", "s", "iterations", "error"], means), "",
    ])  # fmt: skip


def problem(options: argparse.Namespace) -> dict[str, Any]:
    return {"share": QUICK if options.quick else 1, "noise": NOISE, "kernels": KERNELS}


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for name in SHAPES:
        kernels = ("matern32",) if name in ALONE else KERNELS
        tasks: list[Any] = [(f"{k}, {dtype}", (k, dtype)) for k in kernels for dtype in ("float32", "float64")]
        tasks += [("mean", ("mean", ""))] if name in MEANS else []
        yield Group(("runs", name), tasks, partial(load, name, problem(options)["share"]))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="near_and_far",
    quick="a fiftieth of the points",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    versions=("finufft",),
    reads_data=lambda options: False,
)

if __name__ == "__main__":
    BENCHMARK.main()

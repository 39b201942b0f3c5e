"""Products by the engine ``"fused"`` and by tiles, which take turns, on one thread of a CPU.

Uniform points in a cube, lengthscales of half of its diagonal over the root of three.  Pairs of points per
processor second: rectangular matrices, and square ones, of which both engines use each pair twice.  Errors: root mean
square of a product with one column, over what the product of absolute values is (of float64 products, the difference
from tiles).  Compiling: the first product of a kind less a later one, processor seconds.

    python benchmarks/fused.py            # ten minutes on one core; resumes
    python benchmarks/fused.py --quick    # a tenth of the points
    python benchmarks/fused.py --report   # the table again, nothing measured
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel

from common import describe, number, table
from runner import Benchmark, Group
from sketchgp.kernels import LaplaceKernel
from sketchgp.operators import KernelMatrix
from sketchgp.operators.engines import FUSED

KERNELS: dict[str, Any] = {
    "rbf": RBFKernel,
    "matern12": partial(MaternKernel, nu=0.5),
    "matern32": partial(MaternKernel, nu=1.5),
    "matern52": partial(MaternKernel, nu=2.5),
    "rq": RQKernel,
    "laplace": LaplaceKernel,
    "periodic": PeriodicKernel,
}
MOST = ("rbf", "matern32")  # kernels that are measured with more columns and features, and in float64
FEATURES, MORE, COLUMNS, TURNS, ROWS, QUICK = (1, 2, 3, 8), (12, 16, 20), (2, 4, 8, 11, 16, 32), 5, 10_000, 1000


def kernel_of(name: str, d: int) -> Kernel:
    kernel = KERNELS[name](ard_num_dims=d).requires_grad_(False)
    kernel.lengthscale = torch.full((1, d), 0.5 * d**0.5)
    return kernel


def load(name: str, d: int, dtype: str, rows: int) -> tuple[Kernel, torch.Tensor, torch.Tensor]:
    stream, real = torch.Generator().manual_seed(0), getattr(torch, dtype)
    x, z = (torch.rand(rows, d, generator=stream, dtype=real) for _ in range(2))
    return kernel_of(name, d).to(real), x, z


def seconds(matrix: KernelMatrix, vectors: torch.Tensor) -> float:
    start = time.process_time()
    matrix @ vectors
    return time.process_time() - start


def perform(data: Any, task: tuple[bool, int]) -> dict[str, Any]:
    (kernel, x, z), (square, columns) = data, task
    engines = {name: KernelMatrix.of(kernel, x, None if square else z, engine=name) for name in ("fused", "tiled")}
    vectors = torch.randn(len(x), columns, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    first = {name: seconds(matrix, vectors) for name, matrix in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(TURNS):
        for name, matrix in engines.items():
            times[name].append(seconds(matrix, vectors))
    v = vectors[:, :1]
    exact = engines["tiled"].double()
    wanted, sizes = exact @ v.double(), exact @ v.double().abs()
    errors = {f"{k}_error": float(((m @ v - wanted) / sizes).square().mean().sqrt()) for k, m in engines.items()}
    result = {name: median(values) for name, values in times.items()}
    large = 2**40  # pairs, of which no matrix is stored
    taken = FUSED.pays(exact.expression, large, x.shape[-1], x.dtype, columns, stored=False)
    return {**result, **errors, "compiling": first["fused"] - result["fused"], "taken": taken}


def report(results: dict[str, Any]) -> str:
    rows, pairs, least = [], results["problem"]["rows"] ** 2 / 1e9, float("inf")
    for name, runs in results["runs"].items():
        for task, run in runs.items():
            speeds = [pairs / run[engine] for engine in ("fused", "tiled")]
            errors = [f"{run[f'{engine}_error']:.1g}" for engine in ("fused", "tiled")]
            ratio = speeds[0] / speeds[1]
            least = min(least, ratio) if run["taken"] else least
            shown = [*map(number, (*speeds, ratio)), "fused" if run["taken"] else "tiles"]
            rows.append([*name.split(", "), *task.split(", "), *shown, *errors, number(run["compiling"])])
    header = ["kernel", "features", "dtype", "matrix", "columns", "fused", "tiles", "ratio", "auto", "error, fused",
              "tiles", "compiling, s"]  # fmt: skip
    return "\n".join([
        "# Products in one pass", "", describe(results["machine"]), "",
        f"{number(results['problem']['rows'])} rows and columns, one thread, 10^9 pairs per processor second; "
        f"medians of {TURNS} turns. Error: root mean square over the product of absolute values. Auto: what `\"auto\"` "
        f"takes of a large matrix; the least ratio where it takes one pass is {number(least)}.", "",
        table(header, rows), "",
    ])  # fmt: skip


def problem(options: argparse.Namespace) -> dict[str, Any]:
    return {"rows": QUICK if options.quick else ROWS}


def groups(options: argparse.Namespace, directory: Any, results: dict[str, Any]) -> Iterator[Group]:
    cases = [(name, d, "float32") for name in KERNELS for d in FEATURES]
    cases += [(name, d, "float32") for name in MOST for d in MORE]
    cases += [(name, d, "float64") for name in MOST for d in FEATURES + MORE]
    for name, d, dtype in cases:
        wide = COLUMNS if name in MOST else ()
        shapes = [(square, columns) for square in (True, False) for columns in (1, *wide)]
        tasks = [
            (f"{'square' if square else 'rectangular'}, {columns}", (square, columns)) for square, columns in shapes
        ]
        yield Group(("runs", f"{name}, {d}, {dtype}"), tasks, partial(load, name, d, dtype, problem(options)["rows"]))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="fused",
    quick="a tenth of the points",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    versions=("numba",),
    reads_data=lambda options: False,
)

if __name__ == "__main__":
    BENCHMARK.main()

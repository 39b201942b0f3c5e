"""Products and posterior means where points lie on a regular lattice, with gaps.

Maps and a series of known fields, and the given cells of a map of temperatures (MODIS, whose coordinates are rounded to
five decimals); Matern-3/2, noise 0.09, float64.  Processor seconds of a product with 1 and 8 columns by the engine
``"lattice"``, once it has found its grid; those of tiles, from 500 rows of the same matrix; the largest difference of
these rows from tiles, over k(0) and the sum of the sizes of the vector.  Then the posterior mean of a model with
sketchgp's defaults at 2,000 cells that are not given: seconds, iterations, the error against the known field, the
relative residual of the weights by tiles of 1,000 rows, and the peak memory of the process.  Last the same with
variances by the low-rank method.

    python benchmarks/lattice.py --data DIRECTORY            # fifteen minutes on one core; resumes
    python benchmarks/lattice.py --data DIRECTORY --quick    # a hundredth of the cells
    python benchmarks/lattice.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, load_arrays, number, table
from measure import high_water_mb
from runner import Benchmark, Group
from sketchgp.operators import KernelMatrix
from sketchgp.operators.engines import LATTICE

SHAPES = {"map": (500, 300), "large map": (1000, 1000), "series": (1_000_000,), "volume": (100, 100, 100)}
GIVEN, NOISE, LENGTHSCALE, ROWS, TEST, CHECKED = 0.8, 0.09, 0.05, 500, 2000, 1000
TASKS = ("product, 1 column", "product, 8 columns", "mean", "mean and variance")


class Field(gpytorch.models.ExactGP):
    """Constant mean, Matern-3/2."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), ScaleKernel(MaternKernel(nu=1.5))
        self.double().requires_grad_(False)
        self.likelihood.noise, self.covar_module.outputscale = NOISE, 1.0
        self.covar_module.base_kernel.lengthscale = LENGTHSCALE

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass
class Cells:
    """Given and other cells, float64, in units of the longest side; the known field, where there is one."""

    x: Tensor
    y: Tensor
    test: Tensor
    truth: Tensor | None


def field_at(x: Tensor) -> Tensor:
    """Return the known field, ``(n,)``."""
    return torch.sin(40 * x[:, 0]) + torch.cos(25 * x[:, -1] + 10 * x[:, 0])


def load(directory: Path, name: str, share: float) -> Cells:
    """Return the cells of a problem, or a share of them."""
    if name == "modis_temps_heaton":
        arrays = load_arrays(directory, name)
        x, y = (torch.as_tensor(arrays[part]).double() for part in ("X", "y"))
        given = torch.as_tensor(arrays["is_test"] == 0)
        x, y = x / float(np.ptp(arrays["X"], axis=0).max()), (y - y[given].mean()) / y[given].std()
        some = x[:, 1] >= x[:, 1].quantile(1 - share)
        return Cells(x[given & some], y[given & some], x[~given & some][:TEST], None)
    shape = [max(2, round(size * share ** (1 / len(SHAPES[name])))) for size in SHAPES[name]]
    cells = torch.cartesian_prod(*[torch.arange(size) for size in shape]).reshape(-1, len(shape)).double() / max(shape)
    stream = torch.Generator().manual_seed(0)
    given = torch.rand(len(cells), generator=stream) < GIVEN
    x, test = cells[given], cells[~given][:TEST]
    y = field_at(x) + math.sqrt(NOISE) * torch.randn(len(x), dtype=torch.float64, generator=stream)
    return Cells(x, y, test, field_at(test))


def clocked(compute: Any) -> tuple[float, Any]:
    """Return the processor seconds of a second call, and its result."""
    compute()
    start = time.process_time()
    result = compute()
    return time.process_time() - start, result


def residual(model: Field, cells: Cells) -> float:
    """Return the relative residual of the mean's weights, from some rows of the matrix by tiles."""
    weights = model.prediction_strategy.weights
    rows = torch.randperm(len(cells.x), generator=torch.Generator().manual_seed(3))[:CHECKED]
    some = KernelMatrix.of(model.covar_module, cells.x[rows], cells.x, engine="tiled").detach()
    with torch.no_grad():
        targets = cells.y - model.mean_module(cells.x)
        left = targets[rows] - some.product(weights.unsqueeze(1)).squeeze(1) - NOISE * weights[rows]
    return float(left.norm() / targets[rows].norm())


def perform(cells: Cells, task: str) -> dict[str, Any]:
    if task.startswith("mean"):
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux begins the peak of memory anew
        model = sketchgp.accelerate(Field(cells.x, cells.y), variance="low_rank")
        start = time.process_time()
        variance = None if task == "mean" else "auto"
        found = sketchgp.predict(model, cells.test, variance=variance, progress=False)
        seconds, report, memory = time.process_time() - start, found.report, high_water_mb()
        error = None if cells.truth is None else float((found.mean - cells.truth).square().mean().sqrt())
        solved = {"iterations": 0, "solver": "Cholesky", "converged": True}  # of few rows
        if report is not None:
            solved = {key: getattr(report, key) for key in solved}
        return {"seconds": seconds, **solved, "error": error, "memory_mb": memory, "residual": residual(model, cells)}
    columns = int(task.split()[1])
    vectors = torch.randn(len(cells.x), columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kernel = Field(cells.x, cells.y).covar_module
    matrix = KernelMatrix.of(kernel, cells.x, engine="lattice").detach()
    start = time.process_time()
    grid = LATTICE.grid(matrix.pairs)
    looking = time.process_time() - start
    assert grid is not None
    seconds, product = clocked(lambda: matrix.product(vectors))
    rows = torch.randperm(len(cells.x), generator=torch.Generator().manual_seed(2))[:ROWS]
    some = KernelMatrix.of(kernel, cells.x[rows], cells.x, engine="tiled").detach()
    by_tiles, exact = clocked(lambda: some.product(vectors))
    off = (product[rows] - exact).abs().amax(dim=0) / vectors.abs().sum(dim=0)
    return {"n": len(cells.x), "points": grid.points, "offset": max(grid.reach), "looking": looking, "seconds": seconds,
            "tiles_seconds": by_tiles * len(cells.x) / len(rows), "difference": float(off.max())}  # fmt: skip


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, runs in results["runs"].items():
        products = [runs[task] for task in TASKS[:2] if task in runs]
        mean = runs.get("mean")
        cells = [number(products[0]["n"]), number(products[0]["points"])] if products else ["", ""]
        for run in products:
            cells += [number(run["seconds"]), number(run["tiles_seconds"]), f"{run['difference']:.1g}"]
        cells += [""] * (6 - 3 * len(products))
        if mean is not None:
            error = "" if mean["error"] is None else number(mean["error"])
            cells += [number(mean["seconds"]), f"{mean['iterations']:.0f}{'' if mean['converged'] else '*'}", error]
            cells += [f"{mean['residual']:.1g}", number(mean["memory_mb"] / 1000)] if "residual" in mean else ["", ""]
            both = runs.get("mean and variance")
            cells += [number(both["seconds"]), number(both["memory_mb"] / 1000)] if both else ["", ""]
        rows.append([name, *cells])
    header = ["points", "rows", "points of all grids", "1 column, s", "by tiles, s", "difference",
              "8 columns, s", "by tiles, s", "difference", "mean, s", "iterations", "error",
              "residual", "GB", "mean and variance, s", "GB"]  # fmt: skip
    return "\n".join([
        "# Points on a lattice", "", describe(results["machine"]), "",
        "Processor seconds. Tiles: from 500 rows. Difference: of these rows from tiles, over k(0) and the sum of sizes "
        "of the vector. Error: root mean square, of the mean against the known field (*: not "
        "converged). Residual: of the weights, by tiles of 1,000 rows. GB: peak "
        "memory.", "",
        table(header, rows), "",
    ])  # fmt: skip


def problem(options: argparse.Namespace) -> dict[str, Any]:
    return {"share": 0.01 if options.quick else 1.0, "given": GIVEN, "noise": NOISE, "lengthscale": LENGTHSCALE}


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for name in (*SHAPES, "modis_temps_heaton"):
        tasks = [(task, task) for task in TASKS]
        needs = () if name in SHAPES else (name,)
        yield Group(("runs", name), tasks, partial(load, directory, name, problem(options)["share"]), needs=needs)


BENCHMARK = Benchmark(
    doc=__doc__,
    name="lattice",
    quick="a hundredth of the cells",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
)

if __name__ == "__main__":
    BENCHMARK.main()

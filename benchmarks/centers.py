"""Centers by k-means against random ones (Table 2 of the EigenPro 3 paper): MNIST with 100 and 1,000 points.

All 60,000 training images, pixels from 0 to 1, one-hot targets, Matern-1/2 (the papers' Laplacian) with lengthscale 20.
Two fits on the same points: EigenPro 3 as in the papers (their preconditioner, a constant step, five epochs, the last
iterate), and the exact least-squares fit (``QR`` with noise 1e-3, which is next to none).  The 10,000 test images were
never looked at before.  What the paper printed stands beside it.

    python benchmarks/centers.py --data DIRECTORY            # half an hour on one core, with scikit-learn; resumes
    python benchmarks/centers.py --data DIRECTORY --quick    # 2,000 images, 50 points
    python benchmarks/centers.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from common import describe, load_arrays, median, table
from runner import Benchmark, Group
from sketchgp.operators.tall import TallMatrix

SIZES = (100, 1000)
SEEDS = {"uniform": (0, 1, 2), "k-means": (0,)}
PAPER = {"uniform": {100: 87.24, 1000: 94.96}, "k-means": {100: 91.89, 1000: 95.96}}
LENGTHSCALE, NOISE = 20.0, 1e-3
FITS = {
    "EigenPro 3": (sketchgp.EigenPro3(epochs=5, projection="exact", preconditioner="paper", averaging=False,
                                      cooldown=0), 0.0),
    "exact": (sketchgp.QR(), NOISE),
}  # fmt: skip


@dataclass
class Images:
    """MNIST, pixels from 0 to 1, and its one-hot targets."""

    train_x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: sketchgp.OneHot
    kernel: gpytorch.kernels.Kernel


@dataclass
class Chosen:
    """Inducing points, the seconds that choosing them took, and the kernel of test images against them."""

    images: Images
    points: Tensor
    seconds: float
    tall: TallMatrix


def load(directory: Path, rows: int) -> Images:
    arrays = load_arrays(directory, "mnist")
    test = torch.as_tensor(arrays["is_test"]).bool()
    x, y = torch.as_tensor(arrays["X"]).float() / 255, torch.as_tensor(arrays["y"]).long()
    classes = sketchgp.OneHot(y[~test][:rows])
    kernel = gpytorch.kernels.MaternKernel(nu=0.5)
    kernel.lengthscale = LENGTHSCALE
    return Images(x[~test][:rows], classes.encode(y[~test][:rows]), x[test], y[test], classes, kernel)


def choose(images: Images, m: int, method: str, seed: int) -> Chosen:
    started = time.perf_counter()
    z = sketchgp.choose_inducing_points(images.kernel, images.train_x, m, method=method, seed=seed).points
    seconds = time.perf_counter() - started
    return Chosen(images, z, seconds, TallMatrix(images.kernel, images.test_x, z, accurate=True))


def measure(chosen: Chosen, fit: str) -> dict[str, Any]:
    images, (solver, noise) = chosen.images, FITS[fit]
    problem = sketchgp.InducingPointProblem(images.kernel, images.train_x, images.y, noise, chosen.points)
    solution = solver.solve(problem)
    found = images.classes.decode(chosen.tall.matmul(solution.value))
    return {"accuracy": 100 * float((found == images.test_y).double().mean()), "choosing_seconds": chosen.seconds,
            "solving_seconds": solution.report.seconds, "residual": solution.report.max_residual}  # fmt: skip


def report(results: dict[str, Any]) -> str:
    runs, rows = results["runs"], []
    for m in sorted({run["m"] for run in runs}):
        for method in SEEDS:
            found = {fit: [run["accuracy"] for run in runs if (run["m"], run["method"], run["fit"]) == (m, method, fit)]
                     for fit in FITS}  # fmt: skip
            if any(found.values()):
                cells = [f"{median(found[fit]):.2f}" if found[fit] else None for fit in FITS]
                rows.append([f"{m:,}", method, *cells, len(found["exact"]), PAPER[method].get(m)])
    return "\n".join(["# Centers by k-means and at random, MNIST", "", describe(results["machine"]), "",
                      "Test accuracy, per cent: the median over seeds, and what the paper printed.", "",
                      table(["points", "chosen by", *FITS, "seeds", "paper"], rows), ""])  # fmt: skip


def about(options: Any) -> dict[str, Any]:
    return {"train": 2000 if options.quick else 60_000, "test": 10_000, "lengthscale": LENGTHSCALE, "noise": NOISE,
            "dtype": "float32"}  # fmt: skip


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    images = lru_cache(partial(load, directory, about(options)["train"]))
    for m in (50,) if options.quick else SIZES:
        for method, seeds in SEEDS.items():
            for seed in seeds:
                which = {"m": m, "method": method, "seed": seed}
                tasks = [(({**which, "fit": fit},), fit) for fit in FITS]
                yield Group(("runs",), tasks, partial(lambda w: choose(images(), **w), which), needs=("mnist",))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="centers",
    quick="2,000 images, 50 points",
    problem=about,
    groups=groups,
    perform=measure,
    report=report,
    say=lambda run: f"{run['accuracy']:.2f}%",
    versions=("scikit-learn",),
)


if __name__ == "__main__":
    BENCHMARK.main()

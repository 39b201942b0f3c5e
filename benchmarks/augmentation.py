"""Augmentation on the fly (Figure 4 of the EigenPro 3 paper): the original images are the inducing points, and
EigenPro 4 is trained on a stream of noisy copies, new ones in every epoch.

5,000 images of MNIST and of Fashion-MNIST (drawn by seed 0), pixels from 0 to 1, additive white Gaussian noise of
several deviations; Matern-1/2 with lengthscale 20; one-hot targets; 20 epochs, so 100,000 examples, none of them kept.
Without augmentation the exact fit of the images themselves (noise 1e-3, next to none) is the reference.

    python benchmarks/augmentation.py --data DIRECTORY            # half an hour on two cores; resumes
    python benchmarks/augmentation.py --data DIRECTORY --quick    # 500 images, three epochs
    python benchmarks/augmentation.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from common import describe, median, table
from eigenpro import load
from runner import Benchmark, Group
from sketchgp.operators.tall import TallMatrix

SETS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
IMAGES = 5000
DEVIATIONS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4)
SEEDS = (0, 1)
EPOCHS = 20
BATCH = 500


class Noisy:
    """Batches of images with noise added, in a new order with new noise every time it is gone through."""

    def __init__(self, x: Tensor, y: Tensor, deviation: float, seed: int) -> None:
        self.x, self.y, self.deviation = x, y, deviation
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x), generator=self.generator).split(BATCH):
            noise = torch.randn(len(rows), self.x.shape[1], generator=self.generator)
            yield self.x[rows] + self.deviation * noise, self.y[rows]


def measure(directory: Path, name: str, deviation: float, seed: int, images: int, epochs: int) -> dict[str, Any]:
    """Test accuracy, per cent, after training on the noisy stream; deviation 0 is the exact fit without a stream."""
    x, labels, test_x, test_labels, lengthscale = load(directory, name, None)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:images]
    x, labels = x[chosen], labels[chosen]
    classes = sketchgp.OneHot(labels)
    y = classes.encode(labels)
    kernel = gpytorch.kernels.MaternKernel(nu=0.5)
    kernel.lengthscale = lengthscale
    started = time.perf_counter()
    if deviation:
        problem = sketchgp.InducingPointProblem(kernel, Noisy(x, y, deviation, seed), None, 0.0, x.clone())
        solution = sketchgp.EigenPro4(epochs=epochs, seed=seed).solve(problem, progress=False)
    else:
        problem = sketchgp.InducingPointProblem(kernel, x, y, 1e-3, x.clone())
        solution = sketchgp.KRILL(tol=1e-6).solve(problem, progress=False)
    seconds = time.perf_counter() - started
    scores = TallMatrix(kernel, test_x, x).matmul(solution.value)
    accuracy = 100 * float((classes.decode(scores) == test_labels).double().mean())
    return {"accuracy": accuracy, "seconds": seconds, "solver": solution.report.solver, "notes": solution.report.notes}


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, words in SETS.items():
        for deviation in (0.0, *DEVIATIONS):
            runs = [r for r in results["runs"].values() if (r["set"], r["deviation"]) == (name, deviation)]
            if runs:
                what = f"noise of {deviation:g}" if deviation else "none (exact fit)"
                rows.append([words, what, f"{median([r['accuracy'] for r in runs]):.2f}", len(runs),
                             f"{median([r['seconds'] for r in runs]):.0f}"])  # fmt: skip
    problem = results["problem"]
    return "\n".join([
        "# Augmentation by noise, on a stream", "", describe(results["machine"]), "",
        f"{problem['images']:,} images are the inducing points; {problem['epochs']} epochs of noisy copies by "
        "EigenPro 4. Test accuracy in per cent, the median over seeds.", "",
        table(["set", "augmentation", "accuracy", "seeds", "seconds"], rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    images, epochs = (500, 3) if options.quick else (IMAGES, EPOCHS)
    return {"images": images, "epochs": epochs, "batch": BATCH, "image_seed": 0, "dtype": "float32"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = problem(options)
    deviations = (0.0, 0.1) if options.quick else (0.0, *DEVIATIONS)
    for name in list(SETS)[: 1 if options.quick else None]:
        cells = [(deviation, seed) for deviation in deviations for seed in (SEEDS if deviation else (0,))]
        tasks = [(f"{name}, {d:g}, {seed}", (directory, name, d, seed, sizes["images"], sizes["epochs"]))
                 for d, seed in cells]  # fmt: skip
        yield Group(("runs",), tasks, needs=(name,))


def perform(loaded: None, task: tuple[Path, str, float, int, int, int]) -> dict[str, Any]:
    return {"set": task[1], "deviation": task[2], "seed": task[3], **measure(*task)}


BENCHMARK = Benchmark(
    doc=__doc__,
    name="augmentation",
    quick="500 images of one set, three epochs, one noise",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    say=lambda run: f"{run['accuracy']:.2f}%, {run['seconds']:.0f} s",
)


if __name__ == "__main__":
    BENCHMARK.main()

"""EigenPro 4 against EigenPro 3 and Falkon as the number of inducing points grows (the shape of Table 2 of the
EigenPro 4 paper): seconds an epoch, memory and test error on MNIST, Fashion-MNIST and kin40k.

Inducing points are drawn uniformly from the training rows.  Matern-1/2 (the papers' Laplacian): lengthscale 20 on
pixels from 0 to 1, 10 on the standardised inputs of kin40k.  Both EigenPro methods project without Kzz (by conjugate
gradients), so that none of their memory grows with m^2; ``EigenPro3, exact`` has its Cholesky factor.  EigenPro solves
the problem of noise 0, Falkon that of noise 1e-3, which is next to none.  An epoch of Falkon is an iteration, which
reads all rows once.  Methods run for EPOCHS epochs or SECONDS seconds; where the time does not suffice for one epoch,
its seconds are those of its batches so far, scaled, and there is no error to show.  Every run is a process of its own;
its memory is the peak of the whole process, data and libraries included, and the growth since the data were loaded.

    python benchmarks/eigenpro.py --data DIRECTORY            # an hour on one core; resumes
    python benchmarks/eigenpro.py --data DIRECTORY --quick    # one set, 2,000 rows
    python benchmarks/eigenpro.py --report                    # tables and picture again, nothing measured
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

import sketchgp
from common import load_arrays, median, standardise
from eigenpro_report import picture, report
from measure import current_memory_mb, high_water_mb
from runner import Benchmark, Group
from sketchgp.operators.tall import TallMatrix

SIZES = (1250, 2500, 5000, 10_000, 20_000)
SETS = ("mnist", "fashion_mnist", "uci_kin40k")
METHODS = ("EigenPro4", "EigenPro3", "EigenPro3, exact", "Falkon")
EPOCHS = 4
ITERATIONS = 20  # of Falkon
SECONDS = {"EigenPro4": None, "EigenPro3": 30.0, "EigenPro3, exact": 60.0}
BUDGET = 3.0  # GB, for the matrices of Falkon and the factor of EigenPro3, exact
BYTES = {"Falkon": 48, "EigenPro3, exact": 24}  # times m^2
NOISE = 1e-3
TEST_ROWS = 5000  # of Fashion-MNIST, which comes without a split


def load(directory: Path, name: str, rows: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Training inputs and targets (labels where they are integers), test ones, and the lengthscale."""
    arrays = load_arrays(directory, name)
    x, y = arrays["X"], arrays["y"]
    if name == "uci_kin40k":
        test = arrays["test_mask"][:, 0] == 1
        (train_x, test_x), (train_y, test_y) = standardise(x[~test], x[test]), standardise(y[~test], y[test])
        parts = [torch.as_tensor(part).float() for part in (train_x, train_y, test_x, test_y)]
        lengthscale = 10.0
    else:
        test = arrays["is_test"] == 1 if "is_test" in arrays else np.arange(len(x)) >= len(x) - TEST_ROWS
        images = [torch.as_tensor(part).float().div_(255) for part in (x[~test], x[test])]
        labels = [torch.as_tensor(part).long() for part in (y[~test], y[test])]
        parts = [images[0], labels[0], images[1], labels[1]]
        lengthscale = 20.0
    train_x, train_y, test_x, test_y = parts
    return train_x[:rows], train_y[:rows], test_x, test_y, lengthscale


def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One solve, in this process."""
    train_x, labels, test_x, test_labels, lengthscale = load(directory, task["set"], task["rows"])
    gc.collect()
    classes = None if labels.is_floating_point() else sketchgp.OneHot(labels)
    y = labels if classes is None else classes.encode(labels)
    kernel = gpytorch.kernels.MaternKernel(nu=0.5)
    kernel.lengthscale = lengthscale
    z = train_x[torch.randperm(len(train_x), generator=torch.Generator().manual_seed(0))[: task["m"]]].clone()
    method, before = task["method"], current_memory_mb()
    noise = NOISE if method == "Falkon" else 0.0
    problem = sketchgp.InducingPointProblem(kernel, train_x, y, noise, z)
    ends: list[float] = []
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)  # out of time or of iterations is what is measured
        if method == "Falkon":
            solution = sketchgp.Falkon(max_iterations=task["iterations"]).solve(problem, progress=False)
            epochs = float(solution.report.iterations)
            epoch_seconds = solution.report.seconds / max(1.0, epochs)
        else:
            kind = sketchgp.EigenPro4 if method == "EigenPro4" else sketchgp.EigenPro3
            solver = kind(epochs=task["epochs"], patience=None, max_seconds=task["seconds"],
                          projection="exact" if method.endswith("exact") else "inexact")  # fmt: skip
            solution = solver.solve(problem, callback=lambda progress: ends.append(progress.seconds), progress=False)
            batch = int(solution.report.details["block_size"])
            epochs = min(float(task["epochs"]), solution.report.iterations * batch / len(train_x))
            whole, begun = int(epochs), [solution.report.setup_seconds, *ends]
            epoch_seconds = solution.report.seconds / epochs if not whole else median(
                [b - a for a, b in zip(begun, ends[:whole], strict=False)])  # fmt: skip
    found = {
        "seconds": time.perf_counter() - started,
        "setup_seconds": solution.report.setup_seconds,
        "epochs": epochs,
        "epoch_seconds": epoch_seconds,
        "notes": solution.report.notes,
        "peak_memory_mb": high_water_mb(),
        "grown_mb": (high_water_mb() or 0.0) - (before or 0.0),
    }
    if epochs >= 1:
        scores = TallMatrix(kernel, test_x, z).matmul(solution.value.reshape(len(z), -1))
        if classes is None:
            found["rmse"] = float((scores.squeeze(-1) - test_labels.double()).square().mean().sqrt())
        else:
            found["accuracy"] = 100 * float((classes.decode(scores) == test_labels).double().mean())
    return found


def tasks(quick: bool) -> list[dict[str, Any]]:
    found = []
    for name in SETS[:1] if quick else SETS:
        for m in (100, 200) if quick else SIZES:
            for method in METHODS:
                if m > (20_000 if name != "fashion_mnist" else 10_000):
                    continue
                if BYTES.get(method, 0) * m**2 > BUDGET * 1e9:
                    continue
                found.append({"set": name, "m": m, "method": method, "epochs": 2 if quick else EPOCHS,
                              "iterations": ITERATIONS, "rows": 2000 if quick else None,
                              "seconds": SECONDS.get(method)})  # fmt: skip
    return found


def problem(options: Any) -> dict[str, Any]:
    return {"noise_falkon": NOISE, "epochs": EPOCHS, "iterations_falkon": ITERATIONS, "budget_gb": BUDGET,
            "seconds": SECONDS, "seed": 0, "dtype": "float32"}  # fmt: skip


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for task in tasks(options.quick):
        yield Group(("runs",), [(f"{task['set']}, {task['m']}, {task['method']}", task)], needs=(task["set"],))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="eigenpro",
    quick="one set, 2,000 rows",
    problem=problem,
    groups=groups,
    perform=lambda task, directory: {key: task[key] for key in ("set", "m", "method")} | perform(task, directory),
    report=report,
    picture=lambda results, path: picture(results, path.with_suffix(".png")),
    say=str,
    alone=Path(__file__),
)


if __name__ == "__main__":
    BENCHMARK.main()

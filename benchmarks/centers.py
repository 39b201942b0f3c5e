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
from pathlib import Path
from typing import Any

import gpytorch
import torch
from tqdm import tqdm

import sketchgp
from common import (
    arguments,
    data_directory,
    describe,
    load_arrays,
    load_average,
    machine,
    median,
    now,
    publish,
    read_json,
    results_directory,
    table,
    write_json,
)
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


def measure(directory: Path, path: Path, quick: bool, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds to ``runs`` those that are missing, and saves."""
    arrays = load_arrays(directory, "mnist")
    test = torch.as_tensor(arrays["is_test"]).bool()
    x, y = torch.as_tensor(arrays["X"]).float() / 255, torch.as_tensor(arrays["y"]).long()
    train_x, train_y = x[~test], y[~test]
    if quick:
        train_x, train_y = train_x[:2000], train_y[:2000]
    classes = sketchgp.OneHot(train_y)
    kernel = gpytorch.kernels.MaternKernel(nu=0.5)
    kernel.lengthscale = LENGTHSCALE
    results = {"machine": machine("scikit-learn"), "problem": {"train": len(train_x), "test": int(test.sum()),
               "lengthscale": LENGTHSCALE, "noise": NOISE, "dtype": "float32"}, "runs": runs}  # fmt: skip
    cells = [(m, how, seed) for m in ((50,) if quick else SIZES) for how, seeds in SEEDS.items() for seed in seeds]
    for m, method, seed in cells:
        known = {run["fit"] for run in runs if (run["m"], run["method"], run["seed"]) == (m, method, seed)}
        if known >= set(FITS):
            continue
        started = time.perf_counter()
        z = sketchgp.choose_inducing_points(kernel, train_x, m, method=method, seed=seed).points
        chosen = time.perf_counter() - started
        tall = TallMatrix(kernel, x[test], z, accurate=True)
        for fit, (solver, noise) in FITS.items():
            if fit in known:
                continue
            load_before = load_average()
            problem = sketchgp.InducingPointProblem(kernel, train_x, classes.encode(train_y), noise, z)
            solution = solver.solve(problem)
            accuracy = float((classes.decode(tall.matmul(solution.value)) == y[test]).double().mean())
            runs.append({"m": m, "method": method, "seed": seed, "fit": fit, "accuracy": 100 * accuracy,
                         "choosing_seconds": chosen, "solving_seconds": solution.report.seconds,
                         "residual": solution.report.max_residual, "date": now(),
                         "load_before": load_before})  # fmt: skip
            write_json(path, results)
            tqdm.write(f"{m} points, {method}, seed {seed}, {fit}: {100 * accuracy:.2f}%")
    return results


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


def main() -> None:
    options = arguments(__doc__, "2,000 images, 50 points").parse_args()
    path = results_directory(options.out, options.quick) / "centers.json"
    results = {} if options.fresh else read_json(path)
    if not options.report:
        results = measure(data_directory(options.data), path, options.quick, results.get("runs", []))
    publish(path, results, report)


if __name__ == "__main__":
    main()

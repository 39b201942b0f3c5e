"""Centers by k-means against random ones (Table 2 of the EigenPro 3 paper): MNIST with 100 and 1,000 points.

All 60,000 training images, pixels from 0 to 1, one-hot targets, Matern-1/2 (the papers' Laplacian) with lengthscale 20,
the least-squares fit on the points (``QR`` with noise 1e-3, which is next to none); the 10,000 test images, never
looked at before.  What the paper printed stands beside it.

    python benchmarks/centers.py --data DIRECTORY            # ten minutes on one core, with scikit-learn; resumes
    python benchmarks/centers.py --data DIRECTORY --quick    # 2,000 images, 50 points
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gpytorch
import torch
from tqdm import tqdm

import sketchgp
from common import (
    data_directory,
    describe,
    load_arrays,
    load_average,
    machine,
    median,
    now,
    read_json,
    results_directory,
    table,
    write_json,
)
from sketchgp.operators import KernelMatrix

SIZES = (100, 1000)
SEEDS = {"uniform": (0, 1, 2), "k-means": (0,)}
PAPER = {"uniform": {100: 87.24, 1000: 94.96}, "k-means": {100: 91.89, 1000: 95.96}}
LENGTHSCALE, NOISE = 20.0, 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="directory with mnist.npz")
    parser.add_argument("--out", help="directory for the results")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--quick", action="store_true", help="2,000 images, 50 points")
    options = parser.parse_args()
    path = results_directory(options.out, options.quick) / "centers.json"
    old = {} if options.fresh else read_json(path)
    arrays = load_arrays(data_directory(options.data), "mnist")
    test = torch.as_tensor(arrays["is_test"]).bool()
    x, y = torch.as_tensor(arrays["X"]).float() / 255, torch.as_tensor(arrays["y"]).long()
    train_x, train_y = x[~test], y[~test]
    if options.quick:
        train_x, train_y = train_x[:2000], train_y[:2000]
    classes = sketchgp.OneHot(train_y)
    kernel = gpytorch.kernels.MaternKernel(nu=0.5)
    kernel.lengthscale = LENGTHSCALE
    runs: list[dict[str, Any]] = old.get("runs", [])
    results = {"machine": machine("scikit-learn"), "problem": {"train": len(train_x), "test": int(test.sum()),
               "lengthscale": LENGTHSCALE, "noise": NOISE, "dtype": "float32"}, "runs": runs}  # fmt: skip
    for m in (50,) if options.quick else SIZES:
        for method, seeds in SEEDS.items():
            for seed in seeds:
                if any((run["m"], run["method"], run["seed"]) == (m, method, seed) for run in runs):
                    continue
                load_before, started = load_average(), time.perf_counter()
                z = sketchgp.choose_inducing_points(kernel, train_x, m, method=method, seed=seed).points
                chosen = time.perf_counter() - started
                problem = sketchgp.InducingPointProblem(kernel, train_x, classes.encode(train_y), NOISE, z)
                solution = sketchgp.QR().solve(problem)
                with torch.no_grad():
                    cross = KernelMatrix.of(kernel, x[test], z, engine="tiled").double().to_dense()
                accuracy = float((classes.decode(cross @ solution.value) == y[test]).double().mean())
                runs.append({"m": m, "method": method, "seed": seed, "accuracy": 100 * accuracy,
                             "choosing_seconds": chosen, "solving_seconds": solution.report.seconds,
                             "residual": solution.report.max_residual, "date": now(),
                             "load_before": load_before})  # fmt: skip
                write_json(path, results)
                tqdm.write(f"{m} points, {method}, seed {seed}: {100 * accuracy:.2f}%")
    rows = []
    for m in sorted({run["m"] for run in runs}):
        for method in SEEDS:
            found = [run["accuracy"] for run in runs if (run["m"], run["method"]) == (m, method)]
            if found:
                rows.append([f"{m:,}", method, f"{median(found):.2f}", len(found), PAPER[method].get(m)])
    text = "\n".join(["# Centers by k-means and at random, MNIST", "", describe(results["machine"]), "",
                      "Test accuracy, per cent: the median over seeds, and what the paper printed.", "",
                      table(["points", "chosen by", "accuracy", "seeds", "paper"], rows), ""])  # fmt: skip
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

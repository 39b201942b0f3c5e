"""Posterior means from rows that stay on disk: tune on some of them, then solve for all, in a small memory budget.

Run it with ``python examples/memmap_posterior_mean.py``; it takes some seconds, and writes a file into a temporary
directory.  ``--rows`` sets how many rows there are.
"""

import argparse
import tempfile
from pathlib import Path

import gpytorch
import numpy as np
import torch

import sketchgp

FEATURES = 8


def write(path, rows):
    """A table ``(rows, 8)`` in an .npy file, part by part, and the targets, which are one number a row."""
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, FEATURES))
    y, stream = np.empty(rows, dtype=np.float32), np.random.default_rng(0)
    for start in range(0, rows, 1000):
        part = table[start : start + 1000]
        part[:] = stream.random(part.shape)
        y[start : start + 1000] = function(part) + 0.1 * stream.standard_normal(len(part))
    table.flush()
    return torch.from_numpy(y)


def function(x):
    return np.sin(6 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=8000, help="rows of the table (default: 8,000)")
    rows = parser.parse_args().rows
    test_x = torch.rand(500, FEATURES, generator=torch.Generator().manual_seed(1))
    wanted = torch.from_numpy(function(test_x.numpy()))

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.npy"
        y = write(path, rows)
        x = np.load(path, mmap_mode="r")

        # Hyperparameters from the first thousand rows.
        likelihood, mean = gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.ZeroMean()
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=FEATURES))
        some = torch.from_numpy(np.array(x[:1000]))
        small = sketchgp.InducingPointGP(some, y[:1000], likelihood, mean, kernel, inducing_points=some[:100])
        sketchgp.fit(small, iterations=30, learning_rate=0.2)
        noise = likelihood.noise.item()

        # The mean of all rows.  A budget of a quarter of the table stands for one of a table that is too large.
        with sketchgp.settings.memory_budget(x.nbytes // 4):
            problem = sketchgp.FullProblem(kernel, x, y, noise)
            print(problem.x)
            solution = sketchgp.ASkotch(tol=1e-2, block_size=min(rows, 500)).solve(problem)
            error = solution.predict(test_x) - wanted
            print(f"all points: RMSE {error.square().mean().sqrt():.4f}")
            print(solution.report)

            points = sketchgp.InducingPointProblem(kernel, x, y, noise, some[:300])
            solution = sketchgp.EigenPro4(epochs=4).solve(points)
            error = solution.predict(test_x) - wanted
            print(f"300 inducing points: RMSE {error.square().mean().sqrt():.4f}")
            print(solution.report)
        del x, problem, points  # the file is closed before it goes


if __name__ == "__main__":
    main()

"""What pivots that look at the noise of each point are worth, on real data whose noise differs between points.

Three sets where it does for a known reason.  california_housing: a target is a median over the households of a block,
so its variance falls with their number.  skin_nonskin and uci_keggdirected: rows repeat; repeated rows are
averaged, and the mean of c targets has noise s2 / c.  2,000 points (seed 0), standardised, Matern-3/2 kernel with
lengthscale sqrt(d), s2 (the noise of one row, or of a block of median size) 0.05 and 0.001, float64, conjugate
gradients to a relative residual of 1e-3.  "By the mean" selects as if each point had the mean of the noise; P has the
noise of each point on its diagonal in both cases.  Iterations are medians of three seeds.

    python benchmarks/noise_pivots.py --data DIRECTORY            # two minutes on one core; resumes
    python benchmarks/noise_pivots.py --data DIRECTORY --quick    # one set, 500 points
    python benchmarks/noise_pivots.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, load_arrays, median, standardise, table
from runner import Benchmark, Group
from sketchgp.operators import KernelMatrix, LowRankPlusDiagonal

SETS = ("california_housing", "skin_nonskin", "uci_keggdirected")
NOISES, TOL, SEEDS = (0.05, 0.001), 1e-3, (0, 1, 2)
CHOICES = {
    "RPCholesky": sketchgp.RPCholesky(200),
    "RPCholesky, block": sketchgp.RPCholesky(200, method="block"),
    "Nystrom, gaussian": sketchgp.Nystrom(200),
    "NystromEigenPro": sketchgp.NystromEigenPro(100, subsample_size=500),
}


def load(directory: Path, name: str, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and how many rows or households stand behind each, relative to the unit of the noise."""
    arrays = load_arrays(directory, name)
    x, y = arrays["X"], np.asarray(arrays["y"], dtype=np.float64)
    if name == "california_housing":
        columns = [str(f) for f in arrays["features"]]
        households = x[:, columns.index("Population")] / x[:, columns.index("AveOccup")]
        count = households / np.median(households)
    else:
        x, inverse, count = np.unique(x, axis=0, return_inverse=True, return_counts=True)
        y = np.bincount(inverse.ravel(), y) / count
    rows = np.random.RandomState(0).permutation(len(y))[:n]
    return tuple(torch.as_tensor(part[rows], dtype=torch.float64) for part in (*standardise(x), *standardise(y), count))  # type: ignore[return-value]


def measure(data: tuple[Tensor, Tensor, Tensor], level: float) -> dict[str, Any]:
    """Iterations with either selection, and what RPCholesky leaves with either."""
    x, y, count = data
    kernel = ScaleKernel(MaternKernel(nu=1.5)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, x.shape[1] ** 0.5
    noise = level / count
    mean = noise.mean().expand_as(noise)
    operator = KernelMatrix.of(kernel, x).detach()
    system = sketchgp.FullProblem(kernel, x, y, noise).system("dense")
    solver = sketchgp.ConjugateGradients(tol=TOL, max_iterations=1000)

    def iterations(built: LowRankPlusDiagonal) -> int:
        return solver.run(system, y.unsqueeze(1), built)[1].iterations

    found: dict[str, Any] = {"noise_ratio": float(noise.max() / noise.min())}
    for name, choice in CHOICES.items():
        by_mean, by_each = [], []
        for seed in SEEDS if hasattr(choice, "seed") else SEEDS[:1]:
            seeded = dataclasses.replace(choice, seed=seed) if hasattr(choice, "seed") else choice
            blind = seeded.build(operator, mean)
            by_mean.append(iterations(LowRankPlusDiagonal(blind.factor, blind.diagonal_part - mean + noise)))
            by_each.append(iterations(seeded.build(operator, noise)))
        found[name] = {"by_mean": by_mean, "by_each": by_each}
    for key, selected_by in (("by_mean", mean), ("by_each", noise)):
        factor = CHOICES["RPCholesky"].build(operator, selected_by).factor
        found.setdefault("left", {})[key] = float(((operator.diagonal() - factor.square().sum(dim=1)) / noise).sum())
    return found


def report(results: dict[str, Any]) -> str:
    rows = []
    for run in results["runs"].values():
        cells = [f"{median(run[c]['by_mean']):.0f} → {median(run[c]['by_each']):.0f}" for c in CHOICES]
        left = f"{run['left']['by_mean']:.2g} → {run['left']['by_each']:.2g}"
        rows.append([run["set"], f"{run['noise']:g}", f"{run['noise_ratio']:.0f}", *cells, left])
    problem = results["problem"]
    return "\n".join([
        "# Pivots by the mean of the noise, and by the noise of each point", "", describe(results["machine"]), "",
        f"{problem['n']:,} points, Matern-3/2, rank 200 (NystromEigenPro: 100 of 500 points), float64. Iterations of "
        f"conjugate gradients to {problem['tol']:g}: pivots by the mean → by each point's noise. The last column: what "
        "RPCholesky leaves of the trace over the noise, the bound of the condition number.", "",
        table(["set", "noise", "largest / least", *CHOICES, "sum(residual / noise)"], rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    return {"n": 500 if options.quick else 2000, "tol": TOL, "seeds": SEEDS, "dtype": "float64"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    n = problem(options)["n"]
    for name in SETS[: 1 if options.quick else None]:
        tasks = [(f"{name}, {level:g}", (name, level)) for level in NOISES]
        yield Group(("runs",), tasks, load=partial(load, directory, name, n), needs=(name,))


def perform(data: tuple[Tensor, Tensor, Tensor], task: tuple[str, float]) -> dict[str, Any]:
    return {"set": task[0], "noise": task[1], **measure(data, task[1])}


BENCHMARK = Benchmark(
    doc=__doc__,
    name="noise_pivots",
    quick="one set, 500 points",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
)


if __name__ == "__main__":
    BENCHMARK.main()

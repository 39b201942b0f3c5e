"""What orthogonal and quasi-random features gain on independent ones: errors of the kernel matrix and of the posterior
mean, on sets of few and many dimensions.

Both errors are relative, of one draw of N features: of the matrix of the training points in the Frobenius norm, of the
mean of ridge regression on the features at test points from the exact posterior's in the 2-norm. Root mean squares over
seeds.

    python benchmarks/random_features.py --data DIRECTORY           # some five minutes
    python benchmarks/random_features.py --data DIRECTORY --quick   # 200 rows, two seeds
    python benchmarks/random_features.py --report                   # the table again, nothing measured
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from common import describe, load_arrays, number, standardise, subsample, table, targets
from runner import Benchmark, Group
from sketchgp.operators.feature_map import KINDS, RandomFeatures

SETS = {  # name -> label that is 1 in a regression of -1 and 1, or None; in the order of their dimensions
    "modis_temps_heaton": None,
    "uci_kin40k": None,
    "pendigits": 3,
    "optdigits": 3,
    "qm7_atomization_cm": None,
}
KERNELS = {  # and the lengthscale, in median distances of the points
    "RBF, 0.5": (gpytorch.kernels.RBFKernel, 0.5),
    "RBF, 2": (gpytorch.kernels.RBFKernel, 2.0),
    "Matern 5/2, 1": (lambda: gpytorch.kernels.MaternKernel(nu=2.5), 1.0),
    "Matern 1/2, 1": (lambda: gpytorch.kernels.MaternKernel(nu=0.5), 1.0),
}
WORDS = {"random": "independent", "orthogonal": "orthogonal", "quasi": "quasi-random"}


@dataclass
class Data:
    """Standardised points and targets, float64, and the median distance of the points."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    distance: float


def load(directory: Path, name: str, p: dict[str, Any]) -> Data:
    x, y = subsample(load_arrays(directory, name), p["rows"] + p["test_rows"], seed=0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(standardise(x.reshape(len(x), -1))[0])[order]
    y = torch.as_tensor(standardise(targets(y, SETS[name]).reshape(-1, 1))[0]).squeeze(1)[order]
    train = x[p["test_rows"] :]
    distance = float(torch.cdist(train[:500], train[:500]).median())
    return Data(train, y[p["test_rows"] :], x[: p["test_rows"]], distance)


def perform(data: Data, what: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Errors for each number of features, root mean squares over the seeds."""
    name, kind, p = what
    began, (make, times) = time.perf_counter(), KERNELS[name]
    kernel = make().double().requires_grad_(False)
    kernel.lengthscale = times * data.distance
    exact, cross = kernel(data.x).to_dense(), kernel(data.test_x, data.x).to_dense()
    noisy = exact + p["noise"] * torch.eye(len(exact), dtype=exact.dtype)
    mean = cross @ torch.linalg.solve(noisy, data.y)
    found: dict[str, Any] = {"matrix": [], "mean": []}
    for count in p["features"]:
        squares = torch.zeros(2, dtype=torch.float64)
        for seed in range(p["seeds"]):
            features = RandomFeatures(kernel, data.x.mean(dim=0, keepdim=True), seed, kind)
            phi, there = (features(x, 0, count // 2) for x in (data.x, data.test_x))
            ridge = phi.mT @ phi
            ridge.diagonal().add_(count * p["noise"])
            other = there @ torch.linalg.solve(ridge, phi.mT @ data.y)
            squares[0] += ((phi @ phi.mT / count - exact).norm() / exact.norm()) ** 2
            squares[1] += ((other - mean).norm() / mean.norm()) ** 2
        for key, square in zip(("matrix", "mean"), squares.tolist(), strict=True):
            found[key].append(math.sqrt(square / p["seeds"]))
    return {**found, "seconds": time.perf_counter() - began}


def ratios(runs: dict[str, Any], kind: str, key: str, place: int) -> list[float]:
    """Of an error to that of independent features, a set and kernel each."""
    return [run[kind][key][place] / run["random"][key][place] for of in runs.values() for run in of["kernels"].values()]


def report(results: dict[str, Any]) -> str:
    p, rows, runs = results["problem"], [], results["runs"]
    others = [kind for kind in KINDS if kind != "random"]
    for name in (name for name in SETS if name in runs):
        for kernel, run in runs[name]["kernels"].items():
            cells = [f"{name} ({runs[name]['dimensions']})", kernel]
            for key in ("matrix", "mean"):
                cells.append(number(run["random"][key][-1]))
                cells += [f"{run[kind][key][-1] / run['random'][key][-1]:.2f}" for kind in others]
            rows.append(cells)
    lines = [
        f"- {WORDS[kind]}, {p['features'][place]:,} features: the matrix's error "
        f"{statistics.geometric_mean(ratios(runs, kind, 'matrix', place)):.2f} times that of independent ones, the "
        f"mean's {statistics.geometric_mean(ratios(runs, kind, 'mean', place)):.2f} times."
        for place in range(len(p["features"]))
        for kind in others
    ]
    header = ["set (dimensions)", "kernel, lengthscale", "matrix, independent", *(f"{WORDS[k]}, times" for k in others)]
    header += ["mean, independent", *(f"{WORDS[k]}, times" for k in others)]
    return "\n".join([
        "# Orthogonal and quasi-random features", "", describe(results["machine"]), "",
        f"Relative errors with {p['features'][-1]:,} features, root mean squares over {p['seeds']} seeds, and theirs "
        f"as multiples of those of independent features. {p['rows']:,} training points, {p['test_rows']:,} test "
        f"points, standardised; noise {p['noise']:g}; float64. A class against the rest on sets of digits. Behind a "
        "kernel stands its lengthscale over the median distance.", "",
        table(header, rows), "", "Geometric means over the table's rows:", "", *lines, "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    rows, seeds = (200, 2) if options.quick else (1000, 5)
    features = [128] if options.quick else [256, 1024]
    return {"rows": rows, "test_rows": rows // 2, "features": features, "seeds": seeds, "noise": 0.05}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    p = problem(options)
    for name in SETS:
        tasks = [((kernel, kind), (kernel, kind, p)) for kernel in KERNELS for kind in KINDS]
        yield Group(
            ("runs", name, "kernels"),
            tasks,
            needs=(name,),
            load=lambda name=name: load(directory, name, p),
            about=lambda data: {"dimensions": data.x.shape[1]},
        )


BENCHMARK = Benchmark(
    doc=__doc__,
    name="random_features",
    quick="200 rows, two seeds",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    say=lambda run: f"matrix {run['matrix'][-1]:.3g}, mean {run['mean'][-1]:.3g}, {run['seconds']:.1f} s",
)


if __name__ == "__main__":
    BENCHMARK.main()

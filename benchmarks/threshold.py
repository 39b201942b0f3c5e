"""From how many points on conjugate gradients pay: a training step and a posterior mean, beside GPyTorch's Cholesky.

One model, twice: as GPyTorch factorizes it, and accelerated with the iterative path forced.  Matern-5/2 with one
lengthscale a feature, real data (kin8nm, 8 features; uci_pol, 26), standardised, noise 0.05 and 0.001, float32.
Processor seconds of one call, the least of three; the hyperparameters change a little before each, so that nothing
cached serves twice.  This is what ``sketchgp.models.accelerated.threshold`` takes its 800 points from.

    python benchmarks/threshold.py --data DIRECTORY            # about three minutes on one core
    python benchmarks/threshold.py --data DIRECTORY --quick    # one set, two sizes
    python benchmarks/threshold.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from common import describe, load_arrays, number, standardise, subsample, table
from runner import Benchmark, Group

SETS, NOISES, SIZES, TESTS, CALLS = ("kin8nm", "uci_pol"), (0.05, 0.001), (400, 800, 1200, 2000, 3000, 4000), 50, 3


class Regression(gpytorch.models.ExactGP):
    """Constant mean, Matern-5/2 with one lengthscale a feature."""

    def __init__(self, x: Tensor, y: Tensor, noise: float) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=x.shape[1])
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
        self.likelihood.noise, kernel.lengthscale = noise, x.shape[1] ** 0.5

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def training_step(model: Regression, x: Tensor) -> None:
    model.train()
    model.zero_grad()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    (-mll(model(*model.train_inputs), model.train_targets)).backward()


def mean(model: Regression, x: Tensor) -> None:
    model.train()
    model.eval()
    with torch.no_grad(), gpytorch.settings.skip_posterior_variances():
        _ = model(x).mean


def seconds(model: Regression, x: Tensor, work: Callable[[Regression, Tensor], None]) -> float:
    """The least processor time of a few calls."""
    found = []
    for _ in range(CALLS):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0001)
        start = time.process_time()
        work(model, x)
        found.append(time.process_time() - start)
    return min(found)


def measure(x: Tensor, y: Tensor, n: int, noise: float) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for name, threshold in (("cholesky", 10**6), ("iterations", 10)):
        model = Regression(x[:n], y[:n], noise)
        if name == "iterations":
            sketchgp.accelerate(model)
        with gpytorch.settings.max_cholesky_size(threshold), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry[name] = {work.__name__: seconds(model, x[n:], work) for work in (training_step, mean)}
    return entry


def report(results: dict[str, Any]) -> str:
    rows = []
    for key, entry in results["runs"].items():
        name, noise, n = key.split(", ")
        cells = []
        for work in ("training_step", "mean"):
            a, b = entry["cholesky"][work], entry["iterations"][work]
            cells += [number(a), number(b), number(a / b)]
        rows.append([name, noise, n, *cells])
    header = ["set", "noise", "n", "step: Cholesky", "iterations", "ratio", "mean: Cholesky", "iterations", "ratio"]
    note = "Processor seconds; ratios above 1 are for iterations."
    return "\n".join(
        ["# Cholesky or iterations", "", describe(results["machine"]), "", note, "", table(header, rows), ""]
    )


def load(directory: Path, name: str, n: int) -> tuple[Tensor, Tensor]:
    """So many rows and those to predict, standardised, float32."""
    features, targets = subsample(load_arrays(directory, name), n + TESTS, 0)
    features, targets = standardise(features)[0], standardise(targets[:, None])[0][:, 0]
    order = torch.randperm(n + TESTS, generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(features)[order].float(), torch.from_numpy(targets)[order].float()


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sets, sizes = (SETS[:1], SIZES[:2]) if options.quick else (SETS, SIZES)
    for name in sets:
        tasks = [(f"{name}, {noise:g}, {n}", (directory, name, n, noise)) for noise in NOISES for n in sizes]
        yield Group(("runs",), tasks, needs=(name,))


def perform(loaded: None, task: tuple[Path, str, int, float]) -> dict[str, Any]:
    directory, name, n, noise = task
    return measure(*load(directory, name, n), n, noise)


BENCHMARK = Benchmark(
    doc=__doc__,
    name="threshold",
    quick="one set, two sizes",
    problem=lambda options: {"seed": 0, "tests": TESTS, "calls": CALLS},
    groups=groups,
    perform=perform,
    report=report,
)


if __name__ == "__main__":
    BENCHMARK.main()

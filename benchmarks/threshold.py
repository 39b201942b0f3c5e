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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor
from tqdm import tqdm

import sketchgp
from common import (
    arguments,
    data_directory,
    describe,
    load_arrays,
    load_average,
    machine,
    number,
    publish,
    read_json,
    results_directory,
    standardise,
    subsample,
    table,
    write_json,
)

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
    entry: dict[str, Any] = {"load_before": load_average()}
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


def main() -> None:
    options = arguments(__doc__, "one set, two sizes").parse_args()
    path: Path = results_directory(options.out, options.quick) / "threshold.json"
    results = {} if options.fresh else read_json(path)
    if not options.report:
        directory = data_directory(options.data)
        sets, sizes = (SETS[:1], SIZES[:2]) if options.quick else (SETS, SIZES)
        results = {"machine": machine(), "problem": {"seed": 0, "tests": TESTS, "calls": CALLS},
                   "runs": results.get("runs", {})}  # fmt: skip
        todo = [(name, noise, n) for name in sets for noise in NOISES for n in sizes]
        for name, noise, n in tqdm(todo, disable=None):
            if f"{name}, {noise:g}, {n}" in results["runs"]:
                continue
            features, targets = subsample(load_arrays(directory, name), n + TESTS, 0)
            features, targets = standardise(features)[0], standardise(targets[:, None])[0][:, 0]
            order = torch.randperm(n + TESTS, generator=torch.Generator().manual_seed(0))
            x, y = torch.from_numpy(features)[order].float(), torch.from_numpy(targets)[order].float()
            results["runs"][f"{name}, {noise:g}, {n}"] = measure(x, y, n, noise)
            write_json(path, results)
    publish(path, results, report)


if __name__ == "__main__":
    main()

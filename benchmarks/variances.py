"""The variances that ``model(x).variance`` gives, beside the exact ones and GPyTorch's, on real data.

Four sets, 2,000 training and 200 test points (seed 0), standardised, Matern-3/2 with lengthscale sqrt(d), output scale
1, float32, at noise 0.1, 1e-2 and 1e-4; the exact variances are by dense float64.  What is compared is the variance of
an observation, the noise added.  Accelerated: the call that a user types, with defaults, and once more with conjugate
gradients in place of the factorization that the default takes; and the low-rank variance of ``predict``.  GPyTorch: its
default (conjugate gradients to its own tolerance, or as far as they come in 1,000 iterations) and ``fast_pred_var``.

    python benchmarks/variances.py --data DIRECTORY            # some ten minutes on two cores; resumes
    python benchmarks/variances.py --data DIRECTORY --quick    # one set, 1,000 points, no GPyTorch default
    python benchmarks/variances.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, load_arrays, standardise, subsample, table
from runner import Benchmark, Group

SETS = ("kin8nm", "cod_rna", "diamonds", "california_housing")
NOISES = (1e-1, 1e-2, 1e-4)
ROWS, TESTS = 2000, 200


class Model(gpytorch.models.ExactGP):
    """Zero mean, one kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def load(directory: Path, name: str, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Training inputs and targets, test inputs, float32."""
    x, y = subsample(load_arrays(directory, name), rows + TESTS, seed=0)
    x, y = (torch.as_tensor(part).float() for part in (*standardise(x), *standardise(y)))
    return x[:rows], y[:rows].reshape(-1), x[rows:]


def build(data: tuple[Tensor, Tensor, Tensor], noise: float) -> Model:
    x, y, _ = data
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, x.shape[1] ** 0.5
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-6))
    likelihood.noise = noise
    return Model(x, y, likelihood, kernel).eval()


def exact(data: tuple[Tensor, Tensor, Tensor], noise: float) -> tuple[Tensor, Tensor]:
    """Mean and latent variance by dense float64."""
    x, y, test = (part.double() for part in data)
    kernel = build(data, noise).covar_module.double()
    with torch.no_grad():
        c = kernel(x, test).to_dense()
        matrix = kernel(x, x).to_dense() + noise * torch.eye(len(x), dtype=torch.float64)
        w = torch.linalg.solve(matrix, torch.cat([y.unsqueeze(1), c], dim=1))
        return c.mT @ w[:, 0], 1 - (c * w[:, 1:]).sum(dim=0)


def called(model: Model, test: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Mean and variance by ``model(x)``, and the seconds to either."""
    start = time.perf_counter()
    posterior = model(test)
    mean = posterior.mean
    middle = time.perf_counter()
    variance = posterior.variance
    return mean, variance, middle - start, time.perf_counter() - middle


def accelerated(solver: Any, data: Any, noise: float) -> tuple[Tensor, Tensor, float, float]:
    return called(sketchgp.accelerate(build(data, noise), solver=solver), data[2])


def low_rank(data: Any, noise: float) -> tuple[Tensor, Tensor, float, float]:
    model = sketchgp.accelerate(build(data, noise))
    start = time.perf_counter()
    sketchgp.predict(model, data[2], variance=None, progress=False)
    middle = time.perf_counter()
    found = sketchgp.predict(model, data[2], variance="low_rank", progress=False)
    assert found.variance is not None
    return found.mean, found.variance, middle - start, time.perf_counter() - middle


def plain(fast: bool, data: Any, noise: float) -> tuple[Tensor, Tensor, float, float]:
    with gpytorch.settings.fast_pred_var(fast):
        return called(build(data, noise), data[2])


METHODS: dict[str, Callable[[Any, float], tuple[Tensor, Tensor, float, float]]] = {
    "sketchgp, model(x)": partial(accelerated, "auto"),
    "sketchgp, model(x), ConjugateGradients": partial(accelerated, sketchgp.ConjugateGradients()),
    "sketchgp, predict, low_rank": low_rank,
    "GPyTorch, fast_pred_var": partial(plain, True),
    "GPyTorch, default": partial(plain, False),
}


def perform(data: tuple[Tensor, Tensor, Tensor], task: tuple[str, float, str]) -> dict[str, Any]:
    name, noise, method = task
    mean, variance = exact(data, noise)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        found_mean, found, to_mean, to_variance = METHODS[method](data, noise)
    ratio = ((found.double() + noise) / (variance + noise)).quantile(
        torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=torch.float64)
    )
    error = float((found_mean.double() - mean).abs().max() / mean.std())
    return {"set": name, "noise": noise, "method": method, "ratios": ratio.tolist(), "mean_error": error,
            "seconds_mean": to_mean, "seconds_variance": to_variance, "warned": bool(caught)}  # fmt: skip


def report(results: dict[str, Any]) -> str:
    rows = []
    for run in results["runs"].values():
        least, low, middle, high, most = (f"{value:.3g}" for value in run["ratios"])
        seconds = (f"{run[f'seconds_{what}']:.1f}" for what in ("mean", "variance"))
        spread = (middle, f"{low} to {high}", f"{least} to {most}", f"{run['mean_error']:.1e}")
        rows.append([run["set"], f"{run['noise']:g}", run["method"], *spread, *seconds])
    head = ["set", "noise", "method", "median", "5% to 95%", "all", "error of the mean", "s mean", "s variance"]
    problem = results["problem"]
    return "\n".join([
        "# Predictive variances over exact ones", "", describe(results["machine"]), "",
        f"{problem['rows']:,} training and {problem['tests']} test points, float32. Variance of an observation over "
        "the exact one; the largest error of the mean over its spread; seconds to the mean, and from there to the "
        "variance.",
        "", table(head, rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    return {"rows": 1000 if options.quick else ROWS, "tests": TESTS, "seed": 0, "dtype": "float32"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    methods = list(METHODS)[: -1 if options.quick else None]
    for name in SETS[: 1 if options.quick else None]:
        tasks = [(f"{name}, {noise:g}, {method}", (name, noise, method)) for noise in NOISES for method in methods]
        yield Group(("runs",), tasks, load=partial(load, directory, name, problem(options)["rows"]), needs=(name,))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="variances",
    quick="one set, 1,000 points, no GPyTorch default",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
)


if __name__ == "__main__":
    BENCHMARK.main()

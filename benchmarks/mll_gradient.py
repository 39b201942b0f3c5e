"""Error of the marginal likelihood's gradient against dense float64 autograd, n = 3000, 10 probes.

A training step in GPyTorch estimates the gradient of the log marginal likelihood from a few random probe
vectors and from CG solves that stop at ``cg_tolerance`` (1 by default).  For each problem below, at fixed
hyperparameters, one ``ExactMarginalLogLikelihood`` and one ``backward`` are compared with the exact gradient,
taken through a dense float64 Cholesky factorization: the 2-norm of the difference over the 2-norm of the
exact gradient, all raw hyperparameters together (each ARD lengthscale, output scale, noise, constant mean).

    python benchmarks/mll_gradient.py --data DIRECTORY            # a few minutes on two cores; resumes
    python benchmarks/mll_gradient.py --data DIRECTORY --quick    # n = 1000, one problem, two seeds
    python benchmarks/mll_gradient.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from common import describe, load_arrays, median, number, standardise, subsample, table
from measure import counted_gpytorch_cg
from runner import Benchmark, Group

PROBES = 10
TARGET = 5e-3


@dataclass(frozen=True)
class Problem:
    """A data set with the hyperparameters at which the gradient is taken.

    The lengthscales are ``lengthscale`` times factors from 0.8 to 1.25, so that no two inputs share one.
    """

    name: str
    kernel: str  # "rbf" or "matern" (5/2)
    lengthscale: float
    noise: float

    @property
    def key(self) -> str:
        return f"{self.name}, {self.kernel}, lengthscale {self.lengthscale:g}, noise {self.noise:g}"


PROBLEMS = (
    Problem("uci_kin40k", "rbf", 2.0, 1e-2),
    Problem("uci_kin40k", "rbf", 2.0, 1e-3),
    Problem("california_housing", "matern", 2.0, 1e-1),
    Problem("diamonds", "rbf", 3.0, 3e-2),
)

# label: system, rank (None: the system's default), cg_tolerance (None: GPyTorch's default for training, 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "GPyTorch default": {"system": "gpytorch"},
    "GPyTorch, tolerance 1e-2": {"system": "gpytorch", "tolerance": 1e-2},
    "sketchgp default": {"system": "sketchgp"},
    "sketchgp, rank 50": {"system": "sketchgp", "rank": 50},
    "sketchgp, rank 200": {"system": "sketchgp", "rank": 200},
    "sketchgp, rank 500": {"system": "sketchgp", "rank": 500},
}


class Regression(gpytorch.models.ExactGP):
    """Constant mean, scaled kernel with a lengthscale an input."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: str) -> None:
        super().__init__(x, y, likelihood)
        d = x.shape[-1]
        base = (
            gpytorch.kernels.RBFKernel(ard_num_dims=d)
            if kernel == "rbf"
            else gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=d)
        )
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(base)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def build(problem: Problem, x: Tensor, y: Tensor) -> Regression:
    """The model in training mode, with the dtype of x; ``model.likelihood`` is its likelihood."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-6))
    model = Regression(x, y, likelihood, problem.kernel).to(x)
    factors = torch.logspace(-0.1, 0.1, x.shape[-1], dtype=x.dtype)
    model.covar_module.base_kernel.lengthscale = problem.lengthscale * factors
    model.covar_module.outputscale = 1.0
    model.mean_module.constant = 0.1
    likelihood.noise = problem.noise
    return model.train()


def gradient(model: torch.nn.Module) -> Tensor:
    """All gradients as one float64 vector, in the order of the parameters' names."""
    named = sorted(model.named_parameters())
    return torch.cat([p.grad.double().reshape(-1) for _, p in named if p.grad is not None])


def dense(model: Regression) -> tuple[float, Tensor]:
    """Log marginal likelihood per datum and its gradient by a dense Cholesky factorization; float64."""
    x, y = model.train_inputs[0], model.train_targets
    model.zero_grad()
    n = len(y)
    matrix = model.covar_module(x).to_dense() + model.likelihood.noise * torch.eye(n, dtype=x.dtype)
    factor = torch.linalg.cholesky(matrix)
    deviation = (y - model.mean_module(x)).unsqueeze(-1)
    quadratic = (deviation * torch.cholesky_solve(deviation, factor)).sum()
    value = -0.5 * (quadratic + 2 * factor.diagonal().log().sum() + n * torch.log(torch.tensor(2 * torch.pi)))
    (value / n).backward()
    return float(value.detach()) / n, gradient(model)


def estimate(
    problem: Problem, setting: dict[str, Any], x: Tensor, y: Tensor, seed: int
) -> tuple[dict[str, Any], Tensor]:
    """One training step's value and gradient, as the setting gives them."""
    model = build(problem, x, y)
    solves: list[Any]
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(gpytorch.settings.num_trace_samples(PROBES))
        if setting.get("tolerance") is not None:
            stack.enter_context(gpytorch.settings.cg_tolerance(setting["tolerance"]))
        if setting["system"] == "sketchgp":
            import sketchgp

            sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=setting.get("rank"), seed=seed))
            solves = stack.enter_context(sketchgp.record_solves())
        else:
            solves = stack.enter_context(counted_gpytorch_cg())
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        torch.manual_seed(seed)
        started = time.perf_counter()
        value = mll(model(*model.train_inputs), model.train_targets)
        value.backward()
        seconds = time.perf_counter() - started
    work: dict[str, Any] = {
        "value": float(value.detach()),
        "seconds": seconds,
        "iterations": [solve.iterations for solve in solves],
    }
    if setting["system"] == "sketchgp":
        work["ranks"] = [solve.rank for solve in solves]
    return work, gradient(model)


def report(results: dict[str, Any]) -> str:
    info, about = results["machine"], results["problem"]
    lines = [
        "# Gradient of the marginal likelihood", "",
        describe(info),
        f"n = {about['n']}, {about['probes']} probes, {about['seeds']} seeds; relative error of the whole "
        "gradient against dense float64 autograd: median (largest). GPyTorch's default training tolerance "
        "is 1.", "",
    ]  # fmt: skip
    header = ["dtype", "system", "gradient error", "value error", "iterations", "rank", "seconds",
              "within 5e-3"]  # fmt: skip
    for name, by_setting in results["problems"].items():
        rows: list[list[object]] = []
        for label, runs in by_setting["runs"].items():
            dtype, system = label.split(": ", 1)
            errors = [run["gradient_error"] for run in runs]
            ranks = {rank for run in runs for rank in run.get("ranks", [])}
            middle = median(errors)
            rows.append([
                dtype, system, f"{number(middle, 2)} ({number(max(errors), 2)})",
                number(median([run["value_error"] for run in runs]), 2),
                number(median([max(run["iterations"], default=0) for run in runs])),
                ", ".join(map(str, sorted(ranks))) if ranks else "15",
                number(median([run["seconds"] for run in runs])),
                "yes" if middle is not None and middle <= TARGET else "no",
            ])  # fmt: skip
        lines += [f"## {name}", "", table(header, rows), ""]
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, help="rows (3000)")
    parser.add_argument("--seeds", type=int, help="number of seeds (10)")


def about(options: argparse.Namespace) -> dict[str, Any]:
    return {"n": options.n or (1000 if options.quick else 3000), "probes": PROBES,
            "seeds": options.seeds or (2 if options.quick else 10), "row_seed": 0, "target": TARGET}  # fmt: skip


@dataclass
class Loaded:
    """A problem, ready: data in float64, the exact value and gradient, the names of the parameters."""

    problem: Problem
    x: Tensor
    y: Tensor
    value: float
    exact: Tensor
    names: list[str]


def load(directory: Path, problem: Problem, n: int) -> Loaded:
    inputs, outputs = subsample(load_arrays(directory, problem.name), n, seed=0)
    x, y = (torch.as_tensor(standardise(part)[0]) for part in (inputs, outputs))
    value, exact = dense(build(problem, x, y))
    return Loaded(problem, x, y, value, exact, sorted(name for name, _ in build(problem, x, y).named_parameters()))


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = about(options)
    for problem in PROBLEMS[: 1 if options.quick else None]:
        yield Group(
            ("problems", problem.key, "runs"),
            [((f"{dtype}: {label}", {"seed": seed}), (dtype, setting, seed))
             for dtype in ("float64", "float32") for label, setting in SETTINGS.items()
             for seed in range(sizes["seeds"])],
            load=partial(load, directory, problem, sizes["n"]),
            needs=(problem.name,),
            about=lambda loaded: {"exact_value": loaded.value, "exact_gradient": loaded.exact, "order": loaded.names},
        )  # fmt: skip


def perform(loaded: Loaded, task: tuple[str, dict[str, Any], int]) -> dict[str, Any]:
    dtype = getattr(torch, task[0])
    work, found = estimate(loaded.problem, task[1], loaded.x.to(dtype), loaded.y.to(dtype), task[2])
    return work | {
        "gradient_error": float((found - loaded.exact).norm() / loaded.exact.norm()),
        "value_error": abs(work["value"] - loaded.value) / abs(loaded.value),
    }


BENCHMARK = Benchmark(
    doc=__doc__,
    name="mll_gradient",
    quick="n = 1000, one problem, two seeds",
    problem=about,
    groups=groups,
    perform=perform,
    report=report,
    say=lambda run: f"error {run['gradient_error']:.2g}, {run['seconds']:.1f} s",
    what="problems",
    options=add_options,
)


if __name__ == "__main__":
    BENCHMARK.main()

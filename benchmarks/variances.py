"""The variances that ``model(x).variance`` gives, beside the exact ones and GPyTorch's, on real data.

Four sets, 2,000 training and 200 test points (seed 0), standardised, Matern-3/2 with lengthscale sqrt(d), output scale
1, float32, at noise 0.1, 1e-2 and 1e-4; the exact variances are by dense float64.  What is compared is the variance of
an observation, the noise added.  Accelerated: the call that a user types, with defaults, which is exact for so few
points; once more with conjugate gradients in place of the factorization that the default takes; and with what is taken
where exact variances are not cheap, ``variance="low_rank"`` and ``"samples"``.  GPyTorch: its default (conjugate
gradients to its own tolerance, or as far as they come in 1,000 iterations) and ``fast_pred_var``.

With ``--large``: the default call with 36,000 training and 4,000 test points of two sets, where no factor fits;
processor seconds to the mean and from there to the variance, and ratios to exact variances (Cholesky in float64, which
takes 10 GB) at 50 of the test points.

    python benchmarks/variances.py --data DIRECTORY                     # some ten minutes on two cores; resumes
    python benchmarks/variances.py --data DIRECTORY --large             # and the large ones, half an hour
    python benchmarks/variances.py --data DIRECTORY --large --rows 8000 # the large ones with fewer rows
    python benchmarks/variances.py --data DIRECTORY --quick             # one set, 1,000 points, no GPyTorch default
    python benchmarks/variances.py --report                             # table and picture again, nothing measured
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import scipy.linalg
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import Model, describe, load_arrays, standardise, subsample, table
from runner import Benchmark, Group

SETS = ("kin8nm", "cod_rna", "diamonds", "california_housing")
NOISES = (1e-1, 1e-2, 1e-4)
ROWS, TESTS = 2000, 200
LARGE_SETS = {"uci_kin40k": NOISES, "diamonds": NOISES[:2]}  # diamonds with 1e-4 took more than an hour
LARGE_ROWS, LARGE_TESTS, COMPARED = 36_000, 4_000, 50
BUDGET = 2**30  # bytes of a stored matrix in the large part: neither kernel matrix nor Cholesky factor fits


def load(directory: Path, name: str, rows: int, tests: int = TESTS) -> tuple[Tensor, Tensor, Tensor]:
    """Training inputs and targets, test inputs, float32."""
    x, y = subsample(load_arrays(directory, name), rows + tests, seed=0)
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


def called(model: Model, test: Tensor) -> dict[str, Any]:
    """Mean and variance by ``model(x)``, and the seconds and processor seconds to either."""
    start, began = time.perf_counter(), time.process_time()
    posterior = model(test)
    mean = posterior.mean
    middle, halfway = time.perf_counter(), time.process_time()
    variance = posterior.variance
    return {"mean": mean, "variance": variance, "seconds_mean": middle - start,
            "seconds_variance": time.perf_counter() - middle, "cpu_mean": halfway - began,
            "cpu_variance": time.process_time() - halfway}  # fmt: skip


def accelerated(solver: Any, variance: str, data: Any, noise: float) -> dict[str, Any]:
    return called(sketchgp.accelerate(build(data, noise), solver=solver, variance=variance), data[2])


def plain(fast: bool, data: Any, noise: float) -> dict[str, Any]:
    with gpytorch.settings.fast_pred_var(fast):
        return called(build(data, noise), data[2])


METHODS: dict[str, Callable[[Any, float], dict[str, Any]]] = {
    "sketchgp, model(x)": partial(accelerated, "auto", "auto"),
    "sketchgp, model(x), ConjugateGradients": partial(accelerated, sketchgp.ConjugateGradients(), "auto"),
    "sketchgp, low_rank": partial(accelerated, "auto", "low_rank"),
    "sketchgp, samples": partial(accelerated, "auto", "samples"),
    "GPyTorch, fast_pred_var": partial(plain, True),
    "GPyTorch, default": partial(plain, False),
}
TICKS, WIDE_TICKS = (0.5, 0.8, 1, 1.25, 2, 3, 5), (0.05, 0.2, 0.5, 1, 2, 5, 10)
COLOURS = dict(zip(SETS, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True))


def quantiles(found: Tensor, wanted: Tensor, noise: float) -> list[float]:
    """Least, 5%, median, 95% and most of the ratios of variances of an observation."""
    ratio = (found.double() + noise) / (wanted.double() + noise)
    return ratio.quantile(torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=torch.float64)).tolist()


def perform(data: tuple[Tensor, Tensor, Tensor], task: tuple[str, float, str]) -> dict[str, Any]:
    name, noise, method = task
    if method == "large":
        return large(data, name, noise)
    mean, variance = exact(data, noise)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        found = METHODS[method](data, noise)
    error = float((found.pop("mean").double() - mean).abs().max() / mean.std())
    return {"set": name, "noise": noise, "method": method, "ratios": quantiles(found.pop("variance"), variance, noise),
            "mean_error": error, **found, "warned": bool(caught)}  # fmt: skip


def large(data: tuple[Tensor, Tensor, Tensor], name: str, noise: float) -> dict[str, Any]:
    """The default call where no factor fits."""
    some = torch.randperm(len(data[2]), generator=torch.Generator().manual_seed(1))[:COMPARED]
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.no_grad(),
        sketchgp.settings.memory_budget(BUDGET),
    ):
        warnings.simplefilter("always")
        with sketchgp.record_solves() as solves:
            found = called(sketchgp.accelerate(build(data, noise)), data[2])
    wanted = factorized(data[0].double(), data[2][some].double(), build(data, noise).covar_module.double(), noise)
    del found["mean"]
    ratios = quantiles(found.pop("variance")[some], wanted, noise)
    return {"set": name, "rows": len(data[0]), "tests": len(data[2]), "noise": noise, "ratios": ratios, **found,
            "columns": [solve.columns for solve in solves], "warned": bool(caught), "reference": "Cholesky",
            "iterations": [solve.work.get("iterations") for solve in solves]}  # fmt: skip


def spread(run: dict[str, Any]) -> list[str]:
    """Median, 5% to 95%, all."""
    least, low, middle, high, most = (f"{value:.3g}" for value in run["ratios"])
    return [middle, f"{low} to {high}", f"{least} to {most}"]


@torch.no_grad()
def factorized(x: Tensor, test: Tensor, kernel: gpytorch.kernels.Kernel, noise: float) -> Tensor:
    """Latent variances ``(m,)`` by a factorization in the place of the matrix."""
    matrix = np.empty((len(x), len(x)))
    for first in range(0, len(x), 1000):
        matrix[first : first + 1000] = kernel(x[first : first + 1000], x).to_dense().numpy()
    matrix.flat[:: len(x) + 1] += noise
    root = scipy.linalg.cholesky(matrix.T, lower=True, overwrite_a=True, check_finite=False)
    half = scipy.linalg.solve_triangular(root, kernel(x, test).to_dense().numpy(), lower=True, check_finite=False)
    return 1 - torch.as_tensor(half).square().sum(dim=0)


def report(results: dict[str, Any]) -> str:
    rows = []
    for run in results["runs"].values():
        seconds = (f"{run[f'seconds_{what}']:.1f}" for what in ("mean", "variance"))
        rows.append(
            [run["set"], f"{run['noise']:g}", run["method"], *spread(run), f"{run['mean_error']:.1e}", *seconds]
        )
    head = ["set", "noise", "method", "median", "5% to 95%", "all", "error of the mean", "s mean", "s variance"]
    problem = results["problem"]
    lines = [
        "# Predictive variances over exact ones", "", describe(results["machine"]), "",
        f"{problem['rows']:,} training and {problem['tests']} test points, float32. Variance of an observation over "
        "the exact one; the largest error of the mean over its spread; seconds to the mean, and from there to the "
        "variance.",
        "", table(head, rows), "",
    ]  # fmt: skip
    if results.get("large"):
        rows = []
        for run in results["large"].values():
            work = ", ".join(f"{c} x {i}" for c, i in zip(run["columns"], run["iterations"], strict=True))
            cpu = run["cpu_mean"], run["cpu_variance"], run["cpu_variance"] / run["cpu_mean"]
            size = f"{run['rows']:,} x {run['tests']:,}"
            exactly = run.get("reference", "conjugate gradients")
            seconds = (f"{one:.3g}" for one in cpu)
            rows.append([run["set"], size, f"{run['noise']:g}", *spread(run), exactly, work, *seconds])
        head = ["set", "training x test", "noise", "median", "5% to 95%", "all", "exact by", "columns x iterations",
                "CPU s mean", "CPU s variance", "ratio"]  # fmt: skip
        lines += [
            "## Where no factor fits", "",
            f"`model(x)` with defaults, float32, at most {BUDGET / 2**30:.0f} GiB for a stored matrix; ratios at "
            f"{COMPARED} of the test points; processor seconds to the mean, "
            "and from there to the variance.",
            "", table(head, rows), "",
        ]  # fmt: skip
    return "\n".join(lines)


def picture(results: dict[str, Any], path: Path) -> None:
    """Medians, and lines from 5% to 95%, of every method and set; a column for each noise."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(NOISES), figsize=(9.4, 4.2), sharey=True, layout="constrained")
    for axis, noise in zip(axes, NOISES, strict=True):
        for run in results["runs"].values():
            if run["noise"] != noise:
                continue
            _, low, middle, high, _ = run["ratios"]
            place = -list(METHODS).index(run["method"]) + 0.16 * (1.5 - SETS.index(run["set"]))
            colour = COLOURS[run["set"]]
            axis.plot([low, high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
            axis.plot([middle], [place], "o", color=colour, markersize=4, label=run["set"])
        axis.axvspan(0.8, 1.25, color="0.92", zorder=0)
        axis.axvline(1, color="0.5", linewidth=0.8)
        axis.set(xscale="log", title=f"noise {noise:g}", xlabel="variance over the exact one")
        least, most = axis.get_xlim()
        ticks = [tick for tick in (WIDE_TICKS if most > 10 * least else TICKS) if least <= tick <= most]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axis.set_xticks([], minor=True)
        axis.set_yticks([-place for place in range(len(METHODS))], list(METHODS))
        axis.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(SETS), frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    plt.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--large", action="store_true", help="the large problems, too")
    parser.add_argument("--rows", type=int, default=LARGE_ROWS, help="training rows of the large ones")


def problem(options: Any) -> dict[str, Any]:
    return {"rows": 1000 if options.quick else ROWS, "tests": TESTS, "seed": 0, "dtype": "float32"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    methods = list(METHODS)[: -1 if options.quick else None]
    for name in SETS[: 1 if options.quick else None]:
        tasks = [(f"{name}, {noise:g}, {method}", (name, noise, method)) for noise in NOISES for method in methods]
        yield Group(("runs",), tasks, load=partial(load, directory, name, problem(options)["rows"]), needs=(name,))
    for name, noises in LARGE_SETS.items() if options.large else ():
        tasks = [(f"{name}, {options.rows}, {noise:g}", (name, noise, "large")) for noise in noises]
        tests = min(LARGE_TESTS, options.rows)
        yield Group(("large",), tasks, load=partial(load, directory, name, options.rows, tests), needs=(name,))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="variances",
    quick="one set, 1,000 points, no GPyTorch default",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    picture=picture,
    options=add_options,
)


if __name__ == "__main__":
    BENCHMARK.main()

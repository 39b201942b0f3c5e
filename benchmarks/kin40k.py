"""GPyTorch's default CG beside ``sketchgp.accelerate`` on uci_kin40k with 20,000 training rows.

The model is an ordinary float32 ``gpytorch.models.ExactGP`` with zero mean and a squared exponential kernel
(lengthscale 2, output scale 1), at noise 1e-2 and 1e-4, hyperparameters fixed.  Each run is a fresh process
which builds the model, calls ``model(test_x).mean`` once and measures that call; then, outside the clock, it
computes the true residual in float64.  The runs of one setting alternate with those of the others.

    python benchmarks/kin40k.py --data DIRECTORY            # about half an hour; resumes if stopped
    python benchmarks/kin40k.py --data DIRECTORY --quick    # n = 3000, fewer settings, once each
    python benchmarks/kin40k.py --report                    # tables and picture again, nothing measured
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from common import load_arrays, now, standardise, thinned
from kin40k_report import picture, report
from measure import counted_gpytorch_cg, peak_memory_mb, true_residual
from runner import Benchmark, Group

TRAINING_ROWS = 20_000
NOISES = (1e-2, 1e-4)

# label, system, noise, tolerance of the solve (None: the system's default), rank (None: its default); those
# with "once" are not repeated.  GPyTorch's own default is tolerance 1e-2 in evaluation and rank 15.
SETTINGS: list[dict[str, Any]] = [
    {"label": "GPyTorch default", "system": "gpytorch", "noise": 1e-2},
    {"label": "GPyTorch, tolerance 1e-3", "system": "gpytorch", "noise": 1e-2, "tolerance": 1e-3},
    {"label": "GPyTorch, tolerance 1e-4", "system": "gpytorch", "noise": 1e-2, "tolerance": 1e-4},
    {"label": "GPyTorch, tolerance 1e-4, rank 100", "system": "gpytorch", "noise": 1e-2, "tolerance": 1e-4,
     "rank": 100, "once": True},
    {"label": "sketchgp default", "system": "sketchgp", "noise": 1e-2},
    {"label": "sketchgp, tolerance 1e-4", "system": "sketchgp", "noise": 1e-2, "tolerance": 1e-4},
    {"label": "sketchgp, rank 200", "system": "sketchgp", "noise": 1e-2, "rank": 200, "once": True},
    {"label": "sketchgp, rank 500", "system": "sketchgp", "noise": 1e-2, "rank": 500, "once": True},
    {"label": "sketchgp, rank 1000", "system": "sketchgp", "noise": 1e-2, "rank": 1000, "once": True},
    {"label": "sketchgp, rank 2000", "system": "sketchgp", "noise": 1e-2, "rank": 2000, "once": True},
    {"label": "GPyTorch default", "system": "gpytorch", "noise": 1e-4},
    {"label": "GPyTorch, rank 100", "system": "gpytorch", "noise": 1e-4, "rank": 100, "once": True},
    {"label": "sketchgp default", "system": "sketchgp", "noise": 1e-4},
    {"label": "sketchgp, rank 1000", "system": "sketchgp", "noise": 1e-4, "rank": 1000, "once": True},
    {"label": "sketchgp, rank 2000", "system": "sketchgp", "noise": 1e-4, "rank": 2000, "once": True},
]  # fmt: skip


class Regression(gpytorch.models.ExactGP):
    """Zero mean, squared exponential kernel: what a user would write."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def split(directory: Path, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first standard split: 4,000 test rows, and ``rows`` of the 36,000 others; float64, standardised.

    The training rows are the first ``rows`` of ``numpy.random.RandomState(0).permutation``; they are the ones
    for which the exact answers are 0.12836 (noise 1e-2) and 0.10541 (noise 1e-4) at 20,000 rows.

    :returns: x (rows, 8), y (rows,), test x (4000, 8), test y (4000,).
    """
    import numpy as np

    arrays = load_arrays(directory, "uci_kin40k")
    if "test_mask" not in arrays:
        raise SystemExit("uci_kin40k.npz has no array 'test_mask' (n, 10) with the standard splits.")
    test = arrays["test_mask"][:, 0].astype(bool)  # True marks a test row
    train = np.random.RandomState(0).permutation(np.flatnonzero(~test))[:rows]
    x, test_x = standardise(arrays["X"][train], arrays["X"][test])
    y, test_y = standardise(arrays["y"][train], arrays["y"][test])
    return torch.as_tensor(x), torch.as_tensor(y), torch.as_tensor(test_x), torch.as_tensor(test_y)


def build(x: Tensor, y: Tensor, noise: float) -> Regression:
    likelihood = gpytorch.likelihoods.GaussianLikelihood(
        noise_constraint=gpytorch.constraints.GreaterThan(1e-6)  # the default bound is 1e-4 itself
    )
    model = Regression(x, y, likelihood)
    model.covar_module.base_kernel.lengthscale = 2.0
    model.covar_module.outputscale = 1.0
    likelihood.noise = noise
    return model.eval()


def prepare(model: Regression, setting: dict[str, Any], stack: contextlib.ExitStack) -> list[Any]:
    """Put the setting in force; the list returned will hold a record of each linear solve."""
    tolerance, rank = setting.get("tolerance"), setting.get("rank")
    if setting["system"] == "gpytorch":
        if tolerance is not None:
            stack.enter_context(gpytorch.settings.cg_tolerance(tolerance))
            stack.enter_context(gpytorch.settings.eval_cg_tolerance(tolerance))
        if rank is not None:
            stack.enter_context(gpytorch.settings.max_preconditioner_size(rank))
        return stack.enter_context(counted_gpytorch_cg())
    import sketchgp

    sketchgp.accelerate(
        model,
        preconditioner="auto" if rank is None else sketchgp.RPCholesky(rank=rank),
        solver="auto" if tolerance is None else sketchgp.ConjugateGradients(tol=tolerance),
    )
    return stack.enter_context(sketchgp.record_solves())


def predict_once(model: Regression, setting: dict[str, Any], test_x: Tensor) -> dict[str, Any]:
    """Time one ``model(test_x).mean``; what the solves did; the solution kept by GPyTorch's cache."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        # Only the mean is wanted; with variances the call would solve 4,000 more columns.
        stack.enter_context(gpytorch.settings.skip_posterior_variances())
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        solves = prepare(model, setting, stack)
        wall, processor = time.perf_counter(), time.process_time()
        mean = model(test_x).mean
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {
        "mean": mean,
        "solution": model.prediction_strategy.mean_cache.detach().reshape(-1),
        "seconds": wall,
        "cpu_seconds": processor,
        "solves": solves,
        "warnings": sorted({str(w.message).split("\n")[0][:300] for w in caught}),
    }


def measure(setting: dict[str, Any], directory: Path, rows: int) -> dict[str, Any]:
    """One run, in this process."""
    x, y, test_x, test_y = split(directory, rows)
    # A first, small solve loads and compiles what either library loads on first use.
    small = {**setting, "rank": 100} if setting.get("rank") else setting
    predict_once(build(x[:1000].float(), y[:1000].float(), setting["noise"]), small, test_x[:10].float())
    model = build(x.float(), y.float(), setting["noise"])
    before = peak_memory_mb()
    done = predict_once(model, setting, test_x.float())
    after = peak_memory_mb()
    solves = done["solves"]
    result: dict[str, Any] = {
        "iterations": sum(solve.iterations for solve in solves),
        "products": sum(int(solve.work["products"]) if hasattr(solve, "work") else solve.products for solve in solves),
        "solves": len(solves),
        "seconds": done["seconds"],
        "cpu_seconds": done["cpu_seconds"],
        "peak_memory_mb": after,
        "added_memory_mb": None if after is None or before is None else after - before,
        "rmse": float((done["mean"].double() - test_y).square().mean().sqrt()),
        "warnings": done["warnings"],
    }
    if setting["system"] == "sketchgp" and solves:
        last = solves[-1]
        result |= {
            "reported_residual": last.max_residual,
            "reported_reason": last.reason,
            "rank_used": last.rank,
            "report": str(last),
        }
    if solves:
        history = solves[-1].history
        history = history[:, 0].tolist() if torch.is_tensor(history) else history
        # GPyTorch does not tell its set-up time: it is what the call took beside the iterations.
        setup = [getattr(solve, "setup_seconds", done["seconds"] - solve.seconds) for solve in solves]
        result |= {"setup_seconds": sum(setup), "history": thinned(history)}
    kernel = build(x[:2], y[:2], setting["noise"]).covar_module
    result["true_residual"] = true_residual(kernel, x.float(), y.float(), setting["noise"], done["solution"])
    return result


def exact(directory: Path, rows: int) -> dict[str, Any]:
    """RMSE of the float64 Cholesky answer for both noises, with its date."""
    x, y, test_x, test_y = split(directory, rows)
    results: dict[str, Any] = {"date": now()}
    with torch.no_grad():
        kernel = build(x[:2], y[:2], 1.0).covar_module.double()
        for noise in NOISES:
            matrix = kernel(x).to_dense().clone()
            matrix.diagonal().add_(noise)
            started = time.perf_counter()
            torch.linalg.cholesky(matrix, out=matrix)
            seconds = time.perf_counter() - started
            solution = torch.cholesky_solve(y.unsqueeze(-1), matrix).squeeze(-1)
            del matrix
            parts = [kernel(part, x).to_dense() @ solution for part in test_x.split(1000)]
            rmse = float((torch.cat(parts) - test_y).square().mean().sqrt())
            results[f"{noise:g}"] = {"rmse": rmse, "factorization_seconds": seconds}
    return results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repetitions", type=int, default=3)


def about(options: argparse.Namespace) -> dict[str, Any]:
    return {"set": "uci_kin40k", "training_rows": 3000 if options.quick else TRAINING_ROWS, "test_rows": 4000,
            "dtype": "float32", "lengthscale": 2.0, "outputscale": 1.0, "row_seed": 0,
            "preconditioner_seed": 0}  # fmt: skip


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    rows = about(options)["training_rows"]
    yield Group((), [("exact", {"kind": "exact", "rows": rows})], needs=("uci_kin40k",), always=True)
    for repetition in range(1 if options.quick else options.repetitions):
        for setting in SETTINGS:
            if not (setting.get("once") and (repetition or options.quick)):
                label = (f"{setting['label']} | noise {setting['noise']:g}", repetition)
                task = {"kind": "measure", "setting": setting, "rows": rows}
                yield Group(("runs",), [(label, task)], needs=("uci_kin40k",))


def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    if task["kind"] == "exact":
        return exact(directory, task["rows"])
    return measure(task["setting"], directory, task["rows"])


def words(run: dict[str, Any]) -> str:
    if "iterations" not in run:
        return "float64 Cholesky"
    return (
        f"{run['iterations']} iterations, residual {run['true_residual']:.2g}, RMSE {run['rmse']:.5f}, "
        f"{run['seconds']:.1f} s"
    )


BENCHMARK = Benchmark(
    doc=__doc__,
    name="kin40k",
    quick="n = 3000, fewer settings, once each",
    problem=about,
    groups=groups,
    perform=perform,
    report=report,
    picture=lambda results, path: picture(results, path.with_suffix(".png")),
    say=words,
    alone=Path(__file__),
    options=add_options,
    head={"settings": SETTINGS},
)


if __name__ == "__main__":
    BENCHMARK.main()

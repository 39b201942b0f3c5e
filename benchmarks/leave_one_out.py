"""Leave-one-out predictions and noise paths on many points: how near, and at what price beside the posterior mean.

kin40k (RBF, lengthscale 2) and cod_rna (Matern-3/2, lengthscale sqrt(d)), rows drawn with seed 0, standardised, output
scale 1, float32, at noise 0.1, 1e-2 and 1e-4.  2,000 rows are compared with brute force: the row left out, the rest
factorized, at 100 rows.  Probes are compared with the factorization in float64, at 2,000 and at 20,000 rows.  A path
of seven noises is compared with the means at these noises one by one.  Seconds are CPU seconds of runs in one process;
those of a mean are of a fresh model, preconditioner included.

    python benchmarks/leave_one_out.py --data DIRECTORY            # some forty minutes on two cores, 8 GB; resumes
    python benchmarks/leave_one_out.py --data DIRECTORY --quick    # one set, 1,000 and 2,000 rows
    python benchmarks/leave_one_out.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import Model, describe, load_arrays, standardise, subsample, table
from runner import Benchmark, Group

SETS = ("uci_kin40k", "cod_rna")
NOISES = (1e-1, 1e-2, 1e-4)
GRID = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
SMALL, LARGE = 2000, 20_000
BRUTE = 100

Data = tuple[str, Tensor, Tensor]


def load(directory: Path, name: str, rows: int) -> Data:
    """Name, inputs and targets, float32."""
    x, y = subsample(load_arrays(directory, name), rows, seed=0)
    x, y = (torch.as_tensor(part).float() for part in (*standardise(x), *standardise(y)))
    return name, x, y.reshape(-1)


def build(data: Data, noise: float, **choices: Any) -> Model:
    name, x, y = data
    kernel = ScaleKernel(RBFKernel() if name == "uci_kin40k" else MaternKernel(nu=1.5))
    kernel.outputscale = 1.0
    kernel.base_kernel.lengthscale = 2.0 if name == "uci_kin40k" else x.shape[1] ** 0.5
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-6))
    likelihood.noise = noise
    return sketchgp.accelerate(Model(x, y, likelihood, kernel), **choices).eval()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its CPU seconds."""
    start = time.process_time()
    return call(), time.process_time() - start


def mean(model: Model) -> float:
    """CPU seconds of the posterior mean at a few points, everything new."""
    x = model.train_inputs[0][:10]
    return timed(lambda: sketchgp.predict(model, x, variance=None, progress=False))[1]


def brute_force(data: Data, noise: float) -> dict[str, Any]:
    """Exact leave-one-out of few rows against systems without the row."""
    model = build(data, noise)
    found, seconds = timed(lambda: sketchgp.leave_one_out(model, exact=True))
    kernel, x, y = copy.deepcopy(model.covar_module).double(), data[1].double(), data[2].double()
    with torch.no_grad():
        matrix = kernel(x).to_dense() + float(model.likelihood.noise.double()) * torch.eye(len(x), dtype=torch.float64)
    off_mean, off_variance = [], []
    for i in range(0, len(x), len(x) // BRUTE):
        rest = torch.arange(len(x)) != i
        root = torch.linalg.cholesky(matrix[rest][:, rest])
        weights = torch.cholesky_solve(torch.stack([y[rest], matrix[rest, i]], dim=1), root)
        right = matrix[rest, i] @ weights
        off_mean.append(abs(float(found.mean[i] - right[0])))
        off_variance.append(abs(float(found.variance[i] / (matrix[i, i] - right[1]) - 1)))
    return {"kind": "brute force", "error_mean": max(off_mean), "error_variance": max(off_variance),
            "seconds": seconds, "seconds_mean": mean(build(data, noise))}  # fmt: skip


def probes(data: Data, noise: float) -> dict[str, Any]:
    """Probes against the factorization."""
    model = build(data, noise)
    seconds_mean = mean(model)
    found, seconds = timed(lambda: sketchgp.leave_one_out(model, exact=False, progress=False))
    right = sketchgp.leave_one_out(model, exact=True)
    ratio = found.variance.double() / right.variance.double()
    scaled = (found.variance - right.variance).double() / found.variance_standard_error.double()
    points = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=torch.float64)
    totals = {
        name: {
            "value": getattr(found, name),
            "error": getattr(found, name + "_standard_error"),
            "right": getattr(right, name),
        }
        for name in ("mean_squared_error", "mean_log_density")
    }
    return {"kind": "probes", "ratios": ratio.quantile(points).tolist(),
            "scaled": float(scaled.square().mean().sqrt()), "totals": totals,
            "seconds": seconds, "seconds_mean": seconds_mean, "iterations": found.report.work["iterations"],
            "iterations_mean": found.mean_report.work["iterations"]}  # fmt: skip


def path(data: Data, noise: float) -> dict[str, Any]:
    """A noise path, beside the means at its noises, each of a fresh model, and what multi-shift CG would take."""
    means = [mean(build(data, one)) for one in GRID]
    model = build(data, noise)
    found, seconds = timed(lambda: sketchgp.noise_path(model, GRID, exact=False, progress=False))
    plain = build(data, GRID[-1], preconditioner=None, solver=sketchgp.ConjugateGradients(max_iterations=2000))
    report = sketchgp.predict(plain, data[1][:10], variance=None, progress=False).report
    assert report is not None
    return {"kind": "path", "table": str(found), "best": found.best, "iterations": found.iterations.tolist(),
            "products": found.products.tolist(), "seconds": seconds, "seconds_means": means,
            "multi_shift": report.work["iterations"], "multi_shift_converged": report.converged}  # fmt: skip


KINDS: dict[str, Callable[[Data, float], dict[str, Any]]] = {
    "brute force": brute_force, "probes": probes, "path": path,
}  # fmt: skip


def perform(data: Data, task: tuple[str, float]) -> dict[str, Any]:
    kind, noise = task
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = KINDS[kind](data, noise)
    return {"set": data[0], "rows": len(data[1]), "noise": noise, "warned": len(caught), **found}


def report(results: dict[str, Any]) -> str:
    brute, probed, paths, tables = [], [], [], []
    for run in results["runs"].values():
        begin = [run["set"], f"{run['rows']:,}", f"{run['noise']:g}"]
        price = f"{run['seconds'] / run.get('seconds_mean', 1):.2f}"
        if run["kind"] == "brute force":
            brute.append([*begin, f"{run['error_mean']:.1e}", f"{run['error_variance']:.1e}", price])
        elif run["kind"] == "probes":
            least, low, middle, high, most = (f"{value:.3g}" for value in run["ratios"])
            totals = []
            for one in run["totals"].values():
                off = (one["value"] - one["right"]) / one["error"]
                totals += [f"{one['value']:.4g} ± {one['error']:.1g}", f"{one['right']:.4g}", f"{off:+.1f}"]
            spread = (middle, f"{low} to {high}", f"{least} to {most}", f"{run['scaled']:.2f}")
            probed.append([*begin, *spread, *totals, f"{run['iterations']}, {run['iterations_mean']}", price])
        else:
            of_all, of_hardest = (f"{run['seconds'] / f(run['seconds_means']):.1f}" for f in (sum, max))
            shift = f"{run['multi_shift']:,}" + ("" if run["multi_shift_converged"] else ", not converged")
            paths.append([*begin[:2], str(sum(run["iterations"])), of_all, of_hardest, shift])
            tables += [f"{run['set']}, {run['rows']:,} rows:", "", "```", run["table"], "```", ""]
    start = ["set", "rows", "noise"]
    total = ["{}", "expected", "off by"]
    heads = [part.format(name) for name in ("mean squared error", "log density") for part in total]
    return "\n".join([
        "# Leave-one-out and noise paths", "", describe(results["machine"]), "",
        "Float32. Prices are CPU seconds over those of the posterior mean of a fresh model.", "",
        "## Exact, beside brute force", "",
        table([*start, "largest error of a mean", "of a variance, relative", "price"], brute), "",
        "## By 16 probes", "",
        "Variances over exact ones; their deviation in standard errors (root mean square); totals, what they are by "
        "factorization, and the difference in standard errors; iterations of the probes and of the mean.", "",
        table([*start, "median", "5% to 95%", "all", "deviation", *heads, "iterations", "price"], probed), "",
        f"## Paths of {len(GRID)} noises", "",
        "Iterations of all solves together; CPU seconds over those of the means at all noises, and over the hardest of "
        "these; iterations of conjugate gradients without preconditioner at the least noise, which a multi-shift solve "
        "would take.", "",
        table([*start[:2], "iterations", "over all means", "over the hardest", "multi-shift"], paths), "",
        *tables,
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    small, large = (1000, 2000) if options.quick else (SMALL, options.rows)
    return {"small": small, "large": large, "grid": GRID, "seed": 0, "dtype": "float32"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = problem(options)
    for name in SETS[: 1 if options.quick else None]:
        for rows, kinds in ((sizes["small"], ("brute force", "probes")), (sizes["large"], ("probes",))):
            tasks = [(f"{name}, {rows}, {noise:g}, {kind}", (kind, noise)) for noise in NOISES for kind in kinds]
            if rows == sizes["large"]:
                tasks.append((f"{name}, {rows}, path", ("path", GRID[3])))
            yield Group(("runs",), tasks, load=partial(load, directory, name, rows), needs=(name,))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="leave_one_out",
    quick="one set, 1,000 and 2,000 rows",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    options=lambda parser: parser.add_argument("--rows", type=int, default=LARGE, help="of the larger problems"),
    variant=lambda options: "" if options.rows == LARGE else f"-{options.rows}",
)


if __name__ == "__main__":
    BENCHMARK.main()

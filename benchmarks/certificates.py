"""How far the mean is off where conjugate gradients end, beside what they estimate and what is certain, on real data.

Six sets, 2,500 training points and 300 test points (seed 0), standardised; Matern-3/2 with lengthscale sqrt(d) and RBF
with 0.7 sqrt(d), output scale 1; noise 0.1, 1e-2, 1e-4, and 1e-5 in float64.  A model's mean is solved for as a user
would, ``predict(model, x, variance=None)``, to a residual of 1e-3 and 1e-4, to ``tol="posterior"`` and to
``tol="certified"``.  The exact mean and variance are by dense float64.  Errors are the largest over the test points, in
posterior deviations of an observation there.

    python benchmarks/certificates.py --data DIRECTORY            # some ten minutes on one core; resumes
    python benchmarks/certificates.py --data DIRECTORY --quick    # one set
    python benchmarks/certificates.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from torch import Tensor

import sketchgp
from common import Model, describe, load_arrays, standardise, subsample, table
from runner import Benchmark, Group

SETS = ("kin8nm", "cod_rna", "diamonds", "california_housing", "uci_kin40k", "uci_pol")
KERNELS = ("Matern-3/2", "RBF")
NOISES = {"float64": (1e-1, 1e-2, 1e-4, 1e-5), "float32": (1e-1, 1e-2, 1e-4)}
TOLERANCES: tuple[float | str, ...] = (1e-3, 1e-4, "posterior", "certified")
ROWS, TESTS = 2500, 300


def load(directory: Path, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Training inputs and targets, test inputs, float64."""
    x, y = subsample(load_arrays(directory, name), ROWS + TESTS, seed=0)
    x, y = (torch.as_tensor(part).double() for part in (*standardise(x), *standardise(y)))
    return x[:ROWS], y[:ROWS].reshape(-1), x[ROWS:]


def build(data: tuple[Tensor, Tensor, Tensor], kernel: str, noise: float, dtype: torch.dtype) -> Model:
    x, y, _ = (part.to(dtype) for part in data)
    chosen = MaternKernel(nu=1.5) if kernel == "Matern-3/2" else RBFKernel()
    chosen.lengthscale = (1.0 if kernel == "Matern-3/2" else 0.7) * x.shape[1] ** 0.5
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-7))
    likelihood.noise = noise
    return Model(x, y, likelihood, chosen).to(dtype).eval()


def exact(model: Model, test: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and deviation of an observation, by dense float64 of the model as it is."""
    model, test = copy.deepcopy(model).double(), test.double()
    (x,), y, noise = model.train_inputs, model.train_targets, model.likelihood.noise.detach()
    with torch.no_grad():
        c = model.covar_module(x, test).to_dense()
        matrix = model.covar_module(x).to_dense() + noise * torch.eye(len(x), dtype=torch.float64)
        root = torch.linalg.cholesky(matrix)
        mean = c.mT @ torch.cholesky_solve(y.unsqueeze(1), root).squeeze(1)
        explained = torch.linalg.solve_triangular(root, c, upper=False).square().sum(dim=0)
        return mean, (1 - explained + noise).sqrt()


def perform(data: tuple[Tensor, Tensor, Tensor], task: tuple[str, str, str, float]) -> dict[str, Any]:
    name, kernel, dtype, noise = task
    model = build(data, kernel, noise, getattr(torch, dtype))
    test = data[2].to(getattr(torch, dtype))
    mean, deviation = exact(model, test)
    found: dict[str, Any] = {"set": name, "kernel": kernel, "dtype": dtype, "noise": noise, "solves": {}}
    for tol in TOLERANCES:
        sketchgp.accelerate(model, solver=sketchgp.ConjugateGradients(tol=tol, max_iterations=3000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prediction = sketchgp.predict(model, test, variance=None, progress=False)
        report, bound = prediction.report, prediction.mean_error_bound
        assert report is not None and bound is not None
        error = (prediction.mean.double() - mean).abs()
        found["solves"][str(tol)] = {
            "iterations": report.iterations,
            "error": float((error / deviation).max()),
            "error_over_spread": float(error.max() / mean.std()),
            "estimate": report.max_deviations if report.deviations is not None else None,
            "bound": float((bound / deviation).max()),
            "holds": bool((error <= bound).all()),
            "converged": report.converged,
            "warned": bool(caught),
        }
    return found


def solved(solve: dict[str, Any]) -> str:
    return f"{solve['iterations']}{'' if solve['converged'] else ', short'}"


def report(results: dict[str, Any]) -> str:
    runs = list(results["runs"].values())
    rows = []
    for run in runs:
        solves = run["solves"]
        row = [run["set"], run["kernel"], run["dtype"], f"{run['noise']:g}"]
        row += [f"{solves['0.001']['iterations']}: {solves['0.001']['error']:.1%}"]
        row += [f"{solves['0.0001']['iterations']}: {solves['0.0001']['error']:.1%}"]
        one, other = solves["posterior"], solves["certified"]
        row += [solved(one), f"{one['error']:.2%}", f"{one['estimate']:.2%}", f"{one['bound']:.0%}"]
        row += [solved(other), f"{other['error']:.4%}", f"{other['bound']:.2%}"]
        rows.append(row)
    head = ["set", "kernel", "dtype", "noise", "1e-3", "1e-4", "posterior", "error", "estimate", "bound", "certified",
            "error", "bound"]  # fmt: skip
    summary = []
    for tol in map(str, TOLERANCES):
        solves = [run["solves"][tol] for run in runs]
        worst = max(solve["error"] for solve in solves)
        above = sum(solve["error"] > 0.02 for solve in solves)
        total = sum(solve["iterations"] for solve in solves)
        summary.append([tol, total, f"{worst:.2%}", f"{above} of {len(solves)}"])
    kept = all(solve["holds"] for run in runs for solve in run["solves"].values())
    held, problem = "every point" if kept else "NOT EVERY POINT", results["problem"]
    return "\n".join([
        "# How sure the mean is", "", describe(results["machine"]), "",
        f"{problem['rows']:,} training and {problem['tests']} test points. Errors of the mean, in posterior deviations "
        f"of an observation: the largest over the test points. The bound held at {held} of all "
        f"{len(TOLERANCES) * len(runs)} solves.", "",
        table(["tol", "iterations, all rows", "largest error", "rows above 2%"], summary), "",
        "Iterations, error; for the last two also what the solve itself estimates and is certain of. \"short\": the "
        "solve ended without what was asked for, and warned.", "",
        table(head, rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    return {"rows": ROWS, "tests": TESTS, "seed": 0}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for name in SETS[: 1 if options.quick else None]:
        cells = [(kernel, dtype, noise) for kernel in KERNELS for dtype, noises in NOISES.items() for noise in noises]
        tasks = [
            (f"{name}, {kernel}, {dtype}, {noise:g}", (name, kernel, dtype, noise)) for kernel, dtype, noise in cells
        ]
        yield Group(("runs",), tasks, load=partial(load, directory, name), needs=(name,))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="certificates",
    quick="one set",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
)


if __name__ == "__main__":
    BENCHMARK.main()

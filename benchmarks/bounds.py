"""What a fit loses by minimising a bound of its loss, against the width of that bound; and probes beside it.

2,000 rows of each set (seed 0), standardised, and 1,000 others to test on; a Matern-3/2 and a Gaussian kernel with a
lengthscale an input, float64, ``sketchgp.fit`` with each ``objective`` from GPyTorch's default hyperparameters.  The
loss is the exact one a row at the parameters that a fit ends with, by a factorization, and so are predictions.
``"bound"`` is asked for, so that it is minimised however wide it is, with as many columns as it may take.

    python benchmarks/bounds.py --data DIRECTORY            # five minutes on one core; resumes
    python benchmarks/bounds.py --data DIRECTORY --quick    # one set, one kernel, 500 rows
    python benchmarks/bounds.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import Model, describe, load_arrays, number, standardise, table
from runner import Benchmark, Group

SETS = ("kin8nm", "california_housing", "diamonds")
KERNELS = ("Matern-3/2", "Gaussian")
OBJECTIVES = ("exact", "bound", "probes")
NOISE = 1e-5  # the least


def load(directory: Path, name: str, n: int, tests: int) -> tuple[Tensor, ...]:
    """Training inputs and targets, and those to test on."""
    arrays = load_arrays(directory, name)
    rows = np.random.RandomState(0).permutation(len(arrays["y"]))[: n + tests]
    x, y = arrays["X"][rows], np.asarray(arrays["y"], dtype=np.float64).reshape(-1, 1)[rows]
    parts = (*standardise(x[:n], x[n:]), *(part[:, 0] for part in standardise(y[:n], y[n:])))
    x, xt, y, yt = (torch.as_tensor(part, dtype=torch.float64) for part in parts)
    return x, y, xt, yt


def build(x: Tensor, y: Tensor, kernel: str) -> Model:
    base = (
        MaternKernel(nu=1.5, ard_num_dims=x.shape[1]) if kernel == "Matern-3/2" else RBFKernel(ard_num_dims=x.shape[1])
    )
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(NOISE))
    return Model(x, y, likelihood, ScaleKernel(base)).double()


def dense(model: Model, xt: Tensor, yt: Tensor) -> tuple[float, float]:
    """The loss a row and the test NLL, by factorizations."""
    with (
        torch.no_grad(),
        gpytorch.settings.max_cholesky_size(10**6),
        gpytorch.settings.fast_computations(False, False, False),
    ):
        model.train()
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        loss = -float(mll(model(*model.train_inputs), model.train_targets))
        model.eval()
        found = model.likelihood(model(xt))
        each = (yt - found.mean).square() / found.variance + found.variance.log() + math.log(2 * math.pi)
    return loss, float(each.mean()) / 2


def perform(data: tuple[Tensor, ...], task: tuple[str, str, str]) -> dict[str, Any]:
    x, y, xt, yt = data
    model = sketchgp.accelerate(build(x, y, task[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        started = time.process_time()
        history = sketchgp.fit(model, objective=task[2], start="model", progress=False)
        seconds = time.process_time() - started
    plain = build(x, y, task[1])
    plain.load_state_dict(model.state_dict())
    loss, nll = dense(plain, xt, yt)
    return {
        "set": task[0],
        "kernel": task[1],
        "objective": task[2],
        "loss": loss,
        "nll": nll,
        "bracket": list(history.bracket or ()),
        "noise": float(model.likelihood.noise.detach()),
        "lengthscales": model.covar_module.base_kernel.lengthscale.detach().reshape(-1),
        "evaluations": history.evaluations,
        "cpu_seconds": seconds,
        "reason": history.reason,
    }


def report(results: dict[str, Any]) -> str:
    runs = {(run["set"], run["kernel"], run["objective"]): run for run in results["runs"].values()}
    rows: list[list[object]] = []
    for name in SETS:
        for kernel in KERNELS:
            found = [runs.get((name, kernel, objective)) for objective in OBJECTIVES]
            if any(run is None for run in found):
                continue
            exact, bound, probes = found
            rows.append([
                name, kernel, number(bound["bracket"][1] - bound["bracket"][0], 2),
                *(number(run["loss"] - exact["loss"], 2) for run in (bound, probes)),
                number(exact["nll"]), *(number(run["nll"] - exact["nll"], 2) for run in (bound, probes)),
                number(exact["noise"], 2), *(number(run["noise"], 2) for run in (bound, probes)),
                *(number(run["cpu_seconds"] / run["evaluations"], 2) for run in found),
            ])  # fmt: skip
    problem = results["problem"]
    header = ["set", "kernel", "width", "loss: bound", "probes", "NLL: exact", "bound", "probes", "noise: exact",
              "bound", "probes", "CPU s: exact", "bound", "probes"]  # fmt: skip
    return "\n".join([
        "# Fits by a bound, by how wide it is", "", describe(results["machine"]), "",
        f"{problem['n']:,} rows, float64. Width: of the bound, nats a row, where the fit by it ended. "
        "Loss: the exact one a row where each fit ended, above that of the fit by exact losses; NLL of "
        f"{problem['tests']:,} other rows: above it, too. CPU s: of an evaluation.", "",
        table(header, rows), "",
    ])  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    return {"n": 500 if options.quick else 2000, "tests": 300 if options.quick else 1000, "dtype": "float64"}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sizes = problem(options)
    for name in SETS[: 1 if options.quick else None]:
        tasks = [
            (f"{name}, {kernel}, {objective}", (name, kernel, objective))
            for kernel in KERNELS[: 1 if options.quick else None]
            for objective in OBJECTIVES
        ]
        yield Group(("runs",), tasks, load=partial(load, directory, name, sizes["n"], sizes["tests"]), needs=(name,))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="bounds",
    quick="one set, one kernel, 500 rows",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    say=lambda run: f"loss {run['loss']:.4f}, NLL {run['nll']:.4f}",
)


if __name__ == "__main__":
    BENCHMARK.main()

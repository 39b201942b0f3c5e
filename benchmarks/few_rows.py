"""``fit`` without options beside scikit-learn on up to 700 rows: the same model, data sets of many kinds.

A Gaussian process with zero mean, RBF or Matern-3/2 kernel with a lengthscale for each input, output scale and noise
of at least 1e-4 (GPyTorch's limit, given to both); inputs and targets standardised by the training rows, of which there
are two thirds of a set, and at most 700; up to 2,000 others are test points.  Of more than 60 inputs the first 40.

- scikit-learn: ``GaussianProcessRegressor`` in float64, from lengthscales 1, scale 1, noise 0.5.
- fit: ``accelerate`` and ``fit`` without options, float32, from GPyTorch's start.
- fit, ``start="model"``: from that start alone.

Both minimise the same loss, which has several minima: what a fit came to, and in how many processor seconds.

    python benchmarks/few_rows.py --data DIRECTORY            # forty minutes on one core; resumes
    python benchmarks/few_rows.py --data DIRECTORY --quick    # 100 rows of two sets
    python benchmarks/few_rows.py --report                    # the table again, nothing measured
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import Model, describe, load_arrays, median, number, scores, standardise, table
from runner import Benchmark, Group

SETS = ("abalone", "uci_airfoil", "uci_concrete", "uci_energy", "uci_yacht", "uci_skillcraft", "uci_sml", "uci_gas",
        "uci_pumadyn32nm", "ailerons", "kc_housing", "space_ga", "bank32nh", "cpu_small", "mv", "propane_md_energy",
        "qm7_atomization_cm", "uci_parkinsons", "uci_pol", "uci_bike")  # fmt: skip
KERNELS = {"RBF": RBFKernel, "Matern-3/2": lambda ard_num_dims: MaternKernel(nu=1.5, ard_num_dims=ard_num_dims)}
ROWS, TEST, INPUTS = 700, 2000, 60
KEPT = 40  # of more inputs than that
NOISE = 1e-4  # the least
OURS: dict[str, dict[str, Any]] = {"fit": {}, 'fit, `start="model"`': {"start": "model"}}
RIVAL = "scikit-learn"
SAME = 0.001  # a row: losses that are no farther apart are those of the same minimum
CLOSE = 0.01  # of test densities


def load(directory: Path, name: str, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test part, float32, standardised."""
    arrays = load_arrays(directory, name)
    x, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64).reshape(len(arrays["X"]), -1)[:, 0]
    x = x[:, :KEPT] if x.shape[1] > INPUTS else x
    order = np.random.RandomState(1).permutation(len(x))
    end = min(rows, len(x) * 2 // 3)
    train, test = order[:end], order[end : end + TEST]
    x = x[:, (x[train] != x[train[0]]).any(axis=0)]
    x, test_x = standardise(x[train], x[test])
    y, test_y = standardise(y[train], y[test])
    return tuple(torch.as_tensor(part).float() for part in (x, y, test_x, test_y))  # type: ignore[return-value]


def by_scikit_learn(data: tuple[Tensor, ...], kernel: str) -> dict[str, Any]:
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    x, y, test_x, test_y = (part.double().numpy() for part in data)
    lengthscales = np.ones(x.shape[1])
    of_inputs = kernels.RBF(lengthscales) if kernel == "RBF" else kernels.Matern(lengthscales, nu=1.5)
    noise = kernels.WhiteKernel(0.5, noise_level_bounds=(NOISE, 1e5))
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bounds that were reached, and of steps that were not enough
        model = GaussianProcessRegressor(kernels.ConstantKernel() * of_inputs + noise).fit(x, y)
    took = time.process_time() - began
    mean, deviation = model.predict(test_x, return_std=True)
    found = scores(torch.from_numpy(mean), torch.from_numpy(deviation).square(), torch.from_numpy(test_y))
    return {"loss": float(-model.log_marginal_likelihood_value_ / len(y)), "cpu_seconds": took, **found}


def by_fit(data: tuple[Tensor, ...], kernel: str, options: dict[str, Any]) -> dict[str, Any]:
    x, y, test_x, test_y = data
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(NOISE))
    model = sketchgp.accelerate(Model(x, y, likelihood, ScaleKernel(KERNELS[kernel](ard_num_dims=x.shape[1]))))
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = sketchgp.fit(model, progress=False, **options)
    took = time.process_time() - began
    posterior = sketchgp.predict(model, test_x, progress=False)
    assert posterior.observation_variance is not None
    return {"loss": history.best_loss, "cpu_seconds": took, "steps": len(history.losses), "reason": history.reason,
            "restarts": history.restarts, "notes": history.notes, "at_limits": history.at_limits,
            "warnings": [str(one.message).split("\n")[0][:120] for one in caught],
            **scores(posterior.mean, posterior.observation_variance, test_y)}  # fmt: skip


def perform(data: tuple[Tensor, ...], task: dict[str, Any]) -> dict[str, Any]:
    found = {RIVAL: by_scikit_learn(data, task["kernel"])}
    found |= {label: by_fit(data, task["kernel"], options) for label, options in OURS.items()}
    return {"rows": len(data[0]), "inputs": data[0].shape[1], "test": len(data[2]), "by": found}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    rows = 100 if options.quick else ROWS
    for name in SETS[:2] if options.quick else SETS:
        tasks: list[tuple[Any, Any]] = [(kernel, {"kernel": kernel}) for kernel in KERNELS]
        yield Group(("runs", name), tasks, load=lambda name=name: load(directory, name, rows), needs=(name,))


def say(run: dict[str, Any]) -> str:
    return ", ".join(f"{label} {one['loss']:.4f} in {one['cpu_seconds']:.1f} s" for label, one in run["by"].items())


def _summary(runs: list[dict[str, Any]], label: str) -> str:
    """How often a fit came lower than scikit-learn, to the same minimum, and not so low; and how long it took."""
    losses, densities = ([run["by"][label][key] - run["by"][RIVAL][key] for run in runs] for key in ("loss", "nll"))
    ratio = median([run["by"][label]["cpu_seconds"] / run["by"][RIVAL]["cpu_seconds"] for run in runs])
    lower, higher = ((sum(s * one > SAME for one in losses), max(s * one for one in losses)) for s in (-1, 1))
    better, worse = (sum(s * one > CLOSE for one in densities) for s in (-1, 1))
    return (
        f"- {label}: of {len(runs)} fits {lower[0]} end lower than scikit-learn's by more than {SAME:g} a row (by up "
        f"to {lower[1]:.3f}), {higher[0]} higher (by up to {higher[1]:.3f}), the others at the same loss; "
        f"{number(ratio)} of its processor seconds in the median. Test NLL is lower by more than {CLOSE:g} on "
        f"{better}, and higher on {worse}."
    )


def report(results: dict[str, Any]) -> str:
    labels = (RIVAL, *OURS)
    rows, runs = [], []
    for name, kernels in results["runs"].items():
        for kernel, run in kernels.items():
            runs.append(run)
            cells = [f"{run['by'][label]['loss']:.4f}" for label in labels]
            cells += [f"{run['by'][label]['nll']:.3f}" for label in labels]
            cells += [number(run["by"][label]["cpu_seconds"]) for label in labels]
            rows.append([name, kernel, run["rows"], run["inputs"], *cells])
    head = ["set", "kernel", "rows", "inputs", *(f"loss: {label}" for label in labels),
            *(f"NLL: {label}" for label in labels), *(f"CPU s: {label}" for label in labels)]  # fmt: skip
    return "\n".join([
        "# Fits of up to 700 rows beside scikit-learn", "", describe(results["machine"]), "",
        "The same model with the same limits and the same data. Losses are negative log marginal likelihoods a row, "
        "NLL is of the test observations, standardised; seconds are of the fit alone.", "",
        *[_summary(runs, label) for label in OURS], "",
        table(head, rows),
    ])  # fmt: skip


BENCHMARK = Benchmark(
    doc=__doc__,
    name="few_rows",
    quick="100 rows of two sets",
    problem=lambda options: {"rows": 100 if options.quick else ROWS, "test": TEST, "noise": NOISE},
    groups=groups,
    perform=perform,
    report=report,
    say=say,
    versions=("scipy", "scikit-learn"),
)


if __name__ == "__main__":
    BENCHMARK.main()

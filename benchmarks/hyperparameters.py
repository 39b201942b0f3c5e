"""Hyperparameters by marginal likelihood: sketchgp's ``fit`` beside GPyTorch, inducing points and a dense L-BFGS.

Matern-3/2 with a lengthscale for each input, output scale and noise, zero mean, GPyTorch's start and constraints;
inputs and targets standardised by the training part, float32.  0.64 of the rows train, as in the tables of Wang et al.
(2019), all others test; ``--rows`` takes that many of the training rows, by the same shuffle.

- sketchgp: ``accelerate``, ``fit`` and ``predict`` without options; and, up to as many rows as the dense fit,
  ``fit(start="model")``, which begins where the dense fit does.
- GPyTorch: 100 steps of Adam at 0.1 by its defaults (tolerance 1 in training, 0.01 for predictions, preconditioner of
  rank 15), 50 steps (as its tutorials take), and 100 with tolerance 0.01 and rank 100.
- SGPR: GPyTorch's ``InducingPointKernel``, 100 steps of Adam at 0.1, points learned, random rows to begin with.
- SVGP: GPyTorch's, Adam at 0.01, batches of 1,024, 100 epochs (and at least 2,000 steps), points learned.
- dense: float64, SciPy's L-BFGS-B on a loss by Cholesky factorization, up to 8,000 training rows.

A test density is that of the observation, with variances by the method itself.  Those of GPyTorch's exact model are one
linear solve a point: as many test points as a third of the limit allows, in random order.  Their last column has the
same hyperparameters and ``sketchgp.predict`` on all points; only that one is of the same points as other methods' NLL.
GPyTorch's loss is an estimate, too; up to 8,000 rows the true one, by a float64 factorization, stands beside it.

A fit is stopped after so many processor seconds (``--limit``), and is judged by what it has then; a cell that takes
three times as long in all, or more memory than ``--memory``, ends there, and that is its result.

Second, ``fit(iterations=k)`` for few steps k: the processor seconds until its density is that of GPyTorch's fits.

Third, what each ingredient of ``fit`` buys: fits with other options, their true losses (float64, factorized, after the
fit, of at most so many steps as JUDGED says), and the products and seconds to come within 0.01 a row of the least one.

    python benchmarks/hyperparameters.py --data DIRECTORY                  # many hours; resumes, important cells first
    python benchmarks/hyperparameters.py --data DIRECTORY --rows 4000      # of the training rows, beside the others
    python benchmarks/hyperparameters.py --data DIRECTORY --limit 120 --only "seed 0" sketchgp
    python benchmarks/hyperparameters.py --data DIRECTORY --quick          # 600 rows of two sets
    python benchmarks/hyperparameters.py --report                          # the tables again, nothing measured
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import Model, load_arrays, machine, scores, standardise
from hyperparameters_report import SAME, SHORT, report
from hyperparameters_rivals import DENSE, RIVALS, Data, parameters, refuse_many, true_loss
from measure import high_water_mb
from runner import Benchmark, Group

SETS = ("kin8nm", "uci_pol", "uci_bike", "california_housing", "uci_kin40k", "argo2016_temp100", "uci_keggdirected",
        "diamonds", "bcef_canopy")  # fmt: skip
FRACTION = 0.64
SEEDS = (0, 1, 2)
TIERS = (("sketchgp", "GPyTorch", "SGPR 1024"), ("dense", SAME), ("GPyTorch 50", *SHORT),
         ("GPyTorch 0.01", "SVGP 1024", "SGPR 512", "SVGP 512"))  # fmt: skip

OURS: dict[str, dict[str, Any]] = {
    "sketchgp": {}, SAME: {"start": "model"}, **{method: {"iterations": steps} for method, steps in SHORT.items()},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "fit's defaults": {},
    "start=model": {"start": "model"},
    "adam, start=model": {"start": "model", "optimizer": "adam", "iterations": 100},
    "adam, start=subset": {"start": "subset", "optimizer": "adam", "iterations": 100},
    "objective=probes": {"objective": "probes"},
}
COMPARED = ("uci_kin40k", "uci_pol", "argo2016_temp100")
COMPARED_ROWS = 6000
JUDGED = 24  # steps of a fit of which the true loss is computed, evenly from the first to the last


class OutOfTime(BaseException):
    """A cell took too long.  Not KeyboardInterrupt, at which a fit would return what it has."""


def load(directory: Path, name: str, seed: int, rows: int | None) -> Data:
    """Training and test part, float32, standardised."""
    arrays = load_arrays(directory, name)
    order = np.random.RandomState(seed).permutation(len(arrays["X"]))
    end = int(FRACTION * len(order))
    train, test = order[: min(end, rows or end)], order[end:]
    x, test_x = standardise(arrays["X"][train], arrays["X"][test])
    y, test_y = standardise(arrays["y"][train].reshape(-1), arrays["y"][test].reshape(-1))
    return Data(*(torch.as_tensor(part).float() for part in (x, y, test_x, test_y)))


def build(x: Tensor, y: Tensor) -> Model:
    kernel = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=x.shape[1]))
    return Model(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel)


@contextlib.contextmanager
def limited(seconds: float, memory: float) -> Iterator[None]:
    """Processor seconds after which :class:`OutOfTime` is raised inside; GiB that this process may take from now on."""

    def stop(number: int, frame: Any) -> None:
        raise OutOfTime

    with contextlib.suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30), resource.RLIM_INFINITY))
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 5)  # again, as what a destructor raises is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def ours(data: Data, limit: float, found: dict[str, Any], **options: Any) -> None:
    """sketchgp, with options of ``fit``."""
    model = sketchgp.accelerate(build(data.x, data.y))
    began, wall = time.process_time(), time.perf_counter()
    with sketchgp.record_solves() as solves:
        history = sketchgp.fit(
            model, progress=False, callback=lambda *_: time.process_time() - began > limit, **options
        )
    found |= {"cpu_seconds": time.process_time() - began, "seconds": time.perf_counter() - wall,
              "steps": len(history.losses), "evaluations": history.evaluations, "loss": history.best_loss,
              "objective": history.objective, "reason": history.reason, "products": products(solves),
              "complete": not history.reason.startswith("stopped"), "notes": history.notes,
              **parameters(model)}  # fmt: skip
    began = time.process_time()
    posterior = sketchgp.predict(model, data.test_x, progress=False)
    assert posterior.observation_variance is not None
    found |= scores(posterior.mean, posterior.observation_variance, data.test_y)
    found |= {"predict_cpu_seconds": time.process_time() - began, "variances": posterior.variance_method}


def judged(data: Data, found: dict[str, Any]) -> None:
    """What sketchgp predicts with the hyperparameters that were found."""
    model = build(data.x, data.y)
    model.covar_module.base_kernel.lengthscale = torch.tensor(found["lengthscales"])
    model.covar_module.outputscale, model.likelihood.noise = found["outputscale"], found["noise"]
    posterior = sketchgp.predict(sketchgp.accelerate(model), data.test_x, progress=False)
    assert posterior.observation_variance is not None
    found["by_sketchgp"] = scores(posterior.mean, posterior.observation_variance, data.test_y)


def products(solves: list[Any]) -> int:
    """With the kernel matrix, each with a block of columns."""
    return int(sum(solve.work.get("products", 0) for solve in solves))


def compared(data: Data, options: dict[str, Any], limit: float, found: dict[str, Any]) -> None:
    """One fit with other options, and the true losses on its way."""
    model = sketchgp.accelerate(build(data.x, data.y))
    steps: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []  # each, the hyperparameters
    began = time.process_time()
    with sketchgp.record_solves() as solves:

        def look(step: int, loss: float) -> bool:
            spent = time.process_time() - began
            steps.append({"cpu_seconds": spent, "products": products(solves), "loss": loss})
            after.append(parameters(model))
            return spent > limit

        history = sketchgp.fit(model, progress=False, callback=look, **options)
    chosen = sorted({round(step) for step in np.linspace(0, len(steps) - 1, min(len(steps), JUDGED))})
    exact = history.objective == "exact"  # of a copy of the model
    steps = [{**steps[i], "true_loss": steps[i]["loss"] if exact else true_loss(after[i], data)} for i in chosen]
    found |= {"cpu_seconds": steps[-1]["cpu_seconds"], "products": products(solves), "reason": history.reason,
              "evaluations": history.evaluations, "objective": history.objective, "optimizer": history.optimizer,
              "final": true_loss(parameters(model), data),
              "steps": {key: [step[key] for step in steps] for key in steps[0]}}  # fmt: skip


def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One cell, in a process of its own."""
    data = load(directory, task["name"], task["seed"], task["rows"])
    found: dict[str, Any] = {"train": len(data.x), "test": len(data.test_x), "inputs": data.x.shape[1],
                             "limit": task["fit"], "threads": torch.get_num_threads()}  # fmt: skip
    limit = task["fit"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with limited(3 * limit, task["memory"]):
                if task["options"] is not None:
                    compared(data, task["options"], limit, found)
                elif task["method"] in OURS:
                    if task["method"] == SAME:
                        refuse_many(data)
                    ours(data, limit, found, **OURS[task["method"]])
                else:
                    RIVALS[task["method"]](data, limit, found)
                    if task["method"].startswith("GPyTorch"):
                        judged(data, found)
        except OutOfTime:
            found["broke"] = f"more than {3 * limit:g} processor seconds"
        except (RuntimeError, ValueError, ArithmeticError, MemoryError) as error:
            words = str(error).strip().split("\n")[0]
            memory = isinstance(error, MemoryError) or "memory" in words
            found["broke"] = f"more than {task['memory']:g} GiB" if memory else f"{type(error).__name__}: {words[:200]}"
    found |= {"warnings": sorted({str(w.message).split("\n")[0][:200] for w in caught})[:5],
              "peak_memory_mb": high_water_mb(), "processor": machine()["processor"]}  # fmt: skip
    if "lengthscales" in found and len(data.x) <= DENSE:
        found["true_loss"] = true_loss(found, data)
    return found


def problem(options: Any) -> dict[str, Any]:
    return {"fraction": FRACTION, "kernel": "ScaleKernel(Matern-3/2, ARD)", "dtype": "float32", "dense": DENSE,
            "seeds": SEEDS, "quick": options.quick}  # fmt: skip


def tried(method: str, seed: int, rows: int | None) -> bool:
    """Return whether a method is run: variants of ours and the dense fit with --rows, the former on the first split."""
    if method in OURS and method != "sketchgp":
        return rows is not None and seed == SEEDS[0]
    return rows is not None or method != "dense"


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    sets, seeds, rows = (SETS[:2], SEEDS[:1], 600) if options.quick else (SETS, SEEDS, options.rows)
    limit = 5.0 if options.quick else options.limit
    # by the clock a cell has twice the processor seconds that it may take
    common = {"fit": limit, "limit": 6 * limit, "memory": options.memory, "options": None}
    for seed in seeds:
        for tier in TIERS:
            for name in sets:
                for method in [method for method in tier if tried(method, seed, rows)]:
                    task = {"name": name, "seed": seed, "rows": rows, "method": method, **common}
                    label = f"{name}, {'all' if rows is None else rows} rows, seed {seed}, {method}"
                    yield Group(("runs",), [(label, task)], needs=(name,))
        if seed == SEEDS[0]:
            yield from comparisons(options, common)


def comparisons(options: Any, common: dict[str, Any]) -> Iterator[Group]:
    """The fits with other options; those that this ``fit`` does not know are left out."""
    known = inspect.signature(sketchgp.fit).parameters
    rows = 1000 if options.quick else COMPARED_ROWS
    for name in COMPARED[: 1 if options.quick else None]:
        for label, given in OPTIONS.items():
            if all(option in known for option in given):
                task = {"name": name, "seed": 0, "rows": rows, "method": label, **common, "options": given}
                yield Group(("ingredients", f"{name}, {rows} rows", "runs"), [(label, task)], needs=(name,))


def say(run: dict[str, Any]) -> str:
    if "broke" in run:
        return run["broke"]
    if "final" in run:
        return f"true loss {run['final']:.4f}, {run['cpu_seconds']:.0f} CPU s, {run['products']} products"
    return f"RMSE {run['rmse']:.4f}, NLL {run['nll']:.3f}, {run['cpu_seconds']:.0f} CPU s"


def more(parser: Any) -> None:
    parser.add_argument("--rows", type=int, help="training rows of each set (default: 0.64 of it)")
    parser.add_argument("--limit", type=float, default=300, help="processor seconds of one fit (default: 300)")
    parser.add_argument("--memory", type=float, default=12, help="GiB that one fit may take (default: 12)")


BENCHMARK = Benchmark(
    doc=__doc__,
    name="hyperparameters",
    quick="600 rows of two sets",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    say=say,
    alone=Path(__file__).resolve(),
    rival=lambda task: task["options"] is None and task["method"] not in OURS,
    options=more,
    versions=("scipy",),
)


if __name__ == "__main__":
    BENCHMARK.main()

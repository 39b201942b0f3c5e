"""Parts of the matvec benchmark that need a process of their own: peak memory, and KeOps with its own flags."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from common import read_json, write_json
from kin40k import build, prepare, split
from matvec_cells import Cell, Problem, lazy_product
from measure import current_memory_mb, high_water_mb, true_residual

TRAINING = {"rows": 50_000, "d": 8, "limit_mb": 2000}
POSTERIOR = {"rows": 10**9, "noise": 1e-2, "limit_mb": 1000, "residual": 1e-3}  # every training row there is
TRAINING_LABEL, POSTERIOR_LABEL = "training step", "posterior mean"


class Regression(gpytorch.models.ExactGP):
    """Constant mean, scaled RBF kernel with a lengthscale an input."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[-1]))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def memory_of(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Run ``call`` once: its result, seconds, and how far memory rose above what was in use before it."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
        before: float | None = torch.cuda.memory_allocated(device) / 2**20
    else:
        before = current_memory_mb()
    started = time.perf_counter()
    result = call()
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if cuda else high_water_mb()
    added = None if peak is None or before is None else peak - before
    return {"result": result, "seconds": seconds, "peak_mb": peak, "before_mb": before, "added_mb": added}


def training_step(rows: int, d: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Marginal likelihood and its gradient once, float32, ``accelerate(model, matmul="tiled")``, defaults else."""
    import sketchgp

    def step(count: int) -> Callable[[], list[Any]]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, d, generator=generator)
        y = torch.sin(x.sum(dim=1)) + 0.1 * torch.randn(count, generator=generator)
        model = Regression(x.to(device), y.to(device), gpytorch.likelihoods.GaussianLikelihood()).to(device)
        model.covar_module.base_kernel.lengthscale = 2.0
        model.likelihood.noise = 1e-1
        sketchgp.accelerate(model.train(), matmul="tiled")
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

        def call() -> list[Any]:
            with sketchgp.record_solves() as solves:
                torch.manual_seed(seed)
                (-mll(model(*model.train_inputs), model.train_targets)).backward()
            assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
            return list(solves)

        return call

    step(1000)()  # loads and compiles what is loaded on first use
    run = memory_of(step(rows), device)
    solves = run.pop("result")
    run |= {"iterations": sum(s.iterations for s in solves), "products": sum(int(s.work["products"]) for s in solves),
            "reported_residual": max(s.max_residual for s in solves), "rank_used": solves[-1].rank}  # fmt: skip
    return run | {"rows": rows, "d": d, "dtype": "float32", "noise": 1e-1}


def posterior_mean(rows: int, noise: float, system: str, directory: Path, device: torch.device) -> dict[str, Any]:
    """``model(test_x).mean`` on uci_kin40k, float32; the residual is computed afterwards in float64."""
    import sketchgp

    x, y, test_x, test_y = split(directory, rows)

    def predict(count: int, queries: Tensor) -> tuple[Callable[[], Tensor], Any, list[Any]]:
        model = build(x[:count].float().to(device), y[:count].float().to(device), noise).to(device)
        solves: list[Any] = []

        def call() -> Tensor:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(gpytorch.settings.skip_posterior_variances())
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                if system == "sketchgp":
                    sketchgp.accelerate(model, matmul="tiled")
                    solves.append(stack.enter_context(sketchgp.record_solves()))
                else:
                    solves.append(prepare(model, {"system": "gpytorch"}, stack))
                return model(queries).mean

        return call, model, solves

    queries = test_x.float().to(device)
    predict(1000, queries[:10])[0]()
    call, model, solves = predict(rows, queries)
    run = memory_of(call, device)
    mean = run.pop("result")
    solution = model.prediction_strategy.mean_cache.detach().reshape(-1)
    x, y = x.float().to(device), y.float().to(device)
    return run | {
        "rows": len(y), "test_rows": len(test_y), "d": x.shape[-1], "dtype": "float32", "noise": noise,
        "iterations": sum(s.iterations for s in solves[0]),
        "rmse": float((mean.cpu().double() - test_y).square().mean().sqrt()),
        "true_residual": true_residual(model.covar_module, x, y, noise, solution),
    }  # fmt: skip


def lazy_rates(dims: list[int], longest: float, seed: int, dtype: str = "float32") -> dict[str, Any]:
    """Pairs a second of KeOps' product with one column, RBF, in a process whose KeOps has its default flags."""
    import pykeops

    pykeops.set_verbose(False)
    found: dict[str, Any] = {}
    for d in dims:
        problem = Problem(Cell("rbf", d, 1, dtype, 8000), torch.device("cpu"), seed)

        def call(n: int, problem: Problem = problem) -> float:
            started = time.perf_counter()
            lazy_product(problem.x[:n], problem.z[:n], problem.v[:n], rbf=True)
            return time.perf_counter() - started

        call(300)
        n = int(min(8000, 1500 * (longest / call(1500)) ** 0.5))
        seconds = sorted(call(n) for _ in range(3))[1]
        found[str(d)] = {"n": n, "median_seconds": seconds, "pairs_per_second": n * n / seconds}
    return found


def in_new_process(task: dict[str, Any], threads: int, environment: dict[str, str]) -> dict[str, Any]:
    """Run one task in a process of its own; ``{"failed": reason}`` where it did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, json.dumps(task | {"threads": threads}), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:500]}
        return read_json(answer)


def memory_tasks(options: argparse.Namespace, directory: Path) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Label and measurement of each peak of memory."""
    common = {"device": options.device, "seed": options.seed, "data": str(directory)}
    step = {"kind": "training", "rows": 2000 if options.quick else TRAINING["rows"], "d": TRAINING["d"]}
    mean = {"kind": "posterior", "rows": 3000 if options.quick else POSTERIOR["rows"], "noise": POSTERIOR["noise"]}
    tasks = [(TRAINING_LABEL, step, TRAINING), (POSTERIOR_LABEL, mean | {"system": "sketchgp"}, POSTERIOR)]
    if options.memory_gpytorch:  # it is no claim of ours
        tasks.append((f"{POSTERIOR_LABEL}, GPyTorch default", mean | {"system": "gpytorch"}, {}))
    return [(label, partial(measure_memory, common | task, targets)) for label, task, targets in tasks]


def measure_memory(task: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    run = in_new_process(task, torch.get_num_threads(), dict(os.environ))
    return run | {"limit_mb": targets.get("limit_mb"), "limit_residual": targets.get("residual")}


def keops_as_installed(options: argparse.Namespace, dims: list[int]) -> dict[str, Any]:
    """KeOps' rates by dimension, compiled with the flags it has by default; RBF, one column, float32."""
    environment = {key: value for key, value in os.environ.items() if key != "CXXFLAGS"}
    task = {"kind": "keops", "dims": dims, "longest": options.longest, "seed": options.seed}
    return in_new_process(task, torch.get_num_threads(), environment)


def main() -> None:
    task, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(task["threads"])
    device = torch.device(task.get("device", "cpu"))
    if task["kind"] == "training":
        done = training_step(task["rows"], task["d"], task["seed"], device)
    elif task["kind"] == "posterior":
        done = posterior_mean(task["rows"], task["noise"], task["system"], Path(task["data"]), device)
    else:
        done = {"by_dimension": lazy_rates(task["dims"], task["longest"], task["seed"])}
    write_json(answer, done)


if __name__ == "__main__":
    main()

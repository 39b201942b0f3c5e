"""All 311,000 taxi trips against 2,000 inducing points: the same kernel, the same time, less than 4 GB of memory.

Target: the duration of a trip (standardised by the training part).  The hyperparameters (Matern-3/2 with a lengthscale
for each input) are found by ``sketchgp.fit`` on 5,000 rows first and shared by all:

- the full model on every training row, by ASkotch, which never stores the kernel matrix;
- inducing points: the exact minimiser of ``|K_xz w - y|^2 + noise w^T K_zz w`` in float64, for uniform and for k-means
  points.  In the time that is left it tries other lengthscales and noises, then other uniform points, and is credited
  with the best of all on the *test* rows;
- ASkotch on 100,000 of the rows; conjugate gradients on all rows.

Each runs in a process of its own, whose peak memory is recorded.  Clocks stand still while test rows are predicted.

``--million`` measures processor seconds instead, of ASkotch on one thread, so that other work beside it matters less:
all trips to the test error that 400 s gave without the engine ``"fused"``, and uniform rows, up to a million, to an
estimated residual of 1e-2.  A run that is killed goes on from its checkpoint, and its seconds count on.

    python benchmarks/taxi.py --data DIRECTORY            # 40 minutes on two cores; resumes
    python benchmarks/taxi.py --data DIRECTORY --quick    # 3,000 rows, three seconds a run
    python benchmarks/taxi.py --data DIRECTORY --million  # two to three hours on one core
    python benchmarks/taxi.py --report                    # table and picture again, nothing measured
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

import sketchgp
from blockwise import Trace, follow_blockwise, follow_conjugate_gradients, warm_up
from common import load_arrays, read_json, results_directory, standardise, write_json
from measure import high_water_mb
from runner import Benchmark, Group
from sketchgp.operators import KernelMatrix
from taxi_report import picture, report

try:
    from sklearn.cluster import MiniBatchKMeans
except ImportError:  # then without k-means points
    MiniBatchKMeans = None

FULL = {"train": 311_000, "test": 10_000, "fit_rows": 5000, "subset": 100_000, "inducing_points": 2000,
        "seconds": 400.0, "row_seed": 0, "kernel": "ScaleKernel(Matern-3/2, ARD)"}  # fmt: skip
QUICK = FULL | {"train": 3000, "test": 1000, "fit_rows": 1000, "subset": 1500, "inducing_points": 100, "seconds": 3.0}
MILLION = {"inputs": 8, "lengthscale": 1.0, "noise": 0.1, "residual": 1e-2, "rmse": 0.51, "seconds": 7200.0,
           "kernel": "Matern-3/2", "runs": [[311_000, True, "auto"], [100_000, False, "auto"],
           [100_000, False, "tiled"], [300_000, False, "auto"], [1_000_000, False, "auto"]]}  # fmt: skip
FACTOR_BUDGET = 2 * 2**30  # bytes for the factor of the preconditioner of conjugate gradients
LENGTHSCALE_FACTORS = (1.0, 0.75, 1.5, 0.5, 2.0)
NOISE_FACTORS = (1.0, 0.1, 10.0)
TILE = 8192  # rows
LOOK = 50_000  # rows of the kernel matrix between two looks at the test error


class Data:
    """Rows in a random order, float64, standardised by the first ``train`` of them."""

    def __init__(self, directory: Path, sizes: dict[str, Any]) -> None:
        arrays = load_arrays(directory, "nyc_green_taxi")
        rows = np.random.RandomState(sizes["row_seed"]).permutation(len(arrays["y"]))
        train, test = rows[: sizes["train"]], rows[sizes["train"] : sizes["train"] + sizes["test"]]
        x, test_x = standardise(arrays["X"][train], arrays["X"][test])
        y, test_y = standardise(arrays["y"][train], arrays["y"][test])
        self.x, self.y, self.test_x, self.test_y = (torch.as_tensor(part) for part in (x, y, test_x, test_y))
        self.deviation = float(np.std(arrays["y"][train].astype(np.float64)))


class Regression(gpytorch.models.ExactGP):
    """Zero mean; only for finding hyperparameters."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = covariance(x.shape[1])

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def covariance(inputs: int, found: dict[str, Any] | None = None) -> gpytorch.kernels.Kernel:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=inputs))
    kernel.base_kernel.lengthscale = 1.0 if found is None else torch.tensor(found["lengthscale"])
    kernel.outputscale = 1.0 if found is None else found["outputscale"]
    return kernel.requires_grad_(found is None)


def find_hyperparameters(data: Data, sizes: dict[str, Any]) -> dict[str, Any]:
    rows = sizes["fit_rows"]
    started = time.perf_counter()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.3
    model = Regression(data.x[:rows].float(), data.y[:rows].float(), likelihood)
    sketchgp.accelerate(model)
    history = sketchgp.fit(model, iterations=100, progress=False)
    return {
        "lengthscale": model.covar_module.base_kernel.lengthscale.flatten().tolist(),
        "outputscale": float(model.covar_module.outputscale.detach()),
        "noise": float(likelihood.noise.detach()),
        "steps": len(history.losses),
        "reason": history.reason,
        "loss": history.best_loss,
        "seconds": time.perf_counter() - started,
    }


# ------------------------------------------------------------------------------------------ the full model
def full_model(data: Data, sizes: dict[str, Any], found: dict[str, Any], method: str) -> dict[str, Any]:
    """``askotch``, ``subset`` (the same on fewer rows) or ``cg``."""
    rows = sizes["subset"] if method == "subset" else sizes["train"]
    kernel = covariance(data.x.shape[1], found)
    x, test_x = data.x[:rows].float(), data.test_x.float()
    problem = sketchgp.FullProblem(kernel, x, data.y[:rows].float(), found["noise"])
    cross = KernelMatrix.of(kernel, test_x, x).detach()

    def measure(weights: Tensor) -> dict[str, float]:
        predicted = (cross @ weights.to(cross.dtype)).double().squeeze(-1)
        return {"rmse": float((predicted - data.test_y).square().mean().sqrt())}

    warm_up(kernel, inputs=x.shape[1])
    trace = Trace(measure, limit=sizes["seconds"])
    if method == "cg":
        with sketchgp.settings.memory_budget(FACTOR_BUDGET):
            run = follow_conjugate_gradients(
                sketchgp.ConjugateGradients(tol=1e-4), sketchgp.RPCholesky(), problem, trace
            )
    else:
        run = follow_blockwise(sketchgp.ASkotch(tol=1e-4, max_passes=1e9), problem, trace, LOOK)
    return run | {"rows": rows, "course": trace.columns}


# ----------------------------------------------------------------------------------------- inducing points
class _TimeIsUp(Exception):
    """Before a pass over the rows was through."""


class Inducing:
    """Inducing-point models, one after the other, on a clock that stops while test rows are predicted."""

    def __init__(self, data: Data, sizes: dict[str, Any], found: dict[str, Any]) -> None:
        self.data, self.sizes, self.found = data, sizes, found
        self.points: list[dict[str, Any]] = []
        self.paused, self.started = 0.0, time.perf_counter()
        self.centres: dict[tuple[str, int], Tensor] = {}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started - self.paused

    def place(self, selection: str, seed: int) -> Tensor:
        """The inducing points, chosen once for each selection and seed."""
        x, m = self.data.x, self.sizes["inducing_points"]
        if (selection, seed) not in self.centres:
            if selection == "uniform":
                rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:m]
                self.centres[selection, seed] = x[rows]
            else:
                scale = torch.tensor(self.found["lengthscale"], dtype=torch.float64)
                means = MiniBatchKMeans(m, batch_size=8192, max_iter=20, n_init=1, random_state=seed)
                centres = means.fit((x / scale).numpy()).cluster_centers_
                self.centres[selection, seed] = torch.as_tensor(centres, dtype=torch.float64) * scale
        return self.centres[selection, seed]

    def run(self, selection: str, seed: int, factor: float) -> None:
        """One pass over the rows, then the model for each noise.

        :raises _TimeIsUp: if the pass or a model did not end in time.
        """
        z = self.place(selection, seed)
        kernel = covariance(z.shape[1], self.found).double()
        kernel.base_kernel.lengthscale = kernel.base_kernel.lengthscale * factor
        m = len(z)
        gram, right = torch.zeros(m, m, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
        for x, y in zip(self.data.x.split(TILE), self.data.y.split(TILE), strict=True):
            tile = KernelMatrix.of(kernel, x, z).to_dense()
            gram.addmm_(tile.mT, tile)
            right.addmv_(tile.mT, y)
            self._check()
        root = _root(KernelMatrix.of(kernel, z).to_dense())
        # With K_zz = L L^T and w = L^-T v: (L^-1 K_zx K_xz L^-T + noise) v = L^-1 K_zx y
        right = torch.linalg.solve_triangular(root, right.unsqueeze(-1), upper=False)
        gram = torch.linalg.solve_triangular(root, gram, upper=False)
        gram = torch.linalg.solve_triangular(root, gram.mT.contiguous(), upper=False)
        for noise_factor in NOISE_FACTORS:
            shifted = gram.clone()
            shifted.diagonal().add_(noise_factor * self.found["noise"])
            solution = torch.cholesky_solve(right, torch.linalg.cholesky(shifted))
            weights = torch.linalg.solve_triangular(root.mT, solution, upper=True)
            self._check()
            seconds, stopped = self.seconds, time.perf_counter()
            predicted = (KernelMatrix.of(kernel, self.data.test_x, z) @ weights).squeeze(-1)
            rmse = float((predicted - self.data.test_y).square().mean().sqrt())
            self.points.append({"seconds": seconds, "rmse": rmse, "selection": selection, "seed": seed,
                                "lengthscale_factor": factor, "noise_factor": noise_factor})  # fmt: skip
            self.paused += time.perf_counter() - stopped

    def _check(self) -> None:
        if self.seconds > self.sizes["seconds"]:
            raise _TimeIsUp

    def plan(self) -> Iterator[tuple[str, int, float]]:
        """Selection, seed, factor of the lengthscales: a grid, then more uniform points for the best factor."""
        selections = ("uniform",) if MiniBatchKMeans is None else ("uniform", "k-means")
        for factor, selection in itertools.product(LENGTHSCALE_FACTORS, selections):
            yield selection, 0, factor
        best = min(self.points, key=lambda point: point["rmse"])
        for seed in itertools.count(1):
            yield best["selection"], seed, best["lengthscale_factor"]


@torch.no_grad()
def inducing(data: Data, sizes: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    warm_up(covariance(data.x.shape[1], found), inputs=data.x.shape[1])
    models = Inducing(data, sizes, found)
    with contextlib.suppress(_TimeIsUp):
        for selection, seed, factor in models.plan():
            models.run(selection, seed, factor)
    return {"points": models.points, "inducing_points": sizes["inducing_points"], "reason": "ran out of time"}


def _root(matrix: Tensor) -> Tensor:
    """Cholesky factor, with the least of some jitters that lets it exist."""
    size = float(matrix.diagonal().mean())
    for exponent in range(-14, -3):
        shifted = matrix.clone()
        shifted.diagonal().add_(size * 10.0**exponent)
        root, info = torch.linalg.cholesky_ex(shifted)
        if not int(info):
            return root
    raise RuntimeError("The kernel matrix of the inducing points is not positive definite.")


# ------------------------------------------------------------------------------------ processor seconds
def uniform_rows(rows: int) -> tuple[gpytorch.kernels.Kernel, Tensor, Tensor]:
    """A kernel, points of the unit cube and a smooth function of them with noise."""
    stream = torch.Generator().manual_seed(0)
    x = torch.rand(rows, MILLION["inputs"], generator=stream)
    values = torch.sin(2 * torch.pi * x[:, 0] * x[:, 1]) + torch.cos(3 * x[:, 2:5].sum(dim=1))
    values += x[:, 5:].square().sum(dim=1)
    values = (values - values.mean()) / values.std()
    kernel = gpytorch.kernels.MaternKernel(nu=1.5).requires_grad_(False)
    kernel.lengthscale = MILLION["lengthscale"]
    return kernel, x, values + MILLION["noise"] ** 0.5 * torch.randn(rows, generator=stream)


def by_processor_seconds(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """ASkotch, until the test error or the estimated residual is low enough; resumes."""
    torch.set_num_threads(1)
    sizes, rows, cross = task["sizes"], task["rows"], None
    if task["found"] is None:
        kernel, x, y = uniform_rows(rows)
        noise = sizes["noise"]
    else:
        data, noise = Data(directory, FULL | {"train": rows}), task["found"]["noise"]
        kernel, x, y = covariance(data.x.shape[1], task["found"]), data.x.float(), data.y.float()
        cross = KernelMatrix.of(kernel, data.test_x.float(), x).detach()
    state, course = Path(task["state"]), Path(task["state"]).with_suffix(".json")
    lines = read_json(course).get("course", []) if state.exists() else []
    before = lines[-1]["processor_seconds"] if lines else 0.0
    started, paused = time.process_time(), 0.0

    def callback(progress: sketchgp.solvers.Progress) -> bool:
        nonlocal paused
        stopped = time.process_time()
        line = {"processor_seconds": before + stopped - started - paused, "passes": progress.passes,
                "residual": float(progress.residual.max())}  # fmt: skip
        if cross is not None:
            predicted = (cross @ progress.weights().to(cross.dtype)).double().squeeze(-1)
            line["rmse"] = float((predicted - data.test_y).square().mean().sqrt())
        lines.append(line)
        write_json(course, {"course": lines})
        paused += time.process_time() - stopped
        reached = line["residual"] <= sizes["residual"] if cross is None else line["rmse"] <= sizes["rmse"]
        return reached or line["processor_seconds"] > sizes["seconds"]

    solver = sketchgp.ASkotch(tol=1e-4, max_passes=1e9, checkpoint=state, every=120.0)
    problem = sketchgp.FullProblem(kernel, x, y, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        report = solver.solve(problem, matmul=task["matmul"], callback=callback, progress=False).report
    total = before + time.process_time() - started - paused
    state.unlink(missing_ok=True)
    return {"rows": rows, "matmul": task["matmul"], "described": f"{report.solver}: {report.preconditioner}",
            "true_residual": report.max_residual, "with_true_residual": total, "course": lines}  # fmt: skip


def million_groups(options: argparse.Namespace) -> Iterator[Group]:
    folder = results_directory(options.out, options.quick)
    found = read_json(results_directory(None, False) / "taxi.json")["hyperparameters"]
    sizes, runs = about(options), []
    for rows, trips, matmul in sizes["runs"]:
        label = f"{'trips' if trips else 'uniform'}, {rows:,}{', tiles' if matmul == 'tiled' else ''}"
        state = folder / f"taxi_million_{'trips' if trips else 'uniform'}_{rows}_{matmul}.state"
        task = {"name": "million", "rows": rows, "matmul": matmul, "sizes": sizes, "state": str(state)}
        runs.append((label, (("nyc_green_taxi",) if trips else (), task | {"found": found if trips else None})))
    for label, (needs, task) in runs:
        yield Group(("runs",), [(label, task)], needs=needs)


# ---------------------------------------------------------------------------------------------- processes
def perform(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One task, in this process."""
    sizes, found, name = task["sizes"], task.get("found"), task["name"]
    if name == "million":
        return by_processor_seconds(task, directory) | {"peak_memory_mb": high_water_mb()}
    data = Data(directory, sizes)
    if name == "fit":
        answer = find_hyperparameters(data, sizes)
    elif name == "inducing":
        answer = inducing(data, sizes, found)
    else:
        answer = full_model(data, sizes, found, name)
    return answer | {"deviation": data.deviation, "inputs": data.x.shape[1], "peak_memory_mb": high_water_mb()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, help="of each method (400)")
    parser.add_argument("--test-rows", type=int, help="rows whose error is measured (10,000)")
    parser.add_argument("--million", action="store_true", help="processor seconds of ASkotch, up to a million rows")


def about(options: argparse.Namespace) -> dict[str, Any]:
    if options.million:
        return MILLION | ({"runs": [[3000, False, "auto"]]} if options.quick else {})
    sizes = dict(QUICK if options.quick else FULL)
    return sizes | {"seconds": options.seconds or sizes["seconds"], "test": options.test_rows or sizes["test"]}


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    if options.million:
        yield from million_groups(options)
        return
    sizes = about(options)
    yield Group((), [("hyperparameters", {"name": "fit", "sizes": sizes})], needs=("nyc_green_taxi",), always=True)
    if "hyperparameters" not in results:
        raise SystemExit("There are no hyperparameters: they were not found, or the data are missing.")
    found = results["hyperparameters"]
    tasks = [(name, {"name": name, "sizes": sizes, "found": found}) for name in ("askotch", "inducing", "subset", "cg")]
    yield Group(("runs",), tasks, needs=("nyc_green_taxi",))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="taxi",
    quick="3,000 rows, three seconds a run",
    problem=about,
    groups=groups,
    perform=perform,
    report=report,
    picture=lambda results, path: picture(results, path.with_suffix(".png")),
    variant=lambda options: "_million" if options.million else "",
    say=lambda run: f"peak memory {run['peak_memory_mb']} MB",
    alone=Path(__file__),
    versions=("scikit-learn",),
    options=add_options,
    head={"factor_budget": FACTOR_BUDGET},
)


if __name__ == "__main__":
    BENCHMARK.main()

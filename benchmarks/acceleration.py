"""Does ASkotch's default acceleration need tuning?  Passes to a residual, beside every other rule, on real data.

Every variant solves the same problem with the kernel matrix stored in float32, at the same block size and rank; what
counts is not time but how many of its rows the steps multiply.  At every half pass the residual is computed in float64
from the weights themselves; between two of these values the crossing of a tolerance is interpolated (linearly in its
logarithm).  The promise to check: at most 1.2 times the passes of the best of version 1, version 2 with mu = noise (the
authors' rule) and no acceleration at all.

    python benchmarks/acceleration.py --data DIRECTORY            # three quarters of an hour on one core; resumes
    python benchmarks/acceleration.py --data DIRECTORY --quick    # three problems, n = 1000, one seed
    python benchmarks/acceleration.py --report                    # table and picture again, nothing measured
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from acceleration_report import picture, report
from blockwise import Trace, callbacks_every, counted_rows
from common import load_arrays, standardise, subsample, targets
from runner import Benchmark, Group

ROWS = 6000
SEEDS = (0, 1)
TARGETS = (1e-1, 1e-2, 1e-3)
CAP = 40.0  # passes


@dataclass(frozen=True)
class Case:
    """A data set, a kernel on its standardised inputs, a noise; ``positive`` is the class that becomes +1."""

    data: str
    kernel: str
    lengthscale: float
    noise: float
    positive: int | None = None

    @property
    def name(self) -> str:
        return f"{self.data}, {self.kernel} {self.lengthscale:g}, noise {self.noise:g}"


CASES = (
    Case("uci_kin40k", "RBF", 2, 0.1),
    Case("uci_kin40k", "RBF", 2, 0.01),
    Case("uci_kin40k", "RBF", 2, 1e-4),
    Case("uci_kin40k", "Matern-1/2", 4, 0.01),
    Case("higgs_18k", "RBF", 3.8, 0.3, positive=1),
    Case("cod_rna", "RBF", 2, 0.01, positive=1),
    Case("nyc_green_taxi", "RBF", 1, 0.1),
    Case("nyc_green_taxi", "RBF", 2, 1e-3),
    Case("qm9_homo_cm_10k", "Laplace", 5120, 1e-3),
    Case("uci_pol", "Matern-3/2", 4, 0.01),
    Case("california_housing", "Matern-3/2", 2, 0.1),
    Case("ijcnn1", "RBF", 2, 0.1, positive=1),
    Case("shuttle", "RBF", 0.5, 1e-3, positive=6),
)
QUICK = (1, 3, 5)

KERNELS: dict[str, Callable[[], gpytorch.kernels.Kernel]] = {
    "RBF": gpytorch.kernels.RBFKernel,
    "Laplace": sketchgp.LaplaceKernel,
    "Matern-1/2": lambda: gpytorch.kernels.MaternKernel(nu=0.5),
    "Matern-3/2": lambda: gpytorch.kernels.MaternKernel(nu=1.5),
}

# at equal block size and rank: ``RIVALS`` in acceleration_report.py are those that the default is compared with
VARIANTS: dict[str, Callable[[float, dict[str, Any]], Any]] = {
    "default": lambda noise, same: sketchgp.ASkotch(**same),
    "default rule, uniform": lambda noise, same: sketchgp.ASkotch(sampling="uniform", **same),
    "mu = noise, uniform": lambda noise, same: sketchgp.ASkotch(mu=noise, sampling="uniform", **same),
    "version 1": lambda noise, same: sketchgp.ASkotch(version=1, **same),
    "Skotch, uniform": lambda noise, same: sketchgp.Skotch(sampling="uniform", **same),
    "Skotch, shuffled": lambda noise, same: sketchgp.Skotch(**same),
    "Skotch, version 1": lambda noise, same: sketchgp.Skotch(version=1, **same),
}
EXACT = {"exact blocks": {"share": 20, "rank": None}}  # blocks of n / share
SETTINGS = EXACT | {"rank 100": {"share": 20, "rank": 100}}
QUICK_SETTINGS = EXACT | {"rank 20": {"share": 20, "rank": 20}}
OWN: dict[str, Callable[[float, int, dict[str, Any]], Any]] = {  # at settings of their own
    "automatic": lambda noise, n, same: sketchgp.ASkotch(**same),
    "authors' defaults": lambda noise, n, same: sketchgp.ASkotch(
        mu=noise, sampling="uniform", block_size=max(1, n // 100), rank=100, **same
    ),
    "EigenPro2": lambda noise, n, same: sketchgp.EigenPro2(**same),
}


@dataclass
class Loaded:
    """A case, ready: the problem in float32, and its kernel matrix in float64 (n, n) by the kernel itself."""

    problem: sketchgp.FullProblem
    matrix: Tensor
    y: Tensor
    noise: float

    def residual(self, weights: Tensor) -> dict[str, float]:
        """The true relative residual."""
        r = self.y - self.matrix @ weights - self.noise * weights
        return {"true_residual": float(r.norm() / self.y.norm())}


def load(directory: Path, case: Case, rows: int) -> Loaded:
    """Rows drawn by seed 0, standardised, rounded to float32; the float64 matrix is that of the rounded inputs."""
    x, y = subsample(load_arrays(directory, case.data), rows, seed=0)
    (inputs,), (outputs,) = standardise(x), standardise(targets(y, case.positive))
    points, y32 = torch.as_tensor(inputs).float(), torch.as_tensor(outputs).float()
    kernel = KERNELS[case.kernel]()
    kernel.lengthscale = case.lengthscale
    exact = copy.deepcopy(kernel).double()
    with torch.no_grad():
        matrix = torch.cat([exact(part, points.double()).to_dense() for part in points.double().split(500)])
    problem = sketchgp.FullProblem(kernel, points, y32, case.noise)
    return Loaded(problem, matrix, y32.double().unsqueeze(-1), case.noise)


def crossing(passes: list[float], residuals: list[float], target: float) -> float | None:
    """Where the residual first falls to ``target``; None if it never does."""
    for index, value in enumerate(residuals):
        if value <= target:
            if index == 0:
                return passes[0]
            before = residuals[index - 1]
            share = math.log(before / target) / math.log(before / max(value, 1e-300))
            return passes[index - 1] + share * (passes[index] - passes[index - 1])
    return None


def measure(loaded: Loaded, solver: Any) -> dict[str, Any]:
    """One run: passes to each target, of the steps' rows alone and of all entries evaluated."""
    n = len(loaded.y)
    trace = Trace(loaded.residual)
    own: list[float] = [0.0]  # passes of the steps' rows
    run: dict[str, Any] = {"reason": ""}
    with counted_rows() as rows, callbacks_every(n // 2), warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)

        def callback(progress: Any) -> bool:
            trace.note(progress.weights(), progress.passes, float(progress.residual.max()))
            own.append(rows[0] / n)
            return own[-1] >= CAP or trace.columns["true_residual"][-1] <= TARGETS[-1]

        trace.begin(n)
        try:
            done = solver.solve(loaded.problem, matmul="dense", callback=callback, progress=False).report
        except sketchgp.NumericalError as error:
            run = {"reason": "diverged", "error": str(error)[:300]}
        else:
            run |= {"reason": done.reason, "described": f"{done.solver}: {done.preconditioner}", "rank": done.rank,
                    "notes": done.notes}  # fmt: skip
    true, total = trace.columns["true_residual"], trace.columns["entries"]
    kept = [i for i in range(len(own)) if i <= 10 or i % 10 == 0 or i == len(own) - 1]
    return run | {
        "passes": {f"{target:g}": crossing(own, true, target) for target in TARGETS},
        "total_passes": {f"{target:g}": crossing(total, true, target) for target in TARGETS},
        "seconds": trace.columns["seconds"][-1],
        "final_residual": true[-1],
        "final_passes": own[-1],
        "history": {"passes": [own[i] for i in kept], "residual": [true[i] for i in kept]},
    }


def solvers(n: int, noise: float, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Every solver to run, by the key of its runs in the JSON."""
    common = {"seed": seed, "tol": 1e-6, "max_passes": 1e9}  # the callback ends a run
    found: dict[str, Any] = {}
    for label, setting in settings.items():
        same = common | {"block_size": max(1, n // setting["share"]), "rank": setting["rank"]}
        found |= {f"{variant} | {label}": make(noise, same) for variant, make in VARIANTS.items()}
    return found | {variant: make(noise, n, common) for variant, make in OWN.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, help=f"rows at most ({ROWS})")
    parser.add_argument("--seeds", type=int, nargs="*", help="of the solvers (0 1)")


def problem(options: argparse.Namespace) -> dict[str, Any]:
    return {"rows": options.n or (1000 if options.quick else ROWS), "row_seed": 0, "targets": list(TARGETS),
            "cap": CAP, "dtype": "float32", "settings": QUICK_SETTINGS if options.quick else SETTINGS,
            "checked_every_passes": 0.5}  # fmt: skip


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    about = problem(options)
    seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    for number, case in enumerate(CASES):
        if options.quick and number not in QUICK:
            continue
        yield Group(
            ("problems", case.name, "runs"),
            [((key, {"seed": seed}), (key, seed, about["settings"]))
             for seed in seeds for key in solvers(about["rows"], 1.0, seed, about["settings"])],
            load=partial(load, directory, case, about["rows"]),
            needs=(case.data,),
            about=lambda loaded, case=case: {
                "n": len(loaded.y), "data": case.data, "kernel": case.kernel, "lengthscale": case.lengthscale,
                "noise": case.noise, "positive": case.positive},
        )  # fmt: skip


def perform(loaded: Loaded, task: tuple[str, int, dict[str, Any]]) -> dict[str, Any]:
    key, seed, settings = task
    return measure(loaded, solvers(len(loaded.y), loaded.noise, seed, settings)[key])


BENCHMARK = Benchmark(
    doc=__doc__,
    name="acceleration",
    quick="three problems, n = 1000, one seed",
    problem=problem,
    groups=groups,
    perform=perform,
    report=report,
    picture=lambda results, path: picture(results, path.with_suffix(".png")),
    say=lambda run: (
        f"residual {run['final_residual']:.1e} after {run['final_passes']:.1f} passes, {run['seconds']:.1f} s"
    ),
    what="problems",
    options=add_options,
)


if __name__ == "__main__":
    BENCHMARK.main()

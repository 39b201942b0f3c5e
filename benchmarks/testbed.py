"""The experiment of the RPCholesky paper's Figure 1 on real data sets, with GPyTorch's default CG beside it.

Problem (Diaz, Epperly, Frangella, Tropp and Webber, "Robust, randomized preconditioning for kernel ridge
regression", section 2.1.2): N = 15,000 rows drawn at random (or all), inputs standardised, squared
exponential kernel with bandwidth 3, mu / N = 1e-7, conjugate gradients to relative residual 1e-3 within 250
iterations, preconditioners of rank 500 and 1000.  Everything in float64.  A problem counts as solved when the
residual, computed again from GPyTorch's kernel matrix after the solve, is at most 1.05e-3.  The defaults alone are
compared in processor seconds, which other work on the machine disturbs less than it does the clock: use one thread.

    python benchmarks/testbed.py --data DIRECTORY            # under an hour on two cores; resumes
    python benchmarks/testbed.py --data DIRECTORY --defaults # the two libraries' defaults alone, in a JSON of their own
    python benchmarks/testbed.py --data DIRECTORY --quick    # three sets, N = 1500, ranks 50 and 100
    python benchmarks/testbed.py --report                    # tables and picture again, nothing measured
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from torch import Tensor

from common import load_arrays, standardise, subsample, targets, thinned
from measure import counted_gpytorch_cg
from runner import Benchmark, Group
from testbed_report import WITHOUT_RANK, key_of, picture, report

BANDWIDTH = 3.0
MU_OVER_N = 1e-7
TOLERANCE = 1e-3
SLACK = 1.05  # of the residual computed afterwards, for every method alike
MAX_ITERATIONS = 250
GPYTORCH_MAX_ITERATIONS = 1000  # its own default


@dataclass(frozen=True)
class DataSet:
    """A set of the testbed; ``positive`` is the class that becomes +1 (None: regression)."""

    name: str
    positive: int | None
    reason: str


SETS = (
    # those of the paper's Table 1 that are at hand (the large ones stand last, so that a stopped run has most sets)
    DataSet("cod_rna", 1, "in the paper"),
    DataSet("ijcnn1", 1, "in the paper"),
    DataSet("creditcard_fraud_sample", 1, "in the paper (creditcard)"),
    DataSet("qm9_homo_cm_10k", None, "the paper's molecules, 435 inputs"),
    # the rest: other fields, 12 to 276 inputs
    DataSet("cpu_small", None, "heavy tails"),
    DataSet("kin8nm", None, "simulated robot arm: slow decay"),
    DataSet("bank32nh", None, "simulated queues, 32 inputs"),
    DataSet("phishing", 1, "half of the rows repeated: a singular kernel matrix"),
    DataSet("spambase", 1, "counts with outliers, 57 inputs"),
    DataSet("optdigits", 0, "digits, 64 inputs; digit 0 against the rest"),
    DataSet("pendigits", 0, "pen strokes, 16 inputs; digit 0 against the rest"),
    DataSet("qm7_atomization_cm", None, "molecules, 276 inputs"),
    DataSet("propane_md_energy", None, "molecular dynamics, correlated frames"),
    DataSet("usps", 0, "images, 256 inputs; digit 0 against the rest"),
    DataSet("ailerons", None, "flight control, 40 inputs"),
    DataSet("diamonds", None, "in the paper"),
    DataSet("higgs_18k", 1, "in the paper"),
    DataSet("w8a", 1, "in the paper"),
    DataSet("covtype_40k", 1, "in the paper (class 2 against the rest, as in its binary version)"),
    DataSet("mnist", 0, "in the paper (here digit 0 against the rest)"),
)
QUICK_SETS = ("cod_rna", "creditcard_fraud_sample", "cpu_small")

# key of a method, the word for it in table and picture
METHODS = {
    "rpcholesky": "RPCholesky (block)",
    "accelerated": "RPCholesky (accelerated)",
    "uniform": "uniform columns",
    "gaussian": "Gaussian Nystrom",
    "none": "no preconditioner",
    "gpytorch": "GPyTorch default",
    "automatic": "sketchgp default",
}


def preconditioner(method: str, rank: int | None, seed: int) -> Any:
    import sketchgp

    return {
        "rpcholesky": lambda: sketchgp.RPCholesky(rank=rank, method="block", seed=seed),
        "accelerated": lambda: sketchgp.RPCholesky(rank=rank, method="accelerated", seed=seed),
        "uniform": lambda: sketchgp.Nystrom(rank=rank, sketch="uniform", seed=seed),
        "gaussian": lambda: sketchgp.Nystrom(rank=rank, sketch="gaussian", seed=seed),
        "none": lambda: None,
        "automatic": lambda: "auto",
    }[method]()


@dataclass
class Problem:
    """One data set, ready: x (n, d), y (n,), float64; mu; the kernel and its matrix by GPyTorch."""

    x: Tensor
    y: Tensor
    mu: float
    kernel: gpytorch.kernels.Kernel
    matrix: Tensor
    matrix_seconds: tuple[float, float]

    def residual(self, solution: Tensor) -> float:
        """Relative residual in float64, from GPyTorch's matrix."""
        w = solution.detach().double().reshape(-1)
        return float((self.y - self.matrix @ w - self.mu * w).norm() / self.y.norm())


def clocks() -> tuple[float, float]:
    """By the clock, and of processors."""
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    now = clocks()
    return now[0] - started[0], now[1] - started[1]


def load(directory: Path, item: DataSet, n: int, seed: int) -> Problem:
    x, y = subsample(load_arrays(directory, item.name), n, seed)
    (inputs,) = standardise(x)
    (outputs,) = standardise(targets(y, item.positive))
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = BANDWIDTH
    kernel.requires_grad_(False)
    points = torch.as_tensor(inputs)
    started = clocks()
    with torch.no_grad():
        matrix = kernel(points).to_dense().contiguous()
    seconds = since(started)
    return Problem(points, torch.as_tensor(outputs), MU_OVER_N * len(x), kernel, matrix, seconds)


def run_gpytorch(problem: Problem) -> dict[str, Any]:
    """GPyTorch's own solve: pivoted Cholesky of rank 15, ``linear_cg``, tolerance 1e-3, 1000 iterations."""
    n = len(problem.y)
    mu = ConstantDiagLinearOperator(torch.tensor([problem.mu], dtype=torch.float64), diag_shape=n)
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        gpytorch.settings.cg_tolerance(TOLERANCE),
        gpytorch.settings.max_cg_iterations(GPYTORCH_MAX_ITERATIONS),
        counted_gpytorch_cg() as solves,
    ):
        warnings.simplefilter("ignore")
        started = clocks()
        operator = AddedDiagLinearOperator(DenseLinearOperator(problem.matrix), mu)
        solution = operator.solve(problem.y)
        seconds, processor = since(started)
    (solve,) = solves
    return {
        "iterations": solve.iterations,
        "products": solve.products,
        "true_residual": problem.residual(solution),
        "setup_seconds": seconds - solve.seconds,
        "solve_seconds": solve.seconds,
        "seconds": seconds + problem.matrix_seconds[0],
        "processor_seconds": processor + problem.matrix_seconds[1],
        "rank_used": gpytorch.settings.max_preconditioner_size.value(),
        "history": thinned(solve.history),
    }


def run_sketchgp(problem: Problem, method: str, rank: int | None, seed: int) -> dict[str, Any]:
    """``ConjugateGradients().solve`` with the preconditioner of ``method``; the matrix is stored."""
    import sketchgp

    solver = sketchgp.ConjugateGradients(tol=TOLERANCE, max_iterations=MAX_ITERATIONS)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        started = clocks()
        full = sketchgp.FullProblem(problem.kernel, problem.x, problem.y, problem.mu)
        solution = solver.solve(full, preconditioner=preconditioner(method, rank, seed), matmul="dense")
        seconds, processor = since(started)
    done = solution.report
    return {
        "iterations": done.iterations,
        "products": done.work["products"],
        "true_residual": problem.residual(solution.value),
        "reported_residual": done.max_residual,
        "reason": done.reason,
        "setup_seconds": done.setup_seconds,
        "solve_seconds": done.seconds,
        "seconds": seconds,
        "processor_seconds": processor,
        "rank_used": done.rank,
        "history": thinned(done.history.reshape(done.history.shape[0], -1)[:, 0].tolist()),
    }


def runs_wanted(ranks: list[int]) -> list[tuple[str, int | None]]:
    """(method, rank) in the order in which they are run."""
    if not ranks:
        return [("gpytorch", None), ("automatic", None)]
    ranked = [(method, rank) for rank in ranks for method in METHODS if method not in WITHOUT_RANK]
    return [*((method, None) for method in WITHOUT_RANK), *ranked]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, help="rows at most (15,000)")
    parser.add_argument("--defaults", action="store_true", help="the two libraries' defaults alone")
    parser.add_argument("--seed", type=int, default=0, help="of the rows and of the random factors")


def parameters(options: argparse.Namespace) -> dict[str, Any]:
    ranks = [] if options.defaults else [50, 100] if options.quick else [500, 1000]
    return {"n": options.n or (1500 if options.quick else 15_000), "ranks": ranks,
            "bandwidth": BANDWIDTH, "mu_over_n": MU_OVER_N, "seed": options.seed, "tolerance": TOLERANCE,
            "dtype": "float64", "max_iterations": MAX_ITERATIONS,
            "gpytorch_max_iterations": GPYTORCH_MAX_ITERATIONS}  # fmt: skip


def groups(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    about = parameters(options)
    for item in SETS:
        if options.quick and item.name not in QUICK_SETS:
            continue
        yield Group(
            ("sets", item.name, "runs"),
            [(key_of(*run), (*run, options.seed)) for run in runs_wanted(about["ranks"])],
            load=partial(load, directory, item, about["n"], options.seed),
            needs=(item.name,),
            about=lambda problem, item=item: {
                "n": problem.x.shape[0], "d": problem.x.shape[1], "reason": item.reason, "positive": item.positive,
                "matrix_seconds": problem.matrix_seconds[0]},
        )  # fmt: skip


def perform(problem: Problem, task: tuple[str, int | None, int]) -> dict[str, Any]:
    run = run_gpytorch(problem) if task[0] == "gpytorch" else run_sketchgp(problem, *task)
    return run | {"solved": bool(run["true_residual"] <= SLACK * TOLERANCE)}


BENCHMARK = Benchmark(
    doc=__doc__,
    name="testbed",
    quick="three sets, N = 1500, ranks 50 and 100",
    problem=parameters,
    groups=groups,
    perform=perform,
    report=report,
    picture=lambda results, path: picture(results, path.with_suffix(".png")) if results["problem"]["ranks"] else None,
    variant=lambda options: "_defaults" if options.defaults else "",
    say=lambda run: (
        f"{'solved' if run['solved'] else 'NOT solved'}, {run['iterations']} iterations, residual "
        f"{run['true_residual']:.2g}, {run['seconds']:.1f} s"
    ),
    what="sets",
    options=add_options,
    head={"methods": METHODS},
)


if __name__ == "__main__":
    BENCHMARK.main()

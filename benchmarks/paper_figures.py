"""Figures of the papers that no other script repeats, small: one data set or problem each, on one core.

Of the RPCholesky and KRILL paper (arXiv:2304.12465) greedy pivots on the testbed (Figures 1 and 2), HOMO energies by
size, iteration and rank (5, 6, 7; 8,000 molecules, ranks of 1% to 10% of them as in the paper), and a tiny noise on
HIGGS, which stands in for SUSY (8).  Of the ASkotch paper (arXiv:2407.10070) its synthetic problem, at full size (7
and 8).  Of EigenPro 3 (arXiv:2302.02605) rows and points (1, 2, and EigenPro 2 of 5).  Of EigenPro 4 one
projection a batch and one in eleven (3, 5), with the settings of the papers.

    python benchmarks/paper_figures.py --data DIRECTORY            # 40 minutes on one core; resumes
    python benchmarks/paper_figures.py --data DIRECTORY --quick    # each small
    python benchmarks/paper_figures.py --report                    # the tables again, nothing measured
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import ablation
import eigenpro
import sketchgp
import testbed
from inducing import Plain
from paper_figures_report import report
from runner import Benchmark, Group
from sketchgp.operators.tall import TallMatrix
from sketchgp.preconditioners import LowRank, Preconditioner
from sketchgp.solvers.inducing.preconditioned_gradient import Model

LOOKS = (1, 2, 4, 8, 10, 16, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400)  # iterations, passes or epochs
LIMIT = 240.0  # seconds of a run on the synthetic problem
PAPERS: dict[str, Any] = {"projection": "exact", "preconditioner": "paper", "averaging": False, "cooldown": 0,
                          "patience": None}  # fmt: skip
DELAY = 11
SAID = ("iterations", "residual", "accuracy", "smape", "seconds")


@dataclass(frozen=True)
class Greedy(Preconditioner):
    """Partial Cholesky factorization that takes the largest diagonal entry for its next pivot."""

    pivoted = True

    def approximate(self, matrix: Any, noise: Tensor) -> LowRank:
        left = matrix.diagonal().double().clone()
        rows, pivots = left.new_zeros(self.rank_for(matrix.n, matrix.device), matrix.n), []
        for i in range(len(rows)):
            pivot = left.argmax().reshape(1)
            column = matrix.columns(pivot).double().reshape(-1) - rows[:i].mT @ rows[:i, int(pivot)]
            rows[i] = column / column[pivot].sqrt()
            left = (left - rows[i].square()).clamp_min(0)
            pivots.append(pivot)
        return LowRank(rows.mT.contiguous(), torch.cat(pivots), left)


PRECONDITIONERS: dict[str, Callable[[int], Preconditioner | None]] = {
    "none": lambda rank: None,
    "uniform": lambda rank: sketchgp.Nystrom(rank=rank, sketch="uniform"),
    "greedy": lambda rank: Greedy(rank=rank),
    "RPCholesky": lambda rank: sketchgp.RPCholesky(rank=rank),
}


class Course:
    """A callback that looks at iterates after LOOKS units of work, in columns."""

    def __init__(self, look: Callable[[Tensor], dict[str, float]], unit: str) -> None:
        self.look, self.unit, self.columns, self.left = look, unit, dict[str, list[float]](), list(LOOKS)

    def __call__(self, progress: Any) -> bool:
        done = getattr(progress, self.unit)
        if self.left and done >= self.left[0] - 1e-6:
            self.left = [one for one in self.left if one > done + 1e-6]
            found = {self.unit: round(float(done), 2), "residual": float(progress.residual.max()),
                     "seconds": progress.seconds, **self.look(progress.weights())}  # fmt: skip
            for name, value in found.items():
                self.columns.setdefault(name, []).append(value)
        return False


def follow(solver: Any, problem: Any, course: Course, **options: Any) -> dict[str, Any]:
    """One solve: what its course was, and how it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        done = solver.solve(problem, callback=course, progress=False, **options).report
    return {"course": course.columns, "iterations": done.iterations, "residual": done.max_residual,
            "seconds": done.seconds, "rank": done.rank, "reason": done.reason}  # fmt: skip


# --- RPCholesky and KRILL -----------------------------------------------------------------------------------------


def homo(loaded: ablation.Loaded, task: tuple[str, int]) -> dict[str, Any]:
    method, rank = task
    course = Course(loaded.measure, "iteration")
    solver = sketchgp.ConjugateGradients(tol=1e-3, max_iterations=LOOKS[-1] if method == "RPCholesky" else 100)
    return follow(solver, loaded.problem, course, preconditioner=PRECONDITIONERS[method](rank), matmul="dense")


def homo_size(loaded: ablation.Loaded, task: tuple[str, int]) -> dict[str, Any]:
    """Exact solutions: of all rows on some of them, or of some rows."""
    kind, size = task
    whole = loaded.problem
    weights = torch.zeros(len(whole.x), 1, dtype=torch.float64)
    if kind == "rows":
        solution: Any = sketchgp.Cholesky().solve(
            sketchgp.FullProblem(whole.kernel, whole.x[:size], whole.y[:size], whole.noise)
        )
    else:
        solution = sketchgp.QR().solve(
            sketchgp.InducingPointProblem(whole.kernel, whole.x, whole.y, whole.noise, whole.x[:size].clone())
        )
    weights[:size, 0] = solution.value.double().reshape(-1)
    return loaded.measure(weights)


@dataclass
class Higgs:
    problem: sketchgp.InducingPointProblem
    tall: TallMatrix
    test_y: Tensor

    def look(self, weights: Tensor) -> dict[str, float]:
        return {"error": float((self.tall.matmul(weights).reshape(-1) * self.test_y <= 0).double().mean())}


def load_higgs(directory: Path, rows: int, points: int) -> Higgs:
    split = ablation._random_split("higgs_18k", 1)(directory, rows, 3484)
    x, test_x = (torch.as_tensor(part) for part in ablation.standardise(split.x, split.test_x))
    kernel = gpytorch.kernels.RBFKernel().double().requires_grad_(False)
    kernel.lengthscale = 4.0
    problem = sketchgp.InducingPointProblem(kernel, x, torch.as_tensor(split.y), 2e-10 * len(x), x[:points].clone())
    return Higgs(problem, TallMatrix(kernel, test_x, problem.inducing_points), torch.as_tensor(split.test_y))


def higgs(loaded: Higgs, method: str) -> dict[str, Any]:
    kind = {"KRILL": sketchgp.KRILL, "Falkon": sketchgp.Falkon, "none": Plain}[method]
    return follow(kind(tol=1e-4, max_iterations=100), loaded.problem, Course(loaded.look, "iteration"))


def greedy(problem: testbed.Problem, rank: int) -> dict[str, Any]:
    solver = sketchgp.ConjugateGradients(tol=testbed.TOLERANCE, max_iterations=testbed.MAX_ITERATIONS)
    full = sketchgp.FullProblem(problem.kernel, problem.x, problem.y, problem.mu)
    return follow(
        solver, full, Course(lambda weights: {}, "iteration"), preconditioner=Greedy(rank=rank), matmul="dense"
    )


# --- ASkotch and SketchySAGA --------------------------------------------------------------------------------------


@dataclass
class Synthetic:
    """Normal inputs, signs of a linear function, RBF with bandwidth 1, noise 0.1: the paper's, with f* by Cholesky."""

    problem: Any
    matrix: Tensor  # K, or Kxz
    square: Tensor  # K, or Kzz
    y: Tensor
    least: float = 0.0

    def value(self, weights: Tensor) -> float:
        w = weights.reshape(-1)
        misfit = self.matrix @ w - self.y
        return 0.5 * float(misfit @ misfit) + 0.05 * float(w @ (self.square @ w))

    def look(self, weights: Tensor) -> dict[str, float]:
        return {"suboptimality": abs(self.value(weights) / self.least - 1)}


def load_synthetic(rows: int, points: int | None) -> Synthetic:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 10, generator=stream, dtype=torch.float64)
    y = (x @ torch.randn(10, generator=stream, dtype=torch.float64)).sign()
    kernel = gpytorch.kernels.RBFKernel().double().requires_grad_(False)
    kernel.lengthscale = 1.0
    if points is None:
        matrix = kernel(x).to_dense()
        found = Synthetic(sketchgp.FullProblem(kernel, x, y, 0.1), matrix, matrix, y)
        shifted = matrix.clone()
        shifted.diagonal().add_(0.1)
        best = torch.cholesky_solve(y.unsqueeze(1), torch.linalg.cholesky(shifted))
    else:
        z = x[:points].clone()
        matrix, square = kernel(x, z).to_dense(), kernel(z).to_dense()
        found = Synthetic(sketchgp.InducingPointProblem(kernel, x, y, 0.1, z), matrix, square, y)
        best = torch.linalg.solve(matrix.mT @ matrix + 0.1 * square, matrix.mT @ y.unsqueeze(1))
    found.least = found.value(best)
    return found


def synthetic(loaded: Synthetic, task: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    name, options = task
    return follow(getattr(sketchgp, name)(**options, max_seconds=LIMIT), loaded.problem,
                  Course(loaded.look, "epochs" if name == "SketchySAGA" else "passes"))  # fmt: skip


def synthetic_tasks(block: int) -> list[tuple[str, Any]]:
    same: dict[str, Any] = {"tol": 1e-13, "max_passes": 300, "block_size": block}
    tasks = [("ASkotch, default", ("ASkotch", same)), ("Skotch, default", ("Skotch", same))]
    for rank in (50, 500):
        for name in ("ASkotch", "Skotch"):
            tasks.append((f"{name}, version 1, rank {rank}", (name, same | {"version": 1, "rank": rank})))
    return tasks


# --- EigenPro 3 and 4 ---------------------------------------------------------------------------------------------


@dataclass
class Images:
    """Training images in random order, the first of which are inducing points, and what weights are worth."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: sketchgp.OneHot
    kernel: gpytorch.kernels.Kernel

    def accuracy(self, weights: Tensor, points: Tensor) -> float:
        return self.share(TallMatrix(self.kernel, self.test_x, points).matmul(weights.double()))

    def share(self, scores: Tensor) -> float:
        return 100 * float((self.classes.decode(scores) == self.test_y).double().mean())


def load_images(directory: Path, rows: int | None) -> Images:
    x, labels, test_x, test_y, lengthscale = eigenpro.load(directory, "mnist", None)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:rows]
    kernel = gpytorch.kernels.MaternKernel(nu=0.5)
    kernel.lengthscale = lengthscale
    classes = sketchgp.OneHot(labels[order])
    return Images(x[order], classes.encode(labels[order]), test_x, test_y, classes, kernel)


def growth(images: Images, task: tuple[int, int | None]) -> dict[str, Any]:
    """Five epochs of EigenPro 3 on some rows; EigenPro 2 on the inducing points and their labels alone."""
    m, rows = task
    z, started = images.x[:m].clone(), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        if rows is None:
            solver: Any = sketchgp.EigenPro2(tol=1e-2, max_passes=50)
            value = solver.solve(sketchgp.FullProblem(images.kernel, z, images.y[:m], 1e-3), progress=False).value
        else:
            problem = sketchgp.InducingPointProblem(images.kernel, images.x[:rows], images.y[:rows], 0.0, z)
            value = sketchgp.EigenPro3(epochs=5, projection="exact").solve(problem, progress=False).value
    return {"m": m, "rows": rows, "accuracy": images.accuracy(value, z), "seconds": time.perf_counter() - started}


@contextmanager
def watched_projections(images: Images, rows: int) -> Iterator[list[tuple[float, float]]]:
    """Accuracies on some test rows before and after each projection inside the block."""
    step, project, found = Model.step, Model.project, list[tuple[float, float]]()
    some = replace(images, test_x=images.test_x[:rows], test_y=images.test_y[:rows])

    def remembering(model: Model, x: Tensor, y: Tensor, size: float, decay: float, last: bool) -> Tensor:
        return step(model, x, y, size, decay, last=False)  # the last batch belongs to f too

    def watched(model: Model) -> None:
        z = model.problem.inducing_points
        parts = [(z, model.base), *zip(model.points, model.weights, strict=True)]
        if model.directions.points is not None:
            parts.append((model.directions.points, model.correction))
        scores = sum(TallMatrix(some.kernel, some.test_x, at).matmul(weights) for at, weights in parts)
        project(model)
        found.append((some.share(scores), some.accuracy(model.base, z)))

    Model.step, Model.project = remembering, watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Model.step, Model.project = step, project  # type: ignore[method-assign]


def epochs(images: Images, task: tuple[int, int, int, int]) -> dict[str, Any]:
    """EigenPro with a projection once in ``delay`` batches, as in the papers: accuracy after each epoch."""
    m, delay, count, seed = task
    z = images.x[:m].clone()
    problem = sketchgp.InducingPointProblem(images.kernel, images.x, images.y, 0.0, z)
    course = Course(lambda weights: {"accuracy": images.accuracy(weights, z)}, "epochs")
    course.left = list(range(1, count + 1))
    return follow(sketchgp.EigenPro4(epochs=count, delay=delay, seed=seed, **PAPERS), problem, course)


def projections(images: Images, task: tuple[int, int]) -> dict[str, Any]:
    """One such epoch: accuracy before and after each projection."""
    m, delay = task
    problem = sketchgp.InducingPointProblem(images.kernel, images.x, images.y, 0.0, images.x[:m].clone())
    with watched_projections(images, 2000) as seen:
        sketchgp.EigenPro4(epochs=1, delay=delay, **PAPERS).solve(problem, progress=False)
    return {"accuracies": [[round(part, 2) for part in pair] for pair in seen[:-1]]}  # the last one ends the epoch


# --- what is run --------------------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "homo": homo, "homo_size": homo_size, "higgs": higgs, "synthetic": synthetic, "synthetic_points": synthetic,
    "growth": growth, "epochs": epochs, "projections": projections, "greedy": greedy,
}  # fmt: skip


def problem(options: Any) -> dict[str, Any]:
    sizes = {"homo": 8000, "higgs": 15_000, "points": 1000, "synthetic": 10_000, "images": None, "m": [1250, 2500],
             "epochs": 10, "testbed": 15_000}  # fmt: skip
    small = {"homo": 1000, "higgs": 1000, "points": 100, "synthetic": 1000, "images": 1000, "m": [100, 200],
             "epochs": 2, "testbed": 1000}  # fmt: skip
    return {**(small if options.quick else sizes), "seed": 0, "seconds_synthetic": LIMIT}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    size = problem(options)

    def group(name: str, tasks: list[tuple[Any, Any]], load: Callable[[], Any], *needs: str) -> Group:
        return Group(("figures", name), [(label, (name, task)) for label, task in tasks], load, needs)

    n, m = size["homo"], size["m"]
    load_homo = partial(ablation.Loaded, ablation.CASES[0], directory, n, n)
    ranks = [n // 100, n // 50, n // 20, n // 10]
    wanted = [(method, ranks[0]) for method in ("none", "uniform", "greedy")] + [("RPCholesky", r) for r in ranks]
    yield group("homo", [(f"{method}, {rank}", (method, rank)) for method, rank in wanted], load_homo,
                *ablation.CASES[0].files)  # fmt: skip
    sizes = [n // 2**i for i in range(5, -1, -1)]
    wanted = [("rows", k) for k in sizes] + [("points", k) for k in sizes[:-1]]
    yield group("homo_size", [(f"{kind}, {k}", (kind, k)) for kind, k in wanted], load_homo, *ablation.CASES[0].files)
    yield group("higgs", [(name, name) for name in ("KRILL", "Falkon", "none")],
                partial(load_higgs, directory, size["higgs"], size["points"]), "higgs_18k")  # fmt: skip
    rows = size["synthetic"]
    saga: dict[str, Any] = {"tol": 1e-13, "max_epochs": 400, "block_size": rows // 10}
    tasks = [(f"rank {rank}, rho 1", ("SketchySAGA", saga | {"rank": rank, "rho": 1.0})) for rank in (50, 500)]
    tasks.append(("default", ("SketchySAGA", {"tol": 1e-13, "max_epochs": 400})))
    yield group("synthetic_points", tasks, partial(load_synthetic, rows, rows // 10))
    mnist = partial(load_images, directory, size["images"])
    amounts = [None, 5000, 20_000, 60_000] if size["images"] is None else [None, 500, 1000]
    yield group("growth", [(f"{k}, {rows or 'EigenPro 2'}", (k, rows)) for k in m for rows in amounts], mnist, "mnist")
    yield group("epochs", [(f"delay {delay}, seed {seed}", (m[0], delay, size["epochs"], seed))
                           for seed in (0, 1) for delay in (1, DELAY)], mnist, "mnist")  # fmt: skip
    yield group("projections", [(f"delay {DELAY}", (m[0], DELAY))], mnist, "mnist")
    for item in testbed.SETS:
        if not options.quick or item.name in testbed.QUICK_SETS:
            yield Group(("figures", "greedy", item.name), [(str(rank), ("greedy", rank)) for rank in (500, 1000)],
                        partial(testbed.load, directory, item, size["testbed"], 0), (item.name,))  # fmt: skip
    yield group("synthetic", synthetic_tasks(rows // 10), partial(load_synthetic, rows, None))


BENCHMARK = Benchmark(
    doc=__doc__,
    name="paper_figures",
    quick="each small",
    problem=problem,
    groups=groups,
    perform=lambda loaded, task: FIGURES[task[0]](loaded, task[1]),
    report=report,
    say=lambda run: ", ".join(f"{key} {run[key]:.4g}" for key in SAID if run.get(key) is not None),
    what="figures",
)


if __name__ == "__main__":
    BENCHMARK.main()

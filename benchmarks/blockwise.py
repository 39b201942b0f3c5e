"""What the benchmarks of the solvers by blocks share: solves that are followed as they go, on a clock that stops while
they are looked at; the work counted in rows of the kernel matrix."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gpytorch
import torch
from torch import Tensor

import sketchgp
from sketchgp.operators import KernelMatrix
from sketchgp.solvers.full import refinement as loop
from sketchgp.solvers.system import System


@dataclass
class Trace:
    """The course of one solve, in columns: ``seconds``, ``entries`` (of K evaluated) and what ``measure`` finds.

    The clock stands still while an iterate is measured.

    :ivar measure: weights ``(n, 1)`` float64 -> named numbers.
    :ivar limit: seconds after which :meth:`note` asks for the end; None for no limit.
    :ivar spacing: the least growth of the seconds from one measurement to the next, 0.02 for 2%.
    """

    measure: Callable[[Tensor], dict[str, float]]
    limit: float | None = None
    spacing: float = 0.0
    columns: dict[str, list[float]] = field(default_factory=dict)
    started: float = 0.0
    paused: float = 0.0

    def begin(self, n: int) -> None:
        """Measure W = 0, then start the clock."""
        self._append({"seconds": 0.0, "entries": 0.0, "residual": 1.0} | self.measure(torch.zeros(n, 1).double()))
        self.started, self.paused = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started - self.paused

    def note(self, weights: Tensor, entries: float, residual: float) -> bool:
        """Measure the iterate; returns whether time is up."""
        seconds, stopped = self.seconds, time.perf_counter()
        over = self.limit is not None and seconds >= self.limit
        if over or seconds >= (1 + self.spacing) * self.columns["seconds"][-1]:
            self._append({"seconds": seconds, "entries": entries, "residual": residual} | self.measure(weights))
        self.paused += time.perf_counter() - stopped
        return over

    def _append(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)


@contextlib.contextmanager
def callbacks_every(rows: int) -> Iterator[None]:
    """Blockwise solvers call back after so many rows inside the block, instead of once a pass."""
    before, loop._WINDOW = loop._WINDOW, max(1, rows)
    try:
        yield
    finally:
        loop._WINDOW = before


@contextlib.contextmanager
def counted_rows() -> Iterator[list[int]]:
    """A list of one number: the rows of K that steps multiplied by a vector inside the block (checks not counted)."""
    original, count = System.rows, [0]

    def rows(self: System, indices: Tensor, vectors: Tensor, accurate: bool = False) -> Tensor:
        count[0] += len(indices)
        return original(self, indices, vectors, accurate)

    System.rows = rows  # type: ignore[method-assign]
    try:
        yield count
    finally:
        System.rows = original  # type: ignore[method-assign]


def follow_blockwise(solver: Any, problem: sketchgp.FullProblem, trace: Trace, every: int) -> dict[str, Any]:
    """Solve with a blockwise solver, noting the iterate every so many rows, until done or out of time.

    The clock includes all that ``solve`` does before its first step, and not the true residual that it computes last.

    :returns: what the report says, with the true residual of the last iterate.
    """
    n = len(problem.x)

    def callback(progress: sketchgp.solvers.Progress) -> bool:
        return trace.note(progress.weights(), progress.passes * n**2, float(progress.residual.max()))

    trace.begin(n)
    with callbacks_every(every), warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        try:
            report = solver.solve(problem, matmul="auto", callback=callback, progress=False).report
        except sketchgp.NumericalError as error:
            return {"reason": "diverged", "error": str(error)[:300]}
    return {
        "reason": report.reason,
        "steps": report.iterations,
        "passes": report.passes,
        "true_residual": report.max_residual,
        "rank": report.rank,
        "described": f"{report.solver}: {report.preconditioner}",
        "notes": report.notes,
    }


class _TimeIsUp(Exception):
    """Ends conjugate gradients from within a product."""


class FollowedSystem(System):
    """A system with one right-hand side that knows the iterate of the conjugate gradients that run on it.

    They multiply one direction p an iteration and move along it by ``(p . r) / (p . A p)``: so does this class, from
    the same products, and calls ``after`` with the iterate.  (Their callback is told the residual only.)

    :param after: called with the iterate ``(n, 1)`` and its residual, relative; returning True ends the solve.
    """

    def __init__(self, operator: Any, noise: Tensor, rhs: Tensor, after: Callable[[Tensor, float, int], bool]) -> None:
        super().__init__(operator, noise)
        self.residual = rhs.to(torch.float64).clone()
        self.value, self.norm, self.after = torch.zeros_like(self.residual), float(rhs.double().norm()), after

    def product(self, vectors: Tensor) -> Tensor:
        product = super().product(vectors)
        curvature = float((vectors * product).sum())
        if curvature > 0:
            step = float((vectors * self.residual).sum()) / curvature
            self.value.add_(vectors, alpha=step)
            self.residual.sub_(product, alpha=step)
        if self.after(self.value, float(self.residual.norm()) / self.norm, self.products):
            raise _TimeIsUp
        return product


def follow_conjugate_gradients(
    solver: sketchgp.ConjugateGradients, choice: sketchgp.RPCholesky, problem: sketchgp.FullProblem, trace: Trace
) -> dict[str, Any]:
    """Solve by preconditioned conjugate gradients, noting each iterate, until done or out of time.

    Entries of K: n^2 a product and n a column of the preconditioner, as if symmetry were not used.
    """
    n, rank = len(problem.x), 0

    def after(weights: Tensor, residual: float, products: int) -> bool:
        return trace.note(weights, products * n**2 + rank * n, residual)

    columns = problem.y.reshape(n, 1)
    trace.begin(n)
    operator = KernelMatrix.of(problem.kernel, problem.x, engine="auto")
    system = FollowedSystem(operator, problem.noise_vector, columns, after)
    built = choice.build(system.operator, system.noise)
    rank, setup = built.rank, trace.seconds
    result = {"rank": rank, "setup_seconds": setup, "described": f"ConjugateGradients: {choice.name}, rank {rank}"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        try:
            _, report = solver.run(system, columns, built, name=choice.name, setup_seconds=setup, progress=False)
        except _TimeIsUp:
            return result | {"reason": "ran out of time", "iterations": system.products, "notes": []}
    return result | {
        "reason": report.reason,
        "iterations": report.iterations,
        "true_residual": report.max_residual,
        "notes": report.notes,
    }


def warm_up(kernel: gpytorch.kernels.Kernel, inputs: int) -> None:
    """Small solves load what is loaded on first use, and compile products in one pass where the kernel has them."""
    x = torch.randn(600, inputs, generator=torch.Generator().manual_seed(0))
    problem = sketchgp.FullProblem(kernel, x, x[:, 0].clone(), 0.1)
    choice = sketchgp.RPCholesky(rank=20)
    follow_conjugate_gradients(sketchgp.ConjugateGradients(), choice, problem, Trace(lambda _: {}))
    for solver in (sketchgp.ASkotch(rank=20), sketchgp.EigenPro2()):
        follow_blockwise(solver, problem, Trace(lambda _: {}, limit=1.0), 300)
    solver = sketchgp.ASkotch(max_passes=2)
    with contextlib.suppress(sketchgp.InputError), warnings.catch_warnings():  # of kernels that it does not take
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        solver.solve(problem, matmul="fused", progress=False)


def first_below(values: list[float], bound: float) -> int | None:
    """Index of the first value that is at most ``bound``; None if there is none."""
    return next((index for index, value in enumerate(values) if value <= bound), None)

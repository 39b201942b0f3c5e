"""What a linear solve did: :class:`SolveReport`, and :func:`record_solves` to collect them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

_recorders: list[list[SolveReport]] = []
_own: ContextVar[tuple[list[SolveReport], ...]] = ContextVar("sketchgp_own_solves", default=())
_lock = threading.Lock()


@dataclass
class SolveReport:
    """One linear solve ``(K + noise) value = rhs`` with ``columns`` right-hand sides.

    ``residual`` is the *true* relative residual ``||rhs - (K + noise) value|| / ||rhs||`` of the returned value,
    one number a column, recomputed with float64 products when the solve ended; ``history`` holds the residuals
    of the recurrence, ``(iterations + 1, columns)``, which rounding can make smaller than the true ones.
    Solvers that go by blocks of rows estimate ``history``; ``passes`` are then the entries of K evaluated over n^2, and
    ``held_out`` lists (passes, seconds, root mean square error of each column) where held-out points were given.
    Batched systems are flattened: a batch of b systems with t columns counts b t columns.
    """

    solver: str
    preconditioner: str
    n: int
    columns: int
    iterations: int
    matmuls: int
    residual: Tensor
    history: Tensor
    tol: float
    converged: bool
    reason: str
    seconds: float
    setup_seconds: float = 0.0
    rank: int = 0
    dtype: str = "float64"
    device: str = "cpu"
    peak_memory: int = 0
    notes: list[str] = field(default_factory=list)
    passes: float = 0.0
    held_out: list[tuple[float, float, Tensor]] = field(default_factory=list)

    @property
    def max_residual(self) -> float:
        """The largest true relative residual over the columns (0 for a solve without columns)."""
        return float(self.residual.max()) if self.residual.numel() else 0.0

    def advice(self) -> str:
        """Why the solve ended short of its tolerance, and one thing to try."""
        head = (
            f"A linear solve with n = {self.n} {self.reason} after {self.iterations} iterations: largest true "
            f"relative residual {self.max_residual:.1e}, tolerance {self.tol:.0e}. "
        )
        if self.reason == "stagnated" and self.dtype == "float64":
            return (
                head + "Rounding in float64 allows no less; raise tol or the noise, or solve directly (Cholesky, QR)."
            )
        if self.reason == "stagnated":
            return head + f"{self.dtype} cannot do better; use a float64 model and data, or raise the noise."
        if self.reason == "was rounded":
            return head + "The float64 iterate meets it, its rounding to float32 does not; use float64 if it matters."
        if self.reason == "ran out of iterations" and self.preconditioner == "none":
            return head + "Use a preconditioner: preconditioner=sketchgp.RPCholesky()."
        if self.reason == "ran out of iterations":
            return head + f"Raise the preconditioner's rank (now {self.rank}) or max_iterations."
        if self.reason == "ran out of passes":
            return head + "Raise max_passes and go on with initial= or a checkpoint; raise block_size if memory allows."
        if self.reason == "ran out of time":
            return head + "Raise max_seconds and go on with initial= or a checkpoint."
        if self.solver == "QR":
            return head + "The points are nearly dependent; drop some, or raise the noise."
        if self.solver == "Cholesky":
            return head + f"{self.dtype} cannot hold the solution; use a float64 model and data."
        return head + "The value returned is the last iterate; go on from it with initial=."

    def __str__(self) -> str:
        endless = self.tol == float("inf")  # a solver that knows no tolerance
        state = "converged" if self.converged else "no tolerance" if endless else "NOT converged"
        tolerance = "" if endless else f" (tolerance {self.tol:.0e})"
        work = f"{self.passes:.1f} passes" if self.passes else f"{self.matmuls} products"
        text = (
            f"{self.solver} ({self.preconditioner}): {state}, {self.reason}; n = {self.n}, {self.columns} column(s), "
            f"{self.iterations} iterations, {work}, residual {self.max_residual:.2e}{tolerance}, "
            f"{self.seconds:.2f} s + {self.setup_seconds:.2f} s set-up, "
            f"{self.dtype} on {self.device}"
        )
        return f"{text}; notes: {'; '.join(self.notes)}" if self.notes else text


@contextmanager
def record_solves() -> Iterator[list[SolveReport]]:
    """Collect the report of every linear solve that sketchgp does inside the block, in all threads.

    Solves that GPyTorch does by its own Cholesky factorization leave no report: of n at most 800, or at most what a
    ``max_cholesky_size`` block says.

    :yields: a list that grows by one :class:`SolveReport` a solve.
    """
    solves: list[SolveReport] = []
    with _lock:
        _recorders.append(solves)
    try:
        yield solves
    finally:
        with _lock:
            _recorders[:] = [r for r in _recorders if r is not solves]


@contextmanager
def own_solves() -> Iterator[list[SolveReport]]:
    """As :func:`record_solves`, but of solves that are done inside the block itself, not by other threads."""
    solves: list[SolveReport] = []
    token = _own.set((*_own.get(), solves))
    try:
        yield solves
    finally:
        _own.reset(token)


def record(report: SolveReport) -> None:
    """Hand a report to every open :func:`record_solves` block, and to the :func:`own_solves` that it belongs to."""
    for own in _own.get():
        own.append(report)
    with _lock:
        for solves in _recorders:
            solves.append(report)


def peak_memory(device: torch.device) -> int:
    """High-water mark in bytes: allocated memory on CUDA; on the CPU, of the whole process since it started."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)

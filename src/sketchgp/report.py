"""What a linear solve did: :class:`SolveReport`, and :func:`record_solves` to collect them."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from .errors import ConvergenceWarning, warn

_recorders: list[list[SolveReport]] = []
_own: ContextVar[tuple[list[SolveReport], ...]] = ContextVar("sketchgp_own_solves", default=())
_lock = threading.Lock()


class Reason(str, Enum):
    """Why a solve ended: the words that reports use, and what to try next (:meth:`SolveReport.advice`)."""

    REACHED = "reached the tolerance"
    ROUNDED = "was rounded"
    STAGNATED = "stagnated"
    DIRECT = "was solved directly"
    SINGULAR = "met the limits of float64"
    ITERATIONS = "ran out of iterations"
    PASSES = "ran out of passes"
    EPOCHS = "ran out of epochs"
    TIME = "ran out of time"
    CALLBACK = "was stopped by the callback"
    INTERRUPTED = "was interrupted"
    FINISHED = "finished its epochs"
    EARLY = "stopped early: the held-out error no longer fell"

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)

    @property
    def final(self) -> bool:
        """Whether a larger budget changes nothing."""
        return self in (*_FINAL, *_WITHOUT_TOLERANCE)


_FINAL = (Reason.REACHED, Reason.ROUNDED, Reason.STAGNATED, Reason.DIRECT, Reason.SINGULAR)
_WITHOUT_TOLERANCE = (Reason.FINISHED, Reason.EARLY)  # as planned: how a solver ends that knows no tolerance

_ADVICE = {
    Reason.ROUNDED: "The float64 iterate meets it, its rounding to float32 does not; use float64 if it matters.",
    Reason.SINGULAR: "Drop inducing points that nearly repeat others, and far outliers; or raise the noise.",
    Reason.ITERATIONS: "Raise max_iterations, and go on with initial= or a checkpoint.",
    Reason.PASSES: "Raise max_passes and go on with initial= or a checkpoint; raise block_size if memory allows.",
    Reason.EPOCHS: "Raise max_epochs and go on with initial= or a checkpoint.",
    Reason.TIME: "Raise max_seconds and go on with initial= or a checkpoint.",
}  # where a solver knows no better


@dataclass(repr=False)
class SolveReport:
    """One linear solve ``(K + noise) value = rhs`` with ``columns`` right-hand sides.

    ``residual`` is the *true* relative residual ``||rhs - (K + noise) value|| / ||rhs||`` of the returned value,
    one number a column, recomputed with float64 products when the solve ended; ``history`` holds the residuals
    of the recurrence, ``(iterations + 1, columns)``, which rounding can make smaller than the true ones.
    Solvers that go by blocks of rows estimate ``history``; ``passes`` are then the entries of K evaluated over n^2, and
    ``held_out`` lists (passes, seconds, root mean square error of each column) where held-out points were given.
    ``remedies`` says what to try for a reason to end that this solver knows more about than :meth:`advice` does.
    ``deviations`` estimate, column by column, how far any prediction is from the exact solution's at the most, in
    posterior deviations (solvers of the inducing-point problem; infinite where nothing can be said).  ``tol`` is of
    them where ``judged`` is ``"predictions"``, of the residual where it is ``"residual"``.
    ``seconds`` are those of the iterations, without ``setup_seconds``: preconditioner, factors, and what they need.
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
    reason: Reason
    seconds: float
    setup_seconds: float = 0.0
    rank: int = 0
    dtype: str = "float64"
    device: str = "cpu"
    peak_memory: int = 0
    notes: list[str] = field(default_factory=list)
    passes: float = 0.0
    held_out: list[tuple[float, float, Tensor]] = field(default_factory=list)
    remedies: dict[Reason, str] = field(default_factory=dict)
    deviations: Tensor | None = None
    variance_error: Tensor | None = None
    judged: str = "residual"

    @property
    def max_deviations(self) -> float:
        """The largest of ``deviations``; infinite where they are not known."""
        known = self.deviations is not None and self.deviations.numel()
        return float(self.deviations.max()) if known and self.deviations is not None else float("inf")

    @property
    def max_residual(self) -> float:
        """The largest true relative residual over the columns (0 for a solve without columns)."""
        return float(self.residual.max()) if self.residual.numel() else 0.0

    def advice(self) -> str:
        """Why the solve ended short of its tolerance, and one thing to try."""
        found = f"largest true relative residual {self.max_residual:.1e}"
        if self.tol < float("inf"):
            found += f", tolerance {self.tol:.0e}"
        if self.judged == "predictions":
            far = f"{self.max_deviations:.1e} posterior deviations" if self.max_deviations < float("inf") else "unknown"
            found = f"largest error of predictions {far} (estimated), tolerance {self.tol:.0e}"
        if self.reason == Reason.SINGULAR:
            far = f"{self.max_deviations:.1e} posterior deviations"
            found = f"rounding of the kernel matrix moves predictions by up to {far}"
        head = f"A linear solve with n = {self.n} {self.reason} after {self.iterations} iterations: {found}. "
        if self.reason in self.remedies:
            return head + self.remedies[self.reason]
        if self.reason == Reason.STAGNATED and self.dtype == "float64":
            return (
                head + "Rounding in float64 allows no less; raise tol or the noise, or solve directly (Cholesky, QR)."
            )
        if self.reason == Reason.STAGNATED:
            return head + f"{self.dtype} cannot do better; use a float64 model and data, or raise the noise."
        return head + _ADVICE.get(self.reason, "Go on from the value returned with initial=.")

    def __str__(self) -> str:
        endless = self.tol == float("inf")  # a solver that knows no tolerance
        state = "converged" if self.converged else "no tolerance" if endless else "NOT converged"
        tolerance = "" if endless else f" (tolerance {self.tol:.0e})"
        residual, error = f"residual {self.max_residual:.2e}", ""
        if self.max_deviations < float("inf") or self.judged == "predictions":
            far = f"about {self.max_deviations:.2g}" if self.max_deviations < float("inf") else "an unknown number of"
            error = f", predictions within {far} posterior deviations"
        if self.judged == "predictions":
            error += tolerance
        else:
            residual += tolerance
        work = f"{self.matmuls} products" if self.passes <= 1.5 * self.matmuls else f"{self.passes:.1f} passes"
        text = (
            f"{self.solver} ({self._preconditioner()}): {state}, {self.reason}; n = {self.n}, "
            f"{self.columns} column(s), {self.iterations} iterations, {work}, {residual}{error}, "
            f"{self.seconds:.2f} s + {self.setup_seconds:.2f} s set-up, "
            f"{self.dtype} on {self.device}"
        )
        return f"{text}; notes: {'; '.join(self.notes)}" if self.notes else text

    def __repr__(self) -> str:
        return f"<SolveReport of {self}>"

    def _preconditioner(self) -> str:
        """Its name, with the rank where the name does not say it."""
        said = not self.rank or re.search(rf"\b{self.rank}\b", self.preconditioner)
        return self.preconditioner if said else f"{self.preconditioner}, rank {self.rank}"


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


def conclude(report: SolveReport) -> None:
    """What every solve ends with: its report to the recorders, and a warning if it did not meet its tolerance, or
    where it knows none did not do all that it was to do."""
    record(report)
    if not report.converged and report.reason not in _WITHOUT_TOLERANCE:
        warn(report.advice(), ConvergenceWarning)


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

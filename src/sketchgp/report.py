"""Reports of linear solves: :class:`SolveReport`, and :func:`record_solves` to collect them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cards import Card, Shown, report_card, seconds
from .errors import ConvergenceWarning, NumericalError, marked, warn

_recorders: list[list[SolveReport]] = []
_counted: ContextVar[bool] = ContextVar("sketchgp_shortfall_counted", default=False)
_own: ContextVar[tuple[list[SolveReport], ...]] = ContextVar("sketchgp_own_solves", default=())
_lock = threading.Lock()


class Reason(str, Enum):
    """Reason for which a solve ended; :meth:`SolveReport.advice` says what to try next."""

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

    @property
    def final(self) -> bool:
        """True where a larger budget changes nothing."""
        return self in (*_FINAL, *_WITHOUT_TOLERANCE)


_FINAL = (Reason.REACHED, Reason.ROUNDED, Reason.STAGNATED, Reason.DIRECT, Reason.SINGULAR)
_STOPPED = (Reason.CALLBACK, Reason.INTERRUPTED)
_WITHOUT_TOLERANCE = (Reason.FINISHED, Reason.EARLY)  # as planned: how a solver ends that knows no tolerance

_ADVICE = {
    Reason.ROUNDED: "The float64 iterate meets it, its rounding to float32 does not; use float64 if it matters.",
    Reason.SINGULAR: "Drop inducing points that nearly repeat others, and far outliers; or raise the noise.",
    Reason.ITERATIONS: "Raise max_iterations, and go on with initial= or a checkpoint.",
    Reason.PASSES: "Raise max_passes and go on with initial= or a checkpoint; raise block_size if memory allows.",
    Reason.EPOCHS: "Raise max_epochs and go on with initial= or a checkpoint.",
    Reason.TIME: "Raise max_seconds and go on with initial= or a checkpoint.",
    **dict.fromkeys(_STOPPED, "Go on from the value returned with initial=."),
}  # where a solver knows no better; a solver without the parameter does not end so


_TROUBLES = {
    Reason.ROUNDED: "rounded",
    Reason.STAGNATED: "stagnated",
    Reason.SINGULAR: "limits-of-float64",
    Reason.DIRECT: "direct",
    **dict.fromkeys((Reason.ITERATIONS, Reason.PASSES, Reason.EPOCHS, Reason.TIME), "out-of-budget"),
    **dict.fromkeys(_STOPPED, "stopped"),
}  # rows in docs/troubleshooting.md


class HeldOutError(NamedTuple):
    """The root mean square error ``(t,)`` of each column on held-out points, and after how much work it was so."""

    passes: float
    seconds: float
    error: Tensor


@dataclass(repr=False, kw_only=True)
class SolveReport(Shown):
    """One linear solve with :attr:`columns` right-hand sides of ``size`` unknowns each.

    ``size`` is n for ``(K + noise) value = rhs``, m for problems of m inducing points, and N of N random features, as
    ``letter`` says; ``n`` are the rows of the data either way (None for a stream that ended before they were counted).
    Batched systems are flattened: a batch of b systems with t columns counts b t columns.

    ``work`` is what was done, by name, and holds only what means something for the solver: ``"iterations"`` (steps);
    ``"products"`` with the matrix of the system, float64 ones to see the true residual included; ``"passes"`` (kernel
    entries evaluated, over those of the matrix); ``"epochs"`` (rows of the data seen, over n); ``"sweeps"`` over all
    rows for a true residual; ``"projections"``, and ``"projection_iterations"`` in them; ``"corrections"`` of float32
    products; ``"halvings"`` of a step that was too long.  ``details`` is what else the solver knows of itself, by name:
    the choices that it made (``"block_size"``, ``"step"``), named as its parameters where it has such ones;
    ``"precision"`` of the products at the end; ``"resumed_after"`` iterations of earlier runs; ``"earlier_columns"``
    that are returned as they were at their least residual; ``"projection_residual"`` of one that fell short.

    ``seconds`` are those from the first step to the value returned, its true residual included; ``setup_seconds`` those
    before: preconditioner, factors, the residual of a start.  The factorization of a direct solver is set-up.  Both are
    of all runs of a solve that was resumed.

    ``residual`` is the *true* relative residual ``||rhs - A value|| / ||rhs||`` of the returned value, one number a
    column, recomputed with float64 products when the solve ended; ``residual_rows`` is of how many rows, where these
    are not all: a sample, or 0 where it is what the last steps estimated.  ``history`` holds the residuals of the
    recurrence, ``(windows + 1, columns)``, which rounding can make smaller than the true ones, or estimates of them.
    ``held_out`` lists the errors on held-out points, where they were given.
    ``deviations`` estimate, column by column, how far any prediction is from the exact solution's at the most, in
    posterior deviations (solvers of the inducing-point problem; infinite where nothing can be said), or those of an
    observation (``ConjugateGradients(tol="posterior")``).  ``tol`` is of them where ``judged`` is ``"predictions"``, of
    the residual where it is ``"residual"``, of ``certain_deviations`` where it is ``"bound"``; infinite for a solver
    that knows none.
    ``variance_error`` estimates, where a variance was solved for, how much of it each column leaves out, over what it
    is to be a share of (:class:`sketchgp.solvers.energy.VarianceGoal`).

    ``error_bound`` is certain where it is not None: ``||value - A^-1 rhs||_A`` of the returned value is no larger,
    column by column, rounding included (:mod:`sketchgp.solvers.certificate`).  The mean of a Gaussian process at x is
    then within ``k(x, x)^1/2`` times it of the exact one.  Full problems have it, where the residual is of all rows.
    ``certain_deviations`` is the bound in posterior deviations of an observation: no prediction is further off, at any
    x with k(x, x) no larger than that of all rows.  ``quadratic_bounds`` ``(2, columns)`` are below and above
    ``rhs^T A^-1 rhs``.

    ``notes`` are words.  ``remedies`` say what to try for a reason to end, where the solver knows more about it than
    :meth:`advice` does.  ``peak_memory`` is in bytes: see :func:`sketchgp.memory.peak_memory`.
    """

    solver: str
    size: int
    n: int | None
    residual: Tensor
    history: Tensor
    tol: float
    converged: bool
    reason: Reason
    seconds: float
    setup_seconds: float = 0.0
    work: dict[str, float] = field(default_factory=dict)
    preconditioner: str = "none"
    rank: int = 0
    dtype: str = "float64"
    device: str = "cpu"
    peak_memory: int = 0
    residual_rows: int | None = None
    deviations: Tensor | None = None
    variance_error: Tensor | None = None
    error_bound: Tensor | None = None
    certain_deviations: Tensor | None = None
    quadratic_bounds: Tensor | None = None
    judged: str = "residual"
    held_out: list[HeldOutError] = field(default_factory=list)
    details: dict[str, float | str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remedies: dict[Reason, str] = field(default_factory=dict)
    letter: str = "m"

    @property
    def columns(self) -> int:
        """Number of right-hand sides."""
        return self.residual.numel()

    @property
    def iterations(self) -> int:
        """Steps of the solver; 0 for a direct solve."""
        return int(self.work.get("iterations", 0))

    @property
    def passes(self) -> float:
        """Kernel entries evaluated, over those of the matrix."""
        return float(self.work.get("passes", 0.0))

    @property
    def max_deviations(self) -> float:
        """The largest of ``deviations``; infinite where they are not known."""
        return _largest(self.deviations)

    @property
    def max_certain(self) -> float:
        """The largest of ``certain_deviations``; infinite where they are not known."""
        return _largest(self.certain_deviations)

    @property
    def certainty(self) -> float:
        """``max_certain`` where it is worth showing: below a deviation, or asked for; else infinite."""
        return self.max_certain if self.max_certain < 1 or self.judged == "bound" else float("inf")

    @property
    def fit_in_words(self) -> tuple[str, str]:
        """Name and text of the residual; for random features it is the root of a loss, which is shown instead."""
        if self.letter == "features":
            return "loss", f"{self.max_residual**2:.1%} of that of f = 0"
        return "relative residual", f"{self.max_residual:.2e}"

    @property
    def max_residual(self) -> float:
        """The largest true relative residual over the columns (0 for a solve without columns)."""
        return float(self.residual.max()) if self.residual.numel() else 0.0

    @property
    def failed(self) -> bool:
        """True where the value is no answer: predictions are estimated to be more than a posterior deviation off.

        Where no such estimate exists, the residual must be less than 0.9; that of a zero value is 1.
        """
        if self.converged or self.reason in (*_STOPPED, *_WITHOUT_TOLERANCE, Reason.SINGULAR):
            return False
        return self.max_deviations > 1 if self.judged == "predictions" else self.max_residual >= 0.9

    def advice(self, named: bool = True) -> str:
        """Why the solve ended short of its tolerance, and one thing to try.

        :param named: end with the name of the row in the troubleshooting page.
        """
        found = f"largest true relative residual {self.max_residual:.1e}"
        if self.tol < float("inf"):
            found += f", tolerance {self.tol:.0e}"
        if self.max_residual <= self.tol < float("inf") and self.max_deviations < float("inf"):
            found += f"; predictions may be up to {self.max_deviations:.1e} posterior deviations off"
        if self.judged == "predictions":
            far = f"{self.max_deviations:.1e} posterior deviations" if self.max_deviations < float("inf") else "unknown"
            found = f"largest error of predictions {far} (estimated), tolerance {self.tol:.0e}"
        elif self.judged == "bound":
            found = f"predictions are certain to {self.max_certain:.1e} posterior deviations, tolerance {self.tol:.0e}"
        if self.variance_error is not None and self.variance_error.numel() and not self.converged:
            found += (
                f", largest error of a variance {float(self.variance_error.max()):.1e} (estimated), tolerance 2.5e-03"
            )
        if self.reason == Reason.SINGULAR:
            far = f"{self.max_deviations:.1e} posterior deviations"
            found = f"rounding of the kernel matrix moves predictions by up to {far}"
        after = f" after {self.iterations} iterations" if "iterations" in self.work else ""
        head = f"A linear solve with {self.sizes} {self.reason}{after}: {found}."
        remedy = self.remedies.get(self.reason, _ADVICE.get(self.reason))
        if self.reason == Reason.STAGNATED and not remedy:
            remedy = f"{self.dtype} cannot do better; use a float64 model and data, or raise the noise."
            if self.dtype == "float64" or self.letter == "m":
                other = "QR()" if self.letter == "m" else "Cholesky()"
                remedy = f"{self.solver} gets no further in {self.dtype}; use {other}, or raise tol or the noise."
        return marked(f"{head} {remedy}" if remedy else head, _TROUBLES.get(self.reason) if named else None)

    @property
    def sizes(self) -> str:
        """Text with n, and with the size of the system where that is another."""
        if self.size == self.n and self.letter != "features":
            return f"n = {self.n}"
        own = f"{self.letter} = {self.size}"
        return own if self.n is None else f"n = {self.n}, {own}"

    @property
    def state(self) -> str:
        """``"converged"``, ``"NOT converged"``, or ``"no tolerance"`` where the solver knows none."""
        return "converged" if self.converged else "no tolerance" if self.tol == float("inf") else "NOT converged"

    def __str__(self) -> str:
        """Return the outcome on one line; :meth:`table` has all of it."""
        rows = dict(self._card().rows)
        labels, cut = (self.fit_in_words[0], "predictions"), "\n" if self.judged == "bound" else ", certainly"
        told = [rows["work"].split(", ")[0]] if self.work else []
        told += [f"{label} {rows[label].split(cut)[0]}" for label in labels if label in rows]
        ended = f"{self.solver} ({self.preconditioner_and_rank}): {self.state}, {self.reason}"
        return "; ".join([ended, self.sizes, *told, seconds(self.seconds + self.setup_seconds)])

    def _card(self) -> Card:
        return report_card(self)

    @property
    def preconditioner_and_rank(self) -> str:
        """Name of the preconditioner, with the rank where the name does not say it."""
        said = not self.rank or re.search(rf"\b{self.rank}\b", self.preconditioner)
        return self.preconditioner if said else f"{self.preconditioner}, rank {self.rank}"


def _largest(values: Tensor | None) -> float:
    """Return the largest of some numbers; infinity where they are not known, or none."""
    return float("inf") if values is None or not values.numel() else float(values.max())


def merged(reports: Sequence[SolveReport]) -> SolveReport:
    """Return one report of several solves that make one result together, the columns of all after each other.

    Work and seconds are sums, details those that all share; it has converged where all have, and ends with the reason,
    tolerance and advice of the first that has not.

    :param reports: at least one, of equal problem sizes or not; the largest size is told.
    """
    if len(reports) == 1:
        return reports[0]
    worst = next((report for report in reports if not report.converged), reports[0])
    rows = max(len(report.history) for report in reports)
    counted = [report.n for report in reports if report.n is not None]
    bounds = ("deviations", "variance_error", "error_bound", "certain_deviations", "quadratic_bounds")
    together: dict[str, Any] = {name: _together([getattr(report, name) for report in reports]) for name in bounds}
    return replace(
        worst,
        size=max(report.size for report in reports),
        n=max(counted) if counted else None,
        work={name: sum(report.work.get(name, 0) for report in reports) for name in worst.work},
        residual=torch.cat([report.residual for report in reports]),
        history=torch.cat([_lengthened(report.history, rows) for report in reports], dim=1),
        converged=all(report.converged for report in reports),
        seconds=sum(report.seconds for report in reports),
        setup_seconds=sum(report.setup_seconds for report in reports),
        peak_memory=max(report.peak_memory for report in reports),
        held_out=[],
        details={k: v for k, v in worst.details.items() if all(one.details.get(k) == v for one in reports)},
        notes=list(dict.fromkeys(note for report in reports for note in report.notes)),
        **together,
    )


def _together(parts: list[Tensor | None]) -> Tensor | None:
    """Concatenate the columns of all; return None where some are not known."""
    known = [part for part in parts if part is not None]
    return torch.cat(known, dim=-1) if len(known) == len(parts) else None


def _lengthened(history: Tensor, rows: int) -> Tensor:
    """Repeat the last row until there are ``rows``."""
    return torch.cat([history, history[-1:].expand(rows - len(history), -1)])


@contextmanager
def record_solves() -> Iterator[list[SolveReport]]:
    """Collect the report of every linear solve that sketchgp does inside the block, in all threads.

    Solves that GPyTorch does by its own Cholesky factorization leave no report: of n at most 800 (2,000 where BoTorch
    is imported), or at most what a ``max_cholesky_size`` block says.

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
    """Collect the report of every solve that this thread does inside the block; compare :func:`record_solves`."""
    solves: list[SolveReport] = []
    token = _own.set((*_own.get(), solves))
    try:
        yield solves
    finally:
        _own.reset(token)


@contextmanager
def shortfall_counted() -> Iterator[None]:
    """Silence the warnings of solves inside the block, whose shortfall is accounted for by the caller."""
    token = _counted.set(True)
    try:
        yield
    finally:
        _counted.reset(token)


def record(report: SolveReport) -> None:
    """Hand a report to every open :func:`record_solves` block, and to the :func:`own_solves` that it belongs to."""
    for own in _own.get():
        own.append(report)
    with _lock:
        for solves in _recorders:
            solves.append(report)


def conclude(report: SolveReport) -> None:
    """Record the report of a solve that ended, and warn where it fell short of its tolerance or of its plan."""
    record(report)
    warn_of(report)


def require_answer(report: SolveReport, solver: Any) -> None:
    """Refuse a mean by a solve that :attr:`SolveReport.failed`, unless the user limited the solver's work.

    :raises NumericalError: for such a mean.
    """
    if report.failed and not getattr(solver, "limited", False):
        raise NumericalError(
            f"The mean could not be computed. {report.advice(named=False)} To take it as it is, limit the work by the "
            "solver's own max_iterations, max_passes, max_epochs or max_seconds.",
            see="failed-mean",
        )


def warn_of(report: SolveReport) -> None:
    """Warn where a solve fell short, unless its shortfall is counted elsewhere."""
    if not report.converged and report.reason not in _WITHOUT_TOLERANCE and not _counted.get():
        warn(report.advice(), ConvergenceWarning)

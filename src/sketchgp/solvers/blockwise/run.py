"""The loop of the solvers that go by blocks of rows: budgets, residuals, refinement, progress, Ctrl-C, checkpoints.

The residual is estimated from the steps themselves, and true where a solve ends.  With float32 products the method
solves ``K d + noise d = r`` with ``r = y - (K + noise) base`` computed in float64.  Once a pass, the residual of some
rows is computed in float64 too; where rounding dominates it, ``base += d`` and the method goes on from d = 0 with
the new residual (iterative refinement: Higham, "Accuracy and Stability of Numerical Algorithms", chapter 12).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...errors import NumericalError
from ...random_streams import generator
from ...report import Reason, SolveReport, peak_memory
from ..loop import Checkpoint, Progress
from ..loop.interrupt import DeferredInterrupt
from .method import HeldOut, Limits, Method
from .state import State, largest_of
from .system import BlockSystem
from .watch import NAN, plateau, stuck, watch_growth

_ALL_ROWS = 50_000  # points up to which the final residual is always that of all rows
_WORTH_ALL_ROWS = 5.0  # passes after which it is for any number of points
_SAMPLE = 8192  # rows from which it is estimated otherwise
_WINDOW = 50_000  # the most rows between two estimates of the residual
_CHECKED = 32  # rows whose residual is computed in float64 too, once a pass
_ROUNDED = 0.3  # share of the residual that may be rounding
_HELD_OUT_SHARE = 0.1  # of the work that held-out predictions may take
_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears
_BAR = "{desc}: {n:.1f}/{total} passes [{elapsed}<{remaining}] {postfix}"
_FINAL = (Reason.REACHED, Reason.ROUNDED, Reason.STAGNATED)  # ends that a larger budget does not change
_BUDGETS = (Reason.PASSES, Reason.TIME)
_FRUITLESS = 3  # corrections in a row that halve the residual of no column


class Run:
    """One solve: ``loop`` runs it, then ``value`` is what to return and ``report`` says what happened.

    :param b: right-hand sides ``(n, t)``, float64.
    :param out_dtype: dtype of ``value``; the residual reported is that of the rounded one.
    :param raising: on Ctrl-C raise KeyboardInterrupt, after saving, instead of returning the iterate.
    """

    def __init__(
        self,
        system: BlockSystem,
        method: Method,
        b: Tensor,
        out_dtype: torch.dtype,
        limits: Limits,
        seed: int,
        initial: Tensor | None = None,
        checkpoint: Checkpoint | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: HeldOut | None = None,
        raising: bool = False,
    ) -> None:
        self.system, self.method, self.b, self.out_dtype, self.limits = system, method, b, out_dtype, limits
        self.checkpoint, self.callback, self.held_out, self.raising = checkpoint, callback, held_out, raising
        norm = b.norm(dim=0)
        if not bool(torch.isfinite(norm).all()):
            raise NumericalError("The right-hand side of a linear solve holds NaN or infinity.")
        self.norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.value: Tensor | None = None
        self.sampled = False  # whether the final residual is that of a sample of rows
        self.earlier_columns = 0  # of the value returned that are those of an earlier iterate
        self.start = self.saved_at = time.perf_counter()
        self.earlier = 0.0
        self.generator = generator(seed, "blocks of a solve")
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint, initial is not None)
        else:
            self._begin(initial)

    def _begin(self, initial: Tensor | None) -> None:
        base = torch.zeros_like(self.b) if initial is None else initial.to(torch.float64).clone()
        r, rounded, value = (self.b, self.b, base[:0]) if initial is None else self._residuals(base)
        self.system.entries = 0  # a warm start is not charged for
        zero, tol, start = torch.zeros_like(self.norm), self.limits.tol, self._relative(r)
        best, best_true = value.to(torch.float64), self._relative(rounded)
        self.state = State(base, r, zero, self.generator.get_state(), best, best_true, start.clone(), tol, tol)
        self.method.begin(self.b.shape[1])
        self.state.estimates.append(start)
        if self._at_target():
            self._verify_all()
        self.save()

    # --- the loop -------------------------------------------------------------------------------------------

    def loop(self, progress: bool | None) -> None:
        """Step until something ends the solve."""
        show = sys.stderr.isatty() if progress is None else progress
        bar = tqdm(
            desc=f"{self.method.name}, n = {self.system.n}",
            total=round(self.limits.passes, 1),
            disable=not show,
            leave=False,
            miniters=0,
            delay=_PROGRESS_DELAY,
            bar_format=_BAR,
        )
        self._stop_at_limits()  # of a solve that was resumed
        with bar, DeferredInterrupt() as interrupt:
            self._loop(bar, interrupt)
            if interrupt.seen and self.raising:  # it came too late to be noticed by a step
                raise KeyboardInterrupt
            if self.value is None:
                self._verify(quick=interrupt.seen)
            if not interrupt.seen:
                self._look_at_held_out()

    def _loop(self, bar: Any, interrupt: DeferredInterrupt) -> None:
        while not self.state.reason:
            within = True  # a step, whose vectors are then partly old and partly new
            try:
                self._step()
                within = False
                self._close_window(bar)
                if interrupt.seen:
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                if not within:
                    self.save()
                if self.raising or interrupt.again:
                    raise
                self.state.reason = self.state.reason or Reason.INTERRUPTED
                break
            self._stop_at_limits()
            if self.state.reason or time.perf_counter() - self.saved_at >= self._every():
                self.save()

    def _every(self) -> float:
        return float("inf") if self.checkpoint is None else self.checkpoint.every

    def _step(self) -> None:
        state, method = self.state, self.method
        due = self.system.dtype != torch.float64 and state.rows_seen - state.rows_checked >= self.system.n
        point = method.evaluation_point().clone() if due else None
        rows, g = method.step(state.r, self.generator)
        if not state.window_rows and not bool(torch.isfinite(g).all()):
            raise NumericalError(NAN)
        state.steps += 1
        state.rows_seen += len(rows)
        state.window_rows += len(rows)
        state.window_squares = state.window_squares + g.square().sum(dim=0)
        if point is not None:
            state.rows_checked = state.rows_seen
            some = rows[:_CHECKED]
            exact = self.system.accurate_rows(some, point) - state.r[some]
            rounding = self._relative((g[:_CHECKED] - exact) * (self.system.n / len(some)) ** 0.5)
            estimate = state.estimates[-1]
            if bool(((rounding > _ROUNDED * estimate) & (estimate > self.limits.tol)).any()):
                self._refine()

    def _close_window(self, bar: Any) -> None:
        """After enough rows: estimate the residual from the steps since the last time, and tell everyone."""
        state = self.state
        if state.window_rows < min(self.system.n, _WINDOW):
            return
        estimate = ((state.window_squares * (self.system.n / state.window_rows)).sqrt() / self.norm).cpu()
        state.window_rows, state.window_squares = 0, torch.zeros_like(state.window_squares)
        state.estimates.append(estimate)
        largest = largest_of(estimate)
        watch_growth(state, self.method, self.limits.tol, largest, self.b.shape[1])
        error = self._held_out_error()
        held = "" if error is None else f", held-out RMSE {float(error.mean()):.4g}"
        bar.set_postfix_str(f"residual about {largest:.1e}{held}", refresh=False)
        bar.update(self.system.passes - bar.n)
        if self.callback is not None and self.callback(
            Progress(
                state.steps,
                self.system.passes,
                state.rows_seen / self.system.n,
                self.seconds,
                estimate,
                error,
                self._weights,
            )
        ):
            state.reason = Reason.CALLBACK
        if not state.reason and self._due():
            self._verify_all()
        if self.system.dtype == torch.float64 and plateau(state, largest, self.system.n) and not state.reason:
            before = largest_of(state.true)
            self._verify_all()
            if not state.reason and stuck(largest_of(state.true), before):
                state.reason = Reason.STAGNATED

    def _held_out_error(self) -> Tensor | None:
        """The error on held-out points; the last one known where computing it again would take too much of the time."""
        state = self.state
        if self.held_out is None:
            return None
        if state.held_out and state.held_out_entries > _HELD_OUT_SHARE * self.system.entries:
            return state.held_out[-1][2]
        return self._look_at_held_out()

    def _look_at_held_out(self) -> Tensor | None:
        """The error on held-out points now, or of the value to return where there is one."""
        if self.held_out is None:
            return None
        state, weights = self.state, self._weights() if self.value is None else self.value.to(torch.float64)
        error, entries = self.held_out(weights)
        state.held_out_entries += entries
        state.held_out.append((self.system.passes, self.seconds, error))
        return error

    def _stop_at_limits(self) -> None:
        limits, state = self.limits, self.state
        if not state.reason and self.system.passes >= limits.passes:
            state.reason = Reason.PASSES
        if not state.reason and limits.seconds is not None and self.seconds >= limits.seconds:
            state.reason = Reason.TIME

    # --- residuals ------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since the start, earlier runs included."""
        return self.earlier + time.perf_counter() - self.start

    def _weights(self) -> Tensor:
        return self.state.base + self.method.value

    def _at_target(self) -> bool:
        return bool((self.state.estimates[-1] <= self.state.target).all())

    def _due(self) -> bool:
        """Whether it is time to look at the true residual."""
        return self._at_target() and self.state.rows_seen >= self.state.verify_after

    def _relative(self, r: Tensor) -> Tensor:
        relative = (r.norm(dim=0) / self.norm).cpu()
        if not bool(torch.isfinite(relative).all()):
            raise NumericalError(NAN)
        return relative

    def _true_residual(self) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_residuals` of the present iterate."""
        return self._residuals(self._weights())

    def _residuals(self, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``y - (K + noise) W`` for W as it is, and as it would be returned, rounded, and that; ``(n, t)`` each."""
        value = exact.to(self.out_dtype)
        if self.out_dtype == torch.float64:
            r = self.b - self.system.accurate_product(exact)
            return r, r, value
        product = self.system.accurate_product(torch.cat([exact, value.to(torch.float64)], dim=1))
        return self.b - product[:, : self.b.shape[1]], self.b - product[:, self.b.shape[1] :], value

    def _verify_all(self) -> None:
        """The estimate is at the target: end if the true residual is at the tolerance, else aim lower."""
        state, tol = self.state, self.limits.tol
        r, rounded, value = self._true_residual()
        true, self.residual = self._relative(r), self._relative(rounded)
        within = bool((self.residual <= tol).all())
        if within or bool((true <= tol).all()):
            state.reason = Reason.REACHED if within else Reason.ROUNDED
            self.value, self.residual, self.earlier_columns = state.best_of(value, self.residual)
        else:  # the estimate was too small: of rows that had just been solved, say
            state.target = max(0.1 * tol, 0.9 * state.target * min(1.0, tol / largest_of(true)))
            state.failures, state.true = state.failures + 1, true
            state.verify_after = state.rows_seen + self.system.n * 2 ** min(state.failures, 6)

    def _refine(self) -> None:
        """Go on from the true residual; end where that has not helped any column several times."""
        state = self.state
        r, rounded, value = self._true_residual()
        true, self.residual = self._relative(r), self._relative(rounded)
        helped = bool((true <= 0.5 * state.true)[true > self.limits.tol].any()) or bool((true <= self.limits.tol).all())
        state.fruitless = 0 if helped else state.fruitless + 1  # once is nothing: the 2-norm may rise before it falls
        state.corrections += 1
        state.keep(value, self.residual)
        if state.fruitless >= _FRUITLESS:
            state.reason = Reason.STAGNATED
            self.value, self.residual, self.earlier_columns = state.best_of(value, self.residual)
            return
        state.notes.append(
            f"{str(self.system.dtype).removeprefix('torch.')} products corrected at residual {largest_of(true):.1e}"
        )
        state.base, state.r, state.true = self._weights(), r, true
        self.method.rebase()

    def _verify(self, quick: bool = False) -> None:
        """The residual of what is returned: of all rows, or of a sample where the budget ended early.

        :param quick: a sample at the most: somebody waits.  Ctrl-C then leaves the residual as the steps estimated it.
        """
        try:
            self._look(quick)
        except KeyboardInterrupt:
            if self.raising:
                raise
            self.value, self.residual, self.sampled = self._weights().to(self.out_dtype), self.state.estimates[-1], True
            self.state.notes.append("interrupted again: the residual is what the last steps estimated")
            return
        if not self.sampled and bool((self.residual <= self.limits.tol).all()) and self.state.reason in _BUDGETS:
            self.state.reason = Reason.REACHED

    def _look(self, quick: bool) -> None:
        n = self.system.n
        if n <= _SAMPLE or (not quick and (n <= _ALL_ROWS or self.system.passes >= _WORTH_ALL_ROWS)):
            _, rounded, value = self._true_residual()
            self.value, self.residual, self.earlier_columns = self.state.best_of(value, self._relative(rounded))
            return
        self.sampled = True
        self.value = self._weights().to(self.out_dtype)
        rows = torch.randperm(n, generator=generator(n, "rows of a residual"))[:_SAMPLE].to(self.b.device)
        r = self.b[rows] - self.system.accurate_rows(rows, self.value.to(torch.float64))
        self.residual = self._relative(r * (n / len(rows)) ** 0.5)
        self.state.notes.append(f"residual estimated from {len(rows)} random rows, in float64")

    def report(self, preconditioner: str, setup_seconds: float) -> SolveReport:
        """What happened, once ``loop`` has ended."""
        state = self.state
        assert state.reason is not None
        notes = list(state.notes)
        if self.earlier_columns:
            notes.append(f"{self.earlier_columns} column(s) returned as they were at their least residual")
        return SolveReport(
            solver=self.method.name,
            preconditioner=preconditioner,
            n=self.system.n,
            columns=self.b.shape[1],
            iterations=state.steps,
            matmuls=self.system.system.matmuls,
            residual=self.residual,
            history=torch.stack(state.estimates),
            tol=self.limits.tol,
            converged=not self.sampled and bool((self.residual <= self.limits.tol).all()),
            reason=state.reason,
            seconds=self.seconds,
            setup_seconds=setup_seconds,
            rank=self.method.rank,
            dtype=str(self.system.dtype).removeprefix("torch."),
            device=str(self.b.device),
            peak_memory=peak_memory(self.b.device),
            notes=notes,
            passes=self.system.passes,
            held_out=list(state.held_out),
        )

    # --- saving and resuming --------------------------------------------------------------------------------

    def save(self) -> None:
        """Write everything that the rest of the solve depends on, if there is a checkpoint."""
        if self.checkpoint is None:
            return
        state, method = self.state, self.method
        state.seconds, state.entries, state.generator = self.seconds, self.system.entries, self.generator.get_state()
        plain, tensors = state.pack()
        tensors |= {f"method.{name}": tensor for name, tensor in method.tensors.items()}
        self.checkpoint.save({**plain, "method": method.numbers, "engines": self.system.engines,
                              "held_out_set": self._held_out_set()}, tensors)  # fmt: skip
        self.saved_at = time.perf_counter()

    def _held_out_set(self) -> str:
        return "" if self.held_out is None else self.held_out.mark

    def _resume(self, checkpoint: Checkpoint, warm: bool) -> None:
        plain, tensors = checkpoint.load(self.b.device)
        self.method.numbers = plain.pop("method")
        another_engine, another_set = self.system.use_engines(plain.pop("engines")), plain.pop("held_out_set")
        self.method.tensors = {k.removeprefix("method."): v for k, v in tensors.items() if k.startswith("method.")}
        self.state = state = State.unpack(plain, tensors)
        self.generator.set_state(state.generator.cpu())
        self.system.entries, self.earlier = state.entries, state.seconds
        another = state.tol != self.limits.tol
        if another:
            state.tol = state.target = self.limits.tol
            state.failures = state.verify_after = 0
        state.notes.append(f"resumed after {state.steps} steps")
        if warm:
            state.notes.append("initial= was not used: the checkpoint is ahead of it")
        if another_engine:
            state.notes.append("matmul= is another than before: the last digits are those of another rounding")
        if another_set != self._held_out_set():
            state.held_out, state.held_out_entries = [], 0
        ended, state.reason = state.reason, None
        if ended in _FINAL:
            self._verify_all()
            if another and not state.reason:
                state.failures, state.verify_after, state.target = 0, 0, self.limits.tol
            if ended == Reason.STAGNATED and not state.reason:
                self._verify()
                state.reason = ended
        elif state.steps and not state.window_rows and self._due():
            self._verify_all()  # it was ended where it would have done this

"""The loop of every iterative solve: budget, callback, held-out error, progress bar, Ctrl-C, checkpoint and resume."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...cards import shows_progress
from ...distributed import in_force
from ...errors import InputError
from ...fingerprint import parameters_held, tensor_mark
from ...memory import peak_memory
from ...report import HeldOutError, Reason, SolveReport
from .checkpoint import Checkpoint
from .method import Method, Outcome, Progress, largest_of

_DELAY = 2.0  # seconds before a progress bar appears
_BAR = "{desc}: {n:.4g}/{total} {unit} [{elapsed}<{remaining}] {postfix}"
_OUT_OF = {"iterations": Reason.ITERATIONS, "passes": Reason.PASSES, "epochs": Reason.EPOCHS}
_ENDS: tuple[Reason | None, ...] = (None, *Reason)
_ROUNDED = 1e-9  # of a unit of work that is a sum of many parts
_SHARE = 0.1  # of the work that held-out predictions may take


def clock() -> float:
    """Return the seconds of the clock that ``began`` of a :class:`Run` is read from."""
    return time.perf_counter()


class HeldOut:
    """Error of each column on held-out points, ``W -> (t,)``: the root of the mean square, unless told otherwise.

    :param predict: weights to predictions ``(p, t)`` float64, by a kernel entry for each point and each weight.
    :param x: points ``(p, d)``; :param y: targets ``(p,)`` or ``(p, t)``.
    :param error: from predictions to errors ``(t,)``; None as above.
    :ivar mark: tells one set of points from another; :ivar entries: kernel entries evaluated so far.
    """

    def __init__(
        self,
        predict: Callable[[Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        error: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.predict, self.points = predict, len(x)
        targets = y.reshape(len(x), -1).to(torch.float64)
        self.error = error or (lambda predicted: (predicted - targets).square().mean(dim=0).sqrt())
        self.mark, self.entries = tensor_mark(x, y), 0.0

    def __call__(self, weights: Tensor) -> Tensor:
        self.entries += self.points * len(weights)
        return self.error(self.predict(weights)).cpu()


class DeferredInterrupt:
    """Ctrl-C between two steps instead of in the middle of one.

    The first is noted in ``seen``; the second is noted in ``again`` and raises KeyboardInterrupt at once.

    Only the main thread can change how signals are handled, and a handler of the user's is left in place: there
    nothing changes.
    """

    def __init__(self) -> None:
        self.seen = self.again = False
        self._before: Any = None

    def __enter__(self) -> DeferredInterrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.seen:
            self.again = True
            raise KeyboardInterrupt
        self.seen = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class Run:
    """A solve: ``loop`` runs it and returns its outcome; ``report`` says what happened.

    :param most_work: the budget, in the method's unit; :param most_seconds: set-up included, None for no limit.
    :param began: :func:`clock` when the set-up began.
    :param initial: starting point ``(size, columns)``.
    :param checkpoint: where the state is kept; where it exists, the solve goes on from it.
    :param keep_interrupted: on Ctrl-C, return the iterate instead of raising KeyboardInterrupt after saving.
    """

    def __init__(
        self,
        method: Method,
        most_work: float,
        most_seconds: float | None,
        *,
        began: float,
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: HeldOut | None = None,
        checkpoint: Checkpoint | None = None,
        keep_interrupted: bool = False,
    ) -> None:
        self.method, self.most_work, self.most_seconds = method, most_work, most_seconds
        self.initial, self.callback, self.checkpoint, self.raising = initial, callback, checkpoint, not keep_interrupted
        self.held_out, self.errors = held_out, list[HeldOutError]()
        self.history: list[Tensor] = []
        self.reason: Reason | None = None
        self.judged: Reason | None = None  # what the method said of the last window
        self.began, self.earlier = began, 0.0
        self.setup_seconds = 0.0  # of all runs, once the first step can be taken
        self.resumed_after: int | None = None
        self.saved_at, self.due = clock(), False
        self.outcome: Outcome | None = None
        self.shards = in_force()
        if most_seconds is not None:
            method.time_used = self._time_used

    @property
    def seconds(self) -> float:
        """Since the start, set-up and earlier runs included."""
        return self.earlier + clock() - self.began

    def _time_used(self) -> float:
        """Share of the time limit that is used; on several ranks that of rank 0."""
        assert self.most_seconds is not None
        share = self.seconds / self.most_seconds
        return share if self.shards is None else self.shards.agree(share)

    def loop(self, progress: bool | None) -> Outcome:
        """Step until something ends the solve."""
        method, show = self.method, shows_progress(progress)
        show = show and (self.shards is None or self.shards.rank == 0)
        bar = tqdm(
            desc=f"{method.name}, {method.letter} = {method.size}",
            total=round(self.most_work, 1),
            unit=method.unit,
            disable=not show,
            leave=False,
            miniters=0,
            delay=_DELAY,
            bar_format=_BAR,
        )
        with parameters_held():
            self._begin()
            with bar, DeferredInterrupt() as interrupt:
                self._loop(bar, interrupt)
                self._agree(interrupt, True)
                if interrupt.seen and self.raising:  # it came too late to be noticed by a step
                    raise KeyboardInterrupt
                if self.reason is not Reason.INTERRUPTED and not interrupt.seen and method.close():
                    self._judge(bar)
                    self._tell()
                self.outcome = outcome = self._finish(interrupt.seen)
                if self.shards is not None:
                    outcome.value = self.shards.same(outcome.value)
                if not interrupt.seen:
                    self._held_out_error(outcome.value)
        return outcome

    def _finish(self, quick: bool) -> Outcome:
        assert self.reason is not None
        try:
            return self.method.finish(self.reason, quick)
        except KeyboardInterrupt:
            if self.raising:
                raise
            return self.method.give_up(self.reason)

    def _begin(self) -> None:
        if self.shards is not None:
            self.shards.exchange.aside = 0  # of a solve that failed
        if self.checkpoint is not None and self.checkpoint.exists():
            self._resume(self.checkpoint)
            self.setup_seconds += clock() - self.began
        else:
            self.history.append(self.method.begin(self.initial).cpu())
            self.reason = self.method.judge(None)
            self.setup_seconds = clock() - self.began
            self.save()
        self._stop_at_limits()

    def _loop(self, bar: Any, interrupt: DeferredInterrupt) -> None:
        while self.reason is None:
            within = True  # a step, whose vectors are then partly old and partly new, or a window not yet judged
            try:
                closed = self.method.step()
                if closed:
                    self._judge(bar)
                within = False
                if closed:
                    self._tell()
                bar.update(self.method.work - bar.n)
                if self._agree(interrupt, closed):
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                within = within or (interrupt.again and self.shards is not None)  # the others know nothing of it
                if not within:
                    self.save()
                if self.raising or interrupt.again:
                    raise
                self.reason = self.reason or Reason.INTERRUPTED
                break
            self._stop_at_limits()
            if self.reason is not None or self.due:
                self.save()

    def _agree(self, interrupt: DeferredInterrupt, closed: bool) -> bool:
        """Let rank 0 say whether the solve ends and is saved, and return whether there was a Ctrl-C on any rank.

        :param closed: a window, so that the solve may end; else what they say is heard with the next step's words.
        """
        self.due = self.checkpoint is not None and clock() - self.saved_at >= self.checkpoint.every
        if self.shards is None:
            return interrupt.seen
        exchange, said = self.shards.exchange, 2 * self.due + interrupt.seen
        words = None if closed else exchange.heard()
        if words is None:
            exchange.aside = 0
            spoken = exchange.meet("the end of a step", 4 * _ENDS.index(self.reason) + said)
            words = [int(word) for word in spoken]
            self.reason = _ENDS[words[0] // 4]
            interrupt.seen = any(one % 2 for one in words)
            exchange.heard()
        self.due = bool(words[0] // 2 % 2)
        if not closed:
            exchange.aside = said % 2 if self.due else said  # it is saved now
        return any(one % 2 for one in words)

    def _judge(self, bar: Any) -> None:
        """Record the estimates of a window that was closed, and ask the method whether to go on."""
        method, estimate = self.method, self.method.estimate().cpu()
        self.history.append(estimate)
        error = self._held_out_error()
        held = "" if error is None else f", {method.measure} {float(error.mean()):.4g}"
        bar.set_postfix_str(f"residual about {largest_of(estimate):.1e}{held}", refresh=False)
        self.progress = Progress(
            method.iterations, method.passes, method.epochs, self.seconds, estimate, error, method.weights
        )
        self.judged = method.judge(error)

    def _held_out_error(self, last: Tensor | None = None) -> Tensor | None:
        """Return the error now, or the one before where computing it again would take too much of the time.

        :param last: the weights that the solve ends with; None while it goes on.
        :returns: None where there are no held-out points.
        """
        held_out, method = self.held_out, self.method
        if held_out is None:
            return None
        spare = not self.errors or method.judges_held_out or held_out.entries <= _SHARE * method.entries
        if last is not None or spare:
            error = held_out(method.weights() if last is None else last)
            self.errors.append(HeldOutError(method.passes, self.seconds, error))
        return self.errors[-1].error

    def _tell(self) -> None:
        """Call the callback; where it stops the solve, that is the reason, whatever the method said."""
        stopped = self.callback is not None and self.callback(self.progress)
        self.reason = self.reason or (Reason.CALLBACK if stopped else self.judged)

    def _stop_at_limits(self) -> None:
        if self.reason is None and self.method.work >= self.most_work - _ROUNDED:
            self.reason = _OUT_OF[self.method.unit]
        if self.reason is None and self.most_seconds is not None and self._time_used() >= 1:
            self.reason = Reason.TIME

    # --- saving and resuming --------------------------------------------------------------------------------

    def save(self) -> None:
        """Write everything that the rest of the solve depends on, if there is a checkpoint; all ranks do it."""
        if self.checkpoint is None:
            return
        plain, tensors = self.method.state()
        if not self.checkpoint.ours:
            return
        plain = {
            "method": plain,
            "seconds": self.seconds,
            "setup_seconds": self.setup_seconds,
            "reason": str(self.judged or self.reason or ""),
            "held_out": [(passes, seconds, error.tolist()) for passes, seconds, error in self.errors],
            "held_out_set": getattr(self.held_out, "mark", ""),
            "held_out_entries": getattr(self.held_out, "entries", 0.0),
        }
        self.checkpoint.save(plain, {**tensors, "history of the run": torch.stack(self.history)})
        self.saved_at = clock()

    def _resume(self, checkpoint: Checkpoint) -> None:
        plain, tensors = checkpoint.load(self.method.device)
        method, held_out = self.method, self.held_out
        same = plain["held_out_set"] == getattr(held_out, "mark", "")
        if method.judges_held_out and not same:
            raise InputError(
                f"The checkpoint {checkpoint.path} is of a solve with other held-out points, which decide what it "
                "returns. Give it those, delete it or use another path."
            )
        method.restore(plain["method"], tensors)
        self.history, self.earlier = list(tensors["history of the run"].cpu()), plain["seconds"]
        self.setup_seconds, self.resumed_after = plain["setup_seconds"], method.iterations
        moved = "" if checkpoint.moved is None else f", which were taken by {checkpoint.moved} rank(s)"
        method.notes.append(f"resumed after {method.iterations} steps{moved}")
        if self.initial is not None:
            method.notes.append("initial= was not used: the checkpoint is ahead of it")
        if held_out is not None and same:
            held_out.entries = plain["held_out_entries"]
            self.errors = [
                HeldOutError(passes, seconds, torch.tensor(error, dtype=torch.float64))
                for passes, seconds, error in plain["held_out"]
            ]
        if checkpoint.moved is not None:
            method.moved()
        ended = plain["reason"]
        self.reason = method.resume(Reason(ended) if ended else None)

    # --- the report -----------------------------------------------------------------------------------------

    def report(self, **facts: Any) -> SolveReport:
        """Return the report, once ``loop`` has ended.

        :param facts: fields that only the solver knows; details among them are added to those known here.
        """
        assert self.outcome is not None
        method, outcome = self.method, self.outcome
        details = {**outcome.facts.get("details", {}), **facts.get("details", {})}
        if self.resumed_after is not None:
            details["resumed_after"] = self.resumed_after
        return SolveReport(
            **{
                "solver": method.name,
                "size": method.size,
                "letter": method.letter,
                "n": method.data_rows,
                "work": {"iterations": method.iterations, **method.tally, "passes": method.passes},
                "residual": outcome.residual.cpu(),
                "history": torch.stack(self.history),
                "converged": outcome.converged,
                "reason": outcome.reason,
                "seconds": self.seconds - self.setup_seconds,
                "setup_seconds": self.setup_seconds,
                "device": str(method.device),
                "peak_memory": peak_memory(method.device),
                "notes": method.notes,
                "held_out": self.errors,
                **outcome.facts,
                **facts,
                "details": details,
            }
        )

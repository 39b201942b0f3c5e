"""The loop over epochs that EigenPro 3 and 4 share: averaging, held-out error, early stopping, divergence, Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...errors import InputError, NumericalError
from ...operators.tall import TallMatrix
from ..loop.interrupt import DeferredInterrupt
from .preconditioned_gradient import Model
from .problem import InducingPointProblem

_DIVERGED = 100.0  # mean squared residual of a batch, over that of the start and of its targets
_WORSE = 1.1  # final residual, over that of the start and over that of f = 0
_RECENT = 3  # an average of k iterates gives the last one the weight (r + 1) / (k + r)
_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears


@dataclass(frozen=True)
class Epoch:
    """What a callback sees once an epoch.

    :ivar epoch: epochs so far.
    :ivar seconds: since the start.
    :ivar residual: ``||f(x) - y|| / ||y||`` of each column ``(t,)`` over the epoch's batches, each before its own step.
    :ivar held_out: root mean square error of each column on the held-out points; None where there are none.
    :ivar weights: ``(m, t)`` that would be returned now, but for those of a better epoch.
    """

    epoch: int
    seconds: float
    residual: Tensor
    held_out: Tensor | None
    weights: Tensor = field(repr=False)


@dataclass(frozen=True)
class Plan:
    """How long, how often, how: the choices of a solver once the automatic ones are made.

    :ivar delay: asked after every projection: batches until the next one.
    """

    epochs: int
    seconds: float | None
    block_size: int
    delay: Callable[[], int]
    step_scale: float
    averaging: bool
    cooldown: float
    patience: int | None
    advice: str


class Epochs:
    """One solve: ``loop`` runs it, then ``value`` is what to return.

    :param held_out: weights to the error of each column.
    :param checked: training points and targets on which the weights returned are judged.
    """

    def __init__(
        self,
        problem: InducingPointProblem,
        model: Model,
        plan: Plan,
        generator: torch.Generator,
        held_out: Callable[[Tensor], Tensor] | None,
        checked: tuple[Tensor, Tensor],
        callback: Callable[[Epoch], Any] | None,
    ) -> None:
        self.problem, self.model, self.plan, self.generator = problem, model, plan, generator
        self.held_out, self.checked, self.callback = held_out, checked, callback
        self.delay = plan.delay()
        self.start = time.perf_counter()
        self.history: list[Tensor] = []
        self.errors: list[tuple[float, float, Tensor]] = []
        self.notes: list[str] = []
        self.reason = ""
        self.batches = self.projections = self.epoch = self.rows = self.largest = 0
        self.total: int | None = None if problem.streamed else len(problem.x)  # type: ignore[arg-type]
        self.average = model.base.clone()
        self.best: Tensor | None = None
        self.least, self.waited, self.scale = float("inf"), 0, float("nan")
        self.end: float = plan.epochs
        self.cooling = (1 - plan.cooldown) * plan.epochs  # the epoch from which the step falls
        self.first = self._relative(self.average)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.start

    @property
    def value(self) -> Tensor:
        """Weights ``(m, t)``: the best on the held-out points, or the last."""
        return self.average if self.best is None else self.best

    def loop(self, progress: bool | None) -> None:
        """Go through the epochs until something ends the solve."""
        show = sys.stderr.isatty() if progress is None else progress
        bar = tqdm(desc=f"{self.plan.epochs} epochs", unit=" rows", unit_scale=True, disable=not show, leave=False,
                   delay=_PROGRESS_DELAY)  # fmt: skip
        with bar, DeferredInterrupt() as interrupt:
            try:
                while not self.reason:
                    self._epoch(bar, interrupt)
            except KeyboardInterrupt:  # a handler of the user's, or a thread that has none
                if interrupt.again:
                    raise
                self.reason = "was interrupted"
        self.residual = self._relative(self.value)
        if not bool((self.residual <= _WORSE * self.first.clamp(min=1)).all()):  # true for NaN too
            raise NumericalError(
                f"The fit diverges: relative training residual {float(self.first.max()):.1e} at the start and "
                f"{float(self.residual.max()):.1e} at the end. {self.plan.advice}"
            )

    # --- one epoch ------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        problem = self.problem
        if not torch.is_tensor(problem.x):
            for number, (x, y) in enumerate(problem.batches()):
                y = y.reshape(len(y), -1)
                check_columns(number, y, self.average.shape[1])
                yield x, y.to(torch.float64)
            return
        assert problem.y is not None
        targets = problem.y.reshape(len(problem.x), -1)
        order = torch.randperm(len(problem.x), generator=self.generator).to(problem.device)
        for rows in order.split(self.plan.block_size):
            yield problem.x[rows], targets[rows].to(torch.float64)

    def _epoch(self, bar: Any, interrupt: DeferredInterrupt) -> None:
        model, plan = self.model, self.plan
        columns = self.average.shape[1]
        squares, targets = (torch.zeros(columns, dtype=torch.float64, device=self.problem.device) for _ in range(2))
        self.rows, waiting = 0, 0
        for x, y in self._batches():
            b = len(x)
            ridge = self.problem.level / self.total if self.total else 0.0
            self.largest = max(self.largest, b)  # a step for each size would weigh the points of small batches more
            step = plan.step_scale * model.directions.step(self.largest, ridge) * self._cooled()
            waiting += 1
            g = model.step(x, y, step, step * b * ridge, last=waiting == self.delay)
            self._watch(g, y)
            squares += g.square().sum(dim=0)
            targets += y.square().sum(dim=0)
            self.batches += 1
            self.rows += b
            bar.update(b)
            if waiting == self.delay:
                waiting = self._project()
            if interrupt.seen:
                raise KeyboardInterrupt
            if plan.seconds is not None and self.seconds >= plan.seconds:
                self.reason = "ran out of time"
                break
        if waiting:
            self._project()
        if not self.rows:
            raise InputError(f"The stream gave no batch in epoch {self.epoch + 1}; it must start anew at every epoch.")
        self.epoch += 1
        self._close(squares, targets, bar)

    def _cooled(self) -> float:
        """The factor of the step: 1, and in the last share of the run falling to 0."""
        share, seconds = self.plan.cooldown, self.plan.seconds
        if not share:
            return 1.0
        done = self.epoch + (min(1.0, self.rows / self.total) if self.total else 0)
        factor = (self.end - done) / (self.end - self.cooling)
        if seconds is not None:
            factor = min(factor, (1 - self.seconds / seconds) / share)
        return min(1.0, max(0.0, factor))

    def _watch(self, g: Tensor, y: Tensor) -> None:
        """Residuals that grow far beyond those of the start and the targets are no noise."""
        mean, size = float(g.square().mean(dim=0).max()), float(y.square().mean(dim=0).max())
        if self.scale != self.scale:
            self.scale = mean
        if not mean <= _DIVERGED * max(self.scale + size, torch.finfo(torch.float64).tiny):
            raise NumericalError(
                f"The fit diverges: after {self.batches} batches the mean squared residual is {mean:.1e}, at the start "
                f"it was {self.scale:.1e}. {self.plan.advice}"
            )

    def _project(self) -> int:
        self.model.project()
        self.projections += 1
        self.delay = self.plan.delay()
        weight = (_RECENT + 1) / (self.projections + _RECENT) if self.plan.averaging else 1.0
        self.average.lerp_(self.model.base, weight)
        return 0

    def _close(self, squares: Tensor, targets: Tensor, bar: Any) -> None:
        """After an epoch: keep the best weights, tell everyone, see whether to go on."""
        plan, finished = self.plan, not self.reason
        residual = (squares / targets.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().cpu()
        self.history.append(residual)
        if finished:
            self.total = self.rows
        error = None if self.held_out is None else self.held_out(self.average)
        if error is not None:
            mean = float(error.square().mean().sqrt())
            self.errors.append((float(self.epoch), self.seconds, error))
            without_noise = self.problem.streamed and self.problem.level > 0 and self.epoch == 1
            better = mean < self.least and not without_noise
            self.waited = 0 if better else self.waited + 1
            if better:
                self.least, self.best = mean, self.average.clone()
            bar.set_postfix_str(f"held-out RMSE {mean:.4g}", refresh=False)
        else:
            bar.set_postfix_str(f"residual {float(residual.max()):.2g}", refresh=False)
        seen = Epoch(self.epoch, self.seconds, residual, error, self.average.clone())
        if self.callback is not None and self.callback(seen) and finished:
            self.reason = "was stopped by the callback"
        elif finished and self.epoch >= plan.epochs:
            self.reason = "finished its epochs"
        elif finished and plan.patience is not None and self.waited >= plan.patience:
            if plan.cooldown and self.epoch < self.cooling:  # it may be the noise of a constant step
                self.cooling, self.end, self.waited = self.epoch, min(plan.epochs, self.epoch + plan.patience), 0
            elif not plan.cooldown or self.epoch >= self.cooling + plan.patience:
                self.reason = "stopped early: the held-out error no longer fell"
        elif finished and self.epoch >= self.end:
            self.reason = "stopped early: the held-out error fell no longer before the step did"

    def _relative(self, weights: Tensor) -> Tensor:
        """``||f(x) - y|| / ||y||`` of each column on the points that are checked."""
        x, y = self.checked
        found = TallMatrix(self.problem.kernel, x, self.problem.inducing_points, accurate=True).matmul(weights)
        norm = y.norm(dim=0)
        return ((found - y).norm(dim=0) / torch.where(norm > 0, norm, 1)).cpu()


def check_columns(number: int, y: Tensor, columns: int) -> None:
    """:raises InputError: unless the targets of a batch have as many columns as those before."""
    if y.shape[1] != columns:
        raise InputError(f"y of batch {number} of the stream expects {columns} column(s) as before, got {y.shape[1]}.")

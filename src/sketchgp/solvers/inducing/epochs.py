"""Epochs of EigenPro 3 and 4: batches, averaging, a falling step, early stopping, divergence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ...devices import fetched, sent
from ...errors import NumericalError
from ...report import Reason
from ...row_sources import ahead
from ..loop import ByEpochs, Outcome, largest_of
from .preconditioned_gradient import Model
from .problem import InducingPointProblem

_DIVERGED = 100.0  # mean squared residual of a batch, over that of the start and of its targets
_WORSE = 1.1  # final residual, over that of the start and over that of f = 0
_RECENT = 3  # an average of k iterates gives the last one the weight (r + 1) / (k + r)


class Epochs(ByEpochs):
    """A step is a batch, a window an epoch.

    :param choices: the solver; :param model: at f = 0.
    :param block_size: points of a batch of tensors; :param generator: of the orders of rows.
    :param checked: training points ``(c, d)`` and targets ``(c, t)`` float64 on which the weights returned are judged.
    :ivar unprojected: batches since the last projection, of ``delay`` that there are to be.
    :ivar least: held-out error so far; :ivar without_progress: windows since then.
    """

    saved: tuple[str, ...] = (
        "average", "best", "first", "order", "squares", "targets",
        "epoch", "seen", "rows", "total", "largest", "unprojected", "projections", "delay", "scale", "without_noise",
        "least", "without_progress", "end", "cooling",
    )  # fmt: skip
    letter = "m"
    judges_held_out = True

    def __init__(
        self,
        choices: Any,
        problem: InducingPointProblem,
        model: Model,
        block_size: int,
        generator: torch.Generator,
        checked: tuple[Tensor, Tensor],
    ) -> None:
        total: int | None = None if problem.streamed else len(problem.x)  # type: ignore[arg-type]
        super().__init__(problem, generator, total)
        self.name, self.device, self.expected = choices.name, problem.device, problem.expected_rows
        self.size, self.columns = model.base.shape
        self.choices, self.model, self.block_size, self.checked = choices, model, block_size, checked
        counted = (f"projection.{name}" for name in model.projection.counted)
        self.saved = (*Epochs.saved, *(f"model.{name}" for name in (*model.changed, *counted)))
        self.delay = self._next_delay()
        self.projections = self.largest = self.unprojected = self.without_progress = 0
        self.average = self.first = model.base
        self.best: Tensor | None = None
        self.scale, self.least = float("nan"), float("inf")
        self.end: float = choices.epochs
        self.cooling = (1 - choices.cooldown) * choices.epochs  # the epoch from which the step falls
        self.squares = self.targets = torch.zeros(self.columns, dtype=torch.float64)
        self.whole = self.without_noise = False

    # --- steps ----------------------------------------------------------------------------------------------

    def begin(self, initial: Tensor | None) -> Tensor:
        if initial is not None:
            self.model.base.copy_(initial)
        self.average = self.model.base.clone()
        self.first = self._relative(self.average)
        return self.first

    def step(self) -> bool:
        x, y = self.next_batch()
        model, b, level = self.model, len(x), self.problem.level
        if not self.seen:
            self.squares, self.targets = torch.zeros_like(self.squares), torch.zeros_like(self.targets)
        ridge = level / self.total if self.total else 0.0
        self.without_noise = level > 0 and not self.total
        self.largest = max(self.largest, b)  # a step for each size would weigh the points of small batches more
        step = self.choices.step_scale * model.directions.step(self.largest, ridge) * self._cooled()
        self.unprojected += 1
        g = model.step(x, y, step, step * b * ridge, last=self.unprojected == self.delay)
        self._watch(g, y)
        if self.unprojected == self.delay:
            self._project()
        self.whole = self.batch_ends(b)
        if self.whole:
            if self.unprojected:
                self._project()
            self.end_epoch(self.rows)
        return self.whole

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        problem, x = self.problem, self.problem.x
        if problem.streamed:
            for some, y in islice(problem.batches(self.columns), self.seen, None):
                yield some, y.reshape(len(y), -1).to(torch.float64)
            return
        targets = problem.y.reshape(len(x), -1)
        parts = self.order.cpu().split(self.block_size)[self.seen :]
        if torch.is_tensor(x):
            for rows in (sent(part, x.device) for part in parts):
                yield x[rows], targets[rows].to(torch.float64)
            return
        inputs = ahead(partial(x.__getitem__, rows) for rows in parts)
        for rows, some in zip(parts, inputs, strict=True):
            yield some, targets[sent(rows, targets.device)].to(torch.float64)

    def _next_delay(self) -> int:
        """Return T, the number of batches until the next projection, by what projections cost so far."""
        cost = self.model.projection.cost
        return int(self.choices.delay or self.choices.delay_for(self.problem.m, self.block_size, cost))

    def _cooled(self) -> float:
        """Return the factor of the step, which is 1 and falls to 0 in the last share of the run."""
        share = self.choices.cooldown
        if not share:
            return 1.0
        done = self.epoch + (min(1.0, self.rows / self.total) if self.total else 0)
        factor = min((self.end - done) / (self.end - self.cooling), (1 - self.time_used()) / share)
        return min(1.0, max(0.0, factor))

    def _watch(self, g: Tensor, y: Tensor) -> None:
        """Add up squares of residuals and targets.

        :raises NumericalError: where residuals grow far beyond those of the start and the targets.
        """
        squares, targets = fetched(g.square().sum(dim=0), y.square().sum(dim=0))
        self.squares, self.targets = self.squares + squares, self.targets + targets
        mean, size = (largest_of(part) / len(g) for part in (squares, targets))
        if math.isnan(self.scale):  # the first batch
            self.scale = mean
        if not mean <= _DIVERGED * max(self.scale + size, torch.finfo(torch.float64).tiny):
            raise NumericalError(
                f"The fit diverges: after {self.iterations} batches the mean squared residual is {mean:.1e}, at the "
                f"start it was {self.scale:.1e}. {self.choices.advice}",
                see="diverges",
            )

    def _project(self) -> None:
        self.model.project()
        self.projections += 1
        self.unprojected, self.delay = 0, self._next_delay()
        weight = (_RECENT + 1) / (self.projections + _RECENT) if self.choices.averaging else 1.0
        self.average = self.average.lerp(self.model.base, weight)

    # --- windows --------------------------------------------------------------------------------------------

    def estimate(self) -> Tensor:
        """``||f(x) - y|| / ||y||`` of each column over the epoch's batches, each before its own step."""
        return self.root_of_ratio(self.squares, self.targets)

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """Keep the best weights; after an epoch, see whether the next one is worth it."""
        choices = self.choices
        if held_out is not None:
            mean = float(held_out.square().mean().sqrt())
            better = mean < self.least and not self.without_noise
            self.without_progress = 0 if better else self.without_progress + 1
            if better:
                self.least, self.best = mean, self.average
        if not self.whole:
            return None
        if self.epoch >= choices.epochs:
            return Reason.FINISHED
        if choices.patience is not None and self.without_progress >= choices.patience:
            if choices.cooldown and self.epoch < self.cooling:  # it may be the noise of a constant step
                self.cooling, self.end = self.epoch, min(choices.epochs, self.epoch + choices.patience)
                self.without_progress = 0
            elif not choices.cooldown or self.epoch >= self.cooling + choices.patience:
                return Reason.EARLY
        elif self.epoch >= self.end:
            self.notes.append("the step had fallen to 0 by then")
            return Reason.EARLY
        return None

    def resume(self, ended: Reason | None) -> Reason | None:
        return ended if ended in (Reason.FINISHED, Reason.EARLY) else None

    def close(self) -> bool:
        if not self.seen:
            return False
        if self.unprojected:
            self._project()
        self.whole = False
        return True

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        """Return the best weights on the held-out points, or the last ones.

        :raises NumericalError: if they are worse than those of the start, and than none.
        """
        value = self.average if self.best is None else self.best
        residual = self._relative(value)
        if not bool((residual <= _WORSE * self.first.clamp(min=1)).all()):  # true for NaN too
            raise NumericalError(
                f"The fit diverges: relative training residual {largest_of(self.first):.1e} at the start and "
                f"{largest_of(residual):.1e} at the end. {self.choices.advice}",
                see="diverges",
            )
        facts = {"tol": float("inf"), "residual_rows": len(self.checked[0])}
        return Outcome(value, residual, False, reason, facts)

    def _relative(self, weights: Tensor) -> Tensor:
        """``||f(x) - y|| / ||y||`` of each column on the points that are checked."""
        x, y = self.checked
        values, norm = self.problem.predicting(x)(weights), y.norm(dim=0)
        return ((values - y).norm(dim=0) / torch.where(norm > 0, norm, 1)).cpu()

    def weights(self) -> Tensor:
        return self.average

    # --- work -----------------------------------------------------------------------------------------------

    @property
    def tally(self) -> dict[str, float]:
        return {"epochs": self.epochs, "projections": self.projections, **self.model.projection.tally}

    @property
    def entries(self) -> float:
        """Kernel entries evaluated so far; each pair of Kzz counts once."""
        return self.model.entries + self.model.projection.products * self.size * (self.size + 1) / 2

    @property
    def matrix_entries(self) -> float:  # type: ignore[override]
        n = self.total or self.problem.expected_rows or max(self.rows, len(self.checked[0]))
        return float(n * self.size)

"""A doubly stochastic solve as a method of the loop: batches, windows, held-out errors, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ...checks import same_points
from ...devices import sent
from ...errors import NumericalError
from ...fingerprint import row_numbers
from ...random_streams import generator
from ...report import Reason
from ..loop import ByEpochs, Outcome
from .learner import Learner
from .problem import Batch, Labels, RandomFeatureProblem

_WINDOW = 32  # the most batches between two estimates
_DIVERGED = 100.0  # loss of a window, over that of f = 0


class Learning(ByEpochs):
    """A step is a batch; a window an epoch, or 32 batches of it.

    :param choices: the solver; :param learner: that goes on from where it is.
    :param batch_size: rows of a batch of tensors, at most; :param epochs: the most.
    """

    saved: tuple[str, ...] = (
        *(f"learner.{name}" for name in (*Learner.counters, *Learner.arrays, "entries")),
        "order", "losses", "losses_of_none", "epoch", "seen", "rows", "total", "window",
    )  # fmt: skip
    letter = "features"

    def __init__(
        self, choices: Any, problem: RandomFeatureProblem, learner: Learner, batch_size: int, epochs: int
    ) -> None:
        stream = generator(choices.seed + learner.steps, "doubly stochastic gradients: rows")
        super().__init__(problem, stream, problem.n)
        self.name, self.learner, self.batch_size = choices.name, learner, batch_size
        self.device = learner.coefficients.device
        if isinstance(problem.targets, Labels):
            self.saved = (*Learning.saved, "problem.targets.classes")
            self.measure = "wrong held-out labels"
        self.choices, self.most = choices, epochs
        learner.begin(*(t for t in (problem.x, problem.y) if torch.is_tensor(t)))
        learner.entries, self._visited = 0, learner.visited  # of this solve, and before it
        self.losses = self.losses_of_none = torch.ones(self._shown, dtype=torch.float64)
        self.window = 0

    @property
    def size(self) -> int:  # type: ignore[override]
        """Features so far, or in all."""
        return 2 * (self.learner.total or len(self.learner.coefficients))

    # --- steps ----------------------------------------------------------------------------------------------

    def begin(self, initial: Tensor | None) -> Tensor:
        return torch.ones(self._shown, dtype=torch.float64)

    @property
    def _shown(self) -> int:
        """Columns of the residual."""
        return 1 if self.problem.loss != "squared" else self.problem.targets.columns

    def step(self) -> bool:
        x, y = self.next_batch()
        learner, problem, seen = self.learner, self.problem, self.rows + len(x)
        places = torch.arange(self.rows, seen) if problem.streamed else self.order[self.rows : seen]
        owner = f"batch {self.seen} of epoch {self.epoch}"
        same_points(owner, x, learner.features.origin)
        own = problem.targets.encode(owner, y)
        whole = not problem.streamed and len(x) == self.total
        targets = learner.all_columns(own, x, lambda: self._numbers(x, own, places))
        n = self.total or learner.rows + len(x)
        if not self.window:
            self.losses = self.losses_of_none = torch.zeros_like(self.losses)
        first_time = problem.streamed and self.epoch == 0  # up to the n that the stream is said to have
        new = learner.room(len(x), problem.rows) if first_time else 0
        losses, losses_of_none = learner.step(x, targets, problem.noise / n, whole, new)
        self.losses = self.losses + losses[: self._shown]
        self.losses_of_none = self.losses_of_none + losses_of_none[: self._shown]
        self.window += 1
        ended = self.batch_ends(len(x))
        if ended:
            self.end_epoch(self.problem.rows or self.rows)
        return ended or self.window == _WINDOW or self._done

    def _numbers(self, x: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        """Return numbers that rows are known by; where rows of a stream may come again, made of their contents."""
        if self.problem.streamed and (self.most > 1 or self.problem.rows is not None):
            return row_numbers(x, targets)
        return places.to(x.device) + self.learner.first

    def batches(self) -> Iterator[Batch]:
        problem = self.problem
        if torch.is_tensor(problem.x):
            parts = -(-len(problem.x) // self.batch_size)
            for rows in self.order.cpu().tensor_split(parts)[self.seen :]:
                rows = sent(rows, problem.x.device)
                yield problem.x[rows], problem.y[rows]
            return
        yield from islice(problem.batches(), self.seen, None)

    # --- windows --------------------------------------------------------------------------------------------

    def estimate(self) -> Tensor:
        """The root of the loss over the window's batches, each before its own step, over that of f = 0: the relative
        residual of each column for the squared loss."""
        self.window = 0
        return self.root_of_ratio(self.losses, self.losses_of_none)

    def judge(self, held_out: Tensor | None) -> Reason | None:
        if self.iterations and not bool((self.losses <= _DIVERGED**2 * self.losses_of_none + 1e-300).all()):
            raise NumericalError(
                f"Learning diverges: after {self.iterations} batches the loss is {float(self.losses.max()):.1e}, that "
                f"of f = 0 is {float(self.losses_of_none.max()):.1e}. Choose a smaller step_scale or larger batches.",
                see="diverges",
            )
        return Reason.FINISHED if self._done else None

    @property
    def _done(self) -> bool:
        """Return whether all epochs, or iterations, are done."""
        most = self.choices.max_iterations
        enough = most is not None and self.iterations >= most
        return enough or self.epoch >= self.most

    def resume(self, ended: Reason | None) -> Reason | None:
        return Reason.FINISHED if self._done else None

    def close(self) -> bool:
        return self.window > 0

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        residual = self.root_of_ratio(self.losses, self.losses_of_none)
        return Outcome(self.weights(), residual, False, reason, {"tol": float("inf"), "residual_rows": 0})

    def weights(self) -> Tensor:
        """``(N, c)``: of the pairs one after the other."""
        return self.learner.average.flatten(0, 1)

    # --- work -----------------------------------------------------------------------------------------------

    @property
    def tally(self) -> dict[str, float]:
        return {"epochs": self.epochs, "sweeps": (self.learner.visited - self._visited) / self._pairs}

    @property
    def _pairs(self) -> int:
        return self.learner.total or max(1, len(self.learner.coefficients))

    @property
    def entries(self) -> float:
        return float(self.learner.entries)

    @property
    def matrix_entries(self) -> float:  # type: ignore[override]
        return float((self.total or max(1, self.rows)) * 2 * self._pairs)

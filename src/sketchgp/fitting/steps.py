"""What all optimisers share: steps are noted, the best one is kept, and a fit ends where it is to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .history import SETTLED, WIDENED, FitHistory
from .objective import Objective

_WIDENS = 1.5
NOT_FINITE = "met a loss or gradient that is not finite"


class Steps:
    """The steps of one fit, or of one of its runs.

    :param limit: the most steps; :param bar: a progress bar; :param callback: called with step and loss.
    :param settled: of the losses so far and ``tol``: whether to end.
    :param widest: a run by bounds ends where they are wider than this, and than one and a half times what they were at
        its first step; :param best: the parameters of the best step of the run before.

    :ivar first: how many steps there were before this run.
    :ivar best: the parameters of the best step.
    """

    def __init__(
        self,
        objective: Objective,
        history: FitHistory,
        limit: int,
        bar: Any,
        callback: Callable[[int, float], Any] | None,
        settled: Callable[[list[float], float], bool],
        tol: float,
        began: float,
        widest: float = math.inf,
        best: list[Tensor] | None = None,
    ) -> None:
        self.objective, self.history, self.limit, self.bar = objective, history, limit, bar
        self.callback, self.settled, self.tol, self.began = callback, settled, tol, began
        self.first, self.widest = len(history.losses), widest
        self.best = objective.state() if best is None else best

    def note(self, value: float, gradient: float, state: list[Tensor], width: float | None = None) -> bool:
        """After a step: whether the run ends here.

        :param gradient: its norm; :param state: of the parameters; :param width: of the bounds of the loss.
        """
        history = self.history
        history.losses.append(value)
        history.gradients.append(gradient)
        history.seconds.append(time.perf_counter() - self.began)
        history.widths.append(width)
        if len(history.losses) == self.first + 1:
            history.best_step, self.best = self.first, state
            self.widest = max(self.widest, _WIDENS * (width or 0))
        elif value < history.best_loss:
            history.best_step, self.best = len(history.losses) - 1, state
        self.bar.set_postfix_str(f"loss {value:.4f}", refresh=False)  # before update, which shows it
        self.bar.update()
        if self.callback is not None and self.callback(len(history.losses) - 1, value):
            history.reason = "stopped by the callback"
        elif width is not None and width > self.widest:
            history.reason = WIDENED
        elif self.settled(history.losses[self.first :], self.tol):
            history.reason = SETTLED
        elif len(history.losses) >= self.limit:
            history.reason = "ran all iterations before the loss had settled"
        else:
            return False
        return True

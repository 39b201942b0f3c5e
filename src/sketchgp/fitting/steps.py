"""What all optimisers share: steps are noted, the best one is kept, and a fit ends where it is to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .history import SETTLED, FitHistory
from .objective import Objective

NOT_FINITE = "met a loss or gradient that is not finite"


class Steps:
    """The steps of one fit.

    :param limit: the most steps; :param bar: a progress bar; :param callback: called with step and loss.
    :param settled: of the losses so far and ``tol``: whether to end.

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
    ) -> None:
        self.objective, self.history, self.limit, self.bar = objective, history, limit, bar
        self.callback, self.settled, self.tol, self.began = callback, settled, tol, began
        self.best = objective.state()

    def note(self, value: float, gradient: float, state: list[Tensor]) -> bool:
        """After a step: whether the fit ends here.

        :param gradient: its norm; :param state: of the parameters.
        """
        history = self.history
        history.losses.append(value)
        history.gradients.append(gradient)
        history.seconds.append(time.perf_counter() - self.began)
        if value < history.best_loss or len(history.losses) == 1:
            history.best_step, self.best = len(history.losses) - 1, state
        self.bar.set_postfix_str(f"loss {value:.4f}", refresh=False)  # before update, which shows it
        self.bar.update()
        if self.callback is not None and self.callback(len(history.losses) - 1, value):
            history.reason = "stopped by the callback"
        elif self.settled(history.losses, self.tol):
            history.reason = SETTLED
        elif len(history.losses) >= self.limit:
            history.reason = "ran all iterations before the loss had settled"
        else:
            return False
        return True

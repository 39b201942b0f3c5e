"""What all optimisers share: steps are noted, the best one is kept, and a fit ends where it is to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..density import standard_error
from .history import DEAR, SETTLED, STOPPED, WIDENED, FitHistory
from .objective import Objective
from .record import Evaluation

_WIDENS = 1.5
NOT_FINITE = "met a loss or gradient that is not finite"
# (trials, times the tolerance): so many of a line search, one after the other, that came to nothing but losses so near
# to where it began; the second by solves only, as on a plateau exact losses lead away from it
_IN_VAIN = ((4, 1.0), (2, 0.1))
_SHARE = 0.5  # of its standard error, below which an improvement is none


class Steps:
    """The steps of one fit, or of one of its runs.

    :param limit: the most steps; :param bar: a progress bar; :param callback: called with step and loss.
    :param improvement: what the latest of a sequence took off, linear in its members; None where it is too short.
    :param tol: the loss has settled when the improvement is smaller.  An estimated loss has settled, too, when the
        improvement is smaller than half its own standard error: what each probe says of it tells that, and as the same
        probes make all losses it is far smaller than that of a loss, and falls with the length of the steps.
    :param widest: a run by bounds ends where they are wider than this, and than one and a half times what they were at
        its first step; :param best: the parameters of the best step of the run before.
    :param dearest: a run ends where an evaluation takes more products with the kernel matrix.

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
        improvement: Callable[[Sequence[Any]], Any],
        tol: float,
        began: float,
        widest: float = math.inf,
        best: list[Tensor] | None = None,
        dearest: float = math.inf,
    ) -> None:
        self.objective, self.history, self.limit, self.bar = objective, history, limit, bar
        self.callback, self.improvement, self.tol, self.began = callback, improvement, tol, began
        self.first, self.widest, self.dearest = len(history.losses), widest, dearest
        self.best = objective.state() if best is None else best
        self._probes: list[tuple[Tensor, ...]] = []  # of each step
        self._since: list[Evaluation] = []  # the step before: those of a line search under way

    def count(self, found: Evaluation) -> None:
        """After each evaluation, those of a line search among them."""
        self.history.evaluations += 1
        self._since.append(found)

    def note(self, found: Evaluation, gradient: float, state: list[Tensor]) -> bool:
        """After a step: whether the run ends here.

        :param gradient: its norm; :param state: of the parameters.
        """
        history, value, width = self.history, found.value, found.width
        error = standard_error(found.probes)
        history.losses.append(value)
        history.standard_errors.append(error)
        history.gradients.append(gradient)
        history.residuals.append(max((one.residual for one in self._since), default=0.0))
        history.iterations.append(sum(one.iterations for one in self._since))
        history.products.append(sum(one.products for one in self._since))
        history.seconds.append(max((one.clock for one in self._since), default=found.clock) - self.began)
        history.widths.append(width)
        for name, values in self.objective.named(state).items():
            history.hyperparameters.setdefault(name, []).append(values)
        self._since.clear()
        self._probes.append(found.probes)
        if len(history.losses) == self.first + 1:
            history.best_step, self.best = self.first, state
            self.widest = max(self.widest, _WIDENS * (width or 0))
        elif value < history.best_loss:
            history.best_step, self.best = len(history.losses) - 1, state
        self.bar.set_postfix_str(history.latest(), refresh=False)  # before update, which shows it
        self.bar.update()
        if self.callback is not None and self.callback(len(history.losses) - 1, value):
            history.reason = STOPPED
        elif width is not None and width > self.widest:
            history.reason = WIDENED
        elif found.products > self.dearest:
            history.reason = DEAR
        elif self._settled():
            history.reason = SETTLED
        elif len(history.losses) >= self.limit:
            history.reason = "ran all iterations before the loss had settled"
        else:
            return False
        return True

    @property
    def in_vain(self) -> bool:
        """Whether a line search meets nothing but what solves leave of a loss.

        SciPy's goes on for twenty evaluations, and for as many again along the gradient.
        """
        losses = self.history.losses[self.first :]
        if len(losses) < 2:
            return False
        apart = [abs(trial.value - losses[-1]) for trial in self._since]
        rules = _IN_VAIN[:1] if self.objective.exact else _IN_VAIN
        return any(len(apart) >= most and max(apart[-most:]) < share * self.tol for most, share in rules)

    def _settled(self) -> bool:
        gain = self.improvement(self.history.losses[self.first :])
        if gain is None or gain < self.tol or self.tol <= 0:
            return gain is not None and gain < self.tol
        error = standard_error([self.improvement(each) for each in zip(*self._probes, strict=False)])
        return gain < _SHARE * error < math.inf

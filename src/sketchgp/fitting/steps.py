"""Steps that all minimisers share: each is recorded, the best one is kept, and a run ends where it is to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from ..density import standard_error
from .history import AGED, DEAR, LOST, SETTLED, STOPPED
from .record import Evaluation

_NEAR = 4  # steps of L-BFGS over which a loss is judged near a minimum
_SPAN = {"exact": 10, "bound": 10, "vecchia": 10}  # and elsewhere, by the kind of the loss
_ESTIMATED = 3  # of other kinds
NOT_FINITE = "met a loss or gradient that is not finite"
# (trials, factor on the tolerance): a line search is in vain after so many trials in a row whose losses are that near
# to where it began.  The second holds for solves only, as exact losses lead away from a plateau.
_IN_VAIN = ((4, 1.0), (2, 0.1))
_SHARE = 0.5  # of its standard error, below which an improvement is none


class Steps:
    """The steps of one run of an optimiser in a stage of a fit.

    A loss has settled when the improvement is smaller than the stage's tolerance.  An estimated loss has settled, too,
    when the improvement is smaller than half its own standard error.  The same probes make all losses, so that this is
    far smaller than the standard error of a loss, and falls with the length of the steps.

    :param stage: the :class:`.stage.Stage`.
    :param bar: a progress bar.
    :param callback: called with step and loss.
    :param began: time at which the fit began, by ``time.perf_counter``.

    :ivar first: number of steps before this run.
    :ivar best: the parameters of the best step, of this run or the one before.
    :ivar changed: whether losses are by float64 products now, and were not at the first step.
    :ivar dearest: a run ends where an evaluation takes more products with the kernel matrix.
    :ivar longest: the most steps of a run.
    :ivar thorough: whether losses are exact and the stage is the last.
    """

    def __init__(self, stage: Any, bar: Any, callback: Callable[[int, float], Any] | None, began: float) -> None:
        self.objective, self.history, self.limit, self.tol = stage.objective, stage.history, stage.limit, stage.tol
        self.bar, self.callback, self.began, self.longest = bar, callback, began, stage.longest
        self.first, self.best = len(self.history.losses), stage.best or self.objective.state()
        span = _SPAN.get(self.history.objective, _ESTIMATED)
        self._span = span if stage.inverse_hessian is None else min(span, _NEAR)
        self._probes: list[tuple[Tensor, ...]] = []  # of each step
        self._since: list[Evaluation] = []  # evaluations since the last step: those of a line search
        self._doubled: float | None = None  # at the first one
        self.changed, self.dearest, self.thorough = False, math.inf, stage.full and stage.objective.exact

    def count(self, evaluation: Evaluation) -> None:
        """Count an evaluation, those of a line search among them."""
        self.history.evaluations += 1
        self._since.append(evaluation)
        self.changed = self._doubled not in (None, evaluation.doubled)

    def note(self, evaluation: Evaluation, gradient: float, state: list[Tensor]) -> bool:
        """Record a step; return whether the run ends here.

        :param gradient: norm of the gradient.
        :param state: state of the parameters.
        """
        history, value = self.history, evaluation.value
        history.losses.append(value)
        history.standard_errors.append(standard_error(evaluation.probes))
        history.gradients.append(gradient)
        history.residuals.append(max((one.residual for one in self._since), default=0.0))
        history.iterations.append(sum(one.iterations for one in self._since))
        history.products.append(sum(one.products for one in self._since))
        history.seconds.append(max((one.clock for one in self._since), default=evaluation.clock) - self.began)
        for name, values in self.objective.named(state).items():
            history.hyperparameters.setdefault(name, []).append(values)
        self._since.clear()
        self._probes.append(evaluation.probes)
        if len(history.losses) == self.first + 1:
            history.best_step, self.best, self._doubled = self.first, state, evaluation.doubled
        elif value < history.best_loss:
            history.best_step, self.best = len(history.losses) - 1, state
        self.bar.set_postfix_str(history.latest(), refresh=False)  # before update, which shows it
        self.bar.update()
        if self.callback is not None and self.callback(len(history.losses) - 1, value):
            history.reason = STOPPED
        elif self.changed:
            history.reason = LOST
        elif evaluation.products > self.dearest:
            history.reason = DEAR
        elif self._settled():
            history.reason = SETTLED
        elif len(history.losses) >= self.limit:
            history.reason = "ran all iterations before the loss had settled"
        elif len(history.losses) - self.first >= self.longest:
            history.reason = AGED
        else:
            return False
        return True

    @property
    def in_vain(self) -> bool:
        """True if a line search finds nothing but the errors that solves leave in a loss.

        SciPy's goes on for twenty evaluations, and for as many again along the gradient.
        """
        losses, trials = self.history.losses[self.first :], [trial.value for trial in self._since]
        # a plateau of an exact loss is left faster with each trial
        leaves = self.objective.exact and trials and trials[-1] < min(losses[-1:] + trials[:-1])
        if len(losses) < 2 or leaves:
            return False
        apart, rules = [abs(value - losses[-1]) for value in trials], _IN_VAIN[: 1 if self.objective.exact else None]
        return any(len(apart) >= most and max(apart[-most:]) < share * self.tol for most, share in rules)

    @property
    def ahead(self) -> float:
        """Improvement of the last step or of all to come, by a geometric series through the last three: the larger.

        Infinite for the exact losses of a last stage: they cost little, and often fall again after a few short steps.
        """
        losses = self.history.losses[self.first :]
        if len(losses) < 4 or self.thorough:
            return math.inf
        first, second, last = (before - after for before, after in pairwise(losses[-4:]))
        ratio = max(second / first, last / second) if min(first, second) > 0 else math.inf
        return max(last, last * ratio / (1 - ratio)) if ratio < 1 else math.inf

    def _improvement(self, losses: Sequence[Any]) -> Any:
        """Return the improvement at the end of losses, which is linear in them; None where they are too few."""
        if self.history.optimizer == "adam":
            return None if len(losses) < 10 else sum(losses[-10:-5]) / 5 - sum(losses[-5:]) / 5
        return losses[-1 - self._span] - losses[-1] if len(losses) > self._span else None

    def _settled(self) -> bool:
        gain = self._improvement(self.history.losses[self.first :])
        if gain is None or gain < self.tol or self.tol <= 0:
            return gain is not None and gain < self.tol
        error = standard_error([self._improvement(each) for each in zip(*self._probes, strict=False)])
        return gain < _SHARE * error < math.inf

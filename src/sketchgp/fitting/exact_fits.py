"""Fits by exact losses that others begin with: to some of the rows, and from other starts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from ..errors import NumericalError
from .history import STOPPED, UNSURE, FitHistory
from .lbfgs import InverseHessian, improvement, lbfgs
from .noises import centre_mean, mean_square, set_noise
from .objective import Objective
from .record import Record
from .scales import Woken, set_scale, spread
from .steps import Steps

MOST = 500  # steps of L-BFGS
SPAN = 10  # of them over which an exact loss is judged,
NEAR = 4  # and near a minimum
_FAR = 1.0  # nats a row
_SAME = 0.002  # nats a row between ends of different starts that are one minimum
# Other starts: lengthscales over the size of the inputs, and noises over the targets' variance.  Of 124 problems of 160
# and 400 rows the best of three ends was more than 0.1 a row above the best of eleven on 3, that from the model's start
# on 27, and the better one of that and of lengthscales of the size of the inputs, with the model's noise, on 9.
_OTHERS = (("long lengthscales", 3.0, 1e-2), ("short ones", 0.3, 1e-3))
_IN_DOUBT = ("much noise", 1.0, 0.3)  # one more, where no two of the others came to the lowest end


class Stopped(Exception):
    """The callback has ended a fit before its first step on all rows."""


class ExactFits:
    """Runs of L-BFGS that precede the fit to all rows.

    :param record: keeps their evaluations; :param show: whether to show progress.
    :param callback: called with step and loss; :param most: steps of each.

    :ivar best: the best parameters of the latest one, while it is under way, too; None before there is a loss.
    """

    def __init__(
        self, record: Record, show: bool, callback: Callable[[int, float], Any] | None = None, most: int = MOST
    ) -> None:
        self.record, self.show, self.callback, self.most = record, show, callback, most
        self.best: list[Tensor] | None = None

    def run(
        self,
        part: Objective,
        found: FitHistory,
        inverse: InverseHessian | None,
        tol: float,
        woken: list[Woken] | None = None,
    ) -> tuple[InverseHessian | None, list[Tensor]]:
        """From where a model is: about the inverse Hessian at the least loss, and the parameters there.

        :param found: gets its steps; :param inverse: about the inverse Hessian where it begins, or None.
        :param woken: lengthscales to be judged first.
        :raises Stopped: where the callback says so.
        """
        part.stage = self.record.stage(None)
        with tqdm(total=self.most, desc=f"{found.rows} rows", unit="step", disable=not self.show, leave=False) as bar:
            judged = partial(improvement, span=SPAN if inverse is None else NEAR)
            steps = Steps(part, found, self.most, bar, self.callback, judged, tol, self.record.began)
            try:
                judge_woken(steps, woken or [])
                after = lbfgs(part, steps, inverse)
                if found.reason == STOPPED:
                    raise Stopped
                return inverse if after is None else after, steps.best
            finally:
                self.best = steps.best if found.losses else self.best

    def elsewhere(
        self, part: Objective, start: list[Tensor], before: FitHistory, tol: float
    ) -> tuple[FitHistory, InverseHessian | None, list[Tensor]] | None:
        """From long and from short lengthscales, and little noise: the lower one's history and what :meth:`run` finds,
        if that is lower than before by more than the tolerance.  Where only one start came to the lowest end, one more
        is tried, with much noise.  Notes say what came of it.

        :param start: the parameters of the start before, which stay but for lengthscales, noise, output scales and the
            constant of the mean.
        :param before: of the fit from there.
        """
        ends, lowest, kept = {"the first one": before.best_loss}, None, self.best
        for name, times, noise in (*_OTHERS, _IN_DOUBT):
            if name == _IN_DOUBT[0] and not _alone(ends.values(), tol):
                break
            part.restore(start)
            if not spread(part.model, times):
                continue
            centre_mean(part.model)
            set_noise(part.model, noise)
            set_scale(part.model, mean_square(part.model))
            found = history_of(part)
            try:
                inverse, best = self.run(part, found, None, tol)
            except NumericalError:
                before.notes.append(f"the start from {name} failed: its first loss is not finite")
                continue
            finally:
                self.best = kept if lowest is None else lowest[2]
            ends[name] = found.best_loss
            least = before.best_loss if lowest is None else lowest[0].best_loss
            if found.best_loss < least - max(tol, 0.0):
                lowest = found, inverse, best
        self.best = kept
        if len(ends) > 1:
            notes = before.notes if lowest is None else lowest[0].notes
            words = ", ".join(f"from {name} {loss:.4f}" for name, loss in ends.items())
            notes.append(f"the best of {len(ends)} starts: {words}")
            if _alone(ends.values(), tol):
                notes.append(
                    f"{UNSURE}: of {len(ends)} starts one alone came to this loss, another may find a lower one"
                )
        return lowest


def _alone(ends: Collection[float], tol: float) -> bool:
    """Whether only one of several starts came to the lowest end; :param tol: that they have settled by."""
    lowest = sorted(ends)[:2]
    return len(lowest) == 2 and lowest[1] > lowest[0] + max(_SAME, 10 * tol)


def history_of(part: Objective) -> FitHistory:
    """Of a fit by exact losses to be done."""
    return FitHistory(
        optimizer="lbfgs", objective="exact" if part.exact else "bound", rows=len(part.model.train_targets)
    )


def judge_woken(steps: Steps, woken: list[Woken]) -> None:
    """One evaluation says which of the inputs that fewer rows took for none do matter; none is left to be judged.

    Where it is far above the loss of fewer rows, they were right, and all lengthscales are theirs again: inputs that
    are labels indeed, of patients say, would take all that a fit has learned with them.
    """
    if not woken:
        return
    found, fewer = steps.objective.evaluate(), steps.history.subset
    steps.count(found)
    wrong = fewer is not None and not found.value <= fewer.best_loss + _FAR
    for one in woken:
        one.take_back() if wrong else one.judge()
    woken.clear()

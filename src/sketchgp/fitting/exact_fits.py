"""Fits by exact losses that others begin with: to some of the rows, and from other starts."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import NumericalError
from .history import FitHistory
from .lbfgs import improvement, lbfgs
from .noises import set_noise, targets_variance
from .objective import Objective
from .record import Record
from .scales import Woken, set_scale, spread
from .steps import Steps

MOST = 500  # steps of L-BFGS
SPAN = 10  # of them over which an exact loss is judged,
NEAR = 4  # and near a minimum
_FAR = 1.0  # nats a row
# Other starts: lengthscales over the size of the inputs, and noises over the targets' variance.  Of 124 problems of 160
# and 400 rows the best of three ends was more than 0.1 a row above the best of eleven on 3, that from the model's start
# on 27, and the better one of that and of lengthscales of the size of the inputs, with the model's noise, on 9.
_OTHERS = (("long lengthscales", 3.0, 1e-2), ("short ones", 0.3, 1e-3))


class ExactFits:
    """
    :param record: keeps their evaluations; :param show: whether to show progress.

    :ivar best: the best parameters of the latest one, while it is under way, too; None before there is a loss.
    """

    def __init__(self, record: Record, show: bool) -> None:
        self.record, self.show = record, show
        self.best: list[Tensor] | None = None

    def run(
        self,
        part: Objective,
        found: FitHistory,
        inverse: np.ndarray | None,
        tol: float,
        woken: list[Woken] | None = None,
        most: int = MOST,
    ) -> tuple[np.ndarray | None, list[Tensor]]:
        """From where a model is: about the inverse Hessian at the least loss, and the parameters there.

        :param found: gets its steps; :param inverse: about the inverse Hessian where it begins, or None.
        :param woken: lengthscales to be judged first; :param most: steps.
        """
        part.stage = self.record.stage(None)
        with tqdm(total=most, desc=f"{found.rows} rows", unit="step", disable=not self.show, leave=False) as bar:
            judged = partial(improvement, span=SPAN if inverse is None else NEAR)
            steps = Steps(part, found, most, bar, None, judged, tol, self.record.began)
            try:
                judge_woken(steps, woken or [])
                after = lbfgs(part, steps, inverse)
                return inverse if after is None else after, steps.best
            finally:
                self.best = steps.best if found.losses else self.best

    def elsewhere(
        self, part: Objective, start: list[Tensor], before: FitHistory, tol: float, most: int = MOST
    ) -> tuple[FitHistory, np.ndarray | None, list[Tensor]] | None:
        """From long and from short lengthscales, and little noise: the lower one's history and what :meth:`run` finds,
        if that is lower than before by more than the tolerance.  A note says what came of it.

        :param start: the parameters of the start before, which stay but for lengthscales and noise, and output scales
            that are of another unit than the targets.
        :param before: of the fit from there.
        """
        ends, lowest, kept = [f"from the first one {before.best_loss:.4f}"], None, self.best
        for name, times, noise in _OTHERS:
            part.restore(start)
            if not spread(part.model, times):
                continue
            set_noise(part.model, noise)
            set_scale(part.model, targets_variance(part.model))
            found = history_of(part)
            try:
                inverse, best = self.run(part, found, None, tol, most=most)
            except NumericalError:
                continue
            finally:
                self.best = kept if lowest is None else lowest[2]
            ends.append(f"from {name} {found.best_loss:.4f}")
            least = before.best_loss if lowest is None else lowest[0].best_loss
            if found.best_loss < least - max(tol, 0.0):
                lowest = found, inverse, best
        self.best = kept
        if len(ends) > 1:
            (before if lowest is None else lowest[0]).notes.append(f"the best of {len(ends)} starts: {', '.join(ends)}")
        return lowest


def history_of(part: Objective) -> FitHistory:
    """Of a fit by exact losses to be done."""
    return FitHistory(optimizer="lbfgs", objective="exact", rows=len(part.model.train_targets))


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

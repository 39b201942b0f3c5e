"""One stage of a fit: some of the rows, the density that makes its losses, and how it goes on with another density."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..density import Bound, Exact, Probes, Vecchia, standard_error
from ..report import shortfall_counted
from .history import AGED, SETTLED, FitHistory
from .minimise import STEEP, STUCK, InverseHessian
from .objective import Objective
from .plan import exact_objective
from .starts import Revived
from .steps import Steps

ENDED = (SETTLED, STUCK, STEEP)  # reasons of a fit that nothing has cut short
_WORSE = 1.0  # nats a row by which the loss of more rows may be above that of fewer
_WIDEST = 0.1  # nats a row that a bracket of the loss may leave open
_RENEWALS = 6  # of the neighbours, before Vecchia's approximation is left as it is
_FIRST = 4  # steps before the first of them
_OTHERS = 2**40  # added to the seed of a fit for probes that it has not seen


@dataclass(eq=False)
class Stage:
    """One stage of a fit.

    :param base: the losses as the model computes them; those of an exact fit to some of the rows are exact.
    :param kind: how losses are computed: ``"exact"``, ``"bound"``, ``"probes"``, ``"samples"``, ``"vecchia"`` or
        ``"given"``.
    :param history: records the stage.
    :param tol: the tolerance that its losses settle by.
    :param limit: the most steps.
    :param full: whether the stage is the last one, on all rows.
    :param few: whether it precedes another one of few rows, which then judges its noise.

    :ivar objective: the losses that are minimised now.
    :ivar several: whether other starts are compared.
    :ivar start: the parameters that the first start began with.
    :ivar steps: the steps of the latest run.
    :ivar inverse_hessian: the inverse Hessian where the stage is, approximately; None where it is not known.
    :ivar revived: lengthscales to be judged at the first loss.
    :ivar flat: why the loss is flat at the start, or "".
    """

    base: Objective
    kind: str
    history: FitHistory
    tol: float
    limit: int
    full: bool
    few: bool = False
    several: bool = False
    flat: str = ""
    start: list[Tensor] | None = None
    steps: Steps | None = None
    inverse_hessian: InverseHessian | None = None
    revived: list[Revived] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.objective = self.base

    @classmethod
    def exact(cls, twin: Any, tol: float, limit: int, few: bool = False) -> Stage:
        """Return the stage of exact losses of a copy with some of the rows, or of its bound on inducing points."""
        base = Objective(twin.model, twin)
        base.density = None if base.acceleration is None else Exact()
        kind = "exact" if base.exact else "bound"
        history = FitHistory(optimizer="lbfgs", objective=kind, rows=len(twin.model.train_targets))
        return cls(base, kind, history, tol, limit, False, few)

    @classmethod
    def vecchia(cls, full: Stage, density: Vecchia) -> Stage:
        """Return the stage before one on all rows, of the same model by Vecchia's approximation."""
        history = FitHistory(optimizer="lbfgs", objective="vecchia", rows=full.history.rows)
        stage = cls(full.base, "vecchia", history, full.tol, full.limit, False)
        stage.objective = full.base.by(density)
        return stage

    @property
    def best(self) -> list[Tensor] | None:
        """The parameters of the best step; None before the first."""
        return self.steps.best if self.steps is not None and self.history.losses else None

    def judge_revived(self) -> None:
        """Judge by one evaluation which lengthscales, of inputs that fewer rows found irrelevant, do matter.

        Where the loss is far above that of fewer rows, all lengthscales are put back: inputs that are labels indeed, of
        patients say, would take all that a fit has learned with them.
        """
        if not self.revived or self.steps is None:
            return
        evaluation, fewer = self.objective.evaluate(), self.history.subset
        self.steps.count(evaluation)
        wrong = fewer is not None and not evaluation.value <= fewer.best_loss + _WORSE
        for one in self.revived:
            one.judge(wrong)
        self.revived.clear()

    @property
    def longest(self) -> float:
        """The most steps of the next run: neighbours are chosen anew after few steps at first, and then after more."""
        done = len(self.history.restarts)
        return _FIRST * 2**done if self.kind == "vecchia" and done < _RENEWALS else math.inf

    def renew_neighbors(self) -> bool:
        """Choose neighbours anew where the latest run has moved away from those it had; return whether it has."""
        history, steps, cache = self.history, self.steps, self.objective.cache
        if self.longest == math.inf or history.reason not in (*ENDED, AGED):
            return False
        assert steps is not None and cache is not None
        if len(history.losses) <= steps.first + 1:  # it has ended where it began
            return False
        cache.release()
        self.begin_anew()
        return True

    def begin_anew(self) -> None:
        """Begin another run from the best parameters, as losses are values of another function from here on."""
        assert self.steps is not None
        self.base.restore(self.steps.best)
        self.history.restarts.append(len(self.history.losses))

    def leave_long_solves(self) -> None:
        """Go on with exact losses from the best parameters, where solves take longer than a factorization."""
        assert self.base.acceleration is not None
        self.begin_anew()
        self.base.acceleration.cache.release()
        self.objective, self.kind = exact_objective(self.base), "exact"
        self.history.objective, done = self.kind, len(self.history.losses)
        self.history.notes.append(
            f"after {done} steps the solves of a loss took longer than a factorization: went on with those"
        )

    def by_other_probes(self, seed: int, count: int) -> tuple[float, float] | None:
        """Return the loss by probes that no step has seen, and its standard error; None without probes.

        A fit of many parameters follows the errors of its own probes: its losses are too low.

        :param seed: the seed of the fit; ``count`` is the number of its probes.
        """
        acceleration, history = self.base.acceleration, self.history
        if acceleration is None or self.kind != "probes":
            return None
        if history.best_step == 0:  # no step has followed the errors of its probes
            return history.losses[0], history.standard_errors[0]
        acceleration.cache.clear()  # for pivots of these parameters, whatever the fit was begun with
        with acceleration.having(probe_seed=seed + _OTHERS, probe_count=count):
            result = self.base.by(Probes(watched=True, still=True)).evaluate()
        return (result.value, standard_error(result.probes)) if result.probes and math.isfinite(result.value) else None

    def bracket(self) -> tuple[float, float] | None:
        """Return the two ends of the exact loss in the model's dtype; None where they are not known."""
        base, objective, history, acceleration = self.base, self.objective, self.history, self.base.acceleration
        if objective.exact:
            value = history.best_loss
            if objective.model is not base.model:  # parameters were rounded
                objective.restore(base.state())
                value = objective.evaluate(gradient=False).value
            return (value, value) if math.isfinite(value) else None
        if self.kind != "probes" or acceleration is None or not acceleration.preconditions():
            return None
        for accurate in (False, True):
            candidate = exact_objective(base) if accurate else base
            bound = Bound(_WIDEST * base.rows)
            with shortfall_counted():
                value = candidate.by(bound).evaluate(gradient=False).value
            if bound.gap == math.inf:
                return None
            if bound.gap is None and math.isfinite(value):
                history.objective = "given"
                history.notes.append("GPyTorch inverts the covariance by its structure: there is nothing to bound")
                return None
            if bound.gap is not None and math.isfinite(value - bound.gap):
                return value - bound.gap / base.rows, value
        return None

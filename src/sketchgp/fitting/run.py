"""One fit: how losses are computed, from where it starts, and its runs, one after the other."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..accelerate import acceleration_of
from ..density import Bound, Exact, Probes, Samples, TooWide
from ..errors import InputError, warn
from ..fingerprint import tensor_mark
from ..memory import out_of_memory
from ..models.accelerated.acceleration import Acceleration
from ..solvers.loop import compare_ranks
from .adam import adam
from .adam import improvement as adam_improvement
from .before import Before
from .exact_fits import MOST, NEAR, SPAN, ExactFits, Stopped, history_of, judge_woken
from .history import DEAR, FLAT, SETTLED, STOPPED, WIDENED, FitHistory
from .lbfgs import STEEP, STUCK, InverseHessian, lbfgs
from .lbfgs import improvement as lbfgs_improvement
from .noises import raise_noise, to_unit
from .objective import Objective
from .record import Record, fit_marks
from .route import WIDTH, bound_at_last, dearest, factorized, judge_end, new_bound, next_objective, route
from .scales import Woken, flatness, rescale, wake
from .start import exact_objective, on_subset, rows_before
from .steps import Steps

_FEW = 1000  # rows that fits to more begin with; three fits tell the best one of three starts, of as many, or of
_FEWEST = 500  # in fits to fewer than 8,000 rows, and more
_FOR_EACH = 25  # for each hyperparameter, where there are many
_ROUGH = 10.0  # times the tolerance at which fits to the latter have settled
_MANY = 3000  # rows above which one is started from
_ITERATIONS = {"lbfgs": MOST, "adam": 50}
_SPAN = {"exact": SPAN, "bound": SPAN}  # steps of L-BFGS over which a loss is judged, by its kind;
_OTHER = 3  # of other kinds
_RESTARTS = 8  # with new pivots, before bounds are left as they are


@dataclass(frozen=True)
class Choices:
    """Arguments of :func:`sketchgp.fit`, checked."""

    optimizer: str
    start: str
    objective: str
    iterations: int | None
    learning_rate: float | None
    num_probes: int
    seed: int
    tol: float


class Fit:
    """Of one model.

    :param mll: of it; :param acceleration: of it, None for an inducing-point model.
    :param show: whether to show progress; :param callback: called with step and loss.
    :param checkpoint: a file for evaluations, or None; :param every: seconds between two writes.
    :param within: the record of the fit of which this one, of some of its rows, is a part.
    """

    def __init__(
        self,
        model: Any,
        mll: Any,
        acceleration: Acceleration | None,
        choices: Choices,
        show: bool,
        callback: Callable[[int, float], Any] | None,
        checkpoint: str | os.PathLike[str] | None,
        every: float,
        within: Record | None = None,
    ) -> None:
        self.model, self.mll, self.acceleration, self.choices = model, mll, acceleration, choices
        self.show, self.callback, self.whole = show, callback, within is None
        self.own = self.current = Objective(model, mll, None if acceleration is None else Probes(watched=True))
        self.kind, why = route(self.own, acceleration, choices.objective, choices.optimizer)
        if self.kind == "samples" and checkpoint is not None:
            raise InputError(
                "fit: checkpoint is of losses that are known by themselves; those by samples are followed."
            )
        optimizer = choices.optimizer
        if optimizer == "auto":
            optimizer = "lbfgs" if choices.learning_rate is None and self.kind != "samples" else "adam"
        self.history = FitHistory(optimizer=optimizer, objective=self.kind, notes=[why] if why else [])
        event = 1 if model.train_targets.dim() == 1 else 2
        self.history.rows = int(model.train_targets.shape[-event])
        self.steps: Steps | None = None
        self.start: list[Tensor] | None = None  # parameters from where few rows are fitted, until other ones are tried
        self.woken: list[Woken] = []
        words = repr((dataclasses.replace(choices, optimizer=optimizer, iterations=None, tol=0.0), self.kind))

        def marks() -> dict[str, str]:
            return fit_marks(model, mll, f"{words} {_solved_by(acceleration)}")

        if within is None:
            compare_ranks("fit", lambda: {**marks(), "the parameters": tensor_mark(*self.own.parameters)})
        self.record = within or Record(self.own, checkpoint, every, marks)
        self.exact = ExactFits(self.record, show, callback, choices.iterations or MOST)
        self.trying = False  # whether other starts of a whole fit are, whose best is that of exact fits

    def __call__(self) -> FitHistory:
        """The model gets the parameters of the best step; where there was none, it is as it was."""
        before, history = Before(self.model), self.history
        try:
            self.record.begin()
            if self.acceleration is not None:  # fits are the same whatever went before
                self.acceleration.doubled, self.acceleration.solutions = False, None
                if self.acceleration.cache is not None:
                    self.acceleration.cache.clear()
            self.model.train()
            self._minimise(self._from_the_start())
            if self.acceleration is not None and self.acceleration.doubled:
                history.notes.append(
                    "float32 lost a log determinant to rounding: from there on they were by float64 products"
                )
        except Stopped:
            history.reason = STOPPED
        except (RuntimeError, MemoryError) as error:
            if not history.losses or not out_of_memory(error):
                raise
            history.reason = "ran out of memory"
            warn(
                f"fit ran out of memory after {len(history.losses)} steps ({error}); the model has the best parameters "
                "so far. Fit fewer parameters, or free memory.",
                see="fit-memory",
            )
        except KeyboardInterrupt:
            history.reason = "interrupted"
            if not history.losses and self.exact.best is None:
                raise
            when = f"after {len(history.losses)} steps" if history.losses else "in its fit to some of the rows"
            warn(f"fit was interrupted {when}; the model has the best parameters so far.", see="interrupted")
        finally:
            best = self.steps.best if self.steps is not None and history.losses else None
            if history.reason in ("interrupted", STOPPED) and (best is None or self.trying):
                best = self.exact.best or best
            if best is not None:
                self.own.restore(best)
                history.at_limits |= self.own.at_limits()
                if self.current.model is not self.model:
                    _copy_buffers(self.current.model, self.model)
                self.own.clear()
                self.model.eval()
            else:
                before.put_back()
            self.record.end()
        return history

    def _from_the_start(self) -> InverseHessian | None:
        """Choose what is minimised, and begin where that is best; about the inverse Hessian there, if it is known."""
        self.flat = self._away_from_flatness()
        if self.kind == "exact":
            self.current = exact_objective(self.model, self.mll)
        elif self.kind == "bound" and self.acceleration is not None:
            held = self.history.optimizer == "lbfgs"
            bound = new_bound(self.own, self.acceleration, self.choices.objective, held=held)
            self.current = Objective(self.model, self.mll, bound)
        elif self.kind == "samples" and self.acceleration is not None:
            solver, choices = self.acceleration.own_solver(), self.choices
            self.current = Objective(self.model, self.mll, Samples(solver, choices.seed, choices.num_probes))
        asked = self.choices.start == "subset"
        many = self.history.rows > _MANY and self.acceleration is not None and self.kind != "given"
        taken = many and (self.history.optimizer == "lbfgs" or self.kind == "samples")
        if asked or (self.choices.start == "auto" and taken):
            return self._from_subset(asked)
        cheap = self.kind == "exact" or self.acceleration is None  # exact losses, or those of inducing points
        if cheap and self.choices.start == "auto" and self.history.optimizer == "lbfgs":
            if self.history.rows <= _FEW:
                self._to_unit(self.current, self.history)
                self.start = self.current.state()
            return self._from_few(self.mll, self.current, self.history, _FEW)
        return None

    @staticmethod
    def _to_unit(objective: Objective, history: FitHistory) -> None:
        """Begin in the targets' unit, if the loss says so."""
        done = to_unit(objective)
        history.notes += [done] if done else []

    def _minimise(self, inverse: InverseHessian | None) -> InverseHessian | None:
        """Runs of the optimiser, until one ends for good.

        :param inverse: about the inverse Hessian where they begin; the same where they end is returned.
        """
        history, choices = self.history, self.choices
        limit = choices.iterations or _ITERATIONS[history.optimizer]
        title = "marginal likelihood" if self.whole else f"{history.rows} rows"
        with (
            self._one_function(),
            tqdm(total=limit, desc=title, unit="step", disable=not self.show, leave=False) as bar,
        ):
            while True:
                self.steps = steps = self._steps(limit, bar, near=inverse is not None)
                try:
                    judge_woken(steps, self.woken)
                    if history.optimizer == "adam":
                        adam(self.current, steps, choices.learning_rate or 0.1)
                    else:
                        found = lbfgs(self.current, steps, inverse)
                        inverse = inverse if found is None else found
                except TooWide:
                    history.reason = WIDENED
                if history.reason == WIDENED:
                    asked = choices.objective
                    self.current = next_objective(self.current, steps, self.own, self.acceleration, asked=asked)
                    continue
                if history.reason == DEAR:
                    assert self.acceleration is not None
                    self.current = factorized(self.own, steps, self.acceleration)
                    continue
                self.own.restore(steps.best)
                if not self.whole:
                    return inverse
                elsewhere = self._from_elsewhere()
                if elsewhere is not None:
                    (inverse,) = elsewhere
                    continue
                if self.flat and history.reason == SETTLED:
                    history.reason = FLAT if flatness(self.model, choices.seed) else SETTLED
                judge_end(self.current, self.own, self.acceleration, history, choices.seed, choices.num_probes)
                after = None
                if self.kind != history.objective:
                    after = bound_at_last(self.own, self.acceleration, history)
                if after is None:
                    return inverse
                self.current = after

    def _steps(self, limit: int, bar: Any, near: bool) -> Steps:
        """Of the next run; :param near: whether it begins near a minimum."""
        history, current = self.history, self.current
        bound = current.density if isinstance(current.density, Bound) else None
        bounding = history.optimizer == "lbfgs" and bound is not None
        widest = WIDTH if bounding and len(history.restarts) < _RESTARTS else math.inf
        span = _SPAN.get(history.objective, _OTHER)
        improvement = partial(lbfgs_improvement, span=min(span, NEAR) if near else span)
        if history.optimizer == "adam":
            improvement = adam_improvement  # type: ignore[assignment]
        best = None if self.steps is None or not history.losses else self.steps.best
        cache = None if self.acceleration is None else self.acceleration.cache
        current.stage = self.record.stage(cache if bound is None else bound.cache, current.density)
        probing = history.optimizer == "lbfgs" and history.objective == "probes"
        most = dearest(self.own, self.acceleration, self.choices.objective) if probing else math.inf
        began, tol = self.record.began, self.choices.tol
        return Steps(current, history, limit, bar, self.callback, improvement, tol, began, widest, best, most)

    @contextmanager
    def _one_function(self) -> Iterator[None]:
        """Losses inside are values of one function: the same probes, and by L-BFGS the same pivots."""
        acceleration, seed, count = self.acceleration, self.choices.seed, self.choices.num_probes
        if acceleration is None:
            yield
        elif isinstance(self.current.density, Samples):
            yield
            acceleration.solutions = self.current.density.solutions
        else:
            cache = acceleration.cache if self.history.optimizer == "lbfgs" else None
            with acceleration.fixed_probes(seed, count), nullcontext() if cache is None else cache.holding():
                yield

    def _from_subset(self, asked: bool) -> InverseHessian | None:
        """Give the model the parameters of a fit to some of the rows; about the inverse Hessian there.

        :param asked: whether the user wants it, and is told where it cannot be.
        """
        rows = rows_before(0 if self.kind == "samples" else self.history.rows)
        exact = rows == rows_before(0)
        twin = on_subset(self.mll, rows, self.choices.seed, exact)
        if twin is None:
            if asked:
                raise InputError(
                    'fit: start="subset" expects a Gaussian likelihood and a model without a batch, of which rows can '
                    'be taken; use start="model".'
                )
            return None
        try:
            inverse, best = (self._fit_exactly if exact else self._fit_part)(twin)
        except RuntimeError:  # a forward that holds what no copy converts
            if asked or (self.history.subset is not None and self.history.subset.losses):
                raise
            self.history.subset = self.exact.best = None
            return None
        self.current.restore(best)
        if self.history.optimizer == "lbfgs":
            self.woken = wake(self.current.model)
        return inverse

    def _fit_exactly(self, twin: Any) -> tuple[InverseHessian | None, list[Tensor]]:
        """About the inverse Hessian at the least exact loss of a part of the rows, and the parameters there."""
        part = self._part(twin)
        self.history.subset = found = history_of(part)
        return self.exact.run(part, found, self._from_few(twin, part, found, _FEW), self.choices.tol, self.woken)

    def _from_few(self, mll: Any, objective: Objective, history: FitHistory, rows: int) -> InverseHessian | None:
        """Give a model of more rows the parameters of an exact fit to few of them, which begins with the best one of
        three fits to fewer: from where the model is, and from other starts.  About the inverse Hessian there; None
        without such fits.

        :param mll: of the model, of which rows are taken; :param objective: gets the parameters.
        :param history: of its fit; :param rows: how many are taken.
        """
        if history.rows <= rows:
            return None
        twin = on_subset(mll, rows, self.choices.seed, True)
        if twin is None:
            return None
        part = self._part(twin)
        found = history_of(part)
        fewest = _FEW
        if self.whole:  # a fit within another one serves many rows: a bad start is dear there, and these fits are not
            fewest = min(max(_FEWEST, _FOR_EACH * sum(p.numel() for p in part.parameters)), _FEW)
        history.subset = found
        try:
            if rows == fewest:
                self._to_unit(part, found)
            start = part.state()
            before = None if rows == fewest else self._from_few(twin, part, found, fewest)
            inverse, best = self.exact.run(part, found, before, self._rough, self.woken)
        except RuntimeError:
            if found.losses:
                raise
            history.subset = None  # a forward that holds what no copy converts
            return None
        other = self.exact.elsewhere(part, start, found, self._rough) if rows == fewest else None
        if other is not None:
            found, inverse, best = other
        self.exact.best = best
        history.subset = found
        objective.restore(best)
        raised = raise_noise(objective)
        if raised:
            found.notes.append(raised)
        self.woken = wake(objective.model)
        return inverse

    def _from_elsewhere(self) -> tuple[InverseHessian | None] | None:
        """Where a fit to few rows has settled, go to the end of one from other starts, if that came lower; about the
        inverse Hessian there."""
        history, start = self.history, self.start
        self.start, most = None, self.choices.iterations or MOST
        if start is None or history.reason not in (SETTLED, STUCK, STEEP) or len(history.losses) >= most:
            return None
        twin = on_subset(self.mll, _FEW, self.choices.seed, True)  # a copy: some modules learn from what they see
        if twin is None or len(twin.model.train_targets) != history.rows:
            return None
        part = self._part(twin)
        self.exact.best, self.trying = None, True
        try:
            other = self.exact.elsewhere(part, start, history, self.choices.tol)
        except RuntimeError:  # a forward that holds what no copy converts
            other = None
        self.trying = False
        if other is None:
            return None
        self.current.restore(other[2])
        history.restarts.append(len(history.losses))
        history.notes += other[0].notes
        return (other[1],)

    def _part(self, twin: Any) -> Objective:
        """The losses of a copy with some of the rows: exact, or the bound of inducing points."""
        return Objective(twin.model, twin, None if self.acceleration is None else Exact())

    @property
    def _rough(self) -> float:
        """The tolerance of fits that others start from: ten times that of the whole one, however many there are."""
        return _ROUGH * self.choices.tol if self.whole else self.choices.tol

    def _fit_part(self, twin: Any) -> tuple[InverseHessian | None, list[Tensor]]:
        """The same of more rows, by a fit of their own, which begins with fewer."""
        limit = self.choices.iterations if self.history.optimizer == "lbfgs" else None
        choices = dataclasses.replace(
            self.choices, start="subset", iterations=limit, optimizer="lbfgs", tol=self._rough
        )
        acceleration, callback = acceleration_of(twin.model), self.callback
        fit = Fit(twin.model, twin, acceleration, choices, self.show, callback, None, 0.0, self.record)
        self.history.subset = fit.history
        try:
            inverse = fit._minimise(fit._from_the_start())
            if fit.history.reason == STOPPED:
                raise Stopped
        finally:
            self.exact.best = fit.steps.best if fit.steps is not None and fit.history.losses else fit.exact.best
        assert fit.steps is not None
        if fit.acceleration is not None and fit.acceleration.cache is not None:  # the record knows it
            fit.acceleration.cache.release()
        return inverse, fit.steps.best

    def _away_from_flatness(self) -> str:
        """Lengthscales of the size of the data where the loss is flat otherwise; why it still is."""
        why = "" if self.choices.start == "model" else rescale(self.model, self.choices.seed)
        if why:
            self.history.notes.append(
                f"started from lengthscales of the size of the inputs: {why} with those of the model"
            )
            warn(
                f"fit: {self.history.notes[-1]}. Standardise the inputs, or start nearer to their size.",
                see="lengthscales",
            )
        why = flatness(self.model, self.choices.seed)
        if why:
            warn(
                f"fit: with the lengthscales that it starts from {why}, and the loss does not change with them. "
                "Standardise the inputs, or start from lengthscales of their size.",
                see="lengthscales",
            )
        return why


def _solved_by(acceleration: Acceleration | None) -> tuple[Any, ...]:
    """Of an accelerated model, the choices that a loss depends on."""
    if acceleration is None:
        return ()
    solver = dataclasses.replace(acceleration.conjugate_gradients(), max_seconds=None, checkpoint=None)
    return acceleration.preconditioner, solver, acceleration.matmul, acceleration.matmul_precision


@torch.no_grad()
def _copy_buffers(source: Any, target: Any) -> None:
    """What modules keep beside parameters, such as running means."""
    found = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in found and found[name].shape == buffer.shape and buffer.is_floating_point():
            buffer.copy_(found[name])

"""One fit: its stages, from few rows to all of them, each of which starts where the one before ended."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .. import checks
from ..density import Exact, Probes, Samples
from ..errors import InputError, NumericalError, warn
from ..fingerprint import tensor_mark
from ..memory import out_of_memory
from ..solvers.loop import compare_ranks
from . import starts
from .history import DEAR, FLAT, LOST, SETTLED, STOPPED, UNSURE, FitHistory
from .minimise import minimise
from .objective import ModelState, Objective
from .plan import by_neighbors, dearest, exact_objective, factorized, on_subset, route, rows_before
from .record import Record, fit_marks
from .stage import ENDED, Stage
from .steps import Steps

_FEW = 1000  # rows that fits to more begin with; three fits tell the best one of three starts, of as many, or of
_FEWEST = 500  # in fits to fewer than 8,000 rows, and more
_FOR_EACH = 25  # for each hyperparameter, where there are many
_ROUGH = 10.0  # factor on the tolerance at which fits to the latter have settled
_MANY = 3000  # rows above which a fit starts from a subset
_ITERATIONS = {"lbfgs": 500, "adam": 50}
_UNFELT = 5e-5  # nats a row that a minimum may be too high by gradients for which preconditioners stand still
_SAME = 0.002  # nats a row between ends of different starts that are one minimum
# Other starts: lengthscales over the size of the inputs, and noises over the targets' variance.  Of 124 problems of 160
# and 400 rows the best of three ends was more than 0.1 a row above the best of eleven on 3, that from the model's start
# on 27, and the better one of that and of lengthscales of the size of the inputs, with the model's noise, on 9.
_OTHERS = (("long lengthscales", 3.0, 1e-2), ("short lengthscales", 0.3, 1e-3))
# More of them, where these came to several ends or the model's own start told nothing.
_IN_DOUBT = (("very short lengthscales", 0.1, 1e-3), ("short lengthscales and much noise", 0.3, 0.3))
# What they are called where there are no lengthscales, by their noises.
_NOISES = {1e-3: "hardly any noise", 1e-2: "little noise", 0.3: "much noise"}


class _Stopped(Exception):
    """Signals that the callback has ended a fit before its first step on all rows."""


@dataclass
class Choices:
    """Arguments of :func:`sketchgp.fit`.

    :raises InputError: for arguments that do not fit.
    """

    optimizer: str
    start: str
    objective: str
    iterations: int | None
    learning_rate: float | None
    num_probes: int
    seed: int
    tol: float

    def __post_init__(self) -> None:
        checks.word("fit", "optimizer", self.optimizer, ("auto", "lbfgs", "adam"))
        checks.word("fit", "start", self.start, ("auto", "model", "subset"))
        checks.word("fit", "objective", self.objective, ("auto", "exact", "probes", "samples"))
        self.iterations = checks.count("fit", "iterations", self.iterations, optional=True)
        self.num_probes = checks.count("fit", "num_probes", self.num_probes)
        rate = checks.number("fit", "learning_rate", self.learning_rate, above=0, finite=True, optional=True)
        self.learning_rate = rate
        if self.optimizer == "lbfgs" and self.learning_rate is not None:
            raise InputError('fit: learning_rate is of Adam; L-BFGS searches along lines. Use optimizer="adam".')
        self.seed, self.tol = checks.seed("fit", "seed", self.seed), checks.number("fit", "tol", self.tol)


class Fit:
    """The fit of one model.

    :param mll: the marginal log likelihood of the model.
    :param choices: arguments of the fit.
    :param show: whether to show progress.
    :param callback: called with step and loss.
    :param checkpoint: a file for evaluations, or None.
    :param every: seconds between two writes.
    """

    def __init__(
        self,
        model: Any,
        mll: Any,
        choices: Choices,
        show: bool,
        callback: Callable[[int, float], Any] | None,
        checkpoint: str | os.PathLike[str] | None,
        every: float,
    ) -> None:
        self.model, self.choices, self.show, self.callback = model, choices, show, callback
        self.full = full = self._routed(model, mll, choices, full=True)
        self.history, self.acceleration = full.history, full.base.acceleration
        if full.kind == "samples" and checkpoint is not None:
            raise InputError(
                "fit: checkpoint is of losses that are known by themselves; those by samples are followed."
            )
        kept = dataclasses.replace(choices, optimizer=self.history.optimizer, iterations=None, tol=0.0)
        words = repr((kept, full.kind))

        def marks() -> dict[str, str]:
            used = self.acceleration
            by = (used.preconditioner, used.column_gradients(), used.matmul, used.matmul_precision) if used else ()
            return fit_marks(model, mll, f"{words} {by}")

        compare_ranks("fit", lambda: {**marks(), "the parameters": tensor_mark(*full.base.parameters)})
        self.record = Record(full.base, checkpoint, every, marks)
        self.kept: list[Tensor] | None = None  # the best parameters so far
        self.moved = False  # whether the model's own lengthscales told nothing

    def __call__(self) -> FitHistory:
        """Give the model the parameters of the best step; leave it as it was where there was none."""
        before, history = ModelState(self.model), self.history
        try:
            self.record.begin()
            if self.acceleration is not None:  # fits are the same whatever went before
                self.acceleration.doubled, self.acceleration.solutions = False, None
                self.acceleration.cache.clear()
            self.model.train()
            self._run_all(self._plan())
            if self.acceleration is not None and self.acceleration.doubled:
                history.notes.append(
                    "float32 lost a log determinant to rounding: from there on they were by float64 products"
                )
        except _Stopped:
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
            if self.kept is None:
                raise
            when = f"after {len(history.losses)} steps" if history.losses else "before its last stage"
            warn(f"fit was interrupted {when}; the model has the best parameters so far.", see="interrupted")
        finally:
            self._leave(before)
            self.record.save()
        return history

    def _leave(self, before: ModelState) -> None:
        """Leave the model with the best parameters, or as it was before."""
        full, history = self.full, self.history
        if self.kept is None or not (history.losses or history.reason in ("interrupted", STOPPED)):
            before.put_back()
            return
        full.base.restore(self.kept)
        history.at_limits |= full.base.at_limits()
        if full.objective.model is not self.model:
            _copy_buffers(full.objective.model, self.model)
        full.base.clear()
        self.model.eval()

    # --- the plan -------------------------------------------------------------------------------------------

    def _plan(self) -> list[Stage]:
        """Return the stages of the fit, from few rows to all."""
        full, choices, lbfgs = self.full, self.choices, self.history.optimizer == "lbfgs"
        self._prepare(full)
        many = self.history.rows > _MANY and self.acceleration is not None and full.kind != "given"
        if choices.start == "subset" or (choices.start == "auto" and many and (lbfgs or full.kind == "samples")):
            return [*self._subsets(), full]
        cheap = full.kind == "exact" or self.acceleration is None  # exact losses, or those of inducing points
        if choices.start == "auto" and cheap and lbfgs:
            full.several = self.history.rows <= _FEW
            return [*self._few(full, inside=False), full]
        return [full]

    def _routed(self, model: Any, mll: Any, choices: Choices, full: bool) -> Stage:
        """Return a stage whose losses are computed as its rows, the model and the choices tell."""
        base = Objective(model, mll)
        unfelt = sum(p.numel() for p in base.parameters) <= _UNFELT * 2 * choices.num_probes * base.rows
        base.density = None if base.acceleration is None else Probes(watched=True, still=unfelt)
        kind, why = route(base, choices.objective, choices.optimizer)
        optimizer = choices.optimizer
        if optimizer == "auto":
            optimizer = "lbfgs" if choices.learning_rate is None and kind != "samples" else "adam"
        if optimizer == "adam" or kind == "given":  # Adam moves the parameters themselves
            base.trends.append(None)
        rows = int(model.train_targets.shape[-1 if model.train_targets.dim() == 1 else -2])
        history = FitHistory(optimizer=optimizer, objective=kind, notes=[why] if why else [], rows=rows)
        return Stage(base, kind, history, choices.tol, choices.iterations or _ITERATIONS[optimizer], full)

    def _prepare(self, stage: Stage) -> None:
        """Move a stage away from where its loss is flat, and choose its density."""
        stage.flat = self._away_from_flatness(stage)
        base, acceleration = stage.base, stage.base.acceleration
        if stage.kind == "exact":
            stage.objective = exact_objective(base)
        elif stage.kind == "probes" and factorized(base) and base.trend is not None:
            stage.objective = base.by(Exact())
        elif stage.kind == "samples" and acceleration is not None:
            stage.objective = base.by(Samples(acceleration.own_solver(), self.choices.seed, self.choices.num_probes))

    def _away_from_flatness(self, stage: Stage) -> str:
        """Give lengthscales the size of the data where the loss is flat otherwise; return why it still is."""
        model, seed, notes = stage.base.model, self.choices.seed, stage.history.notes
        why = "" if self.choices.start == "model" else starts.rescale(model, seed)
        if why:
            self.moved = True
            notes.append(f"started from lengthscales of the size of the inputs: {why} with those of the model")
            warn(f"fit: {notes[-1]}. Standardise the inputs, or start nearer to their size.", see="lengthscales")
        why = starts.flatness(model, seed)
        if why:
            warn(
                f"fit: with the lengthscales that it starts from {why}, and the loss does not change with them. "
                "Standardise the inputs, or start from lengthscales of their size.",
                see="lengthscales",
            )
        return why

    def _subsets(self) -> list[Stage]:
        """Return the stages on random subsets of the rows that a fit to many rows starts from.

        :raises InputError: where the user asked for them and no rows can be taken of the model.
        """
        choices, above, stages = self.choices, self.full, list[Stage]()
        near = by_neighbors(above.base) if above.kind == "probes" and above.base.acceleration else None
        if near is not None:
            part = Stage.vecchia(above, near)
            above.history.subset = part.history
            stages, above = [part], part
        limit = choices.iterations if self.history.optimizer == "lbfgs" else None  # Adam's steps are no measure
        inner = dataclasses.replace(choices, optimizer="lbfgs", iterations=limit, learning_rate=None, tol=self._rough)
        rows = rows_before(0 if above.kind in ("samples", "vecchia") else self.history.rows)
        while True:
            exact = rows == rows_before(0)
            twin = on_subset(above.base.mll, rows, choices.seed, exact)
            if twin is None:
                if choices.start == "subset":
                    raise InputError(
                        'fit: start="subset" expects a Gaussian likelihood and a model without a batch, of which rows '
                        'can be taken; use start="model".'
                    )
                return stages
            if exact:
                tol, steps = (choices.tol, choices.iterations) if above.full else (self._rough, limit)
                part = Stage.exact(twin, tol, steps or _ITERATIONS["lbfgs"])
            else:
                part = self._routed(twin.model, twin, inner, full=False)
                self._prepare(part)
            above.history.subset = part.history
            stages.insert(0, part)
            if exact:
                return [*self._few(part, inside=not above.full), *stages]
            above, rows = part, rows_before(part.history.rows)

    def _few(self, above: Stage, inside: bool) -> list[Stage]:
        """Return the stages of few rows that an exact fit to more starts from; the first compares several starts.

        :param inside: whether they serve many rows.  A bad start is dear there and these fits are not, so that starts
            are compared on more rows.
        """
        count = sum(p.numel() for p in above.base.parameters)
        fewest = _FEW if inside else min(max(_FEWEST, _FOR_EACH * count), _FEW)
        stages = list[Stage]()
        for rows in sorted({_FEW, fewest}, reverse=True):
            twin = on_subset(above.base.mll, rows, self.choices.seed, True) if above.history.rows > rows else None
            if twin is None:
                break
            part = Stage.exact(twin, self._rough, above.limit, few=True)
            part.several = rows == fewest
            above.history.subset = part.history
            stages.insert(0, part)
            above = part
        return stages

    @property
    def _rough(self) -> float:
        """The tolerance of fits that others start from."""
        return _ROUGH * self.choices.tol

    # --- the stages -----------------------------------------------------------------------------------------

    def _run_all(self, stages: list[Stage]) -> None:
        """Run the stages one after the other; one that the model cannot be copied for is left out."""
        before: Stage | None = None
        for stage in stages:
            stage.inverse_hessian = None if before is None else before.inverse_hessian
            if before is not None and before.best is not None:
                stage.history.subset = before.history
                stage.objective.restore(before.best)
                if before.few:
                    note = starts.raise_noise(stage.objective)
                    before.history.notes += [note] if note else []
                if before.few or stage.history.optimizer == "lbfgs":
                    stage.revived = starts.revive(stage.objective.model)
            try:
                before = self._run(stage)
            except RuntimeError:
                copies = [one for one in stages if one.base.model is not self.model]
                asked = self.choices.start == "subset" and stage in copies[-1:]
                if stage.full or stage.history.losses or asked:
                    raise
                if stage in copies:
                    before = self.kept = None  # a forward that holds what no copy converts
                stages[stages.index(stage) + 1].history.subset = None

    def _run(self, stage: Stage) -> Stage:
        """Run one stage; return it, or the run of another start that came to a lower end."""
        if stage.several:
            note = starts.to_unit(stage.objective)
            stage.history.notes += [note] if note else []
            stage.start = stage.objective.state()
        title = "marginal likelihood" if stage.full else f"{stage.history.rows} rows"
        with (
            self._one_function(stage),
            tqdm(total=stage.limit, desc=title, unit="step", disable=not self.show, leave=False) as bar,
        ):
            self._minimise(stage, bar)
            if stage.full:
                if self._from_another_start(stage):
                    self._minimise(stage, bar)
                self._judge_end(stage)
        if stage.history.reason == STOPPED and not stage.full:
            raise _Stopped
        if not stage.full and (cache := stage.objective.cache) is not None:
            cache.release()  # the record knows it
        if stage.several and not stage.full:
            return self._other_starts(stage.base.mll, stage) or stage
        return stage

    def _minimise(self, stage: Stage, bar: Any) -> None:
        """Run the optimiser until it ends for other reasons than the density."""
        while True:
            stage.steps = Steps(stage, bar, self.callback, self.record.began)
            if stage.history.optimizer == "lbfgs" and stage.kind == "probes" and self.choices.objective == "auto":
                stage.steps.dearest = dearest(stage.base)
            stage.objective.evaluations = self.record.evaluations(stage.objective.cache)
            try:
                stage.judge_revived()
                stage.inverse_hessian = minimise(stage.steps, self.choices.learning_rate, stage.inverse_hessian)
            finally:
                self.kept = stage.best or self.kept
            if stage.history.reason == DEAR:
                stage.leave_long_solves()
            elif stage.history.reason == LOST:
                stage.begin_anew()
            elif not stage.renew_neighbors():
                stage.base.restore(stage.steps.best)
                return

    @contextmanager
    def _one_function(self, stage: Stage) -> Iterator[None]:
        """Make losses values of one function inside the block: the same probes, and by L-BFGS the same pivots."""
        acceleration = stage.base.acceleration
        if acceleration is None:
            yield
            return
        held = acceleration.cache.holding() if stage.history.optimizer == "lbfgs" else nullcontext()
        with acceleration.having(probe_seed=self.choices.seed, probe_count=self.choices.num_probes), held:
            yield
        density = stage.objective.density
        acceleration.solutions = None if density is None else density.solutions

    def _judge_end(self, stage: Stage) -> None:
        """Record what the last loss of the stage on all rows is worth."""
        history, choices = stage.history, self.choices
        if stage.flat and history.reason == SETTLED:
            history.reason = FLAT if starts.flatness(self.model, choices.seed) else SETTLED
        alone = starts.loss_of_noise(self.model)
        if history.reason in ENDED and history.best_loss > alone + max(_SAME, 10 * stage.tol):
            history.notes.append(f"{UNSURE}: noise alone about the mean of the targets has a loss of {alone:.4f}")
        history.by_other_probes = stage.by_other_probes(choices.seed, choices.num_probes)
        history.bracket = stage.bracket()

    def _from_another_start(self, stage: Stage) -> bool:
        """Where a fit to few rows has settled, go to the end of one from another start; return whether it is lower."""
        history, several = stage.history, stage.several
        stage.several = False
        if not several or history.reason not in ENDED or len(history.losses) >= stage.limit:
            return False
        # some modules learn from their input: a copy
        twin = on_subset(stage.base.mll, _FEW, self.choices.seed, True)
        if twin is None or len(twin.model.train_targets) != history.rows:
            return False
        try:
            other = self._other_starts(twin, stage)
        except RuntimeError:  # a forward that holds what no copy converts
            return False
        if other is None:
            return False
        assert other.best is not None
        stage.objective.restore(other.best)
        stage.inverse_hessian = other.inverse_hessian
        history.restarts.append(len(history.losses))
        history.notes += other.history.notes
        return True

    def _other_starts(self, mll: Any, first: Stage) -> Stage | None:
        """Fit from long and from short lengthscales, and little noise, exactly.

        Where they come to several ends, or the model's own start told nothing, two more are tried.  Notes say what came
        of it.

        :param mll: the marginal log likelihood of a copy of the model.
        :param first: the stage from the model's start, whose other parameters stay but for noise, output scales and the
            constant of the mean.
        :returns: the run that came lower than the first stage by more than the tolerance.
        """
        before, tol, start = first.history, first.tol, first.start
        ends, lowest, kept = {"the first one": before.best_loss}, first, first.best
        assert start is not None
        for other in (*_OTHERS, *_IN_DOUBT):
            if other in _IN_DOUBT and not self.moved and _at_lowest(ends.values(), tol) == len(ends):
                break
            name, times, noise = other
            trial = Stage.exact(mll, tol, first.limit, first.few)
            trial.base.restore(start)
            moved = starts.spread(mll.model, times)
            starts.centre_mean(trial.objective)
            noisy = starts.set_noise(mll.model, noise)
            scaled = starts.set_scale(mll.model, starts.mean_square(mll.model))
            if not moved:  # a kernel without lengthscales, say
                name = _NOISES[noise] if noisy else "their output scale"
            if name in ends or not (scaled or moved):
                continue
            try:
                self._run(trial)
            except NumericalError:
                before.notes.append(f"the start from {name} failed: its first loss is not finite")
                continue
            finally:
                self.kept = kept
            ends[name] = trial.history.best_loss
            if trial.history.best_loss < lowest.history.best_loss - max(tol, 0.0):
                lowest, kept = trial, trial.best
        self.kept = kept
        if len(ends) > 1:
            words = ", ".join(f"from {name} {loss:.4f}" for name, loss in ends.items())
            lowest.history.notes.append(f"the best of {len(ends)} starts: {words}")
            if 2 * (count := _at_lowest(ends.values(), tol)) < len(ends):
                lowest.history.notes.append(
                    f"{UNSURE}: of {len(ends)} starts {count} alone came to this loss, another may find a lower one"
                )
        return None if lowest is first else lowest


def _at_lowest(ends: Collection[float], tol: float) -> int:
    """Return how many starts came to the lowest of their ends; ``tol`` is what they have settled by."""
    return sum(end <= min(ends) + max(_SAME, 10 * tol) for end in ends)


@torch.no_grad()
def _copy_buffers(source: Any, target: Any) -> None:
    """Copy what modules keep beside parameters, such as running means."""
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape and buffer.is_floating_point():
            buffer.copy_(buffers[name])

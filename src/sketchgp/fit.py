"""``fit(model)``: hyperparameters by marginal likelihood."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.models import ExactGP
from tqdm.auto import tqdm

from . import checks
from .accelerate import acceleration_of
from .errors import InputError, warn
from .fitting.adam import adam
from .fitting.adam import improvement as adam_improvement
from .fitting.history import FLAT, SETTLED, WIDENED, FitHistory
from .fitting.lbfgs import improvement as lbfgs_improvement
from .fitting.lbfgs import lbfgs
from .fitting.objective import Objective
from .fitting.record import Record, fit_marks
from .fitting.route import WIDTH, bound_at_last, bracket, new_bound, next_objective, route
from .fitting.scales import flatness, rescale
from .fitting.start import exact_objective, on_subset
from .fitting.steps import Steps
from .inducing_point_gp import InducingPointGP
from .models.accelerated.acceleration import Acceleration
from .models.accelerated.bound_density import TooWide
from .models.accelerated.leave_one_out import LeaveOneOutPseudoLikelihood
from .models.accelerated.marginal_likelihood import ExactMarginalLogLikelihood

_SUBSET = 2000  # rows of a subset to start from
_MANY = 3000  # rows above which one is started from
_ITERATIONS = {"lbfgs": 500, "adam": 50}
_SPAN = {"exact": 10, "bound": 10, "probes": 3, "given": 3}  # steps of L-BFGS over which a loss is judged,
_RESTARTS = 8  # with new pivots, before bounds are left as they are
_NEAR = 4  # and at the most where it starts from a subset's optimum


def fit(
    model: ExactGP,
    mll: Any = None,
    optimizer: str = "auto",
    start: str = "auto",
    objective: str = "auto",
    iterations: int | None = None,
    learning_rate: float | None = None,
    num_probes: int = 10,
    seed: int = 0,
    tol: float = 1e-4,
    progress: bool | None = None,
    callback: Callable[[int, float], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = 60.0,
) -> FitHistory:
    """Maximise the marginal likelihood of an accelerated model, or an :class:`InducingPointGP`, in place.

    The loss is computed *exactly*, by one factorization in float64, up to 5,000 rows (CUDA: 20,000) that fit the memory
    budget, unless ``accelerate`` was given a solver, or GPyTorch a ``max_cholesky_size``: ``n^3`` operations a loss.
    Above that an upper *bound* of it is minimised where it is within 0.002 a row of a lower one: of Artemev, Burt, van
    der Wilk (arXiv:2102.08314), with exact gradients, and no random number but those of the pivots.  Elsewhere the loss
    is estimated with *probes*, drawn once, so that it is the same function at every step; log determinant and gradient
    are as in Wenger et al. (arXiv:2107.00243), and the preconditioner's pivots are kept while they serve, by L-BFGS
    throughout.  Bounds that become wider on the way are made anew, with more pivots, or left for probes; never within
    a line search, and ``FitHistory.notes`` say so.  An inducing-point model has a *bound* of its own.

    :param model: a model that :func:`accelerate` was called on, or an :class:`InducingPointGP`.  It is left in eval
        mode with the parameters of the best step; parameters with ``requires_grad=False`` stay as they are.
    :param mll: a GPyTorch marginal log likelihood (default: ``ExactMarginalLogLikelihood``), or
        ``LeaveOneOutPseudoLikelihood``.
    :param optimizer: ``"lbfgs"`` (SciPy's, within the bounds of constraints), ``"adam"``, or ``"auto"``: L-BFGS, but
        where a ``learning_rate`` is given.
    :param start: ``"model"`` starts from the model's parameters; ``"subset"`` first fits them to 2,000 random rows,
        exactly; ``"auto"`` does so with L-BFGS above 3,000 rows where it is known how to take rows of the model (a
        Gaussian likelihood and no batch).  Lengthscales with which every point is alone, or all are alike, so that the
        loss does not change with them, are first made of the size of the inputs, with a warning; with ``"model"`` there
        is only the warning.
    :param objective: ``"exact"``, ``"bound"`` or ``"probes"``, or ``"auto"`` as above.  A bound that is asked for is
        minimised however wide it is.
    :param iterations: the most steps (default: 500 of L-BFGS, 50 of Adam).
    :param learning_rate: Adam's step size, in the unconstrained parameters (default 0.1).
    :param num_probes: probe vectors of the log determinant.
    :param seed: of the probe vectors and the subset.
    :param tol: the loss has settled when ten steps of L-BFGS together improved it by less than this (four after a
        subset, three where it is estimated), or the mean of five steps of Adam over the five before.  An estimated
        loss has settled, too, when the improvement is smaller than half its standard error, by the spread of the
        probes; not so where ``tol`` is 0 or less.
    :param progress: show a progress bar (default: only in a terminal).
    :param callback: called with step and loss; returning True ends the fit.  Ctrl-C ends it too.
    :param checkpoint: a file that keeps every evaluation (tensors only).  Where it exists, the fit goes through them at
        no cost, one of each choice of pivots excepted, and then on: to the bits that an uninterrupted one ends with (on
        the same device and number of threads), from the parameters that the first run began with.  Of another model,
        other data or other choices than ``iterations`` and ``tol`` it is refused; so is one that another fit is using.
    :param every: seconds between two writes of the checkpoint.
    :raises InputError: for a model that is not accelerated, or arguments that do not fit; the model is then as it was.
    :raises NumericalError: if the first loss is not finite.

    A call that ends in an error before there is a first loss leaves the model as it was: parameters, gradients, and
    which of its parts are in training mode.
    """
    acceleration = None if isinstance(model, InducingPointGP) else acceleration_of(model, "fit")
    checks.word("fit", "optimizer", optimizer, ("auto", "lbfgs", "adam"))
    checks.word("fit", "start", start, ("auto", "model", "subset"))
    checks.word("fit", "objective", objective, ("auto", "exact", "bound", "probes"))
    iterations = checks.count("fit", "iterations", iterations, optional=True)
    num_probes = checks.count("fit", "num_probes", num_probes)
    if learning_rate is not None:
        learning_rate = checks.number("fit", "learning_rate", learning_rate, above=0, finite=True)
    seed, tol = checks.seed("fit", "seed", seed), checks.number("fit", "tol", tol)
    checks.flag("fit", "progress", progress, optional=True)
    checks.function("fit", "callback", callback)
    checkpoint = checks.path("fit", "checkpoint", checkpoint, optional=True)
    every = checks.number("fit", "every", every, above=0)
    checks.function("fit", "mll", mll)
    if optimizer == "lbfgs" and learning_rate is not None:
        raise InputError('fit: learning_rate is of Adam; L-BFGS searches along lines. Use optimizer="adam".')
    if getattr(mll, "model", model) is not model:
        raise InputError("fit: mll expects to be of the model that is fitted, got one of another model.")
    if model.train_inputs is None or model.train_targets is None:
        raise InputError("fit: model expects training data, got none.")
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("fit: model expects at least one parameter that requires a gradient, got none.")
    missing = bool(torch.isnan(model.train_targets).any())
    if missing and gpytorch.settings.observation_nan_policy.value() == "ignore":
        raise InputError('fit: the training targets hold NaN; wrap the call in observation_nan_policy("mask").')
    if mll is None:
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
    elif type(mll) is gpytorch.mlls.ExactMarginalLogLikelihood:  # the same, and knows of missing targets
        mll = ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    elif type(mll) is gpytorch.mlls.LeaveOneOutPseudoLikelihood:  # the same, by sketchgp's solves
        mll = LeaveOneOutPseudoLikelihood(mll.likelihood, mll.model)
    if optimizer == "auto":
        optimizer = "lbfgs" if learning_rate is None else "adam"
    before = _Before(model)
    show = sys.stderr.isatty() if progress is None else progress
    kind, why = route(model, mll, acceleration, objective)
    history = FitHistory(optimizer=optimizer, objective=kind, notes=[why] if why else [])
    current = own = Objective(model, mll)
    steps: Steps | None = None
    cache = None if acceleration is None else acceleration.cache
    choices = (optimizer, start, objective, learning_rate, num_probes, seed, history.objective, *_choices(acceleration))
    record = Record(own, checkpoint, every, lambda: fit_marks(model, mll, repr(choices)))
    try:
        began = record.begin()
        if cache is not None:
            cache.clear()  # of pivots that something else chose: fits with the same data are identical
        model.train()
        flat = _away_from_flatness(model, history, seed, start)
        if kind == "exact":
            current = exact_objective(model, mll)
        elif kind == "bound" and acceleration is not None:
            bound = new_bound(own, acceleration, objective, held=optimizer == "lbfgs")
            current = Objective(model, mll, bound=bound)
        history.rows = int(model.train_targets.shape[-1 if model.train_targets.dim() == 1 else -2])
        inverse = None
        many = history.rows > _MANY and acceleration is not None and kind != "given"
        if start == "subset" or (start == "auto" and many and optimizer == "lbfgs"):
            inverse = _from_subset(mll, current, history, seed, tol, show, record, asked=start == "subset")
        limit = iterations or _ITERATIONS[optimizer]
        with (
            _one_function(acceleration, history, seed, num_probes),
            tqdm(total=limit, desc="marginal likelihood", unit="step", disable=not show, leave=False) as bar,
        ):
            while True:
                current.stage = record.stage(cache if current.bound is None else current.bound.cache, current.bound)
                bounding = history.optimizer == "lbfgs" and current.bound is not None
                widest = WIDTH if bounding and len(history.restarts) < _RESTARTS else math.inf
                span = _SPAN[history.objective]
                near = partial(lbfgs_improvement, span=span if inverse is None else min(span, _NEAR))
                improvement = adam_improvement if optimizer == "adam" else near
                best = None if steps is None or not history.losses else steps.best
                steps = Steps(current, history, limit, bar, callback, improvement, tol, began, widest, best)
                try:
                    if optimizer == "adam":
                        adam(current, steps, learning_rate or 0.1)
                    else:
                        found = lbfgs(current, steps, inverse)
                        inverse = inverse if found is None else found
                except TooWide:
                    history.reason = WIDENED
                if history.reason == WIDENED:
                    current = next_objective(current, steps, own, acceleration, asked=objective)
                    continue
                own.restore(steps.best)
                history.bracket = bracket(current, own, acceleration, history)
                after = None if kind == history.objective else bound_at_last(own, acceleration, history)
                if after is None:
                    break
                current = after
        if flat and history.reason == SETTLED and flatness(model, seed):
            history.reason = FLAT
    except KeyboardInterrupt:
        history.reason = "interrupted"
        if not history.losses:
            raise
        warn(
            f"fit was interrupted after {len(history.losses)} steps; the model has the best parameters so far.",
        )
    finally:
        if steps is not None and history.losses:
            own.restore(steps.best)
            if current.model is not model:
                _copy_buffers(current.model, model)
            own.clear()
            model.eval()
        else:
            before.put_back()
        record.end()
    return history


def _away_from_flatness(model: Any, history: FitHistory, seed: int, start: str) -> str:
    """Lengthscales of the size of the data where the loss is flat otherwise; why it still is."""
    why = "" if start == "model" else rescale(model, seed)
    if why:
        history.notes.append(f"started from lengthscales of the size of the inputs: {why} with those of the model")
        warn(f"fit: {history.notes[-1]}. Standardise the inputs, or start nearer to their size.")
    why = flatness(model, seed)
    if why:
        warn(
            f"fit: with the lengthscales that it starts from {why}, and the loss does not change with them. "
            "Standardise the inputs, or start from lengthscales of their size."
        )
    return why


def _choices(acceleration: Acceleration | None) -> tuple[Any, ...]:
    """Of an accelerated model, those that a loss depends on."""
    if acceleration is None:
        return ()
    solver = dataclasses.replace(acceleration.conjugate_gradients(), max_seconds=None, checkpoint=None)
    return acceleration.preconditioner, solver, acceleration.matmul, acceleration.matmul_precision


@contextmanager
def _one_function(acceleration: Acceleration | None, history: FitHistory, seed: int, probes: int) -> Iterator[None]:
    """Losses inside are values of one function: the same probes, and by L-BFGS the same pivots."""
    if acceleration is None:
        yield
        return
    cache = acceleration.cache if history.optimizer == "lbfgs" else None
    with acceleration.fixed_probes(seed, probes), nullcontext() if cache is None else cache.holding():
        yield


def _from_subset(
    mll: Any, objective: Objective, history: FitHistory, seed: int, tol: float, show: bool, record: Record, asked: bool
) -> np.ndarray | None:
    """Give the objective the parameters of a fit to some of the rows; about the inverse Hessian there.

    :param asked: whether the user wants it, and is told where it cannot be.
    """
    twin = on_subset(mll, _SUBSET, seed)
    if twin is None:
        if asked:
            raise InputError(
                'fit: start="subset" expects a Gaussian likelihood and a model without a batch, of which rows can be '
                'taken; use start="model".'
            )
        return None
    history.subset = found = FitHistory(optimizer="lbfgs", objective="exact", rows=len(twin.model.train_targets))
    part = Objective(twin.model, twin, exact=True)
    part.stage = record.stage(None)
    limit = _ITERATIONS["lbfgs"]
    with tqdm(total=limit, desc=f"{found.rows} rows", unit="step", disable=not show, leave=False) as bar:
        improvement = partial(lbfgs_improvement, span=_SPAN["exact"])
        steps = Steps(part, found, limit, bar, None, improvement, tol, record.began)
        try:
            inverse = lbfgs(part, steps)
        except RuntimeError:  # a forward that holds what no copy converts
            if asked:
                raise
            history.subset = None
            return None
    objective.restore(steps.best)
    return inverse


@torch.no_grad()
def _copy_buffers(source: Any, target: Any) -> None:
    """What modules keep beside parameters, such as running means."""
    found = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in found and found[name].shape == buffer.shape and buffer.is_floating_point():
            buffer.copy_(found[name])


class _Before:
    """What a fit changes: parameters, modes, gradients, and the posterior that a model keeps."""

    def __init__(self, model: Any) -> None:
        self.model, self.strategy = model, model.prediction_strategy
        self.modes = [(part, part.training) for part in model.modules()]
        self.parameters = [(p, p.grad, p.detach().clone()) for p in model.parameters()]

    def put_back(self) -> None:
        self.model.train(self.modes[0][1])
        for part, mode in self.modes:
            part.training = mode
        for parameter, gradient, value in self.parameters:
            parameter.grad = gradient
            if not torch.equal(parameter, value):
                parameter.data.copy_(value)
        self.model.prediction_strategy = self.strategy

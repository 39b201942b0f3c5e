"""``fit(model)``: hyperparameters by marginal likelihood."""

from __future__ import annotations

import sys
import time
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
from .fitting.adam import settled as adam_settled
from .fitting.history import FitHistory
from .fitting.lbfgs import lbfgs
from .fitting.lbfgs import settled as lbfgs_settled
from .fitting.objective import Objective
from .fitting.start import exact_objective, on_subset
from .fitting.steps import Steps
from .inducing_point_gp import InducingPointGP
from .models.accelerated.acceleration import Acceleration
from .models.accelerated.leave_one_out import LeaveOneOutPseudoLikelihood
from .models.accelerated.marginal_likelihood import ExactMarginalLogLikelihood
from .models.accelerated.missing import reducing
from .models.accelerated.sampled_density import Samples, sampling
from .models.accelerated.threshold import cholesky_points, threshold_untouched
from .settings import memory_budget

_EXACT = {"cpu": 5000, "cuda": 20000}  # rows up to which losses are by factorization
_SUBSET = 2000  # rows of a subset to start from
_MANY = 3000  # rows above which one is started from
_ITERATIONS = {"lbfgs": 500, "adam": 50}
_SPAN = {"exact": 10, "bound": 10, "probes": 3, "given": 3}  # steps of L-BFGS over which a loss is judged,
_NEAR = 4  # and at the most where it starts from a subset's optimum


def fit(
    model: ExactGP,
    mll: Any = None,
    optimizer: str = "auto",
    start: str = "auto",
    iterations: int | None = None,
    learning_rate: float | None = None,
    num_probes: int = 10,
    seed: int = 0,
    tol: float = 1e-4,
    progress: bool | None = None,
    callback: Callable[[int, float], Any] | None = None,
) -> FitHistory:
    """Maximise the marginal likelihood of an accelerated model, or an :class:`InducingPointGP`, in place.

    The loss is computed *exactly*, by one factorization in float64, up to 5,000 rows (CUDA: 20,000) that fit the memory
    budget, unless ``accelerate`` was given a solver, or GPyTorch a ``max_cholesky_size``: ``n^3`` operations a loss.
    Above that it is estimated with *probes*, drawn once, so that the loss is the same function at every step; log
    determinant and gradient are as in Wenger et al. (arXiv:2107.00243), and the preconditioner's pivots are kept while
    they serve, by L-BFGS throughout.  The *bound* of an inducing-point model takes no probes.

    A solver that ``accelerate`` was given, ASkotch, say, that is neither conjugate gradients nor Cholesky, serves Adam,
    which is then what ``"auto"`` takes: gradients are those of *samples* that it solves for, with no n x r factor
    (:mod:`.models.accelerated.sampled_density`); losses are right but for a constant.  L-BFGS asked for, 800 rows or
    fewer and covariances other than one plain kernel with random features are as above.

    :param model: a model that :func:`accelerate` was called on, or an :class:`InducingPointGP`.  It is left in eval
        mode with the parameters of the best step; parameters with ``requires_grad=False`` stay as they are.
    :param mll: a GPyTorch marginal log likelihood (default: ``ExactMarginalLogLikelihood``), or
        ``LeaveOneOutPseudoLikelihood``.
    :param optimizer: ``"lbfgs"`` (SciPy's, within the bounds of constraints), ``"adam"``, or ``"auto"``: L-BFGS, but
        where a ``learning_rate`` is given, or for losses by samples.
    :param start: ``"model"`` starts from the model's parameters; ``"subset"`` first fits them to 2,000 random rows,
        exactly; ``"auto"`` does so with L-BFGS above 3,000 rows where it is known how to take rows of the model (a
        Gaussian likelihood and no batch).
    :param iterations: the most steps (default: 500 of L-BFGS, 50 of Adam).
    :param learning_rate: Adam's step size, in the unconstrained parameters (default 0.1).
    :param num_probes: probe vectors, or samples, of the log determinant.
    :param seed: of the probe vectors, the samples and the subset.
    :param tol: the loss has settled when ten steps of L-BFGS together improved it by less than this (four after a
        subset, three where it is estimated), or the mean of five steps of Adam over the five before.
    :param progress: show a progress bar (default: only in a terminal).
    :param callback: called with step and loss; returning True ends the fit.  Ctrl-C ends it too.
    :raises InputError: for a model that is not accelerated, or arguments that do not fit; the model is then as it was.
    :raises NumericalError: if the first loss is not finite.

    A call that ends in an error before there is a first loss leaves the model as it was: parameters, gradients, and
    which of its parts are in training mode.
    """
    acceleration = None if isinstance(model, InducingPointGP) else acceleration_of(model, "fit")
    checks.word("fit", "optimizer", optimizer, ("auto", "lbfgs", "adam"))
    checks.word("fit", "start", start, ("auto", "model", "subset"))
    iterations = checks.count("fit", "iterations", iterations, optional=True)
    num_probes = checks.count("fit", "num_probes", num_probes)
    if learning_rate is not None:
        learning_rate = checks.number("fit", "learning_rate", learning_rate, above=0, finite=True)
    seed, tol = checks.seed("fit", "seed", seed), checks.number("fit", "tol", tol)
    checks.flag("fit", "progress", progress, optional=True)
    checks.function("fit", "callback", callback)
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
    kind = _kind(model, mll, acceleration, optimizer)
    if optimizer == "auto":
        optimizer = "lbfgs" if learning_rate is None and kind != "samples" else "adam"
    began, before = time.perf_counter(), _Before(model)
    show = sys.stderr.isatty() if progress is None else progress
    history = FitHistory(optimizer=optimizer, objective=kind)
    own = Objective(model, mll, exact=False)
    steps: Steps | None = None
    try:
        model.train()
        objective = exact_objective(model, mll) if history.objective == "exact" else own
        history.rows = int(model.train_targets.shape[-1 if model.train_targets.dim() == 1 else -2])
        inverse = None
        many = history.rows > _MANY and history.objective in ("exact", "probes", "samples")
        if start == "subset" or (start == "auto" and many and (optimizer == "lbfgs" or kind == "samples")):
            inverse = _from_subset(mll, objective, history, seed, tol, show, began, asked=start == "subset")
        limit = iterations or _ITERATIONS[optimizer]
        with (
            _one_function(acceleration, history, seed, num_probes),
            tqdm(total=limit, desc="marginal likelihood", unit="step", disable=not show, leave=False) as bar,
        ):
            if optimizer == "adam":
                steps = Steps(objective, history, limit, bar, callback, adam_settled, tol, began)
                adam(objective, steps, learning_rate or 0.1)
            else:
                span = _SPAN[history.objective]
                settled = partial(lbfgs_settled, span=span if inverse is None else min(span, _NEAR))
                steps = Steps(objective, history, limit, bar, callback, settled, tol, began)
                lbfgs(objective, steps, inverse)
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
            if objective is not own:
                _copy_buffers(objective.model, model)
            own.clear()
            model.eval()
        else:
            before.put_back()
    return history


def _kind(model: Any, mll: Any, acceleration: Acceleration | None, optimizer: str) -> str:
    """How losses are computed."""
    if acceleration is None:
        return "bound"
    pseudo = isinstance(mll, gpytorch.mlls.LeaveOneOutPseudoLikelihood)
    if pseudo or not isinstance(mll, gpytorch.mlls.ExactMarginalLogLikelihood):
        return "given"
    event = 2 if isinstance(model.likelihood, gpytorch.likelihoods.MultitaskGaussianLikelihood) else 1
    shape = model.train_targets.shape
    rows, device = shape[-event:].numel(), model.train_targets.device
    if optimizer != "lbfgs" and rows > cholesky_points() and _sampled(model, acceleration):
        return "samples"
    fits = 8 * rows * rows * shape[:-event].numel() <= memory_budget.value(device)
    free = isinstance(acceleration.solver, str) and threshold_untouched()
    return "exact" if free and fits and rows <= _EXACT.get(device.type, _EXACT["cpu"]) else "probes"


def _sampled(model: Any, acceleration: Acceleration) -> bool:
    """Whether losses are by samples that the solver of the user's choice solves for."""
    if isinstance(acceleration.solver, str):
        return False
    before = _Before(model)
    try:
        with torch.inference_mode(False), torch.no_grad(), reducing():
            prior = model.train()(*model.train_inputs)
            return Samples.serve(acceleration, model.likelihood(prior).lazy_covariance_matrix.evaluate_kernel())
    finally:
        before.put_back()


@contextmanager
def _one_function(acceleration: Acceleration | None, history: FitHistory, seed: int, probes: int) -> Iterator[None]:
    """Losses inside are values of one function: the same probes, and by L-BFGS the same pivots."""
    if acceleration is None:
        yield
        return
    cache = acceleration.cache if history.optimizer == "lbfgs" else None
    if history.objective == "samples":
        with sampling(Samples(acceleration, seed, probes)):
            yield
        return
    with acceleration.fixed_probes(seed, probes), nullcontext() if cache is None else cache.holding():
        yield


def _from_subset(
    mll: Any, objective: Objective, history: FitHistory, seed: int, tol: float, show: bool, began: float, asked: bool
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
    limit = _ITERATIONS["lbfgs"]
    with tqdm(total=limit, desc=f"{found.rows} rows", unit="step", disable=not show, leave=False) as bar:
        settled = partial(lbfgs_settled, span=_SPAN["exact"])
        steps = Steps(part, found, limit, bar, None, settled, tol, began)
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

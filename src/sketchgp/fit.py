"""``fit(model)``: hyperparameters by marginal likelihood."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import gpytorch
import torch
from gpytorch.models import ExactGP

from . import checks
from .accelerate import acceleration_of
from .distributed import Shards, in_force
from .errors import InputError
from .fitting.history import FitHistory
from .fitting.run import Choices, Fit
from .inducing_point_gp import InducingPointGP
from .interactive import shows_progress
from .models.accelerated.leave_one_out import LeaveOneOutPseudoLikelihood
from .models.accelerated.marginal_likelihood import ExactMarginalLogLikelihood
from .models.accelerated.targets import check_noise, check_targets


def fit(
    model: ExactGP,
    mll: Any = None,
    optimizer: Literal["auto", "lbfgs", "adam"] = "auto",
    start: Literal["auto", "model", "subset"] = "auto",
    objective: Literal["auto", "exact", "bound", "probes", "samples"] = "auto",
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
    budget, unless ``accelerate`` was given a solver, or GPyTorch a ``max_cholesky_size``: ``n^3`` operations a loss
    (and whatever n is with the solver :class:`Cholesky`).
    Above that an upper *bound* of it is minimised where it is within 0.002 a row of a lower one: of Artemev, Burt, van
    der Wilk (arXiv:2102.08314), with exact gradients, and no random number but those of the pivots.  Elsewhere the loss
    is estimated with *probes*, drawn once, so that it is the same function at every step; log determinants are as in
    Wenger et al. (arXiv:2107.00243), gradients their derivatives, and the preconditioner's pivots are kept while they
    serve, by L-BFGS throughout.  Bounds that become wider on the way are made anew, with more pivots, or left for
    probes, and probes whose solves take longer than a factorization that fits into memory are left for exact losses;
    never within a line search, and ``FitHistory.notes`` say so.  An inducing-point model has a *bound* of its own.

    A solver that ``accelerate`` was given, ASkotch, say, that is neither conjugate gradients nor Cholesky, serves Adam,
    which is then what ``"auto"`` takes: gradients are those of *samples* that it solves for, with no n x r factor
    (:mod:`.density.samples`); losses are right but for a constant.  L-BFGS asked for, 800 rows or
    fewer (2,000 with BoTorch) and covariances other than one plain kernel with random features are as above.

    :param model: a model that :func:`accelerate` was called on, or an :class:`InducingPointGP`.  It is left in eval
        mode with the parameters of the best step; parameters with ``requires_grad=False`` stay as they are.
    :param mll: a GPyTorch marginal log likelihood (default: ``ExactMarginalLogLikelihood``), or
        ``LeaveOneOutPseudoLikelihood``.
    :param optimizer: ``"lbfgs"`` (SciPy's, within the bounds of constraints), ``"adam"``, or ``"auto"``: L-BFGS, but
        where a ``learning_rate`` is given, or for losses by samples.
    :param start: ``"model"`` starts from the model's parameters; ``"subset"`` first fits them to 2,000 random rows,
        exactly, then, from 8,000, 40,000, 96,000 and 320,000 rows on, to 5,000, 16,000, 40,000 and 128,000 of them;
        ``"auto"`` does so with L-BFGS above 3,000 rows where it is known how to take rows of the model (a Gaussian
        likelihood and no batch).  Both, and ``"auto"`` with L-BFGS on exact losses, or an :class:`InducingPointGP`, of
        more than 1,000 rows, begin with fits to 500 rows (25 for each hyperparameter, where that is more, and at most
        1,000; 1,000 where all are 8,000 or more) from three starts, the model's parameters, and lengthscales of 3 and
        of 0.3 times the size of what the kernel is given, with a noise of 0.01 and 0.001 of the targets' variance, and
        go on from the best one with 1,000; up to 1,000 rows ``"auto"`` goes on at the best end.  Where only one start
        came to the lowest end a fourth is tried.  Output scale and noise that are of another unit than the targets,
        and lengthscales with which every point is alone, or all are alike, so that the loss does not change with them,
        are first given the size of the data, the latter with a warning; with ``"model"`` there is only the warning.
    :param objective: ``"exact"``, ``"bound"``, ``"probes"`` or ``"samples"``, or ``"auto"`` as above.  A bound that is
        asked for is minimised however wide it is.
    :param iterations: the most steps (default: 500 of L-BFGS, 50 of Adam) of each fit: to all rows, to some of them,
        and from each start.
    :param learning_rate: Adam's step size, in the unconstrained parameters (default 0.1).
    :param num_probes: probe vectors, or samples, of the log determinant.
    :param seed: of the probe vectors, the samples and the subset.
    :param tol: the loss has settled when ten steps of L-BFGS together improved it by less than this (four after a
        subset, three where it is estimated), or the mean of five steps of Adam over the five before.  An estimated
        loss has settled, too, when the improvement is smaller than half its standard error, by the spread of the
        probes; not so where ``tol`` is 0 or less.
    :param progress: show a progress bar (default: in a terminal or notebook).
    :param callback: called with step and loss; returning True ends the fit.  Ctrl-C ends it too.  Fits to some of the
        rows, and from another start, call it as well; each counts its own steps.
    :param checkpoint: a file that keeps every evaluation (tensors only).  Where it exists, the fit goes through them at
        no cost, one of each choice of pivots and the last of each bound excepted, and then on: to the bits that an
        uninterrupted one ends with (on the same device and number of threads), from the parameters that the first run
        began with.  Of another model, other data or other choices than ``iterations`` and ``tol`` it is refused; so is
        one that another fit is using, and any for losses by samples.
    :param every: seconds between two writes of the checkpoint.

    Where several ranks work together (:func:`sketchgp.distributed.sharded`), rank 0 says what the callback does.

    :raises InputError: for a model that is not accelerated, or arguments that do not fit; the model is then as it was.
    :raises NumericalError: if the first loss is not finite.

    A call that ends in an error before there is a first loss leaves the model as it was: parameters, gradients, and
    which of its parts are in training mode.
    """
    acceleration = None if isinstance(model, InducingPointGP) else acceleration_of(model, "fit")
    if acceleration is not None:
        check_targets(model, built=True)
        check_noise(model.likelihood, model.train_targets)
    checks.word("fit", "optimizer", optimizer, ("auto", "lbfgs", "adam"))
    checks.word("fit", "start", start, ("auto", "model", "subset"))
    checks.word("fit", "objective", objective, ("auto", "exact", "bound", "probes", "samples"))
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
    if missing and gpytorch.settings.observation_nan_policy.value() != "mask":
        raise InputError('fit: the training targets hold NaN; wrap the call in observation_nan_policy("mask").')
    if mll is None:
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
    elif type(mll) is gpytorch.mlls.ExactMarginalLogLikelihood:  # the same, and knows of missing targets
        mll = ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    elif type(mll) is gpytorch.mlls.LeaveOneOutPseudoLikelihood:  # the same, by sketchgp's solves
        mll = LeaveOneOutPseudoLikelihood(mll.likelihood, mll.model)
    choices = Choices(optimizer, start, objective, iterations, learning_rate, num_probes, seed, tol)
    show = shows_progress(progress)
    shards = in_force()
    if shards is not None:
        show, callback = show and shards.rank == 0, _of_rank_0(callback, shards)
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # gradients are wanted
        return Fit(model, mll, acceleration, choices, show, callback, checkpoint, every)()


def _of_rank_0(callback: Callable[[int, float], Any] | None, shards: Shards) -> Callable[[int, float], bool]:
    """Each rank calls its own, and rank 0's says whether the fit ends."""
    return lambda step, loss: bool(shards.agree(bool(callback is not None and callback(step, loss))))

"""``fit(model)``: hyperparameters by marginal likelihood."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from gpytorch.models import ExactGP

from . import checks
from .accelerate import acceleration_of
from .cards import shows_progress
from .distributed import in_force
from .errors import InputError
from .fitting.history import FitHistory
from .fitting.run import Choices, Fit
from .inducing_point_gp import InducingPointGP
from .models.accelerated.marginal_likelihoods import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from .models.accelerated.targets import check_noise, check_targets, check_training_data


def fit(
    model: ExactGP,
    mll: Any = None,
    optimizer: Literal["auto", "lbfgs", "adam"] = "auto",
    start: Literal["auto", "model", "subset"] = "auto",
    objective: Literal["auto", "exact", "probes", "samples"] = "auto",
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

    The page on tuning says what ``"auto"`` chooses and why, which fits to fewer rows and from other starts come first,
    and when a fit goes on with another objective.

    :param model: a model that :func:`accelerate` was called on, or an :class:`InducingPointGP`.  It is left in eval
        mode with the parameters of the best step; parameters with ``requires_grad=False`` stay as they are.
    :param mll: a GPyTorch marginal log likelihood (default: ``ExactMarginalLogLikelihood``), or
        ``LeaveOneOutPseudoLikelihood``.
    :param optimizer: ``"lbfgs"`` (SciPy's, within the bounds of constraints), ``"adam"``, or ``"auto"``: L-BFGS, but
        Adam where a ``learning_rate`` is given or losses are by samples.
    :param start: ``"model"``, the model's parameters; ``"subset"``, the optimum of 2,000 random rows or more; or
        ``"auto"``.  Both of the latter compare at least three starts on 500 to 1,000 rows.
    :param objective: ``"exact"``, by factorizations in float64; ``"probes"``, estimated; ``"samples"``, up to a
        constant by a solver that ``accelerate`` was given; or ``"auto"``.
    :param iterations: the most steps (default: 500 of L-BFGS, 50 of Adam) of each fit, those to some rows included.
    :param learning_rate: Adam's step size, in the unconstrained parameters (default 0.1).
    :param num_probes: number of probe vectors, or samples, of the log determinant.
    :param seed: seed of the probe vectors, the samples and the subset.
    :param tol: the loss has settled when ten steps of L-BFGS together improved it by less (four after a subset, three
        where it is estimated), or the mean of five steps of Adam over the five before.  After a subset it has settled,
        too, when the steps to come promise less, by the curvature or, where the loss is not exact, by how the last ones
        have shrunk.  So has an estimated loss at an improvement below half its standard error, unless ``tol`` is 0 or
        less.
    :param progress: show a progress bar (default: in a terminal or notebook).
    :param callback: called with step and loss, in each fit; returning True ends the fit, as Ctrl-C does.  Where several
        ranks work together (:func:`sketchgp.distributed.sharded`), rank 0 decides.
    :param checkpoint: a file that keeps every evaluation; not for samples.  Where it exists, a fit with the same
        choices but ``iterations`` and ``tol`` goes on from it, to the bits of an uninterrupted one.
    :param every: seconds between two writes of the checkpoint.
    :raises InputError: for a model that is not accelerated, or arguments that do not fit; the model is then as it was.
    :raises NumericalError: if the first loss is not finite; the model is then as it was.
    """
    _check_model(model)
    choices = Choices(optimizer, start, objective, iterations, learning_rate, num_probes, seed, tol)
    checks.flag("fit", "progress", progress, optional=True)
    checks.function("fit", "callback", callback)
    checkpoint = checks.path("fit", "checkpoint", checkpoint, optional=True)
    every = checks.number("fit", "every", every, above=0)
    mll, (show, callback) = _solved_by_us(model, mll), _of_rank_0(shows_progress(progress), callback)
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # gradients are wanted
        return Fit(model, mll, choices, show, callback, checkpoint, every)()


def _check_model(model: Any) -> None:
    """:raises InputError: for a model that cannot be fitted."""
    if not isinstance(model, InducingPointGP):
        acceleration_of(model, "fit")
        check_targets(model, built=True)
        check_noise(model.likelihood, model.train_targets)
    check_training_data("fit", model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("fit: model expects at least one parameter that requires a gradient, got none.")


def _solved_by_us(model: Any, mll: Any) -> Any:
    """Return the marginal log likelihood, as the library's own class where it is one of GPyTorch's that it extends."""
    checks.function("fit", "mll", mll)
    if getattr(mll, "model", model) is not model:
        raise InputError("fit: mll expects to be of the model that is fitted, got one of another model.")
    if mll is None:
        return ExactMarginalLogLikelihood(model.likelihood, model)
    for ours in (ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood):
        if type(mll) is ours.__base__:
            return ours(mll.likelihood, mll.model)
    return mll


def _of_rank_0(
    show: bool, callback: Callable[[int, float], Any] | None
) -> tuple[bool, Callable[[int, float], Any] | None]:
    """Return whether this rank shows progress, and a callback whose answer on rank 0 all ranks follow."""
    shards = in_force()
    if shards is None:
        return show, callback

    def agreed(step: int, loss: float) -> bool:
        return bool(shards.agree(bool(callback is not None and callback(step, loss))))

    return show and shards.rank == 0, agreed

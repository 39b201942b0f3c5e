"""The posterior of an accelerated model, without GPyTorch's toggling of ``cg_tolerance`` for the whole process.

``ExactGP.__call__`` sets the tolerance of training to that of evaluation while it predicts, and puts it back: of two
threads one can put back the other's.  Where every solve is sketchgp's, its parts (GPyTorch's hooks) are called here
instead, and every solve is told its tolerance.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from gpytorch import settings
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import LinearPredictionStrategy, prediction_strategy
from gpytorch.utils.warnings import GPInputWarning
from torch import Tensor

from ...errors import ConvergenceWarning, warn
from ...fingerprint import Held, data_key, module_key
from ...operators.lazies import KERNELS, take_caches
from ...report import SolveReport, merged, own_solves
from .acceleration import ATTRIBUTE
from .added_diag import AcceleratedAddedDiagLinearOperator
from .strategy import AcceleratedPredictionStrategy, adopt, followed_points, some_rows
from .targets import check_noise, check_targets
from .training import remembered_by

_GPYTORCH = threading.RLock()  # held while GPyTorch itself predicts for an accelerated model


def strategy_of(model: Any, **kwargs: Any) -> Any:
    """Return the prediction strategy of a model in eval mode, made where there is none; one for all threads."""
    with model.__dict__[ATTRIBUTE].lock:
        strategy = model.prediction_strategy
        if strategy is None:
            check_targets(model, built=True)  # set_train_data accepts any shape
            check_noise(model.likelihood, model.train_targets)
            train = list(model.train_inputs)
            prior = model._get_train_prior_distribution(train, **kwargs)
            strategy = adopt(prediction_strategy(train, prior, model.train_targets, model.likelihood), prior)
            model.prediction_strategy = strategy
    return strategy


def clear_cache(model: Any) -> None:
    """Let a model forget its prediction strategy, and with it the solution behind its mean."""
    model._clear_cache()


def note_strategy(model: Any, strategy: Any) -> None:
    """Note the parameters and data that a new strategy is of."""
    if model.train_inputs is not None and model.train_targets is not None:
        remembered_by(strategy).key = solution_key(model)


def drop_stale_strategy(model: Any) -> None:
    """Drop the prediction strategy of other parameters, data or settings, and what kernels have cached with it."""
    with model.__dict__[ATTRIBUTE].lock:
        strategy = model.prediction_strategy
        if strategy is not None and remembered_by(strategy).key != solution_key(model):
            clear_cache(model)
            for part in model.modules():
                take_caches(part)


def solution_key(model: Any) -> tuple[Any, ...]:
    """Return a key of everything that the solution behind a model's mean depends on.

    A strategy keeps parts of the model: others of equal values are others.
    """
    asked = (settings.observation_nan_policy, settings.eval_cg_tolerance, settings.max_cg_iterations,
             settings.max_preconditioner_size)  # fmt: skip
    with KERNELS:  # meanwhile no kernel computes with parameters of others
        parts, data = (model.likelihood, *model.parameters()), (*model.train_inputs, model.train_targets)
        return (*(one.value() for one in asked), *map(Held, parts), *map(data_key, data), *module_key(model))


def solves_all(strategy: Any) -> bool:
    """Return True if no solve behind a strategy's posterior is by GPyTorch's own iterations."""
    remembered = remembered_by(strategy)
    if remembered.solved_by_us is None:
        noisy = strategy.lik_train_train_covar
        remembered.solved_by_us = isinstance(noisy, AcceleratedAddedDiagLinearOperator) and (
            noisy.factorizes_solves or isinstance(noisy.evaluate_kernel(), AcceleratedAddedDiagLinearOperator)
        )
    return remembered.solved_by_us


def calls_its_own_way(model: Any) -> bool:
    """Return True if the class of an accelerated model has a ``__call__`` of its own, which may do anything."""
    return type(model).__bases__[1].__call__ is not ExactGP.__call__


def call(model: Any, plain_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``model(*args, **kwargs)`` of an accelerated model.

    :param plain_call: the method that GPyTorch would have called.
    """
    known = model.train_inputs is not None and model.train_targets is not None
    if model.training or settings.prior_mode.on() or not known:
        return plain_call(*args, **kwargs)
    drop_stale_strategy(model)
    if plain_call.__func__ is not ExactGP.__call__ or not solves_all(strategy_of(model, **kwargs)):
        with _GPYTORCH:
            return plain_call(*args, **kwargs)
    inputs = [x.unsqueeze(-1) if x.dim() == 1 else x for x in args]
    if settings.debug.on() and all(map(torch.equal, model.train_inputs, inputs)):
        warn("The input matches the stored training data. Did you forget to call model.train()?", GPInputWarning)
    strategy = strategy_of(model, **kwargs)
    mean, covariance, cross, batch, shape, posterior = _test_prior(model, inputs, **kwargs)
    mean, covariance = strategy.exact_prediction(test_mean=mean, test_test_covar=covariance, test_train_covar=cross)
    return posterior(mean.view(*batch, *shape).contiguous(), covariance)


def _test_prior(model: Any, inputs: list[Tensor], **kwargs: Any) -> tuple[Any, ...]:
    """Return prior mean and covariances of test inputs, and shapes and class of their posterior, as GPyTorch does."""
    train = list(model.train_inputs)
    return model._get_test_prior_mean_and_covariances(train_inputs=train, test_inputs=inputs, **kwargs)


def solve_for_mean(model: Any, x: Tensor | None) -> None:
    """Let the strategy of a model in eval mode solve for the weights behind its mean, and keep them.

    :param x: where the mean is wanted ``(m, d)``, if that is known.
    """
    strategy = strategy_of(model)

    def points() -> tuple[Tensor, Tensor] | None:
        if x is None or x.dim() != 2:
            return None
        some = x[some_rows(len(x)).to(x.device)]
        with torch.no_grad():
            _, covariance, cross, *_ = _test_prior(model, [some])
        return followed_points(covariance, cross)

    if isinstance(strategy, AcceleratedPredictionStrategy):
        strategy.solve_mean(points)
    else:
        _ = strategy.mean_cache


def solution_report(model: Any, x: Tensor | None = None) -> SolveReport | None:
    """Return the report of the solution behind the mean, of the present parameters, data and settings, which is kept.

    A solution that fell short of its tolerance warns each time it is used.

    :param x: where the mean is wanted, if that is known.
    """
    with model.__dict__[ATTRIBUTE].lock:
        drop_stale_strategy(model)
        strategy = strategy_of(model)
        with own_solves() as solves:
            solve_for_mean(model, x)
        if solves:
            strategy.report = merged(solves)
        report = getattr(strategy, "report", None)
    if report is not None and not report.converged and not solves:
        warn(report.advice(), ConvergenceWarning)
    return report


def use_weights(model: Any, weights: Tensor) -> None:
    """Give a model the solution of ``(K + noise) weights = y - mean``, so that its mean needs no solve.

    :param model: an accelerated model in eval mode, with its training data.
    :param weights: ``(n,)``, float64 and on its device, taken on trust.
    """
    with torch.no_grad():
        clear_cache(model)
        strategy_of(model).set_weights(weights)


def mean_at(model: Any, *x: Tensor) -> tuple[Tensor, int]:
    """Return the posterior mean at x ``(m, d)`` without variances, and the number of dimensions of one draw.

    :param model: in eval mode.
    """
    if calls_its_own_way(model):
        posterior = model(*x)
        return posterior.mean, len(posterior.event_shape)
    strategy = strategy_of(model)
    mean, covariance, cross, batch, shape, _ = _test_prior(model, list(x))
    if isinstance(strategy, LinearPredictionStrategy):  # its mean comes with the covariance, without a solve
        mean, _ = strategy.exact_prediction(test_mean=mean, test_test_covar=covariance, test_train_covar=cross)
    else:
        mean = strategy.exact_predictive_mean(mean, cross)
    return mean.view(*batch, *shape), len(shape)

"""Targets of accelerated models: checks of their shape, and missing ones.

GPyTorch's marginal likelihood subtracts the prior mean ``(n,)`` from the targets whatever their shape is: with targets
``(n, 1)`` the difference is ``(n, n)``, a batch of n residuals that nobody meant.

Under ``observation_nan_policy("mask")`` GPyTorch wraps ``K + noise`` in a ``MaskedLinearOperator``, which has no
preconditioner and whose conjugate gradients are its own.  Here the rows and columns of observed targets are taken
first, and are a system of their own.  The prediction strategy of an accelerated model does that by itself; in training
it takes :class:`sketchgp.ExactMarginalLogLikelihood`, as GPyTorch's wraps whatever it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from linear_operator.operators import DiagLinearOperator, LinearOperator, MaskedLinearOperator
from torch import Tensor

from ...errors import InputError
from .acceleration import Acceleration
from .added_diag import AcceleratedAddedDiagLinearOperator, summands


def check_targets(model: Any, built: bool) -> None:
    """Refuse targets that are not ``(..., n)``, or ``(..., n, t)`` of a model of t outputs, and inputs with NaN.

    The likelihood tells which of the two is right, and where it does not, the model's prior at the training inputs.

    :param built: False inside a constructor: there is no prior yet.
    :raises InputError: naming both shapes.
    """
    if model.train_targets is None or not model.train_inputs:
        return
    for number, x in enumerate(model.train_inputs):
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise InputError(f"The model's training inputs (number {number}) hold NaN or infinity.")
    targets, inputs = model.train_targets, model.train_inputs[0]
    n, batch, shape = inputs.shape[-2], inputs.shape[:-2], targets.shape
    if shape[-1:] == (n,) and _broadcast(shape[:-1], batch):
        return
    several = isinstance(model.likelihood, _MultitaskGaussianLikelihoodBase)
    outputs = getattr(model.likelihood, "num_tasks", None) or shape[-1]
    if several and shape[-2:] == (n, outputs) and _broadcast(shape[:-2], batch):
        return
    event = _event_shape(model) if built else None
    if event is None and len(shape) > 1 and shape[-2] == n and shape[-1] > 1:
        return  # several outputs of another likelihood, which log densities check again
    if event is not None and shape[-len(event) :] == event and _broadcast(shape[: -len(event)], batch):
        return
    if event is not None and event.numel() > n and targets.numel() % event.numel() == 0:
        return  # several outputs that the model's distribution has flattened
    raise InputError(_message(shape, torch.Size([*batch, n]), n))


def check_noise(likelihood: Any, targets: Tensor | None) -> None:
    """Refuse a fixed noise that is not one number for each target ``(..., n)``: GPyTorch adds none then.

    :raises InputError: naming both shapes.
    """
    noise_model = getattr(likelihood, "noise_covar", None)
    if targets is None or not isinstance(noise_model, FixedGaussianNoise):
        return
    noise = noise_model.noise
    if noise.shape[-1:] != targets.shape[-1:] or not _broadcast(noise.shape[:-1], targets.shape[:-1]):
        raise InputError(
            f"The likelihood's fixed noise has shape {tuple(noise.shape)} where the training targets have "
            f"{tuple(targets.shape)}; set one noise for each target with likelihood.noise = noise (or give the model a "
            "new FixedNoiseGaussianLikelihood)."
        )


def check_value(value: Tensor, event: torch.Size) -> None:
    """Refuse values of a log density that do not end in the shape of its distribution's event.

    :raises InputError: naming both shapes.
    """
    if value.shape[-len(event) :] != event:
        raise InputError(_message(value.shape, event, event[0]))


def _message(shape: torch.Size, expected: torch.Size, n: int) -> str:
    what = f"The training targets have shape {tuple(shape)} where the model expects {tuple(expected)}"
    if shape[-1:] == (1,) and shape[-2:-1] == (n,):
        return f"{what}, one number a point; use train_y.squeeze(-1)."
    return f"{what}; give it one target for each of the {n} points (and of its outputs, if it has several)."


def _broadcast(shape: torch.Size, batch: torch.Size) -> bool:
    try:
        torch.broadcast_shapes(shape, batch)
    except RuntimeError:
        return False
    return True


def _event_shape(model: Any) -> torch.Size | None:
    """Return the event shape of the prior at the training inputs; None where the model's forward gives none."""
    with torch.no_grad():
        try:
            prior = model.forward(*model.train_inputs)
        except Exception:  # a forward of the user's: it will say what it lacks when the model is called
            return None
    return prior.event_shape if isinstance(prior, MultivariateNormal) else None


# --- missing targets ------------------------------------------------------------------------------------


def marginal_of_all(likelihood: Any, prior: Any, *params: Any, **kwargs: Any) -> Any:
    """Return ``likelihood(prior)`` of all targets, which the caller reduces to the observed ones.

    :func:`observed_part` takes the rows and columns; nothing is refused here.
    """
    return getattr(likelihood, "marginal_of_all", likelihood)(prior, *params, **kwargs)


def check_has_data(owner: str, model: Any) -> None:
    """:raises InputError: for a model without training data."""
    if model.train_inputs is None or model.train_targets is None:
        raise InputError(f"{owner}: model expects training data, got none.")


def check_training_data(owner: str, model: Any) -> None:
    """Refuse a model without training data, or with missing targets where GPyTorch's policy does not mask them.

    :param owner: name of the function that asks.
    :raises InputError: naming what to do.
    """
    check_has_data(owner, model)
    if bool(torch.isnan(model.train_targets).any()) and settings.observation_nan_policy.value() != "mask":
        raise InputError(f'{owner}: the training targets hold NaN; wrap the call in observation_nan_policy("mask").')


def check_reduced(n: int) -> None:
    """Refuse a marginal likelihood that masks rows by itself and would leave the solve to GPyTorch's iterations.

    :param n: rows of the training covariance.
    :raises InputError: naming what to use instead.
    """
    factorized = n <= settings.max_cholesky_size.value() or settings.fast_computations.log_prob.off()
    if not factorized:
        raise InputError(
            'Under observation_nan_policy("mask"), training an accelerated model expects a loss that solves for what '
            "was observed: sketchgp.ExactMarginalLogLikelihood(likelihood, model) in place of GPyTorch's, or "
            "sketchgp.fit."
        )


def refuse_missing(owner: str, targets: Tensor) -> None:
    """:raises InputError: where targets are NaN."""
    if bool(torch.isnan(targets).any()):
        raise InputError(f"{owner} expects targets without NaN; give the model the observed rows by set_train_data.")


def observed_targets(targets: Tensor, event: torch.Size) -> Tensor:
    """Return where every element of the batch has a target, a bool tensor of the shape ``event``.

    :raises InputError: where that is nowhere.
    """
    observed = ~torch.isnan(targets.reshape(-1, *event)).any(dim=0)
    if not bool(observed.any()):
        raise InputError("The targets expect at least one that is not NaN (in every element of a batch).")
    return observed


def observed_rows(targets: Tensor) -> Tensor | None:
    """Return which targets ``(n,)`` a posterior is conditioned on, or None for all.

    None is also returned where GPyTorch's policy has a way of its own: ``"ignore"``, and ``"fill"`` where elements of a
    batch miss different targets.

    :param targets: ``(..., n)``.
    """
    missing = torch.isnan(targets)
    policy = settings.observation_nan_policy.value()
    if policy == "ignore" or not bool(missing.any()):
        return None
    alike = bool((missing == missing.reshape(-1, missing.shape[-1])[0]).all())
    if policy == "fill" and not alike:
        return None
    return observed_targets(targets, targets.shape[-1:])


def observed_part(covariance: LinearOperator, observed: Tensor, acceleration: Acceleration) -> LinearOperator:
    """Return the rows and columns of ``K + noise`` where ``observed`` ``(n,)`` is true, to be solved by sketchgp.

    :raises InputError: for a sum without a diagonal, whose noise is correlated between outputs.
    """
    covariance = covariance.evaluate_kernel()
    if isinstance(covariance, AcceleratedAddedDiagLinearOperator):
        return covariance.masked(observed)
    parts = summands(covariance)
    if parts is None:
        raise InputError(
            f"Missing targets expect a noise of its own for each output; the model's covariance with noise is a "
            f"{type(covariance).__name__}. Use MultitaskGaussianLikelihood(rank=0)."
        )
    # Kronecker products and low-rank matrices: their structure does not survive the selection, their products do
    latent, diagonal = parts
    kept = MaskedLinearOperator(latent, observed, observed)
    noise = DiagLinearOperator(diagonal.diagonal(dim1=-1, dim2=-2)[..., observed])
    return AcceleratedAddedDiagLinearOperator(kept, noise, acceleration=acceleration)

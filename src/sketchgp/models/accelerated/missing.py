"""Missing targets under ``observation_nan_policy("mask")``: the observed ones are a system of their own.

GPyTorch wraps ``K + noise`` in a ``MaskedLinearOperator``, which has no preconditioner and whose conjugate gradients
are its own.  Here the rows and columns are taken first.  The prediction strategy of an accelerated model does that by
itself; in training it takes :class:`sketchgp.ExactMarginalLogLikelihood`, as GPyTorch's wraps whatever it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import settings
from linear_operator.operators import DiagLinearOperator, LinearOperator, MaskedLinearOperator
from torch import Tensor

from ...errors import InputError
from .acceleration import Acceleration
from .added_diag import AcceleratedAddedDiagLinearOperator, summands


def marginal_of_all(likelihood: Any, prior: Any, *params: Any, **kwargs: Any) -> Any:
    """Return ``likelihood(prior)`` of all targets, which the caller reduces to the observed ones.

    :func:`observed_part` takes the rows and columns; nothing is refused here.
    """
    marginal = getattr(likelihood, "marginal_of_all", likelihood)
    return marginal(prior, *params, **kwargs)


def check_observed(model: Any, owner: str = "") -> None:
    """Refuse missing targets where GPyTorch's policy does not mask them.

    :param owner: name of the function that asks, with which the message begins.
    :raises InputError: naming the policy.
    """
    if bool(torch.isnan(model.train_targets).any()) and settings.observation_nan_policy.value() != "mask":
        what = f"{owner}: the" if owner else "The"
        raise InputError(f'{what} training targets hold NaN; wrap the call in observation_nan_policy("mask").')


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


def observed_targets(targets: Tensor, event: torch.Size) -> Tensor:
    """Return where every element of the batch has a target, a bool tensor of the shape ``event``.

    :raises InputError: where that is nowhere.
    """
    observed = settings.observation_nan_policy._get_observed(targets, event)
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

"""The log density of a normal distribution, and the base class of the ways to compute it.

GPyTorch asks ``fast_computations.log_prob`` whether to call ``inv_quad_logdet``, and ``import botorch`` turns that off
for the process.  :func:`log_density` calls it whatever these settings say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor

from ..preconditioners import PreconditionerCache


@dataclass(frozen=True)
class Solutions:
    """Solutions of the last evaluation of a fit, at hyperparameters near those that were kept.

    :ivar seed: seed of the samples.
    :ivar targets: solutions for the model's targets less its mean, ``(n, t)`` float64.
    :ivar samples: solutions for the samples, ``(n, S)`` float64.
    """

    seed: int
    targets: Tensor
    samples: Tensor


class LogDensity:
    """One way to compute the quadratic form and the log determinant of a Gaussian log density, with their gradient.

    An accelerated model carries one, which its operator ``A = K + noise`` calls.  ``fit`` holds the one it minimises.

    :cvar always: whether it is used for few rows, too, which GPyTorch otherwise factorizes.
    :cvar exact: whether values are exact up to rounding.
    :ivar values: the loss by each probe since :meth:`begin`, ``(s,)`` float64 for every log determinant.
    :ivar cache: its own cache of preconditioners; None where it uses the model's.
    :ivar solutions: solutions of the latest evaluation, for solves to start from; None where there are none.
    """

    always: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    values: tuple[Tensor, ...] = ()
    cache: PreconditionerCache | None = None
    solutions: Solutions | None = None

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``r^T A^-1 r`` of each column and ``log det A``, differentiable once in A and r.

        :param operator: A, an accelerated operator ``(..., n, n)``, evaluated.
        :param columns: r, ``(..., n, t)``; t may be 0, for the log determinant alone, where these are :class:`Probes`.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Forget ``values`` before the next evaluation."""
        self.values = ()


def bilinear_derivative(operator: Any, left: Tensor, right: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``tr(left^T A right)`` for what A is made of, computed in the dtype of A."""
    return operator._bilinear_derivative(left.to(operator.dtype), right.to(operator.dtype))


def log_density(distribution: Any, value: Tensor) -> Tensor:
    """Return ``log N(value; mean, C)``, in the shape of the batch.

    :param distribution: a GPyTorch ``MultivariateNormal``, or one of several tasks.
    :param value: ``(..., n)``, or ``(..., n, t)`` for t tasks; it may have more batch dimensions than the distribution.
    """
    if isinstance(distribution, MultitaskMultivariateNormal):
        ordered = value if distribution._interleaved else value.mT
        value = ordered.reshape(*value.shape[:-2], -1)
    residual = value - distribution.loc
    covariance = distribution.lazy_covariance_matrix
    batch = torch.broadcast_shapes(residual.shape[:-1], covariance.batch_shape)
    residual = residual.expand(*batch, residual.shape[-1])
    if covariance.batch_shape != batch:
        covariance = covariance.expand(*batch, *covariance.shape[-2:])
    quadratic, determinant = covariance.evaluate_kernel().inv_quad_logdet(residual.unsqueeze(-1), logdet=True)
    return -0.5 * (quadratic + determinant + residual.shape[-1] * math.log(2 * math.pi))

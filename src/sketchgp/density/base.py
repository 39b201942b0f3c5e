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

from ..errors import InputError
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
    :cvar regresses: whether losses are minimised over a trend, where :attr:`basis` tells one.
    :ivar values: the loss by each probe since :meth:`begin`, ``(s,)`` float64 for every log determinant.
    :ivar cache: its own cache of preconditioners; None where it uses the model's.
    :ivar solutions: solutions of the latest evaluation, for solves to start from; None where there are none.
    :ivar basis: ``(n, k)`` float64, what a trend of the mean may add to it; None where nothing is minimised over.
    :ivar coordinates: ``(k,)`` of the trend with the least loss in the latest evaluation.
    :ivar before: the residuals of the first evaluation, ``(n, t)`` float32.
    """

    always: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    regresses: ClassVar[bool] = True
    values: tuple[Tensor, ...] = ()
    cache: PreconditionerCache | None = None
    solutions: Solutions | None = None
    basis: Tensor | None = None
    coordinates: Tensor | None = None
    before: Tensor | None = None

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``r^T A^-1 r`` of each column and ``log det A``, differentiable once in A and r.

        :param operator: A, an accelerated operator ``(..., n, n)``, evaluated.
        :param columns: r, ``(..., n, t)``; t may be 0, for the log determinant alone, where these are :class:`Probes`.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Forget ``values`` before the next evaluation."""
        self.values, self.coordinates = (), None

    def with_basis(self, columns: Tensor) -> Tensor:
        """Return residuals ``(n, t)`` with the basis beside them, for which a trend is solved.

        :raises InputError: for other residuals than before: the basis may not be that of their mean then.
        """
        if self.basis is None:
            return columns
        self.before = columns.float() if self.before is None else self.before
        if not torch.equal(self.before, columns.float()):
            raise InputError(
                "fit: the prior mean changes with what is not its own, by detach() for one. Fix the parameters of its "
                "ConstantMean or LinearMean (requires_grad_(False)), or let gradients through."
            )
        return torch.cat([columns, self.basis.to(columns.dtype)], dim=-1)

    def regressed(self, forms: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return forms ``(1,)`` and solutions ``(n, 1)`` of ``r - U c`` for the c of generalised least squares.

        ``(r - U c)^T A^-1 (r - U c) = r^T A^-1 r - c^T U^T A^-1 r`` for ``(U^T A^-1 U) c = U^T A^-1 r``.  Derivatives
        in A and r are those with c held fixed, as the form is least there.

        :param forms: of r and the columns of U, ``(1 + k,)``.
        :param weights: solutions for them, ``(n, 1 + k)``.
        """
        if self.basis is None:
            return forms, weights
        basis = self.basis.to(weights.dtype)
        of_r, of_basis = weights[:, :1], weights[:, 1:]
        cross, inner = basis.mT @ of_r, basis.mT @ of_basis
        chosen = torch.linalg.solve((inner + inner.mT) / 2, cross)
        self.coordinates = chosen.squeeze(1).to(torch.float64)
        return forms[:1] - (cross * chosen).sum().to(forms.dtype), of_r - of_basis @ chosen


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

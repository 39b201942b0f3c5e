"""The log density of a normal distribution from its operator's ``inv_quad_logdet``, whatever GPyTorch's settings say.

GPyTorch asks ``fast_computations.log_prob`` whether to do so, and ``import botorch`` turns that off for the process.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor


def log_density(distribution: Any, value: Tensor) -> Tensor:
    """``log N(value; mean, C)``, the shape of the batch.

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

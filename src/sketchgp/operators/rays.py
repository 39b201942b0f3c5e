"""Random features of kernels of inner products, from uniform numbers: arc-cosine, polynomial and linear kernels.

- Arc-cosine of order q: ``2^1/2 max(0, w.z)^q``, w normal (Cho and Saul, "Kernel methods for deep learning", NeurIPS
  2009).
- Polynomial ``(u.v + c)^q``: ``prod_{i <= q} s_i.(z, c^1/2)``, s of random signs (Kar and Karnick, "Random feature maps
  for dot product kernels", AISTATS 2012).  A linear kernel is the case q = 1, c = 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.kernels import PolynomialKernel
from torch import Tensor

from ..kernels import ArcCosineKernel


def ray_numbers(kernel: Any, width: int) -> int:
    """Uniform numbers that a feature takes; :param width: of the inputs."""
    return kernel.power * (width + 1) if isinstance(kernel, PolynomialKernel) else width


def ray_weights(kernel: Any, uniforms: Tensor) -> Tensor:
    """``(count, width)``, or ``(count, power, width + 1)`` of a polynomial, from ``(count, ray_numbers(...))``."""
    if isinstance(kernel, ArcCosineKernel):
        return torch.special.ndtri(uniforms)
    signs = torch.where(uniforms < 0.5, -1.0, 1.0).to(uniforms)
    return signs.unflatten(1, (kernel.power, -1)) if isinstance(kernel, PolynomialKernel) else signs


def ray_values(kernel: Any, z: Tensor, weights: Tensor) -> Tensor:
    """Features ``(p, count)`` of inputs z ``(p, width)``."""
    if isinstance(kernel, ArcCosineKernel):
        found = z @ weights.mT
        return math.sqrt(2) * ((found > 0).to(z.dtype) if kernel.order == 0 else found.clamp_min(0) ** kernel.order)
    if not isinstance(kernel, PolynomialKernel):
        return z @ weights.mT
    shift = kernel.offset.sqrt().to(z)
    factors = [torch.addmm(shift * signs[:, -1], z, signs[:, :-1].mT) for signs in weights.unbind(1)]
    return torch.stack(factors).prod(dim=0)

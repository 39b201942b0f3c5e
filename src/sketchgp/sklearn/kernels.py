"""Kernels by name, and those that a user gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from torch import Tensor

from .. import checks
from ..errors import InputError
from ..kernels import LaplaceKernel

NAMES: dict[str, Callable[..., Kernel]] = {
    "rbf": RBFKernel,
    "matern12": lambda **options: MaternKernel(nu=0.5, **options),
    "matern32": lambda **options: MaternKernel(nu=1.5, **options),
    "matern52": lambda **options: MaternKernel(nu=2.5, **options),
    "laplacian": LaplaceKernel,
    "rational_quadratic": RQKernel,
}


def tuned_kernel(owner: str, kernel: Any, x: Tensor, size: float) -> Kernel:
    """A kernel to begin tuning with: of a name, with an output scale, and a lengthscale for each feature that is
    its deviation times d^1/2, the distance of rows; or a copy of what the user gave.

    :param x: ``(n, d)``; :param size: of the targets, squared.
    :raises InputError: for what is neither.
    """
    if isinstance(kernel, str):
        d = x.shape[1]
        made = ScaleKernel(_named(owner, kernel)(ard_num_dims=d)).to(x)
        spread = x.to(torch.float64).std(dim=0, correction=0)
        spread = torch.where(spread > 0, spread, 1.0) * math.sqrt(d)
        made.base_kernel.lengthscale = spread.to(x)
        made.outputscale = x.new_tensor(size)  # a number would be rounded to float32
        return made
    return own_kernel(owner, kernel, x)


def ridge_kernel(owner: str, kernel: Any, gamma: float | None, x: Tensor) -> Kernel:
    """The kernel of a ridge regression.

    :param kernel: a name or a kernel; :param gamma: scikit-learn's, of names: ``exp(-gamma |x - z|^2)`` for RBF,
        ``exp(-gamma |x - z|_1)`` for laplacian; the others have RBF's lengthscale ``(2 gamma)^-1/2``. None is 1 / d.
    :raises InputError: for what does not fit.
    """
    if not isinstance(kernel, str):
        if gamma is not None:
            raise InputError(f"{owner}: gamma is of kernels by name; a kernel of your own has its lengthscale.")
        return own_kernel(owner, kernel, x)
    made = _named(owner, kernel)().to(x)
    gamma = checks.number(owner, "gamma", gamma, above=0, finite=True, optional=True) or 1 / x.shape[1]
    made.lengthscale = x.new_tensor(1 / gamma if kernel == "laplacian" else (2 * gamma) ** -0.5)
    return made


def own_kernel(owner: str, kernel: Any, x: Tensor) -> Kernel:
    """A copy of a user's kernel, of x's dtype and device."""
    kind = f"a gpytorch kernel or one of {', '.join(map(repr, NAMES))}"
    checks.instance(owner, "kernel", kernel, gpytorch.kernels.Kernel, kind)
    return copy.deepcopy(kernel).to(x)


def _named(owner: str, name: str) -> Callable[..., Kernel]:
    if name not in NAMES:
        raise checks.refusal(owner, "kernel", f"a gpytorch kernel or one of {', '.join(map(repr, NAMES))}", name)
    return NAMES[name]

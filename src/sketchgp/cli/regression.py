"""The regression of the commands, an ordinary ExactGP on standardised columns, and its scores."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import gpytorch
import numpy as np
import torch
from scipy.special import erf
from torch import Tensor

from ..errors import InputError

_LEVELS = (0.5, 0.9, 0.95)  # of the intervals whose calibration is printed
_ROWS = 256  # of the kernel matrix formed at a time

KERNELS = {
    "matern12": lambda d: gpytorch.kernels.MaternKernel(nu=0.5, ard_num_dims=d),
    "matern32": lambda d: gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=d),
    "matern52": lambda d: gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=d),
    "rbf": lambda d: gpytorch.kernels.RBFKernel(ard_num_dims=d),
}


class Regression(gpytorch.models.ExactGP):
    """Constant mean, scaled kernel with one lengthscale a feature (ARD), learned noise.

    Nothing in it knows of sketchgp: it is the model a GPyTorch user would write.

    :param x: training features, ``(n, d)``, standardised.
    :param y: training targets, ``(n,)``, standardised.
    :param kernel: one of ``KERNELS``.
    :param lengthscale: to start from; None is the square root of d.
    """

    def __init__(self, x: Tensor, y: Tensor, kernel: str = "matern52", lengthscale: float | None = None):
        # Targets without noise want less than GPyTorch's least one, 1e-4; this is scikit-learn's.
        least = gpytorch.constraints.GreaterThan(1e-5)
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=least))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(KERNELS[kernel](x.shape[-1]))
        # Standardised rows are about sqrt(2 d) apart: start with lengthscales of that order.
        self.covar_module.base_kernel.lengthscale = lengthscale or math.sqrt(x.shape[-1])
        self.covar_module.outputscale = 1.0
        self.likelihood.noise = 0.1
        self.to(x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def copy_hyperparameters(model: Regression, x: Tensor, y: Tensor, kernel: str) -> Regression:
    """Return a new model, in eval mode, with the hyperparameters of ``model`` and other training data."""
    other = Regression(x, y, kernel)
    other.load_state_dict(model.state_dict())
    return other.eval()


@dataclass(frozen=True)
class Scaling:
    """Means and deviations of the training rows, in float64; ``x_mean`` and ``x_std`` are ``(d,)``."""

    x_mean: Tensor
    x_std: Tensor
    y_mean: float
    y_std: float

    @classmethod
    def of(cls, x: Tensor, y: Tensor, target: str) -> Scaling:
        """Return the scaling of training data ``x`` ``(n, d)`` and ``y`` ``(n,)``.

        :param target: name of the target, for messages.
        :raises InputError: fewer than two rows, a target that is constant (there is nothing to learn), or
            values so large that their deviation overflows.
        """
        if x.shape[0] < 2:
            raise InputError(f"{x.shape[0]} training row(s); at least 2 are needed")
        if bool((y == y[0]).all()):
            raise InputError(f"column {target!r}: the target has one value ({y[0].item():g}) in all training rows")
        scaling = cls(x.mean(0), x.std(0), y.mean().item(), y.std().item())
        if not (torch.isfinite(scaling.x_std).all() and math.isfinite(scaling.y_std)):
            raise InputError("values above about 1e150 overflow the standard deviation; rescale the columns")
        return scaling

    def scale_x(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Scale features ``(n, d)`` to mean 0 and deviation 1 over the training rows."""
        return ((x.double() - self.x_mean) / self.x_std).to(dtype)

    def scale_y(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Scale targets ``(n,)`` to mean 0 and deviation 1 over the training rows."""
        return ((y.double() - self.y_mean) / self.y_std).to(dtype)

    def unscale_mean(self, mean: Tensor) -> Tensor:
        """Return a standardised mean ``(m,)`` in the units of the target, float64."""
        return mean.double() * self.y_std + self.y_mean

    def unscale_std(self, variance: Tensor) -> Tensor:
        """Return a standardised variance ``(m,)`` as a deviation in the units of the target, float64."""
        return variance.double().clamp_min(0).sqrt() * self.y_std


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root mean squared error of a prediction ``(m,)``."""
    return (mean.double() - y.double()).square().mean().sqrt().item()


def negative_log_density(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    """Mean over the rows of -log N(y | mean, variance), in nats; all ``(m,)``, the noise in the variance."""
    mean, variance, y = mean.double(), variance.double(), y.double()
    return (0.5 * (2 * math.pi * variance).log() + 0.5 * (y - mean).square() / variance).mean().item()


def within(mean: np.ndarray, std: np.ndarray, y: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the share of rows inside the central intervals of the normal predictions, ``(len(levels),)``.

    A row is inside an interval of level p where ``|y - mean| <= std sqrt(2) erfinv(p)``.

    :param mean: ``(m,)``; :param std: of an observation, ``(m,)``; :param y: ``(m,)``.
    :param levels: between 0 and 1.
    """
    needed = np.sort(erf(np.abs(y - mean) / (np.sqrt(2) * std)))  # the least level whose interval holds each row
    return np.searchsorted(needed, levels, side="right") / len(y)


def calibration(mean: np.ndarray, std: np.ndarray, y: np.ndarray) -> str:
    """Return the shares for a few levels, as a line."""
    shares = within(mean, std, y, np.array(_LEVELS))
    parts = [f"{share:.1%} in the {level:.0%} intervals" for share, level in zip(shares, _LEVELS, strict=True)]
    return f"Calibration: of {len(y):,} rows, {', '.join(parts)}."


@torch.no_grad()
def true_residual(model: gpytorch.models.ExactGP, weights: Tensor, rows: Tensor | None = None) -> float:
    """``||(K + noise I) weights - (y - mean)|| / ||y - mean||`` in float64, from GPyTorch's kernel alone.

    :param model: a GP with constant noise, one output and training data ``(n, d)``.
    :param weights: ``(n,)``.
    :param rows: if given, both norms are over these rows only (a check by sample, for large n).
    """
    kernel = copy.deepcopy(model.covar_module).double()
    x = model.train_inputs[0].double()
    target = (model.train_targets - model.mean_module(model.train_inputs[0])).double()
    solution = weights.double()
    rows = torch.arange(x.shape[0]) if rows is None else rows
    noise = model.likelihood.noise.item()
    error = torch.zeros((), dtype=torch.float64)
    for part in rows.split(_ROWS):
        product = kernel(x[part], x).to_dense() @ solution + noise * solution[part]
        error += (product - target[part]).square().sum()
    return float(error.sqrt() / target[rows].norm())

"""Dense answers in extended precision: covariances of GPyTorch kernels, posteriors, likelihoods, inducing points.

Nothing here calls GPyTorch's or sketchgp's numerics.  Hyperparameters and data are read from the model as it is, and
every formula is evaluated in NumPy's ``longdouble`` (64 bits of mantissa on x86).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gpytorch
import numpy as np
import torch

import sketchgp

LONG = np.longdouble
EPS = 2.0**-53
PI = LONG("3.14159265358979323846264338327950288")


def number(tensor: Any) -> np.ndarray:
    """Return a tensor's numbers as an extended-precision array."""
    return tensor.detach().double().numpy().astype(LONG)


def rows(tensor: torch.Tensor) -> np.ndarray:
    """Return inputs as an extended-precision array of at least two dimensions."""
    found = number(tensor)
    return found[:, None] if found.ndim == 1 else found


def shaken(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield rows off by what far ones lose of their distances, as much as by being stored.

    It is lost where the centre of the others is taken away.
    """
    for signs in np.random.default_rng(0).choice([-1, 1], (8, *x.shape)):
        yield x + 2 * EPS * signs * (x - np.median(x, 0))


def select(kernel: Any, x: np.ndarray) -> np.ndarray:
    """Return the columns that a kernel looks at."""
    return x if kernel.active_dims is None else x[:, kernel.active_dims.numpy()]


def covariance(kernel: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the matrix of a GPyTorch kernel between the rows of a and b."""
    return _values(kernel, select(kernel, a), select(kernel, b))


def _apart(kernel: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    scale = number(kernel.lengthscale).reshape(-1)
    return (a[:, None, :] - b[None, :, :]) / scale


def _values(kernel: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    kernels = gpytorch.kernels
    if isinstance(kernel, kernels.ScaleKernel):
        return number(kernel.outputscale) * _values(kernel.base_kernel, a, b)
    if isinstance(kernel, kernels.AdditiveKernel):
        return sum(covariance(part, a, b) for part in kernel.kernels)
    if isinstance(kernel, kernels.ProductKernel):
        return math.prod((covariance(part, a, b) for part in kernel.kernels), start=LONG(1))
    if isinstance(kernel, kernels.ConstantKernel):
        return np.broadcast_to(number(kernel.constant).reshape(()), (len(a), len(b))).copy()
    if isinstance(kernel, kernels.IndexKernel):
        table = number(kernel.covar_factor) @ number(kernel.covar_factor).T + np.diag(number(kernel.var))
        return table[np.ix_(a[:, 0].astype(int), b[:, 0].astype(int))]
    if isinstance(kernel, kernels.LinearKernel):
        return number(kernel.variance).reshape(()) * (a @ b.T)
    if isinstance(kernel, kernels.PolynomialKernel):
        return (a @ b.T + number(kernel.offset).reshape(())) ** int(kernel.power)
    if isinstance(kernel, sketchgp.ArcCosineKernel):
        return _arc_cosine(kernel.order, a, b)
    if isinstance(kernel, kernels.SpectralMixtureKernel):
        total = LONG(0)
        apart = a[:, None, :] - b[None, :, :]
        weights = number(kernel.mixture_weights)
        product = LONG(1)
        for column in range(a.shape[1]):
            total = LONG(0)
            for k in range(len(weights)):
                scale = number(kernel.mixture_scales)[k, 0, column]
                mean = number(kernel.mixture_means)[k, 0, column]
                tau = apart[:, :, column]
                total = total + weights[k] * np.exp(-2 * (PI * scale * tau) ** 2) * np.cos(2 * PI * mean * tau)
            product = product * total
        return product
    if isinstance(kernel, kernels.CosineKernel):
        period = number(kernel.period_length).reshape(())
        return np.cos(PI * np.sqrt((((a[:, None, :] - b[None, :, :]) / period) ** 2).sum(-1)))
    if isinstance(kernel, kernels.PeriodicKernel):
        apart = a[:, None, :] - b[None, :, :]
        waves = np.sin(PI * apart / number(kernel.period_length).reshape(-1)) ** 2
        return np.exp(-2 * (waves / number(kernel.lengthscale).reshape(-1)).sum(-1))
    apart = _apart(kernel, a, b)
    if isinstance(kernel, sketchgp.LaplaceKernel):
        return np.exp(-np.abs(apart).sum(-1))
    square = (apart**2).sum(-1)
    if isinstance(kernel, kernels.RQKernel):
        alpha = number(kernel.alpha).reshape(())
        return (1 + square / (2 * alpha)) ** -alpha
    if isinstance(kernel, kernels.RBFKernel):
        return np.exp(-square / 2)
    r = np.sqrt(square)
    if isinstance(kernel, kernels.PiecewisePolynomialKernel):
        return _piecewise(kernel.q, r, a.shape[1])
    if isinstance(kernel, kernels.MaternKernel):
        root = np.sqrt(LONG(2 * kernel.nu))
        shape = {0.5: LONG(1), 1.5: 1 + root * r, 2.5: 1 + root * r + 5 * square / 3}[kernel.nu]
        return shape * np.exp(-root * r)
    raise NotImplementedError(type(kernel).__name__)


def _piecewise(q: int, r: np.ndarray, d: int) -> np.ndarray:
    j = d // 2 + q + 1
    shape = {
        0: LONG(1) + 0 * r,
        1: (j + 1) * r + 1,
        2: 1 + (j + 2) * r + LONG(j + 4 * j + 3) / 3 * r**2,  # as GPyTorch has it
        3: 1 + (j + 3) * r + LONG(6 * j**2 + 36 * j + 45) / 15 * r**2 + LONG(j**3 + 9 * j**2 + 23 * j + 15) / 15 * r**3,
    }[q]
    return np.maximum(0, 1 - r) ** (j + q) * shape


def _arc_cosine(order: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # the angle by the half-angle formula of Kahan, which keeps digits for nearly parallel vectors
    long_a, long_b = np.sqrt((a**2).sum(-1)), np.sqrt((b**2).sum(-1))
    u = a / np.where(long_a > 0, long_a, 1)[:, None]
    v = b / np.where(long_b > 0, long_b, 1)[:, None]
    minus = np.sqrt(((u[:, None, :] - v[None, :, :]) ** 2).sum(-1))
    plus = np.sqrt(((u[:, None, :] + v[None, :, :]) ** 2).sum(-1))
    angle = np.where(minus + plus > 0, 2 * np.arctan2(minus, plus), PI / 2)
    rest = PI - angle
    shape = {
        0: rest,
        1: np.sin(angle) + rest * np.cos(angle),
        2: 3 * np.sin(angle) * np.cos(angle) + rest * (1 + 2 * np.cos(angle) ** 2),
    }[order]
    return (long_a[:, None] * long_b[None, :]) ** order * shape / PI


def mean_of(module: Any, x: np.ndarray) -> np.ndarray:
    """Return the values of a GPyTorch mean at rows of x."""
    if isinstance(module, gpytorch.means.ZeroMean):
        return np.zeros(len(x), LONG)
    if isinstance(module, gpytorch.means.ConstantMean):
        return np.full(len(x), number(module.constant).reshape(())[()], LONG)
    if isinstance(module, gpytorch.means.LinearMean):
        found = x @ number(module.weights).reshape(-1)
        return found + number(module.bias).reshape(()) if module.bias is not None else found
    raise NotImplementedError(type(module).__name__)


def cholesky(matrix: np.ndarray) -> np.ndarray:
    """Return the lower Cholesky factor in extended precision.

    :raises numpy.linalg.LinAlgError: for a matrix that is not positive definite.
    """
    n = len(matrix)
    factor = np.zeros_like(matrix)
    for j in range(n):
        column = matrix[j:, j] - factor[j:, :j] @ factor[j, :j]
        if not column[0] > 0:
            raise np.linalg.LinAlgError("not positive definite")
        factor[j:, j] = column / np.sqrt(column[0])
    return factor


def forwards(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve ``L x = right``."""
    found = np.array(right, LONG)
    for i in range(len(factor)):
        found[i] = (found[i] - factor[i, :i] @ found[:i]) / factor[i, i]
    return found


def backwards(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve ``L^T x = right``."""
    found = np.array(right, LONG)
    for i in reversed(range(len(factor))):
        found[i] = (found[i] - factor[i + 1 :, i] @ found[i + 1 :]) / factor[i, i]
    return found


@dataclass
class Truth:
    """An exact posterior at test points, and what float64 rounding may do to a backward stable solve for it."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: np.ndarray | None
    mean_rounding: np.ndarray
    covariance_rounding: np.ndarray
    mean_by_residual: Any = 0.0  # how far a relative residual of one moves the mean
    mean_by_float64: Any = 0.0  # how far off the mean by a solve in float64 is
    mean_drift: Any = 0.0  # what hyperparameters that are known to float32 leave open
    variance_drift: Any = 0.0
    covariance_drift: Any = 0.0

    @property
    def variance(self) -> np.ndarray:
        return np.diagonal(self.covariance)

    @property
    def variance_rounding(self) -> np.ndarray:
        return np.diagonal(self.covariance_rounding) + self.variance_drift


class Dense:
    """The exact Gaussian process of some rows: one factorization, then what is asked for."""

    def __init__(self, kernel, mean, x, y, noise, entries=EPS, see=lambda x: x):
        self.kernel, self.mean, self.x, self.y, self.see, self.entries = kernel, mean, x, y, see, entries
        self.noise = np.broadcast_to(noise, (len(x),)).astype(LONG)
        self.prior = covariance(kernel, see(x), see(x))
        self.matrix = self.prior + np.diag(self.noise)
        self.factor = cholesky(self.matrix)
        self.residual = y - mean_of(mean, x)
        self.weights = self.solve(self.residual)

    def solve(self, right: np.ndarray) -> np.ndarray:
        return backwards(self.factor, forwards(self.factor, right))

    @property
    def condition(self) -> float:
        eigenvalues = np.linalg.eigvalsh(self.matrix.astype(float))
        return float(eigenvalues[-1] / max(eigenvalues[0], float(self.noise.min())))

    @property
    def weights_by_residual(self) -> np.ndarray:
        """How far a relative residual of one moves the weights."""
        inverse = self.solve(np.eye(len(self.x), dtype=LONG))
        return np.sqrt((inverse**2).sum(0) * (self.residual**2).sum())

    def at(self, points: np.ndarray, noise=None, phases: Any = 0.0) -> Truth:
        """Return the posterior at points; ``phases`` ``(m,)`` is the rounding of entries that are waves of a point."""
        cross = covariance(self.kernel, self.see(self.x), self.see(points))
        own = covariance(self.kernel, self.see(points), self.see(points))
        mean = mean_of(self.mean, points) + cross.T @ self.weights
        half = forwards(self.factor, cross)
        solved = backwards(self.factor, half)
        size = np.sqrt((self.matrix**2).sum())
        grow = 4 * np.sqrt(len(self.x)) * self.entries * size
        length = np.sqrt((solved**2).sum(0))
        mean_rounding = grow * length * np.sqrt((self.weights**2).sum())
        mean_rounding = mean_rounding + 4 * self.entries * (np.abs(cross).T @ np.abs(self.weights))
        lengths = np.sqrt((solved**2).sum(0)), np.sqrt(np.diagonal(own)), self.entries * np.sqrt((cross**2).sum(0))
        # a network rounds training rows otherwise beside test rows: entries C too many in cross explain |C|^2 / noise
        shares = grow, 8 * self.entries, 1 / self.noise.min()
        rounding = sum(share * np.outer(each, each) for share, each in zip(shares, lengths, strict=True))
        waves, sizes = 4 * phases * np.sqrt(np.diagonal(own)), np.sqrt(np.diagonal(self.prior))
        mean_rounding = mean_rounding + waves * (sizes @ np.abs(self.weights))
        # a wave of a far point moves its covariances with near ones too, but not the point's own prior variance
        moved = np.outer(waves, sizes @ np.abs(solved)) + np.outer(waves, lengths[1]) * (1 - np.eye(len(points)))
        rounding = rounding + moved + moved.T
        by_residual = length * np.sqrt((self.residual**2).sum())
        try:
            plain = np.linalg.solve(self.matrix.astype(float), self.residual.astype(float))
        except np.linalg.LinAlgError:  # singular in float64
            plain = np.full_like(self.weights, np.inf)
        with np.errstate(invalid="ignore"):  # infinite where it is singular
            by_float64 = np.nan_to_num(np.abs(cross.T @ (plain - self.weights)), nan=np.inf, posinf=np.inf)
        return Truth(mean, own - half.T @ half, noise, mean_rounding, rounding, by_residual, by_float64)

    def log_density(self) -> float:
        n = len(self.x)
        logs = np.log(np.diagonal(self.factor)).sum()
        return float(-(self.residual @ self.weights) / 2 - logs - n * np.log(2 * PI) / 2) / n

    def left_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return means and variances (of an observation) of every row from all others."""
        diagonal = np.diagonal(self.solve(np.eye(len(self.x), dtype=LONG)))
        return self.y - self.weights / diagonal, 1 / diagonal

    def left_out_density(self) -> np.ndarray:
        """Return the log densities of every row's target, predicted from all others."""
        mean, variance = self.left_out()
        return -((self.y - mean) ** 2 / variance + np.log(2 * PI * variance)) / 2


class Sparse:
    """The subset of regressors on inducing points, its DTC variances and Titsias's bound.

    Entries are off at random by ``phase`` times the distance of their points, which is what rounding makes of waves,
    and by ``angle`` times the deviations of their points, which is what it makes of angles of few degrees.
    """

    def __init__(self, kernel, mean, x, y, noise, points, shift: float, phase: float = 0.0, angle: float = 0.0):
        self.kernel, self.mean, self.points, self.phase, self.angle = kernel, mean, points, phase, angle
        noise = np.broadcast_to(noise, (len(x),)).astype(LONG)
        inner = self.entries(points)
        inner = inner + shift * np.trace(inner) * np.eye(len(points), dtype=LONG)
        self.inner = cholesky(inner)
        cross = forwards(self.inner, self.entries(x))
        whole = np.eye(len(points), dtype=LONG) + (cross / noise) @ cross.T
        self.outer, self.condition = cholesky(whole), float(np.trace(whole))  # of what is at least the identity
        residual = y - mean_of(mean, x)
        self.weights = backwards(self.outer, forwards(self.outer, (cross / noise) @ residual))
        right = np.sqrt(((covariance(kernel, points, x) @ (residual / noise)) ** 2).sum())
        inverse = forwards(self.outer, forwards(self.inner, np.eye(len(points), dtype=LONG)))
        # posterior deviations by which ten roundings of the right-hand side of the normal equations move a prediction
        self.by_rounding = 20 * EPS * right * np.sqrt((inverse**2).sum())
        quadratic = (residual**2 / noise).sum() - ((cross / noise) @ residual) @ self.weights
        logs = np.log(noise).sum() + 2 * np.log(np.diagonal(self.outer)).sum()
        prior = np.diagonal(covariance(kernel, x, x))
        left = ((prior - (cross**2).sum(0)) / noise).sum()
        self.bound = float(-(quadratic + logs + left + len(x) * np.log(2 * PI)) / 2 / len(x))

    def entries(self, x: np.ndarray) -> np.ndarray:
        """Return the covariances of the inducing points with those x, symmetric where x are the same."""
        apart = np.sqrt(((self.points[:, None, :] - x[None, :, :]) ** 2).sum(-1))
        signs = np.random.default_rng(0).choice([-1, 1], apart.shape)
        signs = np.triu(signs) + np.triu(signs, 1).T if x is self.points else signs
        sizes = [np.sqrt(np.diagonal(covariance(self.kernel, part, part))) for part in (self.points, x)]
        off = self.phase * apart + self.angle * np.multiply.outer(*sizes)
        return covariance(self.kernel, self.points, x) + off * signs

    def at(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cross = forwards(self.inner, self.entries(points))
        mean = mean_of(self.mean, points) + cross.T @ self.weights
        own = np.diagonal(covariance(self.kernel, points, points))
        return mean, own - (cross**2).sum(0) + (forwards(self.outer, cross) ** 2).sum(0)

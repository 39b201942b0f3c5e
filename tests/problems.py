"""Matrices, kernels and data for the numerical tests, named by the property they have."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpytorch.kernels import (
    Kernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from linear_operator.operators import DenseLinearOperator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sketchgp import ConvergenceWarning
from sketchgp.operators.access import Access


def needs_keops() -> None:
    """Skip without pykeops, or without the compiler that it calls; which does not optimise, for half of its time."""
    pytest.importorskip("pykeops")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("KeOps needs a C++ compiler")
    from keopscore.config import config

    config.cpp_flags = config.get_cpp_flags().replace("-O3", "-O0").replace("-flto=auto", "")


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative difference in the Frobenius norm, in float64 (absolute where ``expected`` is zero)."""
    found, expected = found.detach().to(torch.float64), expected.detach().to(torch.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    scale = expected.norm()
    return float((found - expected).norm() / (scale if scale > 0 else 1))


class _LogDeterminant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, built: Any, *tensors: Tensor) -> Tensor:
        ctx.built = built.detached(None)
        ctx.save_for_backward(*tensors)
        return ctx.built.log_determinant()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        built = ctx.built
        none = built.diagonal_part.new_zeros(*built.batch_shape, built.diagonal_part.shape[-1], 0)
        noise = none.new_zeros(*built.batch_shape, built.rank, 0)
        return None, *built.sampled_derivative(ctx.saved_tensors, none, none[..., :1, :], none, noise, none, grad)


def log_determinant(built: Any) -> Tensor:
    """``log det P`` of a preconditioner, differentiable in its tensors by its ``sampled_derivative``."""
    return _LogDeterminant.apply(built, *built.tensors).to(built.dtype)


def points(n: int, d: int = 3, seed: int = 0, shift: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """``n`` uniform points in the unit cube, moved by ``shift``."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, d, dtype=torch.float64, generator=generator) + shift).to(dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers of this shape."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def identity(n: int) -> Tensor:
    """The n x n identity in float64 (0.1 times torch's float32 one is off by 1e-9)."""
    return torch.eye(n, dtype=torch.float64)


def smile(n: int = 2000, seed: int = 0) -> Tensor:
    """A face in the plane: a dense mouth and two eyes of very few points, which blocks of pivots miss."""
    generator = torch.Generator().manual_seed(seed)
    eyes = n // 100
    angle = math.pi * (1 + torch.rand(n - 2 * eyes, dtype=torch.float64, generator=generator))
    mouth = torch.stack([6 * angle.cos(), 6 * angle.sin()], dim=1)
    left, right = (
        torch.tensor([[x, 5.0]], dtype=torch.float64) + 0.3 * normal(eyes, 2, seed=seed + k)
        for k, x in enumerate((-3.0, 3.0), start=1)
    )
    return torch.cat([mouth, left, right])


def squared_distances(a: Tensor, b: Tensor, lengthscale: Tensor | float = 1.0) -> Tensor:
    """From differences, without the cancellation of ``|a|^2 + |b|^2 - 2 a.b``."""
    return ((a.unsqueeze(-2) - b.unsqueeze(-3)) / lengthscale).square().sum(dim=-1)


def _decay(nu: float | None, q: Tensor) -> Tensor:
    """The RBF kernel (nu None) or the Matern kernel as a function of the squared scaled distance, from the formula."""
    if nu is None:
        return (-0.5 * q).exp()
    # the square root has an infinite slope at 0, where the kernels' slope is taken as 0
    s = torch.where(q > 0, 2 * nu * q, torch.ones_like(q)).sqrt() * (q > 0)
    polynomial = {0.5: 1.0, 1.5: 1 + s, 2.5: 1 + s + s.square() / 3}[nu]
    return polynomial * (-s).exp()


def radial(kernel: Kernel, a: Tensor, b: Tensor) -> Tensor:
    """``k(a, b)`` of a (scaled) RBF or Matern kernel by differences, in float64; differentiable everywhere."""
    scale: Tensor | float = 1.0
    if kernel.active_dims is not None:
        a, b = a[..., kernel.active_dims], b[..., kernel.active_dims]
    while isinstance(kernel, ScaleKernel):
        scale = scale * kernel.outputscale.to(torch.float64)
        kernel = kernel.base_kernel
    lengthscale = kernel.lengthscale.to(torch.float64)
    q = squared_distances(a.to(torch.float64), b.to(torch.float64), lengthscale)
    return scale * _decay(getattr(kernel, "nu", None), q)


def set_scales(kernel: Kernel, outputscale: float = 1.7, lengthscale: float = 0.7) -> Kernel:
    """The kernel with these scales; lengthscales of ARD kernels differ between dimensions."""
    for part in kernel.modules():
        if isinstance(part, ScaleKernel):
            part.outputscale = outputscale
        if isinstance(part, Kernel) and part.has_lengthscale:
            count = part.lengthscale.shape[-1]
            part.lengthscale = lengthscale * torch.linspace(1.0, 1.6, count) if count > 1 else lengthscale
    return kernel


# Kernels with fast tiles, for inputs of three dimensions; RADIAL's reference is :func:`radial`.
RADIAL: dict[str, Callable[[], Kernel]] = {
    "rbf": RBFKernel,
    "rbf-ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "rbf-twice-scaled": lambda: ScaleKernel(ScaleKernel(RBFKernel())),
    "rbf-active-dims": lambda: ScaleKernel(RBFKernel(active_dims=(0, 2))),
    "matern12": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "matern12-ard": lambda: MaternKernel(nu=0.5, ard_num_dims=3),
    "matern32": lambda: MaternKernel(nu=1.5),
    "matern32-ard": lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=3)),
    "matern52": lambda: MaternKernel(nu=2.5, active_dims=(1,)),
    "matern52-ard": lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3)),
}

# Kernels that are evaluated by calling them; the reference is GPyTorch's own dense matrix in float64.
GENERIC: dict[str, Callable[[], Kernel]] = {
    "rational-quadratic": lambda: ScaleKernel(RQKernel()),
    "sum": lambda: ScaleKernel(RQKernel()) + ScaleKernel(RBFKernel(ard_num_dims=3)),
    "product": lambda: RBFKernel(active_dims=(0, 2)) * MaternKernel(nu=2.5),
    "periodic": lambda: ScaleKernel(PeriodicKernel()),
    "polynomial": lambda: PolynomialKernel(power=2),
}


def dense(kernel: Kernel, a: Tensor, b: Tensor | None = None) -> Tensor:
    """``k(a, b)`` in float64 without sketchgp, detached."""
    b = a if b is None else b
    base = kernel
    while isinstance(base, ScaleKernel):
        base = base.base_kernel
    if type(base) in (RBFKernel, MaternKernel) and not len(kernel.batch_shape):
        return radial(kernel, a, b).detach()
    return kernel.double()(a.double(), b.double()).to_dense().detach()


def as_access(matrix: Tensor) -> Access:
    """A stored matrix as the low-rank methods read it."""
    return Access(DenseLinearOperator(matrix))


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors, float64."""
    n = len(values)
    basis = torch.linalg.qr(normal(n, n, seed=seed)).Q
    matrix = (basis * values.to(torch.float64)) @ basis.mT
    return (matrix + matrix.mT) / 2


# Positive semidefinite matrices that break careless low-rank code: name -> (matrix, its rank).
def matrices() -> dict[str, tuple[Tensor, int]]:
    """Small symmetric positive semidefinite matrices with their ranks."""
    x = points(40)
    rbf = dense(set_scales(ScaleKernel(RBFKernel()), lengthscale=0.25), x)
    thin = normal(30, 4, seed=3)
    twice = points(12).repeat(3, 1)
    spiky = torch.diag(torch.cat([torch.full((5,), 100.0), torch.full((25,), 1e-3)]).double())
    return {
        "smooth": (rbf, 40),
        "rank-deficient": (thin @ thin.mT, 4),
        "duplicated": (dense(set_scales(RBFKernel(), lengthscale=0.2), twice), 12),
        "constant": (torch.full((20, 20), 2.5, dtype=torch.float64), 1),
        "identity": (torch.eye(20, dtype=torch.float64), 20),
        "two-scales": (spiky, 30),
        "tiny": (1e-30 * rbf, 40),
        "huge": (1e30 * rbf, 40),
        "one-by-one": (torch.tensor([[3.0]], dtype=torch.float64), 1),
        "two-by-two": (torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64), 2),
        "zero": (torch.zeros(6, 6, dtype=torch.float64), 0),
    }


class Crash(Exception):
    """What ends a solve without a chance to save."""


@contextmanager
def quiet() -> Iterator[None]:
    """Solves that fall short do not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def true_residual(matrix: Tensor, y: Tensor, value: Tensor) -> Tensor:
    """``||y - A w|| / ||y||`` of each column, absolute where y is 0; A dense in float64."""
    y = y.double().reshape(len(y), -1)
    norm = y.norm(dim=0)
    return (y - matrix @ value.double().reshape(y.shape)).norm(dim=0) / torch.where(norm > 0, norm, 1)


class Largest(TorchDispatchMode):
    """The most entries of any tensor that an operation inside returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(item):
                self.entries = max(self.entries, item.numel())
        return out

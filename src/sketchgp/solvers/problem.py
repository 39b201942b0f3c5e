"""What solvers solve, and what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..operators import KernelMatrix
from ..operators.access import AccurateProduct
from ..report import SolveReport


@dataclass
class Solution:
    """``value`` in the shape and dtype of the right-hand side, and the :class:`SolveReport` of how it was found."""

    value: Tensor
    report: SolveReport


class System:
    """``(K + diag(noise)) value = rhs``: products in the operator's own dtype, and in float64.

    :param operator: symmetric positive semidefinite LinearOperator ``(..., n, n)``.
    :param noise: ``(..., n)`` positive.
    """

    def __init__(self, operator: Any, noise: Tensor) -> None:
        self.operator = operator.evaluate_kernel().detach()
        self.noise = noise.detach()
        self._diagonal = self.noise.to(torch.float64).unsqueeze(-1)
        self._accurate: AccurateProduct | None = None
        self.matmuls = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

    @property
    def n(self) -> int:
        return self.operator.shape[-1]

    def element(self, index: tuple[int, ...], batch: torch.Size) -> System:
        """One system of the batch; operator and noise may be of fewer batch dimensions, which are then repeated."""
        shape = self.operator.batch_shape
        operator = self.operator
        if shape:
            own = tuple(0 if size == 1 else i for i, size in zip(index[-len(shape) :], shape, strict=True))
            operator = operator.element(own) if isinstance(operator, KernelMatrix) else operator[own]
        return System(operator, self.noise.expand(*batch, self.n)[index])

    def product(self, vectors: Tensor) -> Tensor:
        """``(K + noise) vectors`` in float64 vectors ``(..., n, t)``, K applied in its own dtype."""
        self.matmuls += 1
        product = self.operator._matmul(vectors.to(self.dtype)).to(torch.float64)
        return product.addcmul_(self._diagonal, vectors)

    def accurate_product(self, vectors: Tensor) -> Tensor:
        """``(K + noise) vectors``, all in float64."""
        if self.dtype == torch.float64:
            return self.product(vectors)
        self.matmuls += 1
        if self._accurate is None:
            self._accurate = AccurateProduct(self.operator)
        return self._accurate(vectors).addcmul_(self._diagonal, vectors)


@dataclass
class FullProblem:
    """The full problem: find W with ``(k(x, x) + noise) W = y``; the posterior mean at z is then ``k(z, x) W``.

    Gaussian-process regression with zero prior mean and kernel ridge regression are this one problem.

    :param kernel: a GPyTorch kernel, its output scale included.
    :param x: inputs ``(n, d)``, float32 or float64.
    :param y: targets ``(n,)`` or ``(n, t)``, of x's dtype and device.
    :param noise: variance, a positive number or a tensor ``(n,)`` of positive numbers.
    :raises InputError: for wrong shapes, dtypes, devices, NaN or infinity, n = 0, or noise that is not positive.
    """

    kernel: Any
    x: Tensor
    y: Tensor
    noise: float | Tensor
    noise_vector: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
        check_data(self.kernel, self.x, self.y)
        self.noise_vector = check_noise(self.noise, self.x)

    def system(self, matmul: str = "auto") -> System:
        """The linear system, with the kernel matrix as an operator."""
        return System(KernelMatrix.of(self.kernel, self.x, engine=matmul), self.noise_vector)


def check_kernel(kernel: Any) -> None:
    """:raises InputError: for what is no GPyTorch kernel, or one of a batch."""
    if not (hasattr(kernel, "forward") and hasattr(kernel, "active_dims")):
        raise InputError(f"kernel expects a gpytorch kernel, got {type(kernel).__name__}.")
    if len(kernel.batch_shape):
        raise InputError("kernel expects no batch_shape; solve one problem for each kernel of the batch.")


def check_data(kernel: Any, x: Tensor, y: Tensor) -> None:
    """:raises InputError: for inputs and targets that do not fit each other or the kernel."""
    check_tensor("x", x, (2,))
    check_tensor("y", y, (1, 2))
    n = x.shape[0]
    if y.shape[0] != n:
        raise InputError(f"y expects one row per row of x ({n}), got {y.shape[0]}.")
    if y.dtype != x.dtype or y.device != x.device:
        raise InputError(
            f"x and y expect one dtype and device, got {x.dtype} on {x.device} and {y.dtype} on {y.device}."
        )
    wider = [p.dtype for p in kernel.parameters() if p.dtype.itemsize > x.dtype.itemsize]
    if wider:
        raise InputError(f"kernel has dtype {wider[0]}, x {x.dtype}; convert one: kernel.to(x.dtype).")


def check_noise(noise: float | Tensor, x: Tensor, zero: bool = False) -> Tensor:
    """The variances ``(n,)``, float64.

    :param zero: whether noise may be 0.
    :raises InputError: for a wrong shape, NaN, or variances that are not positive.
    """
    n = x.shape[0]
    noise = torch.as_tensor(noise, dtype=torch.float64, device=x.device).detach()
    if noise.dim() == 0 or noise.shape == (1,):
        noise = noise.reshape(1).expand(n)
    if noise.shape != (n,):
        raise InputError(f"noise expects a number or a tensor of shape ({n},), got shape {tuple(noise.shape)}.")
    if not bool(torch.isfinite(noise).all()) or not bool(((noise > 0) | (zero & (noise == 0))).all()):
        raise InputError(f"noise expects positive, finite variances; the smallest given is {float(noise.min())}.")
    return noise


def check_tensor(name: str, tensor: Any, dims: tuple[int, ...]) -> None:
    """Refuse what is not a finite, non-empty float32 or float64 tensor with one of the numbers of dimensions.

    :raises InputError: naming the argument and what was expected.
    """
    shape = " or ".join({1: "(n,)", 2: "(n, d)"}[d] for d in dims)
    if not torch.is_tensor(tensor):
        raise InputError(f"{name} expects a tensor of shape {shape}, got {type(tensor).__name__}.")
    if tensor.dim() not in dims:
        raise InputError(f"{name} expects shape {shape}, got {tuple(tensor.shape)}.")
    if tensor.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{name} expects float32 or float64, got {tensor.dtype}.")
    if tensor.shape[0] == 0:
        raise InputError(f"{name} expects at least one row, got none.")
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor.reshape(tensor.shape[0], -1))).any(dim=1).nonzero()[0])
        raise InputError(f"{name} holds NaN or infinity, first in row {bad}.")

"""What solvers solve, and what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import found, instance, like, tensor, variances, word
from ..errors import InputError, SketchGPError
from ..operators import KernelMatrix
from ..operators.access import AccurateProduct, element
from ..operators.engines import ENGINES
from ..report import SolveReport
from ..row_sources import RowSource, whole_or_source, whole_targets


@dataclass(repr=False)
class Solution:
    """``value`` in the shape and dtype of the right-hand side, and the :class:`SolveReport` of how it was found."""

    value: Tensor
    report: SolveReport

    def __repr__(self) -> str:
        return f"<Solution {tuple(self.value.shape)} by {self.report}>"


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
        self.products = 0  # with K, so far

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

    @property
    def n(self) -> int:
        return self.operator.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Of the systems: operator and noise may be of fewer batch dimensions."""
        return torch.broadcast_shapes(self.operator.batch_shape, self.noise.shape[:-1])

    def element(self, index: tuple[int, ...], batch: torch.Size) -> System:
        """One system of the batch; operator and noise may be of fewer batch dimensions, which are then repeated."""
        shape = self.operator.batch_shape
        operator = self.operator
        if shape:
            own = tuple(0 if size == 1 else i for i, size in zip(index[-len(shape) :], shape, strict=True))
            operator = element(operator, own)
        return System(operator, self.noise.expand(*batch, self.n)[index])

    def product(self, vectors: Tensor) -> Tensor:
        """``(K + noise) vectors`` in float64 vectors ``(..., n, t)``, K applied in its own dtype."""
        self.products += 1
        product = self.operator._matmul(vectors.to(self.dtype)).to(torch.float64)
        return product.addcmul_(self._diagonal, vectors)

    def accurate_product(self, vectors: Tensor) -> Tensor:
        """``(K + noise) vectors``, all in float64."""
        if self.dtype == torch.float64:
            return self.product(vectors)
        self.products += 1
        return self._accurately()(vectors).addcmul_(self._diagonal, vectors)

    def accurate_rows(self, indices: Tensor, vectors: Tensor) -> Tensor:
        """Rows of that product, ``(..., b, t)`` for indices ``(b,)``."""
        rows = self._diagonal[..., indices, :] * vectors[..., indices, :]
        return self._accurately().rows(indices, vectors) + rows

    def _accurately(self) -> AccurateProduct:
        if self._accurate is None:
            self._accurate = AccurateProduct(self.operator)
        return self._accurate


@dataclass
class FullProblem:
    """The full problem: find W with ``(k(x, x) + noise) W = y``; the posterior mean at z is then ``k(z, x) W``.

    Gaussian-process regression with zero prior mean and kernel ridge regression are this one problem.

    :param kernel: a GPyTorch kernel, its output scale included.
    :param x: inputs ``(n, d)``, float32 or float64; a tensor, or rows on disk, which are read whole where they are
        within the memory budget and else stay there (:class:`sketchgp.RowSource`).
    :param y: targets ``(n,)`` or ``(n, t)``, of x's dtype and device; those on disk are read whole.
    :param noise: variance, a positive number or a tensor ``(n,)`` of positive numbers.
    :raises InputError: for wrong shapes, dtypes, devices, NaN or infinity, n = 0, or noise that is not positive.
    """

    kernel: Any
    x: Tensor | RowSource
    y: Tensor
    noise: float | Tensor
    noise_vector: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_kernel("FullProblem", self.kernel)
        self.y = whole_targets(self.y, self.x)
        self.x = whole_or_source(self.x, self.y)
        check_data("FullProblem", self.kernel, self.x, self.y)
        check_plain("FullProblem", self.kernel, self.x, "x")
        self.noise_vector = variances("FullProblem", "noise", self.noise, self.x)

    def system(self, matmul: str = "auto") -> System:
        """The linear system, with the kernel matrix as an operator."""
        word("FullProblem.system", "matmul", matmul, ENGINES)
        return System(KernelMatrix.of(self.kernel, self.x, engine=matmul), self.noise_vector)

    @torch.no_grad()
    def mean(self, points: Tensor, weights: Tensor) -> Tensor:
        """The posterior mean ``k(points, x) W``, ``(p,)`` or ``(p, t)``, in float64; ``p n`` kernel evaluations.

        :param points: ``(p, d)``, of x's dtype and device.
        :param weights: W ``(n,)`` or ``(n, t)``, the ``value`` of a solution.
        :raises InputError: for points or weights that do not fit.
        """
        owner = "FullProblem.mean"
        like(owner, "weights", weights, self.y.shape, self.y.device, whose="y's")
        matrix = KernelMatrix.of(self.kernel, tensor(owner, "points", points, (2,)), self.x, engine="tiled").detach()
        found = matrix.double()._matmul(weights.reshape(len(self.x), -1).to(torch.float64))
        return found.reshape(len(points), *self.y.shape[1:])


def check_problem(owner: str, problem: Any) -> None:
    """:raises InputError: for anything but a :class:`FullProblem`."""
    hint = " For inducing points use KRILL(), QR(), Falkon(), SketchySAGA(), EigenPro3() or EigenPro4()."
    instance(
        owner, "problem", problem, FullProblem, "a FullProblem", hint if hasattr(problem, "inducing_points") else ""
    )


def check_kernel(owner: str, kernel: Any) -> None:
    """:raises InputError: for what is no GPyTorch kernel, or one of a batch."""
    if isinstance(kernel, type) or not (hasattr(kernel, "forward") and hasattr(kernel, "active_dims")):
        raise InputError(f"{owner}: kernel expects a gpytorch kernel, got {found(kernel)}.")
    if len(kernel.batch_shape):
        raise InputError(f"{owner}: kernel expects no batch_shape; solve one problem for each kernel of the batch.")


def check_data(owner: str, kernel: Any, x: Tensor | RowSource, y: Tensor, names: tuple[str, str] = ("x", "y")) -> None:
    """:raises InputError: where inputs and targets do not fit the kernel or each other."""
    if not isinstance(x, RowSource):  # whose rows are checked when they are read
        tensor(owner, names[0], x, (2,))
    tensor(owner, names[1], y, (1, 2))
    n = x.shape[0]
    if y.shape[0] != n:
        raise InputError(f"{owner}: {names[1]} expects one row per row of {names[0]} ({n}), got {y.shape[0]}.")
    if y.dtype != x.dtype or y.device != x.device:
        raise InputError(
            f"{owner}: {names[0]} and {names[1]} expect one dtype and device, got {x.dtype} on {x.device} and "
            f"{y.dtype} on {y.device}."
        )
    check_fits(owner, kernel, x, names[0])


def check_fits(owner: str, kernel: Any, x: Tensor | RowSource, name: str) -> None:
    """:raises InputError: where the kernel is wider than x, or elsewhere."""
    for parameter in kernel.parameters():
        if parameter.dtype.itemsize > x.dtype.itemsize:
            raise InputError(
                f"{owner}: kernel has dtype {parameter.dtype}, {name} {x.dtype}; convert one: kernel.to({name}.dtype)."
            )
        if parameter.device != x.device:
            raise InputError(
                f"{owner}: kernel is on {parameter.device}, {name} on {x.device}; move one: kernel.to({name}.device)."
            )


def check_plain(owner: str, kernel: Any, x: Tensor | RowSource, name: str) -> None:
    """:raises InputError: for a kernel with structure of its own, or one that is of other features than x has."""
    try:
        KernelMatrix.of(kernel, x[:1], engine="tiled")
    except SketchGPError:
        raise
    except (RuntimeError, IndexError) as error:
        raise InputError(
            f"{owner}: kernel cannot be evaluated on {name} of {x.shape[1]} feature(s): {error}"
        ) from error

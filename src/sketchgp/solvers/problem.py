"""The full problem, which most solvers solve, and the solution that all return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cards import Card, Shown, report_card, shape, span, tensor_kind
from ..checks import found, instance, points_like, tensor, variances, word
from ..errors import InputError, SketchGPError
from ..operators import KernelMatrix
from ..operators.engines import ENGINES, Matmul
from ..operators.lazies import parameters_of
from ..report import SolveReport
from ..row_sources import RowSource, whole_or_source, whole_targets
from .system import System


@dataclass(repr=False)
class Solution(Shown):
    """``value`` in the shape and dtype of the right-hand side, and the :class:`SolveReport` of how it was found.

    ``problem`` is what was solved, whose tensors it shares; None where a solver of your own does not say, and in a
    model, which predicts by itself.
    """

    value: Tensor
    report: SolveReport
    problem: Any = None

    def predict(self, x: Any) -> Tensor:
        """``k(x, points) value``, the points those of the problem: its rows, or its inducing points.

        That is the posterior mean of a Gaussian process with prior mean 0, and the function of kernel ridge regression.
        The matrix is evaluated in float64, by tiles, and never stored.

        :param x: ``(p, d)``, or ``(p,)`` where d is 1: a tensor, a numpy array or a pandas table, converted to the
            dtype and device of the problem's points.
        :returns: ``(p,)`` or ``(p, t)`` as the value has columns or not, in the points' dtype.
        :raises InputError: for points that do not fit, or a solution that does not know its problem, or one of random
            features, whose :class:`sketchgp.RandomFeatureGP` predicts.
        """
        points = getattr(self.problem, "inducing_points", None)
        points = getattr(self.problem, "x", None) if points is None else points
        if not isinstance(points, Tensor | RowSource) or len(points) != len(self.value):
            whose = "None" if self.problem is None else f"a {type(self.problem).__name__}"
            raise InputError(
                "Solution.predict expects a solution of a FullProblem or an InducingPointProblem that knows it, as "
                f"Solution(value, report, problem); this one's is {whose}. Of a model use sketchgp.predict(model, x)."
            )
        x = points_like("Solution.predict", "x", x, points)
        matrix = KernelMatrix.of(self.problem.kernel, x, points, engine="tiled").detach().double()
        prediction = matrix.product(self.value.detach().to(torch.float64).reshape(len(points), -1))
        return prediction.to(points.dtype).reshape(len(x), *self.value.shape[1:])

    def _card(self) -> Card:
        title = f"Solution: {shape(self.value)} values, {tensor_kind(self.value)}"
        card = report_card(self.report)
        return Card(title, (("values", span(self.value)), ("solve", card.title.partition(": ")[2]), *card.rows))


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

    def system(self, matmul: Matmul = "auto") -> System:
        """The linear system, with the kernel matrix as an operator."""
        word("FullProblem.system", "matmul", matmul, ENGINES)
        return System(KernelMatrix.of(self.kernel, self.x, engine=matmul), self.noise_vector)


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
    for parameter in parameters_of(kernel).values():
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
    except (SketchGPError, RuntimeError, IndexError) as error:
        raise InputError(
            f"{owner}: kernel cannot be evaluated on {name} of {x.shape[1]} feature(s): {error}"
        ) from error

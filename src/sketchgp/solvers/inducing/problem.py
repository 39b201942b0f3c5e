"""The inducing-point problem, from tensors or from a stream of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...checks import instance, same_points, tensor, variances
from ...errors import InputError
from ...memory import require_memory
from ...operators import KernelMatrix
from ...operators.tall import NormalMatrix, TallMatrix
from ...row_sources import RowSource, whole_or_source, whole_targets
from ..problem import check_data, check_fits, check_kernel, check_plain


@dataclass(frozen=True)
class InducingPoints:
    """Inducing points that :func:`sketchgp.choose_inducing_points` chose.

    :ivar points: ``(m, d)``, of x's dtype and device.
    :ivar indices: ``(m,)`` the rows of x they are, distinct; None for the centres of k-means.
    :ivar counts: ``(m,)`` float64: how many points each stands for, for ``Falkon(counts=...)``; None where unknown.
    :ivar method: by which they were chosen.
    :ivar notes: what did not go as asked.
    """

    points: Tensor
    indices: Tensor | None
    counts: Tensor | None
    method: str
    notes: list[str] = field(default_factory=list)


def plain_points(points: Any) -> Any:
    """Return the tensor of chosen points; anything else as it is."""
    return points.points if isinstance(points, InducingPoints) else points


@dataclass
class InducingPointProblem:
    """The inducing-point problem: minimise ``sum_i (f(x_i) - y_i)^2 / noise_i + ||f||^2`` over ``f = k(., z) W``.

    With one noise for all points that is ``(Kzx Kxz + noise Kzz) W = Kzx y``; the posterior mean of the subset of
    regressors (and of DTC, FITC without its diagonal) at a point is then ``k(point, z) W``.  Also called restricted
    kernel ridge regression, and general kernel model where noise is 0.

    :param kernel: a GPyTorch kernel, its output scale included.
    :param x: inputs ``(n, d)``, float32 or float64: a tensor, or rows on disk, which are read whole where they are
        within the memory budget and else stay there (:class:`sketchgp.RowSource`).  Or an iterable of batches
        ``(x, y)`` that can be gone through once an epoch, such as a ``torch.utils.data.DataLoader``, for the solvers
        that take a stream (y is None then).
    :param y: targets ``(n,)`` or ``(n, t)``, of x's dtype and device; those on disk are read whole.
    :param noise: variance, a positive number or a tensor ``(n,)`` of positive numbers; 0 for the solvers that
        interpolate and stop early.
    :param inducing_points: z, ``(m, d)``, of x's dtype and device, duplicates are allowed; or what
        :func:`sketchgp.choose_inducing_points` returns, of which the problem keeps the points.
    :raises InputError: for wrong shapes, dtypes, devices, NaN or infinity, no rows, or a noise that is negative.
    """

    kernel: Any
    x: Tensor | RowSource | Iterable[tuple[Tensor, Tensor]]
    y: Tensor | None
    noise: float | Tensor
    inducing_points: Tensor
    level: float = field(init=False, repr=False)  # one variance for all, the geometric mean of noise
    weights: Tensor | None = field(init=False, repr=False)  # (n,) float64 root of level / noise; None where constant

    def __init__(
        self,
        kernel: Any,
        x: Tensor | RowSource | Iterable[tuple[Tensor, Tensor]],
        y: Tensor | None,
        noise: float | Tensor,
        inducing_points: Tensor | InducingPoints,
    ) -> None:
        owner = "InducingPointProblem"
        check_kernel(owner, kernel)
        self.kernel, self.noise = kernel, noise
        z = self.inducing_points = tensor(owner, "inducing_points", plain_points(inducing_points), (2,))
        check_fits(owner, self.kernel, z, "inducing_points")
        check_plain(owner, self.kernel, z, "inducing_points")
        self.weights = None
        self.x, self.y = whole_or_source(x, z), whole_targets(y, z)
        if not isinstance(self.x, Tensor | RowSource):
            instance(owner, "x", self.x, Iterable, "a tensor or an iterable of batches (x, y)")
            if self.y is not None:
                raise InputError(
                    f"{owner}: y expects None where x is a stream of batches (x, y): the stream holds the targets."
                )
            if iter(self.x) is self.x:
                raise InputError(
                    f"{owner}: x expects an iterable that starts anew at every epoch, got an iterator, which can be "
                    "gone through once; pass a list, a DataLoader, or an object with __iter__."
                )
            self.level = float(variances(owner, "noise", self.noise, z[:1], zero=True)[0])
            return
        if self.y is None:
            raise InputError(f"{owner}: y expects the targets, as x is a tensor; got None.")
        check_data(owner, self.kernel, self.x, self.y)
        same_points(owner, self.x, z, "x", "inducing_points")
        noise = variances(owner, "noise", self.noise, self.x, zero=True)
        first = float(noise[0])
        if bool((noise == first).all()):
            self.level = first
        elif bool((noise == 0).any()):
            raise InputError(f"{owner}: noise expects to be positive for all points, or 0 for all.")
        else:
            self.level = float(noise.log().mean().exp())
            self.weights = (self.level / noise).sqrt()

    @property
    def m(self) -> int:
        """Number of inducing points."""
        return len(self.inducing_points)

    @property
    def streamed(self) -> bool:
        """Return whether x is a stream of batches."""
        return not isinstance(self.x, Tensor | RowSource)

    @property
    def target_shape(self) -> torch.Size:
        """Shape of one target, () or (t,); of a stream that of its first batch."""
        return self.first()[1].shape[1:]

    @property
    def expected_rows(self) -> int:
        """n; of a stream the length of its ``dataset``, where it has one like a ``DataLoader``, and else 0."""
        x = self.x if isinstance(self.x, Tensor | RowSource) else getattr(self.x, "dataset", None)
        return len(x) if isinstance(x, Sized) else 0

    @property
    def device(self) -> torch.device:
        """Device of the inducing points, and so of all tensors."""
        return self.inducing_points.device

    def tensors(self, solver: str) -> tuple[Tensor | RowSource, Tensor]:
        """x ``(n, d)``, or its source, and the targets as float64 columns ``(n, t)``, times the weights.

        :param solver: who asks, for the message.
        :raises InputError: for a stream, or noise 0.
        """
        x = self._inputs(solver)
        assert self.y is not None
        y = self.y.reshape(len(x), -1).to(torch.float64)
        return x, y if self.weights is None else y * self.weights.unsqueeze(1)

    def _inputs(self, solver: str) -> Tensor | RowSource:
        if not isinstance(self.x, Tensor | RowSource):
            raise InputError(
                f"{solver} expects x and y as tensors; for a stream of batches use EigenPro4 or EigenPro3."
            )
        if not self.level > 0:
            raise InputError(f"{solver} expects noise above 0; EigenPro4 and EigenPro3 do without.")
        return self.x

    def first(self) -> tuple[Tensor | RowSource, Tensor]:
        """Return x and y, or the first batch of a stream, as they are given.

        :raises InputError: for a stream without any, or one that does not fit.
        """
        if isinstance(self.x, Tensor | RowSource) and self.y is not None:
            return self.x, self.y
        for x, y in self.batches():
            return x, y
        raise InputError("x expects a stream of at least one batch, got none.")

    def batches(self, columns: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of a stream: inputs ``(b, d)`` and targets as they are given, in z's dtype, each batch checked.

        :param columns: of the targets; None for as many as the first batch has.
        :raises InputError: for a batch that is not a pair of tensors that fit, naming the batch.
        """
        assert not isinstance(self.x, Tensor | RowSource)
        for number, batch in enumerate(self.x):
            try:
                x, y = batch
            except (TypeError, ValueError):
                raise InputError(f"Batch {number} of the stream is not a pair (x, y).") from None
            owner, names = "InducingPointProblem", (f"x of batch {number}", f"y of batch {number}")
            same_points(owner, tensor(owner, names[0], x, (2,)), self.inducing_points, names[0], "inducing_points")
            check_data(owner, self.kernel, x, y, names)
            found_columns = y[0].numel()
            columns = found_columns if columns is None else columns
            if found_columns != columns:
                raise InputError(
                    f"y of batch {number} of the stream expects {columns} column(s) as before, got {found_columns}."
                )
            yield x, y

    def tall(self, accurate: bool) -> TallMatrix:
        """``diag(weights) k(x, z)`` by tiles."""
        return TallMatrix(self.kernel, self._inputs("This solver"), self.inducing_points, self.weights, accurate)

    def predicting(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return ``W -> k(x, z) W``, with float64 entries."""
        return TallMatrix(self.kernel, x, self.inducing_points, accurate=True).matmul

    def kzz(self) -> Tensor:
        """``k(z, z)``, ``(m, m)`` float64.

        :raises InputError: where it does not fit into the memory that is free.
        """
        advice = "use fewer inducing points, or solver=NystromPCG() or EigenPro4(), which do not store it."
        require_memory(8 * self.m**2, self.device, f"k(z, z) for m = {self.m}", advice)
        return self._kzz_by_tiles().to_dense()

    def _kzz_by_tiles(self) -> KernelMatrix:
        return KernelMatrix.of(self.kernel, self.inducing_points, engine="tiled").detach().double()

    def normal_matrix(self, stored: bool = True) -> NormalMatrix:
        """``Kzx Kxz + noise Kzz``, ``(m, m)``, its entries float64 whatever the dtype of x.

        :param stored: store Kzz; else it goes by tiles.
        """
        kzz = self.kzz() if stored else self._kzz_by_tiles()
        return NormalMatrix(kzz, self.tall(accurate=True), self.level)


def check_inducing(owner: str, problem: Any) -> None:
    """:raises InputError: for anything but an :class:`InducingPointProblem`."""
    hint = (
        " For all points use ConjugateGradients(), ASkotch() or Cholesky()." if hasattr(problem, "noise_vector") else ""
    )
    instance(owner, "problem", problem, InducingPointProblem, "an InducingPointProblem", hint)

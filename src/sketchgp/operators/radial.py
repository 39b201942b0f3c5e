"""Fast tiles for scaled radial kernels: ``outputscale * phi(|x1 - x2| / lengthscale)``, phi Gaussian or Matern.

A tile is one matrix product of augmented inputs, which gives the (scaled) squared distances at once, followed by
in-place arithmetic in buffers that are reused from tile to tile.  Inputs are centred first, so that
``|a|^2 + |b|^2 - 2 a.b`` does not cancel when all inputs lie far from the origin.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor, nn


@dataclass(frozen=True)
class Profile:
    """One radial function of ``q = (sharpness * distance)^2``, given as ``t = factor * q``.

    ``value(t, spare)`` overwrites ``t`` or ``spare`` with the kernel's values and returns that buffer.
    ``value_and_slope(t, spare)`` returns two buffers: the values, and their derivative with respect to ``q``.
    """

    name: str
    sharpness: float
    factor: float
    value: Callable[[Tensor, Tensor], Tensor]
    value_and_slope: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _gauss(t: Tensor, spare: Tensor) -> Tensor:
    return t.clamp_(max=0).exp_()  # t = -q/2


def _gauss_slope(t: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    value = t.clamp_(max=0).exp_()
    return value, torch.mul(value, -0.5, out=spare)


def _matern12(t: Tensor, spare: Tensor) -> Tensor:
    return t.clamp_(min=0).sqrt_().neg_().exp_()


def _matern12_slope(t: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    s = t.clamp_(min=0).sqrt_()  # d exp(-s) / dq = -exp(-s) / (2 s); at s = 0 the kernel has no slope, 0 is used
    value = torch.neg(s, out=spare).exp_()
    slope = s.reciprocal_().mul_(value).mul_(-0.5)
    return value, slope.masked_fill_(slope.isinf(), 0)


def _matern32(t: Tensor, spare: Tensor) -> Tensor:
    s = t.clamp_(min=0).sqrt_()
    decay = torch.neg(s, out=spare).exp_()
    return decay.addcmul_(decay, s)  # (1 + s) exp(-s)


def _matern32_slope(t: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    s = t.clamp_(min=0).sqrt_()
    decay = torch.neg(s, out=spare).exp_()
    value = torch.addcmul(decay, decay, s, out=s)
    return value, decay.mul_(-0.5)


def _matern52(t: Tensor, spare: Tensor) -> Tensor:
    s = t.clamp_(min=0).sqrt_()
    decay = torch.neg(s, out=spare).exp_()
    polynomial = torch.addcmul(s, s, s, value=1 / 3, out=s)
    return torch.addcmul(decay, decay, polynomial, out=decay)  # (1 + s + s^2/3) exp(-s)


def _matern52_slope(t: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    s = t.clamp_(min=0).sqrt_()
    decay = torch.neg(s, out=spare).exp_()
    slope = torch.addcmul(decay, decay, s)
    polynomial = torch.addcmul(s, s, s, value=1 / 3, out=s)
    return torch.addcmul(decay, decay, polynomial, out=s), slope.mul_(-1 / 6)  # slope -(1 + s) exp(-s) / 6


GAUSS = Profile("gauss", 1.0, -0.5, _gauss, _gauss_slope)
MATERN = {
    0.5: Profile("matern12", 1.0, 1.0, _matern12, _matern12_slope),
    1.5: Profile("matern32", math.sqrt(3), 1.0, _matern32, _matern32_slope),
    2.5: Profile("matern52", math.sqrt(5), 1.0, _matern52, _matern52_slope),
}


def recognise(kernel: Kernel) -> Profile | None:
    """The profile of an unbatched RBF or Matern kernel, bare or inside ScaleKernels; None for any other kernel.

    Exact types only: a subclass may compute something else.
    """
    base = kernel
    while type(base) is ScaleKernel:
        base = base.base_kernel
    if len(kernel.batch_shape) or len(base.batch_shape):
        return None
    if type(base) is RBFKernel:
        return GAUSS
    if type(base) is MaternKernel:
        return MATERN[base.nu]
    return None


class Scales(nn.Module):
    """Reads lengthscale ``(1, d or 1)`` and outputscale ``()`` of a recognised kernel, differentiably."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self) -> tuple[Tensor, Tensor]:
        base = self.kernel
        outputscale: Tensor | float = 1.0
        while type(base) is ScaleKernel:
            outputscale = outputscale * base.outputscale
            base = base.base_kernel
        lengthscale = base.lengthscale
        return lengthscale, torch.as_tensor(outputscale, dtype=lengthscale.dtype, device=lengthscale.device)


_TF32 = threading.RLock()


@contextmanager
def _full_precision(t: Tensor) -> Iterator[None]:
    """No TF32 for squared distances: ten bits of ``|a|^2`` would leave nothing of the distance between neighbours."""
    matmul = torch.backends.cuda.matmul
    if not (t.is_cuda and t.dtype == torch.float32 and matmul.allow_tf32):
        yield
        return
    with _TF32:
        matmul.allow_tf32 = False
        try:
            yield
        finally:
            matmul.allow_tf32 = True


class RadialTiles:
    """Tiles of ``k(x1, x2)`` for a recognised kernel.

    :param scales: gives the lengthscale and the outputscale, differentiably.
    :param x1: ``(n, d)``; :param x2: ``(m, d)``; of one dtype and device.
    :param shape: the largest rows and columns of a tile.
    :param coincident: ``(2, p)`` rows and columns of further pairs at distance exactly 0.
    :param sibling: tiles with the same x1, whose prepared left side is shared.
    :param same: whether x1 and x2 are the same points: distances on the diagonal are then exactly 0.
    """

    def __init__(
        self,
        profile: Profile,
        scales: Callable[[], tuple[Tensor, Tensor]],
        x1: Tensor,
        x2: Tensor,
        shape: tuple[int, int],
        same: bool,
        coincident: Tensor | None = None,
        sibling: RadialTiles | None = None,
    ) -> None:
        self.profile, self.scales, self.x1, self.x2, self.same = profile, scales, x1, x2, same
        self.coincident = coincident
        f = profile.factor
        with torch.no_grad():
            if sibling is None:
                self.centre = x1.mean(dim=0, keepdim=True) if x1.shape[0] else x1.new_zeros(1, x1.shape[1])
                self.a, self.outputscale = (t.detach() for t in self._scaled(x1))
                square = self.a.square().sum(dim=1, keepdim=True) * f
                self.left = torch.cat([self.a * (-2 * f), square, torch.ones_like(square)], dim=1)
            else:
                self.centre, self.a, self.outputscale = sibling.centre, sibling.a, sibling.outputscale
                self.left = sibling.left
            self.b = self.a if same else self._scaled(x2)[0].detach()
            square = self.b.square().sum(dim=1, keepdim=True) * f
            self.right = torch.cat([self.b, torch.ones_like(square), square], dim=1).mT
        self._buffers = [x1.new_empty(shape[0] * shape[1]) for _ in range(2)]
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lengthscale, outputscale = self.scales()
        return (x - self.centre) * (self.profile.sharpness / lengthscale), outputscale

    def _buffer(self, index: int, rows: slice, columns: slice) -> Tensor:
        height, width = rows.stop - rows.start, columns.stop - columns.start
        return self._buffers[index][: height * width].view(height, width)

    def _distances(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        t, spare = self._buffer(0, rows, columns), self._buffer(1, rows, columns)
        with _full_precision(t):
            torch.mm(self.left[rows], self.right[:, columns], out=t)
        if self.same:  # entries of the diagonal are exactly at distance 0
            start, stop = max(rows.start, columns.start), min(rows.stop, columns.stop)
            if start < stop:
                t[start - rows.start : stop - rows.start, start - columns.start : stop - columns.start].fill_diagonal_(
                    0
                )
        if self.coincident is not None:
            i, j = self.coincident
            inside = (i >= rows.start) & (i < rows.stop) & (j >= columns.start) & (j < columns.stop)
            t[i[inside] - rows.start, j[inside] - columns.start] = 0
        return t, spare

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """The tile without the outputscale, in a buffer that the next call overwrites."""
        return self.profile.value(*self._distances(rows, columns))

    def add_gradient(self, rows: slice, columns: slice, weights: Tensor) -> None:
        """Add the gradient of ``(weights * tile).sum()``; overwrites ``weights``."""
        if self._sums is None:
            double = torch.float64
            self._sums = (
                torch.zeros_like(self.a, dtype=double),
                torch.zeros_like(self.b, dtype=double),
                torch.zeros((), dtype=double, device=self.a.device),
            )
        sum_a, sum_b, sum_scale = self._sums
        value, slope = self.profile.value_and_slope(*self._distances(rows, columns))
        sum_scale += torch.dot(value.reshape(-1), weights.reshape(-1))
        g = weights.mul_(slope)
        a, b = self.a[rows], self.b[columns]
        sum_a[rows] += a * g.sum(dim=1, keepdim=True) - g @ b
        sum_b[columns] += b * g.sum(dim=0).unsqueeze(1) - g.mT @ a

    def gradients(self, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradient with respect to ``inputs``: the tensors x1, x2 and parameters given at construction."""
        assert self._sums is not None
        sum_a, sum_b, sum_scale = self._sums
        with torch.enable_grad():
            a, outputscale = self._scaled(self.x1)
            b = a if self.same else self._scaled(self.x2)[0]
            factor = 2 * self.outputscale
            grad_a, grad_b = sum_a.to(a.dtype) * factor, sum_b.to(a.dtype) * factor
            pairs = [(a, grad_a + grad_b)] if self.same else [(a, grad_a), (b, grad_b)]
            pairs.append((outputscale, sum_scale.to(a.dtype)))
            pairs = [(value, grad) for value, grad in pairs if value.requires_grad]
            if not pairs:
                return (None,) * len(inputs)
            return torch.autograd.grad([p[0] for p in pairs], inputs, [p[1] for p in pairs], allow_unused=True)

"""Where the inputs of a kernel matrix are counted from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices import sent

_ROWS = 256  # whose median is taken: it is off by a tenth of the data's spread at most, which is all that is wanted
# squared distances from the centre over that of half of the points, above which rows are far
_FAR = {torch.float32: 1e4, torch.float64: 1e6}


class Centre:
    """The median of the points x ``(..., m, d)`` in each coordinate, found when it is first asked for.

    Squared distances of points a and b that come from a matrix product are wrong by ``eps (|a|^2 + |b|^2)``, counted
    from here.  So it must lie amid the points, and no row that lies far from all others (1e5 where a value is missing)
    may move it, be it among the training or the test points: a mean would follow.  Of large data some rows are taken.
    """

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x.detach()
        self._value: Tensor | None = None
        self._squared: Tensor | None = None  # distance from the centre of half of the points that are not there

    def value(self) -> Tensor:
        """``(..., 1, d)``, finite; without gradients."""
        if self._x is not None:
            some = _some(self._x)
            self._value = _median(some)
            squares = (some - self._value).square().sum(dim=-1, keepdim=True)
            medians = _median(squares.masked_fill(squares == 0, torch.nan))
            self._squared = medians.amax() if medians.numel() else medians.new_zeros(())
            self._x = None
        assert self._value is not None
        return self._value

    @torch.no_grad()
    def far(self, x: Tensor) -> Tensor:
        """``(n,)`` bool: which rows of x ``(..., n, d)``, in any element of a batch, lie far."""
        return self._beyond(x, self.value())

    def _beyond(self, x: Tensor, point: Tensor) -> Tensor:
        self.value()
        squares = (x - point).square().sum(dim=-1)
        assert self._squared is not None
        return (squares > _FAR.get(x.dtype, 1e4) * self._squared).reshape(-1, x.shape[-2]).any(dim=0)

    def _surely_near(self, x: Tensor) -> bool:
        """Whether no row lies far, by fewer operations than :meth:`far` takes; False where that cannot be said."""
        other = self._x
        if other is None or not torch.is_tensor(other) or not other.numel() or not x.numel():
            return False
        centre = other.median(dim=-2, keepdim=True).values
        squares = (other - centre).square().sum(dim=-1)
        farthest = (x - centre).square().sum(dim=-1).amax()
        return bool(farthest <= _FAR.get(x.dtype, 1e4) * squares.median())  # never of NaN

    @torch.no_grad()
    def groups(self, x: Tensor, far: Tensor | None = None) -> list[Tensor] | None:
        """Indices of rows of x ``(..., n, d)`` in groups, such that those of one lie near each other; None where no row
        lies far from the centre.

        :param far: which rows do; None where that is to be found out.
        """
        if far is None and self._surely_near(x):
            return None
        far = self.far(x).cpu() if far is None else far
        if not bool(far.any()):
            return None
        rest, groups = far.nonzero()[:, 0], [(~far).nonzero()[:, 0]]
        if x.device.type != "cpu":  # which would be waited for at every tile
            return [sent(group, x.device) for group in (*groups, rest) if len(group)]
        while len(rest):
            away = self._beyond(x[..., rest, :], x[..., rest[:1], :])
            groups.append(rest[~away])
            rest = rest[away]
        return [group for group in groups if len(group)]


def near_and_far(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of rows, which lie near and which far, as indices; None where they are all the same.

    :param mask: ``(n,)`` of the far ones, on the CPU.
    """
    return None if bool(mask.all()) or not bool(mask.any()) else ((~mask).nonzero()[:, 0], mask.nonzero()[:, 0])


def _some(x: Tensor) -> Tensor:
    """Of many rows some, in float32 at least; integers in float64."""
    some = x[..., :: max(1, -(-x.shape[-2] // _ROWS)), :]
    if not some.is_floating_point():
        return some.double()
    return some.float() if some.dtype.itemsize < 4 else some


@torch.no_grad()
def _median(some: Tensor) -> Tensor:
    """Of what is not NaN, the lower one of two; 0 where there is nothing.  By sorting, which CUDA does repeatably."""
    if some.shape[-2] == 0:
        return some.new_zeros(*some.shape[:-2], 1, some.shape[-1])
    count = some.isfinite().sum(dim=-2, keepdim=True)
    ordered = some.masked_fill(~some.isfinite(), torch.inf).sort(dim=-2).values
    return ordered.gather(-2, (count - 1).clamp(min=0) // 2).masked_fill(count == 0, 0)

"""Where the inputs of a kernel matrix are counted from."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 256  # whose median is taken: it is off by a tenth of the data's spread at most, which is all that is wanted


class Centre:
    """The median of the points x ``(..., m, d)`` in each coordinate, found when it is first asked for.

    Squared distances of points a and b that come from a matrix product are wrong by ``eps (|a|^2 + |b|^2)``, counted
    from here.  So it must lie amid the points, and no row that lies far from all others (1e5 where a value is missing)
    may move it, be it among the training or the test points: a mean would follow.  Of large data some rows are taken.
    """

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x.detach()
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """``(..., 1, d)``, finite; without gradients."""
        if self._x is not None:
            self._value, self._x = _median(self._x), None
        assert self._value is not None
        return self._value


@torch.no_grad()
def _median(x: Tensor) -> Tensor:
    """Of what is not NaN, the lower one of two; 0 where there is nothing.  By sorting, which CUDA does repeatably."""
    m = x.shape[-2]
    if m == 0:
        return x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    some = x[..., :: -(-m // _ROWS), :]
    some = some.float() if some.dtype.itemsize < 4 else some
    count = some.isfinite().sum(dim=-2, keepdim=True)
    ordered = some.masked_fill(~some.isfinite(), torch.inf).sort(dim=-2).values
    return ordered.gather(-2, (count - 1).clamp(min=0) // 2).masked_fill(count == 0, 0)

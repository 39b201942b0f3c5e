"""The centre that inputs of a kernel matrix are counted from, and the rows that lie far from it."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..devices import sent

_ROWS = 256  # rows whose median is taken: it is off by at most a tenth of the spread of the data
_FEWEST, _NUMBERS = 64, 2**19  # of very wide inputs so many rows at least, and so many numbers at most, for the memory
# rows are far where their squared distance from the centre exceeds so many times the median one
_FAR = {torch.float32: 1e4, torch.float64: 1e6}
_RATIO = 1e3  # gaps that exceed the sum of all smaller ones so many times separate clusters
_COPIES = 3  # of the largest gaps; these separate copies of few points, too, where they exceed _RATIO
_ROUNDING = 16  # roundoffs of a number that may be lost where it is counted from a centre
_GOLDEN = (math.sqrt(5) - 1) / 2
_SPLITS = 3  # splits of the rows into clusters before the median of the largest cluster is taken


class Centre:
    """Median of the largest cluster of the points x ``(..., m, d)`` in each coordinate, computed at the first use.

    A matrix product computes the squared distance of points a and b, counted from here, with an error of
    ``eps (|a|^2 + |b|^2)``.  The centre must therefore lie amid the points.  Rows that lie far from all others (1e5
    where a value is missing) must not move it, as they would move a mean, and most rows may be such rows.  Large data
    are sampled.

    :param others: points of the other side, which tell what is far where x are fewer than three.
    :param rows: of the sample, at most; None for 256.
    """

    def __init__(self, x: Tensor, others: Any = None, rows: int | None = None) -> None:
        self._x, self._others, self._rows = x.detach(), others, rows or _ROWS

    @cached_property
    def _typical(self) -> Tensor:
        """The median squared distance of the cluster's other points from the centre."""
        few = self._x.shape[-2] < 3 and isinstance(self._others, Tensor)
        cluster = _largest_cluster(_some(self._others.detach() if few else self._x, self._rows))
        squares = (cluster - self.value).square().sum(dim=-1, keepdim=True)
        medians = _median(squares.masked_fill(squares == 0, torch.nan))
        return medians.amax() if medians.numel() else medians.new_zeros(())

    @cached_property
    def value(self) -> Tensor:
        """The centre itself, ``(..., 1, d)``, finite; without gradients."""
        cluster = _largest_cluster(_some(self._x, self._rows))
        if cluster.shape[-2] == 2:  # counted from the larger number the smaller one would lose digits
            cluster = cluster.gather(-2, cluster.nan_to_num(torch.inf).abs().argmin(dim=-2, keepdim=True))
        return _median(cluster)

    @torch.no_grad()
    def far(self, x: Tensor) -> Tensor:
        """Return a mask ``(n,)`` of the rows of x ``(..., n, d)`` that lie far in any element of a batch."""
        return self._beyond(x, self.value)

    def _beyond(self, x: Tensor, point: Tensor) -> Tensor:
        squares = (x - point).square().sum(dim=-1)
        return (squares > _FAR.get(x.dtype, 1e4) * self._typical).reshape(-1, x.shape[-2]).any(dim=0)

    @torch.no_grad()
    def groups(self, x: Tensor, far: Tensor | None = None) -> list[Tensor] | None:
        """Return groups of rows of x ``(..., n, d)`` that lie near each other, as indices.

        None is returned where no row lies far from the centre.

        :param far: which rows do; None where that is to be found out.
        """
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


@torch.no_grad()
def _largest_cluster(x: Tensor) -> Tensor:
    """Return the points ``(..., m, d)`` with NaN in place of those outside the largest cluster, x itself for one.

    Clusters are separated by a gap, along the coordinate of the largest range, that exceeds the sum of all smaller
    gaps many times.  That sum is at least the range of each cluster.  Where numbers cannot be counted from the largest
    cluster without a loss of their digits, it is the cluster of the smallest of these.  Devices other than the CPU are
    not waited for.
    """
    if x.shape[-2] < 3 or not x.numel() or (x.device.type == "cpu" and not _may_split(x)):
        return x
    for _ in range(_SPLITS):
        present = x.isfinite()
        high, low = (x.masked_fill(~present, limit) for limit in (-torch.inf, torch.inf))
        values, order, gaps = _along_widest(x, high.amax(dim=-2, keepdim=True) - low.amin(dim=-2, keepdim=True))
        sizes = gaps.sort(dim=-1).values
        least = sizes.masked_fill(~_separate(sizes), 0).amax(dim=-1, keepdim=True)
        clusters = torch.nn.functional.pad(((gaps >= least) & (least > 0)).cumsum(dim=-1), (1, 0))
        present = values.isfinite()
        largest = torch.zeros_like(clusters).scatter_add_(-1, clusters, present.long()).argmax(dim=-1, keepdim=True)
        finite = values.masked_fill(~present, 0)
        origin = finite.gather(-1, torch.searchsorted(clusters, largest))
        rounding = ((finite - origin) + origin - finite).abs()
        lost = (clusters != largest) & (rounding > _ROUNDING * torch.finfo(x.dtype).eps * finite.abs())
        least = clusters.gather(-1, finite.abs().masked_fill(~lost, torch.inf).argmin(dim=-1, keepdim=True))
        inside = present & (clusters == torch.where(lost.any(dim=-1, keepdim=True), least, largest))
        x = x.masked_fill(~torch.empty_like(inside).scatter_(-1, order, inside).unsqueeze(-1), torch.nan)
    return x


def _may_split(x: Tensor) -> bool:
    """Return whether a number is missing, or a gap along the coordinate of the largest range may separate clusters."""
    low, high = x.aminmax(dim=-2, keepdim=True)
    if not bool((high - low).isfinite().all()):
        return True
    return bool(_separate(_along_widest(x, high - low)[2].sort(dim=-1).values).any())


def _along_widest(x: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values along the coordinate of the largest range in order, their places, and the gaps between them."""
    values = x.take_along_dim(ranges.argmax(dim=-1, keepdim=True), dim=-1).squeeze(-1)
    values, order = values.masked_fill(~values.isfinite(), torch.inf).sort(dim=-1)
    gaps = values.diff(dim=-1)
    return values, order, gaps.masked_fill(~gaps.isfinite(), 0)


def _separate(sizes: Tensor) -> Tensor:
    """Return which of some gaps in rising order separate clusters, a mask."""
    smaller = torch.nn.functional.pad(sizes.cumsum(dim=-1)[..., :-1], (1, 0))
    smaller[..., :-_COPIES].masked_fill_(smaller[..., :-_COPIES] == 0, torch.inf)
    return sizes > _RATIO * torch.where(smaller > 0, smaller, 1)


def _some(x: Tensor, rows: int) -> Tensor:
    """Return a sample of so many rows at most, in float32 at least; integers in float64.

    Rows of a pattern that repeats, as every third row of a table, are drawn in their proportion: indices are multiples
    of the golden ratio.
    """
    m, most = x.shape[-2], min(rows, max(_FEWEST, _NUMBERS // max(1, x.shape[-1])))
    if m > most:
        turns = torch.arange(most, dtype=torch.float64) * _GOLDEN % 1
        x = x[..., sent((turns * m).long(), x.device), :]
    return x.to(torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.float64)


@torch.no_grad()
def _median(some: Tensor) -> Tensor:
    """Return the lower median of the finite values, 0 where there are none.  Sorting is deterministic on CUDA."""
    if some.shape[-2] == 0:
        return some.new_zeros(*some.shape[:-2], 1, some.shape[-1])
    count = some.isfinite().sum(dim=-2, keepdim=True)
    ordered = some.masked_fill(~some.isfinite(), torch.inf).sort(dim=-2).values
    return ordered.gather(-2, (count - 1).clamp(min=0) // 2).masked_fill(count == 0, 0)

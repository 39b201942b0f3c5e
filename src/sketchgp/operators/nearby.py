"""Leave out tiles of a kernel matrix that are zero up to rounding: nearly all of them on maps with short lengthscales.

Points are put into the order of a k-d tree (Bentley, Communications of the ACM 18, 1975), so that tiles are of points
that lie together.  Each leaf is a box; no pair of two boxes is nearer than these are, and kernels fall with distances.
What is left out of a product is less than what rounding the diagonal of the matrix changes: of n x m entries each less
than ``eps k(0) / (8 max(n, m))``, so that in the spectral norm the matrix differs by ``eps k(0) / 8`` at the most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .expression import Expression, Prepared
from .fast_tiles import farthest
from .pairs import Pairs
from .tiles import Piece, Shape, spans

_LEAST = 4096  # rows, and columns, from which on an order is sought: it takes as long as some hundred products of a row
_LEAF = 128  # points of a box,
_LEAVES = 8192  # of which there are no more
_SHARE = 0.75  # of all pairs that are left, at the most, or it is not worth it
_SLACK = 8.0


@dataclass(frozen=True)
class Layout:
    """Pairs of boxes of rows and columns whose entries matter.

    :ivar leaves: points of a box of rows, and of columns.
    :ivar values: ``(rows, columns)`` bool, one for each pair of boxes: whether entries matter; :ivar slopes: whether
        their derivatives do, which are larger than the entries by the square of their logarithm at the most.
    """

    leaves: tuple[int, int]
    values: Tensor
    slopes: Tensor

    def pieces(self, rows: int, columns: int, shape: Shape, half: bool, gradient: bool) -> Iterator[Piece]:
        """Yield the tiles that matter, in the format of :func:`.tiles.pieces`."""
        mask, (down_leaf, across_leaf) = self.slopes if gradient else self.values, self.leaves
        step = min(shape)
        step = step // down_leaf * down_leaf if step >= down_leaf else step
        for down in spans(rows, step):
            wanted = mask[down.start // down_leaf : -(-down.stop // down_leaf)].any(dim=0)
            if half:
                yield down, down, False
            for start, stop in _runs(wanted):
                first = max(start * across_leaf, down.stop if half else 0)
                for across in spans(min(stop * across_leaf, columns), step, first):
                    yield down, across, half


@dataclass(frozen=True)
class Nearby:
    """A kernel matrix in the order of its trees.

    :ivar pairs: the sorted points, whose products are made of the tiles that matter.
    :ivar left: ``(n,)`` and :ivar right: ``(m,)``: which points stand where.
    :ivar share: of all pairs, those of tiles that matter.
    """

    pairs: Pairs
    left: Tensor
    right: Tensor
    share: float

    def back(self, rows: Tensor, left: bool = True) -> Tensor:
        """Return rows ``(..., n, t)`` of the sorted matrix in the order of the given one."""
        return torch.empty_like(rows).index_copy_(-2, self.left if left else self.right, rows)


def nearby(pairs: Pairs) -> Nearby | None:
    """Return the matrix in an order in which tiles can be left out; None where fewer than a quarter of the pairs are.

    It is kept with the matrix until one of its tensors changes.
    """
    n, m = pairs.shape[-2:]
    if pairs.expression is None or pairs.batch_shape or min(n, m) < _LEAST or pairs.layout is not None:
        return None
    if pairs.device.type != "cpu" or pairs.coincident is not None or pairs.sources:
        return None
    result = pairs.remember("nearby", lambda: _sought(pairs))
    if result is not None:
        for own, theirs in ((result.pairs.x1, pairs.x1), (result.pairs.x2, pairs.x2)):
            own.requires_grad_(theirs.requires_grad)
    return result


@torch.inference_mode(False)
@torch.no_grad()
def _sought(pairs: Pairs) -> Nearby | None:
    expression, prepared, same = pairs.expression, pairs.prepared(), pairs.same
    assert expression is not None
    if not expression.atoms or not all(f.left.shape[-1] for f in prepared.features):
        return None
    least = torch.finfo(pairs.compute_dtype).eps / (_SLACK * max(pairs.shape[-2:]))
    reach = [farthest(a.profile, f).double() for a, f in zip(expression.atoms, prepared.features, strict=True)]
    if not bool(_over_k0(expression, prepared, reach) <= least):
        return None
    leaves, orders, boxes = [], [], []
    for side in [[f.left for f in prepared.features], [f.right for f in prepared.features]][: 1 if same else 2]:
        leaf = max(_LEAF, -(-len(side[0]) // _LEAVES))
        order = _order(torch.cat(side, dim=-1), leaf)
        leaves.append(leaf)
        orders.append(order)
        boxes.append([_boxes(x.index_select(0, order), leaf) for x in side])
    masks = _masks(expression, prepared, boxes[0], boxes[-1], least)
    share = float(masks[0].double().mean())
    if share > _SHARE:
        return None
    layout = Layout((leaves[0], leaves[-1]), *masks)
    left, right = orders[0], orders[-1]
    x1, x2 = pairs.x1, pairs.x2
    first = x1.detach().index_select(-2, left)
    second = first if x2 is x1 else x2.detach().index_select(-2, right)
    ordered = pairs.at(first, second, same, pairs.centre)
    ordered.layout = layout
    return Nearby(ordered, left, right, share)


def _order(x: Tensor, leaf: int) -> Tensor:
    """Return an order ``(n,)`` in which each ``leaf`` points lie together: halves along the widest feature."""
    order = torch.arange(len(x))
    todo = [(0, len(x))]
    while todo:
        start, stop = todo.pop()
        if stop - start <= leaf:
            continue
        some = order[start:stop]
        part = x[some]
        low, high = torch.aminmax(part, dim=0)
        order[start:stop] = some[part[:, int((high - low).argmax())].argsort(stable=True)]
        middle = start + leaf * max(1, -(-(stop - start) // leaf) // 2)
        todo += [(start, middle), (middle, stop)]
    return order


def _boxes(x: Tensor, leaf: int) -> tuple[Tensor, Tensor]:
    """Lower and upper corners ``(leaves, p)`` of consecutive points ``(n, p)``, in float64."""
    low, high = zip(*(torch.aminmax(x[rows], dim=0) for rows in spans(len(x), leaf)), strict=True)
    return torch.stack(low).double(), torch.stack(high).double()


def _masks(
    expression: Expression,
    prepared: Prepared,
    left: list[tuple[Tensor, Tensor]],
    right: list[tuple[Tensor, Tensor]],
    least: float,
) -> tuple[Tensor, Tensor]:
    """Return masks of pairs of boxes with entries, and with derivatives, above ``least`` times k(0)."""
    values, slopes = [], []
    for some in spans(len(left[0][0]), 512):
        apart = [
            _apart(atom.profile.l1, (low[some], high[some]), other)
            for atom, (low, high), other in zip(expression.atoms, left, right, strict=True)
        ]
        bound = _over_k0(expression, prepared, apart)
        values.append(bound > least)
        slopes.append(bound * bound.clamp(min=1e-300).log().square().clamp(min=1) > least)
    return torch.cat(values), torch.cat(slopes)


def _apart(l1: bool, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Return squared, or l1, distances ``(rows, columns)`` of boxes; no pair of their points is nearer."""
    (a, b), (c, d) = left, right
    apart = a.new_zeros(len(a), len(c))
    for i in range(a.shape[-1]):
        gap = torch.maximum(a[:, i, None] - d[:, i], c[:, i] - b[:, i, None]).clamp_(min=0)
        apart += gap if l1 else gap.square_()
    return apart


def _over_k0(expression: Expression, prepared: Prepared, distances: list[Tensor]) -> Tensor:
    """Return upper bounds of absolute entries over k(0), at these distances or beyond.

    :param distances: float64, of one shape, for each factor of the kernel.
    """
    factors = [
        atom.profile.at(q, None if f.alpha is None else f.alpha.double())
        for atom, f, q in zip(expression.atoms, prepared.features, distances, strict=True)
    ]
    scales = prepared.coefficients.double().abs()
    terms = zip(scales / scales.sum(), expression.terms, strict=True)
    first, *others = (math.prod([factors[a] for a in term], start=scale) for scale, term in terms)
    return sum(others, first)


def _runs(wanted: Tensor) -> list[tuple[int, int]]:
    """Return the runs of a mask ``(k,)``: first place, and the place behind the last."""
    edges = torch.nn.functional.pad(wanted.to(torch.int8), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero().squeeze(-1), (edges == -1).nonzero().squeeze(-1)
    return list(zip(starts.tolist(), stops.tolist(), strict=True))

"""Products with a kernel matrix, and their gradients: by its engine, and shared out where several ranks work together.

Inputs, vectors and results are whole on every rank; what is shared out are the pairs of points.  Where x1 is x2 and
tiles are evaluated, a rank takes tiles of the upper half of the matrix, as many pairs as the others, and their mirror
images; the partial products are added up: 2 n t (P - 1) / P numbers are sent by each of P ranks.  Everywhere else a
rank takes its own rows, and rows are gathered, half as many numbers; of a matrix with fewer rows than columns it takes
its own columns, and partial products are added up.  A stored matrix is stored by rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..distributed import Shards
from ..fingerprint import module_mark, tensor_key
from ..row_sources import RowSource
from .engines import DENSE, TILED, choose
from .engines.base import Gradients, folds
from .engines.self_check import trusted
from .pairs import Pairs
from .parts import part
from .streamed_tiles import sources

_SMALL = 2**16  # numbers of gradients that are added up together


def product(pairs: Pairs, rhs: Tensor) -> Tensor:
    """``K rhs`` for rhs ``(*b, m, t)`` of the matrix's ``compute_dtype``, without autograd."""
    engine, shards = choose(pairs), pairs.ranks()
    if shards is None or (pairs.coincident is not None and not pairs.same):
        return trusted(engine, pairs, rhs.shape[-1]).product(pairs, rhs)
    _compare(pairs, shards)
    n, m = pairs.shape[-2:]
    if pairs.same and engine is TILED:
        return shards.sum(TILED.product(pairs, rhs, _half(pairs, shards)), spare=True)
    down = n >= m
    span = shards.span(n if down else m)
    if span.stop == span.start:
        found = rhs.new_zeros(*pairs.flat_batch, 0 if down else n, rhs.shape[-1])
    else:
        own = _own(pairs, span, down)
        found = trusted(engine, own, rhs.shape[-1]).product(own, rhs if down else rhs[..., span, :])
    return shards.gather(found, n) if down else shards.sum(found, spare=True)


def part_of_rows(pairs: Pairs, indices: Tensor, rhs: Tensor, span: slice) -> Tensor:
    """``K[indices, span] rhs`` by this rank alone, for rhs ``(h, t)``: its part of ``K[indices] v``, for the rows of v
    that it holds.  The matrix has no batch."""
    if span.stop == span.start:
        return rhs.new_zeros(len(indices), rhs.shape[-1])
    some = part(_own(pairs, span, False), indices, None)
    found = trusted(choose(some), some, rhs.shape[-1]).product(some, rhs.to(some.compute_dtype))
    return found.to(rhs.dtype)


def derivative(pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
    """The gradient of ``sum_t left_t^T K right_t`` for each of the operator's tensors, on every rank.

    :param left: ``(*b, n, t)``; :param right: ``(*b, m, t)``.
    """
    engine, shards = choose(pairs), pairs.ranks()
    if shards is None or (pairs.coincident is not None and not pairs.same):
        return trusted(engine, pairs, left.shape[-1], gradient=True).derivative(pairs, left, right)
    _compare(pairs, shards)
    n = pairs.shape[-2]
    if engine is TILED or engine is DENSE:
        within = _half(pairs, shards) if folds(pairs) else shards.span(n)
        return summed(shards, TILED.derivative(pairs, left, right, within))
    span = shards.span(n)
    own = pairs.at(pairs.x1.detach()[..., span, :].requires_grad_(pairs.x1.requires_grad), pairs.x2, False)
    if span.stop == span.start:
        found = tuple(torch.zeros_like(t) if t.requires_grad else None for t in pairs.tensors)
        return summed(shards, found)
    engine = trusted(engine, own, left.shape[-1], gradient=True)
    of_rows, *rest = engine.derivative(own, left[..., span, :], right)
    whole = None
    if of_rows is not None:
        whole = torch.zeros_like(pairs.x1)
        whole[..., span, :] = of_rows
    return summed(shards, (whole, *rest))


def summed(shards: Shards, gradients: Gradients) -> Gradients:
    """The sum over the ranks of each gradient; None where there is none."""
    out = list(gradients)
    small = [i for i, one in enumerate(gradients) if one is not None and one.numel() <= _SMALL]
    parts = [one.reshape(-1).to(torch.float64) for one in gradients if one is not None and one.numel() <= _SMALL]
    if parts:
        totals = shards.sum(torch.cat(parts)).split([len(one) for one in parts])
        for i, total in zip(small, totals, strict=True):
            one = gradients[i]
            assert one is not None
            out[i] = total.reshape(one.shape).to(one.dtype)
    for i, one in enumerate(gradients):
        if one is not None and one.numel() > _SMALL:
            out[i] = shards.sum(one)
    return tuple(out)


def _half(pairs: Pairs, shards: Shards) -> slice:
    """Rows of the upper half of an n x n matrix such that all ranks evaluate as many entries of it.

    Tiles of 2 c columns are square along the diagonal: up to row x there are ``x (n + c) - x^2 / 2`` entries.
    """
    n, c = pairs.shape[-1], TILED.width(pairs) // 2
    whole = n * (n + 2 * c)  # twice the entries of all rows
    first, last = (
        n + c - math.isqrt((n + c) ** 2 - whole * rank // shards.count) for rank in (shards.rank, shards.rank + 1)
    )
    return slice(first, last)


def _own(pairs: Pairs, span: slice, down: bool) -> Pairs:
    """This rank's rows, or columns; kept with the matrix where an engine may keep something with them."""
    if sources(pairs):
        side = pairs.x1 if down else pairs.x2
        own = side.part(span) if isinstance(side, RowSource) else side[span]
        return pairs.at(*((own, pairs.x2) if down else (pairs.x1, own)), False, pairs.centre)

    def make() -> Pairs:
        indices = torch.arange(span.start, span.stop, device=pairs.device)
        return part(pairs, indices, None) if down else part(pairs, None, indices)

    return pairs.remember(("rows" if down else "columns", span.start, span.stop), make) if pairs.same else make()


def _compare(pairs: Pairs, shards: Shards) -> None:
    """See that all ranks multiply by the same matrix, once for each that is no part of another.

    :raises InputError: on every rank, with what differs.
    """
    if pairs.whole is not None or pairs.compared is shards:
        return
    pairs.compared = shards
    same = "" if not pairs.same else ", with itself"
    first, *others = (tensor_key(x) for x in (pairs.x1, pairs.x2)[: 1 if pairs.same else 2])
    facts = {
        "the shape of the kernel matrix": f"{tuple(pairs.shape)}{same}",
        "its dtype": str(pairs.dtype),
        "matmul=": f"{pairs.engine} {pairs.precision}",
        "the inputs": repr([(*key[:2], *key[3:]) for key in (first, *others)]),
        "the kernel and its hyperparameters": module_mark(pairs.kernel, pairs.parameters),
    }
    shards.exchange.alike("A product with a kernel matrix", facts)

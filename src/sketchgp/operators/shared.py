"""Products with a kernel matrix, and their gradients: by its engine, and shared out where several ranks work together.

Inputs, vectors and results are whole on every rank; what is shared out are the pairs of points.  Where x1 is x2 and
tiles are evaluated, a rank takes tiles of the upper half of the matrix, as many pairs as the others, and their mirror
images; the partial products are added up: 2 n t (P - 1) / P numbers are sent by each of P ranks.  Everywhere else a
rank takes its own rows, and rows are gathered, half as many numbers; of a matrix with fewer rows than columns it takes
its own columns, and partial products are added up.  A stored matrix is stored by rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..fingerprint import module_mark, tensor_key
from ..row_sources import RowSource
from .engines import DENSE, TILED, choose
from .engines.base import Gradients, folds
from .engines.self_check import trusted
from .streamed_tiles import sources

if TYPE_CHECKING:
    from ..distributed import Shards
    from .kernel_matrix import KernelMatrix

_SMALL = 2**16  # numbers of gradients that are added up together


def product(matrix: KernelMatrix, rhs: Tensor) -> Tensor:
    """``K rhs`` for rhs ``(*b, m, t)`` of the matrix's ``compute_dtype``, without autograd."""
    engine, shards = choose(matrix), matrix.ranks()
    if shards is None or (matrix.coincident is not None and not matrix.same):
        return trusted(engine, matrix, rhs.shape[-1]).product(matrix, rhs)
    _compare(matrix, shards)
    n, m = matrix.shape[-2:]
    if matrix.same and engine is TILED:
        return shards.sum(TILED.product(matrix, rhs, _half(matrix, shards)), spare=True)
    down = n >= m
    span = shards.span(n if down else m)
    if span.stop == span.start:
        part = rhs.new_zeros(*matrix.flat_batch, 0 if down else n, rhs.shape[-1])
    else:
        own = _own(matrix, span, down)
        part = trusted(engine, own, rhs.shape[-1]).product(own, rhs if down else rhs[..., span, :])
    return shards.gather(part, n) if down else shards.sum(part, spare=True)


def part_of_rows(matrix: KernelMatrix, indices: Tensor, rhs: Tensor, span: slice) -> Tensor:
    """``K[indices, span] rhs`` by this rank alone, for rhs ``(h, t)``: its part of ``K[indices] v``, for the rows of v
    that it holds.  The matrix has no batch."""
    if span.stop == span.start:
        return rhs.new_zeros(len(indices), rhs.shape[-1])
    part = _own(matrix, span, False).rows(indices)
    found = trusted(choose(part), part, rhs.shape[-1]).product(part, rhs.to(part.compute_dtype))
    return found.to(rhs.dtype)


def derivative(matrix: KernelMatrix, left: Tensor, right: Tensor) -> Gradients:
    """The gradient of ``sum_t left_t^T K right_t`` for each of the operator's tensors, on every rank.

    :param left: ``(*b, n, t)``; :param right: ``(*b, m, t)``.
    """
    engine, shards = choose(matrix), matrix.ranks()
    if shards is None or (matrix.coincident is not None and not matrix.same):
        return trusted(engine, matrix, left.shape[-1], gradient=True).derivative(matrix, left, right)
    _compare(matrix, shards)
    n = matrix.shape[-2]
    if engine is TILED or engine is DENSE:
        within = _half(matrix, shards) if folds(matrix) else shards.span(n)
        return summed(shards, TILED.derivative(matrix, left, right, within))
    span = shards.span(n)
    part = matrix._with(matrix.x1.detach()[..., span, :].requires_grad_(matrix.x1.requires_grad), matrix.x2, False)
    if span.stop == span.start:
        found = tuple(torch.zeros_like(t) if t.requires_grad else None for t in matrix._args)
        return summed(shards, found)
    engine = trusted(engine, part, left.shape[-1], gradient=True)
    of_rows, *rest = engine.derivative(part, left[..., span, :], right)
    whole = None
    if of_rows is not None:
        whole = torch.zeros_like(matrix.x1)
        whole[..., span, :] = of_rows
    return summed(shards, (whole, *rest))


def summed(shards: Shards, gradients: Gradients) -> Gradients:
    """The sum over the ranks of each gradient; None where there is none."""
    out = list(gradients)
    small = [i for i, one in enumerate(gradients) if one is not None and one.numel() <= _SMALL]
    parts = [one.reshape(-1).to(torch.float64) for one in gradients if one is not None and one.numel() <= _SMALL]
    if parts:
        totals = shards.sum(torch.cat(parts)).split([len(part) for part in parts])
        for i, total in zip(small, totals, strict=True):
            one = gradients[i]
            assert one is not None
            out[i] = total.reshape(one.shape).to(one.dtype)
    for i, one in enumerate(gradients):
        if one is not None and one.numel() > _SMALL:
            out[i] = shards.sum(one)
    return tuple(out)


def _half(matrix: KernelMatrix, shards: Shards) -> slice:
    """Rows of the upper half of an n x n matrix such that all ranks evaluate as many entries of it.

    Tiles of 2 c columns are square along the diagonal: up to row x there are ``x (n + c) - x^2 / 2`` entries.
    """
    n, c = matrix.shape[-1], TILED.width(matrix) // 2
    whole = n * (n + 2 * c)  # twice the entries of all rows
    first, last = (
        n + c - math.isqrt((n + c) ** 2 - whole * rank // shards.count) for rank in (shards.rank, shards.rank + 1)
    )
    return slice(first, last)


def _own(matrix: KernelMatrix, span: slice, down: bool) -> KernelMatrix:
    """This rank's rows, or columns; kept with the matrix where an engine may keep something with them."""
    name = "own rows" if down else "own columns"
    kept = matrix.memo.get(name)
    if kept is not None and kept[1] == span and matrix._unchanged(kept[0]):
        return kept[2]
    if sources(matrix):
        side = matrix.x1 if down else matrix.x2
        own = side.part(span) if isinstance(side, RowSource) else side[span]
        return matrix._with(*((own, matrix.x2) if down else (matrix.x1, own)), False, matrix.centre)
    indices = torch.arange(span.start, span.stop, device=matrix.device)
    part = matrix._part(indices, None) if down else matrix._part(None, indices)
    if matrix.same:
        matrix.memo[name] = (matrix._state(), span, part)
    return part


def _compare(matrix: KernelMatrix, shards: Shards) -> None:
    """See that all ranks multiply by the same matrix, once for each that is no part of another.

    :raises InputError: on every rank, with what differs.
    """
    if "part" in matrix.memo or matrix.memo.get("compared") is shards:
        return
    matrix.memo["compared"] = shards
    same = "" if not matrix.same else ", with itself"
    first, *others = (tensor_key(x) for x in (matrix.x1, matrix.x2)[: 1 if matrix.same else 2])
    facts = {
        "the shape of the kernel matrix": f"{tuple(matrix.shape)}{same}",
        "its dtype": str(matrix.dtype),
        "matmul=": f"{matrix.engine} {matrix.precision}",
        "the inputs": repr([(*key[:2], *key[3:]) for key in (first, *others)]),
        "the kernel and its hyperparameters": module_mark(matrix.kernel, matrix.parameters),
    }
    shards.exchange.alike("A product with a kernel matrix", facts)

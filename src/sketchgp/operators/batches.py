"""Batches of kernel matrices that are one matrix over and over, and the derivatives of batches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import NumericalError
from .batch_element import BatchElement, Index, pick
from .engines import TILED
from .generic_tiles import real
from .pairs import Pairs
from .shapes import columns_to_leading, leading_to_columns, repeated
from .shared import derivative, product

_FEW = 8  # rows and columns at which an element is compared with its batch
_RELATIVE, _ABSOLUTE = 1e-2, 1e-6  # differences allowed in an entry: of itself, of the largest; kernels may round


def repeats(pairs: Pairs) -> bool:
    """Whether a batch is one matrix over and over: unbatched kernel, inputs expanded without copies."""
    once = not pairs.kernel.batch_shape and pairs.batch_shape.numel() > 0
    return once and repeated(pairs.x1) and repeated(pairs.x2)


def single(pairs: Pairs) -> Pairs:
    """The matrix that a batch repeats."""
    x1, x2 = (x.detach().flatten(0, -3)[0].requires_grad_(x.requires_grad) for x in (pairs.x1, pairs.x2))
    return pairs.at(x1, x1 if pairs.x2 is pairs.x1 else x2, pairs.same)


def product_of_batch(pairs: Pairs, rhs: Tensor) -> Tensor:
    """Return ``K rhs`` for rhs ``(..., m, t)`` of the dtype of the pairs, without autograd; batches are broadcast."""
    batch = pairs.batch_shape if rhs.dim() == 2 else torch.broadcast_shapes(pairs.batch_shape, rhs.shape[:-2])
    n, t = pairs.shape[-2], rhs.shape[-1]
    if 0 in pairs.batch_shape:
        return rhs.new_zeros(*batch, n, t)
    if pairs.batch_shape and repeats(pairs):
        one = pairs.remember("the repeated matrix", lambda: single(pairs))
        return product_of_batch(one, rhs.expand(*batch, *rhs.shape[-2:]))
    more = len(batch) - len(pairs.batch_shape)
    if batch[more:] != pairs.batch_shape:
        x1, x2 = (x.expand(*batch[more:], *x.shape[-2:]) for x in (pairs.x1, pairs.x2))
        return product_of_batch(pairs.at(x1, x2, pairs.same, pairs.centre), rhs)
    columns = leading_to_columns(rhs, batch, more)
    flat = columns.reshape(*pairs.flat_batch, rhs.shape[-2], batch[:more].numel() * t)
    value = product(pairs, flat.to(pairs.compute_dtype)).to(rhs.dtype)
    value = value.reshape(*pairs.batch_shape, n, *batch[:more], t)
    return value if not more else value.permute(*columns_to_leading(value.dim(), len(pairs.batch_shape), more))


def derivative_of_batch(pairs: Pairs, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of ``sum_t left_t^T K right_t`` for each of the operator's tensors, without autograd.

    :param left_vecs: ``(..., n, t)`` or ``(n,)``; :param right_vecs: ``(..., m, t)`` or ``(m,)``.
    """
    if left_vecs.dim() == 1:
        left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
    batch = torch.broadcast_shapes(pairs.batch_shape, left_vecs.shape[:-2], right_vecs.shape[:-2])
    more = len(batch) - len(pairs.batch_shape)
    if len(pairs.batch_shape) and batch == pairs.batch_shape and repeats(pairs):  # one matrix: more columns
        one, count = single(pairs), batch.numel()
        sides = (v.expand(*batch, *v.shape[-2:]).movedim(-2, 0).flatten(1) for v in (left_vecs, right_vecs))
        of_x1, of_x2, *rest = derivative_of_batch(one, *sides)
        of_x1, of_x2 = (
            None if g is None else (g / count).expand(x.shape) for g, x in ((of_x1, pairs.x1), (of_x2, pairs.x2))
        )
        return (of_x1, of_x2, *rest)
    if batch[more:] != pairs.batch_shape:  # a batch of size one against a larger one: its parts add up
        return TILED.dense_derivative(pairs, (left_vecs @ right_vecs.mT).sum_to_size(pairs.shape))
    left, right = (
        leading_to_columns(v, batch, more)
        .reshape(*pairs.flat_batch, v.shape[-2], batch[:more].numel() * v.shape[-1])
        .to(pairs.compute_dtype)
        for v in (left_vecs, right_vecs)
    )
    return derivative(pairs, left, right)


@torch.no_grad()
def element(pairs: Pairs, index: Index) -> Pairs:
    """Return one matrix of a batch, a constant, computed by the engine of the batch.

    A few of its entries are compared with those that the kernel itself gives for the batch.

    :raises InputError: for a kernel that does not give one matrix for each element.
    :raises NumericalError: if they differ.
    """
    batch, kernel, names = pairs.batch_shape, pairs.kernel, pairs.names
    x1, x2 = (x.detach().expand(*batch, *x.shape[-2:])[index] for x in (pairs.x1, pairs.x2))
    x2 = x1 if pairs.x2 is pairs.x1 else x2
    parameters = [p.detach() for p in pairs.parameters]
    if len(kernel.batch_shape) or (pairs.expression is None and _hides_a_batch(pairs, x1, x2)):
        inputs = torch.broadcast_shapes(pairs.x1.shape[:-2], pairs.x2.shape[:-2])
        kernel, names = BatchElement(kernel, index, batch, inputs), tuple(f"whole.{name}" for name in names)
    found = pairs.of([x1, x2, *parameters], kernel=kernel, names=names, centre=None)
    _check(pairs, found, index)
    return found


def _hides_a_batch(pairs: Pairs, x1: Tensor, x2: Tensor) -> bool:
    """Whether a kernel that says it has no batch gives one all the same."""
    return pairs.evaluator(pairs.parameters)(real(x1[:1]), real(x2[:1])).dim() > 2


def _check(pairs: Pairs, found: Pairs, index: Index) -> None:
    """Compare some entries of an element with what the kernel gives for the batch, both in float64."""
    rows, columns = (
        torch.linspace(0, size - 1, min(size, _FEW), device=pairs.device).long() for size in pairs.shape[-2:]
    )
    if not (len(rows) and len(columns)):
        return
    parameters = [p.detach().to(torch.float64) for p in pairs.parameters]
    few = [x.detach().index_select(-2, i).double() for x, i in ((pairs.x1, rows), (pairs.x2, columns))]
    size = (len(rows), len(columns))
    given = pick(pairs.evaluator(parameters)(*few), pairs.batch_shape, index, size, False, pairs.kernel)
    few = [x.index_select(-2, i).double() for x, i in ((found.x1, rows), (found.x2, columns))]
    taken = TILED.dense(found.of([*few, *parameters], engine="tiled", same=False))
    scale = float(given.abs().nan_to_num().max())
    if not torch.allclose(taken, given, rtol=_RELATIVE, atol=_ABSOLUTE * scale, equal_nan=True):
        raise NumericalError(
            f"Matrix {index} of a batch of {tuple(pairs.batch_shape)} differs, taken by itself, from the batch's by "
            f"{float((taken - given).abs().nan_to_num().max()):.2g} (entries up to {scale:.2g}): the matrices of "
            f"{type(pairs.kernel).__name__} depend on one another. Use matmul='gpytorch', which stores all of them.",
            see="batch-differs",
        )

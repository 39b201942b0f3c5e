"""Products with a kernel matrix and their derivatives: batches, shares of several ranks, and the engine of each part.

Inputs, vectors and results are complete on every rank; the pairs of points are shared out.  Where x1 is x2 and tiles
are evaluated, a rank takes tiles of the upper half of the matrix, as many pairs as the others, and their mirror
images.  The partial products are added up: each of P ranks sends 2 n t (P - 1) / P numbers.  Elsewhere a rank takes its
own rows, and rows are gathered, half as many numbers; of a matrix with fewer rows than columns it takes its own
columns, and partial products are added up.  A stored matrix is stored by rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..distributed import Shards
from ..errors import NumericalError
from ..fingerprint import module_mark, tensor_key
from ..row_sources import RowSource
from .engines import DENSE, FUSED, TILED, choose
from .engines.base import Gradients, folds
from .engines.self_check import trusted
from .generic_tiles import BatchElement, Index, pick, real
from .pairs import Pairs, part


def product(pairs: Pairs, rhs: Tensor) -> Tensor:
    """Return ``K rhs`` for rhs ``(*b, m, t)`` of the matrix's ``compute_dtype``, without autograd."""
    engine, shards = choose(pairs, rhs.shape[-1]), pairs.ranks()
    if shards is None or (pairs.coincident is not None and not pairs.same):
        return trusted(engine, pairs, rhs.shape[-1]).product(pairs, rhs)
    _compare(pairs, shards)
    n, m = pairs.shape[-2:]
    if pairs.same and engine is TILED:
        return shards.sum(TILED.product(pairs, rhs, _half(pairs, shards)), spare=True)
    down = n >= m
    span = shards.span(n if down else m)
    own = _own(pairs, span, down)
    result = trusted(engine, own, rhs.shape[-1]).product(own, rhs if down else rhs[..., span, :])
    return shards.gather(result, n) if down else shards.sum(result, spare=True)


def part_of_rows(pairs: Pairs, indices: Tensor, rhs: Tensor, span: slice) -> Tensor:
    """Return ``K[indices, span] rhs`` by this rank alone, for the rows rhs ``(h, t)`` of v that it holds.

    The sum over the ranks is ``K[indices] v``.  The matrix has no batch.
    """
    some = part(_own(pairs, span, False), indices, None)
    result = trusted(choose(some), some, rhs.shape[-1]).product(some, _multiplicand(some, rhs))
    return result.to(rhs.dtype)


def _multiplicand(pairs: Pairs, vectors: Tensor) -> Tensor:
    """Return vectors ``(..., m, t)`` in the dtype of a product, without subnormal numbers beside far larger ones.

    A CPU multiplies subnormal numbers ten times slower than 0.
    """
    vectors = vectors.to(pairs.compute_dtype)
    if vectors.device.type != "cpu" or not vectors.numel():
        return vectors
    size, info = vectors.abs(), torch.finfo(vectors.dtype)
    limit = (info.eps**2 * size.amax(dim=-2, keepdim=True)).clamp(max=info.tiny)
    return torch.where(size < limit, 0, vectors)


def derivative(pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
    """Return the gradient of ``sum_t left_t^T K right_t`` for each of the operator's tensors, on every rank.

    :param left: ``(*b, n, t)``; :param right: ``(*b, m, t)``.
    """
    chosen, shards = choose(pairs), pairs.ranks()
    engine = TILED if chosen in (DENSE, FUSED) else chosen  # their derivatives go by tiles
    if shards is None or (pairs.coincident is not None and not pairs.same):
        return trusted(engine, pairs, left.shape[-1], gradient=True).derivative(pairs, left, right)
    _compare(pairs, shards)
    n = pairs.shape[-2]
    if engine is TILED:
        within = _half(pairs, shards) if folds(pairs) else shards.span(n)
        return summed(shards, TILED.derivative(pairs, left, right, within))
    span = shards.span(n)
    own = pairs.at(pairs.x1.detach()[..., span, :].requires_grad_(pairs.x1.requires_grad), pairs.x2, False)
    engine = trusted(engine, own, left.shape[-1], gradient=True)
    of_rows, *rest = engine.derivative(own, left[..., span, :], right)
    whole = None
    if of_rows is not None:
        whole = torch.zeros_like(pairs.x1)
        whole[..., span, :] = of_rows
    return summed(shards, (whole, *rest))


def summed(shards: Shards, gradients: Gradients) -> Gradients:
    """Return the sum over the ranks of each gradient; None where there is none."""
    return tuple(None if one is None else shards.sum(one) for one in gradients)


def _half(pairs: Pairs, shards: Shards) -> slice:
    """Return this rank's rows of the upper half of an n x n matrix; all ranks evaluate as many entries of it.

    Tiles of 2 c columns are square along the diagonal: up to row x there are ``x (n + c) - x^2 / 2`` entries.
    """
    n, c = pairs.shape[-1], TILED.width(pairs) // 2
    whole = n * (n + 2 * c)  # twice the entries of all rows
    first, last = (
        n + c - math.isqrt((n + c) ** 2 - whole * rank // shards.count) for rank in (shards.rank, shards.rank + 1)
    )
    return slice(first, last)


def _own(pairs: Pairs, span: slice, down: bool) -> Pairs:
    """Return the rows, or columns, of this rank; remembered where an engine may remember values with them."""
    if pairs.sources:
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


_FEW = 8  # rows and columns at which an element is compared with its batch
_RELATIVE, _ABSOLUTE = 1e-2, 1e-6  # differences allowed in an entry: of itself, of the largest; kernels may round


def repeats(pairs: Pairs) -> bool:
    """Return whether a batch repeats one matrix: unbatched kernel, inputs expanded without copies."""
    once = not pairs.kernel.batch_shape and pairs.batch_shape.numel() > 0
    return once and _repeated(pairs.x1) and _repeated(pairs.x2)


def single(pairs: Pairs) -> Pairs:
    """Return the matrix that a batch repeats."""
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
    value = product(pairs, _leading_to_columns(pairs, rhs, batch, more)).to(rhs.dtype)
    value = value.reshape(*pairs.batch_shape, n, *batch[:more], t)
    return value.movedim([*range(-1 - more, -1)], [*range(more)])


def derivative_of_batch(pairs: Pairs, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of ``sum_t left_t^T K right_t`` for each of the operator's tensors, without autograd.

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
    left, right = (_leading_to_columns(pairs, v, batch, more) for v in (left_vecs, right_vecs))
    return derivative(pairs, left, right)


def element(pairs: Pairs, index: Index) -> Pairs:
    """Return one matrix of a batch, computed by the engine of the batch.

    A few of its entries are compared with those that the kernel itself gives for the batch.

    :raises InputError: for a kernel that does not give one matrix for each element.
    :raises NumericalError: if they differ.
    """
    batch, kernel, names = pairs.batch_shape, pairs.kernel, pairs.names
    x1, x2 = (x.expand(*batch, *x.shape[-2:])[index] for x in (pairs.x1, pairs.x2))
    x2 = x1 if pairs.x2 is pairs.x1 else x2
    if len(kernel.batch_shape) or (pairs.expression is None and _hides_a_batch(pairs, x1, x2)):
        inputs = torch.broadcast_shapes(pairs.x1.shape[:-2], pairs.x2.shape[:-2])
        kernel, names = BatchElement(kernel, index, batch, inputs), tuple(f"whole.{name}" for name in names)
    result = pairs.of([x1, x2, *pairs.parameters], kernel=kernel, names=names, centre=None)
    _check(pairs, result, index)
    return result


def _hides_a_batch(pairs: Pairs, x1: Tensor, x2: Tensor) -> bool:
    """Return whether a kernel without a batch shape gives a batch."""
    return pairs.evaluator(pairs.parameters)(real(x1[:1]), real(x2[:1])).dim() > 2


@torch.no_grad()
def _check(pairs: Pairs, result: Pairs, index: Index) -> None:
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
    few = [x.index_select(-2, i).double() for x, i in ((result.x1, rows), (result.x2, columns))]
    taken = TILED.dense(result.of([*few, *parameters], engine="tiled", same=False))
    scale = float(given.abs().nan_to_num().max())
    if not torch.allclose(taken, given, rtol=_RELATIVE, atol=_ABSOLUTE * scale, equal_nan=True):
        raise NumericalError(
            f"Matrix {index} of a batch of {tuple(pairs.batch_shape)} differs, taken by itself, from the batch's by "
            f"{float((taken - given).abs().nan_to_num().max()):.2g} (entries up to {scale:.2g}): the matrices of "
            f"{type(pairs.kernel).__name__} depend on one another. Use matmul='gpytorch', which stores all of them.",
            see="batch-differs",
        )


def _leading_to_columns(pairs: Pairs, x: Tensor, batch: torch.Size, more: int) -> Tensor:
    """Return x expanded to the batch ``(*b, n, t')``, its first ``more`` dimensions as columns, for a product."""
    columns = x.expand(*batch, *x.shape[-2:]).movedim([*range(more)], [*range(-1 - more, -1)])
    return _multiplicand(pairs, columns.reshape(*pairs.flat_batch, x.shape[-2], batch[:more].numel() * x.shape[-1]))


def _repeated(x: Tensor) -> bool:
    """Return whether a batch ``(..., n, d)`` repeats one matrix, expanded without copies."""
    steps = zip(x.stride()[:-2], x.shape[:-2], strict=True)
    return x.dim() > 2 and not any(step for step, size in steps if size > 1)

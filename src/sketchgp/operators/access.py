"""Columns, rows, blocks, diagonal and products of sums, products and multiples of operators, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add, mul
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import PeriodicKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import settings, to_dense, to_linear_operator
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    KernelLinearOperator,
    LinearOperator,
    MulLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from ..row_sources import blocks
from .engines import DENSE, FAST, LATTICE, NEAR_AND_FAR, choose, unstored
from .generic_tiles import call
from .kernel_matrix import KernelMatrix
from .lazies import SUMS, evaluated, keeps_gradients, without_keops
from .nearby import nearby
from .pairs import take
from .products import part_of_rows
from .profiles import MATERN
from .tiles import GROUP, pieces, spans

_SMALL = 2**22  # entries of a float64 matrix that is evaluated whole, and not by tiles
_BLOCK = 512  # rows of a block whose diagonal is taken
_GATHERED = {"cpu": 2**20, "cuda": 2**26}  # entries of a stored matrix gathered at once: on CPUs, while in cache
_CHEAP = 96  # features up to which evaluating an entry is faster than fetching it (measured on a CPU)
_L1_WORK = 12  # of a feature of an l1 distance, in features of a Euclidean one
_SIDE = 512  # of a stored tile: 1 MB, which stays in the cache between its two products
_CONVERTED = 2**22  # entries of a stored matrix that are converted to float64 at once


class Algebra(NamedTuple):
    """Sums, products and multiples of the values of an operator's parts, for :func:`fold`.

    :ivar scale: from a value and a constant ``(..., 1, 1)`` to their product.
    :ivar multiply: None where products of operators are parts themselves.
    """

    add: Callable[[list[Any]], Any]
    scale: Callable[[Any, Tensor], Any]
    multiply: Callable[[Any, Any], Any] | None = None


def _sum(values: list[Tensor]) -> Tensor:
    return sum(values[1:], values[0])


MATRICES = Algebra(_sum, lambda value, c: value * c.to(value.dtype), mul)  # of dense matrices, or parts of them
PRODUCTS = Algebra(_sum, lambda value, c: value * c.to(value.dtype))  # of products with vectors
DIAGONALS = Algebra(_sum, lambda value, c: value * c.to(value.dtype).squeeze(-1), mul)
_TERMS = Algebra(lambda parts: [term for part in parts for term in part],
                 lambda part, c: [(scale * c.to(torch.float64), operator) for scale, operator in part])  # fmt: skip


def _operators(constant: Callable[[Tensor], Tensor]) -> Algebra:
    """Return the algebra of operators.

    :param constant: what takes the place of a constant ``(...)``.
    """
    return Algebra(
        lambda parts: SumLinearOperator(*parts),
        lambda part, c: ConstantMulLinearOperator(part, constant(c[..., 0, 0])),
        MulLinearOperator,
    )


def fold(operator: LinearOperator, leaf: Callable[[LinearOperator], Any], algebra: Algebra) -> Any:
    """Evaluate an operator from its parts.

    :param leaf: gives the value of an operator that is no sum, product or multiple of others.
    :param algebra: puts these values together.
    """
    if isinstance(operator, SUMS):
        return algebra.add([fold(part, leaf, algebra) for part in operator.linear_ops])
    if isinstance(operator, ConstantMulLinearOperator):
        return algebra.scale(fold(operator.base_linear_op, leaf, algebra), operator.expanded_constant)
    if isinstance(operator, MulLinearOperator) and algebra.multiply is not None:
        sides = (fold(side, leaf, algebra) for side in (operator.left_linear_op, operator.right_linear_op))
        return algebra.multiply(*sides)
    return leaf(operator)


def float64(operator: Any, diagonal: bool = False) -> Tensor:
    """Return a covariance, or its diagonal, as a dense and differentiable tensor.

    Kernels are evaluated in float64.
    """

    def inner(part: Any) -> LinearOperator | None:
        if isinstance(part, LazyEvaluatedKernelTensor):
            exact = part.dtype == torch.float64 and (diagonal or part.shape.numel() <= _SMALL)
            part = (None if exact else KernelMatrix.from_lazy(part, "tiled")) or part.evaluate_kernel()
            return part if diagonal else DenseLinearOperator(float64(part))
        return DenseLinearOperator(float64(part)) if isinstance(part, KernelMatrix) and not diagonal else None

    def leaf(part: LinearOperator) -> Tensor:
        if isinstance(part, LazyEvaluatedKernelTensor):
            if diagonal and part.dtype == torch.float64 and (known := _diagonal_alone(part)) is not None:
                return known
            return float64(inner(part), diagonal)
        # type() would convert the user's kernels in place; products of features, too, are then rounded to float64
        part = (part if isinstance(part, KernelMatrix) else evaluated(part, by=inner)).type(torch.float64)
        return (part.diagonal(dim1=-1, dim2=-2) if diagonal else to_dense(part)).to(torch.float64)

    return fold(to_linear_operator(operator), leaf, DIAGONALS if diagonal else MATRICES)


def _diagonal_alone(lazy: LazyEvaluatedKernelTensor) -> Tensor | None:
    """Return the diagonal of an unevaluated kernel, computed by itself; None for kernels of several outputs."""
    x1, x2 = lazy.x1, lazy.x2
    if lazy.params or lazy.last_dim_is_batch or lazy.kernel.num_outputs_per_input(x1, x2) != 1:
        return None
    with torch.set_grad_enabled(keeps_gradients(lazy) and torch.is_grad_enabled()):
        values = call(without_keops(lazy.kernel), x1, x2, diag=True)
    if values.shape[-1:] != lazy.shape[-1:] or values.dim() >= lazy.dim():
        return None
    return values.expand(lazy.shape[:-1])


class Access:
    """Reads parts of one symmetric ``(..., n, n)`` operator, differentiably where autograd is on.

    :param operator: the matrix, or a dense one; a ``KernelMatrix`` is evaluated in float64, others in their own dtype
        and then converted.
    :ivar n: number of rows.
    :ivar resolution: relative size of the rounding errors in the entries.
    """

    def __init__(self, operator: LinearOperator | Tensor) -> None:
        operator = to_linear_operator(operator)
        self.source, self.exact = operator, isinstance(operator, KernelMatrix)
        self.operator = operator.type(torch.float64) if self.exact else operator.evaluate_kernel()
        self.n, self.batch_shape, self.device = operator.shape[-1], operator.batch_shape, operator.device
        self.resolution: float = torch.finfo(torch.float64 if self.exact else operator.dtype).eps

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``(..., n)``."""
        return diagonal(self.operator).to(torch.float64)

    def columns(self, indices: Tensor) -> Tensor:
        """Return columns ``(..., n, r)`` at indices ``(r,)``, or ``(..., r)``, one set for each matrix."""
        return columns(self.operator, indices).to(torch.float64)

    def block(self, rows: Tensor, columns_: Tensor) -> Tensor:
        """Return a block ``(..., p, q)`` at indices ``(..., p)`` and ``(..., q)``."""
        return block(self.operator, rows, columns_).to(torch.float64)

    def matmul(self, rhs: Tensor) -> Tensor:
        """Return ``K rhs`` for rhs ``(..., n, t)`` in float64, differentiable."""
        rhs = rhs.to(self.operator.dtype)
        if isinstance(self.operator, KernelMatrix) and not torch.is_grad_enabled():  # also of rows on disk
            return self.operator.product(rhs).to(torch.float64)
        return (self.operator @ rhs).to(torch.float64)

    def elements(self) -> Iterator[tuple[tuple[int, ...], Access]]:
        """Yield the index of each matrix of the batch, and access to it."""
        for index in itertools.product(*(range(size) for size in self.batch_shape)):
            yield index, Access(element(self.operator, index)) if index else self


def index_within(index: tuple[int, ...], batch: torch.Size) -> tuple[int, ...]:
    """Return the index in a batch of what has another one in a batch that this one is broadcast to."""
    return tuple(0 if size == 1 else i for i, size in zip(index[len(index) - len(batch) :], batch, strict=True))


def element(operator: LinearOperator, index: tuple[int, ...]) -> LinearOperator:
    """Return one matrix of a batch, differentiable in the tensors of the batch.

    :param operator: evaluated (``evaluate_kernel``); :param index: in a batch that this one is broadcast to.
    """
    batch = operator.batch_shape
    if not batch:
        return operator
    index = index_within(index, batch)

    def leaf(part: LinearOperator) -> LinearOperator:
        part = part if part.batch_shape == batch else part.expand(*batch, *part.shape[-2:])
        return part.element(index) if isinstance(part, KernelMatrix) else part[index]

    return fold(operator, leaf, _operators(lambda constant: constant.expand(batch)[index]))


def diagonal(operator: LinearOperator) -> Tensor:
    """Return the diagonal ``(..., n)``."""

    def leaf(part: LinearOperator) -> Tensor:
        if isinstance(part, KernelLinearOperator) and settings.max_cholesky_size.value() <= 1:
            # GPyTorch's KeOps kernels then leave single entries to KeOps too, and its diagonal expects a tensor
            blocks = (to_dense(part[..., rows, rows]) for rows in spans(part.shape[-1], _BLOCK))
            return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in blocks], dim=-1)
        return part.diagonal(dim1=-2, dim2=-1)

    return fold(operator, leaf, DIAGONALS)


def columns(operator: LinearOperator, indices: Tensor) -> Tensor:
    """Return dense columns, ``(..., n, r)``."""
    return fold(operator, lambda part: _columns(part, indices), MATRICES)


def _columns(operator: LinearOperator, indices: Tensor) -> Tensor:
    if isinstance(operator, KernelMatrix):
        return operator.columns(indices)
    if isinstance(operator, DenseLinearOperator):
        return take(operator.tensor, indices, -1)
    if isinstance(operator, BlockInterleavedLinearOperator) and indices.dim() == 1:  # a matrix for each task
        tasks = operator.base_linear_op.shape[-3]
        own = torch.nn.functional.one_hot(indices % tasks, tasks).mT.unsqueeze(-2)
        return (columns(operator.base_linear_op, indices // tasks) * own).transpose(-3, -2).flatten(-3, -2)
    if not indices.shape[-1]:  # operators with structure of their own refuse rank 0
        batch = torch.broadcast_shapes(operator.batch_shape, indices.shape[:-1])
        return torch.zeros(*batch, operator.shape[-1], 0, dtype=operator.dtype, device=operator.device)
    if indices.dim() == 1:
        return to_dense(operator[..., :, indices])
    identity = torch.zeros(*indices.shape[:-1], operator.shape[-1], indices.shape[-1], dtype=operator.dtype,
                           device=operator.device)  # fmt: skip
    return operator @ identity.scatter_(-2, indices.unsqueeze(-2), 1.0)


def block(operator: LinearOperator, rows: Tensor, columns_: Tensor) -> Tensor:
    """Return the dense block ``operator[rows, columns]``, ``(..., p, q)``; of one matrix many blocks at once."""

    def leaf(part: LinearOperator) -> Tensor:
        if isinstance(part, KernelMatrix):
            return part.block(rows, columns_)
        if isinstance(part, DenseLinearOperator):
            if rows.dim() > 1 and not part.batch_shape:
                return part.tensor[rows.unsqueeze(-1), columns_.unsqueeze(-2)]
            return take(take(part.tensor, rows, -2), columns_, -1)
        return take(_columns(part, columns_), rows, -2)

    return fold(operator, leaf, MATRICES)


def has_entries(operator: LinearOperator) -> bool:
    """Return whether an operator is made of kernel matrices and dense ones, whose entries are had one by one."""
    return all(isinstance(part, (KernelMatrix, DenseLinearOperator)) for _, part in terms(operator))


def has_fast_products(operator: LinearOperator) -> bool:
    """Return whether all products with an operator take far fewer than n^2 operations."""
    return all(isinstance(part, KernelMatrix) and choose(part.pairs) in FAST for _, part in terms(operator))


def accuracy_notes(operator: LinearOperator) -> list[str]:
    """Return what a report should say of products that are made to a tolerance."""
    pairs = [part.pairs for _, part in terms(operator) if isinstance(part, KernelMatrix)]
    errors = [NEAR_AND_FAR.parts(each).error for each in pairs if choose(each) is NEAR_AND_FAR]
    return [f"entries of the kernel matrix are within {max(errors):.0e} of k(0)"] if errors else []


Term = tuple[float | Tensor, LinearOperator]


def terms(operator: LinearOperator) -> list[Term]:
    """Return the operator as a sum of scaled operators that are neither sums nor scaled themselves, as constants."""
    return fold(operator.evaluate_kernel(), lambda part: [(1.0, part.detach() if part.requires_grad else part)], _TERMS)


def accurate_terms(operator: LinearOperator) -> list[Term]:
    """Return :func:`terms` in float64: kernel matrices by an engine that stores none, stored matrices as they are."""

    def accurate(part: LinearOperator) -> LinearOperator:
        if isinstance(part, KernelMatrix):
            double = part.type(torch.float64)
            fast = LATTICE if LATTICE.serves(double.pairs) else choose(part.pairs)
            return double.by(fast.name if fast in FAST else "tiled")
        return part if isinstance(part, DenseLinearOperator) else part.type(torch.float64)

    return [(scale, accurate(part)) for scale, part in terms(operator)]


def evaluated_accurately(operator: LinearOperator, engine: str = "tiled") -> LinearOperator:
    """Return the operator with its kernel matrices evaluated in float64, differentiable in the same tensors.

    It is returned unchanged where it is in float64, or not made of kernel matrices alone.

    :param engine: of the products.
    """
    operator = operator.evaluate_kernel()
    if operator.dtype == torch.float64 or not all(isinstance(part, KernelMatrix) for _, part in terms(operator)):
        return operator
    return fold(operator, lambda part: part.type(torch.float64).by(engine), _operators(Tensor.double))


class AccurateProduct:
    """Product ``v -> K v`` in float64 arithmetic, whatever dtype K has; no n x n matrix is made in float64.

    A ``KernelMatrix`` is evaluated anew in float64 by tiles; a stored float32 matrix is taken as it is, by rows.
    """

    def __init__(self, operator: LinearOperator) -> None:
        self._terms = accurate_terms(operator)

    @torch.no_grad()
    def __call__(self, vectors: Tensor) -> Tensor:
        """Return ``K vectors`` for vectors ``(..., n, t)`` in float64."""

        def product(operator: LinearOperator) -> Tensor:
            if isinstance(operator, DenseLinearOperator):
                return dense_product(operator.tensor, vectors)
            return operator.product(vectors) if isinstance(operator, KernelMatrix) else operator @ vectors

        return reduce(add, (product(operator) * scale for scale, operator in self._terms))


class Remainder:
    """Product ``v -> K v`` for ``K = F F^T + E``, F of few columns and a symmetric E in float32: ``2 n^2`` bytes.

    The entries of E are smaller than those of K by orders of magnitude where K is smooth, and so are the errors of
    rounding them.  They are computed in float64, once, and kept as tiles of the upper triangle.  On one thread of an
    Intel Xeon a product with 11 columns takes a third of that by float64 tiles (25,600 rows of kin40k, Matern-3/2), and
    making E that of five.

    :param matrix: K, ``(n, n)``; :param factor: F, ``(n, r)`` float64.
    """

    @torch.no_grad()
    def __init__(self, matrix: Access, factor: Tensor) -> None:
        self.factor, index = factor, torch.arange(matrix.n)
        self.tiles = list[tuple[slice, slice, Tensor]]()
        for rows, columns, _ in pieces(matrix.n, matrix.n, (_SIDE, _SIDE), True):
            tile = matrix.block(index[rows], index[columns]).addmm_(factor[rows], factor[columns].mT, alpha=-1)
            self.tiles.append((rows, columns, tile.to(torch.float32)))

    @staticmethod
    def serves(matrix: Access, budget: int) -> bool:
        """Return whether K is a float32 kernel matrix on a CPU, left to the library, of which all tiles are made.

        :param budget: bytes that E may take.
        """
        pairs: Any = getattr(matrix.source, "pairs", None)
        if pairs is None or pairs.batch_shape or pairs.device.type != "cpu" or pairs.dtype != torch.float32:
            return False
        plain = not (pairs.asked or pairs.sources or pairs.ranks() is not None or choose(pairs) in FAST)
        return plain and 2 * matrix.n**2 <= budget and nearby(pairs) is None

    @torch.no_grad()
    def __call__(self, vectors: Tensor) -> Tensor:
        """Return ``K vectors`` for vectors ``(n, t)`` float64."""
        t = vectors.shape[-1]
        across = torch.nn.functional.pad(vectors.mT, (0, 0, 0, -t % GROUP)).to(torch.float32).contiguous()
        out = torch.zeros(across.shape, dtype=torch.float64)
        for rows, columns, tile in self.tiles:
            out[:, rows] += across[:, columns] @ tile.mT
            if columns.start > rows.start:
                out[:, columns] += across[:, rows] @ tile
        return out[:t].mT + self.factor @ (self.factor.mT @ vectors)


def accurate_matmul(operator: LinearOperator, vectors: Tensor) -> Tensor:
    """Return ``K vectors`` for vectors ``(..., n, t)`` in float64, as :class:`AccurateProduct` does, differentiable."""
    operator = operator.evaluate_kernel()
    if not torch.is_grad_enabled() or not (operator.requires_grad or vectors.requires_grad):
        return AccurateProduct(operator)(vectors)
    return fold(operator, lambda part: part.type(torch.float64) @ vectors, PRODUCTS)


def dense_product(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Return ``matrix @ vectors`` for a stored matrix of any dtype; vectors have the same dtype, or float64."""
    if matrix.dtype == vectors.dtype:
        return matrix @ vectors
    batch = torch.Size(matrix.shape[:-2]).numel()
    step = max(1, _CONVERTED // max(1, batch * matrix.shape[-1]))
    parts = [matrix[..., rows, :].to(torch.float64) @ vectors for rows in spans(matrix.shape[-2], step)]
    return torch.cat(parts, dim=-2)


class RowProduct:
    """Product ``(indices, v) -> K[indices] v`` for a symmetric ``(..., n, n)`` operator, without autograd.

    Kernel matrices are evaluated by their engine, ``len(indices) n`` entries a call, or read where they are stored.
    Sums and multiples are taken part by part.

    :param operator: K.
    :param accurate: evaluate kernel matrices in float64, by tiles, whatever their dtype.
    :param engines: the engine of each kernel matrix in place of its own, as the attribute ``engines`` gave them before.
    :ivar engines: the engine of each kernel matrix, in the order of the sum; ``asked``: whether by name.
    """

    def __init__(self, operator: LinearOperator, accurate: bool = False, engines: Sequence[str] | None = None) -> None:
        self._terms = accurate_terms(operator) if accurate else list(terms(operator))
        self.engines: list[str] = []
        self.asked: list[bool] = []
        named = iter(engines) if engines is not None else None
        for number, (scale, part) in enumerate(self._terms):
            if not isinstance(part, KernelMatrix):
                continue
            engine = next(named) if named is not None else _engine(part)
            self.engines.append(engine)
            self.asked.append(part.pairs.asked)
            if engine != part.engine and not (choose(part.pairs) is DENSE and engine == DENSE.name):
                # named, so that free memory does not change it on the way; an operator that stores is kept as it is,
                # since others may use what it has stored
                self._terms[number] = (scale, part.by(engine))

    @torch.no_grad()
    def __call__(self, indices: Tensor, vectors: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return ``K[indices] v``, ``(..., b, t)``, or ``K[indices, columns] v``, ``(b, t)``, in float64.

        :param indices: ``(b,)``; :param columns: ``(m,)``, where there is no batch.
        :param vectors: float64, ``(..., n, t)`` or ``(m, t)``.
        """
        total = vectors.new_zeros(())
        for scale, operator in self._terms:
            total = total + self._product(operator, indices, vectors, columns).to(torch.float64) * scale
        return total

    @torch.no_grad()
    def part(self, indices: Tensor, vectors: Tensor, span: slice) -> Tensor:
        """Return ``K[indices, span] v``, ``(b, t)`` in float64, by this rank alone: its part of ``K[indices] v``.

        :param vectors: float64 ``(h, t)``, the rows ``span`` of v, which this rank holds.
        """
        total = vectors.new_zeros(len(indices), vectors.shape[-1])
        for scale, operator in self._terms:
            if isinstance(operator, KernelMatrix):
                result = part_of_rows(operator.pairs, indices, vectors.to(operator.dtype), span)
            elif isinstance(operator, DenseLinearOperator):
                result = dense_product(operator.tensor[:, span].index_select(0, indices), vectors)
            else:
                result = columns(operator, indices).mT[:, span].to(vectors.dtype) @ vectors
            total += result.to(torch.float64) * scale
        return total

    def stored_block(self, indices: Tensor) -> Tensor | None:
        """Return ``K[indices, indices]`` in float64, as it is stored; None where some of K is not stored."""
        stored = [(scale, matrix) for scale, part in self._terms if (matrix := _stored(part)) is not None]
        if len(stored) < len(self._terms):
            return None
        return reduce(add, (matrix[indices][:, indices].double() * scale for scale, matrix in stored))

    def _product(self, operator: LinearOperator, indices: Tensor, vectors: Tensor, columns_: Tensor | None) -> Tensor:
        stored = _stored(operator)
        vectors = vectors.to(operator.dtype) if isinstance(operator, KernelMatrix) else vectors
        if stored is not None and columns_ is None:
            return _gathered(stored, indices, vectors)
        if stored is not None:
            return dense_product(stored[indices][:, columns_], vectors)
        if isinstance(operator, KernelMatrix):
            return operator.rows(indices, columns_).product(vectors)
        part = columns(operator, indices).mT if columns_ is None else block(operator, indices, columns_)
        return part.to(vectors.dtype) @ vectors


def _stored(operator: LinearOperator) -> Tensor | None:
    """Return the dense matrix of an operator that keeps one; None for other operators."""
    if isinstance(operator, DenseLinearOperator):
        return operator.tensor
    if not isinstance(operator, KernelMatrix) or operator.pairs.ranks() is not None:
        return None
    return DENSE.kept(operator.pairs) if choose(operator.pairs) is DENSE else None


def _engine(matrix: KernelMatrix) -> str:
    """Name the engine for rows: those of a cheap kernel are evaluated faster than gathered from memory."""
    chosen = choose(matrix.pairs)
    if matrix.engine != "auto" or chosen is not DENSE or matrix.expression is None:
        return chosen.name
    work = sum(
        features.left.shape[-1] * (_L1_WORK if atom.profile.l1 else 1)
        for atom, features in zip(matrix.expression.atoms, matrix.pairs.prepared().features, strict=True)
    )
    return chosen.name if work > _CHEAP else unstored(matrix.pairs).name


def _gathered(matrix: Tensor, indices: Tensor, vectors: Tensor) -> Tensor:
    step = max(1, _GATHERED.get(matrix.device.type, 2**26) // matrix.shape[-1])
    some = (matrix.index_select(-2, indices[rows]) for rows in spans(len(indices), step))
    return torch.cat([dense_product(part, vectors) for part in some], dim=-2)


_EPS = torch.finfo(torch.float64).eps
_PLAIN = 8.0  # roundoffs of a profile, its scale and the distance of two points near the centre, by each of them
_SPREAD = 4.0  # roundoffs of a distance, over the squared distance from the centre
_PHASE = 32.0  # roundoffs of a point on a circle of radius one, over the turns that it is made of
_KINK = 5e-13  # of a profile with a kink at 0, whose distances near it are made from the differences


@torch.no_grad()
def entry_rounding(operator: LinearOperator) -> tuple[Tensor, Tensor] | None:
    """Return bounds a ``(..., n)`` and b ``(..., m)`` of the errors of the entries of K in a float64 product.

    That of K_ij is at most ``(a_i + b_j) (k(x_i, x_i) k(z_j, z_j))^1/2``.

    None is returned where that is not known: for entries that were made in less than float64, and for kernels that are
    called, which may lose any number of digits.
    """
    left = right = torch.zeros((), dtype=torch.float64, device=operator.device)
    for _, part in terms(operator):
        if isinstance(part, KernelMatrix) and part.expression is not None:
            errors = _of_kernel(part.type(torch.float64))
        elif isinstance(part, DenseLinearOperator) and operator.dtype == torch.float64:
            errors = left.new_zeros(()), left.new_zeros(())
        else:
            return None
        left, right = (torch.maximum(found, error) for found, error in zip((left, right), errors, strict=True))
    return (_EPS * left).expand(operator.shape[:-1]), (_EPS * right).expand(*operator.batch_shape, operator.shape[-1])


def _of_kernel(matrix: KernelMatrix) -> tuple[Tensor, Tensor]:
    """Return bounds of the errors in roundoffs, by rows and by columns."""
    assert matrix.expression is not None
    if matrix.pairs.sources:
        sides = [
            torch.cat([_of_kernel(matrix.at(rows, rows, True, matrix.pairs.centre))[0] for _, rows in blocks(x)])
            for x in (matrix.x1, matrix.x2)
        ]
        return sides[0], sides[1]
    found = []
    prepared = matrix.pairs.prepared().features
    batch = matrix.batch_shape
    for side, x in enumerate((matrix.x1, matrix.x2)):
        roundoffs = torch.full_like(x[..., 0], _PLAIN)
        for atom, features in zip(matrix.expression.atoms, prepared, strict=True):
            rows = features.right if side else features.left
            squares = rows.square().sum(dim=-1)
            squares = squares.reshape(*batch, -1) if squares.dim() > 1 and len(batch) > 1 else squares
            error = _PLAIN + _SPREAD * (1 + rows.shape[-1] ** 0.5 / 4) * squares
            if features.weight is None:
                z = x - matrix.pairs.centre.value
                circles = [leaf for leaf in atom.leaves if type(leaf.kernel) is PeriodicKernel]
                periods = [matrix.expression.own(f.kernel.period_length, 2) for f in circles]
                turns = [z[..., f.dims or slice(None)] / p for f, p in zip(circles, periods, strict=True)]
                error = error + _PHASE * (1 + torch.cat(turns, -1).abs().amax(-1)) * (1 + squares).sqrt()
            if atom.profile is MATERN[0.5] or atom.profile.l1:
                error = error + _KINK / _EPS
            roundoffs = roundoffs + error
        found.append(roundoffs)
    return found[0], found[1]

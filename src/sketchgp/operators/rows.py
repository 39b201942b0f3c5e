"""Products of some rows of a symmetric matrix with vectors, for solvers that go through a matrix by blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator
from torch import Tensor

from .access import accurate_terms, block, dense_product, terms
from .access import columns as columns_of
from .engines import DENSE, TRITON, choose
from .kernel_matrix import KernelMatrix
from .products import part_of_rows
from .tiles import spans

_GATHERED = {"cpu": 2**20, "cuda": 2**26}  # entries of a stored matrix gathered at once: on CPUs, while in cache

_CHEAP = 96  # features up to which evaluating an entry is faster than fetching it (measured on a CPU)
_L1_WORK = 12  # of a feature of an l1 distance, in features of a Euclidean one


class RowProduct:
    """``(indices, v) -> K[indices] v`` for one symmetric ``(n, n)`` operator; not batched, no autograd.

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
        """``K[indices] v``, or ``K[indices, columns] v``, ``(b, t)`` in float64.

        :param indices: ``(b,)``; :param columns: ``(m,)``.
        :param vectors: float64, ``(n, t)`` or ``(m, t)``.
        """
        total = vectors.new_zeros(len(indices), vectors.shape[-1])
        for scale, operator in self._terms:
            total += self._product(operator, indices, vectors, columns).to(torch.float64) * scale
        return total

    @torch.no_grad()
    def part(self, indices: Tensor, vectors: Tensor, span: slice) -> Tensor:
        """``K[indices, span] v``, ``(b, t)`` in float64, by this rank alone: its part of ``K[indices] v``.

        :param vectors: float64 ``(h, t)``, the rows ``span`` of v, which this rank holds.
        """
        total = vectors.new_zeros(len(indices), vectors.shape[-1])
        for scale, operator in self._terms:
            if isinstance(operator, KernelMatrix):
                result = part_of_rows(operator.pairs, indices, vectors.to(operator.dtype), span)
            elif isinstance(operator, DenseLinearOperator):
                result = dense_product(operator.tensor[:, span].index_select(0, indices), vectors)
            else:
                result = columns_of(operator, indices).mT[:, span].to(vectors.dtype) @ vectors
            total += result.to(torch.float64) * scale
        return total

    def stored_block(self, indices: Tensor) -> Tensor | None:
        """``K[indices, indices]`` in float64, as it is stored; None where some of K is not stored."""
        total: Tensor | None = None
        for scale, operator in self._terms:
            matrix = _stored(operator)
            if matrix is None:
                return None
            part = matrix.index_select(0, indices).index_select(1, indices).to(torch.float64) * scale
            total = part if total is None else total + part
        return total

    def _product(self, operator: LinearOperator, indices: Tensor, vectors: Tensor, columns: Tensor | None) -> Tensor:
        stored = _stored(operator)
        vectors = vectors.to(operator.dtype) if isinstance(operator, KernelMatrix) else vectors
        if stored is not None and columns is None:
            return _gathered(stored, indices, vectors)
        if stored is not None:
            return dense_product(stored[indices][:, columns], vectors)
        if isinstance(operator, KernelMatrix):
            return operator.rows(indices, columns).product(vectors)
        part = columns_of(operator, indices).mT if columns is None else block(operator, indices, columns)
        return part.to(vectors.dtype) @ vectors


def _stored(operator: LinearOperator) -> Tensor | None:
    """The dense matrix of an operator that keeps one, whole."""
    if isinstance(operator, DenseLinearOperator):
        return operator.tensor
    if not isinstance(operator, KernelMatrix) or operator.ranks() is not None:
        return None
    return DENSE.kept(operator.pairs) if choose(operator.pairs) is DENSE else None


def _engine(matrix: KernelMatrix) -> str:
    """The engine for rows of the matrix: rows of a cheap kernel are evaluated faster than gathered from memory."""
    chosen = choose(matrix.pairs)
    if matrix.engine != "auto" or chosen is not DENSE or matrix.expression is None:
        return chosen.name
    work = sum(
        features.left.shape[-1] * (_L1_WORK if atom.profile.l1 else 1)
        for atom, features in zip(matrix.expression.atoms, matrix.pairs.prepared().features, strict=True)
    )
    if work > _CHEAP:
        return chosen.name
    return "triton" if matrix.device.type == "cuda" and TRITON.missing(matrix.pairs) is None else "tiled"


def _gathered(matrix: Tensor, indices: Tensor, vectors: Tensor) -> Tensor:
    step = max(1, _GATHERED.get(matrix.device.type, 2**26) // matrix.shape[-1])
    parts = [matrix.index_select(0, indices[rows]) for rows in spans(len(indices), step)]
    if vectors.dtype == torch.float64:
        return torch.cat([dense_product(part, vectors) for part in parts])
    return torch.cat([part @ vectors for part in parts])

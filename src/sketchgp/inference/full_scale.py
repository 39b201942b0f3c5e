"""An approximate inverse of ``K + D`` that knows what is far by a low-rank factor and what is near by neighbours.

With ``F F^T`` a low-rank part of K, the rest ``T = K - F F^T + D`` is short-ranged.  Vecchia's approximation writes its
inverse as ``G^T G``: in a random order each row is regressed on the m earlier rows that the kernel ties it to most.
Then ``B = F F^T + (G^T G)^-1`` is near A in both ranges, and with ``H = G F`` and ``C = I + H^T H``

    B^-1 = G^T (I - H C^-1 H^T) G.

Gyger, Furrer, Sigrist, "Iterative methods for full-scale Gaussian process approximations for large spatial data"
(2024); Vecchia, "Estimation and model identification for continuous spatial processes" (1988).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import NumericalError
from ..operators import KernelMatrix
from ..operators.access import Access
from ..operators.substitution import cholesky_solve
from ..operators.tiles import spans
from ..random_streams import generator

_ENTRIES = 2**23  # entries of a block at once


class FullScale:
    """B^-1 of one kernel matrix; all in float64.

    Set-up: half of K once, ``2 n m^2 r`` operations for the neighbours, ``2 n r^2`` for the rest and as many for the
    diagonal; one n x r array, two for the diagonal.

    :param matrix: K, ``(n, n)`` without batch.
    :param noise: ``(n,)`` variances, D.
    :param factor: F, ``(n, r)`` with ``F F^T <= K``; r may be 0.
    :param neighbours: m.
    :param seed: of the order.
    :raises NumericalError: if C is not positive definite in float64.

    :ivar root: the lower Cholesky factor of C, ``(r, r)``.
    :ivar rest: the diagonal of T, ``(n,)``.
    :ivar near: the diagonal of ``G^T G``, ``(n,)``.
    """

    def __init__(
        self, matrix: KernelMatrix, noise: Tensor, factor: Tensor, neighbours: int = 16, seed: int = 0
    ) -> None:
        with torch.no_grad():
            n = matrix.shape[-1]
            factor = factor.contiguous()  # rows are read, and a preconditioner stores its factor by columns
            order = torch.randperm(n, generator=generator(seed, "order of a full-scale approximation"))
            near, known = _earlier(matrix, order.to(noise.device), min(neighbours, n))
            entries, others, self.rest = _regressions(matrix, noise.double(), factor, near, known)
            self._regress = _sparse(entries, others, near)
            self._turned = self._regress.t().coalesce()
            self.near = torch.zeros_like(self.rest)
            self.near.index_add_(0, self._regress.indices()[1], self._regress.values().square())
            self._half = torch.sparse.mm(self._regress, factor)
            inner = self._half.mT @ self._half
            inner.diagonal().add_(1)
            self.root, failed = torch.linalg.cholesky_ex(inner)
            if int(failed) or not bool(torch.isfinite(self.root).all()):
                raise NumericalError(
                    "The full-scale approximation is not positive definite in float64.", see="not-definite"
                )

    @torch.no_grad()
    def solve(self, vectors: Tensor) -> Tensor:
        """Return ``B^-1 v`` for v ``(n, t)``, float64."""
        near = torch.sparse.mm(self._regress, vectors)
        far = self._half @ cholesky_solve(self._half.mT @ near, self.root)
        return torch.sparse.mm(self._turned, near - far)

    @torch.no_grad()
    def weighted_features(self, rows: Tensor) -> Tensor:
        """Return rows of ``G^T G F``, ``(p, r)``, at indices ``(p,)``."""
        return torch.sparse.mm(self._turned.index_select(0, rows), self._half)

    @torch.no_grad()
    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal of B^-1, ``(n,)``, positive."""
        far, turned = torch.zeros_like(self.near), torch.sparse.mm(self._turned, self._half)
        for rows in spans(len(far), max(1, _ENTRIES // max(1, len(self.root)))):
            half = torch.linalg.solve_triangular(self.root, turned[rows].mT, upper=False)
            far[rows] = half.square().sum(dim=0)
        return (self.near - far).clamp(min=torch.finfo(far.dtype).eps * self.near)


def _sparse(entries: Tensor, others: Tensor, near: Tensor) -> Tensor:
    """Return G as a sparse matrix, ``(n, n)``; missing neighbours have the entry 0."""
    n, m = near.shape
    rows = torch.arange(n, device=near.device)
    index = torch.stack([torch.cat([rows, rows.repeat_interleave(m)]), torch.cat([rows, near.flatten()])])
    values = torch.cat([entries, others.flatten()])
    return torch.sparse_coo_tensor(index, values, (n, n), check_invariants=False).coalesce()


def _earlier(matrix: KernelMatrix, order: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the rows ``(n, count)`` before each one in the order that correlate most with it, and which exist."""
    n = len(order)
    near, known = order.new_zeros(n, count), torch.zeros(n, count, dtype=torch.bool, device=order.device)
    scale = matrix.diagonal(dim1=-1, dim2=-2).clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    for rows in spans(n, max(1, _ENTRIES // n)):
        some, before = order[rows], order[: rows.stop]
        tile = matrix.rows(some, before).to_dense().abs_().mul_(scale[before])
        last = tile[:, rows.start :]  # columns of the rows themselves: only earlier ones count
        last.masked_fill_(torch.ones_like(last, dtype=torch.bool).triu(), -1)
        top = tile.topk(min(count, rows.stop), dim=1, sorted=False)
        near[some, : top.indices.shape[1]] = before[top.indices]
        known[some, : top.indices.shape[1]] = top.values >= 0
    return near, known


def _regressions(
    matrix: KernelMatrix, noise: Tensor, factor: Tensor, near: Tensor, known: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries of G for each row itself ``(n,)`` and its neighbours ``(n, m)``, and the diagonal of T."""
    n, m = near.shape
    access = Access(matrix)
    entries, others, rest = torch.empty_like(noise), torch.empty_like(near, dtype=noise.dtype), torch.empty_like(noise)
    for rows in spans(n, max(1, _ENTRIES // ((m + 1) * max(factor.shape[1], m + 1)))):
        index = torch.cat([torch.arange(rows.start, rows.stop, device=near.device).unsqueeze(1), near[rows]], dim=1)
        there = torch.cat([known.new_ones(len(index), 1), known[rows]], dim=1)
        part = factor[index]
        block = access.block(index, index) - part @ part.mT
        block.diagonal(dim1=-2, dim2=-1).clamp_(min=0).add_(noise[index])
        rest[rows] = block[:, 0, 0]
        block = block * (there.unsqueeze(1) & there.unsqueeze(2)) + torch.diag_embed((~there).to(block.dtype))
        root, failed = torch.linalg.cholesky_ex(block[:, 1:, 1:])
        cross = block[:, 1:, :1]
        weights = cholesky_solve(cross, root)
        weights = torch.where((failed > 0)[:, None, None], 0, weights)
        left = block[:, 0, 0] - (weights * cross).sum(dim=(1, 2))
        entries[rows] = torch.maximum(left, noise[rows]).rsqrt()
        others[rows] = -entries[rows].unsqueeze(1) * weights.squeeze(2)
    return entries, others, rest

"""Nystrom approximations whose test matrix does not look at K: uniform columns, and Gaussian combinations of columns.

References: Williams and Seeger (2001) for uniform columns; Frangella, Tropp, Udell, "Randomized Nystrom
preconditioning" (arXiv:2110.02820), Algorithm 2.1, for the Gaussian sketch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices import queued
from ..distributed import Factor, ShardedRows, Shards, square_norms
from ..operators.access import Access
from ..operators.tiles import spans
from .factor import LowRank, nystrom_factor

_TOGETHER = 256  # columns of a sketch for which ranks hold all rows at once


@torch.no_grad()
def uniform_nystrom(matrix: Access, rank: int, *, generator: torch.Generator, shards: Shards | None = None) -> LowRank:
    """Nystrom approximation from ``rank`` distinct columns chosen uniformly.

    Cheapest, and right when all columns matter alike; it misses small clusters.  O(n rank^2) operations.

    :param shards: ranks that each make their own rows of F.
    """
    pivots = torch.randperm(matrix.n, generator=generator)[:rank].to(matrix.device)
    own = None
    if shards is not None:
        span = shards.span(matrix.n)
        own = torch.arange(span.start, span.stop, device=matrix.device)
    columns = matrix.columns(pivots) if own is None else matrix.block(own, pivots)
    rows = nystrom_factor(columns, matrix.block(pivots, pivots), matrix.resolution)
    factor = rows if shards is None else ShardedRows(rows, matrix.n, shards)
    return LowRank(factor, pivots, _residual(matrix, factor))


def gaussian_test_matrix(n: int, rank: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Orthonormal basis ``(n, rank)`` of the range of a Gaussian matrix, float64."""
    gaussian = queued(torch.randn(n, rank, dtype=torch.float64, generator=generator), device)
    return torch.linalg.qr(gaussian).Q


@torch.no_grad()
def gaussian_nystrom(
    matrix: Access,
    rank: int,
    *,
    generator: torch.Generator,
    scales: Tensor | None = None,
    shards: Shards | None = None,
) -> LowRank:
    """Nystrom approximation from ``rank`` random combinations of all columns.

    The best of the sketches for a given rank, but it reads all n^2 entries: one product with ``rank`` columns.

    :param scales: ``(n,)``, of the points in the combinations: ``D^-1/2`` gives the approximation of
        ``D^-1/2 K D^-1/2``, times ``D^1/2`` on both sides.
    :param shards: ranks that each keep their own rows of F; all rows of the test matrix are drawn by each of them,
        and products are with 256 of its columns at a time.
    """
    if shards is not None:
        return _shared_gaussian(matrix, min(rank, matrix.n), generator, scales, shards)
    test = gaussian_test_matrix(matrix.n, min(rank, matrix.n), generator, matrix.device)
    if scales is not None:
        test = test * scales.unsqueeze(-1)
    sketch = matrix.matmul(test)
    factor = nystrom_factor(sketch, test.mT @ sketch, matrix.resolution)
    return LowRank(factor, None, _residual(matrix, factor))


def _shared_gaussian(
    matrix: Access, rank: int, generator: torch.Generator, scales: Tensor | None, shards: Shards
) -> LowRank:
    n, own = matrix.n, shards.span(matrix.n)
    test = torch.randn(n, rank, dtype=torch.float64, generator=generator)[own].to(matrix.device, copy=True)
    root = torch.linalg.cholesky(shards.sum(test.mT @ test))  # the same range, orthonormal, as by Householder's QR
    test = torch.linalg.solve_triangular(root, test.mT, upper=False).mT
    if scales is not None:
        test = test * scales[own].unsqueeze(-1)
    sketch = torch.empty_like(test)
    for some in spans(rank, _TOGETHER):
        sketch[:, some] = matrix.matmul(shards.gather(test[:, some], n))[own]
    rows = nystrom_factor(sketch, shards.sum(test.mT @ sketch), matrix.resolution)
    factor = ShardedRows(rows, n, shards)
    return LowRank(factor, None, _residual(matrix, factor))


def _residual(matrix: Access, factor: Factor) -> Tensor:
    squares = square_norms(factor) if isinstance(factor, ShardedRows) else factor.square().sum(dim=1)
    return (matrix.diagonal() - squares).clamp_(min=0)

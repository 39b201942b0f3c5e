"""EigenPro: the top eigensystem of a subsample extended to all points, and a preconditioner that flattens the rest.

Reference: Ma and Belkin, "Kernel machines that adapt to GPUs for effective large batch training"
(arXiv:1806.06144), section 4; notation of the EigenPro 3 paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import count, seed, settle
from ..operators.access import Access
from ..operators.moving_factors import FactorOfColumns, MovingFactor
from ..random_streams import generator
from ..space import Factor, Space
from .base import DRIFT, Preconditioner, Selection, noise_of_each, unexplained


@dataclass
class TopEigensystem:
    """Eigenpairs of ``K(Xs, Xs)``, s subsampled points.

    ``indices`` (s,) are the subsample Xs; ``values`` (q,) the top eigenvalues, descending; ``vectors`` (s, q);
    ``tail`` the (q+1)th eigenvalue (0 where there is none).
    """

    indices: Tensor
    values: Tensor
    vectors: Tensor
    tail: float


@torch.no_grad()
def top_eigensystem(
    matrix: Access,
    rank: int,
    subsample_size: int,
    *,
    generator: torch.Generator,
    noise: Tensor | None = None,
    scales: Tensor | None = None,
) -> TopEigensystem:
    """Return the top ``rank`` eigenpairs of K on ``subsample_size`` uniformly chosen points; O(s^3) operations.

    :param noise: ``(n,)`` added to the diagonal of K.
    :param scales: ``(n,)`` that multiply the rows and columns of K.

    Eigenvalues at the level of rounding are left out, so fewer pairs may come back.
    """
    size = min(subsample_size, matrix.n)
    indices = torch.randperm(matrix.n, generator=generator)[:size].sort().values.to(matrix.device)
    block = matrix.block(indices, indices)
    if noise is not None:
        block = block + noise[indices].diag()
    if scales is not None:
        block = block * scales[indices].unsqueeze(-1) * scales[indices]
    values, vectors = torch.linalg.eigh(block)
    values, vectors = values.flip(0), vectors.flip(1)
    sound = int((values > matrix.resolution * size * values[0].clamp(min=0)).sum())
    rank = min(rank, sound)
    tail = float(values[rank]) if rank < sound else 0.0
    return TopEigensystem(indices, values[:rank], vectors[:, :rank], tail)


@dataclass(frozen=True)
class NystromEigenPro(Preconditioner):
    """``P = F F^T + (lambda + noise) I``: EigenPro's correction of the spectrum, as a preconditioner for CG.

    The top q eigenpairs ``(l_i, e_i)`` of ``K(Xs, Xs)`` on s uniformly chosen points are extended to all points:
    ``F = K(X, Xs) E G^(1/2)`` with ``G = l^-1 - l_{q+1} l^-2``, and the rest of the spectrum is taken as
    ``lambda = (n / s) l_{q+1}``.  Cost ``s^3 + n s q``; F is n x q, smaller than a Nystrom factor made of s columns.
    Where the noise differs between points, the eigensystem is that of ``W K W`` with ``W^2 = least noise / noise``,
    and ``F = K(X, Xs) W E G^(1/2)``; lambda is then the level that is left at the points of least noise.
    Choose it when few directions dominate and memory is short; :class:`RPCholesky` resolves more of the tail.

    Reference: Ma and Belkin (arXiv:1806.06144), section 4; EigenPro 3 (Abedsoltan, Belkin, Pandit), section 4.

    :param rank: q, or None (a quarter of the subsample).
    :param subsample_size: s, or None (``20 sqrt(n)``, at least 4 q, at most n and 10,000).
    :param seed: seed of the subsample.
    """

    subsample_size: int | None = None
    seed: int = 0
    lean = True

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, count, "subsample_size", optional=True)
        settle(self, seed, "seed")

    def most_columns(self, n: int) -> int:
        return math.ceil(10 * math.sqrt(n))

    def select_one(self, matrix: Access, noise: Tensor) -> Selection:
        n = matrix.n
        wanted = self.subsample_size or min(10_000, max(math.ceil(20 * math.sqrt(n)), 4 * (self.rank or 1)))
        size = min(n, max(wanted, (self.rank or 0) + 1))
        rank = self.rank_for(n, matrix.device)
        rank = rank if self.rank is not None else max(1, min(size // 4, rank))
        scales = (noise.min() / noise).sqrt()  # all 1 where the noise is one number
        stream = generator(self.seed, "subsample of the EigenPro preconditioner")
        top = top_eigensystem(matrix, rank, size, generator=stream, scales=scales)
        weights = (1 / top.values - top.tail / top.values.square()).clamp_(min=0)
        coefficients = scales[top.indices].unsqueeze(-1) * top.vectors * weights.sqrt()
        space = Space.of(n)
        factor = space.factor(space.columns(matrix, top.indices) @ coefficients)
        return Selection(factor, top.indices, shift=top.tail * n / len(top.indices), coefficients=coefficients)

    def serves(self, selection: Selection, matrix: Access, factor: Factor, noise: Tensor) -> bool:
        """Return whether F, of fixed coefficients, explains as large a share of K as when they were chosen."""
        left, _ = unexplained(matrix, factor, noise_of_each(matrix, noise))
        now, then = 1 - left, 1 - selection.left
        return not bool(((now > DRIFT * then) | (DRIFT * now < then)).any())

    def moving(self, matrix: Access, selection: Selection) -> MovingFactor:
        assert selection.pivots is not None and selection.coefficients is not None
        moving = FactorOfColumns(selection.factor, None, selection.pivots, selection.coefficients)
        if selection.factor.shape[-1] < selection.columns:  # dropped
            moving.factor = moving.made(matrix)
        return moving

    def factor(self, matrix: Access, selection: Selection) -> Tensor:
        assert selection.pivots is not None and selection.coefficients is not None
        return matrix.columns(selection.pivots) @ selection.coefficients

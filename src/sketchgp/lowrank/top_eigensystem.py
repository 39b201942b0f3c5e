"""Top eigensystem of K on a subsample, extended to all points by Nystrom: the one that EigenPro uses.

Reference: Ma and Belkin, "Kernel machines that adapt to GPUs for effective large batch training"
(arXiv:1806.06144), section 4; notation of the EigenPro 3 paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..operators.access import Access


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
    """Top ``rank`` eigenpairs of K restricted to ``subsample_size`` uniformly chosen points; O(s^3) operations.

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

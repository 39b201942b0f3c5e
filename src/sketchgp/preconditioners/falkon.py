"""Falkon's preconditioner of the inducing-point problem: the inducing points stand for all points.

Reference: Rudi, Carratino, Rosasco, "FALKON: an optimal large scale kernel method" (arXiv:1705.10958), Algorithm 1 and
section 3; Meanti, Carratino, Rosasco, Rudi (arXiv:2006.10350).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..lowrank import shifted_cholesky
from ..operators.normal_matrix import NormalMatrix
from .factored import TriangularFactors, root_of


@torch.no_grad()
def falkon_preconditioner(matrix: NormalMatrix, counts: Tensor | None = None) -> TriangularFactors:
    """``P = Kzz diag(counts) Kzz + level Kzz``, for Kzx Kxz as if every point were one of the inducing points.

    ``T^T T = Kzz + shift I`` and ``A^T A = T diag(counts) T^T + level I`` give ``P = (A T)^T (A T)``: two Cholesky
    factorizations and one product of m x m matrices, float64.  The shift, the unit roundoff times the trace, is in the
    preconditioner only and does not change the problem.

    :param counts: ``(m,)`` positive, how many points each inducing point stands for; None is n / m each, right for
        points that were drawn uniformly.
    """
    kzz, m, n = matrix.kzz, matrix.shape[-1], matrix.tall.shape[0]
    if counts is None:
        counts = kzz.new_full((m,), n / m)
    weights = matrix.tall.weights
    if weights is not None:
        counts = counts * weights.square().mean()
    root = root_of(matrix)
    inner = (root * counts) @ root.mT
    inner.diagonal().add_(matrix.level)
    return TriangularFactors([shifted_cholesky(inner, torch.finfo(torch.float64).eps).mT, root])

"""KRILL: the preconditioner of the inducing-point problem from a sketch of its tall matrix.

Reference: Diaz, Epperly, Frangella, Tropp, Webber, "Robust, randomized preconditioning for kernel ridge regression"
(arXiv:2304.12465), section 3 and Algorithm 4.
"""

from __future__ import annotations

import torch

from ..operators.normal_matrix import NormalMatrix
from ..operators.sparse_sign import SparseSignEmbedding
from .factored import TriangularFactors, shifted_cholesky


@torch.no_grad()
def krill_preconditioner(
    matrix: NormalMatrix, sketch_size: int | None = None, nonzeros: int = 8, seed: int = 0
) -> TriangularFactors:
    """``P = (Phi T)^T (Phi T) + level Kzz`` by Cholesky, for a sparse sign embedding Phi, in float64.

    ``n m`` kernel evaluations, ``nonzeros n m`` additions, ``O(sketch_size m^2)`` operations; ``4 m^2`` float64 numbers
    for a sketch of 2m rows.  The diagonal is shifted by the unit roundoff times the trace, so that the factorization
    exists; only the preconditioner is changed by that.

    :param sketch_size: rows of Phi, the paper's 2m where None.
    """
    tall, m = matrix.tall, matrix.shape[-1]
    rows = sketch_size or 2 * m
    embedding = SparseSignEmbedding(
        matrix.kzz[:0], rows=rows, columns=tall.shape[0], nonzeros=min(nonzeros, rows), seed=seed
    )
    sketch = matrix.kzz.new_zeros(rows, m)
    for span, tile in tall.tiles():
        embedding.add_product(sketch, span, tile)
    gram = sketch.mT @ sketch
    del sketch
    gram.add_(matrix.kzz, alpha=matrix.level)
    shift = torch.finfo(torch.float64).eps * float(gram.diagonal().sum())
    return TriangularFactors([shifted_cholesky(gram, shift, "The sketched normal matrix")[0]])

"""KRILL: the preconditioner of the inducing-point problem from a sketch of its tall matrix.

Reference: Diaz, Epperly, Frangella, Tropp, Webber, "Robust, randomized preconditioning for kernel ridge regression"
(arXiv:2304.12465), section 3 and Algorithm 4.
"""

from __future__ import annotations

import torch

from ..errors import NumericalError
from ..operators.normal_matrix import NormalMatrix
from ..operators.sparse_sign import SparseSignEmbedding
from .factored import TriangularFactors, root_of


@torch.no_grad()
def krill_preconditioner(
    matrix: NormalMatrix, sketch_size: int | None = None, nonzeros: int = 8, seed: int = 0
) -> TriangularFactors:
    """``P = (Phi T)^T (Phi T) + level Kzz`` as ``R^T R``, for a sparse sign embedding Phi, in float64.

    The paper forms P and takes its Cholesky factor.  Here R comes from a QR factorization of ``Phi T`` stacked on
    ``sqrt(level) Kzz^1/2``: P itself has the square of their condition number, and where the noise is small its
    rounding errors are larger than what the noise contributes; conjugate gradients then stall.

    ``n m`` kernel evaluations, ``nonzeros n m`` additions, ``2 (sketch_size + m) m^2`` operations;
    ``2 (sketch_size + 2m) m`` float64 numbers.  The diagonal of Kzz is shifted by the unit roundoff times its trace, so
    that it has a root; only the preconditioner is changed by that.

    :param sketch_size: rows of Phi, the paper's 2m where None.
    :raises NumericalError: where the kernel gives NaN.
    """
    tall, m = matrix.tall, matrix.shape[-1]
    rows = sketch_size or 2 * m
    embedding = SparseSignEmbedding(
        matrix.kzz[:0], rows=rows, columns=tall.shape[0], nonzeros=min(nonzeros, rows), seed=seed
    )
    stacked = matrix.kzz.new_zeros(rows + m, m)
    for span, tile in tall.tiles():
        embedding.add_product(stacked[:rows], span, tile)
    stacked[rows:] = root_of(matrix) * matrix.level**0.5
    root = torch.linalg.qr(stacked, mode="r").R
    if not bool(torch.isfinite(root).all()):
        raise NumericalError("The kernel matrix holds NaN or infinity; check inputs and kernel.")
    return TriangularFactors([root])

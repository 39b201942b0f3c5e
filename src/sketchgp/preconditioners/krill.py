"""KRILL: the preconditioner of the inducing-point problem from a sketch of its tall matrix.

Reference: Diaz, Epperly, Frangella, Tropp, Webber, "Robust, randomized preconditioning for kernel ridge regression"
(arXiv:2304.12465), section 2.2.1, Algorithm 2 and Theorem 2.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import NumericalError
from ..operators.normal_matrix import NormalMatrix
from ..operators.sparse_sign import SparseSignEmbedding
from .factored import TriangularFactors, root_of

_FACTORS = ((8, 32), (4, 128))  # rows of the sketch over m, up to which m^2 / n they pay
_LARGE = 4000  # inducing points from which on memory matters more


def sketch_rows(n: int, m: int) -> int:
    """Rows of the automatic sketch for n points and m inducing points: 2m, the paper's; up to 8m where m is small
    beside n, since the QR factorization then costs less than the iterations that are saved.

    With 2m, 4m and 8m rows it takes about 24, 13 and 10 iterations to a residual of 1e-4 at the most.
    """
    factors = [factor for factor, most in _FACTORS if m * m <= most * n and m <= _LARGE]
    return m * max(factors, default=2)


@torch.no_grad()
def krill_preconditioner(
    matrix: NormalMatrix,
    sketch_size: int | None = None,
    nonzeros: int = 8,
    seed: int = 0,
    targets: Tensor | None = None,
) -> TriangularFactors:
    """``P = (Phi T)^T (Phi T) + level Kzz`` as ``R^T R``, for a sparse sign embedding Phi, in float64.

    The paper forms P and takes its Cholesky factor.  Here R comes from a QR factorization of ``Phi T`` stacked on
    ``sqrt(level) Kzz^1/2``: P itself has the square of their condition number, and where the noise is small its
    rounding errors are larger than what the noise contributes; conjugate gradients then stall.

    ``n m`` kernel evaluations, ``nonzeros n m`` additions, ``2 (sketch_size + m) m^2`` operations;
    ``2 (sketch_size + 2m) m`` float64 numbers.  The diagonal of Kzz is shifted by the unit roundoff times its trace, so
    that it has a root; only the preconditioner is changed by that.

    :param sketch_size: rows of Phi, :func:`sketch_rows` where None.
    :param targets: ``(n, t)`` with the weights of T: the sketched problem is then solved for them, too.
    :raises NumericalError: where the kernel gives NaN.
    """
    tall, m = matrix.tall, matrix.shape[-1]
    rows = sketch_size or sketch_rows(tall.shape[0], m)
    embedding = SparseSignEmbedding(
        matrix.kzz[:0], rows=rows, columns=tall.shape[0], nonzeros=min(nonzeros, rows), seed=seed
    )
    stacked = matrix.kzz.new_zeros(rows + m, m)
    sketched = None if targets is None else stacked.new_zeros(rows + m, targets.shape[1])
    for span, tile in tall.own_tiles():
        embedding.add_product(stacked[:rows], span, tile)
        if targets is not None and sketched is not None:
            embedding.add_product(sketched[:rows], span, targets[span].to(stacked))
    stacked = tall.total(stacked)
    sketched = None if sketched is None else tall.total(sketched)
    stacked[rows:] = root_of(matrix) * matrix.level**0.5
    packed, scales = torch.geqrf(stacked)
    root = packed[:m].triu()
    if not bool(torch.isfinite(root).all()):
        raise NumericalError("The kernel matrix holds NaN or infinity; check inputs and kernel.", see="nan")
    factors = TriangularFactors([root])
    if sketched is not None:
        factors.sketched = factors.inverse(torch.ormqr(packed, scales, sketched, transpose=True)[:m])
    return factors

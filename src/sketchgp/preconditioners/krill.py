"""KRILL: the preconditioner of the inducing-point problem from a sketch of its tall matrix.

Reference: Diaz, Epperly, Frangella, Tropp, Webber, "Robust, randomized preconditioning for kernel ridge regression"
(arXiv:2304.12465), section 2.2.1, Algorithm 2 and Theorem 2.3; the sparse sign embedding is of Cohen (2016) and of
Martinsson and Tropp (2020), section 9.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NumericalError
from ..operators.tall import NormalMatrix
from ..random_streams import generator
from .low_rank import shifted_cholesky

_CHUNK = 4096  # columns that are drawn at once, each chunk by a seed of its own


class SparseSignEmbedding:
    """``Phi``, ``(rows, columns)``: each column has ``nonzeros`` entries ``+-1 / sqrt(nonzeros)`` in distinct rows.

    Nothing is stored: columns are drawn when they are needed, by chunks that each have a seed of their own, and are the
    same at every call, on every device.  A product with ``(columns, t)`` costs ``nonzeros columns t`` additions.  On
    CUDA the order of additions is not fixed, so that the last digits can vary.

    :param rows: the size of the sketch.
    :param columns: the length of the vectors that are sketched.
    :param nonzeros: of a column, at most ``rows``.
    """

    def __init__(self, rows: int, columns: int, nonzeros: int = 8, seed: int = 0) -> None:
        self.shape, self.nonzeros, self.seed = (rows, columns), nonzeros, seed
        self._kept: tuple[int, Tensor, Tensor] | None = None

    def add_product(self, out: Tensor, columns: slice, block: Tensor) -> None:
        """Add ``Phi[:, columns] block`` to out ``(rows, t)``, for a block ``(len(columns), t)``."""
        start, scale = columns.start, self.nonzeros**-0.5
        while start < columns.stop:
            chunk, offset = divmod(start, _CHUNK)
            stop = min(columns.stop, (chunk + 1) * _CHUNK)
            places, signs = self._drawn(chunk, out.device)
            part = slice(offset, offset + stop - start)
            values = block[start - columns.start : stop - columns.start]
            for place, sign in zip(places[part].unbind(1), signs[part].unbind(1), strict=True):
                out.index_add_(0, place, values * (sign * scale).to(out.dtype).unsqueeze(1))
            start = stop

    def _drawn(self, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows and signs of a chunk's columns, ``(c, nonzeros)`` each."""
        if self._kept is None or self._kept[0] != chunk or self._kept[1].device != device:
            stream = generator(self.seed, f"sparse sign embedding, part {chunk}")
            rows, columns = self.shape
            places = distinct(min(_CHUNK, columns - chunk * _CHUNK), self.nonzeros, rows, stream)
            signs = torch.randint(0, 2, places.shape, generator=stream).mul_(2).sub_(1)
            self._kept = chunk, places.to(device), signs.to(device)
        return self._kept[1], self._kept[2]


def distinct(count: int, size: int, limit: int, generator: torch.Generator) -> Tensor:
    """Draw ``(count, size)`` integers below ``limit``, uniform and distinct in each row.

    This is a partial Fisher-Yates shuffle: the j-th is drawn among the ``limit - j`` that are left, and moved up by one
    for each earlier one at or below it.
    """
    result = torch.empty(count, size, dtype=torch.long)
    for j in range(size):
        drawn = torch.randint(0, limit - j, (count,), generator=generator)
        earlier = result[:, :j].sort(dim=1).values
        for taken in earlier.unbind(1):
            drawn += drawn >= taken
        result[:, j] = drawn
    return result


@dataclass
class TriangularFactors:
    """``P = (A T)^T (A T)`` for upper triangular factors, applied as ``P^-1 = T^-1 A^-1 A^-T T^-T``.

    :ivar factors: ``(m, m)`` upper triangular, the outermost last: [T] or [A, T].
    :ivar sketched: ``(m, t)``, the least-squares solution of the sketch that P was made from; None where there is none.
    :ivar rank: m.
    """

    factors: list[Tensor]
    sketched: Tensor | None = None

    @property
    def rank(self) -> int:
        return len(self.factors[0])

    def inverse(self, vectors: Tensor) -> Tensor:
        """Return ``R^-1 v`` for the root ``R = A T``, ``(m, t)`` float64."""
        for factor in self.factors:
            vectors = torch.linalg.solve_triangular(factor, vectors, upper=True)
        return vectors

    def inverse_t(self, vectors: Tensor) -> Tensor:
        """Return ``R^-T v``."""
        for factor in reversed(self.factors):
            vectors = torch.linalg.solve_triangular(factor.mT, vectors, upper=False)
        return vectors

    def multiply_t(self, vectors: Tensor) -> Tensor:
        """Return ``R^T v``."""
        for factor in self.factors:
            vectors = factor.mT @ vectors
        return vectors


def root_of(matrix: NormalMatrix) -> Tensor:
    """Return the root L of Kzz, ``(m, m)``, upper triangular, for ``L^T L = Kzz + eps tr(Kzz) I``."""
    eps = torch.finfo(torch.float64).eps
    return matrix.memory.remember("root of Kzz", lambda: shifted_cholesky(matrix.kzz, eps).mT)


_FACTORS = ((8, 32), (4, 128))  # rows of the sketch over m, up to which m^2 / n they pay
_LARGE = 4000  # inducing points from which on memory matters more


def sketch_rows(n: int, m: int) -> int:
    """Return the rows of the automatic sketch for n points and m inducing points.

    They are 2m, as in the paper, and up to 8m where m is small beside n, since the QR factorization then costs less
    than the iterations that it saves.

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
    """Return ``P = (Phi T)^T (Phi T) + level Kzz`` as ``R^T R``, for a sparse sign embedding Phi, in float64.

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
    embedding = SparseSignEmbedding(rows, tall.shape[0], min(nonzeros, rows), seed)
    stacked = matrix.kzz.new_zeros(rows + m, m)
    sketched = None if targets is None else stacked.new_zeros(rows + m, targets.shape[1])
    for span, tile in tall.own_tiles():
        embedding.add_product(stacked[:rows], span, tile)
        if targets is not None and sketched is not None:
            embedding.add_product(sketched[:rows], span, targets[span].to(stacked))
    stacked = tall.space.total(stacked)
    sketched = None if sketched is None else tall.space.total(sketched)
    stacked[rows:] = root_of(matrix) * matrix.level**0.5
    packed, scales = torch.geqrf(stacked)
    root = packed[:m].triu()
    if not bool(torch.isfinite(root).all()):
        raise NumericalError("The kernel matrix holds NaN or infinity; check inputs and kernel.", see="nan")
    factors = TriangularFactors([root])
    if sketched is not None:
        factors.sketched = factors.inverse(torch.ormqr(packed, scales, sketched, transpose=True)[:m])
    return factors

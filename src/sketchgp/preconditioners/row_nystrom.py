"""A Nystrom approximation of the normal matrix of the inducing-point problem, from some rows: no m x m matrix.

Reference: Frangella, Tropp, Udell, "Randomized Nystrom preconditioning" (arXiv:2110.02820).

For SketchySAGA the approximation is damped so that it suits mini-batches.  References: Frangella, Rathore, Zhao, Udell,
"PROMISE" (arXiv:2309.02014), for preconditioned SAGA; Rathore, Frangella, Udell (arXiv:2407.10070), Algorithm 5, which
leaves the damping to a grid search; Gazagnadou, Gower, Salmon (ICML 2019), for how the smoothness of mini-batches
depends on their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.tall import TallMatrix
from ..operators.tiles import spans
from .low_rank import nystrom_factor
from .nystrom import gaussian_test_matrix

_COLUMNS = 2**22  # entries of a tile
_BISECTIONS = 24
_LEAST = 1e-10  # damping over the largest eigenvalue: U U^T v cancels v to rounding, which 1 / damping multiplies
_SEEN = 10.0  # roundoffs of the trace above which a sketch sees an eigenvalue
ROUNDINGS = 10  # of float64 that a residual is off by, relative to the right-hand side
_HARMLESS = 0.03  # posterior deviations that rounding of a residual may seem to be
_HIDDEN = 1e-6  # of the prior's part of the matrix: above it, the matrix's roundoff hides what predictions depend on
_CANCELS = 1e-24  # damping over the largest eigenvalue: R^-1 cancels to rounding, which the root of this divides


@dataclass
class NystromRoot:
    """``P = U diag(S) U^T + damping`` as ``R R`` with its symmetric root R; O(m r) memory and work.

    :ivar vectors: U ``(m, r)``, orthonormal.
    :ivar values: S ``(r,)``.
    :ivar resolved: the damping below which rounding of a residual seems to be an error of predictions; infinite where
        nothing that predictions depend on lies below the roundoff of the matrix.
    """

    vectors: Tensor
    values: Tensor
    damping: float
    resolved: float = math.inf

    @property
    def rank(self) -> int:
        return len(self.values)

    def deepest(self) -> NystromRoot | None:
        """Return P with as little damping as residuals can be told from rounding with; None where nothing is hidden.

        Where the kernel is very many times the noise, eigenvalues that matter for predictions lie below the roundoff of
        the matrix, and an error in their directions hardly shows in the residual.  Iterations with this P are less
        stable, since rounding reaches the weights divided by the damping.
        """
        return replace(self, damping=min(self.damping, self.resolved)) if math.isfinite(self.resolved) else None

    def _power(self, vectors: Tensor, power: float) -> Tensor:
        rest = self.damping**power
        scales = (self.values + self.damping).pow(power) - rest
        inner = scales.unsqueeze(1) * (self.vectors.mT @ vectors)
        return torch.addmm(vectors, self.vectors, inner, beta=rest)

    def inverse(self, vectors: Tensor) -> Tensor:
        """Return ``R^-1 v``, ``(m, t)``."""
        return self._power(vectors, -0.5)

    inverse_t = inverse  # R is symmetric

    def multiply_t(self, vectors: Tensor) -> Tensor:
        """Return ``R^T v``."""
        return self._power(vectors, 0.5)


@torch.no_grad()
def row_nystrom(
    tall: TallMatrix, kzz: KernelMatrix, level: float, rank: int, rows: Tensor, stream: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the randomized Nystrom approximation ``U diag(S) U^T`` of ``(n / h) T_H^T T_H + level Kzz``, for h rows H.

    ``h m + m^2 / 2`` kernel evaluations, ``O((h + m + r) m r)`` operations, O(m r) memory; up to three times that
    where the spectrum falls to the roundoff within the rank.

    A sketch sees eigenvalues down to the roundoff times the largest, which of a smooth kernel are few.  The
    others are as far below as the square of the roundoff, since T can be multiplied before it is squared.  So the
    matrix is sketched again on the complement of what was found, and both are put together from roots
    (:func:`_beyond_roundoff`).

    :param kzz: ``k(z, z)``, by tiles.
    :returns: U ``(m, r)`` and S ``(r,)``, falling; r is at most ``rank``.
    """
    matrix = _Sampled(tall, kzz, level, rows)
    test = gaussian_test_matrix(tall.shape[1], rank, stream, tall.device)
    sketch = matrix.matmul(test)
    eps = torch.finfo(kzz.dtype).eps
    factor = nystrom_factor(sketch, test.mT @ sketch, eps)
    vectors, roots, _ = torch.linalg.svd(factor, full_matrices=False)
    values = roots.square()
    seen = int((values > _SEEN * eps * values.sum()).sum())
    if seen == rank or not bool(torch.isfinite(values).all()):
        return vectors, values
    return _beyond_roundoff(matrix, vectors[:, :seen], rank, stream)


@dataclass
class _Sampled:
    """``(n / h) T_H^T T_H + level Kzz`` for h rows H of T."""

    tall: TallMatrix
    kzz: KernelMatrix
    level: float
    rows: Tensor

    def _parts(self) -> Iterator[Tensor]:
        """Yield ``(n / h)^1/2 T_H``, some rows at a time."""
        n, m = self.tall.shape
        for span in spans(len(self.rows), max(16, _COLUMNS // m)):
            yield self.tall.part(self.rows[span]).mul_(math.sqrt(n / len(self.rows)))

    def matmul(self, vectors: Tensor) -> Tensor:
        out = self.kzz.product(vectors) * self.level
        for part in self._parts():
            out.addmm_(part.mT, part @ vectors)
        return out

    def root_on(self, basis: Tensor) -> Tensor:
        """B with ``B^T B = Q^T (this) Q``, for an orthonormal basis Q ``(m, r)``.

        By QR of ``T_H Q``, which keeps what is as small as the roundoff times ``|T|``, and not times its square.
        """
        values, vectors = torch.linalg.eigh(basis.mT @ self.kzz.product(basis) * self.level)
        root = values.clamp(min=0).sqrt().unsqueeze(1) * vectors.mT
        for part in self._parts():
            root = torch.linalg.qr(torch.cat([root, part @ basis]), mode="r").R
        return root


def _beyond_roundoff(matrix: _Sampled, result: Tensor, rank: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the Rayleigh-Ritz approximation on the span of ``result`` ``(m, q)`` and of a sketch of its complement."""
    m, q = result.shape
    test = gaussian_test_matrix(m, rank, stream, result.device)[:, : rank - q]
    sketch = _without(matrix.matmul(_without(test, result)), result)
    basis = torch.linalg.qr(torch.cat([result, sketch / sketch.norm(dim=0).clamp_min(math.ulp(0.0))], dim=1)).Q
    _, roots, vectors = torch.linalg.svd(matrix.root_on(basis), full_matrices=False)
    return basis @ vectors.mT, roots.square()


def _without(vectors: Tensor, basis: Tensor) -> Tensor:
    """Subtract the part in an orthonormal basis, twice, so that nothing of it is left."""
    for _ in range(2):
        vectors = vectors - basis @ (basis.mT @ vectors)
    return vectors


def damped(vectors: Tensor, values: Tensor, kzz: KernelMatrix, level: float, targets: Tensor) -> NystromRoot:
    """Return P damped by the least eigenvalue of the sketch: those that P misses are about as large, or smaller.

    :param targets: ``(n, t)``, with the weights of T.
    """
    least = float(values[-1]) if len(values) else 0.0
    scale = float(values[0]) if len(values) else 1.0
    eps = torch.finfo(torch.float64).eps
    prior = level * float(kzz.diagonal(dim1=-1, dim2=-2).sum())
    largest = float(targets.norm(dim=0).amax()) if targets.numel() else 0.0
    of_residual = (ROUNDINGS * eps * largest / _HARMLESS) ** 2 * scale / level
    resolved = math.inf
    if eps * scale > _HIDDEN * prior:
        resolved = max(least, ROUNDINGS * eps * prior, of_residual, _CANCELS * scale, math.ulp(0.0))
    return NystromRoot(vectors, values, max(least, eps * scale, math.ulp(0.0)), resolved)


@dataclass(kw_only=True)
class DampedNystrom(NystromRoot):
    """``P = U diag(S) U^T`` close to ``M = T^T T + level Kzz``, for use as ``P + damping``; and a second sample of rows
    of T on which to see how close.

    With the rows G (s, m) of the second sample times ``(n / s)^1/2``, it keeps ``G U`` and ``G G^T``, from which
    ``C = G (P + damping)^-1 G^T`` follows for every damping without another look at the kernel.

    :ivar basis: ``G U`` ``(s, r)``.
    :ivar gram: ``G G^T`` ``(s, s)``.
    :ivar n: rows of T.
    :ivar damping: added to P; set by :meth:`choose_damping` or by the user.
    """

    basis: Tensor
    gram: Tensor
    n: int
    damping: float = 0.0

    def apply_inverse(self, vectors: Tensor) -> Tensor:
        """Return ``(P + damping)^-1 v``, ``(m, t)``."""
        return self._power(vectors, -1)

    def batch_smoothness(self, damping: float, block_size: int) -> float:
        """Return the bound of the step of batches of this size: the largest eigenvalue of ``E[H P^-1 H] P^-1`` over
        that of ``H P^-1``, where H is the Hessian of a batch without the part of the noise.

        With ``h_i = (P + damping)^-1/2 k_i`` for the rows k_i of T that is the largest eigenvalue of
        ``sum_i (1 + n |h_i|^2 / b) h_i h_i^T``, here over the second sample: at b = n the smoothness of all rows, at
        b = 1 near the largest of one row, and falling with the damping.
        """
        scales = 1 / (self.values + damping) - 1 / damping
        inner = torch.addmm(self.gram, self.basis * scales, self.basis.mT, beta=1 / damping)
        squares = inner.diagonal().clamp(min=0) * len(inner)  # n |h_i|^2
        share = (self.n - block_size) / max(1, self.n - 1) / block_size
        weights = (1 + share * squares).sqrt()
        return float(torch.linalg.eigvalsh(weights.unsqueeze(1) * inner * weights)[-1].clamp(min=0))

    def least_damping(self) -> float:
        """Return the damping below which rounding decides."""
        return max(_LEAST * max(float(self.values[:1].sum()), float(self.gram.diagonal().mean())), 1e-300)

    def choose_damping(self, block_size: int, target: float) -> float:
        """Return the least damping whose :meth:`batch_smoothness` is at most ``target``, by bisection of its logarithm.

        A direction that P misses moves by ``step / damping`` times its gradient, a captured one by ``step``, and
        ``step`` is inverse to the smoothness.  ``damping * smoothness`` grows with the damping: less of it is better
        for what P misses, until the steps become too short for what it has.
        """
        low = self.least_damping()
        if self.batch_smoothness(low, block_size) <= target:
            return low
        high = max(low, float(self.gram.diagonal().max()))
        while self.batch_smoothness(high, block_size) > target:
            low, high = high, high * 100
        for _ in range(_BISECTIONS):
            if high / low < 1.1:
                break
            middle = math.sqrt(low * high)
            if self.batch_smoothness(middle, block_size) > target:
                low = middle
            else:
                high = middle
        return high


@torch.no_grad()
def damped_nystrom(
    tall: TallMatrix,
    kzz: KernelMatrix,
    level: float,
    rank: int,
    rows: int,
    sample: int,
    generator: torch.Generator,
) -> DampedNystrom:
    """Randomized Nystrom approximation of ``(n / rows) T_H^T T_H + level Kzz`` for random rows H, and a second sample.

    ``(rows + sample) m + m^2 / 2`` kernel evaluations, O(m rank) memory.

    :param kzz: ``k(z, z)``, by tiles.
    :param rows: of T that P is made of.
    :param sample: rows of T, other ones as far as there are, that smoothness is estimated on.
    """
    (n, m), device = tall.shape, tall.device
    order = torch.randperm(n, generator=generator).to(device)
    first = order[:rows]
    second = order[rows : rows + sample] if rows + sample <= n else order[-sample:]
    vectors, values = row_nystrom(tall, kzz, level, rank, first, generator)
    basis = values.new_zeros(len(second), len(values))
    gram = values.new_zeros(len(second), len(second))
    weights = None if tall.weights is None else tall.weights[second]
    for span in spans(m, max(16, _COLUMNS // len(second))):
        narrow = TallMatrix(tall.kernel, tall.x[second], tall.z[span], weights)
        part = narrow.part(torch.arange(len(second), device=device))
        basis.addmm_(part, vectors[span])
        gram.addmm_(part, part.mT)
    tall.evaluated.entries += len(second) * m
    scale = n / len(second)
    return DampedNystrom(vectors=vectors, values=values, basis=basis * math.sqrt(scale), gram=gram * scale, n=n)

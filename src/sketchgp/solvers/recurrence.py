"""Conjugate gradients: one iteration, and what its coefficients say: Lanczos matrices, Ritz values, least eigenvalues.

An iteration is for several columns, each of which stops by itself.  A column that has ended, or whose numbers can no
longer be divided by, is frozen: its steps are 0.

References: Hestenes and Stiefel (1952); preconditioned form as Algorithm 3 of arXiv:2304.12465; Golub and Van Loan,
"Matrix Computations", 8.4 and 10.2; Meurant and Strakos, "The Lanczos and conjugate gradient algorithms in finite
precision arithmetic" (2006), section 3; for log determinants Gardner et al. (arXiv:1809.11165).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SketchGPError
from ..settings import memory_budget
from ..space import Space

_DEPTH = 20  # vectors that are kept whatever the memory budget is; GPyTorch takes no more of them

# The eigenvalue that tells: losses were right to 0.004 a row where the least one was 0.97, and off by 0.05 at 0.23;
# below 0.95 conjugate gradients took three times the iterations of float64 ones.
LEAST = 0.95


class LostToRoundingError(SketchGPError):
    """The matrix that products are with is not the one that is wanted."""


def descend(
    value: Tensor, r: Tensor, p: Tensor, product: Tensor, curvature: Tensor, energy: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``value += alpha p`` and ``r -= alpha A p`` with ``alpha = energy / curvature``, in place.

    :param value: iterate, ``r`` its residual, ``p`` the direction, ``product`` = A p: ``(..., n, t)`` each.
    :param curvature: ``p^T A p``, and ``energy`` = ``r^T P^-1 r``, ``(..., t)``.
    :param active: columns that have not ended, ``(..., t)``.
    :returns: alpha, 0 for frozen columns, and which columns are not frozen, ``(..., t)``; and whether all curvatures
        are finite, ``()``: to be looked at before anything is believed (:func:`sketchgp.solvers.loop.require_finite`).
    """
    usable = active & (curvature > 0) & (energy > 0)
    alpha = torch.where(usable, energy / torch.where(usable, curvature, 1), 0)
    value.addcmul_(alpha.unsqueeze(-2), p)
    r.addcmul_(alpha.unsqueeze(-2), product, value=-1)
    return alpha, usable, torch.isfinite(curvature).all()


def turn(p: Tensor, z: Tensor, following: Tensor, energy: Tensor, usable: Tensor) -> Tensor:
    """``p = z + beta p`` with ``beta = following / energy``, in place; of frozen columns ``p = z``.

    :param z: ``P^-1 r`` after the step, ``(..., n, t)``.
    :param following: ``r^T z``, and ``energy`` what it was before the step; ``usable`` as :func:`descend` gave it.
    :returns: beta ``(..., t)``.
    """
    beta = torch.where(usable & (following > 0), following / torch.where(usable, energy, 1), 0)
    p.mul_(beta.unsqueeze(-2)).add_(z)
    return beta


def tridiagonal(coefficients: Sequence[Tensor], like: Tensor) -> Tensor:
    """Lanczos matrices ``(..., k, k)`` from alpha and beta of k iterations, ``(2, ...)`` each.

    Alpha is 0 once a system has ended; rows past its end are those of the identity.

    :param like: ``(...)``, of the shape and dtype that is wanted where there are no iterations: the identity then.
    """
    if not coefficients:
        return like.new_ones(*like.shape, 1, 1)
    alpha, beta = torch.stack([*coefficients], dim=-1)
    active = alpha > 0
    safe = torch.where(active, alpha, 1)
    ratio, root = (torch.where(active, part / safe, 0)[..., :-1] for part in (beta, beta.sqrt()))
    side = torch.where(active[..., 1:], root, 0)
    entries = torch.where(active, 1 / safe + torch.nn.functional.pad(ratio, (1, 0)), 1)
    return torch.diag_embed(entries) + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)


def least_ritz_value(coefficients: Sequence[Tensor]) -> Tensor:
    """Least Ritz value of each column ``(t,)``, at most 1.

    It is about the least eigenvalue of the preconditioned matrix that matters for this right-hand side.
    """
    matrices = tridiagonal(coefficients, coefficients[0][0])
    return torch.linalg.eigvalsh(matrices)[..., 0].clamp(min=torch.finfo(matrices.dtype).tiny)


class LanczosRecord:
    """Coefficients of the first ``columns`` of a block ``b``, and where wanted the Lanczos vectors, in ``dtype``."""

    def __init__(self, b: Tensor, space: Space, dtype: torch.dtype, columns: int, with_vectors: bool) -> None:
        self.b, self.space, self.dtype, self.columns, self.with_vectors = b, space, dtype, columns, with_vectors
        self.coefficients: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.depth = float("inf")
        if with_vectors:
            each = b.shape[:-2].numel() * space.n * columns * dtype.itemsize
            self.depth = max(_DEPTH, memory_budget.value(b.device) // max(each, 1))

    def begin(self, z: Tensor, size: Tensor) -> None:
        """Keep the first vector, of ``z = P^-1 r`` and ``size`` its norm in the preconditioner, ``(..., t)``."""
        if self.with_vectors:
            self._keep(z, size, torch.arange(self.b.shape[-1], device=self.b.device))

    def add(self, alpha: Tensor, beta: Tensor, z: Tensor, size: Tensor, index: Tensor) -> str | None:
        """Add an iteration of the columns at ``index``; return a note where the memory budget allows no more."""
        if len(self.coefficients) >= self.depth:
            return None
        full = self.b.new_zeros(2, *self.b.shape[:-2], self.b.shape[-1])
        full[0][..., index], full[1][..., index] = alpha, beta
        self.coefficients.append(full[..., : self.columns])
        if len(self.coefficients) == self.depth:
            return f"the memory budget allows {len(self.coefficients)} Lanczos vectors of a probe and no more"
        if self.with_vectors:
            self._keep(z, size, index)
        return None

    def _keep(self, z: Tensor, size: Tensor, index: Tensor) -> None:
        sign = (-1) ** len(self.vectors)
        full = torch.zeros_like(self.b)
        full[..., index] = sign * z / size.unsqueeze(-2)
        self.vectors.append(full[..., : self.columns].to(self.dtype))

    def matrices(self) -> Tensor:
        """Lanczos matrices ``(columns, ..., k, k)`` in float64, with unit rows past a column's end."""
        like = self.b.new_zeros(*self.b.shape[:-2], self.columns)
        return tridiagonal(self.coefficients, like).movedim(-3, 0)

    def kept_vectors(self) -> Tensor:
        """``W = P^-1/2 V``, ``(columns, ..., n, k)``; zeros past a column's end."""
        zeros = torch.zeros_like(self.b[..., : self.columns], dtype=self.dtype)
        kept = self.vectors[: max(1, len(self.coefficients))] or [zeros]
        return self.space.whole(torch.stack(kept, dim=-1).movedim(-2, 0))


class EigenvalueWatch:
    """Eigenvalues that show that rounding has made another matrix of A, cycle by cycle of conjugate gradients.

    Where P lies below A no eigenvalue of ``P^-1 A`` is less than 1.  Those of the Lanczos matrix T of a column lie
    between the least and the largest of them, and T has none below c exactly where all pivots of ``T - c`` are
    positive, ``d_k = t_kk - c - t_(k,k-1)^2 / d_(k-1)`` (Sturm).

    :param like: ``(..., t)`` float64, one number for each column.

    :ivar below: ``()`` whether an eigenvalue below :data:`LEAST` was met.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.begin()

    def begin(self) -> None:
        """Begin a cycle."""
        self._before = self._ratio = self._pivot = torch.zeros_like(self.like)
        self.below = torch.zeros((), dtype=torch.bool, device=self.like.device)

    def add(self, alpha: Tensor, beta: Tensor, index: Tensor) -> None:
        """Add an iteration of the columns at ``index``, ``(..., i)`` each; alpha is 0 where one has ended."""
        present, ratio = torch.zeros_like(self.like), torch.zeros_like(self.like)
        present[..., index], ratio[..., index] = alpha, beta
        active = present > 0
        linked = active & (self._before > 0)
        before = torch.where(linked, self._before, 1)
        pivot = 1 / torch.where(active, present, 1) - LEAST
        pivot = pivot + torch.where(linked, self._ratio / before * (1 - 1 / (before * self._pivot)), 0)
        self.below = self.below | (active & (pivot <= 0)).any()
        self._before, self._ratio, self._pivot = present, ratio, pivot

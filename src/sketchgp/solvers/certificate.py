"""Certified bounds: the distance of a solution from the exact one, in the norm of the matrix.

With ``A = K + D``, D the noise, and ``r = b - A w``, ``||w - A^-1 b||_A^2 = r^T A^-1 r``.  A kernel matrix K is
positive semidefinite, so ``D <= A`` and ``r^T A^-1 r <= r^T D^-1 r``; where ``F F^T <= K``, as it is for every Nystrom
approximation, ``P = F F^T + D <= A`` and ``r^T A^-1 r <= r^T P^-1 r``, which is much less.  The mean ``c^T w`` at x,
c = k(X, x), is then within ``(c^T A^-1 c)^1/2 ||w - A^-1 b||_A <= k(x, x)^1/2 ||w - A^-1 b||_A`` of the exact one, by
the inequality of Cauchy and Schwarz.  Reference: Artemev, Burt, van der Wilk, "Tighter bounds on the log marginal
likelihood of Gaussian process regression using conjugate gradients" (arXiv:2102.08314).

Rounding is a part of it.  That of r is bounded from its terms; sums of n terms count ``2 n^1/2 + 8`` roundoffs of the
sum of their absolute values (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).
``P^-1 r`` need not be exact: for any z, ``r^T P^-1 r <= r^T z + e^T z + e^T D^-1 e`` with ``e = r - P z``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import KernelMatrix, LowRankPlusDiagonal
from ..operators.access import diagonal, entry_rounding
from ..space import Space
from .system import System

_EPS = torch.finfo(torch.float64).eps
_BELOW = 16.0  # roundoffs of the trace of K that F F^T may be above K, or K below 0


def summing(terms: int) -> float:
    """The error of a float64 sum of so many products, over the sum of their absolute values."""
    return _EPS * (2 * terms**0.5 + 8)


class Certificate:
    """Bounds of solutions of one system, or of a batch of them; they cost no product with K.

    :param preconditioner: P, or None; used where it is certain to lie below A.
    :param below: whether ``F F^T <= K`` for its factor (:attr:`sketchgp.preconditioners.Preconditioner.below`).
    :param space: of the vectors that it is asked about; None where they are whole.
    :ivar noise: ``(..., h, 1)``, of the rows that the space holds.
    :ivar factor: P, where it is certain to lie below A; else None.
    :ivar known: False where nothing is certain: the noise is not positive or near the roundoff of K, or the entries of
        K are not a kernel's to float64.
    :ivar slack: ``(..., 1)``, below the eigenvalues of ``P^-1 A``, which rounding leaves a little below 1.
    :ivar scale: ``(..., 1)``, the largest ``(k(x, x) / noise)^1/2``: no prediction at a point of such a prior variance
        is further from the exact one, in deviations of an observation, than that times the bound.
    """

    def __init__(
        self,
        system: System,
        preconditioner: LowRankPlusDiagonal | None,
        below: bool = False,
        space: Space | None = None,
    ) -> None:
        self.space = space = Space(system.n) if space is None else space
        noise = system.noise.to(torch.float64).unsqueeze(-1)
        self.noise = space.own(noise)
        rounding = entry_rounding(system.operator) if bool((noise > 0).all()) else None
        self.known, self.factor = rounding is not None, None
        exact = isinstance(system.operator, KernelMatrix) or system.dtype == torch.float64
        if preconditioner is not None and below and exact:
            shifted = (preconditioner.diagonal_part.unsqueeze(-1) > noise * (1 + 4 * _EPS)).any()
            self.factor = None if bool(shifted) else preconditioner
        if rounding is None and self.factor is None:
            return
        prior, least = diagonal(system.operator).to(torch.float64).clamp(min=0), noise.amin(dim=-2)
        self.slack = 1 - _BELOW * _EPS * prior.sum(dim=-1, keepdim=True) / least
        if rounding is None:
            return
        self.root = space.own(prior.sqrt().unsqueeze(-1))
        self.scale = (prior.amax(dim=-1, keepdim=True) / least).sqrt()
        self.known = bool((self.slack > 0.5).all())
        self.entries, self.sums = space.own(rounding[0].unsqueeze(-1)), summing(system.n)

    def bounds(self, b: Tensor, value: Tensor, r: Tensor) -> Tensor:
        """``(3, ..., t)``: at least ``||value - A^-1 b||_A``, column by column; and below and above ``b^T A^-1 b``.

        :param r: ``b - A value``, of one float64 product; vectors of the space, float64, each.
        """
        return self._bounds(b, value, r, self._rounding(b, value, r))

    def of_factor(self, b: Tensor, value: Tensor) -> Tensor:
        """Bounds as those of :meth:`bounds` of a solution by a Cholesky factor in float64, whose residual is rounding.

        The rounding is that of a matrix ``|dA_ij| <= g (a_ii a_jj)^1/2``, g of three sums of n terms (Higham, "Accuracy
        and stability of numerical algorithms", theorem 10.4 and section 10.1.1).
        """
        root = (self.root.square() + self.noise).sqrt()
        of_factor = 3 * self.sums * root * self._sum(root * value.abs())
        return self._bounds(b, value, torch.zeros_like(value), self._rounding(b, value, b) + of_factor)

    def _bounds(self, b: Tensor, value: Tensor, r: Tensor, rounding: Tensor) -> Tensor:
        space = self.space
        squared = space.total((r.square() / self.noise).sum(dim=-2))
        if self.factor is not None:
            z = space.apply_inverse(self.factor, r)
            inner = space.total(self.factor.down(z, space.span))
            e = r - self.factor.up(inner, space.span) - self.noise * z
            by_factor = space.dot(r + e, z) + space.total((e.square() / self.noise).sum(dim=-2))
            size = space.dot(z.abs(), r.abs() + self.root * inner.norm(dim=-2, keepdim=True))
            squared = torch.minimum(squared, by_factor.clamp(min=0) + self.sums * size)
        of_rounding = space.total((rounding.square() / self.noise).sum(dim=-2))
        error = (squared.sqrt() + of_rounding.sqrt()) / self.slack.sqrt()
        form = space.dot(value, b + r)  # 2 b^T w - w^T A w, which the squared error is missing from
        of_form = space.dot(value.abs(), rounding + self.sums * (b.abs() + r.abs()))
        return torch.stack([error, form - of_form, form + of_form + error.square()])

    def _sum(self, own: Tensor) -> Tensor:
        """Sum over the rows, ``(..., 1, t)``."""
        return self.space.total(own.sum(dim=-2, keepdim=True))

    def of(self, b: Tensor, value: Tensor, r: Tensor) -> dict[str, Tensor]:
        """Return the fields of a report for a solution, those of :meth:`facts`."""
        return self.facts(self.bounds(b, value, r)) if self.known else {}

    def facts(self, bounds: Tensor) -> dict[str, Tensor]:
        """Return fields for a report, of all systems one after the other, on the CPU; none where nothing is certain."""
        if not self.known:
            return {}
        error, flat = bounds[0], bounds.flatten(1).cpu()
        deviations = (error * self.scale).reshape(-1).cpu()
        return {"error_bound": flat[0], "certain_deviations": deviations, "quadratic_bounds": flat[1:]}

    def _rounding(self, b: Tensor, value: Tensor, r: Tensor) -> Tensor:
        """``(..., h, t)``: at least the errors of r."""
        size = value.abs()
        terms = self.root * size
        total = self._sum(terms)
        of_product = self.root * (self.entries * total + self._sum(self.entries * terms) + self.sums * total)
        return of_product + 4 * _EPS * (self.noise * size + b.abs() + r.abs())

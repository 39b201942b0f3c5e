"""Conjugate gradients on the normal equations in the coordinates of a preconditioner's root.

With ``M = T^T T + level L^T L`` (L the root of Kzz) and a preconditioner ``P = R^T R`` the solve is for ``u = R w``,
with ``B = R^-T M R^-1`` close to the identity.  Applying P^-1 as a whole, to residuals that were rounded in the size of
M, multiplies rounding errors by as much as ``1 / (level eps)``: on smooth kernels, whose Kzz is singular to working
precision, the weights then drift off along its null space.  Here they are only ever multiplied by R^-1, and the
curvature is a sum of squares, ``|T p|^2 + level |L p|^2``, so it is never negative.

Reference: Bjorck, "Numerical Methods for Least Squares Problems" (SIAM, 1996), sections 7.4 and 7.5.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...errors import NumericalError
from ...operators.normal_matrix import NormalMatrix, TiledNormalMatrix
from ...preconditioners.factored import TriangularFactors, root_of
from ...preconditioners.row_nystrom import NystromRoot
from ..conjugate_gradients import Iterate
from .remaining import RemainingEnergy, RitzValues

_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears
_CYCLE_REDUCTION = 1e-4  # of the residual that float32 entries are trusted with before it is computed anew
_TRUSTED = 30  # iterations on float32 entries before the residual is computed anew, where no residual ends them
_LOST = 4.0  # of the squared residual, in the preconditioner's norm, over that of the recurrence
_NEGLIGIBLE = 0.1  # of the tolerance
_ROUNDINGS = 10  # of float64 that a residual is off by, relative to the right-hand side
_NAN = "A product with the kernel matrix gave NaN or infinity; check inputs and kernel."


class SplitGradients:
    """One solve of ``M W = b``: ``loop`` runs it; then ``best`` is what to return, ``residual`` its true residual.

    The residual followed is ``||M w - b|| / ||b||``, as ``R^T`` times that in the coordinates u; at the end, and where
    the tolerance is met, it is computed anew from w with float64 entries, and the solve goes on from there until it is.

    :param matrix: M, with entries of T in x's dtype or float64.
    :param b: ``(m, t)`` float64.
    :param tol: of the residual; or, with ``predictions``, of :attr:`deviations`.

    :ivar deviations: ``(t,)`` estimated distance of any prediction from the solution's, in posterior deviations
        (:mod:`.remaining`); infinite while nothing can be said.
    :param initial: ``(m, t)`` or None for zero.
    """

    def __init__(
        self,
        matrix: NormalMatrix | TiledNormalMatrix,
        factors: TriangularFactors | NystromRoot | None,
        b: Tensor,
        tol: float,
        max_iterations: int,
        initial: Tensor | None,
        callback: Callable[[Iterate], Any] | None,
        predictions: bool = False,
    ) -> None:
        self.predictions, self.remaining = predictions, RemainingEnergy()
        self.matrix, self.factors, self.b, self.tol = matrix, factors, b, tol
        self.limit, self.callback = max_iterations, callback
        self.start = time.perf_counter()
        norm = b.norm(dim=0)
        if not bool(torch.isfinite(norm).all()):
            raise NumericalError(_NAN)
        self.norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.exact = matrix.tall.dtype == torch.float64
        self.iterations = self.products = 0
        self.reason, self.notes = "", list[str]()
        self.value = torch.zeros_like(b) if initial is None else initial.clone()
        self.r = b.clone()
        if initial is not None:
            self.r -= self._accurate(self.value)
        self.best, self.residual = self.value.clone(), self.r.norm(dim=0) / self.norm
        self.history = [self.residual]
        self.energy = self._back(self.r).square().sum(dim=0)  # by the recurrence
        self.gained = (self.value * (b + self.r)).sum(dim=0)  # ||w*||_M^2 less the squared error
        self.deviations = torch.full_like(norm, torch.inf)
        self._settle()

    def _roundoff(self) -> Tensor:
        """``||R^-T r||^2`` below which a residual r cannot be told from rounding: it is rounded in the size of b, and
        multiplied by the inverse of R."""
        if not self.predictions or not isinstance(self.factors, NystromRoot):
            return torch.zeros_like(self.norm)
        return (_ROUNDINGS * torch.finfo(torch.float64).eps * self.b.norm(dim=0)).square() / self.factors.damping

    def loop(self, progress: bool | None, name: str) -> None:
        """Cycles of conjugate gradients, each from the true residual, until that is at the tolerance."""
        show = sys.stderr.isatty() if progress is None else progress
        current = self._judged(self.residual)
        with tqdm(desc=name, unit="it", disable=not show, delay=_PROGRESS_DELAY, leave=False) as bar:
            while not self.reason and bool((current > self.tol).any()):
                start, before = self.r.norm(dim=0) / self.norm, self.energy
                try:
                    self._cycle(bar, start)
                except KeyboardInterrupt:
                    self.reason = "interrupted"
                found = self._verify()
                current = self._judged(found)
                if self.reason or bool((current <= self.tol).all()):
                    continue
                if self.iterations >= self.limit:
                    self.reason = "ran out of iterations"
                elif bool(self._stuck(found, start, before)[current > self.tol].any()):
                    if self.exact:
                        self.reason = "stagnated"
                    else:
                        self.exact, self.matrix = True, self.matrix.accurate()
                        self.notes.append("float32 entries stopped reducing the residual; went on with float64 ones")
        self.converged = bool((self._judged(self.residual) <= self.tol).all())
        self.reason = self.reason or "reached the tolerance"

    def _stuck(self, found: Tensor, start: Tensor, before: Tensor) -> Tensor:
        """Which columns a cycle has hardly brought forward: residuals and squared norms of them after and before it."""
        return self.energy > 0.25 * before if self.predictions else found > 0.5 * start

    def _judged(self, residual: Tensor) -> Tensor:
        """What the tolerance is of."""
        return self.deviations if self.predictions else residual

    def _settle(self) -> None:
        """Columns without any residual are there."""
        self.deviations = torch.where(self.energy == 0, 0.0, self.deviations)

    def _verify(self) -> Tensor:
        """The true residual of the present value, which is kept column by column where it is the best: the residual is
        the least, or with ``predictions`` the norm of the error, which falls where the residual need not.

        Where rounding has made the true residual larger than the recurrence says, so that the estimate of the error is
        that of another iterate, it is withdrawn.
        """
        self.r = self.b - self._accurate(self.value)
        current = self.r.norm(dim=0) / self.norm
        if not bool(torch.isfinite(current).all()):
            raise NumericalError(_NAN)
        energy, gained = self._back(self.r).square().sum(dim=0), (self.value * (self.b + self.r)).sum(dim=0)
        seen = (energy / self.matrix.level).sqrt()  # about the error in deviations, where the preconditioner is good
        lost = (energy > _LOST * self.energy) & (seen > _NEGLIGIBLE * (self.tol if self.predictions else 1))
        better = gained >= self.gained if self.predictions else current < self.residual
        self.deviations = torch.where(lost | (~better & self.predictions), torch.inf, self.deviations)
        self.deviations = torch.maximum(self.deviations, seen)
        self.energy = energy
        self.gained = torch.where(better, gained, self.gained)
        self.best = torch.where(better, self.value, self.best)
        self.residual = torch.where(better, current, self.residual)
        return current

    def _accurate(self, vectors: Tensor) -> Tensor:
        self.products += 1
        return (self.matrix if self.exact else self.matrix.accurate())._matmul(vectors)

    def _cycle(self, bar: Any, start: Tensor) -> None:
        """On ``B u = R^-T r`` from u = 0; adds ``R^-1 u`` to the value, also where it is interrupted."""
        trusted = not self.exact and self.predictions
        limit = min(self.limit, self.iterations + _TRUSTED) if trusted else self.limit
        share = 0.0 if self.predictions else 0.95 if self.exact else 0.5
        target = torch.full_like(start, share * self.tol)
        if not self.exact:
            target = torch.maximum(target, _CYCLE_REDUCTION * start)
        s = self._back(self.r)
        d, u = s.clone(), torch.zeros_like(s)
        energy = s.square().sum(dim=0)
        floor, ritz = self._roundoff(), RitzValues()
        active = (self._judged(start) > self.tol) & (start > target)
        try:
            while bool(active.any()) and self.iterations < limit:
                p = d if self.factors is None else self.factors.inverse(d)
                gram, squares = self.matrix.tall.gram(p)
                self.products += 1
                ridge, lengths = self._ridge(p)
                curvature = squares + self.matrix.level * lengths
                if not bool(torch.isfinite(curvature).all()):
                    raise NumericalError(_NAN)
                usable = active & (curvature > 0) & (energy > 0)
                alpha = torch.where(usable, energy / torch.where(usable, curvature, 1), 0)
                u.addcmul_(alpha, d)
                s = s - alpha * self._back(gram.add_(ridge, alpha=self.matrix.level))
                estimate = (self.remaining.add(alpha * energy) / self.matrix.level).sqrt()
                following = s.square().sum(dim=0)
                rounded = following <= floor
                ritz.add(alpha, torch.where(usable, following / torch.where(usable, energy, 1), 0))
                if bool((usable & rounded).any()):  # no iteration can take more off
                    estimate = torch.where(rounded, (floor / (ritz.least() * self.matrix.level)).sqrt(), estimate)
                self.deviations = torch.where(usable, estimate, self.deviations)
                d = s + torch.where(usable, following / torch.where(usable, energy, 1), 0) * d
                energy = following
                residual = self._forth(s).norm(dim=0) / self.norm
                self.energy = torch.where(usable, energy, self.energy)
                self._settle()
                active = usable & ~rounded & (self.deviations > self.tol if self.predictions else residual > target)
                if not self.exact:
                    active &= residual > target
                self.iterations += 1
                self.history.append(residual)
                bar.update()
                bar.set_postfix_str(f"residual {float(residual.max()):.1e}", refresh=False)
                seen = Iterate(self.iterations, residual, time.perf_counter() - self.start)
                if self.callback is not None and self.callback(seen):
                    self.reason = "was stopped by the callback"
                    break
        finally:
            self.value = self.value + (u if self.factors is None else self.factors.inverse(u))

    def _ridge(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``Kzz p`` and ``p^T Kzz p`` of each column, the latter not negative."""
        if isinstance(self.matrix, TiledNormalMatrix):
            product = self.matrix.kzz_matmul(vectors)
            return product, (vectors * product).sum(dim=0).clamp(min=0)
        root = root_of(self.matrix)
        lower = root @ vectors
        return root.mT @ lower, lower.square().sum(dim=0)

    def _back(self, vectors: Tensor) -> Tensor:
        return vectors if self.factors is None else self.factors.inverse_t(vectors)

    def _forth(self, vectors: Tensor) -> Tensor:
        return vectors if self.factors is None else self.factors.multiply_t(vectors)

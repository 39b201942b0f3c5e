"""Conjugate gradients on the normal equations in the coordinates of a triangular preconditioner.

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
from ...operators.normal_matrix import NormalMatrix
from ...preconditioners.factored import TriangularFactors, root_of
from ..conjugate_gradients import Iterate

_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears
_CYCLE_REDUCTION = 1e-4  # of the residual that float32 entries are trusted with before it is computed anew
_NAN = "A product with the kernel matrix gave NaN or infinity; check inputs and kernel."


class SplitGradients:
    """One solve of ``M W = b``: ``loop`` runs it; then ``best`` is what to return, ``residual`` its true residual.

    The residual followed is ``||M w - b|| / ||b||``, as ``R^T`` times that in the coordinates u; at the end, and where
    it is met, it is computed anew from w with float64 entries, and the solve goes on from there until it is met.

    :param matrix: M, with entries of T in x's dtype or float64.
    :param b: ``(m, t)`` float64.
    :param initial: ``(m, t)`` or None for zero.
    """

    def __init__(
        self,
        matrix: NormalMatrix,
        factors: TriangularFactors | None,
        b: Tensor,
        tol: float,
        max_iterations: int,
        initial: Tensor | None,
        callback: Callable[[Iterate], Any] | None,
    ) -> None:
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

    def loop(self, progress: bool | None, name: str) -> None:
        """Cycles of conjugate gradients, each from the true residual, until that is at the tolerance."""
        show = sys.stderr.isatty() if progress is None else progress
        current = self.residual
        with tqdm(desc=name, unit="it", disable=not show, delay=_PROGRESS_DELAY, leave=False) as bar:
            while not self.reason and bool((current > self.tol).any()):
                before = current
                try:
                    self._cycle(bar, current)
                except KeyboardInterrupt:
                    self.reason = "interrupted"
                current = self._verify()
                if self.reason or bool((current <= self.tol).all()):
                    continue
                if self.iterations >= self.limit:
                    self.reason = "ran out of iterations"
                elif bool((current > 0.5 * before)[current > self.tol].any()):
                    if self.exact:
                        self.reason = "stagnated"
                    else:
                        self.exact, self.matrix = True, self.matrix.accurate()
                        self.notes.append("float32 entries stopped reducing the residual; went on with float64 ones")
        self.reason = self.reason or "reached the tolerance"

    def _verify(self) -> Tensor:
        """The true residual of the present value, which is kept column by column where it is the least."""
        self.r = self.b - self._accurate(self.value)
        current = self.r.norm(dim=0) / self.norm
        if not bool(torch.isfinite(current).all()):
            raise NumericalError(_NAN)
        better = current < self.residual
        self.best = torch.where(better, self.value, self.best)
        self.residual = torch.where(better, current, self.residual)
        return current

    def _accurate(self, vectors: Tensor) -> Tensor:
        self.products += 1
        return (self.matrix if self.exact else self.matrix.accurate())._matmul(vectors)

    def _cycle(self, bar: Any, start: Tensor) -> None:
        """On ``B u = R^-T r`` from u = 0; adds ``R^-1 u`` to the value, also where it is interrupted."""
        target = torch.full_like(start, (0.95 if self.exact else 0.5) * self.tol)
        if not self.exact:
            target = torch.maximum(target, _CYCLE_REDUCTION * start)
        s = self._back(self.r)
        d, u = s.clone(), torch.zeros_like(s)
        energy, active, root = s.square().sum(dim=0), start > target, root_of(self.matrix)
        try:
            while bool(active.any()) and self.iterations < self.limit:
                p = d if self.factors is None else self.factors.inverse(d)
                gram, squares = self.matrix.tall.gram(p)
                self.products += 1
                lower = root @ p
                curvature = squares + self.matrix.level * lower.square().sum(dim=0)
                if not bool(torch.isfinite(curvature).all()):
                    raise NumericalError(_NAN)
                usable = active & (curvature > 0) & (energy > 0)
                alpha = torch.where(usable, energy / torch.where(usable, curvature, 1), 0)
                u.addcmul_(alpha, d)
                s = s - alpha * self._back(gram.addmm_(root.mT, lower, alpha=self.matrix.level))
                following = s.square().sum(dim=0)
                d = s + torch.where(usable, following / torch.where(usable, energy, 1), 0) * d
                energy = following
                residual = self._forth(s).norm(dim=0) / self.norm
                active = usable & (residual > target)
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

    def _back(self, vectors: Tensor) -> Tensor:
        return vectors if self.factors is None else self.factors.inverse_t(vectors)

    def _forth(self, vectors: Tensor) -> Tensor:
        return vectors if self.factors is None else self.factors.multiply_t(vectors)

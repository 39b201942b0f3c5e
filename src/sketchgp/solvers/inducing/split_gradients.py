"""Conjugate gradients on the normal equations in the coordinates of a preconditioner's root.

With ``M = T^T T + level L^T L`` (L the root of Kzz) and a preconditioner ``P = R^T R`` the solve is for ``u = R w``,
with ``B = R^-T M R^-1`` close to the identity.  Applying P^-1 as a whole, to residuals that were rounded in the size of
M, multiplies rounding errors by as much as ``1 / (level eps)``: on smooth kernels, whose Kzz is singular to working
precision, the weights then drift off along its null space.  Here they are only ever multiplied by R^-1, and the
curvature is a sum of squares, ``|T p|^2 + level |L p|^2``, so it is never negative.

Reference: Bjorck, "Numerical Methods for Least Squares Problems" (SIAM, 1996), sections 7.4 and 7.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...devices import fetched
from ...operators.tall import NormalMatrix
from ...preconditioners.krill import TriangularFactors, root_of
from ...preconditioners.row_nystrom import ROUNDINGS, NystromRoot
from ...report import Reason
from ...space import Space
from ..energy import MOVED, RemainingEnergy, moved_by_rounding
from ..loop import Cycles, Outcome, require_finite
from ..recurrence import descend, least_ritz_value, turn

_HARDLY = 0.25  # of the squared residual in the preconditioner's norm that a cycle left
_LOST = 4.0  # of the squared residual, in the preconditioner's norm, over that of the recurrence
_STEEP = 1e-4  # of the squared residual in the preconditioner's norm: what no ordinary step leaves of it
_NEGLIGIBLE = 0.1  # of the tolerance


class SplitGradients(Cycles):
    """Conjugate gradients on ``M W = b`` in cycles, each from the true residual.

    The residual followed is ``||M w - b|| / ||b||``, as ``R^T`` times that in the coordinates u; at the end, and where
    the tolerance is met, it is computed anew from w, and the solve goes on from there until it is.

    :param matrix: M.
    :param y: ``(n, t)`` float64, with the weights of T; ``b = T^T y``.
    :param tol: of the residual, and no prediction may be more than ``MOVED`` deviations off; or, with ``predictions``,
        of :attr:`deviations`.

    :ivar deep: whether the preconditioner has the least damping (:meth:`NystromRoot.deepest`).
    :ivar deviations: ``(t,)`` estimated distance of any prediction from the solution's, in posterior deviations
        (:mod:`sketchgp.solvers.energy`); infinite while nothing can be said.
    """

    letter = "m"
    saved = (
        "value", "r", "best", "residual", "energy", "gained", "deviations", "true", "current",
        "products", "cycling", "verified", "deep",
        "s", "d", "u", "recurrence", "active", "target", "start", "before",
        "remaining.taken", "remaining.estimates", "coefficients", "evaluated.entries", "evaluated.products",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        matrix: NormalMatrix,
        factors: TriangularFactors | NystromRoot | None,
        y: Tensor,
        tol: float,
        predictions: bool = False,
    ) -> None:
        b = matrix.tall.t_matmul(y)
        super().__init__(b, Space(len(b)))
        self.name, self.size, self.data_rows = name, len(b), matrix.tall.shape[0]
        self.matrix_entries = float(self.size * self.data_rows)
        self.predictions, self.tol, self.right = predictions, tol, tol if predictions else MOVED
        self.factors = TriangularFactors([]) if factors is None else factors
        self.deepest = factors.deepest() if predictions and isinstance(factors, NystromRoot) else None
        self.deep = False
        self.matrix, self.y, self.evaluated = matrix, y, matrix.tall.evaluated
        self.products = 0
        self.remaining, self.coefficients = RemainingEnergy(), list[Tensor]()
        self.s = self.d = self.u = self.r = torch.zeros_like(b[:, :0])  # of a cycle, once there is one
        self.recurrence = self.active = self.target = self.norm[:0]

    @property
    def root(self) -> TriangularFactors | NystromRoot:
        """The preconditioner, as the present cycle has it."""
        return self.deepest if self.deep and self.deepest is not None else self.factors

    @property
    def tally(self) -> dict[str, float]:
        return {"products": self.products}

    @property
    def entries(self) -> float:
        return self.evaluated.entries + self.evaluated.products * self.size * (self.size + 1) / 2

    def begin(self, initial: Tensor | None) -> Tensor:
        self.value = torch.zeros_like(self.b) if initial is None else initial.to(self.b).clone()
        self.r = self.b.clone() if initial is None else self._residual()
        self.best, self.residual = self.value.clone(), self.r.norm(dim=0) / self.norm
        self.true = self.current = self.residual
        self.energy = self.root.inverse_t(self.r).square().sum(dim=0)  # by the recurrence
        self.gained = (self.value * (self.b + self.r)).sum(dim=0)  # ||w*||_M^2 less the squared error
        self.deviations = torch.where(self.energy == 0, 0.0, torch.full_like(self.norm, torch.inf))
        self.start = self.before = torch.full_like(self.norm, torch.inf)
        self.cycling = False
        return self.residual

    def _roundoff(self) -> Tensor:
        """``||R^-T r||^2`` below which a residual r cannot be told from rounding.

        It is rounded in the size of b, and multiplied by the inverse of R.
        """
        if not self.predictions or not isinstance(self.root, NystromRoot):
            return torch.zeros_like(self.norm)
        return (ROUNDINGS * torch.finfo(torch.float64).eps * self.b.norm(dim=0)).square() / self.root.damping

    def reached(self) -> Reason | None:
        return Reason.REACHED if bool(self._met(self.true).all()) else None

    def stuck(self) -> bool:
        hardly = self.energy > _HARDLY * self.before
        if not self.predictions:
            hardly = torch.where(self.true > self.tol, self.true > 0.5 * self.start, hardly)
        return bool(hardly[~self._met(self.true)].any())

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        if self.cycling or not self.verified:
            self.close_cycle()
        converged = bool(self._met(self.true).all())
        if reason == Reason.STAGNATED and not self.predictions and bool((self.residual <= self.tol).all()):
            reason = Reason.SINGULAR
        if converged and reason in (Reason.ITERATIONS, Reason.TIME):
            reason = Reason.REACHED
        sketched = self.factors.sketched if isinstance(self.factors, TriangularFactors) else None
        if converged and sketched is not None and isinstance(self.matrix.kzz, Tensor):
            moved, too_far = moved_by_rounding(self.root.inverse_t, sketched, self.matrix.kzz, self.matrix.level)
            if bool(too_far.any()):
                converged, reason = False, Reason.SINGULAR
                self.deviations = torch.where(self.deviations.isinf(), moved, self.deviations)
            self.deviations = torch.maximum(self.deviations, moved)
        facts = {
            "deviations": self.deviations.cpu(),
            "tol": self.tol,
            "judged": "predictions" if self.predictions else "residual",
        }
        return Outcome(self.best, self.residual, converged, reason, facts)

    def iterate(self) -> Tensor:
        return self.value + self.root.inverse(self.u) if self.cycling else self.value

    def _met(self, residual: Tensor) -> Tensor:
        """Return which columns are done: where tol is of the residual, predictions must not be far off either."""
        right = self.deviations <= self.right
        return right if self.predictions else right & (residual <= self.tol)

    def verify(self) -> None:
        """Find the true residual of the present value, which is kept column by column where it is the best.

        The best has the least residual, or is the one that ends the solve; with ``predictions`` it has the least
        norm of the error, which falls where the residual need not.  Where rounding has then made the true residual
        larger than the recurrence says, so that the estimate of the error is that of another iterate, it is withdrawn.
        Without, a cycle that hardly helped leaves rounding: along the null space of Kzz, which predicts nothing, where
        it is less than a deviation.
        """
        self.r = self._residual()
        self.true = current = self.finite(self.r.norm(dim=0) / self.norm)
        energy, gained = self.root.inverse_t(self.r).square().sum(dim=0), (self.value * (self.b + self.r)).sum(dim=0)
        seen = torch.maximum(self._seen(energy), self._beyond(self.r))
        if not self.predictions:
            rounded = (energy > _HARDLY * self.before) & (seen <= 1)
            self.deviations = torch.where(rounded, self.deviations, self.deviations.maximum(seen))
            better = (current < self.residual) | self._met(current)
        else:
            better = gained >= self.gained
            lost = (energy > _LOST * self.energy) & (seen > _NEGLIGIBLE * self.tol)
            self.deviations = torch.where(lost | ~better, torch.inf, self.deviations).maximum(seen)
        self.energy = energy
        self.gained = torch.where(better, gained, self.gained)
        self.best = torch.where(better, self.value, self.best)
        self.residual = torch.where(better, current, self.residual)

    def _seen(self, energy: Tensor) -> Tensor:
        """Return about the error in deviations, where the preconditioner is good, by ``|R^-T r|^2``."""
        return (energy / self.matrix.level).sqrt()

    def _beyond(self, r: Tensor) -> Tensor:
        """Return the same by the preconditioner with the least damping; 0 where there is none."""
        if self.deepest is None:
            return torch.zeros_like(self.norm)
        return self._seen(self.deepest.inverse_t(r).square().sum(dim=0))

    def _residual(self) -> Tensor:
        """``b - M w`` of the present value, in an order that keeps directions far below the roundoff of M."""
        self.products += 1
        return self.matrix.residual(self.y, self.value)

    def open(self) -> None:
        """Begin a cycle on ``B u = R^-T r`` from u = 0."""
        if not self.deep and bool(((self._beyond(self.r) > self.tol) & (self._seen(self.energy) <= self.tol)).any()):
            self.deep = True
            self.energy = self.root.inverse_t(self.r).square().sum(dim=0)
            self.notes.append("the rest was below the roundoff of the matrix; went on with less damping")
        self.cycling, self.start, self.before = True, self.r.norm(dim=0) / self.norm, self.energy
        self.target = torch.full_like(self.start, torch.inf if self.predictions else 0.95 * self.tol)
        self.s = self.root.inverse_t(self.r).clone()
        self.d, self.u = self.s.clone(), torch.zeros_like(self.s)
        self.recurrence = self.s.square().sum(dim=0)
        self.active = ~self._met(self.start) & (self.start > 0)
        self.coefficients = []

    def step(self) -> bool:
        matrix, level, energy, active = self.matrix, self.matrix.level, self.recurrence, self.active
        p = self.root.inverse(self.d)
        gram, squares = matrix.tall.gram(p)
        self.products += 1
        ridge, lengths = self._ridge(p)
        curvature = squares + level * lengths
        product = self.root.inverse_t(gram.add_(ridge, alpha=level))
        alpha, usable, finite = descend(self.u, self.s, self.d, product, curvature, energy, active)
        following = self.s.square().sum(dim=0)
        beta = turn(self.d, self.s, following, energy, usable)
        taken = self.remaining.add(alpha * energy)
        self.coefficients.append(torch.stack([alpha, beta]))
        floor = self._roundoff()
        # what a step leaves that took nearly all may lie in directions that no Ritz value has seen: one more then
        steep = following < _STEEP * energy
        estimate, rounded = (taken / level).sqrt().masked_fill(steep, torch.inf), following <= floor
        self.recurrence = following
        self.current = self.root.multiply_t(self.s).norm(dim=0) / self.norm
        self.energy = torch.where(usable, following, self.energy)
        ending = rounded if self.predictions else (self.current <= self.target) & ~steep
        self._go_on(estimate, usable, rounded)
        fine, any_ending, going_on, self.current_on_cpu = fetched(
            finite, (usable & ending).any(), self.active.any(), self.current
        )
        require_finite(fine)
        if bool(any_ending):
            left = torch.maximum(following, floor) / (least_ritz_value(self.coefficients) * level)
            estimate = torch.where(ending, left.sqrt(), estimate)
            self._go_on(estimate, usable, rounded)
            going_on = self.active.any()
        self.iterations += 1
        if not bool(going_on):
            self.close_cycle()
        return True

    def _go_on(self, estimate: Tensor, usable: Tensor, rounded: Tensor) -> None:
        """Work out which columns have not ended.

        :param estimate: the distance of predictions, of columns that are ``usable``; :param rounded: columns that
            cannot be told from rounding.
        """
        deviations = torch.where(usable, estimate, self.deviations)
        self.deviations = torch.where(self.energy == 0, 0.0, deviations)  # of columns without any residual
        self.active = usable & ~rounded & ((self.deviations > self.right) | (self.current > self.target))

    def _ridge(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``Kzz p`` and ``p^T Kzz p`` of each column, the latter not negative."""
        if not isinstance(self.matrix.kzz, Tensor):
            product = self.matrix.kzz_matmul(vectors)
            return product, (vectors * product).sum(dim=0).clamp(min=0)
        root = root_of(self.matrix)
        lower = root @ vectors
        return root.mT @ lower, lower.square().sum(dim=0)

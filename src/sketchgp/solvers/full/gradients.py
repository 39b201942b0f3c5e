"""Conjugate gradients at work: cycles of the recurrence, each from the true residual.

A solve may be for a goal of energies (:mod:`sketchgp.solvers.energy`) beside the residual.  Float32 products lose
energies in the directions of the least eigenvalues, which a residual hardly shows: eigenvalues of the Lanczos matrix
(:class:`~sketchgp.solvers.recurrence.EigenvalueWatch`), or float64 products, tell whether they did.

The recurrence ``r -= alpha A p`` keeps the rounding error of every product, and drifts away from the true residual
``b - A w``.  Going on below their difference is in vain.  Van der Vorst and Ye, "Residual replacement strategies for
Krylov subspace iterative methods" (SIAM J. Sci. Comput. 22, 2000), bound it; here it is measured in rows drawn once,
since bounds are far too large in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...devices import fetched, queued
from ...errors import InputError, NumericalError
from ...operators import LowRankPlusDiagonal
from ...operators.substitution import cholesky_solve
from ...random_streams import generator
from ...report import Reason
from ...settings import memory_budget
from ...space import Space
from ..certificate import Certificate
from ..energy import CERTAIN, Goal, RadauBound, RemainingEnergy
from ..loop import Cycles, Outcome, require_finite
from ..recurrence import EigenvalueWatch, LanczosRecord, descend, turn
from ..system import System
from .cholesky import factor_bytes, factorized
from .prediction_tolerance import SAFETY, CertifiedTolerance, FollowedPoints, PosteriorTolerance, RowErrors

EXACT = 1e-13  # relative residual beyond which float64 has nothing more to say about a variance
_ROWS = 64  # that drift is measured in: the estimate's standard deviation is a tenth
_LOOK_EVERY = 8  # float32 iterations between two looks at rows of the true residual
_LEFT_ALONE = 100  # the same where Lanczos coefficients are wanted, which a new cycle would end
_LONG = 100  # iterations of a float32 cycle: to a goal of energies, another one would take as long
_GONE = 0.05  # of its residual, by which rounding has taken a recurrence off: a new cycle early on costs few iterations
_CYCLE_REDUCTION = 1e-4  # a float32 recurrence is not trusted to reduce the residual further than this
_GROWTH = 0.1  # a recurrence residual that grew above its least by this over the unit roundoff is diverging
_LOST = 4.0  # of the true residual over that of the recurrence
_REFINEMENTS = 3  # solutions by a factor: the first, and what refines it
_WIDE = 64  # columns up to which the rounded and the unrounded solution are checked by one product
_NO_LESS = "Float64 allows no less, by a factorization either: raise the noise, or lower the output scale."
_NOT_DEFINITE = "met a direction of non-positive curvature: the matrix is not positive definite"


class Gradients(Cycles):
    """Cycles of conjugate gradients, each from the true residual, on a system or a batch of them.

    :param choices: the solver, with its tolerance, a relative residual, ``"posterior"`` or ``"certified"``.
    :param below: whether the preconditioner lies below the matrix.
    :param goal: energies that every column is to come to beside the tolerance, which is a residual then.
    :param followed: points for ``tol="posterior"``; None for some of the system's own.
    :param lanczos_columns: columns whose coefficients are kept, and with ``keep_vectors`` their Lanczos vectors.

    :ivar exact: whether products are float64 ones.
    :ivar bounds: that are certain of the best value, ``(3, ..., t)``.
    """

    name = "ConjugateGradients"
    saved: tuple[str, ...] = (
        "value", "r", "residual", "rounded_residual", "best", "best_residual", "before", "current", "exact",
        "system.products", "cycling", "verified", "bounds", "index", "s", "d", "p", "sz", "active",
        "target", "least_target", "least", "steps", "lanczos.coefficients", "warm",
    )  # fmt: skip
    vectors = ("value", "r", "best", "s", "d", "p")

    def __init__(
        self,
        choices: Any,
        system: System,
        rhs: Tensor,
        preconditioner: LowRankPlusDiagonal | None,
        below: bool = False,
        goal: Goal | None = None,
        followed: FollowedPoints | None = None,
        lanczos_columns: int = 0,
        keep_vectors: bool = False,
    ) -> None:
        space = Space.of(system.n)
        batch = torch.broadcast_shapes(rhs.shape[:-2], system.operator.batch_shape)
        own = space.own(rhs).to(torch.float64)
        super().__init__(own.expand(*batch, *own.shape[-2:]), space)
        self.exact = choices.precision == "float64" or system.dtype == torch.float64
        self.system, self.preconditioner = system, preconditioner
        self.certificate = Certificate(system, preconditioner, below, space)
        self.goal, self.energy = goal, RemainingEnergy()
        self.bound = RadauBound(self._least_eigenvalue().expand_as(self.norm).clone())
        self.out_dtype, self.size, self.data_rows, self.matrix_entries = rhs.dtype, system.n, system.n, system.n**2.0
        tol = choices.tol or 1e-3
        self.asked: float | str = 1e-3 if goal is not None and isinstance(tol, str) else tol
        self._tol = torch.full_like(self.norm, 0.0 if isinstance(self.asked, str) else self.asked)
        self.predictions = self._predictions(followed) if isinstance(self.asked, str) else None
        changed = () if self.predictions is None else self.predictions.changed
        self.saved = (*Gradients.saved, *(f"predictions.{name}" for name in changed))
        self.lanczos = LanczosRecord(self.b, space, rhs.dtype, lanczos_columns, keep_vectors)
        self.watch = EigenvalueWatch(torch.zeros_like(self.norm))
        self.initial: Tensor | None = None
        self.watched, self.lost = self.by_energy, False
        order = torch.randperm(system.n, generator=generator(0, "rows of residuals"))
        self.drift_rows = order[:_ROWS].sort().values.to(system.noise.device)
        may_factorize = goal is None and not lanczos_columns and not choices.limited and not space.shared
        self.factor_memory = memory_budget.value(rhs.device) if may_factorize else 0
        self.advice = ""  # where a factorization has not sufficed
        self.steps = 0  # of the cycle
        self.warm = False
        none = self.norm[..., :0]
        self.sz = self.target = self.least_target = self.least = none
        self.open_columns: Tensor | None = None  # columns of the cycle that have not ended, on the CPU, once known
        self.s = self.d = self.p = self.b[..., :0]
        self.active, self.index = none > 0, torch.arange(0)

    # --- what it is to come to ------------------------------------------------------------------------------

    def _predictions(self, followed: FollowedPoints | None) -> CertifiedTolerance:
        if self.asked == "posterior":
            followed = followed or FollowedPoints.choose(self.system)
            weights = self.space.own(followed.covariances / followed.deviations(self.system).unsqueeze(-2))
            rows = RowErrors(self.system, self.preconditioner, self.space)
            return PosteriorTolerance(self.norm, self.certificate, weights, rows)
        if not self.certificate.known:
            raise InputError(
                "tol='certified': nothing is certain of a matrix whose entries are rounded to float32, or whose "
                "noise is at their rounding; use tol='posterior'."
            )
        return CertifiedTolerance(self.norm, self.certificate)

    @property
    def tol(self) -> Tensor:
        """Tolerance of the relative residual, ``(..., t)``: as asked, or as predictions need it by what is known."""
        return self._tol if self.predictions is None else self.predictions.tolerance

    @property
    def by_energy(self) -> bool:
        """Return whether there is a goal of energies; one of an infinite share is no more than a residual."""
        return self.goal is not None and math.isfinite(self.goal.share)

    def _done(self, residual: Tensor) -> Tensor:
        """Return which columns are where they are to come to."""
        return self._within(residual) & self._explained(residual)

    def _within(self, residual: Tensor) -> Tensor:
        """Return which columns are at the tolerance."""
        if self.predictions is None:
            return residual <= self.tol
        return self.predictions.met(residual, self.bounds[0])

    def _explained(self, residual: Tensor) -> Tensor:
        """Return which columns have come to the goal, if there is one."""
        if self.goal is None:
            return torch.ones_like(residual, dtype=torch.bool)
        return (self.goal.error(self.taken, self.remaining) <= self.goal.share) | (residual <= EXACT)

    @property
    def _aimed(self) -> Tensor:
        """Residual that the recurrence of a cycle is to come to."""
        return (0.95 if self.exact and self.out_dtype == torch.float64 else 0.5) * self.tol

    def _converged(self) -> bool:
        """Return whether the value that is returned is at the tolerance."""
        return bool(self._within(self.best_residual).all())

    def _reached(self) -> Reason:
        """Return why a solve ends that has come where it was to come to."""
        if self.predictions is not None:
            return Reason.REACHED if self._converged() else Reason.ROUNDED
        return Reason.ROUNDED if bool((self.rounded_residual > self.tol).any()) else Reason.REACHED

    # --- cycles ---------------------------------------------------------------------------------------------

    def begin(self, initial: Tensor | None) -> Tensor:
        self.value, self.r = torch.zeros_like(self.b), self.b.clone()
        if initial is not None:
            start = self.space.own(initial).to(self.out_dtype).to(torch.float64)  # returned where no step is taken
            self.value = start.expand_as(self.b).clone()
            self.r = self.b - self.space.product(self.system.accurate_product, self.value)
        self.initial, self.warm = initial, initial is not None
        self.taken = self.space.dot(self.value, self.b + self.r)
        self.residual = self.rounded_residual = self.current = self.space.norm(self.r) / self.norm
        self.best, self.best_residual = self.value.clone(), self.residual
        self.bounds = self._unbounded() if self.by_energy else self._bounds_of(self.best, self.r)
        self.before, self.cycling = torch.full_like(self.residual, torch.inf), False
        if self.predictions is not None:
            self.predictions.begin(self.residual)
        self.remaining = self._at_most()
        return self.estimate()

    def iterate(self) -> Tensor:
        if not self.cycling:
            return self.value
        value = self.value.clone()
        value[..., self.index] += self.d
        return value

    def reached(self) -> Reason | None:
        if self.lost and not self.by_energy:
            return Reason.ROUNDED
        careful = not self.exact and self.goal is not None and self.goal.careful
        if careful and bool(self._done(self.residual).all()):
            self._change_to_float64()
            self.before = torch.full_like(self.residual, torch.inf)
        return self._reached() if bool(self._done(self.residual).all()) else None

    def stuck(self) -> bool:
        """Go on with float64 products where float32 ones do not help, and are all that is to blame."""
        long = self.by_energy and not self.exact and self.steps > _LONG
        open_columns = ~self._done(self.residual)
        if not long and not bool((self.residual > 0.5 * self.before)[open_columns].any()):
            return False
        if self.exact:
            return True
        trouble = "left much after a long cycle" if long else "stopped reducing the true residual"
        self._change_to_float64()
        self.notes.append(f"float32 products {trouble}; went on with float64 ones")
        return False

    def _change_to_float64(self) -> None:
        """Go on with float64 products, and forget the energies that float32 ones have told of."""
        self.exact, self.energy, self.remaining = True, RemainingEnergy(), self._at_most()
        self.taken = self.space.dot(self.value, self.b + self.r)

    def open(self) -> None:
        self.before, self.steps = self.residual, 0
        self.least_target = (0.0 if self.exact else _CYCLE_REDUCTION) * self.residual
        self.target = torch.maximum(self._aimed, self.least_target)
        self.index, self.open_columns = torch.arange(self.b.shape[-1], device=self.b.device), None
        self.s, self.d = self.r.clone(), torch.zeros_like(self.b)
        self.p = self._precondition(self.s).clone()
        self.sz = self.space.dot(self.s, self.p)
        self.current = self.least = self.residual.clone()
        self.active = self.current > self.target
        if self.goal is not None:
            self.target = _CYCLE_REDUCTION * self.residual if not self.exact else torch.zeros_like(self.target)
            self.active = ~self._done(self.residual)
        if self.iterations == 0:
            self.lanczos.begin(self.p, self._sizes())
        self.watch.begin()
        self.bound.begin()
        self.cycling = bool(self.active.any())  # else what is open is at its target: rounding is all that is left

    def verify(self) -> None:
        """Find the true residual of the value; withdraw estimates that are of another iterate."""
        by_recurrence, aimed = self.current, self._aimed
        self._measure()
        reached = torch.minimum(by_recurrence, self.residual) <= aimed
        if self.predictions is not None and bool((reached & ~self._done(self.residual)).any()):
            self.predictions.margin *= 0.3
        if self.goal is not None:
            lost = self.residual > _LOST * by_recurrence
            self.remaining = torch.minimum(self.remaining.masked_fill(lost, torch.inf), self._at_most())

    def _begin_anew(self) -> None:
        """Leave a cycle whose products were with another matrix.

        What comes of that is far off in the directions of the least eigenvalues, and takes longer to mend than the
        solve does.
        """
        self.exact, self.energy = True, RemainingEnergy()
        self.begin(self.initial)
        self.notes.append("float32 products were with another matrix, by its eigenvalues; went on with float64 ones")

    # --- steps ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        first_cycle = self.steps == self.iterations and not self.warm
        recorded = first_cycle and self.lanczos.columns > 0
        self._narrow()
        index, p = self.index, self.p
        product = self.space.product(self.system.accurate_product if self.exact else self.system.product, p)
        curvature = self.space.dot(p, product)
        alpha, usable, finite = descend(self.d, self.s, p, product, curvature, self.sz, self.active)
        broken = (self.active & ~usable & (self.sz != 0)).any()
        z = self._precondition(self.s)
        size, following = self.space.norm_and_dot(self.s, z)
        self.current = self.current.clone()
        self.current[..., index] = size / self.norm[..., index]
        if self.predictions is not None:
            self.predictions.advance(alpha, p, self.s, z, following, index, self.current)
            self.target = torch.maximum(self.least_target, self._aimed)
        beta = turn(p, z, following, self.sz, usable)
        if self.goal is not None:
            least = CERTAIN * self.bound.add(alpha, beta, following, index) if self.exact else torch.zeros_like(alpha)
            self._follow_energy(alpha * self.sz, least, usable, index)
        going_on = self.current > self.target
        if self.goal is not None:
            going_on &= ~((self.current <= self._aimed) & self._explained(self.current))
        self.active = usable & going_on[..., index]
        self.sz = following
        if recorded and (note := self.lanczos.add(alpha, beta, z, self._sizes(), index)):
            self.notes.append(note)
        self.iterations += 1
        self.steps += 1
        self.least = torch.minimum(self.least, self.current)
        growth = _GROWTH / torch.finfo(torch.float64 if self.exact else self.system.dtype).eps
        looked_at = not self.exact and self.steps % (_LEFT_ALONE if recorded else _LOOK_EVERY) == 0
        drifted = self._drifted() if looked_at else torch.zeros_like(self.active)
        growing, other = (self.current > growth * self.least).any(), torch.zeros_like(broken)
        if self.watched and not self.exact:
            other = broken
            if self.certificate.factor is not None:  # none of the eigenvalues is less than 1
                self.watch.add(alpha, beta, index)
                other = broken | self.watch.below
        flags = torch.stack([finite, broken, growing, (self.active & drifted).any(), other])
        ended = self._look(flags)
        if self.lost and self.by_energy:
            self._begin_anew()
        elif ended or self.lost:
            self.close_cycle()
        return True

    def _narrow(self) -> None:
        """Leave finished columns out of the products, where they are half of all."""
        if self.open_columns is None:
            self.open_columns = self._still_active().cpu()
        keep = self.open_columns.nonzero().squeeze(-1)
        if len(keep) > len(self.index) // 2:
            return
        keep = queued(keep, self.index.device)
        self.value[..., self.index] += self.d
        self.index, self.s, self.p = self.index[keep], self.s[..., keep], self.p[..., keep]
        self.d, self.sz, self.active = torch.zeros_like(self.s), self.sz[..., keep], self.active[..., keep]

    def _still_active(self) -> Tensor:
        """Return the columns worked on in which any system has not ended."""
        return self.active.reshape(-1, len(self.index)).any(dim=0)

    def _precondition(self, vectors: Tensor) -> Tensor:
        if self.preconditioner is None:
            return vectors
        return self.space.apply_inverse(self.preconditioner, vectors)

    def _look(self, flags: Tensor) -> bool:
        """Return whether the cycle ends after an iteration; all numbers are fetched from the device at once.

        :param flags: ``(5,)`` whether numbers are finite, a curvature was not positive, a residual grows, rounding has
            taken over, or made another matrix.
        :raises NumericalError: for NaN or infinity.
        """
        facts, keep, self.current_on_cpu = fetched(flags, self._still_active(), self.current)
        finite, broken, growing, drifting, self.lost = facts.bool().tolist()
        require_finite(finite)
        if self.exact and broken and _NOT_DEFINITE not in self.notes:
            self.notes.append(_NOT_DEFINITE)
        self.open_columns = keep.bool()
        return not bool(self.open_columns.any()) or growing or drifting

    def _drifted(self) -> Tensor:
        """Return the columns worked on whose residual rounding has moved so far that going on is in vain.

        That is by a twentieth of it, and so far that where it is to come to would not do.  It is estimated from some
        rows of the true residual.
        """
        rows, space, index = self.drift_rows, self.space, self.index
        product = self.system.sampled_rows(rows, space.whole(self.iterate()[..., index]))
        difference = space.rows(self.b[..., index], rows) - product - space.rows(self.s, rows)
        gap = difference.norm(dim=-2) * (self.system.n / len(rows)) ** 0.5 / self.norm[..., index]
        return gap > torch.maximum(_GONE * self.current, 1.4 * self._aimed)[..., index]

    def _sizes(self) -> Tensor:
        """Norms of the residuals worked on in the inverse preconditioner; infinite where one has ended."""
        return torch.where(self.active & (self.sz > 0), self.sz, torch.inf).sqrt()

    # --- energies -------------------------------------------------------------------------------------------

    def _at_most(self) -> Tensor:
        """Bound the energy that remains by the true residual; infinite where no bound is known."""
        least = torch.zeros_like(self.norm[..., :1]) if self.goal is None else self.goal.least
        return torch.where(self.residual == 0, 0, (self.residual * self.norm).square() / least)

    def _least_eigenvalue(self) -> Tensor:
        """Bound the eigenvalues of the preconditioned matrix from below, ``(..., 1)``; 0 where nothing is known.

        A diagonal of P above the noise makes them small in directions that K has none of, where ``F F^T`` is below K,
        or little above as that of a K which has moved.
        """
        if self.goal is None:
            return torch.zeros_like(self.norm[..., :1])
        if self.preconditioner is None:
            return self.goal.least
        if self.certificate.factor is not None:
            return self.certificate.slack.clamp(min=0)
        share = (self.system.noise / self.preconditioner.diagonal_part).amin(dim=-1, keepdim=True)
        return torch.where(share < 1, share, 0)

    def _follow_energy(self, taken: Tensor, least: Tensor, usable: Tensor, index: Tensor) -> None:
        """Count what an iteration took off the energy of its columns, and estimate what is still to come.

        :param least: of the estimate.
        """
        full = torch.zeros_like(self.norm)
        full[..., index] = taken
        self.taken = self.taken + full
        estimate = torch.maximum(self.energy.add(full)[..., index], least)
        self.remaining = self.remaining.clone()
        self.remaining[..., index] = torch.where(usable, estimate, self.remaining[..., index])

    # --- true residuals and bounds --------------------------------------------------------------------------

    def _measure(self) -> None:
        """Compute the residual of the iterate, and of the value rounded as it will be returned, in float64.

        One product serves both; blocks too wide for that go on from the rounded value instead.
        """
        rounded = self.value.to(self.out_dtype).to(torch.float64)
        width = self.b.shape[-1]
        both = self.out_dtype != torch.float64 and width <= _WIDE
        if not both:
            self.value = rounded
        stacked = torch.cat([rounded, self.value], dim=-1) if both else rounded
        product = self.space.product(self.system.accurate_product, stacked)
        r = self.b.repeat(*(1 for _ in self.b.shape[:-1]), 2 if both else 1) - product
        residual = self.space.norm(r) / self.norm.repeat(*(1 for _ in self.norm.shape[:-1]), 2 if both else 1)
        self.finite(residual)
        self.rounded_residual = residual[..., :width]
        better = (self.rounded_residual <= self.best_residual) | self.by_energy  # a goal is judged of the latest
        self.bounds = torch.where(better, self._bounds_of(rounded, r[..., :width]), self.bounds)
        self.best = torch.where(better.unsqueeze(-2), rounded, self.best)
        self.best_residual = torch.where(better, self.rounded_residual, self.best_residual)
        self.residual, self.r = residual[..., -width:], r[..., -width:].contiguous()

    def _bounds_of(self, value: Tensor, r: Tensor) -> Tensor:
        """Bound a value by its residual; infinite where nothing is certain."""
        return self.certificate.bounds(self.b, value, r) if self.certificate.known else self._unbounded()

    def _unbounded(self) -> Tensor:
        return self.norm.new_full((3, *self.norm.shape), torch.inf)

    def product_of(self, value: Tensor) -> Tensor | None:
        """Return A times a value, in float64, where the latest true residual is of it."""
        verified = self.verified and not self.cycling
        if not verified or not self.space.all(torch.equal(self.space.own(value), self.value)):
            return None
        return self.space.whole(self.b - self.r)

    # --- the end --------------------------------------------------------------------------------------------

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        if self.cycling or not self.verified:
            self.close_cycle()
        if reason in (Reason.ITERATIONS, Reason.TIME) and bool(self._done(self.residual).all()):
            reason = self._reached()
        needed = factor_bytes(self.size, self.b.shape[:-2].numel())
        if reason in (Reason.ITERATIONS, Reason.STAGNATED) and not quick and needed <= self.factor_memory:
            reason = self._finish_by_factor(reason)
        dtype = str(self.system.dtype).removeprefix("torch.")
        facts: dict[str, Any] = {"tol": self.asked, "dtype": dtype, **self.certificate.facts(self.bounds)}
        facts["details"] = {"precision": "float64" if self.exact else dtype}
        if self.predictions is not None:
            facts |= self.predictions.facts(self.best_residual, self.bounds[0])
        converged = self._converged()
        if self.goal is not None:
            converged = converged and bool(self._explained(self.residual).all())
            error = self.goal.error(self.taken, self.remaining)
            facts["variance_error"] = error.masked_fill(self.residual <= EXACT, 0).reshape(-1).cpu()
        return Outcome(self.space.whole(self.best), self.best_residual.reshape(-1), converged, reason, facts)

    def _finish_by_factor(self, reason: Reason) -> Reason:
        """Finish by a Cholesky factorization what conjugate gradients could not, refined as long as that helps.

        :param reason: why conjugate gradients ended.
        :returns: why the solve ends now.
        """
        ended = f"conjugate gradients {reason} after {self.iterations} iterations at a residual of"
        reached = f"{float(self.best_residual.max()):.1e}"
        try:
            matrix, root = factorized(self.system)
        except NumericalError as error:
            self.notes.append(f"{ended} {reached}, and the matrix is not positive definite in float64")
            self.advice = str(error).partition(" [")[0]  # the name of its row is left out
            return reason
        self.exact, self.advice = True, _NO_LESS
        self.value, self.r = torch.zeros_like(self.b), self.b
        for _ in range(_REFINEMENTS):
            before = self.best_residual
            self.value = self.value + cholesky_solve(self.r, root)
            self._measure()
            if not bool((self.best_residual <= 0.5 * before).any()):
                break
        if isinstance(self.predictions, PosteriorTolerance):
            r = self.b - matrix @ self.best
            of_rows = r - self.certificate.noise * cholesky_solve(r, root)  # K A^-1 r
            self.predictions.errors = SAFETY * (of_rows.abs() / self.certificate.noise.sqrt()).amax(dim=-2)
        self.notes.append(f"{ended} {reached}; a Cholesky factorization in float64 finished the solve")
        return self._reached() if self._converged() else Reason.STAGNATED

    # --- counts and checkpoints -----------------------------------------------------------------------------

    @property
    def tally(self) -> dict[str, float]:
        return {"products": self.system.products}

    @property
    def entries(self) -> float:
        return float(self.system.products) * self.size**2

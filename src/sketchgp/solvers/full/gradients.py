"""Conjugate gradients at work: cycles of the recurrence, each from the true residual.

Iterative refinement as in Higham, "Accuracy and Stability of Numerical Algorithms", chapter 12.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...devices import fetched, queued
from ...errors import NumericalError
from ...operators import LowRankPlusDiagonal
from ...operators.substitution import cholesky_solve
from ...report import Reason
from ..certificate import Certificate
from ..conjugate_step import NAN, descend, turn
from ..energy import Goal, RemainingEnergy
from ..loop import Outcome
from ..problem import System
from .aim import SAFETY, Aim, Rows
from .another_matrix import EigenvalueWatch
from .by_energy import EXACT, ByEnergy
from .cholesky import factor_bytes, factorized
from .drift import Drift
from .lanczos_record import LanczosRecord
from .rounded_inverse import RoundedInverse

_LOOK_EVERY = 8  # float32 iterations between two looks at rows of the true residual
_LEFT_ALONE = 100  # the same where Lanczos coefficients are wanted, which a new cycle would end
_LONG = 100  # iterations of a float32 cycle: to a goal of energies, another one would take as long
_NEAR, _THERE = 0.95, 0.98  # of the tolerance: where it is looked for what rounding adds, and what both may come to
_GONE = 0.05  # of its residual, by which rounding has taken a recurrence off: a new cycle early on costs few iterations
_CYCLE_REDUCTION = 1e-4  # a float32 recurrence is not trusted to reduce the residual further than this
_GROWTH = 0.1  # a recurrence residual that grew above its least by this over the unit roundoff is diverging
_LOST = 4.0  # of the true residual over that of the recurrence
_REFINEMENTS = 3  # solutions by a factor: the first, and what refines it
_WIDE = 64  # columns up to which the rounded and the unrounded solution are checked by one product


class Gradients(ByEnergy):
    """Cycles of conjugate gradients, each from the true residual, on a system or a batch of them."""

    name = "ConjugateGradients"
    saved = (
        "value", "r", "residual", "rounded_residual", "best", "best_residual", "before", "current", "exact",
        "system.products",
        "cycling", "verified", "_of_best", "_uncertain", "index", "s", "d", "p", "sz", "active", "target",
        "least_target", "least", "steps",
        "lanczos.coefficients", "warm", "trail",
    )  # fmt: skip
    vectors = ("value", "r", "best", "_uncertain", "s", "d", "p")

    def __init__(
        self,
        tol: float | str,
        accurate: bool,
        system: System,
        rhs: Tensor,
        preconditioner: LowRankPlusDiagonal | None,
        lanczos_columns: int,
        goal: Goal | None,
        certificate: Certificate,
        followed: Tensor | None = None,
        rows: Rows | None = None,
        keep_vectors: bool = False,
    ) -> None:
        super().__init__()
        self.goal, self.energy, self.certificate = goal, RemainingEnergy(), certificate
        self.system, self.preconditioner, self.space = system, preconditioner, certificate.space
        self.out_dtype = rhs.dtype
        batch = torch.broadcast_shapes(rhs.shape[:-2], system.operator.batch_shape)
        own = self.space.own(rhs).to(torch.float64)
        self.b = own.expand(*batch, *own.shape[-2:])
        norm = self.space.norm(self.b)
        if not bool(torch.isfinite(norm).all()):
            raise NumericalError("The right-hand side of a linear solve holds NaN or infinity.", see="nan")
        self.norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.asked, self._tol = tol, torch.full_like(self.norm, 0.0 if isinstance(tol, str) else tol)
        self.aim = Aim(self.norm, certificate, followed, rows) if isinstance(tol, str) else None
        self.size, self.device = system.n, rhs.device
        self.lanczos = LanczosRecord(self.b, self.space, rhs.dtype, lanczos_columns, keep_vectors)
        self.exact = accurate or system.dtype == torch.float64
        self.watch, self.begun = EigenvalueWatch(torch.zeros_like(self.norm)), None
        self.watched, self.lost = self.by_energy, False
        self.inverse: RoundedInverse | LowRankPlusDiagonal | None = None  # that of float32 iterations
        self.drift = Drift(system, self.space)
        self.verified = True  # whether the true residual is that of the value
        self.factor_memory, self.factorized = 0, False  # bytes that a factorization may take, and whether there is one
        self.steps = 0  # of the cycle
        self.warm = False
        self._uncertain, self._of_best = None, norm[..., :0]
        self.told: Tensor | None = None  # the present residual, on the CPU
        self.keep: Tensor | None = None  # which columns of the cycle have not ended, on the CPU; None while not known
        self.s = self.d = self.p = self.b[..., :0]
        self.sz = self.target = self.least_target = self.least = norm[..., :0]
        self.active, self.index = norm[..., :0] > 0, torch.arange(0)

    @property
    def tol(self) -> Tensor:
        """Of the relative residual, ``(..., t)``: as asked, or as it takes by what is known."""
        return self._tol if self.aim is None else self.aim.tolerance

    def begin(self, initial: Tensor | None) -> Tensor:
        self.value, self.r = torch.zeros_like(self.b), self.b.clone()
        if initial is not None:
            start = self.space.own(initial).to(self.out_dtype).to(torch.float64)  # returned where no step is taken
            self.value = start.expand_as(self.b).clone()
            self.r = self.b - self.space.product(self.system.accurate_product, self.value)
        self.begun, self.warm = initial, initial is not None
        self.taken = self.space.dot(self.value, self.b + self.r)
        self.residual = self.rounded_residual = self.current = self.space.norm(self.r) / self.norm
        self.best, self.best_residual = self.value.clone(), self.residual
        self._uncertain = self.r
        self.before, self.cycling = torch.full_like(self.residual, torch.inf), False
        if self.aim is not None:
            self.aim.begin(self.residual)
        self.remaining = self._at_most()
        return self.estimate()

    def estimate(self) -> Tensor:
        return self.current.reshape(-1) if self.told is None else self.told

    def weights(self) -> Tensor:
        return self.space.whole(self._iterate())

    def _iterate(self) -> Tensor:
        if not self.cycling:
            return self.value
        value = self.value.clone()
        value[..., self.index] += self.d
        return value

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """Where a cycle has ended: go on, go on with float64 products, or end."""
        if self.cycling:
            return None
        if self.lost and not self.by_energy:
            return Reason.ROUNDED
        open_columns = ~self._done(self.residual)
        if not bool(open_columns.any()) and not self.exact and self.goal is not None and self.goal.careful:
            self._doubt()
            open_columns, self.before = ~self._done(self.residual), torch.full_like(self.residual, torch.inf)
        if not bool(open_columns.any()):
            return self._reached()
        slow = self.by_energy and not self.exact and self.steps > _LONG
        if slow or bool((self.residual > 0.5 * self.before)[open_columns].any()):
            if self.exact:
                return Reason.STAGNATED
            self._doubt()
            what = "left much after a long cycle" if slow else "stopped reducing the true residual"
            self.notes.append(f"float32 products {what}; went on with float64 ones")
        self._open()
        self.cycling = bool(self.active.any())  # else what is open is at its target: rounding is all that is left
        return None if self.cycling else Reason.STAGNATED

    def _done(self, residual: Tensor) -> Tensor:
        """Which columns are where they are to come to."""
        if self.aim is not None:
            return self.aim.met(residual, self.certain[0])
        return (residual <= self.tol) & self._explained(residual)

    @property
    def _aimed(self) -> Tensor:
        """The recurrence's residual that a cycle aims at."""
        return (0.95 if self.exact and self.out_dtype == torch.float64 else 0.5) * self.tol

    def _reached(self) -> Reason:
        if self.aim is not None:
            return Reason.REACHED if self._converged() else Reason.ROUNDED
        return Reason.ROUNDED if bool((self.rounded_residual > self.tol).any()) else Reason.REACHED

    def _converged(self) -> bool:
        """Whether the value that is returned is what was asked for."""
        if self.aim is not None:
            return bool(self.aim.met(self.best_residual, self.certain[0]).all())
        return bool((self.best_residual <= self.tol).all())

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        if self.cycling or not self.verified:
            self._close()
        if reason in (Reason.ITERATIONS, Reason.TIME) and bool(self._done(self.residual).all()):
            reason = self._reached()
        needed = factor_bytes(self.size, self.b.shape[:-2].numel())
        if reason in (Reason.ITERATIONS, Reason.STAGNATED) and not quick and needed <= self.factor_memory:
            reason = self._by_factor(reason)
        residual = self.best_residual.reshape(-1)
        dtype = str(self.system.dtype).removeprefix("torch.")
        facts: dict[str, Any] = {"tol": self.asked, "dtype": dtype, **self.certificate.facts(self.certain)}
        facts["details"] = {"precision": "float64" if self.exact else dtype}
        if self.aim is not None:
            facts |= self.aim.facts(self.best_residual, self.certain[0])
        converged = self._converged()
        if self.goal is not None:
            converged = converged and bool(self._explained(self.residual).all())
            error = self.goal.error(self.taken, self.remaining)
            facts["variance_error"] = error.masked_fill(self.residual <= EXACT, 0).reshape(-1).cpu()
        return Outcome(self.space.whole(self.best), residual, converged, reason, facts)

    def _by_factor(self, reason: Reason) -> Reason:
        """Finish by a Cholesky factorization what conjugate gradients could not; refine as long as that helps.

        :param reason: why conjugate gradients ended.
        :returns: why the solve ends now.
        """
        ended = f"conjugate gradients {reason} after {self.iterations} iterations at a residual of"
        reached = f"{float(self.best_residual.max()):.1e}"
        try:
            matrix, root = factorized(self.system)
        except NumericalError:
            self.notes.append(f"{ended} {reached}, and the matrix is not positive definite in float64")
            return reason
        self.exact = self.factorized = True
        self.value, self.r = torch.zeros_like(self.b), self.b
        for _ in range(_REFINEMENTS):
            before = self.best_residual
            self.value = self.value + cholesky_solve(self.r, root)
            self._verify()
            if not bool((self.best_residual <= 0.5 * before).any()):
                break
        if self.aim is not None:
            r = self.b - matrix @ self.best
            of_rows = r - self.certificate.noise * cholesky_solve(r, root)  # K A^-1 r
            self.aim.errors = SAFETY * (of_rows.abs() / self.certificate.noise.sqrt()).amax(dim=-2)
        self.notes.append(f"{ended} {reached}; a Cholesky factorization in float64 finished the solve")
        return self._reached() if self._converged() else Reason.STAGNATED

    def product_of(self, value: Tensor) -> Tensor | None:
        """A times a value, in float64, where the latest true residual is of it."""
        verified = self.verified and not self.cycling
        if not verified or not self.space.all(torch.equal(self.space.own(value), self.value)):
            return None
        return self.space.whole(self.b - self.r)

    def _product(self, vectors: Tensor) -> Tensor:
        return self.space.product(self.system.accurate_product if self.exact else self.system.product, vectors)

    def _precondition(self, vectors: Tensor) -> Tensor:
        if self.preconditioner is None:
            return vectors
        if self.exact or self.goal is not None or self.lanczos.columns:  # what P says is taken at its word there
            return self.space.apply_inverse(self.preconditioner, vectors)
        if self.inverse is None:
            self.inverse = RoundedInverse.of(self.preconditioner) or self.preconditioner
        return self.space.apply_inverse(self.inverse, vectors)

    def _verify(self) -> None:
        """The residual of the float64 iterate, and of the value rounded as it will be returned, in float64 products.

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
        if not bool(torch.isfinite(residual).all()):
            raise NumericalError(NAN, see="nan")
        self.rounded_residual = residual[..., :width]
        better = (self.rounded_residual <= self.best_residual) | self.by_energy  # a goal is judged of the latest
        if bool(better.all()):
            self._uncertain = r[..., :width]
        else:
            self.certain = torch.where(better, self._certain(rounded, r[..., :width]), self.certain)
        self.best = torch.where(better.unsqueeze(-2), rounded, self.best)
        self.best_residual = torch.where(better, self.rounded_residual, self.best_residual)
        self.residual, self.r = residual[..., -width:], r[..., -width:].contiguous()

    def _certain(self, value: Tensor, r: Tensor) -> Tensor:
        """What is certain of a value, by its residual, ``(3, ..., t)``; infinite where nothing is."""
        certain = self.certificate
        return (
            certain.bounds(self.b, value, r) if certain.known else self.norm.new_full((3, *self.norm.shape), torch.inf)
        )

    def _open(self) -> None:
        """Begin a cycle on ``A d = r`` from d = 0; it ends when every recurrence residual meets the cycle's target."""
        self.cycling, self.before, self.steps = True, self.residual, 0
        self.target = self._aimed.clone()
        self.least_target = (0.0 if self.exact else _CYCLE_REDUCTION) * self.residual
        self.target = torch.maximum(self.target, self.least_target)
        self.index, self.keep = torch.arange(self.b.shape[-1], device=self.b.device), None
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

    def moved(self) -> None:
        if self.cycling:
            self._close()
            self._open()

    def _close(self) -> None:
        """End the cycle: what it found, with its true residual; an estimate of another iterate is withdrawn."""
        self.value, self.cycling, self.verified = self._iterate(), False, False
        followed, aimed = self.current, self._aimed
        self._verify()
        reached = torch.minimum(followed, self.residual) <= aimed
        if self.aim is not None and bool((reached & ~self._done(self.residual)).any()):
            self.aim.margin *= 0.3
        if self.goal is not None:
            lost = self.residual > _LOST * followed
            self.remaining = torch.minimum(self.remaining.masked_fill(lost, torch.inf), self._at_most())
        self.verified = True

    def _narrow(self) -> None:
        """Leave finished columns out of the products, where they are half of all."""
        if self.keep is None:
            self.keep = self._open_columns().cpu()
        keep = self.keep.nonzero().squeeze(-1)
        if len(keep) > len(self.index) // 2:
            return
        keep = queued(keep, self.index.device)
        self.value[..., self.index] += self.d
        self.index, self.s, self.p = self.index[keep], self.s[..., keep], self.p[..., keep]
        self.d, self.sz, self.active = torch.zeros_like(self.s), self.sz[..., keep], self.active[..., keep]

    def _open_columns(self) -> Tensor:
        """Of the columns worked on, those in which any system has not ended."""
        return self.active.reshape(-1, len(self.index)).any(dim=0)

    def step(self) -> bool:
        first_cycle = self.steps == self.iterations and not self.warm
        recorded = first_cycle and self.lanczos.columns > 0
        self._narrow()
        index, p = self.index, self.p
        product = self._product(p)
        curvature = self.space.dot(p, product)
        alpha, usable, finite = descend(self.d, self.s, p, product, curvature, self.sz, self.active)
        broken = (self.active & ~usable & (self.sz != 0)).any()
        z = self._precondition(self.s)
        size, following = self.space.norm_and_dot(self.s, z)
        self.current = self.current.clone()
        self.current[..., index] = size / self.norm[..., index]
        if self.aim is not None:
            self.aim.follow(alpha, p, index, self.current)
            self.aim.weigh(following, self.s, z, index, self.current)
            self.target = torch.maximum(self.least_target, self._aimed)
        if self.goal is not None:
            self._follow(alpha * self.sz, usable, index)
        going_on = self.current > self.target
        if self.goal is not None:
            going_on &= ~((self.current <= self._aimed) & self._explained(self.current))
        self.active = usable & going_on[..., index]
        near = torch.zeros_like(self.active)
        if self.goal is None and self.aim is None and not self.exact and not recorded:
            near = self.active & (self.current[..., index] <= _NEAR * self.tol[..., index])
        beta = turn(p, z, following, self.sz, usable)
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
        ended = self._look(flags, near, drifted)
        if self.lost and self.by_energy:
            self._begin_anew()
        elif ended or self.lost:
            self._close()
        return True

    def _look(self, flags: Tensor, near: Tensor, drifted: Tensor) -> bool:
        """After an iteration, whether its cycle ends; all that is looked at is fetched at once.

        :param flags: ``(5,)`` whether numbers are finite, a curvature was not positive, a residual grows, rounding has
            taken over, or made another matrix.
        :param near: columns that are to be looked at more closely; :param drifted: those where rounding has.
        :raises NumericalError: for NaN or infinity.
        """
        facts, keep, any_near, self.told = fetched(flags, self._open_columns(), near.any(), self.current)
        finite, broken, growing, drifting, self.lost = facts.bool().tolist()
        if not finite:
            raise NumericalError(NAN, see="nan")
        note = "met a direction of non-positive curvature: the matrix is not positive definite"
        if self.exact and broken and note not in self.notes:
            self.notes.append(note)
        self.keep = keep.bool()
        if bool(any_near):
            self._end(near)
            keep, drift = fetched(self._open_columns(), (self.active & drifted).any())
            self.keep, drifting = keep.bool(), bool(drift)
        return not bool(self.keep.any()) or growing or drifting

    def _drifted(self) -> Tensor:
        """Of the columns worked on, whether rounding has taken the recurrence's residual so far from the true one that
        going on is in vain: by a twentieth of it, and so far that where it is to come to would not do."""
        gap = self._gap(self._iterate())
        allowed = torch.maximum(_GONE * self.current, 1.4 * self._aimed)[..., self.index]
        return gap > allowed

    def _end(self, near: Tensor) -> None:
        """End those of some columns whose value, rounded as it will be returned, is at the tolerance by what rows say
        of it."""
        tol, current = self.tol[..., self.index], self.current[..., self.index]
        gap = self._gap(self._iterate().to(self.out_dtype).to(torch.float64))
        self.active = self.active & ~(near & (torch.hypot(current, 1.25 * gap) <= _THERE * tol))

    def _gap(self, value: Tensor) -> Tensor:
        """Of the columns worked on, how far the recurrence's residual is from a value's, relative, ``(..., t)``."""
        return self.drift.between(self.b[..., self.index], value[..., self.index], self.s) / self.norm[..., self.index]

    def _sizes(self) -> Tensor:
        """Of the columns worked on, the residual's norm in the inverse preconditioner; infinite where one has ended."""
        return torch.where(self.active & (self.sz > 0), self.sz, torch.inf).sqrt()

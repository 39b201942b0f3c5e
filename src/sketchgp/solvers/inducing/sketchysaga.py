"""SketchySAGA: the inducing-point problem by preconditioned stochastic gradients with variance reduction.

References: Rathore, Frangella, Udell, "Have ASkotch: fast methods for large-scale, memory-constrained kernel ridge
regression" (arXiv:2407.10070), section 3.3 and Algorithm 5; Defazio, Bach, Lacoste-Julien, "SAGA" (arXiv:1407.0202).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import count, number, seed, settle, tolerance
from ...errors import InputError, NumericalError
from ...operators import KernelMatrix
from ...preconditioners.row_nystrom import damped, damped_nystrom
from ...preconditioners.smoothness import smoothness
from ...random_streams import generator
from ...report import Reason
from ...space import Space
from ..choices import cut
from ..energy import remaining_change
from ..full.blocks import draw_rows
from ..loop import Outcome, Refined, largest_of, require_finite
from .problem import InducingPointProblem
from .solver import InducingPointSolver

_RANK = 300
_LEAST_ROWS = 1000  # that the preconditioner is made of
_ROWS = 10  # times the rank, where that is more
_LEAST_SAMPLE = 500  # rows that smoothness is estimated on; twice the block where that is more
_BLOCK = 512
_CAUTION = 0.5  # step times smoothness
_RATE = 1.5  # the step times the steps of an epoch, at least, by which the automatic damping is set
_LEAST_TARGET = 2.0  # smoothness that the damping need not go below
_POWERINGS = 6  # products that the smoothness of the noise's term is estimated by
_STALE = 0.5  # step, times the smoothness of the noise's term, times the steps between two of its products
_GROWTH = 10.0  # of the residual over the last true one, at which the steps diverge
_SHRUNK = 12  # times that the step is halved
_SETTLED = 0.1  # of the last true residual: time for the next sweep
_GAP = 4.0  # epochs between two sweeps at least, while the estimate is above the tolerance
_GROWING = 1.5  # epochs of a look at the change of the function, over those of the one before; the first is at _GAP
_PATIENCE = 40.0  # epochs without progress, after which rounding is what is left where the residual is small
_PROGRESS = 0.9  # of the least true residual before
_PLATEAU = 1e-7
_ROUNDED = 1e-9  # of an epoch, which is a sum of steps


@dataclass(frozen=True, kw_only=True)
class SketchySAGA(InducingPointSolver):
    """Solves ``(Kzx Kxz + noise Kzz) W = Kzx y`` by stochastic gradients: for a batch B of b rows::

        new = k(x_B, z) w - y_B
        aux = k(z, x_B) (new - psi_B)
        psi_B = new
        w -= step (P + rho)^-1 (G + (n / b) aux + noise Kzz w)
        G += aux

    where psi holds the residual of every row when it was last seen and ``G = Kzx psi``, so that the gradient's noise
    vanishes at the solution and convergence is linear (arXiv:2407.10070, Theorem F.1).  P is a Nystrom approximation of
    the matrix (with ``noise Kzz``, which the paper leaves out of it), its data part from ten times as many rows as its
    rank.  ``n m`` kernel evaluations an epoch, and half as many again for ``Kzz w``: computed anew at every step it
    would dominate where b is below m, so it is kept for up to m / b steps, as many as its own smoothness allows; it
    changes slowly once preconditioned, and at the solution not at all.  Memory O(n t + m (rank + t)) beside tiles: no
    m x m matrix.  Entries are of x's dtype, vectors and sums float64.

    Every now and then a sweep over all rows computes the true residual, with float64 entries, and starts the table
    anew from it, so that rounding of float32 entries is corrected (iterative refinement).

    ``rho=None`` finds the damping: the least one whose steps, times the steps of an epoch, add up to 1.5 Newton steps
    for the directions that P captures.  Less would slow these, more the ones that P misses.  The step is half the
    inverse smoothness of a batch, measured on other rows than those of P
    (:class:`~sketchgp.preconditioners.row_nystrom.DampedNystrom`).  Steps that diverge all the same are taken back and
    halved, with a note in the report.

    A small residual says little about predictions where the problem is ill-conditioned, so that is not enough to stop:
    sweeps at epochs that grow by half also see how much the function changed since the one before, in the norm that
    bounds predictions, and what is left is extrapolated from that (:mod:`sketchgp.solvers.energy`).  Directions in
    which little has changed yet show in the norm of the residual in P, which counts where it is more.

    A solve returns the best of the iterates whose true residual is known.  In its report ``passes`` are the kernel
    evaluations, those of Kzz, of the start and of the true residuals included, over n m; and ``history`` the estimates
    after each epoch, true residuals where there was a sweep.  The callback is called once an epoch.  Ctrl-C takes one
    more sweep.  A solve that goes on from a checkpoint makes its preconditioner again.

    Choose it to compare with the paper.  :class:`NystromPCG`, with the same memory, gets closer in fewer passes.

    :param tol: relative residual ``||(Kzx Kxz + noise Kzz) w - Kzx y|| / ||Kzx y||`` that every column must reach.
    :param deviations: posterior deviations that no prediction may be off by, as estimated, in every column.
    :param max_epochs: the most epochs of steps.
    :param block_size: b; None is n / 20, at least 16 and at most 512.  Epochs hardly depend on it, the work of the
        preconditioner does: raise it on a GPU.
    :param rank: of P, at most m; None is 300.  More takes fewer epochs.
    :param rho: the damping, in units of the matrix; None finds it.
    :param seed: of every random choice.

    The other parameters are those of :class:`sketchgp.solvers.Budgeted`: ``max_seconds``, ``checkpoint``,
    ``every``.
    """

    adjustable: ClassVar[tuple[str, ...]] = (*InducingPointSolver.adjustable, "deviations", "max_epochs")
    _budget: ClassVar[str] = "max_epochs"

    tol: float = 1e-4
    deviations: float = 0.3
    max_epochs: float = 200.0
    block_size: int | None = None
    rank: int | None = None
    rho: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_budget()
        settle(self, tolerance, "tol")
        settle(self, number, "max_epochs", "deviations", above=0)
        settle(self, number, "rho", above=0, finite=True, optional=True)
        settle(self, count, "block_size", "rank", optional=True)
        settle(self, seed, "seed")

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: for a stream or noise 0; where the choices do not fit the problem of n points and m
        inducing points."""
        super().validate(problem)
        x, _ = problem.tensors(f"{self.name}()")
        if (self.block_size or 0) > len(x):
            raise InputError(
                f"SketchySAGA(block_size={self.block_size}) exceeds the {len(x)} points; choose at most {len(x)}."
            )

    def _method(self, problem: InducingPointProblem) -> Saga:
        return Saga(problem, self)

    def _facts(self, problem: InducingPointProblem, method: Saga) -> dict[str, Any]:
        p = method.p
        more = f"or the rank (now {p.rank}), and go on with initial= or a checkpoint"
        return {
            "preconditioner": f"Nystrom rank {p.rank}, damping {p.damping:.2e}, batches of {method.block_size}",
            "rank": p.rank,
            "dtype": str(method.tall.dtype).removeprefix("torch."),
            "notes": method.notes + cut("rank", self.rank, problem.m, "inducing points"),
            "remedies": {Reason.EPOCHS: f"Raise max_epochs, {more}."},
        }


class Saga(Refined):
    """:class:`SketchySAGA` at work; a step is one on a block of rows, a window an epoch.

    The estimate of an epoch is that of the table's gradient; where a sweep ended it, the true residual; and where its
    steps were taken back, the true residual of the iterate from which the next epoch goes on.

    :param problem: one of tensors, with noise.

    :ivar w: the iterate ``(m, t)``, like all of its shape float64.
    :ivar psi: the table: the residual of each row when it was last seen, ``(n, t)``.
    :ivar total: ``T^T psi``; :ivar noise_term: ``level Kzz w`` as it was last computed.
    :ivar anchor: iterate, residual of rows and noise term of the last sweep.  Entries in x's dtype multiply what w is
        beyond that iterate only.
    :ivar true: relative residual ``(t,)`` of the last sweep, on the CPU; :ivar swept: the epochs at which it was.
    :ivar best: the iterate whose true residual, ``best_true``, is the least so far.
    :ivar extrapolated: ``(t,)`` distance of any prediction from the solution's, in posterior deviations, by the changes
        between sweeps (:mod:`sketchgp.solvers.energy`); infinite while nothing can be said.
    :ivar seen: the same by the last true residual, as far as P has its directions, in which little may have changed.
    :ivar length: of a step; halved where steps diverge.
    """

    saved = (
        "w", "psi", "total", "noise_term", "anchor", "true", "best", "best_true", "extrapolated", "seen", "length",
        "shrunk", "done", "end", "swept", "sweeps", "failures", "mark", "marked",
        "compared", "changes", "origin", "next_look", "evaluated.entries", "evaluated.products",
    )  # fmt: skip
    unit, letter = "epochs", "m"
    name = "SketchySAGA"

    def __init__(self, problem: InducingPointProblem, choices: SketchySAGA) -> None:
        x, self.y = problem.tensors(f"{self.name}()")
        self.tall = problem.tall(accurate=False)
        self.exact, self.evaluated = self.tall.accurate(), self.tall.evaluated
        super().__init__(self.exact.t_matmul(self.y), Space(problem.m))
        self.choices, self.n, self.level = choices, len(x), problem.level
        self.size, self.columns, self.data_rows = problem.m, self.y.shape[1], self.n
        self.matrix_entries = float(self.n * self.size)
        self.generator: torch.Generator = generator(choices.seed, self.name)
        self.kzz = KernelMatrix.of(problem.kernel, problem.inducing_points, engine="tiled").detach()
        self.sweeps = self.failures = self.shrunk = 0
        self.block_size = min(self.n, choices.block_size or max(16, min(_BLOCK, self.n // 20)))
        self.done = self.swept = self.marked = self.origin = 0.0
        self.end, self.next_look, self.mark = 1 - _ROUNDED, _GAP, math.inf
        self.changes: list[Tensor] = []
        self.compared: tuple[Tensor, Tensor, Tensor] | None = None
        self.w = self.best = self.total = self.noise_term = torch.zeros_like(self.b)
        self.psi, self.anchor = self.y, (self.w, self.y, self.noise_term)
        self.true = self.best_true = self.current = self.extrapolated = torch.full((self.columns,), math.inf)
        self.seen = torch.zeros(self.columns)
        self._prepare()

    def _prepare(self) -> None:
        """Preconditioner, damping, step, and how many steps go by between two products with Kzz."""
        n, m, b = self.n, self.size, self.block_size
        rank = min(m, self.choices.rank or _RANK)
        rows, sample = min(n, max(_LEAST_ROWS, _ROWS * rank)), min(n, max(_LEAST_SAMPLE, 2 * b))
        self.p = p = damped_nystrom(self.exact, self.kzz.double(), self.level, rank, rows, sample, self.generator)
        self.evaluated.products += 1
        root = damped(p.vectors, p.values, self.kzz, self.level, self.y)
        self.root = root.deepest() or root
        target = max(_LEAST_TARGET, _CAUTION * n / (b * _RATE))
        p.damping = self.choices.rho or p.choose_damping(b, target)
        while True:
            batch = p.batch_smoothness(p.damping, b)
            own = float(smoothness(
                self._noise_term, p.apply_inverse, m, generator=self.generator, device=self.device,
                iterations=_POWERINGS,
            ))  # fmt: skip
            if self.choices.rho is not None or own <= max(batch, target):
                break
            p.damping *= 10
        require_finite(math.isfinite(batch + own))
        self.length = _CAUTION / max(batch + own, 1e-300)
        self.every = max(1, min(math.ceil(m / b), int(_STALE / max(self.length * own, 1e-9))))

    def _noise_term(self, v: Tensor) -> Tensor:
        """``level Kzz v``, entries and vectors in x's dtype."""
        self.evaluated.products += 1
        return self.kzz.product(v.to(self.kzz.dtype)).to(torch.float64) * self.level

    # --- what the loop counts -------------------------------------------------------------------------------

    @property
    def entries(self) -> float:
        """Kernel entries evaluated so far; each pair of Kzz counts once."""
        return self.evaluated.entries + self.evaluated.products * self.size * (self.size + 1) / 2

    @property
    def tally(self) -> dict[str, float]:
        return {"epochs": self.done, "sweeps": self.sweeps, "halvings": self.shrunk}

    @property
    def epochs(self) -> float:
        return self.done

    @property
    def deviations(self) -> Tensor:
        """Estimated distance of any prediction from the solution's, in posterior deviations, ``(t,)``."""
        return torch.maximum(self.extrapolated, self.seen)

    def iterate(self) -> Tensor:
        return self.w

    # --- the loop's questions -------------------------------------------------------------------------------

    def begin(self, initial: Tensor | None) -> Tensor:
        self.w = torch.zeros_like(self.b) if initial is None else initial.to(self.b).clone()
        if initial is None:  # needs no entry of the kernel
            self._start_anew(0 - self.y, -self.b, torch.zeros_like(self.b))
        else:
            self._sweep()
        return self.true

    def step(self) -> bool:
        # in a shuffled order it is no faster, and nothing is proved for that
        rows = draw_rows(self.n, self.block_size, self.generator, self.device)
        space = Space.of(len(rows))
        own = rows[space.span]
        w, psi, noise_term = self.anchor
        part, change = self.tall.part(own), self.w - w
        if self.iterations % self.every == 0:
            self.noise_term = noise_term + self._noise_term(change)
        new = torch.addmm(psi[own], part, change)
        aux = part.mT @ (new - self.psi[own])
        self.evaluated.entries += (len(rows) - len(own)) * self.tall.shape[1]
        new, aux = space.whole(new), space.total(aux)
        gradient = self.total + aux * (self.n / len(rows)) + self.noise_term
        self.total = self.total + aux
        self.psi[rows] = new
        self.w = self.w - self.length * self.p.apply_inverse(gradient)
        self.iterations += 1
        self.done += len(rows) / self.n
        if self.done < self.end:
            return False
        self._close_epoch()
        self.end = self.done + 1 - _ROUNDED
        return True

    def estimate(self) -> Tensor:
        return self.current

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """End where residual and predictions are good enough by the last sweep, or sweeps find no progress."""
        if bool((self.anchor[0] == 0).all()) and bool((self.true == 0).all()):
            self.extrapolated = torch.zeros_like(self.extrapolated)  # Kzx y is 0
        if bool((self.true <= self.choices.tol).all()) and self._within():
            self.best, self.best_true = self.anchor[0], self.true
            return Reason.REACHED
        small = largest_of(self.true) < _PLATEAU and self.done - self.marked >= _PATIENCE
        if small and self.swept == self.done and len(self.changes) >= 3:
            return Reason.STAGNATED
        return None

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        """Return the best iterate and its true residual, after a last sweep."""
        if self.done > self.swept and bool(torch.isfinite(self.w).all()):
            self._sweep()
        converged = bool((self.best_true <= self.choices.tol).all()) and self._within()
        if converged and reason in (Reason.STAGNATED, Reason.EPOCHS, Reason.TIME):
            reason = Reason.REACHED
        facts = {
            "deviations": self.deviations,
            "tol": self.choices.deviations,
            "judged": "predictions",
            "details": {"block_size": self.block_size, "rho": self.p.damping, "step": self.length},
        }
        return Outcome(self.best, self.best_true, converged, reason, facts)

    # --- epochs ---------------------------------------------------------------------------------------------

    def _close_epoch(self) -> None:
        """Estimate the residual from the table's gradient; take diverging steps back; sweep where it is time."""
        tol, before = self.choices.tol, largest_of(self.true)
        self.current = (self.space.norm(self.total + self.noise_term) / self.norm).cpu()
        worst = largest_of(self.current) if bool(torch.isfinite(self.current).all()) else math.inf
        if worst > _GROWTH * max(before, tol) or not bool(torch.isfinite(self.w).all()):
            self._take_back(worst)
            return
        gap = self.done - self.swept
        reached, at_target = bool((self.true <= tol).all()), worst <= tol
        settled = worst <= _SETTLED * before and gap >= _GAP
        look = self.done >= self.next_look - _ROUNDED
        if settled or look or (at_target and not reached and gap >= min(self.failures, _GAP)):
            self._sweep()
            after = largest_of(self.true)
            if after > _GROWTH * max(before, tol):
                self._take_back(after)
                return
            self.failures += at_target and after > tol
            if after < _PROGRESS * self.mark:
                self.mark, self.marked = after, self.done

    def _take_back(self, worst: float) -> None:
        """Go on from the best iterate with half the step.

        :raises NumericalError: where that was done too often.
        """
        self.shrunk += 1
        if self.shrunk > _SHRUNK:
            raise NumericalError(
                f"SketchySAGA diverges: the relative residual grew from {largest_of(self.best_true):.1e} to "
                f"{worst:.1e}, with the step halved {_SHRUNK} times. Raise rho (now {self.p.damping:.1e}) or rank, or "
                "use KRILL().",
                see="diverges",
            )
        self.length /= 2
        self.changes, self.compared, self.origin = [], None, self.done
        self.next_look = self.done + _GAP
        self.notes.append(
            f"the residual grew to {worst:.1e} in epoch {self.done:.0f}; took back its steps, halved the next ones"
        )
        self.w = self.best
        self._sweep()

    # --- residuals ------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Compute the true residual of w, with float64 entries, and begin table and gradient anew from it.

        :raises NumericalError: for NaN.
        """
        psi, total = torch.empty_like(self.y), torch.zeros_like(self.w)
        for span, tile in self.exact.own_tiles():
            psi[span] = tile @ self.w - self.y[span]
            total.addmm_(tile.mT, psi[span])
        psi, total = self.exact.space.whole(psi[self.exact.space.span]), self.exact.space.total(total)
        noise_term = self.kzz.double().product(self.w) * self.level
        self.evaluated.products, self.sweeps = self.evaluated.products + 1, self.sweeps + 1
        self._start_anew(psi, total, noise_term)

    def _start_anew(self, psi: Tensor, total: Tensor, noise_term: Tensor) -> None:
        """Begin anew from w, given the residual of its rows, ``T^T psi`` and the noise's term."""
        self.anchor, self.swept = (self.w, psi, noise_term), self.done
        self._compare()
        self.psi, self.total, self.noise_term = psi.clone(), total, noise_term
        r = total + noise_term
        self.true = self.current = self.relative(r)
        self.seen = (self.root.inverse_t(r).norm(dim=0) / math.sqrt(self.level)).cpu()
        if largest_of(self.true) < largest_of(self.best_true):
            self.best, self.best_true = self.w, self.true

    def _compare(self) -> None:
        """Measure the change since the last look, in the norm that bounds predictions, and estimate what is to come.

        Looks are at epochs that grow by a constant factor (:mod:`sketchgp.solvers.energy`).
        """
        w, psi, noise_term = self.anchor
        if self.compared is not None:
            if self.done < self.next_look - _ROUNDED:
                return
            w_before, before, noise_before = self.compared
            curvature = ((w - w_before) * (noise_term - noise_before)).sum(dim=0).clamp(min=0)
            change = ((psi - before).square().sum(dim=0) + curvature).sqrt() / math.sqrt(self.level)
            self.changes.append(change.cpu())
            remaining = remaining_change(self.changes)
            self.extrapolated = torch.full_like(self.seen, math.inf) if remaining is None else remaining
            self.next_look = self.done + max(1.0, (_GROWING - 1) * (self.done - self.origin))
        self.compared = self.anchor

    def _within(self) -> bool:
        """Return whether predictions are as near as they shall be, by the last look."""
        return bool((self.deviations <= self.choices.deviations).all())

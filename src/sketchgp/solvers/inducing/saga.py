"""The loop of SketchySAGA: steps, sweeps that find the true residual, steps taken back, ends.

The method is described in :class:`sketchgp.solvers.sketchysaga.SketchySAGA`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...errors import NumericalError
from ...lowrank.smoothness import smoothness
from ...operators import KernelMatrix
from ...preconditioners.sketchysaga import damped_nystrom
from ...random_streams import generator
from ...report import SolveReport, peak_memory
from ..blockwise import next_block
from ..loop import Progress
from ..loop.interrupt import DeferredInterrupt
from .held_out import InducingHeldOut
from .problem import InducingPointProblem
from .remaining import remaining_change

_SAMPLING = "uniform"  # a shuffled order is no faster, and nothing is proved for it
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
_HELD_OUT_SHARE = 0.1  # of the work that held-out predictions may take
_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears
_BAR = "{desc}: {n:.1f}/{total} epochs [{elapsed}<{remaining}] {postfix}"
_NAN = "A product with the kernel matrix gave NaN or infinity; check inputs and kernel."


class Choices(Protocol):
    """What :class:`sketchgp.solvers.sketchysaga.SketchySAGA` lets users choose."""

    @property
    def tol(self) -> float: ...
    @property
    def deviations(self) -> float: ...
    @property
    def max_epochs(self) -> float: ...
    @property
    def max_seconds(self) -> float | None: ...
    @property
    def block_size(self) -> int | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def rho(self) -> float | None: ...
    @property
    def seed(self) -> int: ...


class Saga:
    """One solve; ``anchor`` is the state that the last sweep left: iterate, residual of rows, its product, noise term.

    ``base`` is the iterate of the last sweep; entries in x's dtype multiply ``w - base`` only.
    """

    def __init__(
        self,
        problem: InducingPointProblem,
        x: Tensor,
        y: Tensor,
        choices: Choices,
        initial: Tensor | None,
        callback: Callable[[Progress], Any] | None,
        held_out: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.start = time.perf_counter()
        assert problem.y is not None
        self.y, self.choices, self.callback = y, choices, callback
        self.n, self.m, self.level, self.shape = len(x), problem.m, problem.level, (problem.m, *problem.y.shape[1:])
        self.held_out = None if held_out is None else InducingHeldOut(problem, *held_out)
        self.tall = problem.tall(accurate=False)
        self.exact = self.tall.accurate()
        self.kzz = KernelMatrix.of(problem.kernel, problem.inducing_points, engine="tiled").detach()
        self.kzz_products = self.sweeps = self.steps = self.failures = self.shrunk = 0
        self.epochs = self.swept = self.marked = 0.0
        self.mark = math.inf
        self.changes: list[Tensor] = []
        self.compared: tuple[Tensor, Tensor, Tensor] | None = None
        self.origin, self.next_look = 0.0, _GAP
        self.deviations = torch.full((self.y.shape[1],), math.inf)
        self.notes: list[str] = []
        self.errors: list[tuple[float, float, Tensor]] = []
        self.estimates: list[Tensor] = []
        self.reason = ""
        self.generator = generator(choices.seed, "SketchySAGA")
        self.rest = torch.empty(0, dtype=torch.long)
        self.block_size = min(self.n, choices.block_size or max(16, min(_BLOCK, self.n // 20)))
        zero = self.y.new_zeros(self.m, self.y.shape[1])
        self.w = zero if initial is None else initial.reshape(zero.shape).to(zero).clone()
        self.rhs: Tensor | None = None
        self.base = self.best = self.total = self.noise_term = self.w
        self.psi = self.y
        self.best_true = torch.empty(0)
        self.true = torch.full((self.y.shape[1],), math.inf)
        self._sweep()
        self._prepare()
        self.setup_seconds = time.perf_counter() - self.start

    def _prepare(self) -> None:
        """Preconditioner, damping, step, and how many steps go by between two products with Kzz."""
        n, m, b = self.n, self.m, self.block_size
        rank = min(m, self.choices.rank or _RANK)
        rows, sample = min(n, max(_LEAST_ROWS, _ROWS * rank)), min(n, max(_LEAST_SAMPLE, 2 * b))
        self.p = p = damped_nystrom(self.tall, self.kzz, self.level, rank, rows, sample, self.generator)
        self.kzz_products += 1
        target = max(_LEAST_TARGET, _CAUTION * n / (b * _RATE))
        p.damping = self.choices.rho or p.choose_damping(b, target)
        while True:
            batch = p.batch_smoothness(p.damping, b)
            own = smoothness(
                self._noise_term, p.apply_inverse, m, generator=self.generator, device=self.y.device,
                iterations=_POWERINGS,
            )  # fmt: skip
            if self.choices.rho is not None or own <= max(batch, target):
                break
            p.damping *= 10
        if not math.isfinite(batch + own):
            raise NumericalError(_NAN)
        self.step = _CAUTION / max(batch + own, 1e-300)
        self.every = max(1, min(math.ceil(m / b), int(_STALE / max(self.step * own, 1e-9))))

    def _noise_term(self, v: Tensor) -> Tensor:
        """``level Kzz v``, entries and vectors in x's dtype."""
        self.kzz_products += 1
        return self.kzz._matmul(v.to(self.kzz.dtype)).to(torch.float64) * self.level

    @property
    def entries(self) -> float:
        """Of the kernel, evaluated so far; of Kzz each pair counts once."""
        tall = self.tall.entries + (self.exact.entries if self.exact is not self.tall else 0)
        return tall + self.kzz_products * self.m * (self.m + 1) / 2

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    # --- the loop -------------------------------------------------------------------------------------------

    def loop(self, progress: bool | None) -> None:
        """Step until something ends the solve; the best iterate is then in ``best``, its residual in ``best_true``."""
        show = sys.stderr.isatty() if progress is None else progress
        bar = tqdm(
            desc=f"SketchySAGA, m = {self.m}",
            total=round(self.choices.max_epochs, 1),
            disable=not show,
            leave=False,
            miniters=0,
            delay=_PROGRESS_DELAY,
            bar_format=_BAR,
        )
        with bar, DeferredInterrupt() as interrupt:
            while not self.reason:
                try:
                    closing = self._epoch(interrupt)
                    if not self.reason:
                        self._close_epoch(bar)
                    if closing and not self.reason:
                        self.reason = closing
                except KeyboardInterrupt:
                    if interrupt.again:
                        raise
                    self.reason = "was interrupted"
            if self.epochs > self.swept and bool(torch.isfinite(self.w).all()):
                self._sweep()

    def _epoch(self, interrupt: DeferredInterrupt) -> str:
        """Steps on as many rows as there are; returns why the solve must end after them, or nothing."""
        end, limit = self.epochs + 1 - 1e-9, self.choices.max_seconds
        if bool((self.base == 0).all()) and bool((self.true == 0).all()):
            self.deviations = torch.zeros_like(self.deviations)  # Kzx y is 0
        if self._reached() and self._within():
            self.reason = "reached the tolerance"  # at the start
            return ""
        while self.epochs < end:
            self._step()
            if interrupt.seen:
                raise KeyboardInterrupt
            if limit is not None and self.seconds >= limit:
                return "ran out of time"
            if self.epochs >= self.choices.max_epochs - 1e-9:
                return "ran out of epochs"
        return ""

    def _step(self) -> None:
        rows, self.rest = next_block(_SAMPLING, self.n, self.block_size, self.rest, self.generator, self.y.device)
        part, change = self.tall.part(rows), self.w - self.base
        if self.steps % self.every == 0:
            self.noise_term = self.anchor[3] + self._noise_term(change)
        new = torch.addmm(self.anchor[1][rows], part, change)
        aux = part.mT @ (new - self.psi[rows])
        gradient = self.total + aux * (self.n / len(rows)) + self.noise_term
        self.total = self.total + aux
        self.psi[rows] = new
        self.w = self.w - self.step * self.p.apply_inverse(gradient)
        self.steps += 1
        self.epochs += len(rows) / self.n

    def _close_epoch(self, bar: Any) -> None:
        """Estimate the residual from the table's gradient; take diverging steps back; sweep where it is time."""
        tol, before = self.choices.tol, float(self.true.max())
        estimate = self._relative(self.total + self.noise_term)
        worst = float(estimate.max()) if bool(torch.isfinite(estimate).all()) else math.inf
        self.estimates.append(estimate)
        if worst > _GROWTH * max(before, tol) or not bool(torch.isfinite(self.w).all()):
            self._take_back(worst)
            return
        gap = self.epochs - self.swept
        at_target = worst <= tol
        settled = worst <= _SETTLED * before and gap >= _GAP
        look = self.epochs >= self.next_look - 1e-9
        if settled or look or (at_target and not self._reached() and gap >= min(self.failures, _GAP)):
            self._sweep()
            after = float(self.true.max())
            if after > _GROWTH * max(before, tol):
                self._take_back(after)
                return
            self.failures += at_target and after > tol
            if after < _PROGRESS * self.mark:
                self.mark, self.marked = after, self.epochs
            if self._reached() and self._within():
                self.reason, self.best, self.best_true = "reached the tolerance", self.base, self.true
            elif after < _PLATEAU and self.epochs - self.marked >= _PATIENCE and len(self.changes) >= 3:
                self.reason = "stagnated"
        error = self._held_out_error()
        held = "" if error is None else f", held-out RMSE {float(error.mean()):.4g}"
        bar.set_postfix_str(f"residual about {worst:.1e}{held}", refresh=False)
        bar.update(self.epochs - bar.n)
        if self.callback is not None:
            passes, found = self.entries / (self.n * self.m), self.estimates[-1]
            if self.callback(Progress(self.steps, passes, self.epochs, self.seconds, found, error, self.w.clone)):
                self.reason = self.reason or "was stopped by the callback"

    def _take_back(self, worst: float) -> None:
        """Go on from the best iterate with half the step.

        :raises NumericalError: where that was done too often.
        """
        self.shrunk += 1
        if self.shrunk > _SHRUNK:
            raise NumericalError(
                f"SketchySAGA diverges: the relative residual grew from {float(self.best_true.max()):.1e} to "
                f"{worst:.1e}, with the step halved {_SHRUNK} times. Raise rho (now {self.p.damping:.1e}) or rank, or "
                "use KRILL()."
            )
        self.step /= 2
        self.changes, self.compared, self.origin = [], None, self.epochs
        self.next_look = self.epochs + _GAP
        self.notes.append(
            f"the residual grew to {worst:.1e} in epoch {self.epochs:.0f}; took back its steps, halved the next ones"
        )
        if self.anchor[0] is not self.best:
            self.w = self.best.clone()
            self._sweep()
            return
        self.w, self.psi, self.total, self.noise_term = (part.clone() for part in self.anchor)
        self._compare(self.anchor[1], self.anchor[3])

    # --- residuals ------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """The true residual of w, with float64 entries, and table and gradient as they are there.

        :raises NumericalError: for NaN.
        """
        self.base, psi, total = self.w.clone(), torch.empty_like(self.y), torch.zeros_like(self.w)
        rhs = torch.zeros_like(self.w) if self.rhs is None else None
        for span, tile in self.exact.tiles():
            psi[span] = tile @ self.base - self.y[span]
            total.addmm_(tile.mT, psi[span])
            if rhs is not None:
                rhs.addmm_(tile.mT, self.y[span])
        if rhs is not None:
            norm = rhs.norm(dim=0)
            self.rhs, self.norm = rhs, torch.where(norm > 0, norm, torch.ones_like(norm))
        noise_term = self.kzz.double()._matmul(self.base) * self.level
        self.kzz_products, self.sweeps, self.swept = self.kzz_products + 1, self.sweeps + 1, self.epochs
        self._compare(psi, noise_term)
        self.anchor = (self.base, psi, total, noise_term)
        self.psi, self.total, self.noise_term = psi.clone(), total, noise_term
        self.true = self._relative(total + noise_term)
        if not bool(torch.isfinite(self.true).all()):
            raise NumericalError(_NAN)
        if not self.estimates or float(self.true.max()) < float(self.best_true.max()):
            self.best, self.best_true = self.base, self.true
        self.estimates[-1:] = [self.true]

    def _compare(self, psi: Tensor, noise_term: Tensor) -> None:
        """What changed since the last look, in the norm that bounds predictions, and what is still to come by that.

        Looks are at epochs that grow by a constant factor (:mod:`.remaining`).
        """
        first = self.compared is None
        if not first and self.epochs < self.next_look - 1e-9:
            return
        if self.compared is not None:
            w, before, noise_before = self.compared
            curvature = ((self.base - w) * (noise_term - noise_before)).sum(dim=0).clamp(min=0)
            change = ((psi - before).square().sum(dim=0) + curvature).sqrt() / math.sqrt(self.level)
            self.changes.append(change.cpu())
            remaining = remaining_change(self.changes)
            self.deviations = torch.full_like(self.deviations, math.inf) if remaining is None else remaining
            self.next_look = self.epochs + max(1.0, (_GROWING - 1) * (self.epochs - self.origin))
        self.compared = self.base, psi, noise_term

    def _reached(self) -> bool:
        """Whether the residual is at its tolerance."""
        return bool((self.true <= self.choices.tol).all())

    def _within(self) -> bool:
        """Whether predictions are, by the last look."""
        return bool((self.deviations <= self.choices.deviations).all())

    def _relative(self, residual: Tensor) -> Tensor:
        return (residual.norm(dim=0) / self.norm).cpu()

    def _held_out_error(self) -> Tensor | None:
        if self.held_out is None:
            return None
        if not self.errors or self.held_out.tall.entries <= _HELD_OUT_SHARE * self.entries:
            self.errors.append((self.entries / (self.n * self.m), self.seconds, self.held_out(self.w)))
        return self.errors[-1][2]

    def report(self) -> SolveReport:
        """What happened, once ``loop`` has ended."""
        p = self.p
        converged = bool((self.best_true <= self.choices.tol).all()) and self._within()
        return SolveReport(
            solver="SketchySAGA",
            preconditioner=f"Nystrom rank {p.rank}, damping {p.damping:.2e}, batches of {self.block_size}",
            n=self.m,
            columns=self.y.shape[1],
            iterations=self.steps,
            matmuls=self.sweeps,
            residual=self.best_true,
            history=torch.stack(self.estimates),
            tol=self.choices.deviations,
            converged=converged,
            reason="reached the tolerance" if converged and self.reason == "stagnated" else self.reason,
            seconds=self.seconds - self.setup_seconds,
            setup_seconds=self.setup_seconds,
            rank=p.rank,
            dtype=str(self.tall.dtype).removeprefix("torch."),
            device=str(self.y.device),
            peak_memory=peak_memory(self.y.device),
            notes=self.notes,
            passes=self.entries / (self.n * self.m),
            held_out=self.errors,
            remedies={
                "ran out of epochs": f"Raise max_epochs, or the rank (now {p.rank}), and go on with initial=.",
                "ran out of time": "Raise max_seconds and go on with initial=.",
            },
            deviations=self.deviations,
            judged="predictions",
        )

"""Blockwise methods, and one under the loop of all solvers: residuals estimated from steps, verified, and refined.

The residual is estimated from the steps themselves, and true where a solve ends.  With float32 products the method
solves ``K d + noise d = r`` with ``r = y - (K + noise) base`` computed in float64.  Once a pass, the residual of some
rows is computed in float64 too; where rounding dominates it, ``base += d`` and the method goes on from d = 0 with
the new residual (iterative refinement: Higham, "Accuracy and Stability of Numerical Algorithms", chapter 12).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...devices import fetched, here, sent
from ...errors import NumericalError
from ...random_streams import generator
from ...report import Reason
from ..certificate import Certificate
from ..loop import Outcome, Refined, largest_of, require_finite
from ..system import System

_ALL_ROWS = 50_000  # points up to which the final residual is always that of all rows
_WORTH_ALL_ROWS = 5.0  # passes after which it is for any number of points
_SAMPLE = 8192  # rows from which it is estimated otherwise
_WINDOW = 50_000  # the most rows between two estimates of the residual
_CHECKED = 32  # rows whose residual is computed in float64 too, once a pass
_ROUNDED = 0.3  # share of the residual that may be rounding
_BUDGETS = (Reason.PASSES, Reason.TIME)
_FRUITLESS = 3  # corrections in a row that halve the residual of no column
_DIVERGED = 1e3  # residual, relative to y and to that of the start
_SHRUNK = 10  # times that a step is made smaller
_PLATEAU = 1e-7  # residual below which float64 products may allow no progress
_PATIENCE = 20  # passes without progress
_PROGRESS = 0.9  # of the least residual before


class BlockMethod:
    """A method at work on ``(K + noise) d = r`` from d = 0; a subclass adds :meth:`step`.

    Everything that the next step depends on is in ``tensors`` and ``numbers``, so that saving them saves the run.

    :param choices: the solver; :param system: the matrix; :param block_size: rows a step.

    :cvar positions: the names of the tensors that are points like d; d itself is ``tensors["w"]``.
    :cvar growth: of the estimated residual over its least at which :meth:`shrink_step` is called; None never.
    :cvar advice: what to try when it diverges all the same.
    :ivar rank: of the low-rank parts; 0 where there are none.
    """

    positions: tuple[str, ...] = ("w",)
    growth: float | None = None
    advice = "Use another seed, a larger block_size, or float64 data."
    rank = 0

    def __init__(self, choices: Any, system: System, block_size: int) -> None:
        self.choices, self.system = choices, system
        self.name: str = choices.name
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {"block_size": block_size}

    def begin(self, width: int) -> None:
        """Set d = 0 for ``width`` right-hand sides, and forget momentum."""
        self.tensors |= {name: self.system.zeros(width) for name in self.positions}

    def rebase(self) -> None:
        """Take the present d as the new origin, so that d = 0 again and r is ``r - (K + noise) d``; keep momentum."""
        origin = self.value.clone()
        for name in self.positions:
            self.tensors[name].sub_(origin)

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Take one step; return the rows ``(b,)`` it used and ``(K + noise) d - r`` there ``(b, t)``, as it was before.

        :param generator: CPU generator that every random choice comes from.
        """
        raise NotImplementedError

    def asks(self) -> list[Tensor]:
        """Return numbers ``()`` to be fetched from the device after a step, and given to :meth:`answer`."""
        return []

    def answer(self, answers: list[float]) -> None:
        """Receive the numbers of :meth:`asks`, before the next step."""

    @property
    def block_size(self) -> int:
        """Rows of a step, at most."""
        return int(self.numbers["block_size"])

    @property
    def value(self) -> Tensor:
        """d, ``(n, t)`` float64."""
        return self.tensors["w"]

    @property
    def details(self) -> dict[str, float | str]:
        """Choices that the method made, by name, for the report."""
        return {"block_size": self.block_size}

    def describe(self) -> str:
        """Say how blocks are inverted, for the report's line on the preconditioner."""
        return f"blocks of {self.block_size}"

    def evaluation_point(self) -> Tensor:
        """Return the d at which the next step takes its residual."""
        return self.value

    def shrink_step(self) -> None:
        """Go on with a smaller step: the residual grows."""
        raise NotImplementedError


class Refinement(Refined):
    """Steps of a blockwise method on ``(K + noise) W = B``.

    The iterate is ``base`` plus the method's d, and ``r = y - (K + noise) base``.

    :param b: right-hand sides ``(n, t)``, float64; each of several ranks keeps its rows of them, and of all vectors.
    :param out_dtype: dtype of the value; the residual reported is that of the rounded one.

    :ivar target: the estimated residual at which the true one is looked at, for the tolerance ``target_of``.
    :ivar rows_seen: rows of all steps; ``rows_checked`` of them at the last look at rounding errors.
    :ivar verify_after: rows before the true residual is looked at again, after ``failures`` times in vain.
    :ivar shrunk: number of times that the step was made smaller.
    :ivar window_rows: rows since the last estimate, ``window_squares`` (t,) their squared residuals.
    :ivar best: the value with the least true residuals ``best_true`` (t,) known, rounded as it would be returned.
    :ivar true: the true residuals (t,) when all rows were last looked at and found above the tolerance;
        ``fruitless`` of the ``corrections`` in a row did not help.
    :ivar least: the least estimate; ``lowest`` the least that was clearly below those before, at row ``lowest_at``.
    :ivar first: the residual ``(t,)`` of the start; ``estimated`` the last one, estimated once a window.
    """

    saved = (
        "base", "r", "window_squares", "best", "best_true", "true", "first", "estimated", "target_of", "target",
        "rows_seen", "rows_checked", "window_rows", "verify_after", "failures", "shrunk", "corrections", "fruitless",
        "lowest_at", "lowest", "least", "method.tensors", "method.numbers", "engines", "system.entries",
        "system.products",
    )  # fmt: skip
    unit = "passes"

    def __init__(
        self, system: System, method: BlockMethod, b: Tensor, out_dtype: torch.dtype, tol: float, seed: int
    ) -> None:
        super().__init__(system.space.own(b), system.space)
        self.system, self.method, self.out_dtype, self.tol = system, method, out_dtype, tol
        self.name, self.size, self.data_rows, self.matrix_entries = method.name, system.n, system.n, system.n**2.0
        self.vectors = ("base", "r", "best", *(f"method.tensors/{name}" for name in method.positions))
        self.sample: int | None = None  # rows that the final residual is of, where these are not all
        self.earlier_columns = 0  # of the value returned that are those of an earlier iterate
        self.value: Tensor | None = None
        self.certain: dict[str, Tensor] = {}
        self.residual = torch.empty(0)
        self.reason: Reason | None = None
        self.target_of = self.target = tol
        self.rows_seen = self.rows_checked = self.window_rows = self.verify_after = self.lowest_at = 0
        self.failures = self.shrunk = self.corrections = self.fruitless = 0
        self.lowest = self.least = float("inf")
        self.generator: torch.Generator = generator(seed, "blocks of a solve")

    @property
    def epochs(self) -> float:
        return self.rows_seen / self.size

    @property
    def tally(self) -> dict[str, float]:
        done: dict[str, float] = {"products": self.system.products, "epochs": self.epochs}
        if self.system.dtype != torch.float64:
            done["corrections"] = self.corrections
        if self.method.growth is not None:
            done["halvings"] = self.shrunk
        return done

    @property
    def entries(self) -> float:
        return float(self.system.entries)

    @property
    def engines(self) -> list[str]:
        """Engines that evaluate rows of K; a solve goes on with those that it began with."""
        return self.system.engines

    @engines.setter
    def engines(self, engines: list[str]) -> None:
        if self.system.use_engines(engines):
            self.notes.append("matmul= is another than before: the last digits are those of another rounding")

    def begin(self, initial: Tensor | None) -> Tensor:
        self.base = torch.zeros_like(self.b) if initial is None else self.space.own(initial).to(torch.float64).clone()
        self.r, rounded, self.best = self.b, self.b, self.base
        if initial is not None:
            self.r, rounded, self.best = self._residuals(self.base)
        self.system.entries = 0  # a warm start is not charged for
        self.first = self.estimated = self.relative(self.r)
        self.best_true = self.relative(rounded)
        self.true, self.window_squares = self.first.clone(), torch.zeros_like(self.norm)
        self.method.begin(self.b.shape[1])
        return self.first

    # --- steps ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        system, method = self.system, self.method
        due = system.dtype != torch.float64 and self.rows_seen - self.rows_checked >= system.n
        point = method.evaluation_point().clone() if due else None
        rows, g = method.step(self.r, self.generator)
        asked = method.asks()
        wanted = [*asked, *([] if self.window_rows else [torch.isfinite(g).all()])]
        self.iterations += 1
        self.rows_seen += len(rows)
        self.window_rows += len(rows)
        self.window_squares = self.window_squares + g.square().sum(dim=0)
        closes = self.window_rows >= min(system.n, _WINDOW)
        if closes:
            wanted.append((self.window_squares * (system.n / self.window_rows)).sqrt() / self.norm)
        if point is not None:
            self.rows_checked = self.rows_seen
            some = sent(here(rows)[:_CHECKED], rows.device)
            exact = system.residual(some, point, self.r, accurate=True)
            wanted.append(((g[:_CHECKED] - exact) * (system.n / len(some)) ** 0.5).norm(dim=0) / self.norm)
        answers = iter(fetched(*wanted) if wanted else [])
        method.answer([float(next(answers)) for _ in asked])
        if self.window_rows == len(rows):
            require_finite(next(answers))
        estimate = next(answers) if closes else None
        if point is not None:
            rounding = self.finite(next(answers))
            if bool(((rounding > _ROUNDED * self.estimated) & (self.estimated > self.tol)).any()):
                self._refine()
        if self.reason is None and estimate is not None:
            self.estimated = estimate
            self.window_rows, self.window_squares = 0, torch.zeros_like(self.window_squares)
            self._watch_growth(largest_of(estimate))
        return self.reason is not None or estimate is not None

    def _watch_growth(self, largest: float) -> None:
        """Shrink the step of a method that can, where the residual grows; a method that cannot must not diverge.

        After corrections of float32 products growth is theirs, and the solve ends.

        :param largest: the residual as estimated now.
        :raises NumericalError: for NaN, and for growth that a smaller step does not cure.
        """
        method = self.method
        largest, start = largest if math.isfinite(largest) else math.inf, max(1.0, largest_of(self.first))
        before = self.least if math.isfinite(self.least) else largest_of(self.first)
        if method.growth is None:
            growing, helped = largest > _DIVERGED * start, False
        else:
            growing = largest > method.growth * max(self.least, self.tol)
            helped = self.shrunk < _SHRUNK
        require_finite(largest < math.inf or method.growth is not None)
        if growing and not helped and self.corrections and largest < math.inf:
            self.reason = Reason.STAGNATED
            return
        if growing and not helped:
            raise NumericalError(
                f"{method.name} diverges: the relative residual grew from {before:.1e} to {largest:.1e}. "
                f"{method.advice}",
                see="diverges",
            )
        if growing:
            self.notes.append(f"the residual grew from {before:.1e} to {largest:.1e}; went on with a smaller step")
            self.shrunk, self.least = self.shrunk + 1, largest
            method.shrink_step()
            if largest > start:
                method.begin(self.b.shape[1])
                self.least = start
        self.least = min(self.least, largest)

    def estimate(self) -> Tensor:
        return self.estimated

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """Verify where the estimate is at the tolerance, or can get no smaller."""
        if not self.reason and self._due():
            self._verify()
        if not self.reason and self.system.dtype == torch.float64 and self._on_plateau(largest_of(self.estimated)):
            before = largest_of(self.true)
            self._verify()
            after = largest_of(self.true)
            if not self.reason and after < _PLATEAU and after > _PROGRESS * before:
                self.reason = Reason.STAGNATED
        return self.reason

    def _on_plateau(self, largest: float) -> bool:
        """Return whether the estimated residual is tiny and has not fallen for many passes."""
        if largest < _PROGRESS * self.lowest:
            self.lowest, self.lowest_at = largest, self.rows_seen
        if self.lowest > _PLATEAU or self.rows_seen - self.lowest_at <= _PATIENCE * self.size:
            return False
        self.lowest_at = self.rows_seen  # to look again as many passes later
        return True

    # --- residuals ------------------------------------------------------------------------------------------

    def iterate(self) -> Tensor:
        return self.base + self.method.value

    def _due(self) -> bool:
        """Return whether it is time to look at the true residual."""
        return bool((self.estimated <= self.target).all()) and self.rows_seen >= self.verify_after

    def _residuals(self, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``y - (K + noise) W`` for an iterate W and for W rounded as it would be returned, and the rounded W."""
        rounded = exact.to(self.out_dtype).to(torch.float64)
        both = exact if self.out_dtype == torch.float64 else torch.cat([exact, rounded], dim=1)
        parts = self.space.product(self.system.accurate_product, both).split(exact.shape[1], dim=1)
        return self.b - parts[0], self.b - parts[-1], rounded

    def _verify(self) -> None:
        """End if the true residual is at the tolerance; else aim lower."""
        tol = self.tol
        r, rounded, value = self._residuals(self.iterate())
        true, self.residual = self.relative(r), self.relative(rounded)
        within = bool((self.residual <= tol).all())
        if within or bool((true <= tol).all()):
            self.reason = Reason.REACHED if within else Reason.ROUNDED
            self._settle(value, rounded)
        else:  # the estimate was too small: of rows that had just been solved, say
            self.target = max(0.1 * tol, 0.9 * self.target * min(1.0, tol / largest_of(true)))
            self.failures, self.true = self.failures + 1, true
            self.verify_after = self.rows_seen + self.size * 2 ** min(self.failures, 6)

    def keep(self, value: Tensor, residual: Tensor) -> int:
        """Remember the columns of a value whose true residuals are the least so far; return how many others are."""
        better = residual <= self.best_true
        self.best = torch.where(better.to(value.device), value, self.best)
        self.best_true = torch.where(better, residual, self.best_true)
        return int((~better).sum())

    def _settle(self, value: Tensor, r: Tensor) -> None:
        """Return a value, or where they are better the best columns known, and what is certain of it.

        :param r: its residual.
        """
        self.earlier_columns = self.keep(value, self.relative(r))
        self.value, self.residual = self.best, self.best_true
        if not self.earlier_columns:
            self.certain = Certificate(self.system, None, space=self.space).of(self.b, value, r)

    def _refine(self) -> None:
        """Go on from the true residual; end where that has not helped any column several times."""
        r, rounded, value = self._residuals(self.iterate())
        true, self.residual = self.relative(r), self.relative(rounded)
        helped = bool((true <= 0.5 * self.true)[true > self.tol].any()) or bool((true <= self.tol).all())
        self.fruitless = 0 if helped else self.fruitless + 1  # once is nothing: the 2-norm may rise before it falls
        self.corrections += 1
        self.keep(value, self.residual)
        if self.fruitless >= _FRUITLESS:
            self.reason = Reason.STAGNATED
            self._settle(value, rounded)
            return
        self.notes.append(
            f"{str(self.system.dtype).removeprefix('torch.')} products corrected at residual {largest_of(true):.1e}"
        )
        self.base, self.r, self.true = self.iterate(), r, true
        self.method.rebase()

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        """Return the value with the residual of all rows, or of a sample where the budget ended early.

        :param quick: take a sample at the most.  Ctrl-C then leaves the residual as the steps estimated it.
        """
        if self.value is None:
            self._look(quick)
        return self._outcome(reason)

    def give_up(self, reason: Reason) -> Outcome:
        self.value, self.residual, self.sample = self.iterate(), self.estimated, 0
        self.notes.append("interrupted again: the residual is what the last steps estimated")
        return self._outcome(reason)

    def _outcome(self, reason: Reason) -> Outcome:
        assert self.value is not None
        within = bool((self.residual <= self.tol).all())
        if self.sample is None and within and reason in _BUDGETS:
            reason = Reason.REACHED
        details = dict(self.method.details)
        if self.earlier_columns:
            details["earlier_columns"] = self.earlier_columns
        facts = {
            "tol": self.tol,
            "details": details,
            "residual_rows": self.sample,
            **self.certain,
            "rank": self.method.rank,
            "dtype": str(self.system.dtype).removeprefix("torch."),
            "preconditioner": self.method.describe(),
        }
        value = self.space.whole(self.value.to(self.out_dtype))
        return Outcome(value, self.residual, within and self.sample is None, reason, facts)

    def _look(self, quick: bool) -> None:
        """Find the residual of the iterate that will be returned."""
        n = self.size
        if n <= _SAMPLE or (not quick and (n <= _ALL_ROWS or self.work >= _WORTH_ALL_ROWS)):
            _, rounded, value = self._residuals(self.iterate())
            self._settle(value, rounded)
            return
        self.value = self.iterate().to(self.out_dtype).to(torch.float64)
        rows = torch.randperm(n, generator=generator(n, "rows of a residual"))[:_SAMPLE].to(self.b.device)
        r = self.system.residual(rows, self.value, self.b, accurate=True)
        residual = (r * (n / len(rows)) ** 0.5).norm(dim=0) / self.norm
        self.residual, self.sample = self.finite(residual.cpu()), len(rows)
        self.notes.append(f"residual estimated from {len(rows)} random rows, in float64")

    def resume(self, ended: Reason | None) -> Reason | None:
        another = self.target_of != self.tol
        if another:
            self.target_of = self.target = self.tol
            self.failures = self.verify_after = 0
        self.reason = None
        if ended in (Reason.REACHED, Reason.ROUNDED, Reason.STAGNATED):
            self._verify()
            if another and not self.reason:
                self.failures, self.verify_after, self.target = 0, 0, self.tol
            if ended == Reason.STAGNATED and not self.reason:
                self._look(quick=False)
                self.reason = ended
        elif self.iterations and not self.window_rows and self._due():
            self._verify()  # it was ended where it would have done this
        return self.reason

"""A blockwise method under the loop of all solvers: residuals estimated from steps, verified, and refined.

The residual is estimated from the steps themselves, and true where a solve ends.  With float32 products the method
solves ``K d + noise d = r`` with ``r = y - (K + noise) base`` computed in float64.  Once a pass, the residual of some
rows is computed in float64 too; where rounding dominates it, ``base += d`` and the method goes on from d = 0 with
the new residual (iterative refinement: Higham, "Accuracy and Stability of Numerical Algorithms", chapter 12).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....devices import fetched, here, sent
from ....errors import NumericalError
from ....random_streams import generator
from ....report import Reason
from ...certificate import Certificate
from ...loop import Method, Outcome, largest_of
from .method import BlockMethod
from .state import VECTORS, State
from .system import BlockSystem
from .watch import NAN, plateau, stuck, watch_growth

_ALL_ROWS = 50_000  # points up to which the final residual is always that of all rows
_WORTH_ALL_ROWS = 5.0  # passes after which it is for any number of points
_SAMPLE = 8192  # rows from which it is estimated otherwise
_WINDOW = 50_000  # the most rows between two estimates of the residual
_CHECKED = 32  # rows whose residual is computed in float64 too, once a pass
_ROUNDED = 0.3  # share of the residual that may be rounding
_BUDGETS = (Reason.PASSES, Reason.TIME)
_FRUITLESS = 3  # corrections in a row that halve the residual of no column


class Refinement(Method):
    """Steps of a blockwise method on ``(K + noise) W = B``.

    :param b: right-hand sides ``(n, t)``, float64; of several ranks, each keeps its rows of them, and of all vectors.
    :param out_dtype: dtype of the value; the residual reported is that of the rounded one.
    """

    unit = "passes"

    def __init__(
        self, system: BlockSystem, method: BlockMethod, b: Tensor, out_dtype: torch.dtype, tol: float, seed: int
    ) -> None:
        super().__init__()
        self.system, self.method, self.out_dtype, self.tol, self.space = system, method, out_dtype, tol, system.space
        self.name, self.size, self.device, self.b = method.name, system.n, b.device, system.space.own(b)
        norm = self.space.norm(self.b)
        if not bool(torch.isfinite(norm).all()):
            raise NumericalError("The right-hand side of a linear solve holds NaN or infinity.", see="nan")
        self.norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.sample: int | None = None  # rows that the final residual is of, where these are not all
        self.earlier_columns = 0  # of the value returned that are those of an earlier iterate
        self.value: Tensor | None = None
        self.certain: dict[str, Tensor] = {}
        self.residual = torch.empty(0)
        self.generator = generator(seed, "blocks of a solve")

    @property
    def work(self) -> float:
        return self.system.passes

    @property
    def epochs(self) -> float:
        return self.position.rows_seen / self.size

    @property
    def tally(self) -> dict[str, float]:
        done: dict[str, float] = {"products": self.system.system.products, "epochs": self.epochs}
        if self.system.dtype != torch.float64:
            done["corrections"] = self.position.corrections
        if self.method.growth is not None:
            done["halvings"] = self.position.shrunk
        return done

    @property
    def entries(self) -> float:
        return float(self.system.entries)

    @property
    def matrix_entries(self) -> float:
        return float(self.size**2)

    def begin(self, initial: Tensor | None) -> Tensor:
        base = torch.zeros_like(self.b) if initial is None else self.space.own(initial).to(torch.float64).clone()
        r, rounded, value = (self.b, self.b, base[:, :0]) if initial is None else self._residuals(base)
        self.system.entries = 0  # a warm start is not charged for
        zero, tol, start = torch.zeros_like(self.norm), self.tol, self._relative(r)
        best, best_true = value.to(torch.float64), self._relative(rounded)
        self.position = State(base, r, zero, best, best_true, start.clone(), start, start, tol, tol)
        self.method.begin(self.b.shape[1])
        return start

    # --- steps ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        state, method = self.position, self.method
        due = self.system.dtype != torch.float64 and state.rows_seen - state.rows_checked >= self.system.n
        point = method.evaluation_point().clone() if due else None
        assert self.generator is not None
        rows, g = method.step(state.r, self.generator)
        asked = method.asks()
        wanted = [*asked, *([] if state.window_rows else [torch.isfinite(g).all()])]
        self.iterations += 1
        state.rows_seen += len(rows)
        state.window_rows += len(rows)
        state.window_squares = state.window_squares + g.square().sum(dim=0)
        closes = state.window_rows >= min(self.system.n, _WINDOW)
        if closes:
            wanted.append((state.window_squares * (self.system.n / state.window_rows)).sqrt() / self.norm)
        if point is not None:
            state.rows_checked = state.rows_seen
            some = sent(here(rows)[:_CHECKED], rows.device)
            exact = self.system.residual(some, point, state.r, accurate=True)
            wanted.append(((g[:_CHECKED] - exact) * (self.system.n / len(some)) ** 0.5).norm(dim=0) / self.norm)
        found = iter(fetched(*wanted) if wanted else [])
        method.told([float(next(found)) for _ in asked])
        if state.window_rows == len(rows) and not bool(next(found)):
            raise NumericalError(NAN, see="nan")
        estimate = next(found) if closes else None
        if point is not None:
            self._look_at_rounding(next(found))
        return state.reason is not None or self._close_window(estimate)

    def _look_at_rounding(self, rounding: Tensor) -> None:
        """:param rounding: what products in the operator's dtype are off by, relative, ``(t,)`` on the CPU."""
        state = self.position
        if not bool(torch.isfinite(rounding).all()):
            raise NumericalError(NAN, see="nan")
        if bool(((rounding > _ROUNDED * state.estimate) & (state.estimate > self.tol)).any()):
            self._refine()

    def _close_window(self, estimate: Tensor | None) -> bool:
        """After enough rows.

        :param estimate: of the residual, from the steps since the last time, ``(t,)`` on the CPU; None before.
        """
        state = self.position
        if estimate is None:
            return False
        state.estimate = estimate
        state.window_rows, state.window_squares = 0, torch.zeros_like(state.window_squares)
        watch_growth(state, self.method, self.tol, largest_of(state.estimate), self.b.shape[1], self.notes)
        return True

    def estimate(self) -> Tensor:
        return self.position.estimate

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """See whether the true residual is at the tolerance, where the estimate is, or can get no smaller."""
        state = self.position
        if not state.reason and self._due():
            self._verify_all()
        largest = largest_of(state.estimate)
        if not state.reason and self.system.dtype == torch.float64 and plateau(state, largest, self.system.n):
            before = largest_of(state.true)
            self._verify_all()
            if not state.reason and stuck(largest_of(state.true), before):
                state.reason = Reason.STAGNATED
        return state.reason

    # --- residuals ------------------------------------------------------------------------------------------

    def weights(self) -> Tensor:
        return self.space.whole(self._iterate())

    def _iterate(self) -> Tensor:
        return self.position.base + self.method.value

    def _at_target(self) -> bool:
        return bool((self.position.estimate <= self.position.target).all())

    def _due(self) -> bool:
        """Whether it is time to look at the true residual."""
        return self._at_target() and self.position.rows_seen >= self.position.verify_after

    def _relative(self, r: Tensor) -> Tensor:
        return self._finite(self.space.norm(r))

    def _finite(self, size: Tensor) -> Tensor:
        relative = (size / self.norm).cpu()
        if not bool(torch.isfinite(relative).all()):
            raise NumericalError(NAN, see="nan")
        return relative

    def _true_residual(self) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_residuals` of the present iterate."""
        return self._residuals(self._iterate())

    def _residuals(self, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``y - (K + noise) W`` for W as it is, and as it would be returned, rounded, and that."""
        value = exact.to(self.out_dtype)
        if self.out_dtype == torch.float64:
            r = self.b - self.system.accurate_product(exact)
            return r, r, value
        product = self.system.accurate_product(torch.cat([exact, value.to(torch.float64)], dim=1))
        return self.b - product[:, : self.b.shape[1]], self.b - product[:, self.b.shape[1] :], value

    def _verify_all(self) -> None:
        """The estimate is at the target: end if the true residual is at the tolerance, else aim lower."""
        state, tol = self.position, self.tol
        r, rounded, value = self._true_residual()
        true, self.residual = self._relative(r), self._relative(rounded)
        within = bool((self.residual <= tol).all())
        if within or bool((true <= tol).all()):
            state.reason = Reason.REACHED if within else Reason.ROUNDED
            self._settle(value, rounded)
        else:  # the estimate was too small: of rows that had just been solved, say
            state.target = max(0.1 * tol, 0.9 * state.target * min(1.0, tol / largest_of(true)))
            state.failures, state.true = state.failures + 1, true
            state.verify_after = state.rows_seen + self.system.n * 2 ** min(state.failures, 6)

    def _settle(self, value: Tensor, r: Tensor) -> None:
        """What will be returned: a value, with the best columns known where they are better; and what is certain of it.

        :param r: its residual.
        """
        self.value, self.residual, self.earlier_columns = self.position.best_of(value, self._relative(r))
        if not self.earlier_columns:
            self.certain = Certificate(self.system.system, None, space=self.space).of(
                self.b, value.to(torch.float64), r
            )

    def _refine(self) -> None:
        """Go on from the true residual; end where that has not helped any column several times."""
        state = self.position
        r, rounded, value = self._true_residual()
        true, self.residual = self._relative(r), self._relative(rounded)
        helped = bool((true <= 0.5 * state.true)[true > self.tol].any()) or bool((true <= self.tol).all())
        state.fruitless = 0 if helped else state.fruitless + 1  # once is nothing: the 2-norm may rise before it falls
        state.corrections += 1
        state.keep(value, self.residual)
        if state.fruitless >= _FRUITLESS:
            state.reason = Reason.STAGNATED
            self._settle(value, rounded)
            return
        self.notes.append(
            f"{str(self.system.dtype).removeprefix('torch.')} products corrected at residual {largest_of(true):.1e}"
        )
        state.base, state.r, state.true = self._iterate(), r, true
        self.method.rebase()

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        """The residual of what is returned: of all rows, or of a sample where the budget ended early.

        :param quick: a sample at the most.  Ctrl-C then leaves the residual as the steps estimated it.
        """
        if self.value is None:
            self._look(quick)
        return self._outcome(reason)

    def give_up(self, reason: Reason) -> Outcome:
        self.value, self.residual, self.sample = self._iterate().to(self.out_dtype), self.position.estimate, 0
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
        return Outcome(self.space.whole(self.value), self.residual, within and self.sample is None, reason, facts)

    def _look(self, quick: bool) -> None:
        n = self.system.n
        if n <= _SAMPLE or (not quick and (n <= _ALL_ROWS or self.system.passes >= _WORTH_ALL_ROWS)):
            _, rounded, value = self._true_residual()
            self._settle(value, rounded)
            return
        self.value = self._iterate().to(self.out_dtype)
        rows = torch.randperm(n, generator=generator(n, "rows of a residual"))[:_SAMPLE].to(self.b.device)
        r = self.system.residual(rows, self.value.to(torch.float64), self.b, accurate=True)
        self.residual, self.sample = self._finite((r * (n / len(rows)) ** 0.5).norm(dim=0)), len(rows)
        self.notes.append(f"residual estimated from {len(rows)} random rows, in float64")

    # --- saving and resuming --------------------------------------------------------------------------------

    @property
    def _vectors(self) -> list[str]:
        return [*VECTORS, *(f"method.{name}" for name in self.method.positions)]

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        own, tensors = self.position.pack()
        tensors |= {f"method.{name}": tensor for name, tensor in self.method.tensors.items()}
        tensors |= {name: self.space.to_write(tensors[name]) for name in self._vectors}
        assert self.generator is not None
        tensors["generator"] = self.generator.get_state()
        plain = {"state": own, "method": self.method.numbers, "engines": self.system.engines, "notes": self.notes,
                 "iterations": self.iterations, "entries": self.system.entries,
                 "products": self.system.system.products}  # fmt: skip
        return plain, tensors

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors = {**tensors, **{name: self.space.own(tensors[name]) for name in self._vectors}}
        self.method.numbers, self.notes, self.iterations = plain["method"], plain["notes"], plain["iterations"]
        self.method.tensors = {k.removeprefix("method."): v for k, v in tensors.items() if k.startswith("method.")}
        self.position = State.unpack(plain["state"], tensors)
        assert self.generator is not None
        self.generator.set_state(tensors["generator"].cpu())
        self.system.entries, self.system.system.products = plain["entries"], plain["products"]
        if self.system.use_engines(plain["engines"]):
            self.notes.append("matmul= is another than before: the last digits are those of another rounding")

    def resume(self, ended: Reason | None) -> Reason | None:
        state = self.position
        another = state.tol != self.tol
        if another:
            state.tol = state.target = self.tol
            state.failures = state.verify_after = 0
        state.reason = None
        if ended in (Reason.REACHED, Reason.ROUNDED, Reason.STAGNATED):
            self._verify_all()
            if another and not state.reason:
                state.failures, state.verify_after, state.target = 0, 0, self.tol
            if ended == Reason.STAGNATED and not state.reason:
                self._look(quick=False)
                state.reason = ended
        elif self.iterations and not state.window_rows and self._due():
            self._verify_all()  # it was ended where it would have done this
        return state.reason

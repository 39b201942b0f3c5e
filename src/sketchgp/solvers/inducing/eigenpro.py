"""EigenPro 3 and 4: preconditioned stochastic gradients for inducing points, projected once in a number of batches.

References: Abedsoltan, Belkin, Pandit, "Toward large kernel models" (ICML 2023), which projects after every batch;
Abedsoltan, Ma, Pandit, Belkin, "Fast training of large kernel models with delayed projections" (2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...checks import count, flag, number, seed, settle, word
from ...errors import InputError
from ...fingerprint import row_numbers, tensor_mark
from ...random_streams import generator
from ...report import Reason
from ...row_sources import RowSource
from ..choices import cut
from ..full.eigenpro2 import settle_subsample
from .epochs import Epochs
from .preconditioned_gradient import Directions, Model, find_directions
from .problem import InducingPointProblem
from .projection import ExactProjection, InexactProjection, Projection, exact_fits
from .solver import InducingPointSolver

_SUBSAMPLE = 2000  # points of an automatic subsample, or four times the rank
_FRESH = 1000  # the most points beside it on which the step is computed
_FURTHER = 4  # times the points of a stream wanted, at most, until half as many are no inducing points
_CHECKED = 8192  # the most training points on which the weights returned are judged
_BEST = "The weights returned are the best so far."


@dataclass(frozen=True, kw_only=True)
class EigenProSolver(InducingPointSolver):
    """Preconditioned stochastic gradients for the inducing-point problem, from tensors or from a stream.

    There is no tolerance: a report's ``residual`` is that of training points, ``||f(x) - y|| / ||y||``, its ``history``
    that at the start and then over each epoch (each batch before its own step), and a solve that has done its epochs,
    or stopped early, is as it should be, though not ``converged``.  Callbacks are called once an epoch.  With held-out
    points the error on them is computed after each epoch, and the weights of the least error are returned.  A solve
    that runs out of time, or is stopped, returns the best weights so far, with a warning.

    Of a stream n is unknown: the first epoch counts the points, and does without the noise.  To have a ``checkpoint``
    it must repeat itself, the same batches in the same order at every start: the first points, those that the set-up
    reads, are compared, and going on skips as many batches as the epoch had seen.  With ``max_seconds`` the step falls
    as time goes by, so that no two solves have the same bits (with ``cooldown=0`` they do).

    :param epochs: the most epochs.
    :param block_size: points of a batch of tensors; None is m / 16, at least 256, at most 2048 and n / 8.  A stream
        comes in its own batches.
    :param rank: q, the directions that are slowed down, cut to the points there are, with a note in the report, like
        ``subsample_size``; None takes as many as a few epochs suffice
        for (``preconditioner="paper"``: the least for which the batch is critical), at most a quarter of the subsample.
    :param subsample_size: s, points for the eigensystem: with an exact projection random ones of tensors, the first
        ones of a stream, which therefore should be shuffled; with an inexact one inducing points, so that nothing has
        to be projected.  None is 2000, at most half of the points, or all inducing points.
    :param projection: ``"exact"``, by a Cholesky factor of Kzz; ``"inexact"``, by conjugate gradients without Kzz;
        ``"auto"`` is exact while Kzz is within :class:`sketchgp.settings.memory_budget`.
    :param preconditioner: ``"projected"``, whose fixed point is the solution; or ``"paper"``, whose fixed point for
        noise 0 is that of the papers, a least-squares fit in which the top directions count less.
    :param step_scale: a factor of the computed step.
    :param averaging: return an average of the iterates that forgets early ones, instead of the last.
    :param cooldown: the last share of the run, in which the step falls linearly to 0; 0 for a constant step.
    :param patience: epochs without a lower held-out error after which to stop; where the step is still constant, it
        first falls to 0 in as many epochs.  None for all epochs.
    :param seed: of all random choices.
    """

    # what "auto" chose, by the memory that was free, is in the checkpoint
    adjustable: ClassVar[tuple[str, ...]] = (*InducingPointSolver.adjustable, "projection")
    _budget: ClassVar[str] = "epochs"
    advice: ClassVar[str] = "Choose projection='exact', a larger subsample_size, or a smaller step_scale."

    epochs: int = 10
    block_size: int | None = None
    rank: int | None = None
    subsample_size: int | None = None
    projection: Literal["auto", "exact", "inexact"] = "auto"
    preconditioner: Literal["projected", "paper"] = "projected"
    step_scale: float = 1.0
    averaging: bool = True
    cooldown: float = 0.5
    patience: int | None = 3
    seed: int = 0

    def __post_init__(self) -> None:
        settle(self, count, "epochs")
        settle(self, count, "block_size", "patience", optional=True)
        self._check_budget()
        settle(self, number, "step_scale", above=0, finite=True)
        settle(self, word, "projection", allowed=("auto", "exact", "inexact"))
        settle(self, word, "preconditioner", allowed=("projected", "paper"))
        settle(self, number, "cooldown", least=0, most=1)
        settle(self, flag, "averaging")
        settle(self, seed, "seed")
        settle_subsample(self)

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem."""
        super().validate(problem)
        if problem.weights is not None:
            raise InputError(f"{self.name}() expects one noise for all points; use KRILL() for a noise of each point.")
        if problem.streamed and self.block_size is not None:
            raise InputError("block_size expects None for a stream, which comes in its own batches; set theirs.")
        if problem.streamed and problem.level > 0 and self.epochs == 1:
            raise InputError(
                "epochs expects at least 2 for a stream with noise: the first counts the points, and does without it."
            )

    def _method(self, problem: InducingPointProblem) -> Epochs:
        stream = generator(self.seed, "EigenPro 3 and 4: rows")
        x, y, batch = self._first_points(problem, stream)
        projection = self._projection(problem, y.shape[1])
        directions = self._directions(problem, projection, x, batch)
        base = torch.zeros(problem.m, y.shape[1], dtype=torch.float64, device=problem.device)
        model = Model(problem, directions, projection, base)
        checked = x[:_CHECKED], y[:_CHECKED].to(torch.float64)
        return Epochs(self, problem, model, batch, stream, checked)

    def _first_points(self, problem: InducingPointProblem, stream: torch.Generator) -> tuple[Tensor, Tensor, int]:
        """Training points and targets ``(c, t)`` in random order, as many as the set-up may use; the batch.

        Of a stream, the first ones, more where they are inducing points; the batch is its first one.
        """
        if isinstance(problem.x, Tensor | RowSource):
            assert problem.y is not None
            n = len(problem.x)
            most = max(_CHECKED, 2 * self._wanted, self._wanted + _FRESH)
            rows = torch.randperm(n, generator=stream)[:most].to(problem.device)
            batch = self.block_size or min(max(256, problem.m // 16), 2048, max(1, n // 8))
            return problem.x[rows], problem.y.reshape(n, -1)[rows], min(batch, n)
        wanted = max(2 * self._wanted, self._wanted + _FRESH)
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        count = fresh = 0
        for x, y in problem.batches():
            xs.append(x)
            ys.append(y.reshape(len(y), -1))
            count += len(x)
            fresh += int(unlike(x, problem.inducing_points).sum())
            if count >= wanted and (fresh >= wanted // 2 or count >= _FURTHER * wanted):
                break
        most = _FURTHER * wanted
        return torch.cat(xs)[:most], torch.cat(ys)[:most], len(xs[0])

    @property
    def _wanted(self) -> int:
        """Size of the subsample, where there are as many points."""
        return self.subsample_size or max(_SUBSAMPLE, 4 * (self.rank or 0))

    def _directions(self, problem: InducingPointProblem, projection: Projection, x: Tensor, batch: int) -> Directions:
        """Return the directions that are slowed down, from training points x in random order.

        The step is computed on points that are neither in the subsample nor inducing points, also by value: what is
        left of the kernel beside the top directions is smaller there.
        """
        commuting = self.preconditioner == "projected"
        if not commuting or isinstance(projection, ExactProjection):
            size = min(len(x), self.subsample_size or max(self.rank or 1, min(self._wanted, len(x) // 2)))
            subsample, others, rows = x[:size], x[size:], None
        else:
            size = min(problem.m, self._wanted)
            order = torch.randperm(problem.m, generator=generator(self.seed, "EigenPro 3 and 4: some inducing points"))
            rows = order[:size].to(problem.device)
            subsample, others = problem.inducing_points[rows], x
        fresh = others[unlike(others, problem.inducing_points, subsample)][:_FRESH]
        if not len(fresh):  # all points are inducing points
            others = problem.inducing_points
            fresh = others[unlike(others, subsample)][:_FRESH]
        return find_directions(problem, projection, subsample, fresh, self.rank, batch, commuting, rows)

    def _projection(self, problem: InducingPointProblem, columns: int) -> Projection:
        if self.projection == "exact" or (self.projection == "auto" and exact_fits(problem)):
            return ExactProjection(problem, columns)
        return InexactProjection(problem, self.seed)

    def _checkpoint_marks(self, problem: InducingPointProblem, method: Epochs) -> dict[str, str]:
        marks = super()._checkpoint_marks(problem, method)
        marks["what projection='auto' chose by free memory (set 'exact' or 'inexact')"] = method.model.projection.kind
        if problem.streamed:
            marks["the beginning of the stream, which must repeat itself,"] = tensor_mark(*method.checked)
        return marks

    def _facts(self, problem: InducingPointProblem, method: Epochs) -> dict[str, Any]:
        directions, projection, batch = method.model.directions, method.model.projection, method.block_size
        rank = directions.factor.shape[1]
        notes = ["the residual is that of training points, not of the normal equations"]
        kind = "inducing points" if isinstance(directions.rows, Tensor) else "points"
        for name in ("rank", "subsample_size"):
            notes += cut(name, getattr(self, name), directions.sampled, kind)
        details: dict[str, float | str] = {
            "block_size": batch,
            "subsample_size": directions.sampled,
            "step": self.step_scale * directions.step(batch),
            "projection": projection.kind,
            "delay": method.delay,
        }
        if projection.worst:
            notes.append("projections ended above their tolerance")
            details["projection_residual"] = projection.worst
        if method.without_noise:
            notes.append("ended in its first epoch of the stream, which is without the noise")
        return {
            "preconditioner": f"{rank} of {directions.sampled} directions",
            "rank": rank,
            "dtype": str(problem.inducing_points.dtype).removeprefix("torch."),
            "details": details,
            "notes": notes + method.notes,
            "remedies": {
                Reason.TIME: f"{_BEST} Raise max_seconds, and go on from them with initial= or from a checkpoint.",
                Reason.CALLBACK: f"{_BEST} Go on from them with initial=.",
                Reason.INTERRUPTED: f"{_BEST} Go on from them with initial=.",
            },
        }


@dataclass(frozen=True, kw_only=True)
class EigenPro3(EigenProSolver):
    """Minimises ``sum_i (f(x_i) - y_i)^2 + noise ||f||^2`` over ``f = k(., z) W`` by stochastic gradients in function
    space, the top q directions of the kernel slowed down, f projected on the span of z after every batch.

    A batch of b costs ``2 b m`` kernel evaluations at most and a projection ``Kzz theta = h``: ``2 m^2`` operations
    by a Cholesky factor, tens of ``m^2`` kernel evaluations by conjugate gradients.  Memory O(m q) for the directions
    and, with the inexact projection, 1000 m at most for its preconditioner; n does not matter, and x may be a stream.
    Step and rank are computed; with noise 0 it interpolates, and regularises by stopping early on held-out points.

    With a constant step SGD hovers above the optimum.  So the step falls to 0 in the second half of the run, and an
    average of the iterates is returned.

    Choose it while Kzz fits into memory and the data do not; for tensors KRILL is exact, and beyond that
    :class:`EigenPro4` projects less often.  "EigenPro 3-ExactProjection" of the papers is
    ``EigenPro3(projection="exact", preconditioner="paper", averaging=False, cooldown=0)``.

    The parameters are those of :class:`EigenProSolver`.
    """

    delay: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class EigenPro4(EigenProSolver):
    """Minimises ``sum_i (f(x_i) - y_i)^2 + noise ||f||^2`` over ``f = k(., z) W`` by stochastic gradients in function
    space, the top q directions of the kernel slowed down, f projected on the span of z once in T batches.

    Between two projections the points of the T batches are inducing points too.  A batch of b costs ``b m`` kernel
    evaluations and at most ``b^2 T`` for those points; a projection tens of ``m^2`` (or ``2 m^2`` operations where Kzz
    fits into memory).  T balances the two (:meth:`delay_for`), so an epoch is linear in m.  Memory O(m q + T b), with
    the inexact projection 1000 m at most for its preconditioner; n does not matter, and x may be a stream.

    What T batches fit is only then projected, which biases the fixed point by O(T step), away from the least squares
    solution.  The step falls to 0 in the second half of the run, and takes that bias with it.

    Choose it where m x m matrices do not fit into memory, or x does not; else KRILL is exact and faster.

    :param delay: T; None for :meth:`delay_for`.  A projection also ends every epoch.

    The other parameters are those of :class:`EigenProSolver`.
    """

    advice: ClassVar[str] = EigenProSolver.advice.replace("projection=", "a larger delay, projection=")
    delay: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, count, "delay", optional=True)

    @staticmethod
    def delay_for(m: int, batch: int, cost: float) -> int:
        """``(m / batch) sqrt(2 cost)``, at least 1: T with the least work a batch (the paper's equation 35).

        :param cost: of a projection, in evaluations of Kzz (the paper's ``T_ep2``).
        """
        return max(1, round(m / batch * math.sqrt(2 * cost)))


def unlike(x: Tensor, *others: Tensor) -> Tensor:
    """Return which rows of x ``(n, d)`` equal, in all features, no row of the others ``(m, d)``: ``(n,)`` bool.

    Rows are compared by their hashes.  On the points that made it a preconditioner looks better than it is.
    """
    numbers, *known = (row_numbers(points + 0.0) for points in (x, *others))  # -0.0 becomes 0.0
    return torch.isin(numbers, torch.cat(known), invert=True)

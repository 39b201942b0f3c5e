"""What EigenPro 3 and 4 share: their choices, and how a solve is put together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import count, flag, function, like, number, pair, seed, settle, tolerance, word
from ...errors import ConvergenceWarning, InputError, warn
from ...random_streams import generator
from ...report import SolveReport, peak_memory, record
from ..problem import Solution
from .epochs import Epoch, Epochs, Plan, check_columns
from .fresh import unlike
from .held_out import InducingHeldOut
from .preconditioned_gradient import Directions, Model, find_directions
from .problem import InducingPointProblem, check_inducing
from .projection import ExactProjection, InexactProjection, Projection, exact_fits

_SUBSAMPLE = 2000  # points of an automatic subsample, or four times the rank
_FRESH = 1000  # the most points beside it on which the step is computed
_FURTHER = 4  # times the points of a stream wanted, at most, until half as many are no inducing points
_CHECKED = 8192  # the most training points on which the weights returned are judged
_PROJECTION_RANK = 1000  # the most of an automatic one, so that memory is linear in m
_ITERATIONS = 200  # the most of a projection by conjugate gradients


@dataclass(frozen=True, kw_only=True)
class EigenProSolver:
    """Preconditioned stochastic gradients for the inducing-point problem, from tensors or from a stream.

    :param epochs: the most epochs.
    :param max_seconds: no batch is begun after so many seconds; None is no limit.
    :param block_size: points of a batch of tensors; None is m / 16, at least 256, at most 2048 and n / 8.  A stream
        comes in its own batches.
    :param rank: q, the directions that are slowed down; None takes as many as a few epochs suffice
        for (``preconditioner="paper"``: the least for which the batch is critical), at most a quarter of the subsample.
    :param subsample_size: s, points for the eigensystem: with an exact projection random ones of tensors, the first
        ones of a stream, which therefore should be shuffled; with an inexact one inducing points, so that nothing has
        to be projected.  None is 2000, at most half of the points, or all inducing points.
    :param projection: ``"exact"``, by a Cholesky factor of Kzz; ``"inexact"``, by conjugate gradients without Kzz;
        ``"auto"`` is exact while Kzz is within :class:`sketchgp.settings.memory_budget`.
    :param projection_tol: relative residual of an inexact projection.
    :param projection_rank: of its RPCholesky preconditioner; None is ``10 sqrt(m)``, at most 1000.
    :param preconditioner: ``"projected"``, whose fixed point is the solution; or ``"paper"``, whose fixed point for
        noise 0 is that of the papers, a least-squares fit in which the top directions count less.
    :param step_scale: a factor of the computed step.
    :param averaging: return an average of the iterates that forgets early ones, instead of the last.
    :param cooldown: the last share of the run, in which the step falls linearly to 0; 0 for a constant step.
    :param patience: epochs without a lower held-out error after which to stop; where the step is still constant, it
        first falls to 0 in as many epochs.  None for all epochs.
    :param seed: of all random choices.
    """

    epochs: int = 10
    max_seconds: float | None = None
    block_size: int | None = None
    rank: int | None = None
    subsample_size: int | None = None
    projection: str = "auto"
    projection_tol: float = 1e-2
    projection_rank: int | None = None
    preconditioner: str = "projected"
    step_scale: float = 1.0
    averaging: bool = True
    cooldown: float = 0.5
    patience: int | None = 3
    seed: int = 0

    def __post_init__(self) -> None:
        settle(self, count, "epochs")
        settle(self, count, "block_size", "rank", "subsample_size", "projection_rank", "patience", optional=True)
        settle(self, number, "max_seconds", above=0, finite=True, optional=True)
        settle(self, number, "step_scale", above=0, finite=True)
        settle(self, word, "projection", allowed=("auto", "exact", "inexact"))
        settle(self, word, "preconditioner", allowed=("projected", "paper"))
        settle(self, tolerance, "projection_tol")
        settle(self, number, "cooldown", least=0, most=1)
        settle(self, flag, "averaging")
        settle(self, seed, "seed")
        if self.rank is not None and self.subsample_size is not None and self.rank > self.subsample_size:
            raise InputError(f"rank={self.rank} expects a subsample_size of as many, got {self.subsample_size}.")

    @property
    def name(self) -> str:
        return type(self).__name__

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem."""
        if problem.weights is not None:
            raise InputError(f"{self.name}() expects one noise for all points; use KRILL() for a noise of each point.")
        if problem.streamed and self.block_size is not None:
            raise InputError("block_size expects None for a stream, which comes in its own batches; set theirs.")
        if problem.streamed and problem.level > 0 and self.epochs == 1:
            raise InputError(
                "epochs expects at least 2 for a stream with noise: the first counts the points, and does without it."
            )
        if torch.is_tensor(problem.x):
            for name in ("rank", "subsample_size"):
                if (getattr(self, name) or 0) > len(problem.x):
                    raise InputError(
                        f"{self.name}({name}={getattr(self, name)}) exceeds the {len(problem.x)} points; choose fewer."
                    )

    def _delay(self, problem: InducingPointProblem, batch: int, projection: Projection) -> int:
        """T, the batches between two projections."""
        raise NotImplementedError

    def _advice(self) -> str:
        return (
            "Choose projection='exact' or a smaller projection_tol, a larger subsample_size, or a smaller step_scale."
        )

    def solve(
        self,
        problem: InducingPointProblem,
        initial: Tensor | None = None,
        callback: Callable[[Epoch], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve an :class:`InducingPointProblem` of tensors or of a stream.

        :param initial: starting point, of the solution's shape.
        :param callback: called with an :class:`Epoch` once an epoch; True ends the solve.
        :param held_out: points ``(p, d)`` and targets ``(p,)`` or ``(p, t)``: after each epoch their root mean square
            error is computed; the best weights are kept and returned.
        :param progress: show a progress bar (default: only in a terminal).
        :returns: W, ``(m,)`` or ``(m, t)``, float64.  There is no tolerance: the report's ``residual`` is that of
            training points, ``||f(x) - y|| / ||y||``, ``history`` the same over each epoch (each batch before its own
            step), and ``held_out`` lists (epochs, seconds, error of each column).
        :raises InputError: for arguments that do not fit, or batches that do not.
        :raises NumericalError: where it diverges, or a projection does not converge.

        With a stream n is unknown: the first epoch counts the points, and does without the noise.
        Ctrl-C ends the solve with the best weights so far, and a warning.
        """
        start, owner = time.perf_counter(), f"{self.name}.solve"
        check_inducing(owner, problem)
        function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        self.validate(problem)
        stream = generator(self.seed, "EigenPro 3 and 4: rows")
        x, y, vector, batch = self._first_points(problem, stream)
        columns = y.shape[1]
        shape = (problem.m,) if vector else (problem.m, columns)
        if initial is not None:
            like(owner, "initial", initial, shape, problem.device, whose="the solution's")
        held_out = pair(owner, held_out, problem.inducing_points, shape[1:])
        error = None if held_out is None else InducingHeldOut(problem, *held_out)
        base = torch.zeros(problem.m, columns, dtype=torch.float64, device=problem.device)
        if initial is not None:
            base += initial.reshape(base.shape).to(base)
        projection = self._projection(problem, columns)
        directions, size = self._directions(problem, projection, x, batch)
        plan = Plan(
            self.epochs,
            self.max_seconds,
            batch,
            lambda: self._delay(problem, batch, projection),
            self.step_scale,
            self.averaging,
            self.cooldown,
            self.patience if held_out is not None else None,
            self._advice(),
        )
        checked = x[:_CHECKED], y[:_CHECKED].to(torch.float64)
        model = Model(problem, directions, projection, base)
        setup = time.perf_counter() - start
        run = Epochs(problem, model, plan, stream, error, checked, callback)
        run.loop(progress)
        report = self._report(problem, run, directions, projection, size, setup)
        record(report)
        if not run.reason.startswith(("finished", "stopped early")):
            warn(
                f"{self.name} {report.reason} after {run.epoch} epochs; the weights returned are the best so far. "
                "Go on from them with initial=.",
                ConvergenceWarning,
            )
        return Solution(run.value.reshape(shape), report)

    def _first_points(self, problem: InducingPointProblem, stream: torch.Generator) -> tuple[Tensor, Tensor, bool, int]:
        """Training points and targets in random order, as many as the set-up may use; whether y is a vector; the batch.

        Of a stream, the first ones, more where they are inducing points; the batch is its first one.
        """
        if torch.is_tensor(problem.x):
            assert problem.y is not None
            n = len(problem.x)
            most = max(_CHECKED, 2 * self._wanted, self._wanted + _FRESH)
            rows = torch.randperm(n, generator=stream)[:most].to(problem.device)
            batch = self.block_size or min(max(256, problem.m // 16), 2048, max(1, n // 8))
            return problem.x[rows], problem.y.reshape(n, -1)[rows], problem.y.dim() == 1, min(batch, n)
        wanted = max(2 * self._wanted, self._wanted + _FRESH)
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        count, fresh, vector = 0, 0, False
        for x, y in problem.batches():
            vector = y.dim() == 1 if not ys else vector
            xs.append(x)
            ys.append(y.reshape(len(y), -1))
            check_columns(len(ys) - 1, ys[-1], ys[0].shape[1])
            count += len(x)
            fresh += int(unlike(x, problem.inducing_points).sum())
            if count >= wanted and (fresh >= wanted // 2 or count >= _FURTHER * wanted):
                break
        if not xs:
            raise InputError("x expects a stream of at least one batch, got none.")
        most = _FURTHER * wanted
        return torch.cat(xs)[:most], torch.cat(ys)[:most], vector, len(xs[0])

    def _subsample_size(self, count: int) -> int:
        """s, of ``count`` points that are at hand."""
        if (self.rank or 0) > count:
            raise InputError(f"rank={self.rank} exceeds the {count} points of the stream; choose fewer.")
        if self.subsample_size is not None:
            return min(self.subsample_size, count)
        return max(self.rank or 0, min(self._wanted, max(1, count // 2)))

    @property
    def _wanted(self) -> int:
        """s, where there are as many points."""
        return self.subsample_size or max(_SUBSAMPLE, 4 * (self.rank or 0))

    def _directions(
        self, problem: InducingPointProblem, projection: Projection, x: Tensor, batch: int
    ) -> tuple[Directions, int]:
        """From training points x in random order; and s, the size of the subsample.

        The step is computed on points that are neither in the subsample nor inducing points, also by value: what is
        left of the kernel beside the top directions is smaller there.
        """
        commuting = self.preconditioner == "projected"
        if not commuting or isinstance(projection, ExactProjection):
            size = self._subsample_size(len(x))
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
        return find_directions(problem, projection, subsample, fresh, self.rank, batch, commuting, rows), size

    def _projection(self, problem: InducingPointProblem, columns: int) -> Projection:
        if self.projection == "exact" or (self.projection == "auto" and exact_fits(problem)):
            return ExactProjection(problem, columns)
        if (self.rank or 0) > problem.m and self.preconditioner == "projected":
            raise InputError(f"rank={self.rank} exceeds the {problem.m} inducing points; choose fewer.")
        rank = self.projection_rank or min(_PROJECTION_RANK, math.ceil(10 * math.sqrt(problem.m)))
        return InexactProjection(problem, columns, self.projection_tol, rank, _ITERATIONS, self.seed)

    def _report(
        self,
        problem: InducingPointProblem,
        run: Epochs,
        directions: Directions,
        projection: Projection,
        size: int,
        setup: float,
    ) -> SolveReport:
        rank = directions.factor.shape[1]
        kind = "exact" if isinstance(projection, ExactProjection) else "inexact"
        notes = [
            "the residual is that of training points, not of the normal equations",
            f"batches of {run.plan.block_size}, step {run.plan.step_scale * directions.step(run.plan.block_size):.3g}, "
            f"{run.projections} {kind} projections, one every {run.delay} batches at most",
        ]
        if problem.streamed and problem.level > 0 and run.epoch < 2:
            notes.append("ended in its first epoch of the stream, which is without the noise")
        return SolveReport(
            solver=self.name,
            preconditioner=f"{rank} of {size} directions",
            n=problem.m,
            columns=run.value.shape[1],
            iterations=run.batches,
            matmuls=run.projections,
            residual=run.residual,
            history=torch.stack(run.history) if run.history else run.first.unsqueeze(0),
            tol=float("inf"),
            converged=False,  # there is no tolerance that was met
            reason=run.reason,
            seconds=run.seconds,
            setup_seconds=setup,
            rank=rank,
            dtype=str(problem.inducing_points.dtype).removeprefix("torch."),
            device=str(problem.device),
            peak_memory=peak_memory(problem.device),
            notes=notes + projection.notes + run.notes,
            passes=self._passes(problem, run, projection),
            held_out=run.errors,
        )

    @staticmethod
    def _passes(problem: InducingPointProblem, run: Epochs, projection: Projection) -> float:
        """Kernel evaluations over n m; of Kzz each pair counts once."""
        m, n = problem.m, run.total or problem.expected_rows or run.rows
        return (run.model.entries + projection.products * m * (m + 1) / 2) / max(1, n * m)

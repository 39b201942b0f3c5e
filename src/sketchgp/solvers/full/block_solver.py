"""The base class of blockwise solvers: choices that they share, and how a choice becomes a solve."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import count, number, seed, settle, tolerance
from ...errors import InputError
from ...operators.access import accuracy_notes
from ...operators.engines import Matmul
from ...operators.marks import operator_marks
from ...report import SolveReport, conclude, merged
from ..choices import FullSolver
from ..loop import Progress, clock, compare_ranks, solve_marks
from ..problem import FullProblem, Solution
from ..system import System, automatic_block_size
from .refinement import BlockMethod, Refinement


@dataclass(frozen=True, kw_only=True)
class BlockSolver(FullSolver):
    """Base class: solves ``(K + noise) W = Y`` by steps that evaluate some rows of K each.

    :param tol: relative residual ``||y - (K + noise) w|| / ||y||`` that every column must reach; None is 1e-3, or
        GPyTorch's ``eval_cg_tolerance`` in a model where that is smaller.
    :param max_passes: the most work, in entries of K evaluated over ``n^2``; not counting the last residual, nor
        that of a warm start.
    :param block_size: rows a step, or None: see :func:`automatic_block_size`.
    :param seed: seed of every random choice.

    ``max_seconds``, ``checkpoint`` and ``every`` are those of :class:`sketchgp.solvers.Budgeted`.
    """

    adjustable: ClassVar[tuple[str, ...]] = (*FullSolver.adjustable, "max_passes")

    tol: float | None = None
    max_passes: float = 200.0
    block_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        settle(self, tolerance, "tol", optional=True)
        settle(self, number, "max_passes", above=0)
        self._check_budget()
        settle(self, count, "block_size", optional=True)
        settle(self, seed, "seed")

    def validate(self, problem: FullProblem) -> None:
        """:raises InputError: for anything but a :class:`FullProblem`, or if a choice does not fit its n points."""
        super().validate(problem)
        self.check_size(len(problem.x))

    def check_size(self, n: int) -> None:
        """:raises InputError: if a choice does not fit n points."""
        if self.block_size is not None and self.block_size > n:
            raise InputError(f"{self.name}(block_size={self.block_size}) exceeds the {n} points; choose at most {n}.")

    def notes(self, n: int) -> list[str]:
        """Return notes for the report, where choices were cut to n points."""
        return []

    def method(self, system: System, block_size: int) -> BlockMethod:
        """Return the method at work on one system."""
        raise NotImplementedError

    def solve(
        self,
        problem: FullProblem,
        matmul: Matmul = "auto",
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve a :class:`FullProblem`.

        :param matmul: ``"auto"``, ``"dense"``, ``"fused"``, ``"lattice"``, ``"near_and_far"``, ``"tiled"`` or
            ``"triton"``.
        :param initial: starting point in y's shape; costs one product with K.
        :param callback: called with a :class:`Progress` after every pass, or 50,000 rows where that is less;
            returning True ends the solve.
        :param held_out: points ``(m, d)`` and targets ``(m,)`` or ``(m, t)`` whose root mean square error is computed
            as the solve goes on (in at most a tenth of the work) and kept in the report.
        :param progress: show a progress bar (default: in a terminal or notebook).
        :raises InputError: for arguments that do not fit; :raises NumericalError: for NaN, or where it diverges.

        Ctrl-C ends the solve after the step under way, with the iterate, its residual (on at most 8,192 rows) and a
        warning; before the first step, and in what comes before it, it is passed on.
        """
        self.validate(problem)
        options = self._full_options(problem, matmul, initial, callback, held_out, progress)
        value, report = self.run(problem.system(matmul), problem.y.reshape(len(problem.x), -1), **options)
        return Solution(value.reshape(problem.y.shape), report, problem)

    @torch.no_grad()
    def run(self, system: System, rhs: Tensor, **options: Any) -> tuple[Tensor, SolveReport]:
        """Solve one system (or each of a batch) with rhs ``(..., n, t)`` and record one report of all.

        :param options: ``initial``, ``callback``, ``held_out`` and ``progress`` as those of :meth:`solve`;
            ``keep_interrupted`` to return the iterate with a warning on Ctrl-C, instead of raising.
        """
        batch = torch.broadcast_shapes(rhs.shape[:-2], system.batch_shape)
        if batch and self.checkpoint is not None:
            raise InputError("checkpoint expects a single system; solve the parts of a batch one by one.")
        rhs = rhs.expand(*batch, *rhs.shape[-2:])
        indices = itertools.product(*(range(size) for size in batch))
        solved = [self._run(system.element(i, batch) if batch else system, rhs[i], **options) for i in indices]
        values, reports = zip(*solved, strict=True)
        report = merged(reports)
        conclude(report)
        return torch.stack(values).reshape(rhs.shape) if batch else values[0], report

    def _run(self, system: System, rhs: Tensor, **options: Any) -> tuple[Tensor, SolveReport]:
        """Solve one system.

        :param options: those of a run.
        """
        began = clock()
        system = system.fresh()

        def marks() -> dict[str, str]:
            return {**operator_marks(system.operator), **solve_marks(system.noise, rhs, self._described())}

        compare_ranks(self.name, marks)
        size = min(self.block_size or automatic_block_size(system.n, rhs.device, system.engines), system.n)
        method = self.method(system, size)
        refinement = Refinement(system, method, rhs.to(torch.float64), rhs.dtype, self.tol or 1e-3, self.seed)
        value, report = self._execute(refinement, self.max_passes, lambda: (marks(), {}), began=began, **options)
        report.notes += [*self.notes(system.n), *accuracy_notes(system.operator)]
        return value, report

"""What users choose for every blockwise solver, and how a choice becomes a solve."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import count, flag, function, like, number, pair, path, seed, settle, tolerance
from ...errors import InputError
from ...fingerprint import hash_tensors
from ...operators import KernelMatrix
from ...report import SolveReport, conclude
from ..loop import Checkpoint, Progress, fingerprint
from ..problem import FullProblem, Solution, System, check_problem
from .method import HeldOut, Limits, Method
from .run import Run
from .system import BlockSystem, automatic_block_size

_BUDGET = ("tol", "max_passes", "max_seconds", "checkpoint", "every")  # choices that change no step


@dataclass(frozen=True, kw_only=True)
class BlockSolver:
    """Base class: solves ``(K + noise) W = Y`` by steps that evaluate some rows of K each.

    :param tol: relative residual ``||y - (K + noise) w|| / ||y||`` that every column must reach; None is 1e-3, or
        GPyTorch's ``eval_cg_tolerance`` in a model where that is smaller.
    :param max_passes: the most work, in entries of K evaluated over ``n^2``; not counting the last residual, nor
        that of a warm start.
    :param max_seconds: the most time for steps, earlier runs of a resumed solve included; None for no limit.
    :param block_size: rows a step, or None: see :func:`automatic_block_size`.
    :param seed: seed of every random choice.
    :param checkpoint: a file to keep the state of the solve in.  If it exists the solve goes on from it, and ends with
        the bits that an uninterrupted one ends with (on the same device and number of threads).  It holds tensors
        only.  Of another problem, or with other choices than budget and tolerance, it is refused; so is a path that
        another solve, in this process or another, is using (a lock on ``path.lock``, which ends with the process).
    :param every: seconds between two writes of the checkpoint.
    """

    tol: float | None = None
    max_passes: float = 200.0
    max_seconds: float | None = None
    block_size: int | None = None
    seed: int = 0
    checkpoint: str | os.PathLike[str] | None = None
    every: float = 60.0

    def __post_init__(self) -> None:
        settle(self, tolerance, "tol", optional=True)
        settle(self, number, "max_passes", "every", above=0)
        settle(self, number, "max_seconds", above=0, optional=True)
        settle(self, count, "block_size", optional=True)
        settle(self, seed, "seed")
        settle(self, path, "checkpoint", optional=True)

    @property
    def name(self) -> str:
        """The method's name, as reports print it."""
        return type(self).__name__

    def validate(self, n: int) -> None:
        """:raises InputError: if a choice does not fit n points."""
        if self.block_size is not None and self.block_size > n:
            raise InputError(f"{self.name}(block_size={self.block_size}) exceeds the {n} points; choose at most {n}.")

    def method(self, system: BlockSystem, block_size: int) -> Method:
        """The method at work on one system."""
        raise NotImplementedError

    def solve(
        self,
        problem: FullProblem,
        matmul: str = "auto",
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve a :class:`FullProblem`.

        :param matmul: ``"auto"``, ``"dense"``, ``"tiled"``, ``"keops"`` or ``"triton"``.
        :param initial: starting point in y's shape; costs one product with K.
        :param callback: called with a :class:`Progress` after every pass, or 50,000 rows where that is less;
            returning True ends the solve.
        :param held_out: points ``(m, d)`` and targets ``(m,)`` or ``(m, t)`` whose root mean square error is computed
            as the solve goes on (in at most a tenth of the work) and kept in the report.
        :param progress: show a progress bar (default: only in a terminal).
        :raises InputError: for arguments that do not fit; :raises NumericalError: for NaN, or where it diverges.

        Ctrl-C ends the solve after the step under way, with the iterate, its residual (on at most 8,192 rows) and a
        warning; before the first step, and in what comes before it, it is passed on.
        """
        owner = f"{self.name}.solve"
        check_problem(owner, problem)
        self.validate(len(problem.x))
        if initial is not None:
            like(owner, "initial", initial, problem.y.shape, problem.y.device, whose="y's")
        function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        held_out = pair(owner, held_out, problem.x, problem.y.shape[1:])
        columns = problem.y.reshape(len(problem.x), -1)
        value, report, _ = self.run(
            problem.system(matmul),
            columns,
            initial=None if initial is None else initial.reshape(columns.shape),
            callback=callback,
            held_out=None if held_out is None else _held_out(problem, matmul, *held_out),
            progress=progress,
            keep_interrupted=True,
        )
        return Solution(value.reshape(problem.y.shape), report)

    @torch.no_grad()
    def run(
        self,
        system: System,
        rhs: Tensor,
        *,
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: HeldOut | None = None,
        progress: bool | None = None,
        keep_interrupted: bool = False,
    ) -> tuple[Tensor, SolveReport, Tensor | None]:
        """Solve one system (or each of a batch) with rhs ``(..., n, t)`` and record its report.

        :param keep_interrupted: on Ctrl-C, return the iterate with a warning instead of raising.
        """
        batch = torch.broadcast_shapes(rhs.shape[:-2], system.operator.batch_shape, system.noise.shape[:-1])
        if batch and self.checkpoint is not None:
            raise InputError("checkpoint expects a single system; solve the parts of a batch one by one.")
        rhs = rhs.expand(*batch, *rhs.shape[-2:])
        values, reports = [], []
        for index in itertools.product(*(range(size) for size in batch)):
            part = system.element(index, batch) if batch else system
            value, report = self._run(part, rhs[index], initial, callback, held_out, progress, keep_interrupted)
            values.append(value)
            reports.append(report)
            conclude(report)
        return torch.stack(values).reshape(rhs.shape) if batch else values[0], reports[-1], None

    def _run(
        self,
        system: System,
        rhs: Tensor,
        initial: Tensor | None,
        callback: Callable[[Progress], Any] | None,
        held_out: HeldOut | None,
        progress: bool | None,
        keep_interrupted: bool,
    ) -> tuple[Tensor, SolveReport]:
        start = time.perf_counter()
        rows = BlockSystem(system)
        checkpoint = None
        if self.checkpoint is not None:
            choices = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _BUDGET}
            described = f"{self.name} {choices} {rhs.dtype}"
            marks = fingerprint(system.operator, system.noise, rhs, described)
            checkpoint = Checkpoint(self.checkpoint, self.every, marks)
        size = min(self.block_size or automatic_block_size(system.n, rhs.device), system.n)
        method = self.method(rows, size)
        setup = time.perf_counter() - start
        with nullcontext() if checkpoint is None else checkpoint.reserved():
            run = Run(
                rows,
                method,
                rhs.to(torch.float64),
                rhs.dtype,
                Limits(self.tol or 1e-3, self.max_passes, self.max_seconds),
                self.seed,
                initial=initial,
                checkpoint=checkpoint,
                callback=callback,
                held_out=held_out,
                raising=not keep_interrupted,
            )
            run.loop(progress)
        assert run.value is not None
        return run.value, run.report(method.describe(), setup)


def _held_out(problem: FullProblem, matmul: str, x: Tensor, y: Tensor) -> HeldOut:
    """The error on held-out points as a function of W."""
    cross = KernelMatrix.of(problem.kernel, x, problem.x, engine=matmul).detach()
    wanted = y.reshape(len(x), -1).to(torch.float64)

    return _HeldOut(cross, wanted)


class _HeldOut:
    """The root mean square error ``(t,)`` of ``k(held-out, x) W``, and the entries of K that it took."""

    def __init__(self, cross: KernelMatrix, wanted: Tensor) -> None:
        self.cross, self.wanted, self.mark = cross, wanted, hash_tensors(cross.x1, wanted)

    def __call__(self, weights: Tensor) -> tuple[Tensor, int]:
        predicted = self.cross._matmul(weights.to(self.cross.dtype)).to(torch.float64)
        return (predicted - self.wanted).square().mean(dim=0).sqrt().cpu(), self.cross.shape.numel()

"""Solves that begin with the solutions that a fit by samples has left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...report import SolveReport
from ...solvers import BlockSolver, System
from ...solvers.solver import solve_system
from ...space import Space


@dataclass(frozen=True)
class Left:
    """What the last evaluation of a fit by samples has solved for, at hyperparameters near those that were kept.

    :ivar seed: of the samples; :ivar targets: the solutions ``(n, t)`` of the model's targets, less its mean;
    :ivar samples: and those of the samples, ``(n, S)``.  Both float64.
    """

    seed: int
    targets: Tensor
    samples: Tensor


@torch.no_grad()
def solve_from(solver: Any, system: System, rhs: Tensor, before: Tensor | None) -> tuple[Tensor, SolveReport]:
    """``A^-1 rhs`` ``(n, t)``, from a solution of nearly the same system.

    From zero where there is none, where one of its columns is not nearer than that, and where the solver knows no
    start, or keeps a checkpoint, which is of a solve from zero; and where ranks work together, of which each may
    have another start, or none.
    """
    warm = isinstance(solver, BlockSolver) and solver.checkpoint is None and not Space.of(system.n).shared
    if not warm or before is None or before.shape != rhs.shape or before.device != rhs.device:
        return solve_system(solver, system, rhs)
    residual = rhs.to(torch.float64) - system.accurate_product(before)
    if not bool((residual.norm(dim=0) < rhs.norm(dim=0)).all()):
        return solve_system(solver, system, rhs)
    value, report, _ = solver.run(system, rhs, initial=before)
    report.notes.append("began with the solution that a fit has left")
    return value, report

"""Solves that start from the solutions of a fit by samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...report import SolveReport
from ...solvers import BlockSolver, System
from ...solvers.solver import solve_system
from ...space import Space


@torch.no_grad()
def solve_from(solver: Any, system: System, rhs: Tensor, before: Tensor | None) -> tuple[Tensor, SolveReport]:
    """Return ``A^-1 rhs``, ``(n, t)``, starting from a solution of nearly the same system.

    The solve starts from zero where there is no such solution, or where one of its columns is no nearer than zero.  So
    it does where the solver takes no start or keeps a checkpoint, and where ranks, whose starts may differ, work
    together.
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

"""The direct solve: Cholesky factorization of the whole matrix in float64, for small n and as the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import NumericalError
from ...memory import enough_memory
from ...operators.access import columns
from ...report import SolveReport
from ..loop import Direct
from ..problem import FullProblem, Solution, System, check_problem


@dataclass(frozen=True)
class Cholesky:
    """``W = (K + noise)^-1 Y`` by a float64 Cholesky factorization: ``n^3 / 3`` operations and ``24 n^2`` bytes.

    Choose it up to some 10,000 points, or to check another solver.
    """

    def solve(self, problem: FullProblem) -> Solution:
        """Solve a :class:`FullProblem`.

        :raises InputError: if the matrix does not fit in memory; :raises NumericalError: if it is not positive
            definite in float64.
        """
        check_problem("Cholesky.solve", problem)
        value, report, _ = self.run(problem.system("tiled"), problem.y.reshape(problem.y.shape[0], -1))
        return Solution(value.reshape(problem.y.shape), report)

    @torch.no_grad()
    def run(self, system: System, rhs: Tensor) -> tuple[Tensor, SolveReport, Tensor | None]:
        """Solve one system (or a batch) with rhs ``(..., n, t)`` and record its report."""
        direct, n, device = Direct(), system.n, rhs.device
        batch = torch.broadcast_shapes(system.operator.batch_shape, system.noise.shape[:-1])
        needed = 24 * n * n * batch.numel()  # the matrix, its factor, and a copy while that is made
        with enough_memory(needed, device, f"Cholesky() for n = {n}", "use solver=sketchgp.ConjugateGradients()."):
            value, residual = _solved(system, rhs, direct)
        report = direct.report(
            "Cholesky", n, n, 1.0, residual, 1e-3, device,
            f"{system.dtype} cannot hold the solution; use a float64 model and data.",
            dtype=str(system.dtype).removeprefix("torch."),
        )  # fmt: skip
        return value, report, None


def _solved(system: System, rhs: Tensor, direct: Direct) -> tuple[Tensor, Tensor]:
    """The solution in rhs's dtype and shape, and its relative residual ``(..., t)``."""
    operator = system.operator if system.dtype == torch.float64 else system.operator.type(torch.float64)
    matrix = columns(operator, torch.arange(system.n, device=rhs.device)).to(torch.float64)
    batch = torch.broadcast_shapes(matrix.shape[:-2], system.noise.shape[:-1])
    matrix = matrix.expand(*batch, *matrix.shape[-2:]).clone() if batch != matrix.shape[:-2] else matrix
    matrix.diagonal(dim1=-2, dim2=-1).add_(system.noise.to(torch.float64))
    root, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        raise NumericalError("The kernel matrix plus noise is not positive definite in float64; raise the noise.")
    direct.factorized()
    work = rhs.to(torch.float64)
    value = torch.cholesky_solve(work, root).to(rhs.dtype)
    norm = work.norm(dim=-2)
    return value, (work - matrix @ value.to(torch.float64)).norm(dim=-2) / torch.where(norm > 0, norm, 1)

"""The direct solve: Cholesky factorization of the whole matrix in float64, for small n and as the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import NumericalError
from ...memory import enough_memory, require_memory
from ...operators import KernelMatrix
from ...operators.access import columns, terms
from ...operators.substitution import cholesky_solve
from ...report import SolveReport
from ..certificate import Certificate
from ..loop import clock, concluded
from ..problem import FullProblem, Solution, check_problem
from ..system import System


@dataclass(frozen=True)
class Cholesky:
    """``W = (K + noise)^-1 Y`` by a float64 Cholesky factorization: ``n^3 / 3`` operations and ``24 n^2`` bytes.

    Choose it up to some 10,000 points, or to check another solver.
    """

    problem_type: ClassVar[type[FullProblem]] = FullProblem
    name: ClassVar[str] = "Cholesky"

    def validate(self, problem: FullProblem) -> None:
        """:raises InputError: for anything but a :class:`FullProblem`, or where its matrix does not fit in memory."""
        check_problem("Cholesky.solve", problem)
        require_memory(*_memory(len(problem.x), 1, problem.x.device))

    def solve(self, problem: FullProblem) -> Solution:
        """Solve a :class:`FullProblem`.

        :raises InputError: if the matrix does not fit in memory; :raises NumericalError: if it is not positive
            definite in float64.
        """
        self.validate(problem)
        value, report = self.run(problem.system("tiled"), problem.y.reshape(problem.y.shape[0], -1))
        return Solution(value.reshape(problem.y.shape), report, problem)

    @torch.no_grad()
    def run(self, system: System, rhs: Tensor) -> tuple[Tensor, SolveReport]:
        """Solve one system (or a batch) with rhs ``(..., n, t)`` and record its report."""
        return self.factorize(system, rhs)[:2]

    @torch.no_grad()
    def factorize(self, system: System, rhs: Tensor) -> tuple[Tensor, SolveReport, Tensor]:
        """Return value and report of :meth:`run`, and the Cholesky factor of ``K + noise``, ``(..., n, n)`` float64."""
        began, n, b = clock(), system.n, rhs.to(torch.float64)
        with enough_memory(*_memory(n, system.batch_shape.numel(), rhs.device)):
            matrix, root = factorized(system)
            factorized_at = clock()
            value = cholesky_solve(b, root).to(rhs.dtype)
            rounded = value.to(torch.float64)
            r, norm = b - matrix @ rounded, b.norm(dim=-2)
            residual = r.norm(dim=-2) / torch.where(norm > 0, norm, 1)
            bound: dict[str, Any] = Certificate(system, None).of(b, rounded, r)
        report = concluded(
            began, factorized_at, residual, 1e-3,
            f"{system.dtype} cannot hold the solution; use a float64 model and data.",
            solver=self.name, size=n, n=n, work={"passes": 1.0},
            dtype=str(system.dtype).removeprefix("torch."), **bound,
        )  # fmt: skip
        return value, report, root


def factor_bytes(n: int, matrices: int) -> int:
    """Memory of so many factorizations: each matrix, its factor, and a copy while that is made."""
    return 24 * n * n * matrices


def _memory(n: int, matrices: int, device: torch.device) -> tuple[int, torch.device, str, str]:
    """Return the bytes that a solve needs, the device, the name that an error gives it, and its advice."""
    return factor_bytes(n, matrices), device, f"Cholesky() for n = {n}", "use solver=sketchgp.ConjugateGradients()."


def factorized(system: System) -> tuple[Tensor, Tensor]:
    """Return ``K + noise`` and its lower triangular Cholesky factor, ``(..., n, n)`` float64.

    :raises NumericalError: where the matrix is not positive definite in float64.
    """
    operator = system.operator if system.dtype == torch.float64 else system.operator.type(torch.float64)
    matrix = columns(operator, torch.arange(system.n, device=system.noise.device)).to(torch.float64)
    batch = torch.broadcast_shapes(matrix.shape[:-2], system.noise.shape[:-1])
    matrix = matrix.expand(*batch, *matrix.shape[-2:]).clone() if batch != matrix.shape[:-2] else matrix
    matrix.diagonal(dim1=-2, dim2=-1).add_(system.noise.to(torch.float64))
    root, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        where, advice = "in float64", "raise the noise"
        if system.dtype != torch.float64 and any(not isinstance(part, KernelMatrix) for _, part in terms(operator)):
            where = f"as its entries were rounded to {str(system.dtype).removeprefix('torch.')}"
            advice = "use a float64 model and data, leave the products to sketchgp (matmul='auto'), or raise the noise"
        raise NumericalError(
            f"The kernel matrix plus noise is not positive definite {where}; {advice}.", see="not-definite"
        )
    return matrix, root

"""Falkon: the inducing-point problem by conjugate gradients with the preconditioner of the points themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checks import found
from ..errors import InputError
from ..operators.normal_matrix import NormalMatrix
from ..preconditioners.factored import TriangularFactors
from ..preconditioners.falkon import falkon_preconditioner
from .inducing import InducingPointProblem, NormalEquationsSolver


@dataclass(frozen=True, kw_only=True)
class Falkon(NormalEquationsSolver):
    """Solves ``(Kzx Kxz + noise Kzz) W = Kzx y`` by conjugate gradients, preconditioned by
    ``Kzz diag(counts) Kzz + noise Kzz``.

    Right for points that represent the data: drawn uniformly, or with ``counts``.  Costs ``n m`` kernel evaluations an
    iteration and ``O(m^3)`` at the start, less than :class:`KRILL`'s sketch, and takes more iterations: many more
    where the noise is small or the points are chosen otherwise (arXiv:1705.10958; arXiv:2304.12465, Figure 3).

    :param counts: ``(m,)`` positive: how many points each inducing point stands for, such as the sizes of the k-means
        clusters, or inverse selection probabilities; None is n / m each.

    The other parameters are those of :class:`sketchgp.solvers.NormalEquationsSolver`: ``tol``, ``max_iterations``,
    ``precision``.
    """

    counts: Tensor | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.counts
        if counts is None:
            return
        right = torch.is_tensor(counts) and counts.dim() == 1 and counts.dtype != torch.bool
        if not right or counts.is_complex() or counts.layout != torch.strided:
            raise InputError(
                f"Falkon: counts expects a tensor (m,), one number an inducing point, or None, got {found(counts)}."
            )
        if not bool(torch.isfinite(counts).all()) or not bool((counts > 0).all()):
            raise InputError("Falkon: counts expects positive, finite numbers.")

    def __eq__(self, other: object) -> bool:
        if type(other) is not Falkon:
            return NotImplemented
        mine, theirs = ({**vars(one), "counts": None} for one in (self, other))
        a, b = self.counts, other.counts
        return mine == theirs and (a is b or (a is not None and b is not None and torch.equal(a.cpu(), b.cpu())))

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem, or its matrices the memory that is free."""
        super().validate(problem)
        if self.counts is not None and len(self.counts) != problem.m:
            raise InputError(
                f"Falkon: counts expects one number for each of {problem.m} inducing points, got {len(self.counts)}."
            )

    def _bytes(self, problem: InducingPointProblem) -> int:
        return 48 * problem.m**2

    def preconditioner(self, matrix: NormalMatrix) -> TriangularFactors:
        """Falkon's, of one normal matrix."""
        return falkon_preconditioner(matrix, None if self.counts is None else self.counts.to(matrix.kzz))

    def _describe(self, problem: InducingPointProblem) -> str:
        return "two factors of the inducing points"

    def _remedy(self, problem: InducingPointProblem) -> str:
        return ", or use KRILL(), whose preconditioner is made from the data"

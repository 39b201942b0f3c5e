"""Falkon: the inducing-point problem by conjugate gradients with the preconditioner of the points themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...checks import found
from ...errors import InputError
from ...operators.tall import NormalMatrix
from ...preconditioners import shifted_cholesky
from ...preconditioners.krill import TriangularFactors, root_of
from .normal_equations import NormalEquationsSolver
from .problem import InducingPointProblem


@dataclass(frozen=True, kw_only=True)
class Falkon(NormalEquationsSolver):
    """Solves ``(Kzx Kxz + noise Kzz) W = Kzx y`` by conjugate gradients, preconditioned by
    ``Kzz diag(counts) Kzz + noise Kzz``.

    Right for points that represent the data: drawn uniformly, or with ``counts``.  Costs ``n m`` kernel evaluations an
    iteration and ``O(m^3)`` at the start, less than :class:`KRILL`'s sketch, and mostly more iterations: many more
    where the noise is small or the points are chosen otherwise (arXiv:1705.10958; arXiv:2304.12465, Figure 3).

    :param counts: ``(m,)`` positive: how many points each inducing point stands for, such as the sizes of the k-means
        clusters, or inverse selection probabilities; None is n / m each.

    The other parameters are those of :class:`sketchgp.solvers.NormalEquationsSolver`: ``tol``, ``max_iterations``.
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

    def preconditioner(self, matrix: NormalMatrix, targets: Tensor) -> TriangularFactors:
        """``P = Kzz diag(counts) Kzz + level Kzz``, for Kzx Kxz as if every point were one of the inducing points.

        ``T^T T = Kzz + shift I`` and ``A^T A = T diag(counts) T^T + level I`` give ``P = (A T)^T (A T)``: two Cholesky
        factorizations and one product of m x m matrices, float64.  The shift, the unit roundoff times the trace, is in
        the preconditioner only and does not change the problem.
        """
        kzz, m, n = matrix.kzz, matrix.shape[-1], matrix.tall.shape[0]
        counts = kzz.new_full((m,), n / m) if self.counts is None else self.counts.to(kzz)
        weights = matrix.tall.weights
        if weights is not None:
            counts = counts * weights.square().mean()
        root = root_of(matrix)
        inner = (root * counts) @ root.mT
        inner.diagonal().add_(matrix.level)
        return TriangularFactors([shifted_cholesky(inner, torch.finfo(torch.float64).eps).mT, root])

    def _words(self, problem: InducingPointProblem) -> tuple[str, str]:
        return "two factors of the inducing points", ", or use KRILL(), whose preconditioner is made from the data"

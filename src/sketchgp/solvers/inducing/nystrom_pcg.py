"""Nystrom PCG: the inducing-point problem by conjugate gradients with a low-rank preconditioner, no m x m matrix.

Reference: Frangella, Tropp, Udell, "Randomized Nystrom preconditioning" (arXiv:2110.02820), there for one matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import count, number, seed, settle
from ...errors import InputError
from ...preconditioners.row_nystrom import NystromRoot, damped, row_nystrom
from ...random_streams import generator
from ...settings import free_memory
from ..choices import cut
from .normal_equations import NormalEquationsSolver
from .problem import InducingPointProblem
from .split_gradients import SplitGradients

_RANK = 1000  # of an automatic preconditioner
_ROWS = 5  # rows of Kxz that it is made of, over the rank; at least _LEAST_ROWS
_LEAST_ROWS = 1000
_COPIES = 6  # arrays (m, rank) of its making


@dataclass(frozen=True, kw_only=True)
class NystromPCG(NormalEquationsSolver):
    """Solves ``M W = (Kzx Kxz + noise Kzz) W = Kzx y`` by conjugate gradients, preconditioned by ``U S U^T + rho``: a
    randomized Nystrom approximation of M, its data part from some rows of Kxz, and its least eigenvalue rho.

    ``n m + m^2 / 2`` kernel evaluations an iteration; memory O(m (rank + t)) beside tiles, no m x m matrix.  At the
    start ``5 rank`` rows of Kxz, one product with Kzz and ``O(m rank^2)`` operations.

    It stops when predictions are right, not when the residual is small: ``||W - W*||_M / noise^1/2`` is the largest
    distance of any prediction from that of the exact solution W*, in posterior deviations of the model, and conjugate
    gradients tell what every iteration takes off it.  What is left is extrapolated from that
    (:mod:`sketchgp.solvers.energy`): an estimate, which cannot see directions in which nothing has happened
    yet, of a bound that typical predictions keep by a factor of ten or more.

    Choose it where m x m matrices do not fit; :class:`EigenPro4` where x does not either, or is a stream.  Where they
    fit, :class:`KRILL` takes ten to thirty iterations to any tolerance.

    :param tol: posterior deviations that no prediction may be off by, in every column.
    :param rank: of the preconditioner, at most m; None is 1000, or what fits into half of the free
        memory.  More takes fewer iterations.
    :param seed: of its random choices.

    The other one is that of :class:`sketchgp.solvers.NormalEquationsSolver`: ``max_iterations``.
    """

    _stored: ClassVar[bool] = False
    _predictions: ClassVar[bool] = True

    tol: float = 0.3
    rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, number, "tol", above=0, finite=True)
        settle(self, count, "rank", optional=True)
        settle(self, seed, "seed")

    def _rank(self, m: int, device: torch.device) -> int:
        if self.rank is not None:
            return min(self.rank, m)
        return max(1, min(m, _RANK, free_memory(device) // 2 // (8 * _COPIES * m)))

    def _bytes(self, problem: InducingPointProblem) -> int:
        return 8 * _COPIES * problem.m * self._rank(problem.m, problem.device)

    def preconditioner(self, matrix: Any, targets: Tensor) -> NystromRoot:
        """Return the Nystrom approximation of one normal matrix."""
        (n, m), stream = matrix.tall.shape, generator(self.seed, "Nystrom PCG")
        rank = self._rank(m, matrix.tall.device)
        rows = torch.randperm(n, generator=stream)[: max(_LEAST_ROWS, _ROWS * rank)].to(matrix.tall.device)
        vectors, values = row_nystrom(matrix.tall, matrix.kzz, matrix.level, rank, rows, stream)
        if not len(values) or not math.isfinite(float(values[0])):
            raise InputError("The kernel matrix is zero, or holds NaN; check inputs and kernel.")
        return damped(vectors, values, matrix.kzz, matrix.level, targets)

    def _facts(self, problem: InducingPointProblem, method: SplitGradients) -> dict[str, Any]:
        notes = method.notes + cut("rank", self.rank, problem.m, "inducing points")
        return {**super()._facts(problem, method), "notes": notes}

    def _words(self, problem: InducingPointProblem) -> tuple[str, str]:
        rank = self._rank(problem.m, problem.device)
        return "Nystrom", "" if rank == problem.m else f" or the preconditioner's rank (now {rank})"

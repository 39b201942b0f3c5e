"""``Kzz theta = h``: from the values of a function at the inducing points to its projection on their span."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...devices import fetched
from ...errors import NumericalError
from ...operators import KernelMatrix, LowRankPlusDiagonal
from ...operators.access import Access
from ...operators.substitution import cholesky_solve
from ...preconditioners import rpcholesky, shifted_cholesky
from ...random_streams import generator
from ...settings import memory_budget
from ..loop import largest_of, require_finite
from ..recurrence import descend, turn
from .problem import InducingPointProblem

_TOL = 1e-2  # relative residual of a projection by conjugate gradients
_RANK = 1000  # the most of their preconditioner, so that memory is linear in m; it is 10 sqrt(m) where that is less
_ITERATIONS = 200  # the most of a projection; what is short of the tolerance then is noted, and far from it an error
_FAILED = 0.5  # relative residual above which a projection does more harm than good
_USUAL_COST = 10  # conjugate gradients of one projection, before the first one is known
_LEAST_LEVEL = 1e-9  # of a preconditioner's diagonal over the trace of Kzz: its inverse loses digits below


class Projection:
    """Solves ``(Kzz + shift I) theta = h``; the shift is at the level of rounding of kernel entries in x's dtype.

    :ivar shift: see above, and ``trace`` that of Kzz.
    :ivar cost: of one solve, in evaluations of Kzz.
    :ivar worst: the largest relative residual of a solve that ended above its tolerance; 0 where none did.
    :cvar kind: as reports print it; :cvar counted: attributes that change as it is used.
    """

    kind = ""
    counted: tuple[str, ...] = ("products", "worst")
    cost: float
    products = 0  # with Kzz so far
    worst = 0.0

    def __init__(self, problem: InducingPointProblem) -> None:
        z = problem.inducing_points
        self.matrix = KernelMatrix.of(problem.kernel, z, engine="tiled").detach()
        self.trace = float(self.matrix.diagonal(dim1=-1, dim2=-2).double().sum())
        self.shift = torch.finfo(z.dtype).eps * self.trace

    @property
    def tally(self) -> dict[str, float]:
        """Counts of the work done, by the names of a report."""
        return {}

    def solve(self, h: Tensor, tol: float = _TOL) -> tuple[Tensor, Tensor]:
        """theta ``(m, t)``, and ``(Kzz + shift I) theta``, which an inexact solve leaves a little off h.

        :param tol: relative residual of every column.
        """
        raise NotImplementedError


class ExactProjection(Projection):
    """Projection by a Cholesky factor of Kzz, ``(m, m)`` float64."""

    kind = "exact"

    def __init__(self, problem: InducingPointProblem, columns: int) -> None:
        super().__init__(problem)
        self.root = shifted_cholesky(problem.kzz(), torch.finfo(self.matrix.dtype).eps)
        self.products = 1
        self.cost = columns / (problem.inducing_points.shape[1] + 10)  # operations, in those of a kernel entry

    def solve(self, h: Tensor, tol: float = _TOL) -> tuple[Tensor, Tensor]:
        return cholesky_solve(h, self.root), h


class InexactProjection(Projection):
    """Projection by conjugate gradients with an RPCholesky preconditioner, to a tolerance, in O(m rank) memory."""

    kind = "inexact"
    counted = (*Projection.counted, "solves", "iterations")

    def __init__(self, problem: InducingPointProblem, seed: int) -> None:
        super().__init__(problem)
        self.solves = self.iterations = 0
        rank, stream = math.ceil(10 * math.sqrt(problem.m)), generator(seed, "preconditioner of projections")
        low_rank = rpcholesky(Access(self.matrix), min(_RANK, rank, problem.m), generator=stream)
        level = max(self.shift, low_rank.trace / problem.m, _LEAST_LEVEL * self.trace)
        self.preconditioner = LowRankPlusDiagonal(low_rank.factor, torch.full_like(low_rank.residual, level))

    @property
    def cost(self) -> float:  # type: ignore[override]
        return max(1.0, self.iterations / self.solves) if self.solves else _USUAL_COST

    @property
    def tally(self) -> dict[str, float]:
        return {"projection_iterations": self.iterations}

    def solve(self, h: Tensor, tol: float = _TOL) -> tuple[Tensor, Tensor]:
        norm = h.norm(dim=0)
        value, r = torch.zeros_like(h), h.clone()
        direction, energy, usable = torch.zeros_like(h), torch.ones_like(norm), norm > 0
        self.solves += 1
        active, left = usable, 0.0
        for _ in range(_ITERATIONS):
            z = self.preconditioner.apply_inverse(r)
            following = (r * z).sum(dim=0)
            turn(direction, z, following, energy, usable)
            product = self.matrix.product(direction.to(self.matrix.dtype)).to(torch.float64)
            product.add_(direction, alpha=self.shift)
            curvature, energy = (direction * product).sum(dim=0), following
            _, usable, finite = descend(value, r, direction, product, curvature, energy, active)
            self.iterations += 1
            self.products += 1
            size = r.norm(dim=0)
            active = usable & (size > tol * norm)
            going_on, fine, relative = fetched(active.any(), finite, size / torch.where(norm > 0, norm, 1))
            require_finite(fine)
            left = largest_of(relative)
            if not bool(going_on):
                break
        if not left <= max(_FAILED, tol):
            raise NumericalError(
                f"The projection does not converge: relative residual {left:.1e} after {_ITERATIONS} "
                "iterations. Use float64 data, other inducing points, or projection='exact' if memory allows.",
                see="projection",
            )
        if left > tol:
            self.worst = max(self.worst, left)
        return value, h - r


def exact_fits(problem: InducingPointProblem) -> bool:
    """Return whether an m x m float64 matrix is within :class:`sketchgp.settings.memory_budget`."""
    return 8 * problem.m**2 <= memory_budget.value(problem.device)

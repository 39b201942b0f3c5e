"""The direct solve of the inducing-point problem: a QR factorization by tiles in float64, the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...memory import enough_memory, require_memory
from ...operators.tall import TallMatrix, tile_bytes
from ...preconditioners import shifted_cholesky
from ...preconditioners.krill import TriangularFactors
from ..energy import moved_by_rounding
from ..loop import clock, concluded, require_finite
from ..problem import Solution
from .problem import InducingPointProblem, check_inducing

_TILE = 3  # rows of a tile, in m
_COPIES = 14  # measured: matrices (m, m) at once, of which the factorization and what it works on are 8


@dataclass(frozen=True)
class QR:
    """Minimises ``||Kxz W - y||^2 + noise ||W||^2_Kzz`` by a QR factorization of ``[Kxz; sqrt(noise) Kzz^1/2]``.

    ``3 n m^2`` operations and about ``14 m (m + t)`` float64 numbers for t columns: tiles of 3m rows are folded into
    the triangular factor one after the other, so nothing n x m is stored, and the condition number is not squared as in
    the normal equations.
    Choose it for m up to about a thousand, and as the reference.

    ``Kzz^1/2`` is a Cholesky factor of Kzz with its diagonal shifted by the unit roundoff times the trace (more where
    that is not enough): duplicated points share their weights.
    """

    problem_type: ClassVar[type[InducingPointProblem]] = InducingPointProblem
    name: ClassVar[str] = "QR"

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: for anything but an :class:`InducingPointProblem`, a stream, noise 0, or too little
        memory."""
        check_inducing("QR.solve", problem)
        problem.tensors("QR()")
        require_memory(*_memory(problem))

    def solve(self, problem: InducingPointProblem) -> Solution:
        """Solve an :class:`InducingPointProblem` of tensors.

        :returns: W, ``(m,)`` or ``(m, t)``, float64.
        :raises InputError: for a stream, noise 0, or too little memory.
        :raises NumericalError: where NaN appears.
        """
        began = clock()
        self.validate(problem)
        _, y = problem.tensors("QR()")
        m = problem.m
        with enough_memory(*_memory(problem)), torch.no_grad():
            tall, kzz = problem.tall(accurate=True), problem.kzz()
            rhs, triangle, projected = _factorized(problem, tall, kzz, y)
            factorized_at = clock()
            value = triangle.inverse(projected)
            r, norm = rhs - tall.gram(value)[0].addmm_(kzz, value, alpha=problem.level), rhs.norm(dim=0)
            moved, too_far = moved_by_rounding(triangle.inverse_t, value, kzz, problem.level)
        report = concluded(
            began, factorized_at, r.norm(dim=0) / torch.where(norm > 0, norm, 1), 1e-6,
            "The points are nearly dependent; drop some, or raise the noise.", bool(too_far.any()), solver=self.name,
            size=m, n=len(y), work={"passes": tall.evaluated.entries / (len(y) * m)}, deviations=moved.cpu(),
        )  # fmt: skip
        return Solution(value.reshape(m, *problem.target_shape), report, problem)


def _memory(problem: InducingPointProblem) -> tuple[int, torch.device, str, str]:
    """Return the bytes that a solve needs, the device, the name that an error gives it, and its advice."""
    m, columns = problem.m, problem.target_shape.numel()
    needed = 8 * _COPIES * m * (m + columns) + tile_bytes(problem.expected_rows, m, problem.device)
    return needed, problem.device, f"QR() for m = {m}", "use KRILL()."


def _factorized(
    problem: InducingPointProblem, tall: TallMatrix, kzz: Tensor, y: Tensor
) -> tuple[Tensor, TriangularFactors, Tensor]:
    """The right-hand side of the normal equations ``(m, t)``, R of the factorization, and ``Q^T [y; 0]``."""
    m, columns = problem.m, y.shape[1]
    root = shifted_cholesky(kzz, torch.finfo(torch.float64).eps).mT * problem.level**0.5
    factor = torch.cat([root, y.new_zeros(m, columns)], dim=1)
    del root
    rhs = y.new_zeros(m, columns)
    for span, tile in tall.tiles(rows=max(256, _TILE * m)):
        rhs.addmm_(tile.mT, y[span])
        stacked = torch.cat([factor, torch.cat([tile, y[span]], dim=1)])
        factor = torch.linalg.qr(stacked, mode="r").R[:m]
        del stacked
    require_finite(torch.isfinite(factor).all())
    return rhs, TriangularFactors([factor[:, :m]]), factor[:, m:]

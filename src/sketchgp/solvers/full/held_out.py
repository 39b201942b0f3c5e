"""The error of a full problem's solution on points that the solver does not see."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fingerprint import tensor_mark
from ...operators import KernelMatrix
from ..problem import FullProblem


class FullHeldOut:
    """``W -> `` the root mean square error ``(t,)`` of ``k(held-out, x) W``.

    :ivar entries: of K evaluated so far; :ivar mark: tells one set of points from another.
    """

    def __init__(self, cross: KernelMatrix, wanted: Tensor) -> None:
        self.cross, self.wanted, self.mark = cross, wanted, tensor_mark(cross.x1, wanted)
        self.entries = 0.0

    def __call__(self, weights: Tensor) -> Tensor:
        self.entries += self.cross.shape.numel()
        predicted = self.cross._matmul(weights.to(self.cross.dtype)).to(torch.float64)
        return (predicted - self.wanted).square().mean(dim=0).sqrt().cpu()


def full_held_out(problem: FullProblem, matmul: str, x: Tensor, y: Tensor) -> FullHeldOut:
    """Of points ``(m, d)`` and their targets, as :func:`sketchgp.checks.pair` has them."""
    cross = KernelMatrix.of(problem.kernel, x, problem.x, engine=matmul).detach()
    return FullHeldOut(cross, y.reshape(len(x), -1).to(torch.float64))

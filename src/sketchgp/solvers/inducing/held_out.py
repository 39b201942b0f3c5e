"""The error on points that the solver does not see."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fingerprint import tensor_mark
from ...operators.tall import TallMatrix
from .problem import InducingPointProblem


class InducingHeldOut:
    """Weights ``(m, t)`` to the root mean square error ``(t,)`` of ``k(x, z) W`` on points of the user's, with
    float64 entries, as in predictions.

    :param x: ``(p, d)``; :param y: targets ``(p, *columns)``; both as :func:`sketchgp.checks.pair` has them.
    """

    def __init__(self, problem: InducingPointProblem, x: Tensor, y: Tensor) -> None:
        self.tall = TallMatrix(problem.kernel, x, problem.inducing_points, accurate=True)
        self.wanted = y.reshape(len(x), -1).to(torch.float64)
        self.mark = tensor_mark(x, y)

    @property
    def entries(self) -> float:
        """Of the kernel, evaluated so far."""
        return self.tall.entries

    def __call__(self, weights: Tensor) -> Tensor:
        return (self.tall.matmul(weights) - self.wanted).square().mean(dim=0).sqrt().cpu()

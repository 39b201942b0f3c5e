"""The error on points that the solver does not see."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError
from ...operators.tall import TallMatrix
from ..problem import check_tensor
from .problem import InducingPointProblem


class HeldOut:
    """Weights ``(m, t)`` to the root mean square error ``(t,)`` of ``k(x, z) W`` on points of the user's, with
    float64 entries, as in predictions.

    :param x: ``(p, d)``; :param y: targets ``(p, *columns)``.
    :raises InputError: for points or targets that do not fit the problem.
    """

    def __init__(self, problem: InducingPointProblem, x: Tensor, y: Tensor, columns: tuple[int, ...]) -> None:
        check_tensor("held_out points", x, (2,))
        check_tensor("held_out targets", y, (1, 2))
        z = problem.inducing_points
        if x.shape[1] != z.shape[1] or x.dtype != z.dtype or x.device != z.device:
            raise InputError(
                f"held_out points expect {z.shape[1]} features in {z.dtype} on {z.device}, got {x.shape[1]} in "
                f"{x.dtype} on {x.device}."
            )
        if y.shape != (len(x), *columns):
            raise InputError(f"held_out targets expect {(len(x), *columns)}, got {tuple(y.shape)}.")
        self.tall = TallMatrix(problem.kernel, x, z, accurate=True)
        self.wanted = y.reshape(len(x), -1).to(torch.float64)

    def __call__(self, weights: Tensor) -> Tensor:
        return (self.tall.matmul(weights) - self.wanted).square().mean(dim=0).sqrt().cpu()

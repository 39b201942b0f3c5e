"""Adam: Kingma and Ba (ICLR 2015), by PyTorch."""

from __future__ import annotations

import math

import torch

from ..errors import NumericalError
from .objective import Objective
from .steps import NOT_FINITE, Steps

FIRST = "The marginal likelihood is not finite; check the data and the noise."


def adam(objective: Objective, steps: Steps, learning_rate: float) -> None:
    """Minimise in place.

    :raises NumericalError: if the first loss is not finite.
    """
    optimizer = torch.optim.Adam(objective.parameters, lr=learning_rate)
    while True:
        value = objective.evaluate()
        steps.history.evaluations += 1
        if not math.isfinite(value) or not objective.finite:
            if len(steps.history.losses) == steps.first:
                raise NumericalError(FIRST)
            steps.history.reason = NOT_FINITE
            return
        if steps.note(value, objective.norm(), objective.state(), objective.width):
            return
        optimizer.step()
        objective.into_bounds()


def settled(losses: list[float], tol: float) -> bool:
    """Whether the mean loss of five steps improved by less than ``tol`` over the five before."""
    if len(losses) < 10:
        return False
    return sum(losses[-10:-5]) / 5 - sum(losses[-5:]) / 5 < tol

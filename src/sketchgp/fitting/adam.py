"""Adam: Kingma and Ba (ICLR 2015), by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
        found = objective.evaluate()
        steps.count(found)
        if not math.isfinite(found.value) or not objective.finite:
            if len(steps.history.losses) == steps.first:
                raise NumericalError(FIRST, see="first-loss")
            steps.history.reason = NOT_FINITE
            return
        if steps.note(found, objective.norm(), objective.state()):
            return
        optimizer.step()
        objective.into_bounds()


def improvement(losses: Sequence[Any]) -> Any:
    """The mean loss of the last five steps below that of the five before; None before there are ten."""
    if len(losses) < 10:
        return None
    return sum(losses[-10:-5]) / 5 - sum(losses[-5:]) / 5

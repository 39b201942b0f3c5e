"""What a model is before a fit."""

from __future__ import annotations

from typing import Any

import torch


class Before:
    """What a fit changes: parameters, modes, gradients, and the posterior that a model keeps."""

    def __init__(self, model: Any) -> None:
        self.model, self.strategy = model, model.prediction_strategy
        self.modes = [(part, part.training) for part in model.modules()]
        self.parameters = [(p, p.grad, p.detach().clone()) for p in model.parameters()]

    def put_back(self) -> None:
        """All of it as it was."""
        self.model.train(self.modes[0][1])
        for part, mode in self.modes:
            part.training = mode
        for parameter, gradient, value in self.parameters:
            parameter.grad = gradient
            if not torch.equal(parameter, value):
                parameter.data.copy_(value)
        self.model.prediction_strategy = self.strategy

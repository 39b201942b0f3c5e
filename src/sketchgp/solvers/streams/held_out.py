"""The error on points that the learner does not see."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fingerprint import tensor_mark
from ...space import Space
from ..loop import HeldOut
from .learner import Learner
from .problem import Labels, RandomFeatureProblem


class FeatureHeldOut(HeldOut):
    """Coefficients ``(N, c)`` to an error on points of the user's: of targets the root mean square of each column, of
    labels the share that is wrong, ``(1,)``.

    :param x: ``(p, d)``; :param y: targets or labels.
    """

    def __init__(self, learner: Learner, problem: RandomFeatureProblem, x: Tensor, y: Tensor) -> None:
        self.learner, self.problem, self.y = learner, problem, y
        self._space = Space.of(len(x))  # each rank evaluates its own rows
        with torch.no_grad():
            self._made = learner.features.prepare(x[self._space.span])
        self.mark, self.entries = tensor_mark(x, y), 0.0

    def __call__(self, weights: Tensor) -> Tensor:
        before = self.learner.entries
        f = self.learner.evaluate(self._made, weights.unflatten(0, (-1, 2)))
        self.learner.entries = before
        self.entries += len(self.y) * len(weights)
        f = self._space.whole(f)
        if isinstance(self.problem.targets, Labels):
            found = torch.tensor(self.problem.targets.classes, device=f.device)[f.argmax(dim=1)]
            return (found != self.y).double().mean().reshape(1).cpu()
        wanted = self.y.reshape(len(f), -1).to(torch.float64)
        return (f[:, : wanted.shape[1]] - wanted).square().mean(dim=0).sqrt().cpu()

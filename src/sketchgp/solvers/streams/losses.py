"""Losses l(f, y) of functions with c columns: values, gradients, and what a row counts in the matrix of a step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_CALM = 1 / 16  # the curvature of losses of labels, which are flat, or nearly, at most rows and never steeper than 1
_LEAST = 0.1  # of what a row of a logistic loss counts: where it is nearly flat, a step would go too far


class Squared:
    """``(f - y)^2 / 2``, whose minimiser with a ridge of ``noise / n`` is the posterior mean of a Gaussian process."""

    name = "squared"
    steady: float | None = 1.0  # the preconditioned step where all data are in a batch; None for one that falls
    curvature = 1.0  # that a first step without preconditioner reckons with

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """``dl / df`` ``(b, c)`` of f and y ``(b, c)``."""
        return f - y

    def weights(self, f: Tensor, y: Tensor) -> Tensor | None:
        """``(b,)``, at least the curvature of the loss there as far as it has one; None for ones."""
        return None

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        """The sum over the rows of each column, ``(c,)``; ``(1,)`` where they belong together."""
        return (f - y).square().sum(dim=0) / 2


class Logistic(Squared):
    """``log(1 + exp(-y f))`` of every class against the rest, y = 1 or -1."""

    name, steady, curvature = "logistic", 0.5, _CALM

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return -y * torch.sigmoid(-y * f)

    def weights(self, f: Tensor, y: Tensor) -> Tensor | None:
        share = torch.sigmoid(f)
        return (share * (1 - share)).amax(dim=1).clamp_min(_LEAST / 4)

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        return functional.softplus(-y * f).sum().reshape(1)


class Multinomial(Squared):
    """``log sum_c exp(f_c) - f_y``; y has a 1 in the column of the class, 0 else."""

    name, steady, curvature = "multinomial", 0.5, _CALM

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.softmax(dim=1) - y

    def weights(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Bound the curvature by Gershgorin, ``diag(p) - p p^T <= 2 diag(p (1 - p))``."""
        share = f.softmax(dim=1)
        return 2 * (share * (1 - share)).amax(dim=1).clamp_min(_LEAST / 4)

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.logsumexp(dim=1) - (f * y).sum(dim=1)).sum().reshape(1)


class Hinge(Squared):
    """``max(0, 1 - y f)`` of every class against the rest, y = 1 or -1: support vector machines."""

    name, steady, curvature = "hinge", None, _CALM

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.where(y * f < 1, -y, torch.zeros_like(y))

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        return (1 - y * f).clamp_min(0).sum().reshape(1)


CLASSIFICATION: dict[str, Squared] = {loss.name: loss for loss in (Logistic(), Multinomial(), Hinge())}
LOSSES: dict[str, Squared] = {"squared": Squared(), **CLASSIFICATION}

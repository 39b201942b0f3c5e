"""The prior of a model as it is now: a copy without data, which knows mean and features at any points."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..checks import found
from ..errors import InputError
from ..operators import KernelMatrix
from .accelerated.acceleration import ATTRIBUTE
from .accelerated.mixins import plain_class

_DATA = ("train_inputs", "_train_targets", "prediction_strategy", "_original_train_inputs", "_kept", ATTRIBUTE)


class FrozenPrior:
    """Mean and features of a model at any points, from a copy of the model that holds no data.

    :param model: in eval mode.
    """

    def __init__(self, model: Any) -> None:
        train = model.train_inputs[0]
        shell: Any = object.__new__(plain_class(type(model)))
        kept = {name: value for name, value in model.__dict__.items() if name not in _DATA}
        modules = OrderedDict((k, v) for k, v in model._modules.items() if k != "likelihood")
        shell.__dict__.update(kept, _modules=modules, train_inputs=None, _train_targets=None, prediction_strategy=None)
        self.model = copy.deepcopy(shell).requires_grad_(False)
        for module in self.model.modules():  # priors of parameters hold functions that cannot be pickled
            module.__dict__.update({"_priors": OrderedDict()} if "_priors" in module.__dict__ else {})
        self.dtype, self.device = train.dtype, train.device
        self.batch = train.shape[:-2]
        self.transformed = getattr(model, "input_transform", None) is not None
        self.width = train.shape[-1]

    def matrix(self, x: Tensor) -> tuple[Tensor, KernelMatrix]:
        """Return the prior mean and covariance at x ``(p, d)``, after any transform of inputs."""
        prior = self.model.forward(x.expand(*self.batch, *x.shape[-2:]))
        matrix = KernelMatrix.from_lazy(prior.lazy_covariance_matrix, "tiled")
        assert matrix is not None
        return prior.mean, matrix

    def __call__(self, x: Tensor, outputs: int) -> tuple[Tensor, list[Tensor]]:
        """Return means ``(p, t)`` or ``(p, 1)`` in float64, and each output's points ``(p, d')`` for its kernel."""
        z = x
        if self.transformed:
            z = self.model.transform_inputs(x)
            if z.shape[:-1] != x.shape[:-1]:
                raise InputError("An input_transform that makes other points is not known to posterior samples.")
        mean, matrix = self.matrix(z)
        if not self.batch:
            return mean.to(torch.float64).unsqueeze(-1), [matrix.x1] * outputs
        mean, points = (t.expand(*self.batch, *t.shape[1:]) for t in (mean, matrix.x1))
        return mean.to(torch.float64).mT, list(points.unbind())

    def check(self, x: Any, least: int) -> Tensor:
        """Return points, checked to have at least so many dimensions."""
        if torch.is_tensor(x) and x.dim() == least - 1 and self.width == 1:
            x = x.unsqueeze(-1)
        shape = "(..., p, d)" if least == 2 else "(S, ..., p, d)"
        if not torch.is_tensor(x) or x.layout != torch.strided:
            raise InputError(f"samples: x expects a dense tensor {shape}, got {found(x)}.")
        if x.dim() < least or 0 in x.shape or (x.shape[-1] != self.width and not self.transformed):
            raise InputError(f"samples: x expects points {shape} of {self.width} features, got {tuple(x.shape)}.")
        if x.dtype != self.dtype or x.device != self.device:
            raise InputError(f"samples: x expects {self.dtype} on {self.device}, got {x.dtype} on {x.device}.")
        if not bool(torch.isfinite(x).all()):
            bad = tuple(int(i) for i in (~torch.isfinite(x)).any(dim=-1).nonzero()[0])
            raise InputError(f"samples: x holds NaN or infinity, first in x[{', '.join(map(str, bad))}].")
        return x

    def untransformed(self, values: Tensor) -> Tensor:
        """Return values ``(..., p, t)`` in units of the data, which BoTorch's models standardize."""
        transform = getattr(self.model, "outcome_transform", None)
        return values if transform is None else transform.untransform(values)[0]

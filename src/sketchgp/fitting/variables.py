"""The parameters of a model as one vector of variables, and what bounds them.

What a constraint keeps positive is moved by its logarithm (above the least value of the constraint): lengthscales of
inputs that do not matter grow by orders of magnitude, and those of softplus's argument take as many steps.  Constants
and weights of means, and inducing points, are moved in units of the data: a step of length 1 is as long for all.  That
of the targets is their deviation: their level says nothing of how near to it a constant has to come.  Of a trend
(:mod:`.trend`) the coordinates are moved, unless the density is minimised over it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gpytorch.means import ConstantMean, LinearMean
from torch import Tensor

from .objective import Objective
from .starts import inputs_seen

_LEAST, _MOST = 1e-5, 1e5  # limits of a positive value in units of the data; scikit-learn's, for data of size 1
_ABOVE = 1e-8  # least distance to a constraint's least value
_NEXT_TO = 1e-6  # distance to a limit at which a variable is on it
_ROOM = 1e3  # factor of the interval about a start outside these limits


class Variables:
    """The variables of an objective, which are functions of its parameters.

    :ivar lower: lower bounds, ``(p,)``; ``upper`` are the upper ones.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        own = () if objective.trend is None else objective.trend.parameters
        named = [each for each in objective.hyperparameters() if not any(each[1] is one for one in own)]
        self._trend = objective.trend if objective.minimised is None else None
        self._names, self._parameters = [name for name, _, _ in named], [p for _, p, _ in named]
        self._constraints = [constraint for _, _, constraint in named]
        self._logs = [_positive(constraint) for constraint in self._constraints]
        self._rows = [
            x.detach().to("cpu", torch.float64).reshape(-1, x.shape[-1])
            for x in objective.model.train_inputs
            if x.is_floating_point()
        ]
        targets = objective.model.train_targets.detach().to("cpu", torch.float64)
        self._targets = targets[~torch.isnan(targets)]
        seen = inputs_seen(objective.model).values()  # by the kernels
        self._inputs = [x.std(dim=0, correction=0) for x in (*self._rows, *seen)]
        self._sizes = [self._size(p, log) for p, log in zip(self._parameters, self._logs, strict=True)]
        parts = [self._bounds(*pair) for pair in enumerate(self._constraints)]
        if self._trend is not None:
            self._unit = math.sqrt(len(self._targets)) * (float(self._targets.std(correction=0)) or 1.0)
            ends = np.full(self._trend.basis.shape[1], math.inf)
            parts.append((-ends, ends))
        self.lower, self.upper = (np.concatenate([part[side] for part in parts]) for side in (0, 1))

    def _bounds(self, index: int, constraint: Any) -> tuple[np.ndarray, np.ndarray]:
        size = self._parameters[index].numel()
        ends: tuple[Any, Any] = (-math.inf, math.inf)
        if self._logs[index]:
            smallest, largest = self._units("lengthscale" in self._names[index])
            least = smallest * (_LEAST if float(constraint.lower_bound.max()) == 0 else _ABOVE)
            now, room = self._of(index), math.log(_ROOM)
            lower, upper = np.full(size, math.log(least)), np.full(size, math.log(_MOST * largest))
            return np.minimum(lower, now - room), np.maximum(upper, now + room)
        if constraint is not None and not constraint.enforced:
            ends = constraint.lower_bound, constraint.upper_bound
        lower, upper = (torch.as_tensor(end, dtype=torch.float64).detach().cpu().reshape(-1).numpy() for end in ends)
        units = self._sizes[index].reshape(-1).numpy()
        return np.broadcast_to(lower, size) / units, np.broadcast_to(upper, size) / units

    def _units(self, of_inputs: bool) -> tuple[float, float]:
        """Return the least and the largest unit of the data, 1 included.

        Units are deviations of the inputs, or the mean square of the targets, for scales and noises.
        """
        square = self._targets.square().mean().reshape(1)
        sizes = torch.cat([*self._inputs, torch.ones(1).double()]) if of_inputs else square
        sizes = sizes[(sizes > 0) & torch.isfinite(sizes)]
        return min([1.0, *sizes.tolist()]), max([1.0, *sizes.tolist()])

    def _size(self, parameter: Tensor, log: bool) -> Tensor:
        """Return the unit of a parameter, in its shape; 1 where that is not known."""
        unknown = torch.ones(parameter.shape, dtype=torch.float64)
        for module in () if log else self.objective.model.modules():
            own = any(parameter is one for one in module.parameters(recurse=False))
            if own and isinstance(module, ConstantMean | LinearMean):
                return unknown * (float(self._targets.std(correction=0)) or 1.0)
            if parameter is getattr(module, "inducing_points", None) and parameter.shape[-1:] == self._inputs[0].shape:
                return torch.where(self._inputs[0] > 0, self._inputs[0], unknown)
        return unknown

    def _of(self, index: int) -> np.ndarray:
        """Return the variables of one parameter."""
        parameter = self._parameters[index].detach().to("cpu", torch.float64)
        if self._logs[index]:
            constraint = self._constraints[index]
            above = constraint.transform(parameter) - constraint.lower_bound.to(parameter)
            parameter = above.clamp(min=torch.finfo(torch.float64).tiny).log()
        return (parameter / self._sizes[index]).reshape(-1).numpy()

    def __call__(self) -> np.ndarray:
        """Return the values of the variables, ``(p,)`` float64."""
        parts = [self._of(i) for i in range(len(self._logs))]
        parts += [] if self._trend is None else [(self._trend.coordinates / self._unit).cpu().numpy()]
        return np.clip(np.concatenate(parts), self.lower, self.upper)

    def pressed(self, vector: np.ndarray, gradient: np.ndarray, least: float) -> dict[str, float]:
        """Return the limits of hyperparameters that the gradient would send beyond them, by name.

        :param least: derivative above which it does.
        """
        result, first = {}, 0
        for index, parameter in enumerate(self._parameters):
            part = slice(first, first + parameter.numel())
            first = part.stop
            for limit, outward in ((self.lower, gradient), (self.upper, -gradient)):
                there = (np.abs(vector[part] - limit[part]) <= _NEXT_TO) & (outward[part] > least)
                if there.any():
                    raw = self._raw(torch.from_numpy(limit))[index][1].reshape(-1)[int(there.argmax())]
                    constraint = self._constraints[index]
                    value = raw if constraint is None else constraint.transform(raw).reshape(-1)[0]
                    result[self._names[index]] = float(value)
        return result

    def put(self, vector: np.ndarray) -> None:
        """Give the parameters the values of these variables."""
        with torch.no_grad():
            for parameter, part in self._raw(torch.from_numpy(vector)):
                parameter.copy_(part)

    def gradient(self, vector: np.ndarray) -> np.ndarray:
        """Return the gradient ``(p,)`` float64 at these values, by the chain rule from that of the parameters."""
        variables = torch.from_numpy(vector).clone().requires_grad_()
        with torch.enable_grad():
            raw = self._raw(variables)
        known = [(part, p.grad) for p, part in raw if p.grad is not None]
        if not known:
            return np.zeros_like(vector)
        parts, grads = [part for part, _ in known], [grad.to(part) for part, grad in known]
        (gradient,) = torch.autograd.grad(parts, variables, grads)
        return gradient.numpy()

    def _raw(self, vector: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that variables move, each with its value."""
        sizes = [p.numel() for p in self._parameters]
        *own, rest = vector.split([*sizes, len(vector) - sum(sizes)])
        parts = []
        for index, part in enumerate(own):
            values = part.reshape(self._parameters[index].shape) * self._sizes[index]
            if self._logs[index]:
                constraint = self._constraints[index]
                values = constraint.inverse_transform(values.exp() + constraint.lower_bound.to(values))
            parts.append(values)
        pairs = list(zip(self._parameters, parts, strict=True))
        if self._trend is not None:
            pairs += zip(self._trend.parameters, self._trend.values(rest * self._unit), strict=True)
        return pairs


def _positive(constraint: Any) -> bool:
    """Return whether a constraint keeps values above a bound by a transform, and has no upper bound."""
    return (
        constraint is not None
        and constraint.enforced
        and bool(torch.isfinite(constraint.lower_bound).all())
        and bool(torch.isinf(constraint.upper_bound).all())
    )

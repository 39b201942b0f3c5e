"""The loss that a fit minimises with its gradient, and the state of the model before it."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import torch
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from ..density import LogDensity
from ..devices import one_thread
from ..errors import NumericalError
from ..models.accelerated.acceleration import ATTRIBUTE, Acceleration
from ..preconditioners import PreconditionerCache
from ..report import own_solves
from .record import Evaluation, Evaluations, flat, parts
from .trend import Trend, trend_of

_MANY_NUMBERS = 100  # numbers of a hyperparameter above which its course is not kept
_SMALL = 2000  # rows up to which one thread is as fast as two on idle cores, and several times faster on busy ones
_AT = 0.01  # distance to a limit, relative to it or to the interval, at which a value ended on it


class Objective:
    """The negative log marginal likelihood of a model, divided as the ``mll`` does.

    :param model: a model in training mode; :param mll: its marginal log likelihood.
    :param density: how log densities are computed; None where the model computes them its own way.

    :ivar parameters: parameters of the model that require a gradient.
    :ivar trends: the model's trend, or None, once it is known: shared by all losses of the model.
    :ivar rows: number that a log likelihood is divided by.
    :ivar evaluations: where evaluations are kept, and found again; None for nowhere.
    """

    evaluations: Evaluations | None = None

    def __init__(
        self, model: Any, mll: Any, density: LogDensity | None = None, trends: list[Trend | None] | None = None
    ) -> None:
        self.model, self.mll, self.density = model, mll, density
        self.trends = [] if trends is None else trends
        self.acceleration: Acceleration | None = model.__dict__.get(ATTRIBUTE)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        event = 2 if isinstance(model.likelihood, MultitaskGaussianLikelihood) else 1
        self.rows = model.train_targets.shape[-event:].numel()

    def by(self, density: LogDensity) -> Objective:
        """Return the losses of the same model by another density."""
        return Objective(self.model, self.mll, density, self.trends)

    @property
    def trend(self) -> Trend | None:
        """The trend of the model's mean, which is moved to least squares when it is first asked for."""
        if not self.trends:
            self.trends.append(trend_of(self))
        return self.trends[0]

    @property
    def minimised(self) -> Trend | None:
        """The trend that the density minimises over; None where the optimiser moves it, or there is none.

        The optimiser moves it, too, where nothing else is free.
        """
        trend = self.trend if self.density is not None and self.density.regresses else None
        return trend if trend is not None and len(trend.parameters) < len(self.parameters) else None

    @property
    def moved(self) -> list[Tensor]:
        """The parameters that an optimiser moves: all but those of a trend that the density minimises over."""
        own = () if self.minimised is None else self.minimised.parameters
        return [p for p in self.parameters if not any(p is one for one in own)]

    @property
    def cache(self) -> PreconditionerCache | None:
        """The cache of the preconditioners that losses take: the density's own, or the model's."""
        own = None if self.density is None else self.density.cache
        return own if own is not None or self.acceleration is None else self.acceleration.cache

    @property
    def exact(self) -> bool:
        """True if losses are exact up to rounding."""
        return self.density is not None and self.density.exact

    def evaluate(self, gradient: bool = True) -> Evaluation:
        """Evaluate loss and gradient, which is left on the parameters, or take both from the file of a checkpoint.

        :param gradient: whether to make the backward pass.
        """
        if self.evaluations is None or not gradient:
            return self._computed(gradient)
        moved, trend = self.moved, self.minimised
        point = flat(moved)
        known = self.evaluations.find(point)
        if known is None:
            selections = self.evaluations.selections()
            evaluation = self._computed()
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved]
            found += [] if trend is None else [trend.latest]
            self.evaluations.add(point, evaluation, flat(found), selections)
            return evaluation
        evaluation, kept, again = known
        if again:
            self._computed()
        if evaluation.doubled and self.acceleration is not None:
            self.acceleration.doubled = True
        gradients, coordinates = kept.split([len(point), len(kept) - len(point)])
        for parameter, part in zip(moved, parts(gradients, moved), strict=True):
            parameter.grad = part
        if trend is not None:
            trend.put(coordinates)
        return evaluation

    def _computed(self, gradient: bool = True) -> Evaluation:
        self.clear()
        density, trend = self.density, self.minimised
        if density is not None:
            density.begin()
        if density is not None and trend is not None:
            density.basis = trend.basis
            trend.put(trend.basis.new_zeros(trend.basis.shape[1]))  # losses do not depend on where it was
        with own_solves() as solves, one_thread(self.rows <= _SMALL):
            value = self._evaluate(gradient)
        if density is not None and trend is not None and density.coordinates is not None:
            trend.put(density.coordinates)
        return Evaluation(
            value,
            () if self.density is None else tuple(each.cpu() for each in self.density.values),
            time.perf_counter(),
            max((report.max_residual for report in solves), default=0.0),
            sum(report.iterations for report in solves),
            sum(report.work.get("products", 0.0) for report in solves),
            float(self.acceleration is not None and self.acceleration.doubled),
        )

    def loss(self, targets: Tensor) -> Tensor:
        """Return the loss of targets, differentiable."""
        by = self.acceleration.having(density=self.density) if self.acceleration and self.density else nullcontext()
        with by:
            output, seen = self.model(*self.model.train_inputs), self.model.train_inputs
            if hasattr(self.model, "transform_inputs"):  # likelihoods get what the model's forward sees
                seen = [self.model.transform_inputs(x) for x in seen]
            return -self.mll(output, targets, *seen).sum()

    def _evaluate(self, gradient: bool) -> float:
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(gradient):
                loss = self.loss(self.model.train_targets)
                if gradient:
                    loss.backward()
        except (NumericalError, NanError, NotPSDError):
            return math.nan
        return float(loss.detach())

    @property
    def finite(self) -> bool:
        """True if all gradients are finite."""
        return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in self.parameters)

    def state(self) -> list[Tensor]:
        """Return copies of the parameters."""
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def restore(self, state: list[Tensor]) -> None:
        """Give the parameters what :meth:`state` returned, also in a copy of the model of another dtype."""
        for parameter, kept in zip(self.parameters, state, strict=True):
            parameter.copy_(kept)

    def norm(self) -> float:
        """Return the norm of the gradient."""
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in self.parameters if p.grad is not None))

    def into_bounds(self) -> None:
        """Move parameters into the bounds that no transform enforces (BoTorch's constraints)."""
        with torch.no_grad():
            for _, parameter, constraint in self.hyperparameters():
                if constraint is not None and not constraint.enforced:
                    ends = (bound.to(parameter) for bound in (constraint.lower_bound, constraint.upper_bound))
                    parameter.copy_(parameter.clamp(*ends))

    def hyperparameters(self) -> list[tuple[str, Tensor, Any]]:
        """Return the name (without ``raw_``) of each of the parameters, itself, and its constraint or None."""
        named = self.model.named_parameters_and_constraints()
        return [(name.replace("raw_", ""), p, constraint) for name, p, constraint in named if p.requires_grad]

    @torch.no_grad()
    def named(self, state: list[Tensor]) -> dict[str, tuple[float, ...]]:
        """Return the hyperparameters of a :meth:`state` by name, except those of many numbers."""
        values_by_name = {}
        for value, (name, _, constraint) in zip(state, self.hyperparameters(), strict=True):
            if value.numel() <= _MANY_NUMBERS:
                value = value if constraint is None else constraint.transform(value)
                values_by_name[name] = tuple(value.reshape(-1).tolist())
        return values_by_name

    @torch.no_grad()
    def at_limits(self) -> dict[str, float]:
        """Return the limits of hyperparameters that are as small, or as large, as their constraint allows, by name."""
        limits = {}
        for name, parameter, constraint in self.hyperparameters():
            if constraint is None:
                continue
            value = constraint.transform(parameter)
            lower, upper = constraint.lower_bound.to(value), constraint.upper_bound.to(value)
            for limit in (lower, upper):
                size = torch.minimum(limit.abs(), upper - lower)
                near = ((value - limit).abs() <= _AT * size) & torch.isfinite(limit) & (limit != 0)
                if bool(near.any()):
                    limits[name] = float(limit.expand_as(value)[near][0])
        return limits

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class ModelState:
    """The parts of a model that a fit changes: parameters, buffers, modes, gradients, and its prediction strategy."""

    def __init__(self, model: Any) -> None:
        self.model, self.strategy = model, model.prediction_strategy
        self.modes = [(part, part.training) for part in model.modules()]
        self.parameters = [(p, p.grad, p.detach().clone()) for p in model.parameters()]
        self.buffers = [(b, b.detach().clone()) for b in model.buffers()]  # running means of normalisations

    def put_back(self) -> None:
        """Give the model this state again."""
        self.model.train(self.modes[0][1])
        for part, mode in self.modes:
            part.training = mode
        for parameter, gradient, value in self.parameters:
            parameter.grad = gradient
            if not torch.equal(parameter, value):
                parameter.data.copy_(value)
        for buffer, value in self.buffers:
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)
        self.model.prediction_strategy = self.strategy

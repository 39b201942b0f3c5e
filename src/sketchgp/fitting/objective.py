"""The loss that a fit minimises, and its gradient."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from ..errors import NumericalError
from ..models.accelerated.bound_density import Bound, bounded
from ..models.accelerated.threshold import exactly


class Objective:
    """The negative log marginal likelihood of a model, divided as the ``mll`` does.

    :param model: in training mode; :param mll: of it.
    :param exact: compute it by a factorization in float64 whatever n is.
    :param bound: compute an upper bound of it instead, with this.

    :ivar parameters: those that require a gradient.
    :ivar rows: what a log likelihood is divided by.
    """

    def __init__(self, model: Any, mll: Any, exact: bool = False, bound: Bound | None = None) -> None:
        self.model, self.mll, self.exact, self.bound = model, mll, exact, bound
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        event = 2 if isinstance(model.likelihood, MultitaskGaussianLikelihood) else 1
        self.rows = model.train_targets.shape[-event:].numel()

    @property
    def width(self) -> float | None:
        """How far below the latest loss the exact one may be; None where it is no bound."""
        return None if self.bound is None or self.bound.gap is None else self.bound.gap / self.rows

    def evaluate(self, gradient: bool = True) -> float:
        """One forward and backward pass, which leaves gradients on the parameters; NaN where the linear algebra broke
        down.

        :param gradient: whether to make the backward pass.
        :raises TooWide: where the first bound leaves more open than was allowed.
        """
        for parameter in self.parameters:
            parameter.grad = None
        if self.bound is not None:
            self.bound.begin()
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(gradient), self._by():
                output = self.model(*self.model.train_inputs)
                loss = -self.mll(output, self.model.train_targets, *_likelihood_inputs(self.model)).sum()
                if gradient:
                    loss.backward()
        except (NumericalError, NanError, NotPSDError):
            return math.nan
        return float(loss.detach())

    def _by(self) -> AbstractContextManager[None]:
        """How log densities are computed."""
        if self.bound is not None:
            return bounded(self.bound)
        return exactly() if self.exact else nullcontext()

    @property
    def finite(self) -> bool:
        """Whether all gradients are."""
        return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in self.parameters)

    def state(self) -> list[Tensor]:
        """Copies of the parameters."""
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def restore(self, state: list[Tensor]) -> None:
        """Give the parameters what :meth:`state` found, here or in a copy of the model of another dtype."""
        for parameter, kept in zip(self.parameters, state, strict=True):
            parameter.copy_(kept)

    def norm(self) -> float:
        """Of the gradient."""
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in self.parameters if p.grad is not None))

    def into_bounds(self) -> None:
        """Move parameters into the bounds that no transform enforces (BoTorch's constraints)."""
        with torch.no_grad():
            for parameter, constraint in zip(self.parameters, self.constraints(), strict=True):
                if constraint is not None and not constraint.enforced:
                    ends = (bound.to(parameter) for bound in (constraint.lower_bound, constraint.upper_bound))
                    parameter.copy_(parameter.clamp(*ends))

    def constraints(self) -> list[Any]:
        """Of each parameter; None where it has none."""
        known = {id(p): constraint for _, p, constraint in self.model.named_parameters_and_constraints()}
        return [known.get(id(p)) for p in self.parameters]

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def _likelihood_inputs(model: Any) -> list[Tensor]:
    """What a likelihood may ask of the inputs (task numbers), as the model's forward sees them."""
    transform = getattr(model, "transform_inputs", None)
    return [x if transform is None else transform(x) for x in model.train_inputs]

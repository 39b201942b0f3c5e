"""``fit(model)``: hyperparameters by marginal likelihood, with probes that stay the same from step to step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import gpytorch
import torch
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from tqdm.auto import tqdm

from . import checks
from .accelerate import acceleration_of
from .errors import InputError, NumericalError, warn
from .inducing_point_gp import InducingPointGP
from .models.accelerated.leave_one_out import LeaveOneOutPseudoLikelihood
from .models.accelerated.marginal_likelihood import ExactMarginalLogLikelihood


@dataclass(repr=False)
class FitHistory:
    """What a fit did.  ``losses`` are negative log marginal likelihoods divided by n (by n t for t outputs), one a
    step; ``best_step`` is the step whose parameters the model was left with; ``reason`` says why it ended."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best_step: int = 0
    reason: str = ""

    @property
    def best_loss(self) -> float:
        """The smallest loss."""
        return self.losses[self.best_step]

    def __repr__(self) -> str:
        best = f", best loss {self.best_loss:.6g} at step {self.best_step}" if self.losses else ""
        seconds = f" in {self.seconds[-1]:.1f} s" if self.seconds else ""
        return f"<FitHistory of {len(self.losses)} steps{seconds}{best}: {self.reason}>"


def fit(
    model: ExactGP,
    mll: Any = None,
    iterations: int = 50,
    learning_rate: float = 0.1,
    num_probes: int = 10,
    seed: int = 0,
    tol: float = 1e-4,
    progress: bool | None = None,
    callback: Callable[[int, float], Any] | None = None,
) -> FitHistory:
    """Maximise the marginal likelihood of an accelerated model, or an :class:`InducingPointGP`, with Adam, in place.

    The probe vectors of the log determinant are drawn once, so the objective is the same function at every step
    (a sum of one smooth estimate) instead of a new random one; the preconditioner's pivots are kept while they
    serve.  Log determinant and gradient as in Wenger et al. (arXiv:2107.00243).

    :param model: a model that :func:`accelerate` was called on, or an :class:`InducingPointGP`, whose bound is
        computed without probes (``num_probes`` and ``seed`` then change nothing).  It is left in eval mode with the
        parameters of the best step; parameters with ``requires_grad=False`` stay as they are.
    :param mll: a GPyTorch marginal log likelihood (default: ``ExactMarginalLogLikelihood``), or
        ``LeaveOneOutPseudoLikelihood``.
    :param iterations: the most steps.
    :param learning_rate: Adam's step size, in the unconstrained parameters.
    :param num_probes: probe vectors of the log determinant.
    :param seed: seed of the probe vectors.
    :param tol: end when the mean loss of five steps improved by less than this over the five before.
    :param progress: show a progress bar (default: only in a terminal).
    :param callback: called with step and loss; returning True ends the fit.  Ctrl-C ends it too.
    :raises InputError: for a model that is not accelerated, or arguments that do not fit; the model is then as it was.
    :raises NumericalError: if the first loss is not finite.

    A call that ends in an error before there is a first loss leaves the model as it was: parameters, gradients, and
    which of its parts are in training mode.
    """
    acceleration = None if isinstance(model, InducingPointGP) else acceleration_of(model, "fit")
    iterations, num_probes = (
        checks.count("fit", name, value) for name, value in (("iterations", iterations), ("num_probes", num_probes))
    )
    learning_rate = checks.number("fit", "learning_rate", learning_rate, above=0, finite=True)
    seed, tol = checks.seed("fit", "seed", seed), checks.number("fit", "tol", tol)
    checks.flag("fit", "progress", progress, optional=True)
    checks.function("fit", "callback", callback)
    checks.function("fit", "mll", mll)
    if getattr(mll, "model", model) is not model:
        raise InputError("fit: mll expects to be of the model that is fitted, got one of another model.")
    if model.train_inputs is None or model.train_targets is None:
        raise InputError("fit: model expects training data, got none.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("fit: model expects at least one parameter that requires a gradient, got none.")
    if mll is None:
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
    elif type(mll) is gpytorch.mlls.ExactMarginalLogLikelihood:  # the same, and knows of missing targets
        mll = ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    elif type(mll) is gpytorch.mlls.LeaveOneOutPseudoLikelihood:  # the same, by sketchgp's solves
        mll = LeaveOneOutPseudoLikelihood(mll.likelihood, mll.model)
    history, best, before = FitHistory(reason="ran all iterations"), _copy(parameters), _Before(model)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    progress = sys.stderr.isatty() if progress is None else progress
    start = time.perf_counter()
    try:
        model.train()
        with (
            nullcontext() if acceleration is None else acceleration.fixed_probes(seed, num_probes),
            tqdm(total=iterations, desc="marginal likelihood", unit="step", disable=not progress, leave=False) as bar,
        ):
            for step in range(iterations):
                optimizer.zero_grad()
                value = _loss(model, mll)
                if not math.isfinite(value) or not all(_finite_gradient(p) for p in parameters):
                    if step == 0:
                        raise NumericalError("The marginal likelihood is not finite; check the data and the noise.")
                    history.reason = "met a loss or gradient that is not finite"
                    break
                history.losses.append(value)
                history.seconds.append(time.perf_counter() - start)
                if value < history.best_loss or step == 0:
                    history.best_step, best = step, _copy(parameters)
                bar.set_postfix_str(f"loss {value:.4f}", refresh=False)  # before update, which shows it
                bar.update()
                if callback is not None and callback(step, value):
                    history.reason = "stopped by the callback"
                    break
                if _settled(history.losses, tol):
                    history.reason = "the loss has settled"
                    break
                optimizer.step()
                _into_bounds(model)
    except KeyboardInterrupt:
        history.reason = "interrupted"
        if not history.losses:
            raise
        warn(
            f"fit was interrupted after {len(history.losses)} steps; the model has the best parameters so far.",
        )
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, best, strict=True):
                parameter.copy_(kept)
        if history.losses:
            optimizer.zero_grad()
            model.eval()
        else:
            before.put_back()
    return history


class _Before:
    """What a fit changes beside parameters: modes, gradients, and the posterior that a model keeps."""

    def __init__(self, model: Any) -> None:
        self.model, self.strategy = model, model.prediction_strategy
        self.modes = [(part, part.training) for part in model.modules()]
        self.gradients = [(p, p.grad) for p in model.parameters()]

    def put_back(self) -> None:
        self.model.train(self.modes[0][1])
        for part, mode in self.modes:
            part.training = mode
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        self.model.prediction_strategy = self.strategy


def _loss(model: ExactGP, mll: Any) -> float:
    """One forward and backward pass; NaN where the linear algebra broke down."""
    try:
        loss = -mll(model(*model.train_inputs), model.train_targets, *_likelihood_inputs(model)).sum()
        loss.backward()
    except (NumericalError, NanError, NotPSDError):
        return math.nan
    return float(loss.detach())


def _likelihood_inputs(model: Any) -> list[Tensor]:
    """What a likelihood may ask of the inputs (task numbers), as the model's forward sees them."""
    transform = getattr(model, "transform_inputs", None)
    return [x if transform is None else transform(x) for x in model.train_inputs]


@torch.no_grad()
def _into_bounds(model: Any) -> None:
    """Back into the bounds that no transform enforces (BoTorch's constraints)."""
    for _, parameter, constraint in model.named_parameters_and_constraints():
        if constraint is not None and not constraint.enforced:
            lower, upper = (bound.to(parameter) for bound in (constraint.lower_bound, constraint.upper_bound))
            parameter.copy_(torch.minimum(torch.maximum(parameter, lower), upper))


def _copy(parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def _finite_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is None or bool(torch.isfinite(parameter.grad).all())


def _settled(losses: list[float], tol: float) -> bool:
    if len(losses) < 10:
        return False
    return sum(losses[-10:-5]) / 5 - sum(losses[-5:]) / 5 < tol

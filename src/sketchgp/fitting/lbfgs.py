"""L-BFGS with bounds and a line search: Byrd, Lu, Nocedal and Zhu (SIAM J. Sci. Comput. 16, 1995), by SciPy.

Where a fit to a subset of the rows was before, its inverse Hessian is about that of all rows.  Steps are then Newton's
with that matrix, which learns from each of them, as long as they take the loss about as low as it goes on their way.
Else SciPy goes on, which begins with no more than the diagonal: its first step is as long as the gradient in variables
that are scaled by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
from torch import Tensor

from ..errors import NumericalError
from .adam import FIRST
from .history import SETTLED
from .objective import Objective
from .record import Evaluation
from .steps import Steps
from .variables import Variables

_MEMORY = 20  # pairs of steps and gradients
_FAILED = 1e3  # a loss that could not be computed is taken to be so much higher than the best one
_FLAT = 1e-6  # norm of a gradient, per row, below which nothing is left to do
_SEARCH = 20  # evaluations of a line search
_SCALES = (0.03, 1.0)  # of variables: flat ones, of inputs that do not matter, would go too far at the second step
_NEWTON = 1.0  # length of a step of Newton's, at the most,
_ENOUGH = 1e-4  # how much of what the gradient promises the loss has to fall by,
_FLATTER = 0.5  # and how much of its slope along the step may be left
_CURVED = 1e-10  # cosine of the angle between a step and the difference of gradients, at the least;
_STEP = 1e-6  # and length of such a step, so that the difference is more than what solves leave of a gradient
STUCK = "the line search found no lower loss"


class _End(Exception):
    """Of the fit, from inside of SciPy's loop."""


class _Evaluations:
    """Losses and gradients, the latest of them kept."""

    def __init__(self, variables: Variables, steps: Steps) -> None:
        self.variables, self.steps = variables, steps
        self._known: list[tuple[np.ndarray, Evaluation, np.ndarray, list[Tensor]]] = []

    def __call__(self, vector: np.ndarray) -> tuple[Evaluation, np.ndarray, list[Tensor]]:
        """Loss, gradient and state of the parameters; a loss that cannot be computed is a high one.

        :raises NumericalError: if the first loss is not finite.
        """
        for seen, found, gradient, state in self._known:
            if np.array_equal(seen, vector):
                return found, gradient, state
        history, objective = self.steps.history, self.variables.objective
        self.variables.put(vector)
        found = objective.evaluate()
        self.steps.count(found)
        gradient = self.variables.gradient(vector)
        if not math.isfinite(found.value) or not np.isfinite(gradient).all():
            if len(history.losses) == self.steps.first:
                raise NumericalError(FIRST, see="first-loss")
            best = history.best_loss  # the search goes back from there
            found, gradient = replace(found, value=best + _FAILED * max(1.0, abs(best))), np.zeros_like(gradient)
        self._known.append((vector.copy(), found, gradient, objective.state()))
        del self._known[: -_SEARCH - 1]
        return found, gradient, self._known[-1][-1]


def lbfgs(objective: Objective, steps: Steps, inverse_hessian: np.ndarray | None = None) -> np.ndarray | None:
    """Minimise in place.

    :param inverse_hessian: ``(p, p)``, about that of the loss in its :class:`Variables`, where it is known.
    :returns: the same at the end, as far as the steps tell; None where there was none.
    :raises NumericalError: if the first loss is not finite.
    """
    variables = Variables(objective)
    evaluate = _Evaluations(variables, steps)
    start = variables()
    found, gradient, state = evaluate(start)
    if steps.note(found, float(np.linalg.norm(gradient)), state):
        return None
    fits = inverse_hessian is not None
    while fits:
        assert inverse_hessian is not None
        ahead = _newton(variables, start, gradient, inverse_hessian)
        trial, slope, state = evaluate(ahead)
        before, after = (float(one @ (ahead - start)) for one in (gradient, slope))
        if not trial.value <= found.value + _ENOUGH * before:
            break
        fits = abs(after) <= _FLATTER * abs(before)  # Wolfe's conditions; else a search would go on along the step
        inverse_hessian = _inverse_hessian([(start, gradient), (ahead, slope)], inverse_hessian)
        start, found, gradient = ahead, trial, slope
        if steps.note(found, float(np.linalg.norm(gradient)), state):
            return inverse_hessian
    path, scale = [(start, gradient)], _scale(start, inverse_hessian)

    def loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        found, gradient, _ = evaluate(start + scale * scaled)
        if steps.in_vain:
            steps.history.reason = SETTLED
            raise _End
        return found.value, scale * gradient

    def stepped(scaled: np.ndarray) -> None:
        vector = start + scale * scaled
        found, gradient, state = evaluate(vector)
        path.append((vector, gradient))
        if steps.note(found, float(np.linalg.norm(gradient)), state):
            raise _End

    limits = list(zip((variables.lower - start) / scale, (variables.upper - start) / scale, strict=True))
    options = {"maxcor": _MEMORY, "maxiter": 10**6, "maxfun": 10**6, "ftol": 0.0, "gtol": _FLAT, "maxls": _SEARCH}
    try:
        result: Any = minimize(loss, np.zeros_like(start), jac=True, method="L-BFGS-B", bounds=limits,
                               callback=stepped, options=options)  # fmt: skip
        losses = steps.history.losses[steps.first :]
        flat = result.status == 0 or (len(losses) > 1 and losses[-2] - losses[-1] < steps.tol)
        steps.history.reason = SETTLED if flat else STUCK
    except _End:
        pass
    return _inverse_hessian(path, inverse_hessian)


def _newton(variables: Variables, start: np.ndarray, gradient: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Where Newton's step leads to, or one of that direction that is no longer than is safe."""
    step = -inverse @ gradient
    return np.clip(start + step / max(1.0, np.linalg.norm(step) / _NEWTON), variables.lower, variables.upper)


def _scale(start: np.ndarray, inverse: np.ndarray | None) -> np.ndarray:
    """``(p,)``: variables over it have a Hessian of about 1 on its diagonal, or less."""
    return np.ones_like(start) if inverse is None else np.sqrt(np.diag(inverse)).clip(*_SCALES)


def _inverse_hessian(path: list[tuple[np.ndarray, np.ndarray]], before: np.ndarray | None) -> np.ndarray | None:
    """``(p, p)``, positive definite, from parameters and gradients of the latest steps; None where they say nothing.

    The formula of Broyden, Fletcher, Goldfarb and Shanno: Nocedal and Wright, Numerical Optimization (2006), (6.17).

    :param before: what it was, if it is known.
    """
    differences = ((b[0] - a[0], b[1] - a[1]) for a, b in zip(path, path[1:], strict=False))
    long = ((s, y) for s, y in differences if np.linalg.norm(s) > _STEP)
    pairs = [(s, y) for s, y in long if s @ y > _CURVED * np.linalg.norm(s) * np.linalg.norm(y)][-_MEMORY:]
    if not pairs:
        return before
    identity = np.eye(len(path[0][0]))
    s, y = pairs[-1]
    inverse = (s @ y) / (y @ y) * identity if before is None else before
    for s, y in pairs:
        left = identity - np.outer(s, y) / (s @ y)
        inverse = left @ inverse @ left.T + np.outer(s, s) / (s @ y)
    inverse = (inverse + inverse.T) / 2
    return inverse + 1e-8 * np.trace(inverse) / len(inverse) * identity


def improvement(losses: Sequence[Any], span: int) -> Any:
    """What so many steps together took off; None before there are as many."""
    return losses[-1 - span] - losses[-1] if len(losses) > span else None

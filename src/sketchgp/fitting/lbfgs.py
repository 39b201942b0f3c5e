"""L-BFGS with bounds and a line search: Byrd, Lu, Nocedal and Zhu (SIAM J. Sci. Comput. 16, 1995), by SciPy.

SciPy's first step has length 1, however small the gradient is.  Near a minimum, from where a fit that was begun on a
subset of the rows goes on, that is far too long.  So the variables are scaled by the inverse Hessian of the fit before,
and then so that the step of length 1 is Newton's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import LbfgsInvHessProduct, minimize
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
_LONGEST = 1.0  # scale of a variable: flat ones, of inputs that do not matter, would go too far at the second step
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
    scale = _scale(gradient, inverse_hessian)
    path = [(start, gradient)]

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
    return _inverse_hessian(path)


def _scale(gradient: np.ndarray, inverse: np.ndarray | None) -> np.ndarray:
    """``(p,)``: variables over it have a Hessian near a multiple of 1, and the first step, of length 1, is Newton's."""
    if inverse is None:
        return np.ones_like(gradient)
    scale = np.sqrt(np.diag(inverse)).clip(max=_LONGEST)
    return scale * min(1.0, max(float(np.linalg.norm(scale * gradient)), _FLAT))


def _inverse_hessian(path: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray | None:
    """``(p, p)``, positive definite, from the parameters and gradients of the latest steps."""
    differences = ((b[0] - a[0], b[1] - a[1]) for a, b in zip(path, path[1:], strict=False))
    pairs = [(s, y) for s, y in differences if s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y)][-_MEMORY:]
    if not pairs:
        return None
    s, y = pairs[-1]
    size = (s @ y) / (y @ y)  # SciPy's product begins with a matrix of size 1
    found = LbfgsInvHessProduct(
        np.stack([s for s, _ in pairs]) / size**0.5, np.stack([y for _, y in pairs]) * size**0.5
    )
    inverse = size * found.todense()
    inverse = (inverse + inverse.T) / 2
    return inverse + 1e-8 * np.trace(inverse) / len(inverse) * np.eye(len(inverse))


def improvement(losses: Sequence[Any], span: int) -> Any:
    """What so many steps together took off; None before there are as many."""
    return losses[-1 - span] - losses[-1] if len(losses) > span else None

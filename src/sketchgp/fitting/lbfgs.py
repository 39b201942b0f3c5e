"""L-BFGS with bounds and a line search: Byrd, Lu, Nocedal and Zhu (SIAM J. Sci. Comput. 16, 1995), by SciPy.

Where a fit to a subset of the rows was before, its inverse Hessian is about that of all rows.  Steps are then Newton's
with that matrix, which learns from each of them, as long as they take the loss about as low as it goes on their way.
Else SciPy goes on, which begins with no more than the diagonal: its first step is as long as the gradient in variables
that are scaled by it, and at most of length 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
from torch import Tensor

from ..errors import NumericalError
from .adam import FIRST
from .history import SETTLED, UNSURE
from .objective import Objective
from .record import Evaluation
from .steps import Steps
from .variables import Variables

_MEMORY = 20  # pairs of steps and differences of gradients that a run keeps
_KEPT = 60  # pairs of an inverse Hessian, those of earlier runs included
_FAILED = 1e3  # a loss that could not be computed is taken to be so much higher than the best one
_FLAT = 1e-6  # norm of a gradient, per row, below which nothing is left to do
_SEARCH = 20  # evaluations of a line search
_SCALES = (0.03, 1.0)  # of variables: flat ones, of inputs that do not matter, would go too far at the second step
_NEWTON = 1.0  # length of a step of Newton's, at the most,
_ENOUGH = 1e-4  # how much of what the gradient promises the loss has to fall by,
_FLATTER = 0.5  # and how much of its slope along the step may be left
_CURVED = 1e-10  # cosine of the angle between a step and the difference of gradients, at the least;
_STEP = 1e-6  # and length of such a step, so that the difference is more than what solves leave of a gradient
_PRESSED = 1e-4  # derivative of the loss beyond a limit of a variable, above which the fit ended there
_STEEP = 0.1  # norm of the gradient of a loss that has settled, above which that is doubtful
STEEP = f"{UNSURE}: the steps bring little, and the gradient is not small"
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


class InverseHessian:
    """Positive definite estimate of an inverse Hessian by the formula of Broyden, Fletcher, Goldfarb and Shanno.

    It is kept as pairs of steps s and differences of gradients y, so that p variables take O(p) memory for each pair:
    Nocedal and Wright, Numerical Optimization (2006), (6.17) and algorithm 7.4.

    :param size: the multiple of the identity that the first pair updates.
    :param pairs: of vectors (s, y), each ``(p,)`` with ``s @ y > 0``, in their order.
    """

    def __init__(self, size: float, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self.size, self.pairs = size, list(pairs)[-_KEPT:]

    @classmethod
    def updated(
        cls, before: InverseHessian | None, pairs: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> InverseHessian | None:
        """The estimate after more pairs; without any what it was.

        :param before: None where nothing is known yet.
        """
        if not pairs:
            return before
        s, y = pairs[-1]
        size = (s @ y) / (y @ y) if before is None else before.size
        return cls(float(size), [*([] if before is None else before.pairs), *pairs])

    def __matmul__(self, vector: np.ndarray) -> np.ndarray:
        """``(p,)``, the product with a vector."""
        return self._product(vector, len(self.pairs))

    def _product(self, vector: np.ndarray, count: int) -> np.ndarray:
        """The product with the estimate that the first pairs alone make."""
        pairs, shares, result = self.pairs[:count], [], vector
        for s, y in reversed(pairs):
            shares.append((s @ result) / (s @ y))
            result = result - shares[-1] * y
        result = self.size * result
        for s, y in pairs:
            result = result + (shares.pop() - (y @ result) / (s @ y)) * s
        return result

    def diagonal(self) -> np.ndarray:
        """``(p,)``."""
        result = np.full_like(self.pairs[0][0], self.size)
        for count, (s, y) in enumerate(self.pairs):
            product, curvature = self._product(y, count), s @ y
            result = result - 2 * s * product / curvature + (1 + (y @ product) / curvature) * s**2 / curvature
        return result


def lbfgs(objective: Objective, steps: Steps, inverse_hessian: InverseHessian | None = None) -> InverseHessian | None:
    """Minimise in place.

    :param inverse_hessian: about that of the loss in its :class:`Variables`, where it is known.
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
        inverse_hessian = InverseHessian.updated(inverse_hessian, _pair((start, gradient), (ahead, slope)))
        start, found, gradient = ahead, trial, slope
        if steps.note(found, float(np.linalg.norm(gradient)), state):
            _judge(variables, steps, start, gradient)
            return inverse_hessian
    scale = np.ones_like(start) if inverse_hessian is None else np.sqrt(inverse_hessian.diagonal()).clip(*_SCALES)
    unit = max(1.0, float(np.linalg.norm(scale * gradient)))  # with bounds SciPy's first step is the whole gradient
    latest, pairs = (start, gradient), deque[tuple[np.ndarray, np.ndarray]](maxlen=_MEMORY)

    def loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        found, gradient, _ = evaluate(start + scale * scaled)
        if steps.in_vain:
            steps.history.reason = SETTLED
            raise _End
        return found.value / unit, scale * gradient / unit

    def stepped(scaled: np.ndarray) -> None:
        nonlocal latest
        vector = start + scale * scaled
        found, gradient, state = evaluate(vector)
        pairs.extend(_pair(latest, (vector, gradient)))
        latest = vector, gradient
        if steps.note(found, float(np.linalg.norm(gradient)), state):
            raise _End

    limits = list(zip((variables.lower - start) / scale, (variables.upper - start) / scale, strict=True))
    options = {
        "maxcor": _MEMORY,
        "maxiter": 10**6,
        "maxfun": 10**6,
        "ftol": 0.0,
        "gtol": _FLAT / unit,
        "maxls": _SEARCH,
    }
    try:
        result: Any = minimize(loss, np.zeros_like(start), jac=True, method="L-BFGS-B", bounds=limits,
                               callback=stepped, options=options)  # fmt: skip
        losses = steps.history.losses[steps.first :]
        flat = result.status == 0 or (len(losses) > 1 and losses[-2] - losses[-1] < steps.tol)
        steps.history.reason = SETTLED if flat else STUCK
    except _End:
        pass
    _judge(variables, steps, *latest)
    return InverseHessian.updated(inverse_hessian, list(pairs))


def _judge(variables: Variables, steps: Steps, vector: np.ndarray, gradient: np.ndarray) -> None:
    """Say which limits of its variables ended a run, and whether it has settled although its gradient is not small."""
    steps.history.at_limits = variables.pressed(vector, gradient, _PRESSED)
    inside = ((gradient > 0) & (vector > variables.lower)) | ((gradient < 0) & (vector < variables.upper))
    if steps.history.reason == SETTLED and np.linalg.norm(gradient[inside]) > _STEEP:
        steps.history.reason = STEEP


def _newton(variables: Variables, start: np.ndarray, gradient: np.ndarray, inverse: InverseHessian) -> np.ndarray:
    """Where Newton's step leads to, or one of that direction that is no longer than is safe."""
    step = -(inverse @ gradient)
    return np.clip(start + step / max(1.0, np.linalg.norm(step) / _NEWTON), variables.lower, variables.upper)


def _pair(
    before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The step and the difference of gradients between two points; none where they say nothing of the curvature."""
    s, y = after[0] - before[0], after[1] - before[1]
    length = np.linalg.norm(s)
    return [(s, y)] if length > _STEP and s @ y > _CURVED * length * np.linalg.norm(y) else []


def improvement(losses: Sequence[Any], span: int) -> Any:
    """What so many steps together took off; None before there are as many."""
    return losses[-1 - span] - losses[-1] if len(losses) > span else None

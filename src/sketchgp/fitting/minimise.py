"""Minimisers of a loss: Adam, and L-BFGS with bounds.

Adam is by Kingma and Ba (ICLR 2015), as PyTorch has it.  L-BFGS with bounds and a line search is by Byrd, Lu, Nocedal
and Zhu (SIAM J. Sci. Comput. 16, 1995), as SciPy has it.

After a fit to some of the rows, the inverse Hessian there approximates that of all rows.  The first steps are then
Newton steps with that matrix, which is updated after each, while they satisfy Wolfe's conditions.  SciPy, which starts
from no more than the diagonal, goes on after them: its first step is as long as the gradient in variables that are
scaled by the diagonal, and at most of length 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import LbfgsInvHessProduct, minimize
from torch import Tensor

from ..errors import NumericalError
from .history import LOST, SETTLED, UNSURE
from .record import Evaluation
from .steps import NOT_FINITE, Steps
from .variables import Variables

_MEMORY = 20  # pairs of steps and differences of gradients that a run keeps
_KEPT = 60  # pairs of an inverse Hessian, those of earlier runs included
_FAILED = 1e3  # relative height above the best loss that a loss which cannot be computed is given
_FLAT = 1e-6  # norm of the gradient, per row, below which nothing is left to do
_SEARCH = 20  # evaluations of a line search
_SCALES = (0.03, 1.0)  # limits of the scale of variables; flat ones would go too far at the second step
_PROMISED = 0.5  # of the tolerance: a Newton step that promises less is not taken
_DOUBTED = 20  # tolerances that a step may promise where the steps before tell otherwise
_NEWTON = 1.0  # largest length of a Newton step
_DECREASE = 1e-4  # share of the decrease promised by the gradient that a step must reach
_CURVATURE = 0.5  # share of the slope along the step that may be left after it
_CURVED = 1e-10  # least cosine of the angle between a step and the difference of gradients
_STEP = 1e-6  # least length of such a step; differences over shorter ones are errors of the solves
_PRESSED = 1e-4  # derivative of the loss beyond a limit of a variable, above which the fit ended there
_STEEP = 0.1  # norm of the gradient of a loss that has settled, above which that is doubtful
STEEP = f"{UNSURE}: the steps bring little, and the gradient is not small"
STUCK = "the line search found no lower loss"
_FIRST = "The marginal likelihood is not finite; check the data and the noise."


class _End(Exception):
    """Signals the end of a run from inside a line search."""


def minimise(
    steps: Steps, learning_rate: float | None, inverse_hessian: InverseHessian | None
) -> InverseHessian | None:
    """Minimise the objective of some steps in place, by Adam or L-BFGS as their history says.

    :param learning_rate: step size of Adam, in the unconstrained parameters.
    :param inverse_hessian: the inverse Hessian in the objective's :class:`Variables`, approximately, where it is known.
    :returns: the inverse Hessian at the end, by L-BFGS.
    :raises NumericalError: if the first loss is not finite.
    """
    if steps.history.optimizer == "adam":
        adam(steps, learning_rate or 0.1)
        return inverse_hessian
    return lbfgs(steps, inverse_hessian)


def adam(steps: Steps, learning_rate: float) -> None:
    """Minimise in place by Adam."""
    objective = steps.objective
    optimizer = torch.optim.Adam(objective.moved, lr=learning_rate)
    while True:
        evaluation = objective.evaluate()
        steps.count(evaluation)
        if not math.isfinite(evaluation.value) or not objective.finite:
            if len(steps.history.losses) == steps.first:
                raise NumericalError(_FIRST, see="first-loss")
            steps.history.reason = NOT_FINITE
            return
        if steps.note(evaluation, objective.norm(), objective.state()):
            return
        optimizer.step()
        objective.into_bounds()


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
        """Return the estimate after more pairs; without any, the one before, which may be None."""
        if not pairs:
            return before
        s, y = pairs[-1]
        size = (s @ y) / (y @ y) if before is None else before.size
        return cls(float(size), [*([] if before is None else before.pairs), *pairs])

    def __matmul__(self, vector: np.ndarray) -> np.ndarray:
        """Return the product with a vector, ``(p,)``."""
        return self._product(vector, len(self.pairs))

    def _product(self, vector: np.ndarray, count: int) -> np.ndarray:
        """Return the product with the estimate that the first pairs alone make."""
        s, y = (np.reshape([pair[side] for pair in self.pairs[:count]], (count, len(vector))) for side in (0, 1))
        root = math.sqrt(self.size)  # SciPy's estimate begins with the identity
        return self.size * LbfgsInvHessProduct(s / root, y * root).matvec(vector)

    def diagonal(self) -> np.ndarray:
        """Return the diagonal, ``(p,)``."""
        result = np.full_like(self.pairs[0][0], self.size)
        for count, (s, y) in enumerate(self.pairs):
            product, curvature = self._product(y, count), s @ y
            result = result - 2 * s * product / curvature + (1 + (y @ product) / curvature) * s**2 / curvature
        return result


@dataclass(frozen=True)
class _Point:
    """Values of the variables, the evaluation and gradient there, and the state of the parameters."""

    vector: np.ndarray
    evaluation: Evaluation
    gradient: np.ndarray
    state: list[Tensor]


class _Search:
    """The state of one run of L-BFGS: its evaluations, the latest of them kept, and the point of its last step."""

    def __init__(self, steps: Steps) -> None:
        self.objective, self.steps, self.variables = steps.objective, steps, Variables(steps.objective)
        self._latest: list[_Point] = []
        self.point = self.evaluate(self.variables())

    def evaluate(self, vector: np.ndarray) -> _Point:
        """Return the point with these variables; a loss that cannot be computed is given a high value.

        The run ends where losses have become those of another function.

        :raises NumericalError: if the first loss is not finite.
        """
        for point in self._latest:
            if np.array_equal(point.vector, vector):
                return point
        history = self.steps.history
        self.variables.put(vector)
        evaluation = self.objective.evaluate()
        self.steps.count(evaluation)
        if self.steps.changed:
            history.reason = LOST
            raise _End
        gradient = self.variables.gradient(vector)
        if not math.isfinite(evaluation.value) or not np.isfinite(gradient).all():
            if len(history.losses) == self.steps.first:
                raise NumericalError(_FIRST, see="first-loss")
            best = history.best_loss  # the line search goes back from there
            evaluation = replace(evaluation, value=best + _FAILED * max(1.0, abs(best)))
            gradient = np.zeros_like(gradient)
        point = _Point(vector.copy(), evaluation, gradient, self.objective.state())
        self._latest.append(point)
        del self._latest[: -_SEARCH - 1]
        return point

    def note(self, point: _Point) -> bool:
        """Make a point the last step; return whether the run ends there."""
        self.point = point
        return self.steps.note(point.evaluation, float(np.linalg.norm(point.gradient)), point.state)

    @property
    def inside(self) -> np.ndarray:
        """The gradient at the last step, zero where descent would leave the limits of a variable."""
        vector, gradient = self.point.vector, self.point.gradient
        return gradient * np.where(gradient > 0, vector > self.variables.lower, vector < self.variables.upper)

    def settled(self, inverse: InverseHessian | None) -> bool:
        """Return whether the next Newton step promises too little, which ends the run.

        It may promise too much, by curvatures that a fit to few rows had: losses that shrink fast are believed more.
        """
        gradient = self.inside
        promise = math.inf if inverse is None else 0.5 * gradient @ (inverse @ gradient)
        if promise >= (_DOUBTED if self.steps.ahead < self.steps.tol else _PROMISED) * self.steps.tol:
            return False
        self.steps.history.reason = SETTLED
        return True

    def newton(self, inverse: InverseHessian) -> tuple[InverseHessian, bool]:
        """Take Newton steps while they satisfy Wolfe's conditions; a line search would go on along the step.

        :returns: the updated inverse Hessian, and whether the run has ended.
        """
        while True:
            before = self.point
            step = -(inverse @ self.inside)
            if self.settled(inverse):
                return inverse, True
            ahead = before.vector + step / max(1.0, np.linalg.norm(step) / _NEWTON)
            trial = self.evaluate(np.clip(ahead, self.variables.lower, self.variables.upper))
            slope, slope_after = (float(p.gradient @ (trial.vector - before.vector)) for p in (before, trial))
            if not trial.evaluation.value <= before.evaluation.value + _DECREASE * slope:
                return inverse, False
            inverse = InverseHessian.updated(inverse, _pair(before, trial)) or inverse
            if self.note(trial):
                return inverse, True
            if not abs(slope_after) <= _CURVATURE * abs(slope):
                return inverse, False

    def scipy(self, inverse: InverseHessian | None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Go on by SciPy's L-BFGS-B; return the latest pairs of steps and differences of gradients."""
        start, steps, variables = self.point.vector, self.steps, self.variables
        scale = np.ones_like(start) if inverse is None else np.sqrt(inverse.diagonal()).clip(*_SCALES)
        # with bounds SciPy's first step is the whole gradient
        unit = max(1.0, float(np.linalg.norm(scale * self.point.gradient)))
        pairs = deque[tuple[np.ndarray, np.ndarray]](maxlen=_MEMORY)

        def loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            point = self.evaluate(start + scale * scaled)
            if steps.in_vain:
                steps.history.reason = SETTLED
                raise _End
            return point.evaluation.value / unit, scale * point.gradient / unit

        def stepped(scaled: np.ndarray) -> None:
            before, point = self.point, self.evaluate(start + scale * scaled)
            pairs.extend(_pair(before, point))
            if self.note(point) or (inverse is not None and self.settled(InverseHessian.updated(inverse, pairs))):
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
        return list(pairs)

    def judge(self) -> None:
        """Record which limits of the variables ended the run, and whether the loss settled on a steep slope."""
        history = self.steps.history
        history.at_limits = self.variables.pressed(self.point.vector, self.point.gradient, _PRESSED)
        if history.reason == SETTLED and np.linalg.norm(self.inside) > _STEEP:
            history.reason = STEEP


def lbfgs(steps: Steps, inverse_hessian: InverseHessian | None) -> InverseHessian | None:
    """Minimise in place by Newton steps, where an inverse Hessian is known, and then by L-BFGS.

    :returns: the inverse Hessian at the end, as far as the steps tell; None where nothing is known of it.
    :raises NumericalError: if the first loss is not finite.
    """
    search, ended = _Search(steps), False
    if search.note(search.point):
        return inverse_hessian
    if inverse_hessian is not None:
        try:
            inverse_hessian, ended = search.newton(inverse_hessian)
        except _End:
            ended = True
    if not ended:
        inverse_hessian = InverseHessian.updated(inverse_hessian, search.scipy(inverse_hessian))
    search.judge()
    return inverse_hessian


def _pair(before: _Point, after: _Point) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the step and the difference of gradients between two points, if they tell anything of the curvature."""
    s, y = after.vector - before.vector, after.gradient - before.gradient
    length = np.linalg.norm(s)
    return [(s, y)] if length > _STEP and s @ y > _CURVED * length * np.linalg.norm(y) else []

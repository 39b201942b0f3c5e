"""Approximate variances, low-rank or by samples, whose cost hardly depends on the number of test points.

Low-rank variances take one solve with 64 columns, samples one more with a column each.  The results are remembered
with the training covariance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ...errors import ConvergenceWarning, InputError, warn
from ...inference.calibrated import Calibrated
from ...inference.pathwise import Deviations
from ...operators.engines import FAST, choose
from ...operators.expression import recognise
from ...operators.tiles import spans
from ...random_streams import generator, salted
from ...solvers.energy import Goal, JoinedGoals, LeaveOneOutGoal, SampleGoal, VarianceGoal
from ...solvers.solver import kernel_of

_EXACT_WORK = {"cpu": 1e10, "cuda": 1e13}  # n^2 m up to which "auto" solves for every test point
_FACTOR_WORK = {"cpu": 2e11, "cuda": 2e14}  # operations of a factorization up to which "auto" factorizes
_WORTH = 3.0  # exact variances may take so many times as long as approximations
_FEW = 64  # test points for which solves cost no more than preparing approximations
_BLOCK_WORK = 2500  # a solve with 64 columns takes as long as so many times n^2 operations
_POINT_WORK = 1.5e7  # a low-rank variance takes as long as so many operations
_SCATTER = 0.1  # relative scatter of low-rank variances beyond which "auto" draws samples
_CHECKED = 4  # test points at which approximations are compared with exact variances
_TYPICAL, _WORST = 0.05, 0.1  # tolerances beside the standard error: exact variances are right to some hundredths
_ROWS = 4096  # test points at once
_NARROW = 12  # columns at once of products that gain nothing by more


class Approximate:
    """Approximate variances of a model with a plain kernel and no batch.

    :param training: its :class:`~.training.Training`.
    """

    def __init__(self, training: Any) -> None:
        self.training, self.matrix, self.noise = training, training.system.operator, training.system.noise
        self._checked_at = self.matrix.x1[:0]
        self._exact: Tensor | None = None  # exact variances at these points

    # --- which ----------------------------------------------------------------------------------------------

    def exact_is_cheap(self, m: int) -> bool:
        """Return True if exact variances of m test points take little longer than others, or hardly any time."""
        n, kind, remembered = self.matrix.shape[-1], self.noise.device.type, self.training.remembered
        if m <= _FEW or n * n * m <= _EXACT_WORK.get(kind, 1e10):
            return True
        if not self.training.factorizes(m):
            return False
        work = 2.0 * n * n * m + (0 if remembered.root is not None else n**3 / 3)
        others = _POINT_WORK * m + (0 if remembered.low_rank is not None else _BLOCK_WORK * n * n)
        return work <= max(_FACTOR_WORK.get(kind, 2e11), _WORTH * others)

    def best(self) -> str:
        """Return the name of the better approximation: samples where low-rank variances scatter too much."""
        if self.low_rank.scatter > _SCATTER and recognise(self.matrix.kernel, waves=True) is not None:
            return "samples"
        return "low_rank"

    # --- what they are made of ------------------------------------------------------------------------------

    def prepare(self, x: Tensor) -> None:
        """Prepare low-rank variances, and exact ones at some of the points x ``(m, d)``, by one solve with 64 columns.

        Nothing is done where they are remembered.
        """
        remembered = self.training.remembered
        if remembered.low_rank is None:
            self._checked_at = x[self._some(x)]
            remembered.low_rank = Calibrated(self.matrix, self.noise, self._left_out)

    @property
    def low_rank(self) -> Calibrated:
        """Low-rank variances, which :meth:`prepare` found."""
        return self.training.remembered.low_rank

    @property
    def deviations(self) -> Deviations:
        """Posterior samples, remembered or computed now with a column of a solve for each.

        :raises InputError: for a kernel without random features.
        """
        remembered, samples = self.training.remembered, self.training.acceleration.variance_samples
        if remembered.deviations is None or remembered.deviations.samples != samples:
            with torch.no_grad():
                x, seed = self.matrix.x1, salted(0, "samples of variances")
                drawn = Deviations(kernel_of(self.matrix), x, samples, seed)
                blocks = drawn.targets(x, self.noise).split(self.training.columns, dim=1)
                solved = (self.training.solve_block(block, self._goal())[0].weights for block in blocks)
                drawn.weights = torch.cat(list(solved), dim=1)
                remembered.deviations = drawn
        return remembered.deviations

    def _goal(self) -> SampleGoal:
        """Return the goal of a solve for samples, by the energy that it leaves out of the targets, n in expectation.

        Its share is that which the error would have in a variance if it were spread evenly.
        """
        prior = self.matrix.entries(self.matrix.x1[:_ROWS], None).mean()
        least = self.noise.amin().to(torch.float64).reshape(1)
        typical = torch.maximum(self.low_rank.typical, 0.02 * least[0])
        return SampleGoal(len(self.noise) * (typical / prior).clamp(max=1), least)

    def _left_out(self, indices: Tensor) -> Tensor:
        """Return exact latent variances at training points left out, and keep those at the points to be checked.

        As many columns are solved at once as the memory budget has room for, and few where that takes no longer.
        """
        noise, n, points, found = self.noise.to(torch.float64), len(self.noise), self._checked_at, list[Tensor]()
        width = _NARROW if choose(self.matrix.pairs, _NARROW) in FAST else len(indices)
        prior = self.matrix.entries(points, None)
        for some in indices.split(max(1, min(width, self.training.columns - len(points)))):
            at = points[: 0 if found else None]
            both = torch.cat([one_hot(some, n).mT, self.matrix.entries(self.matrix.x1, at)], dim=1)
            goals = LeaveOneOutGoal(noise[some], noise.amin().reshape(1)), self._explaining(prior[: len(at)])
            q = self._quadratic_forms(both, JoinedGoals(goals[0].least, len(some), *goals))
            if not found:
                self._exact = (prior - q[len(some) :]).clamp(min=0)
            found.append((1 / q[: len(some)] - noise[some]).clamp(min=0))
        return torch.cat(found)

    def _quadratic_forms(self, c: Tensor, goal: Goal) -> Tensor:
        """Return ``c_j^T A^-1 c_j``, ``(t,)``, for c ``(n, t)``."""
        result, _ = self.training.solve_block(c, goal)
        return result.diagonal(c)

    def _explaining(self, prior: Tensor) -> VarianceGoal:
        """Return the goal of variances that are right to some hundredths."""
        return VarianceGoal(prior, self.noise.amin().to(torch.float64).reshape(1), share=0.02, careful=False)

    # --- variances ------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor, method: str) -> Tensor:
        """Return latent variances ``(m,)`` at x ``(m, d)``, as the kernel sees it, float64.

        Differentiable in x, with everything of the training data as constants.

        :param method: ``"low_rank"`` or ``"samples"``.
        """
        self.prepare(x.detach())
        low_rank, parts = self.low_rank, []
        for rows in spans(len(x), _ROWS):
            variance = low_rank(x[rows])
            if method == "samples":
                prior = self.matrix.entries(x[rows], None)
                variance = torch.minimum(self._weighed(self.deviations(x[rows]), variance), prior)
            parts.append(variance)
        return torch.cat(parts) if parts else x.new_zeros(0, dtype=torch.float64)

    def error(self, method: str, variance: Tensor) -> Tensor:
        """Return the relative standard errors of latent variances ``(m,)`` float64."""
        error = self.low_rank.error(variance)
        return error if method == "low_rank" else error / (1 + error.square() * self.deviations.samples / 2).sqrt()

    def _weighed(self, deviations: Tensor, low_rank: Tensor) -> Tensor:
        """Average the mean square of S samples and the low-rank variance by their inverse relative variances.

        The relative variance of the mean square is ``2 / S``.
        """
        # relative variance of the low-rank variance over that of the samples
        share = self.low_rank.error(low_rank).square() * (deviations.shape[-1] / 2)
        return (share * deviations.square().mean(dim=-1) + low_rank) / (share + 1)

    # --- a look at a few of them ----------------------------------------------------------------------------

    @staticmethod
    def _some(x: Tensor) -> Tensor:
        return torch.randperm(len(x), generator=generator(0, "points of a variance check"))[:_CHECKED].to(x.device)

    @torch.no_grad()
    def check(self, x: Tensor, variance: Tensor, method: str, once: bool) -> tuple[Tensor, Tensor] | None:
        """Return indices of 4 of the test points x and exact variances there.

        A warning follows where the given variances are off by more than their standard errors say.

        :param once: whether to return None where the method was compared before, and else to note that it is now.
        """
        checked = self.training.remembered.checked
        if once and method in checked:
            return None
        checked |= {method} if once else set()
        some = self._some(x)
        at, floor = x[some], 0.02 * float(self.noise.amin())
        if self._exact is None or not torch.equal(at, self._checked_at):
            c, prior = self.matrix.entries(self.matrix.x1, at), self.matrix.entries(at, None)
            self._checked_at, self._exact = at, (prior - self._quadratic_forms(c, self._explaining(prior))).clamp(min=0)
        exact = self._exact
        error = self.error(method, variance[some])
        logs = ((variance[some] + floor) / (exact + floor)).log()
        typical, worst, usual = float(logs.median().abs()), float(logs.abs().max()), float(error.median())
        if typical > _TYPICAL + 3 * usual / math.sqrt(len(some)) or bool((logs.abs() > _WORST + 4 * error).any()):
            warn(
                f"Variances by {method!r} are off by {math.expm1(typical):.0%} in the median of {len(some)} test "
                f"points, and by up to {math.expm1(worst):.0%}; their standard error says {usual:.1%}. Use "
                "variance='exact', or 'samples' with more variance_samples.",
                ConvergenceWarning,
                see="variances-off",
            )
        return some, exact


class Refusing(torch.autograd.Function):
    """Identity of a value that requires gradients where one of some tensors does, and refuses to give any."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, method: str, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.method = method
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        raise InputError(
            f"Variances by {ctx.method!r} have no gradients in the hyperparameters; use variance='exact', or .detach()."
        )


def refuse(method: str) -> InputError:
    """Return the error for an approximation that a model does not have."""
    return InputError(f"variance={method!r} expects a plain kernel and one set of training inputs; use 'exact'.")

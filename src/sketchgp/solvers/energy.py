"""The energy norm of the error of conjugate gradients, and goals that are set for it.

``||w - w*||_A^2`` of a system ``A w = b`` falls by ``alpha_k r_k^T z_k`` in iteration k, without any more work
(Hestenes and Stiefel, 1952, Theorem 6:1; Strakos and Tichy, "On error estimation in the conjugate gradient method",
2002).  Errors of ill-conditioned problems fall as a power of the number of iterations rather than by a constant
factor; over steps that grow by a factor both are a geometric series at most, so that is what is extrapolated here.
An estimate: directions in which nothing has happened yet are not seen.

**Predictions.** For the matrix ``M = T^T T + level Kzz`` of the normal equations and an iterate w with the error
``e = w* - w``,

    ``|k(x, z) e| <= (k(x, z) M^-1 k(z, x))^1/2 ||e||_M  <=  sd(x) ||e||_M / level^1/2``

for every x, since ``level k(x, z) M^-1 k(z, x)`` is a part of the posterior variance ``sd(x)^2`` of the subset of
regressors with that noise (and of DTC).  So ``||e||_M / level^1/2`` is the largest distance, in posterior deviations,
of any prediction from the one that the solution makes; it also bounds the root of the sum of squares of the distances
at the training points, over the deviation of the noise.  The residual of the normal equations bounds neither: what it
misses is multiplied by the inverse of M, whose least eigenvalues are those of Kzz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_GROWTH = 1.5  # of one span of iterations over the one before
_LEAST = 6  # iterations before an estimate is made
_MOST = 100  # terms like the last one that may be to come
_FLOOR = 0.01  # of the noise: a latent variance below it is right to a share of that
_LATENT = 0.02  # of an observation's variance left out: a latent one below it is right to a share of that
MOVED = 0.1  # posterior deviations by rounding that no solve may call converged
CERTAIN = 0.25  # of a bound that is certain, as what is said of estimates leaves them room to be low
_SHARE = 1e-3  # of the predictions, in deviations of the prior, if that is more
_RECENT = 0.25  # of the iterations: an estimate is the largest of these


def tail(last: Tensor, falling: Tensor) -> Tensor:
    """The sum of a geometric series beyond its last term; very many times that where it does not fall."""
    falling = falling.clamp(max=1 - 1 / _MOST)
    return torch.where(last == 0, 0.0, last * falling / (1 - falling))


def ratio(last: Tensor, before: Tensor) -> Tensor:
    return last / before.clamp(min=torch.finfo(last.dtype).tiny)


class RemainingEnergy:
    """``||e||_M^2`` of conjugate gradients, column by column, from what each iteration took off it.

    That is known without work, ``alpha_k ||r_k||^2`` in the preconditioner's norm (Hestenes and Stiefel, 1952, Theorem
    6:1; Strakos and Tichy, "On error estimation in the conjugate gradient method", 2002).  What the last third of the
    iterations took, and the span before it, give what is left.

    :ivar taken: what iterations took; :ivar estimates: of what was left, ``(t,)`` each.
    """

    def __init__(self) -> None:
        self.taken, self.estimates = list[Tensor](), list[Tensor]()

    def add(self, taken: Tensor) -> Tensor:
        """:param taken: ``(t,)`` what an iteration took; returns the present estimate ``(t,)``."""
        self.taken.append(taken)
        k = len(self.taken)
        estimate = torch.full_like(taken, torch.inf)
        if k >= _LEAST:
            first, second = round(k / _GROWTH**2), round(k / _GROWTH)
            last, before = (torch.stack(part).sum(dim=0) for part in (self.taken[second:], self.taken[first:second]))
            estimate = tail(last, ratio(last, before))
        self.estimates.append(estimate)
        return torch.stack(self.estimates[-1 - int(_RECENT * k) :]).amax(dim=0)


class RadauBound:
    """Upper bounds of ``||e||_M^2`` of conjugate gradients by the Gauss-Radau rule, at no cost.

    Directions in which little has happened yet do not escape a bound, as they do an estimate.  Reference: Meurant and
    Tichy, "On computing quadrature-based bounds for the A-norm of the error in conjugate gradients" (2013), equation
    3.5.

    :param least: ``(..., t)`` below the eigenvalues of the preconditioned matrix; 0 where that is not known.
    """

    def __init__(self, least: Tensor) -> None:
        self.least = least
        self.begin()

    def begin(self) -> None:
        """Begin a cycle."""
        self._factor = torch.where(self.least > 0, 1 / self.least, 0)

    def add(self, alpha: Tensor, beta: Tensor, following: Tensor, index: Tensor) -> Tensor:
        """Return the bounds ``(..., i)`` after an iteration of the columns ``index``; 0 where nothing is known.

        :param following: ``r^T P^-1 r`` after it.
        """
        gap = self._factor[..., index] - alpha  # positive, until rounding has made another matrix
        factor = torch.where(gap > 0, gap / (self.least[..., index] * gap + beta), 0)
        self._factor[..., index] = factor
        return factor * following


class Goal:
    """An accuracy that the columns of a solve are to reach, by their energy.

    :ivar least: ``(..., 1)`` below the eigenvalues of A, or 0 where it is not known.
    :ivar share: that an error may come to.
    :ivar careful: whether what float32 products say is confirmed with float64 ones.
    """

    least: Tensor
    share: float
    careful: bool = False

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        """Return the error over what ``share`` is of, ``(..., t)``.

        :param taken: what was taken off the energy; :param remaining: an estimate of what is still to come.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LeaveOneOutGoal(Goal):
    """The accuracy of a solve for ``q = e_i^T A^-1 e_i``, of points that are left out.

    No latent variance ``1 / q - noise_i`` at such a point is off by more than a share of itself, or of a fiftieth of
    ``1 / q`` where that is more.

    :ivar noise: ``(t,)``, of each point; :ivar least: ``(1,)`` noise of all.
    """

    noise: Tensor
    least: Tensor
    share: float = 0.02

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        q = taken + torch.where(remaining.isfinite(), remaining, 0)
        of = q * (1 - self.noise * q).clamp(min=_LATENT)
        return torch.where(remaining == 0, 0, remaining / of)


@dataclass(frozen=True)
class SampleGoal(Goal):
    """The accuracy of a solve for samples: at most a share of :attr:`of` is left of a column's energy ``b^T A^-1 b``.

    :ivar of: ``()``; :ivar least: ``(1,)`` noise of all.
    """

    of: Tensor
    least: Tensor
    share: float = 0.02

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        return remaining / self.of


@dataclass(frozen=True)
class JoinedGoals(Goal):
    """Two goals, neither of them careful: one of the first columns, the other of those after them.

    :ivar least: of both; :ivar columns: of the first.
    """

    least: Tensor
    columns: int
    first: Goal
    second: Goal
    share: float = 1.0

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        """``(t,)``, each over its own goal's share."""
        parts = ((self.first, slice(None, self.columns)), (self.second, slice(self.columns, None)))
        return torch.cat([goal.error(taken[part], remaining[part]) / goal.share for goal, part in parts])


@dataclass(frozen=True)
class VarianceGoal(Goal):
    """The accuracy of a solve for ``c^T A^-1 c``, which posterior variances are made of.

    No variance ``prior - c^T A^-1 c`` is off by more than a share of itself, or of a hundredth of the noise where that
    is more.

    :ivar prior: ``(..., t)``, of each column c.
    :ivar least: ``(..., 1)`` below the eigenvalues of A: the least noise, or 0 where it is not known.
    :ivar below_noise: and by no more than a share of the least noise.
    """

    prior: Tensor
    least: Tensor
    below_noise: bool = False
    share: float = 0.0025  # a quarter of a hundredth, as estimates may be low
    careful: bool = True

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        of = self.prior - taken - torch.where(remaining.isfinite(), remaining, 0)
        if self.below_noise:
            of = torch.where(self.least > 0, torch.minimum(of, self.least), of)
        of = torch.maximum(of, _FLOOR * self.least).clamp(min=torch.finfo(of.dtype).tiny)
        return torch.where(remaining == 0, 0, remaining / of)


def moved_by_rounding(
    inverse_t: Callable[[Tensor], Tensor], value: Tensor, kzz: Tensor, level: float
) -> tuple[Tensor, Tensor]:
    """Return how far rounding of Kzz moves any prediction, and whether that is too far, ``(t,)`` each.

    The first is in posterior deviations.  Kzz cannot be told from ``Kzz + shift I`` with the unit roundoff times its
    trace for the shift.  To first order that changes w by ``d = level shift M^-1 w``, whose norm ``||d||_M /
    level^1/2`` bounds the change of predictions.  Only where Kzz has eigenvalues near the shift that matter for the
    targets, such as for a row far from all others, is it more than nothing.  Where predictions are many deviations of
    the prior, a small share of them is not too far.

    :param inverse_t: ``v -> R^-T v`` for a root ``R^T R`` of M, or of a matrix near it.
    :param value: w ``(m, t)`` float64, of an orthogonal factorization: solved from the normal equations it holds
        rounding errors along the null space of Kzz, which predict nothing and would count here.
    :param kzz: ``(m, m)``.
    """
    shift = torch.finfo(value.dtype).eps * kzz.trace()
    moved = inverse_t(value * (level * shift)).norm(dim=0) / level**0.5
    sizes = (kzz @ value).abs().amax(dim=0) / kzz.diagonal().amax().sqrt()
    return moved, moved > (_SHARE * sizes).clamp(min=MOVED)


def remaining_change(changes: list[Tensor]) -> Tensor | None:
    """Estimate ``||e||_M`` from the changes between iterates, norms ``(t,)``, at times that grow by a constant factor.

    The two last ratios are looked at, and the larger counts; None for fewer than three changes.
    """
    if len(changes) < 3:
        return None
    first, second, last = changes[-3:]
    return tail(last, torch.maximum(ratio(last, second), ratio(second, first)))

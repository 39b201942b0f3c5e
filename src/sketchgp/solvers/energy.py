"""The energy norm of the error of conjugate gradients, and goals that are set for it.

``||w - w*||_A^2`` of a system ``A w = b`` falls by ``alpha_k r_k^T z_k`` in iteration k, without any more work
(Hestenes and Stiefel, 1952, Theorem 6:1; Strakos and Tichy, "On error estimation in the conjugate gradient method",
2002).  Errors of ill-conditioned problems fall as a power of the number of iterations rather than by a constant
factor; over steps that grow by a factor both are a geometric series at most, so that is what is extrapolated here.
An estimate: directions in which nothing has happened yet are not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_GROWTH = 1.5  # of one span of iterations over the one before
_LEAST = 6  # iterations before an estimate is made
_MOST = 100  # terms like the last one that may be to come
_FLOOR = 0.01  # of the noise: a latent variance below it is right to a share of that
_LATENT = 0.02  # of an observation's variance left out: a latent one below it is right to a share of that
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

    :param taken: what iterations took, and the estimates of what was left, ``(t,)`` each; both lists grow.
    """

    def __init__(self, taken: list[Tensor] | None = None, estimates: list[Tensor] | None = None) -> None:
        self.taken = [] if taken is None else taken
        self._estimates = [] if estimates is None else estimates

    def add(self, taken: Tensor) -> Tensor:
        """:param taken: ``(t,)`` what an iteration took; returns the present estimate ``(t,)``."""
        self.taken.append(taken)
        k = len(self.taken)
        estimate = torch.full_like(taken, torch.inf)
        if k >= _LEAST:
            first, second = round(k / _GROWTH**2), round(k / _GROWTH)
            last, before = (torch.stack(part).sum(dim=0) for part in (self.taken[second:], self.taken[first:second]))
            estimate = tail(last, ratio(last, before))
        self._estimates.append(estimate)
        return torch.stack(self._estimates[-1 - int(_RECENT * k) :]).amax(dim=0)


class Goal(Protocol):
    """An accuracy that the columns of a solve are to reach, by their energy.

    :ivar least: ``(..., 1)`` below the eigenvalues of A, or 0 where it is not known.
    :ivar share: that an error may come to.
    :ivar careful: whether what float32 products say is confirmed with float64 ones.
    """

    @property
    def least(self) -> Tensor: ...
    @property
    def share(self) -> float: ...
    @property
    def careful(self) -> bool: ...

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        """``(..., t)``: the error over what ``share`` is of, from what was taken off the energy and an estimate of what
        is still to come."""
        ...


@dataclass(frozen=True)
class LeaveOneOutGoal:
    """The accuracy of a solve for ``q = e_i^T A^-1 e_i``, of points that are left out.

    No latent variance ``1 / q - noise_i`` at such a point is off by more than a share of itself, or of a fiftieth of
    ``1 / q`` where that is more.

    :ivar noise: ``(t,)``, of each point; :ivar least: ``(1,)`` noise of all.
    """

    noise: Tensor
    least: Tensor
    share: float = 0.02
    careful: bool = False

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        """``(t,)``."""
        q = taken + torch.where(remaining.isfinite(), remaining, 0)
        of = q * (1 - self.noise * q).clamp(min=_LATENT)
        return torch.where(remaining == 0, 0, remaining / of)


@dataclass(frozen=True)
class SampleGoal:
    """The accuracy of a solve for samples: at most a share of :attr:`of` is left of a column's energy ``b^T A^-1 b``.

    :ivar of: ``()``; :ivar least: ``(1,)`` noise of all.
    """

    of: Tensor
    least: Tensor
    share: float = 0.02
    careful: bool = False

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        """``(t,)``."""
        return remaining / self.of


@dataclass(frozen=True)
class JoinedGoals:
    """Two goals: one of the first columns, the other of those after them.

    :ivar columns: of the first.
    """

    first: Goal
    second: Goal
    columns: int
    share: float = 1.0

    @property
    def least(self) -> Tensor:
        return self.first.least

    @property
    def careful(self) -> bool:
        return self.first.careful or self.second.careful

    def error(self, taken: Tensor, remaining: Tensor) -> Tensor:
        """``(t,)``, each over its own goal's share."""
        parts = ((self.first, slice(None, self.columns)), (self.second, slice(self.columns, None)))
        return torch.cat([goal.error(taken[part], remaining[part]) / goal.share for goal, part in parts])


@dataclass(frozen=True)
class VarianceGoal:
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
        """``(..., t)``."""
        of = self.prior - taken - torch.where(remaining.isfinite(), remaining, 0)
        if self.below_noise:
            of = torch.where(self.least > 0, torch.minimum(of, self.least), of)
        of = torch.maximum(of, _FLOOR * self.least).clamp(min=torch.finfo(of.dtype).tiny)
        return torch.where(remaining == 0, 0, remaining / of)

"""The variance that data explain, ``c^T A^-1 c``, from solves that are judged by what they leave out of it.

With ``A = K + D``, D the noise, any w and its residual ``r = c - A w``,

    ``2 c^T w - w^T A w = c^T A^-1 c - r^T A^-1 r``.

What is left out is of second order and never negative: the squared error of w in the norm of A, of which conjugate
gradients know what every iteration takes off it (:mod:`sketchgp.solvers.energy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import NumericalError
from ..operators import LowRankPlusDiagonal
from ..operators.substitution import cholesky_solve
from ..report import SolveReport
from ..settings import memory_budget
from ..solvers import Cholesky, ConjugateGradients, System
from ..solvers.certificate import Certificate
from ..solvers.energy import Explaining
from ..solvers.full.cholesky import factor_bytes
from .calibrated import Calibrated
from .pathwise import PosteriorDeviations

_COLUMNS = 90  # rows of a system for each right-hand side, up to which a factorization is the cheaper


@dataclass
class Explained:
    """``weights`` ``(..., n, m)`` near ``A^-1 c``, and ``product`` A times them, float64.

    :ivar certain: of one system, ``(3, m)``: at least the errors of the weights in the norm of A, and what lies below
        and above ``c^T A^-1 c`` (:class:`sketchgp.solvers.certificate.Certificate`); None where it is not known.
    """

    weights: Tensor
    product: Tensor
    certain: Tensor | None = None

    def diagonal(self, c: Tensor) -> Tensor:
        """Explained variances ``(..., m)``, from below."""
        return (self.weights * (2 * c - self.product)).sum(dim=-2)

    def matrix(self, c: Tensor) -> Tensor:
        """Explained covariances ``(..., m, m)``, symmetric, and never more than the exact ones."""
        half = self.weights.mT @ (c - 0.5 * self.product)
        return half + half.mT


def solve(
    system: System,
    c: Tensor,
    prior: Tensor,
    solver: ConjugateGradients,
    preconditioner: LowRankPlusDiagonal | None = None,
    name: str = "none",
    below: bool = False,
    noise: Tensor | None = None,
    below_noise: bool = True,
    initial: Tensor | None = None,
) -> tuple[Explained, SolveReport]:
    """Solve ``A w = c`` to the solver's tolerance, and until no posterior variance ``prior - c^T A^-1 c`` is off by
    more than a hundredth of itself (a ten thousandth of the noise is always enough), as conjugate gradients estimate
    what they leave out; a solve that falls short warns.

    :param c: ``(..., n, m)``, float64; :param prior: ``(..., m)``.
    :param preconditioner: of the system; :param name: of it; :param below: whether it lies below A.
    :param noise: the diagonal ``(..., n)`` that is known to lie below A, 0 where none is; None for the system's.
    :param below_noise: and by no more than a hundredth of the least noise.
    :param initial: weights ``(..., n, m)`` to start from.
    """
    noise = (system.noise if noise is None else noise).to(torch.float64)
    goal = Explaining(prior, noise.amin(dim=-1, keepdim=True), below_noise)
    weights, product, report = solver.explain(system, c, preconditioner, goal, name=name, below=below, initial=initial)
    if report.error_bound is None or report.quadratic_bounds is None or weights.dim() > 2:
        return Explained(weights, product), report
    certain = torch.stack([report.error_bound, *report.quadratic_bounds]).to(c.device)
    return Explained(weights, product, certain), report


class Factors:
    """The :class:`Factor` of the latest system; copies and pickles are empty."""

    def __init__(self) -> None:
        self._latest: tuple[Any, Factor] = (None, Factor())

    def __reduce__(self) -> Any:
        return Factors, ()

    def of(self, key: Any) -> Factor:
        """That of the system with this key, new where the latest is of another."""
        known, factor = self._latest
        if key != known:
            factor = Factor()
            self._latest = key, factor
        return factor


class Factor:
    """The Cholesky factor of one system, kept for many right-hand sides, once they are so many that it is the cheaper.

    A factorization takes ``n^3 / 3`` operations; conjugate gradients ``2 n^2`` an iteration and column, faster ones.

    :ivar low_rank: what low-rank variances of the system are made of, :ivar deviations: and those by samples, where
        they were found; kept with it.
    :ivar checked: which of them were compared with exact ones, by ``"low_rank"`` and ``"samples"``.
    """

    def __init__(self) -> None:
        self.columns = 0  # that were solved for, or are about to be
        self.low_rank: Calibrated | None = None
        self.deviations: PosteriorDeviations | None = None
        self.checked: set[str] = set()
        self._root: Tensor | None = None
        self._failed = False

    @property
    def there(self) -> bool:
        """Whether it was factorized."""
        return self._root is not None

    def fits(self, system: System) -> bool:
        """Return whether a factorization exists, as far as is known, and fits the memory budget."""
        needed = factor_bytes(system.n, system.batch_shape.numel())
        return self.there or (not self._failed and needed <= memory_budget.value(system.noise.device))

    def pays(self, system: System, more: int) -> bool:
        """Whether to solve by the factor: it is there, or it fits and there are enough columns with ``more``."""
        return self.there or (system.n <= _COLUMNS * (self.columns + more) and self.fits(system))

    def solve(self, system: System, c: Tensor) -> Explained:
        """Of ``A w = c``, c ``(..., n, m)`` float64.

        :raises NumericalError: where A is not positive definite to float64; it does not pay then any more.
        """
        one = not system.batch_shape and c.dim() > 2  # system for a batch of columns
        together = c.movedim(-2, 0).reshape(c.shape[-2], -1) if one else c
        if self._root is None:
            try:
                weights, _, self._root = Cholesky().factorize(system, together)
            except NumericalError:
                self._failed = True
                raise
        else:
            weights = cholesky_solve(together, self._root)
        if one:
            weights = weights.reshape(c.shape[-2], *c.shape[:-2], c.shape[-1]).movedim(0, -2)
        certificate = Certificate(system, None)
        if weights.dim() > 2 or not certificate.known:
            return Explained(weights, c)
        return Explained(weights, c, certificate.of_factor(c, weights))

"""Bounds of a Gaussian log density that take no random number, with the gradient of the one that is maximised.

With ``A = K + D``, ``P = F F^T + D`` for F of pivots, ``F F^T <= K``, any w, ``r = y - A w`` and ``z = P^-1 r``,

    q <= y^T A^-1 y <= q + r^T z             with ``q = 2 y^T w - w^T A w``,
    log det P <= log det A <= log det P + sum_i log(1 + e_i / d_i)   with e the diagonal of ``K - F F^T``.

Reference: Artemev, Burt, van der Wilk, "Tighter bounds on the log marginal likelihood of Gaussian process regression
using conjugate gradients" (arXiv:2102.08314); for the last sum :func:`log_slack`.

What is differentiated is the upper ends, with pivots and w held:

    d(q + r^T z) = 2 (w + z)^T dy - w^T dA w - 2 z^T dA w - z^T dP z,

and that of the log determinant with respect to P is ``P^-1 - diag(1 / (d + e))``.  That w moves with the
hyperparameters would add ``2 r^T (1 - P^-1 A) dw``, which vanishes with r: w is solved for until ``r^T z`` is small.
"""

from __future__ import annotations

import dataclasses
import math
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from linear_operator.operators import DiagLinearOperator, InterpolatedLinearOperator, LinearOperator
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import SketchGPError
from ..operators import LowRankPlusDiagonal
from ..operators.access import Access, evaluated_accurately, terms
from ..operators.first_order import in_callers_context
from ..operators.low_rank_plus_diagonal import inverse_rows
from ..preconditioners import Preconditioner, PreconditionerCache, Selection
from ..solvers import ConjugateGradients, System
from ..solvers.certificate import Certificate
from ..solvers.energy import SampleGoal
from ..space import Factor, leading, square_norms
from .base import LogDensity, bilinear_derivative

_TRIES = 5  # solves for one w, each starting from the one before
_NEGLIGIBLE = 0.01  # share of the log determinant's gap that r^T P^-1 r may add where nothing is differentiated
_COLUMNS = 20.0  # times n^1/2: the most columns; F costs more than products with K beyond
_FASTEST = 0.01  # of what is left, after twice the columns


def log_slack(prior: Tensor, factor: Factor, noise: Tensor) -> Tensor:
    """``sum_i log(1 + e_i / d_i)`` for e the diagonal of ``K - F F^T`` and d that of the noise, ``(...)``.

    With ``P = F F^T + D``, ``F F^T <= K`` and ``E = K - F F^T``, ``log det (K + D) - log det P`` is at the least 0 and
    at most ``log det (I + D^-1/2 E D^-1/2)``, as ``P >= D``; that is at most this sum (Hadamard's inequality), which is
    below the ``n log(1 + tr(D^-1 E) / n)`` of Artemev, Burt, van der Wilk (arXiv:2102.08314) by that of Jensen.

    :param prior: the diagonal of K, ``(..., n)``; :param factor: F, ``(..., n, r)``; :param noise: d, ``(..., n)``.
    """
    left = (prior - square_norms(factor)).clamp(min=0)
    return (left / noise).log1p().sum(dim=-1)


@dataclass(frozen=True)
class Tightened(Preconditioner):
    """Another choice, whose automatic rank is doubled until bounds with it are tight.

    The rank is left as it is where the user named one.  Columns end at ``20 n^1/2`` and at the memory budget.

    :param base: the choice, with ``F F^T <= K``.
    :param slack: of :func:`log_slack` over ``2 n``, which is to be come to.
    :param hopeful: add columns even where their decay says that all there may be would not do.
    """

    base: Preconditioner = field(default_factory=Preconditioner)
    slack: float = 0.0
    hopeful: bool = False

    @property
    def pivoted(self) -> bool:
        return self.base.pivoted

    @property
    def below(self) -> bool:
        return self.base.below

    @property
    def name(self) -> str:
        return self.base.name

    def select_one(self, matrix: Access, noise: Tensor) -> Selection:
        selection = self.base.select_one(matrix, noise)
        prior, n = matrix.diagonal(), matrix.n
        most = min(self.base.rank_for(n, matrix.device), math.ceil(_COLUMNS * math.sqrt(n)))
        while self.base.rank is None:
            factor = selection.factor
            rank = max(1, factor.shape[-1])
            left, before = (
                float(log_slack(prior, part, noise)) / (2 * n) for part in (factor, leading(factor, rank // 2))
            )
            falls = max(_FASTEST, (left / before) ** 2) if before > 0 else 0.0  # by twice the columns, at the best
            doublings = math.log2(most / rank) if most > rank else 0.0
            hopeless = not self.hopeful and left * falls**doublings > self.slack
            if left <= self.slack or not doublings or hopeless:
                break
            selection = dataclasses.replace(self.base, rank=min(2 * rank, most)).select_one(matrix, noise)
        return selection


class TooWide(SketchGPError):
    """The log determinant alone has a wider gap than was allowed."""


@dataclass
class Bound(LogDensity):
    """Log densities as lower bounds, together with how far above them the upper bounds are.

    Pivots are chosen at the first density and held from then on.  Each w starts from that of the density before.

    :param choice: of the preconditioner, with pivots and ``F F^T <= K`` (:meth:`serves`).
    :param share: target of ``r^T P^-1 r`` as a share of the number of rows.  Where certain, it need not be less than a
        hundredth of the gap of the log determinant.
    :param limit: the largest gap of the log determinant, in nats, allowed with newly chosen pivots; None for any.
    :param certain: whether to count rounding as well; gradients are then not available.
    :ivar gap: nats between the two ends of the log densities since :meth:`begin`; None where there were none, or NaN
        where nothing is certain.
    :ivar rank: number of columns of F.
    """

    choice: Preconditioner
    share: float = 2e-6
    limit: float | None = None
    certain: bool = False
    gap: float | None = field(default=None, init=False)
    rank: int = field(default=0, init=False)
    cache: PreconditionerCache = field(init=False, repr=False)
    _ease: float = field(default=3.0, init=False)  # factor on the tolerance that is surely small enough
    _open: float = field(default=0.0, init=False)  # gap in nats of the latest log determinant
    _weights: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.cache = PreconditionerCache(self.choice)

    @staticmethod
    def serves(choice: Preconditioner | None) -> bool:
        """Return whether a preconditioner gives bounds that are differentiable with its pivots held."""
        return choice is not None and choice.pivoted and choice.below

    def state(self) -> dict[str, Tensor]:
        state = {"ease": torch.tensor(self._ease, dtype=torch.float64)}
        return state if self._weights is None else {**state, "weights": self._weights}

    def restore(self, state: dict[str, Tensor]) -> None:
        self._ease = float(state["ease"])
        weights = state.get("weights")
        if weights is not None and self._weights is not None:
            weights = weights.to(self._weights.device)
        self._weights = weights

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return upper bounds of ``r^T A^-1 r`` of each column and of ``log det A``, float64; see :class:`LogDensity`.

        :raises TooWide: where the gap of the first log determinant is above the limit, or would be, since solves take
            a preconditioner with neighbours.
        """
        noise = operator.noise
        if self.limit is not None and not self.rank:
            of_solves = operator.acceleration.preconditioner.resolved(Access(operator.kernel_matrix), noise)
            if not self.serves(of_solves):
                raise TooWide("Low-rank factors leave more of this matrix than a preconditioner with neighbours.")
        kernel = evaluated_accurately(operator.kernel_matrix)
        prior = Access(kernel).diagonal()
        preconditioner = self._preconditioner(kernel, noise, prior.detach())
        accurate = operator.rebuilt(kernel, DiagLinearOperator(noise.to(kernel.dtype)))
        args = accurate.representation()
        solver = operator.acceleration.column_gradients()
        return _InvQuadLogdet.apply(
            self, solver, operator.system(), accurate.representation_tree(), preconditioner, len(args),
            columns.to(torch.float64), prior, *args, *preconditioner.tensors,
        )  # fmt: skip

    def _preconditioner(self, kernel: Any, noise: Tensor, prior: Tensor) -> LowRankPlusDiagonal:
        """Return P, differentiable where autograd is on; ``prior`` is the diagonal of K."""
        first = self.rank == 0
        built, gap = self._built(kernel, noise, prior)
        if first and self.limit is not None and not gap <= self.limit:
            self.gap = gap
            raise TooWide(f"The log determinant leaves {gap:.3g} nats open, more than {self.limit:.3g}.")
        return built

    def _built(self, kernel: Any, noise: Tensor, prior: Tensor) -> tuple[LowRankPlusDiagonal, float]:
        """Return P and the gap of its log determinant, in nats."""
        with self.cache.holding():  # the preconditioner's own rule never redraws these pivots
            built = self.cache.get(kernel, noise, torch.is_grad_enabled())
        self.rank = max(1, built.rank)
        with torch.no_grad():
            self._open = float(log_slack(prior, built.factor, built.diagonal_part).sum()) / 2
        return built, self._open

    def solve(
        self, solver: ConjugateGradients, system: System, built: LowRankPlusDiagonal, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return w, ``r = b - A w`` and ``z = P^-1 r`` with a small ``r^T z``, for b ``(..., n, t)``; no gradients."""
        batch = torch.broadcast_shapes(b.shape[:-2], system.batch_shape)
        b = b.expand(*batch, *b.shape[-2:])
        target = self.share * system.n
        if self.certain:
            target = max(target, _NEGLIGIBLE * self._open / b[..., 0, :].numel())
        norm = float(b.norm(dim=-2).max())
        surely = math.sqrt(target * float(system.noise.min())) / norm if norm > 0 else 1.0
        value = self._weights
        if value is not None and (value.shape != b.shape or value.device != b.device):
            value = None
        for _ in range(_TRIES):
            tol = min(0.5, max(1e-14, self._ease * surely))
            goal = SampleGoal(b.new_ones(()), b.new_zeros(1), share=math.inf)  # the residual alone says when to end
            value, product, report = dataclasses.replace(solver, tol=tol).explain(
                system, b, goal, preconditioner=built, name=self.choice.name, below=True, initial=value
            )
            r = b - product
            z = built.apply_inverse(r)
            excess = float((r * z).sum(dim=-2).max()) / target
            if excess > 1:
                self._ease *= 0.5 / math.sqrt(excess)
            elif excess < 0.05:
                self._ease *= 2
            if not excess > 1 or not report.converged:
                break
        assert value is not None
        self._weights = value
        return value, r, z


class _InvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        bound: Bound,
        solver: ConjugateGradients,
        system: System,
        tree: Any,
        built: LowRankPlusDiagonal,
        count: int,
        columns: Tensor,
        prior: Tensor,
        *args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        built = built.detached(None)
        w, r, z = bound.solve(solver, system, built, columns)
        each = (w * (columns + r)).sum(dim=-2)
        above = (r * z).sum(dim=-2).clamp(min=0)
        determinant = built.log_determinant()
        excess = log_slack(prior, built.factor, built.diagonal_part)
        gap = 0.5 * float(above.sum() + excess.sum())
        if bound.certain:
            operator = tree(*args[:count])
            certificate = Certificate(operator.system(), built, below=True)
            if certificate.known and _semidefinite(operator.kernel_matrix):
                _, low, high = certificate.bounds(columns.expand_as(w), w, r)
                rounded = -system.n * certificate.slack.squeeze(-1).log()
                each, above, excess = high, torch.zeros_like(high), excess + rounded
                gap = 0.5 * float((high - low).sum() + (excess + rounded).sum())
            else:
                gap = math.nan
        bound.gap = gap + (bound.gap or 0.0)
        ctx.tree, ctx.built, ctx.count, ctx.w, ctx.z = tree, built, count, w, z
        ctx.columns_shape, ctx.caller = columns.shape, copy_context()
        ctx.save_for_backward(prior, *args)
        return each + above, determinant + excess

    @staticmethod
    @once_differentiable
    @in_callers_context
    def backward(ctx: Any, of_each: Tensor, of_determinant: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        prior, *args = ctx.saved_tensors
        of_matrix: tuple[Tensor | None, ...] = (None,) * ctx.count
        both, z = ctx.w + ctx.z, ctx.z
        weight = of_each.unsqueeze(-2)
        if any(ctx.needs_input_grad[8 : 8 + ctx.count]):  # (w + z) (w + z)^T - z z^T = w w^T + z w^T + w z^T
            operator = ctx.tree(*args[: ctx.count])
            left, right = torch.cat([both, z], dim=-1), torch.cat([-weight * both, weight * z], dim=-1)
            of_matrix = bilinear_derivative(operator, left, right)
        of_prior, of_built = _of_factor(ctx.built, prior, args[ctx.count :], z, of_each, of_determinant)
        of_columns = (2 * weight * both).sum_to_size(ctx.columns_shape)
        return (None, None, None, None, None, None, of_columns, of_prior, *of_matrix, *of_built)


def _semidefinite(operator: LinearOperator) -> bool:
    """Return whether a matrix is positive semidefinite up to rounding; interpolations of a grid need not be."""
    return not any(isinstance(part, InterpolatedLinearOperator) for _, part in terms(operator))


def _of_factor(
    built: LowRankPlusDiagonal, prior: Tensor, args: list[Tensor], z: Tensor, of_each: Tensor, of_determinant: Tensor
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the gradients for the diagonal of K and for what P is made of.

    The gradient for P is ``G = g (P^-1 - diag(1 / (d + e))) - sum_t h_t z_t z_t^T``, where g is that of the log
    determinant and h_t those of the quadratic forms.  ``H = G F`` is computed by rows.
    """
    batch, root = built.batch_shape, built.capacitance_root()
    diagonal = built.diagonal_part.expand(*batch, -1)
    left = (prior - square_norms(built.factor)).clamp(min=0)
    of_prior = of_determinant.unsqueeze(-1) / (diagonal + left)
    weighed = z * of_each.unsqueeze(-2)
    projected = built.factor.mT @ z
    of_inverse = 1 / diagonal  # right as it is for rank 0

    def rows_of(rows: slice) -> Tensor:
        part = built.rows(rows)
        part = part.expand(*batch, *part.shape[-2:])
        half, of_inverse[..., rows] = inverse_rows(part, diagonal[..., rows], root)
        half.mul_(of_determinant[..., None, None]).addcmul_(part, of_prior[..., rows, None], value=-1)
        return half.sub_(weighed[..., rows, :] @ projected.mT)

    of_factor = built.pull_back(tuple(args), rows_of)
    of_inverse = built.completed(of_inverse)
    of_diagonal = of_determinant.unsqueeze(-1) * of_inverse - of_prior * left / diagonal - (weighed * z).sum(dim=-1)
    of_diagonal = of_diagonal.sum_to_size(built.diagonal_part.shape)
    return of_prior.sum_to_size(prior.shape), (*of_factor, of_diagonal)

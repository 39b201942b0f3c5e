"""Bounds of a Gaussian's log density that take no random number, with the gradient of the one that is maximised.

With ``A = K + D``, ``P = F F^T + D`` for F of pivots, ``F F^T <= K``, any w, ``r = y - A w`` and ``z = P^-1 r``,

    q <= y^T A^-1 y <= q + r^T z             with ``q = 2 y^T w - w^T A w``,
    log det P <= log det A <= log det P + sum_i log(1 + e_i / d_i)   with e the diagonal of ``K - F F^T``.

Reference: Artemev, Burt, van der Wilk, "Tighter bounds on the log marginal likelihood of Gaussian process regression
using conjugate gradients" (arXiv:2102.08314); for the last sum :func:`sketchgp.preconditioners.tightened.log_slack`.

What is differentiated is the upper ends, with pivots and w held:

    d(q + r^T z) = 2 (w + z)^T dy - w^T dA w - 2 z^T dA w - z^T dP z,

and that of the log determinant with respect to P is ``P^-1 - diag(1 / (d + e))``.  That w moves with the
hyperparameters would add ``2 r^T (1 - P^-1 A) dw``, which vanishes with r: w is solved for until ``r^T z`` is small.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from linear_operator.operators import DiagLinearOperator, InterpolatedLinearOperator, LinearOperator
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import SketchGPError
from ...operators import LowRankPlusDiagonal
from ...operators.access import Access, evaluated_accurately, terms
from ...operators.first_order import in_callers_context
from ...operators.low_rank_plus_diagonal import inverse_rows
from ...preconditioners import Preconditioner, PreconditionerCache
from ...preconditioners.tightened import log_slack
from ...solvers import ConjugateGradients, System
from ...solvers.certificate import Certificate
from ...solvers.energy import Energy
from ...space import square_norms
from .acceleration import Acceleration
from .mean_solve import held

_TRIES = 5  # solves for one w, each from the one before
_HARDLY = 0.01  # of what the log determinant leaves open, that r^T P^-1 r may add where nothing is differentiated
_WIDENS = 1.5  # of what was left open with the latest pivots, before they are chosen anew


class TooWide(SketchGPError):
    """The log determinant alone leaves more open than was allowed."""


@dataclass
class Bound:
    """What bounds of log densities inside :func:`bounded` are made with, and what they left open.

    Pivots are chosen at the first density and held from then on, unless they are to be redrawn; w starts from that of
    the density before.

    :param choice: of the preconditioner, with pivots and ``F F^T <= K`` (:meth:`serves`).
    :param share: of the number of rows, that ``r^T P^-1 r`` is to come to; where certain, it need not be less than a
        hundredth of what the log determinant leaves open.
    :param limit: the most nats that the log determinant may leave open with pivots that were just chosen; None for any.
    :param redrawn: the nats beyond which pivots are chosen anew at once, where they are not to be held.
    :param certain: count rounding as well; without gradients.
    :ivar gap: nats between the two ends of the log densities since :meth:`begin`; None where there were none, or where
        nothing is certain.
    :ivar rank: columns of F.
    """

    choice: Preconditioner
    share: float = 2e-6
    limit: float | None = None
    redrawn: float | None = None
    certain: bool = False
    gap: float | None = field(default=None, init=False)
    rank: int = field(default=0, init=False)
    _ease: float = field(default=3.0, init=False)  # of the tolerance, over the one that is surely enough
    _open: float = field(default=0.0, init=False)  # nats, by the latest log determinant
    _weights: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.cache = PreconditionerCache(self.choice)

    @staticmethod
    def serves(choice: Preconditioner | None) -> bool:
        """Whether a choice gives bounds, differentiable with pivots held."""
        return choice is not None and choice.pivoted and choice.below

    def begin(self) -> None:
        """Before an evaluation."""
        self.gap = None

    def state(self) -> dict[str, Tensor]:
        """What the next evaluation takes from those before, pivots excepted."""
        numbers = [self._ease, math.nan if self.redrawn is None else self.redrawn]
        found = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
        return found if self._weights is None else {**found, "weights": self._weights}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` gave."""
        self._ease, redrawn = state["numbers"].tolist()
        self.redrawn = None if math.isnan(redrawn) else redrawn
        weights = state.get("weights")
        if weights is not None and self._weights is not None:
            weights = weights.to(self._weights.device)
        self._weights = weights

    def built(self, kernel: Any, noise: Tensor, prior: Tensor) -> LowRankPlusDiagonal:
        """P, differentiable where autograd is on.

        :param prior: the diagonal of K.
        :raises TooWide: where pivots that were just chosen leave more open than the limit.
        """
        first = self.rank == 0
        built, left = self._built(kernel, noise, prior)
        if not first and self.redrawn is not None and not left <= self.redrawn:
            self.cache.clear()
            first, (built, left) = True, self._built(kernel, noise, prior)
            self.redrawn = max(self.redrawn, _WIDENS * left)
        if first and self.limit is not None and not left <= self.limit:
            self.gap = left
            raise TooWide(f"The log determinant leaves {left:.3g} nats open, more than {self.limit:.3g}.")
        return built

    def _built(self, kernel: Any, noise: Tensor, prior: Tensor) -> tuple[LowRankPlusDiagonal, float]:
        """With the nats that its log determinant leaves open."""
        built = self.cache.get(kernel, noise, torch.is_grad_enabled())
        self.rank = max(1, built.rank)
        with torch.no_grad():
            self._open = float(log_slack(prior, built.factor, built.diagonal_part).sum()) / 2
        return built, self._open

    def solved(self, acceleration: Acceleration, system: System, built: LowRankPlusDiagonal, b: Tensor) -> _Solved:
        """w with ``r^T P^-1 r`` small, for b ``(..., n, t)``; no gradients."""
        batch = torch.broadcast_shapes(b.shape[:-2], system.batch_shape)
        b = b.expand(*batch, *b.shape[-2:])
        aimed = self.share * system.n
        if self.certain:
            aimed = max(aimed, _HARDLY * self._open / b[..., 0, :].numel())
        norm = float(b.norm(dim=-2).max())
        surely = math.sqrt(aimed * float(system.noise.min())) / norm if norm > 0 else 1.0
        value = self._weights
        if value is not None and (value.shape != b.shape or value.device != b.device):
            value = None
        for _ in range(_TRIES):
            solver = self._solver(acceleration, surely)
            goal = Energy(b.new_ones(()), b.new_zeros(1), share=math.inf)  # the residual alone says when to end
            value, product, report = solver.explain(
                system, b, built, goal, name=self.choice.name, below=True, initial=value
            )
            r = b - product
            z = built.apply_inverse(r)
            over = float((r * z).sum(dim=-2).max()) / aimed
            if over > 1:
                self._ease *= 0.5 / math.sqrt(over)
            elif over < 0.05:
                self._ease *= 2
            if not over > 1 or not report.converged:
                break
        assert value is not None
        self._weights = value
        return _Solved(value, r, z)

    def _solver(self, acceleration: Acceleration, surely: float) -> ConjugateGradients:
        tol = min(0.5, max(1e-14, self._ease * surely))
        return dataclasses.replace(acceleration.conjugate_gradients(), tol=tol, max_seconds=None, checkpoint=None)


@dataclass
class _Solved:
    """``w``, ``r = y - A w`` and ``z = P^-1 r``, ``(..., n, t)`` each."""

    w: Tensor
    r: Tensor
    z: Tensor


_bound: ContextVar[Bound | None] = ContextVar("sketchgp_bound", default=None)


@contextmanager
def bounded(bound: Bound) -> Iterator[None]:
    """Log densities of accelerated models inside are lower bounds of them, whatever n is; they say in ``bound`` how far
    the upper ones are."""
    with held(_bound, bound), bound.cache.holding():  # redrawn or not: never by the rule of preconditioners
        yield


def bound_in_force() -> Bound | None:
    """What log densities are to be bounded with, if they are."""
    return _bound.get()


def bound_inv_quad_logdet(bound: Bound, operator: Any, columns: Tensor, reduce: bool) -> tuple[Tensor, Tensor]:
    """``r^T A^-1 r`` and ``log det A`` from above, float64, differentiable once in r and A.

    :param operator: A = K + noise, an accelerated operator ``(..., n, n)``, evaluated.
    :param columns: r, ``(..., n, t)`` or ``(n,)``.
    :param reduce: whether the quadratic forms of all columns are added up.
    :raises TooWide: where the first log determinant leaves more open than the limit.
    """
    columns = columns.unsqueeze(-1) if columns.dim() == 1 else columns
    noise = operator._noise_vector()
    kernel = evaluated_accurately(operator._linear_op)
    prior = Access(kernel).diagonal()
    built = bound.built(kernel, noise, prior.detach())
    accurate = operator._rebuilt(kernel, DiagLinearOperator(noise.to(kernel.dtype)))
    system = System(operator._linear_op, noise)  # with products in the model's dtype
    args = accurate.representation()
    each, determinant = _InvQuadLogdet.apply(
        bound, operator.acceleration, system, accurate.representation_tree(), built, len(args),
        columns.to(torch.float64), prior, *args, *built.representation(),
    )  # fmt: skip
    return each.sum(dim=-1) if reduce else each, determinant


class _InvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        bound: Bound,
        acceleration: Acceleration,
        system: System,
        tree: Any,
        built: LowRankPlusDiagonal,
        count: int,
        columns: Tensor,
        prior: Tensor,
        *args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        built = built.detached(None)
        found = bound.solved(acceleration, system, built, columns)
        each = (found.w * (columns + found.r)).sum(dim=-2)
        above = (found.r * found.z).sum(dim=-2).clamp(min=0)
        determinant = built.log_determinant()
        excess = log_slack(prior, built.factor, built.diagonal_part)
        gap = 0.5 * float(above.sum() + excess.sum())
        if bound.certain:
            operator = tree(*args[:count])
            certificate = Certificate(System(operator._linear_op, operator._noise_vector()), built, below=True)
            if certificate.known and _of_kernels(operator._linear_op):
                _, low, high = certificate.bounds(columns.expand_as(found.w), found.w, found.r)
                rounded = -system.n * certificate.slack.squeeze(-1).log()
                each, above, excess = high, torch.zeros_like(high), excess + rounded
                gap = 0.5 * float((high - low).sum() + (excess + rounded).sum())
            else:
                gap = math.nan
        bound.gap = gap + (bound.gap or 0.0)
        ctx.tree, ctx.built, ctx.count, ctx.found = tree, built, count, found
        ctx.columns_shape, ctx.caller = columns.shape, copy_context()
        ctx.save_for_backward(prior, *args)
        return each + above, determinant + excess

    @staticmethod
    @once_differentiable
    @in_callers_context
    def backward(ctx: Any, of_each: Tensor, of_determinant: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        prior, *args = ctx.saved_tensors
        of_matrix: tuple[Tensor | None, ...] = (None,) * ctx.count
        both, z = ctx.found.w + ctx.found.z, ctx.found.z
        weight = of_each.unsqueeze(-2)
        if any(ctx.needs_input_grad[8 : 8 + ctx.count]):  # (w + z) (w + z)^T - z z^T = w w^T + z w^T + w z^T
            operator = ctx.tree(*args[: ctx.count])
            left, right = torch.cat([both, z], dim=-1), torch.cat([-weight * both, weight * z], dim=-1)
            of_matrix = operator._bilinear_derivative(left.to(operator.dtype), right.to(operator.dtype))
        of_prior, of_built = _of_factor(ctx.built, prior, args[ctx.count :], z, of_each, of_determinant)
        of_columns = (2 * weight * both).sum_to_size(ctx.columns_shape)
        return (None, None, None, None, None, None, of_columns, of_prior, *of_matrix, *of_built)


def _of_kernels(operator: LinearOperator) -> bool:
    """Whether a matrix is positive semidefinite but for rounding; interpolations of a grid need not be."""
    return not any(isinstance(part, InterpolatedLinearOperator) for _, part in terms(operator))


def _of_factor(
    built: LowRankPlusDiagonal, prior: Tensor, args: list[Tensor], z: Tensor, of_each: Tensor, of_determinant: Tensor
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Gradients for the diagonal of K and for what P is made of.

    That for P is ``G = g (P^-1 - diag(1 / (d + e))) - sum_t h_t z_t z_t^T``, g for the log determinant, h for each
    quadratic form; so ``H = G F`` is known by rows.
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

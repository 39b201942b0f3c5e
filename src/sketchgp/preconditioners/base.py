"""Base class of preconditioners, ``P = F F^T + diag(d)`` but where :meth:`Preconditioner.assemble` says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import count, settle
from ..operators import LowRankPlusDiagonal, MovingPlusDiagonal
from ..operators.access import Access
from ..operators.moving_factors import FactorOfColumns, MovingFactor
from ..settings import memory_budget
from ..space import Factor, Space, held_rows, space_of, square_norms, whole
from .low_rank import LowRank, nystrom_factor, pivoted_factor
from .rank import Costs, RankByCost

DRIFT = 1.25  # pivots are chosen anew when the share of the trace that they leave has grown by this factor


@dataclass
class Selection:
    """Pivots or test matrix of F, chosen for one K and held fixed while hyperparameters move.

    ``factor`` (..., n, r) is F of that K; ``core_root`` (r, r) the Cholesky factor L of the block of the pivots with
    ``F = K(:, S) L^-T``, where it is known; ``shift``, a number or (..., 1), is added to the noise on P's diagonal;
    ``scales`` (..., n) multiply the rows of a dense test matrix.  ``left`` (...) is the share of the trace of
    ``D^-1 K`` that F left, for the noise D at that time; ``excess`` (...) its amount, ``sum(residual / noise)``.
    ``test`` (n, r) is the test matrix, where it is kept; ``columns`` is r.  ``neighbors`` are those of
    :class:`.FullScale`, the order and N of each matrix of the batch.
    """

    factor: Factor
    pivots: Tensor | None
    shift: float | Tensor = 0.0
    coefficients: Tensor | None = None
    core_root: Tensor | None = None
    scales: Tensor | None = None
    left: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    excess: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    test: Factor | None = None
    neighbors: Any = None
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = self.factor.shape[-1]

    def fits(self, matrix: Access) -> bool:
        """Return whether F is of the shape and on the device of a matrix."""
        return self.factor.shape[:-1] == (*matrix.batch_shape, matrix.n) and self.factor.device == matrix.device

    def drop_factor(self) -> None:
        """Leave no columns in ``factor``, after K has moved: the memory is wanted."""
        self.factor = torch.empty(self.factor.shape[-2], 0, dtype=self.factor.dtype, device=self.factor.device)
        self.core_root = None

    @property
    def ready(self) -> bool:
        """True where :meth:`Preconditioner.moving` can keep this F for the same K."""
        return self.core_root is not None or self.coefficients is not None or self.pivots is None


@dataclass(frozen=True)
class Preconditioner:
    """Base class: a frozen choice of method; :meth:`build` makes the preconditioner of one matrix.

    A new method is a subclass with :meth:`approximate`, which may ask :meth:`rank_for` for the most columns to take and
    :meth:`stopping_rule` when fewer are enough.  A method without pivots also overrides :meth:`factor`,
    one whose P is no ``F F^T + D`` also :meth:`select`, :meth:`serves` and :meth:`assemble`: see :class:`.FullScale`.

    :param rank: columns of F, cut to n, with a note in the report; None chooses it by cost
        (:mod:`sketchgp.preconditioners.rank`): columns are added while the iterations that they are predicted to save,
        from what is left of the trace over the noise and how fast it falls, cost more than the columns do.  It ends
        at ``sum(residual / noise) <= 1`` (condition number at most 2), at n / 2, or where the memory budget is full,
        and is at least 10 unless next to nothing is left.  Nothing is timed: the same problem gets the same rank.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        settle(self, count, "rank", optional=True)

    @property
    def pivoted(self) -> bool:
        """True where F is ``K(:, S) K(S, S)^(-1/2)`` for the pivots S."""
        return False

    @property
    def lean(self) -> bool:
        """True where :meth:`moving` replaces autograd through :meth:`factor` for one kernel matrix.

        The gradients are the same, with a few arrays of n x r less.
        """
        return self.pivoted

    @property
    def below(self) -> bool:
        """True where ``P <= K + noise``, as it is for ``F F^T + D`` of every Nystrom approximation, so of pivots.

        P then bounds errors (:attr:`sketchgp.SolveReport.error_bound`).  It is trusted: a method that says so of a
        larger P makes these bounds wrong.
        """
        return self.pivoted

    @property
    def name(self) -> str:
        """Name of the method in reports."""
        return type(self).__name__

    def validate(self, n: int) -> None:
        """Refuse what cannot be built for n points."""

    def note(self, n: int) -> str:
        """Return the remark of a report on a rank that exceeds the n points; ``""`` where it does not."""
        more = self.rank is not None and self.rank > n
        return f"rank {self.rank} was asked for; {n} points have {n}" if more else ""

    def rank_for(self, n: int, device: torch.device) -> int:
        """Return the rank asked for, or the limit of an automatic one: what n and the memory budget allow."""
        if self.rank is not None:
            return min(self.rank, n)
        stored = memory_budget.value(device) // (16 * self.rows_stored(n))  # two float64 arrays of n x rank
        return max(1, min(n, stored, self.most_columns(n)))

    def rows_stored(self, n: int) -> int:
        """Return the largest number of rows of F that any rank holds."""
        return Space.of(n).most_rows

    def most_columns(self, n: int) -> int:
        """Return the limit of an automatic rank, whatever the memory."""
        return n

    def stopping_rule(self, matrix: Access) -> RankByCost | None:
        """Return the rule by which an automatic rank ends (:class:`.RankByCost`); None where a rank was asked for."""
        return RankByCost(Costs(matrix)) if self.rank is None else None

    def resolved(self, matrix: Access, noise: Tensor) -> Preconditioner:
        """Return the choice for one matrix and its noise; another one where it is automatic."""
        return self

    def select(self, matrix: Access, noise: Tensor) -> Selection:
        """Choose pivots or a test matrix for each matrix of the batch, by its own noise; no gradients.

        :param matrix: ``(..., n, n)``; :param noise: ``(..., n)`` variances.
        """
        noise = noise_of_each(matrix, noise)
        parts = [self.select_one(one, noise[index]) for index, one in matrix.elements()]
        selection = parts[0] if not matrix.batch_shape else _stack(parts, matrix)
        selection.left, selection.excess = unexplained(matrix, selection.factor, noise)
        return selection

    def select_one(self, matrix: Access, noise: Tensor) -> Selection:
        """Choose pivots or a test matrix for one matrix; arguments as in :meth:`approximate`."""
        low_rank = self.approximate(matrix, noise)
        root = None
        if low_rank.sequential and low_rank.pivots is not None:
            root = space_of(low_rank.factor).rows(held_rows(low_rank.factor), low_rank.pivots).tril()
        return Selection(low_rank.factor, low_rank.pivots, core_root=root)

    def approximate(self, matrix: Access, noise: Tensor) -> LowRank:
        """Return ``K ~ F F^T`` for one matrix.

        :param matrix: ``(n, n)``; :param noise: ``(n,)`` variances, float64 and positive.
        """
        raise NotImplementedError(f"{self.name} expects a method approximate(matrix, noise) that returns a LowRank.")

    def serves(self, selection: Selection, matrix: Access, factor: Factor, noise: Tensor) -> bool:
        """Return whether a selection for an earlier K or noise is good enough for the present ones.

        :param factor: F of the present K with this selection, ``(..., n, r)``.
        """
        left, excess = unexplained(matrix, factor, noise_of_each(matrix, noise))
        if bool((left > DRIFT * selection.left + max(1e-12, matrix.resolution)).any()):
            return False
        full = self.rank is not None or factor.shape[-1] >= self.rank_for(matrix.n, matrix.device)
        # an automatic rank may have been for more noise, or for a smaller K
        return full or not bool((excess > 2 * selection.excess.clamp(min=1)).any())

    def factor(self, matrix: Access, selection: Selection) -> Tensor:
        """Return F for the present K and an earlier selection, differentiable in K: ``(..., n, r)``.

        :raises NotImplementedError: for a selection without pivots; a method that makes such overrides this one.
        """
        if selection.pivots is None:
            raise NotImplementedError(
                f"{self.name}: training expects pivots from approximate, or a method factor(matrix, selection)."
            )
        pivots = selection.pivots
        return nystrom_factor(matrix.columns(pivots), matrix.block(pivots, pivots), matrix.resolution)

    def moving(self, matrix: Access, selection: Selection) -> MovingFactor:
        """Return F for the present K and an earlier selection, without gradients, and the way back from it to K.

        :param selection: its ``factor`` is taken where it is that of this K.
        """
        assert selection.pivots is not None
        if selection.core_root is None:  # as it is where K has moved, too
            return pivoted_factor(matrix, selection.pivots)
        return FactorOfColumns(selection.factor, selection.core_root, selection.pivots)

    def build(self, operator: Any, noise: Tensor) -> LowRankPlusDiagonal:
        """Return the preconditioner of ``operator + diag(noise)``, in float64, without gradients.

        :param operator: a symmetric LinearOperator ``(..., n, n)``.
        :param noise: ``(..., n)`` variances.
        """
        with torch.no_grad():
            access = Access(operator)
            selection = self.select(access, noise)
            diagonal = noise.to(torch.float64) + selection.shift
            return self.assemble(access, diagonal, selection, selection.factor, None, live=False)[0]

    def assemble(
        self,
        matrix: Access,
        diagonal: Tensor,
        selection: Selection,
        factor: Factor,
        moving: MovingFactor | None,
        live: bool,
    ) -> tuple[LowRankPlusDiagonal, LowRankPlusDiagonal]:
        """Return P without gradients, and as it is used: differentiable where it is ``live``.

        :param diagonal: ``(..., n)`` float64; :param factor: F of the selection and the present K, ``(..., n, r)``.
        :param moving: the way back from F to K, where that gives its gradient.
        """
        kept = LowRankPlusDiagonal(factor.detach(), diagonal.detach())
        if moving is not None:
            built: LowRankPlusDiagonal = MovingPlusDiagonal(matrix.operator, diagonal, moving, matrix.source.dtype)
        elif live:
            built = LowRankPlusDiagonal(factor, diagonal, matrix.source.dtype)
        else:
            return kept, kept.detached(matrix.source.dtype)
        built.known_root = kept.capacitance_root()
        return kept, built


@torch.no_grad()
def noise_of_each(matrix: Access, noise: Tensor) -> Tensor:
    """Return the noise ``(..., n)`` that each matrix of the batch is approximated for, in float64, without gradients.

    A matrix that several systems share gets the least noise that each point has in any of them: the rest of the trace
    over the noise is then an upper bound for all of them.  The preconditioner refuses noise that is not positive.
    """
    noise = noise.detach().to(torch.float64)
    batch = matrix.batch_shape
    extra = noise.dim() - 1 - len(batch)
    if extra > 0:
        noise = noise.reshape(-1, *noise.shape[extra:]).amin(dim=0)
    for dim in range(1, noise.dim()):
        if batch[-dim] == 1 and noise.shape[-dim - 1] > 1:
            noise = noise.amin(dim=-dim - 1, keepdim=True)
    noise = torch.where(noise > 0, noise, torch.finfo(torch.float64).tiny)
    return noise.expand(*batch, noise.shape[-1])


@torch.no_grad()
def unexplained(matrix: Access, factor: Factor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share and the amount of the trace of ``D^-1 K`` that F leaves, one number a matrix.

    They are negative where ``F F^T`` exceeds K, as that of :class:`NystromEigenPro` may.
    """
    diagonal = matrix.diagonal()
    residual = diagonal - square_norms(factor)
    total, excess = (diagonal / noise).sum(-1), (residual / noise).sum(-1)
    return excess / torch.where(total > 0, total, 1), excess


def _stack(parts: list[Selection], matrix: Access) -> Selection:
    """Join the selections of a batch.  The shorter ones get further pivots, and columns of zeros in F."""
    rank, n = max(part.columns for part in parts), matrix.n

    def stacked(values: list[Tensor | None], columns: bool = True) -> Any:
        """Return them as a batch, with columns of zeros up to the same number; None where there are none."""
        found = [value for value in values if value is not None]
        found = [torch.nn.functional.pad(value, (0, rank - value.shape[-1])) for value in found] if columns else found
        return torch.stack(found).reshape(*matrix.batch_shape, *found[0].shape) if found else None

    shift = torch.tensor([[float(part.shift)] for part in parts], dtype=torch.float64, device=matrix.device)
    coefficients = [part.coefficients for part in parts]
    pivots = [p.pivots if p.pivots is None or p.coefficients is not None else _more(p.pivots, rank, n) for p in parts]
    return Selection(
        stacked([whole(part.factor) for part in parts]),
        stacked(pivots, columns=False),
        shift=stacked([*shift], columns=False),
        coefficients=stacked(coefficients),
        scales=stacked([part.scales for part in parts], columns=False),
    )


def _more(pivots: Tensor, rank: int, n: int) -> Tensor:
    """Return as many pivots as the rank: the first of the other rows beside these."""
    free = torch.ones(n, dtype=torch.bool, device=pivots.device)
    free[pivots] = False
    return torch.cat([pivots, free.nonzero().squeeze(-1)])[:rank]

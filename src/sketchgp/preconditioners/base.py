"""From a choice of method and rank to a preconditioner ``P = F F^T + diag(d)``."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import count, settle
from ..errors import InputError
from ..lowrank import LowRank, nystrom_factor
from ..operators import LowRankPlusDiagonal
from ..operators.access import Access
from ..settings import memory_budget


@dataclass
class Selection:
    """What a method decided about K, held fixed while hyperparameters move: the pivots or test matrix behind F.

    ``factor`` (..., n, r) is F as it was at the decision; ``relative_trace`` what it left of the trace of K;
    ``core_root`` (r, r) the Cholesky factor L of the block of the pivots with ``F = K(:, S) L^-T``, where it is known.
    """

    factor: Tensor
    pivots: Tensor | None
    relative_trace: float
    shift: float | Tensor = 0.0
    coefficients: Tensor | None = None
    core_root: Tensor | None = None


@dataclass(frozen=True)
class Preconditioner:
    """Base class: a frozen choice of method; :meth:`build` makes the preconditioner of one matrix.

    :param rank: columns of F; None chooses it from what is left of the trace, the noise and the memory budget:
        columns are added until ``sum(residual / noise) <= 1`` (condition number at most 2), but no more than
        ``10 sqrt(n)`` (the default of arXiv:2304.12465, section 2.1) and what the budget holds.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        settle(self, count, "rank", optional=True)

    @property
    def pivoted(self) -> bool:
        """Whether F is ``K(:, S) K(S, S)^(-1/2)`` for the pivots S."""
        return False

    @property
    def name(self) -> str:
        """The method's name, as reports print it."""
        return type(self).__name__

    def validate(self, n: int) -> None:
        """Refuse what cannot be built for n points.

        :raises InputError: if the rank exceeds n.
        """
        if self.rank is not None and self.rank > n:
            raise InputError(f"{self.name}(rank={self.rank}) exceeds the {n} training points; choose a rank up to n.")

    def rank_for(self, n: int, device: torch.device) -> int:
        """The rank asked for, or the bound of the automatic one."""
        if self.rank is not None:
            return min(self.rank, n)
        stored = memory_budget.value(device) // (16 * n)  # two float64 arrays of n x rank
        return max(1, min(n, math.ceil(10 * math.sqrt(n)), stored))

    def select(self, matrix: Access, noise: Tensor) -> Selection:
        """Decide pivots (or a test matrix) for each matrix of the batch; no gradients.

        :param matrix: ``(..., n, n)``; :param noise: ``(..., n)`` variances.
        """
        noise = noise.reshape(-1, noise.shape[-1]).mean(dim=0)
        indices = list(itertools.product(*(range(size) for size in matrix.batch_shape)))
        parts = [self._select(matrix.element(i) if i else matrix, noise) for i in indices]
        return parts[0] if not matrix.batch_shape else _stack(parts, matrix)

    def _select(self, matrix: Access, noise: Tensor) -> Selection:
        raise NotImplementedError

    def factor(self, matrix: Access, selection: Selection) -> Tensor:
        """F for the present K and the selection made before, differentiable in K: ``(..., n, r)``."""
        assert selection.pivots is not None
        pivots = selection.pivots
        return nystrom_factor(matrix.columns(pivots), matrix.block(pivots, pivots), matrix.resolution)

    def build(self, operator: Any, noise: Tensor) -> LowRankPlusDiagonal:
        """The preconditioner of ``operator + diag(noise)``, in float64, without gradients.

        :param operator: a symmetric LinearOperator ``(..., n, n)``.
        :param noise: ``(..., n)`` variances.
        """
        with torch.no_grad():
            selection = self.select(Access(operator), noise)
            return LowRankPlusDiagonal(selection.factor, noise.to(torch.float64) + selection.shift)


def _selection(low_rank: LowRank, matrix: Access, sequential: bool = False) -> Selection:
    """:param sequential: whether F is a partial Cholesky factor: at its pivots it then holds that of their block."""
    total = float(matrix.diagonal().sum())
    root = low_rank.factor[low_rank.pivots].tril() if sequential and low_rank.pivots is not None else None
    relative = low_rank.trace / total if total > 0 else 0.0
    return Selection(low_rank.factor, low_rank.pivots, relative, core_root=root)


def _stack(parts: list[Selection], matrix: Access) -> Selection:
    """Selections of a batch: of one rank, so the shorter ones get further pivots (and zero columns in F)."""
    rank = max(part.factor.shape[-1] for part in parts)
    shape = matrix.batch_shape
    factors = torch.stack([torch.nn.functional.pad(p.factor, (0, rank - p.factor.shape[-1])) for p in parts])
    pivots = coefficients = None
    if all(part.coefficients is not None for part in parts):
        padded = [torch.nn.functional.pad(p.coefficients, (0, rank - p.factor.shape[-1])) for p in parts]  # type: ignore[arg-type]
        coefficients = torch.stack(padded).reshape(*shape, *padded[0].shape)
        pivots = torch.stack([part.pivots for part in parts]).reshape(*shape, -1)  # type: ignore[misc]
    elif all(part.pivots is not None for part in parts):
        pivots = torch.stack([_pad_pivots(part.pivots, rank, matrix.n) for part in parts])  # type: ignore[arg-type]
        pivots = pivots.reshape(*shape, rank)
    shift = torch.tensor([float(part.shift) for part in parts], dtype=torch.float64, device=matrix.device)
    return Selection(
        factors.reshape(*shape, *factors.shape[-2:]),
        pivots,
        max(part.relative_trace for part in parts),
        shift.reshape(*shape, 1),
        coefficients,
    )


def _pad_pivots(pivots: Tensor, rank: int, n: int) -> Tensor:
    missing = rank - len(pivots)
    if not missing:
        return pivots
    free = torch.ones(n, dtype=torch.bool, device=pivots.device)
    free[pivots] = False
    return torch.cat([pivots, free.nonzero().squeeze(-1)[:missing]])

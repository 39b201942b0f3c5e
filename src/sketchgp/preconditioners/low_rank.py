"""The result of every low-rank method, and the formula that turns a sketch of K into a factor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NumericalError
from ..operators.access import Access
from ..operators.moving_factors import FactorOfColumns, FactorOfSketch, sketched
from ..space import Factor, held_rows, space_of

_PAGES = "cpu"  # where memory is given when it is written to
_BEGIN = 128  # columns that a factor of no certain rank begins with elsewhere


@dataclass
class LowRank:
    """``K ~ F F^T`` for one n x n matrix.

    ``factor`` is F, ``(n, r)``; ``pivots`` ``(r,)`` the columns of K it is made of (None for a dense sketch);
    ``residual`` ``(n,)`` the diagonal of ``K - F F^T``, whose sum bounds the condition number of the
    preconditioned system by ``1 + sum(residual) / noise``.  ``sequential`` says that F is a partial Cholesky factor:
    its rows at the pivots are then the Cholesky factor of their block.
    """

    factor: Factor
    pivots: Tensor | None
    residual: Tensor
    sequential: bool = False

    @property
    def trace(self) -> float:
        """Trace of ``K - F F^T``."""
        return float(self.residual.sum())


class Columns:
    """F, ``(n, r)`` float64, as its columns come; each lies in one piece of memory.

    :param n: rows; :param most: columns that may come.
    :param surely: whether all of them will come.  Otherwise memory grows with them, twofold, where it is taken at once.
    """

    def __init__(self, n: int, most: int, device: torch.device, surely: bool) -> None:
        self.most, self.count = most, 0
        begin = most if surely or device.type == _PAGES else min(most, _BEGIN)
        self._rows = torch.empty(begin, n, dtype=torch.float64, device=device)  # of F^T

    @property
    def factor(self) -> Tensor:
        """Return the columns so far."""
        return self._rows[: self.count].mT

    def add(self, columns: Tensor) -> None:
        """Add k columns, given as rows ``(k, n)``."""
        after = self.count + len(columns)
        if after > len(self._rows):
            wider = self._rows.new_empty(min(self.most, max(2 * self.count, after)), self._rows.shape[1])
            wider[: self.count] = self._rows[: self.count]
            self._rows = wider
        self._rows[self.count : after] = columns
        self.count = after

    def all(self) -> Tensor:
        """Return F in memory of its size."""
        return self.factor if self.count == len(self._rows) else self._rows[: self.count].clone().mT


def nystrom_factor(sketch: Tensor, core: Tensor, resolution: float) -> Tensor:
    """Return F with ``F F^T = Y (W + shift I)^-1 Y^T`` for ``Y = K M`` (..., n, r) and ``W = M^T K M`` (..., r, r).

    M selects columns (pivoted methods) or is a dense test matrix.  ``W`` is singular to working precision when
    columns are nearly dependent; the shift starts at ``resolution * trace(W)`` and grows tenfold until the
    Cholesky factorization succeeds.  Differentiable in both arguments.

    :raises NumericalError: if W is far from positive semidefinite, or holds NaN.
    """
    if sketch.shape[-1] == 0:
        return sketch
    root = shifted_cholesky(core, resolution)
    return torch.linalg.solve_triangular(root, sketch.mT, upper=False).mT


def pivoted_factor(matrix: Access, pivots: Tensor) -> FactorOfColumns:
    """Return ``F = K(:, S) L^-T``, ``L L^T = K(S, S)``, for pivots S; without gradients.

    The same as :func:`nystrom_factor`, with one n x r array instead of two, shared out where ranks work together.
    """
    with torch.no_grad():
        root = shifted_cholesky(matrix.block(pivots, pivots), matrix.resolution)
    moving = FactorOfColumns(None, root, pivots)
    moving.factor = moving.made(matrix)
    return moving


def sketched_factor(matrix: Access, test: Factor) -> FactorOfSketch:
    """Return ``F = K M L^-T``, ``L L^T = M^T K M``, for a dense test matrix M, shared out as M is; no gradients."""
    with torch.no_grad():
        sketch = sketched(matrix, test)
        root = shifted_cholesky(space_of(test).total(held_rows(test).mT @ sketch), matrix.resolution)
    moving = FactorOfSketch(None, root, test)
    moving.factor = moving.made_of(sketch)
    return moving


def shifted_cholesky(core: Tensor, resolution: float, limit: float = 1e-2) -> Tensor:
    """Return the lower Cholesky factor of ``core + shift * trace(core) * I``; the shift grows from ``resolution``.

    :raises NumericalError: if no shift below ``limit`` makes it positive definite; it grows tenfold.
    """
    core = (core + core.mT) / 2
    scale = core.detach().diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # the factor of a zero matrix is zero
    shift = resolution
    while shift < limit:
        shifted = core.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift * scale[..., 0])
        root, info = torch.linalg.cholesky_ex(shifted)
        if not bool(info.any()):
            return root
        shift *= 10
    raise NumericalError(
        "The kernel matrix between the pivots is not positive semidefinite; check the kernel and its inputs for NaN.",
        see="not-definite",
    )

"""Low-rank factors F of a kernel matrix that move with it, and the way back from F to K with few n x r arrays.

With the factor F of ``K(:, S) K(S, S)^-1 K(S, :) = F F^T``, differentiating through F by autograd keeps K(:, S), F and
their gradients: five arrays of n x r.  But the gradient G of every function of P used here is known in closed form,
so that ``H = G F`` is known row by row, and with ``L L^T = K(S, S)``, ``F = K(:, S) L^-T``

    gradient of K(:, S) = 2 H L^-1,    gradient of K(S, S) = -L^-T (F^T H) L^-1.

The same holds for any function of F whose gradient is 2 H; where ``F^T H`` is not symmetric, the symmetric matrix with
its upper triangle takes its place (the derivative of a Cholesky factorization).
Blocks of rows of the first are handed to the kernel at once.

- ``F = K(:, S) C`` for numbers C that stay as they are (EigenPro's): the gradient of K(:, S) is ``2 H C^T``, and there
  is no other.
- ``F = K M L^-T``, ``L L^T = M^T K M``, for a dense test matrix M (Gaussian Nystrom): with B the second gradient above,
  that of K is ``(2 H L^-1 + M B) M^T``, which the derivative of a product of K with M takes.

Where ranks work together, each has its own rows of F, M and H, and hands over those; the gradients are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..space import Factor, ShardedRows, Space, held_rows, space_of
from .access import Access
from .engines import TILED
from .engines.base import Gradients
from .kernel_matrix import KernelMatrix
from .low_rank_plus_diagonal import LowRankPlusDiagonal, Rows
from .products import summed
from .tiles import spans

ENTRIES = 2**22  # of F that are worked on at once
_TOGETHER = 256  # columns of a sketch for which ranks hold all rows at once


@dataclass
class MovingFactor:
    """F ``(n, r)`` without gradients, and what it is made of.

    F may be taken away (None) by whoever needs the memory for another; an operator that is used after all then makes
    it again.

    :ivar core_root: L ``(r, r)``, lower triangular, with whatever shift made it exist; None where there is none.
    """

    factor: Factor | None
    core_root: Tensor | None

    @property
    def width(self) -> int:
        """Columns of what :meth:`back` gives."""
        raise NotImplementedError

    def made(self, matrix: Access) -> Factor:
        """Return F of a matrix, with the same L."""
        raise NotImplementedError

    def back(self, rows: Tensor) -> Tensor:
        """Return half the gradient of the columns that F is made of, such as ``H L^-1``, from rows of H ``(h, r)``."""
        return torch.linalg.solve_triangular(self.core_root, rows, upper=False, left=False)

    def gradients(self, matrix: KernelMatrix, blocks: list[slice], rows_of: Rows, core: Tensor) -> Gradients:
        """Gradients for x1, x2 and the parameters of the matrix.

        :param matrix: with the flags that say which of its tensors need a gradient.
        :param blocks: of the rows of F that this rank holds.
        :param rows_of: ``slice -> (h, s)`` rows of :meth:`back`; called once for each block.
        :param core: ``F^T H`` of this rank's rows, ``(r, r)``; read when all rows have been asked for.
        """
        raise NotImplementedError

    def _of_core(self, core: Tensor) -> Tensor:
        """The gradient of ``L L^T``, ``(r, r)``."""
        root = self.core_root
        assert root is not None
        upper = space_of(self.factor).total(core).triu()
        core = (upper + upper.mT) - torch.diag(upper.diagonal())
        inner = torch.linalg.solve_triangular(root, core, upper=False, left=False)
        return -torch.linalg.solve_triangular(root.mT, inner, upper=True)


@dataclass
class FactorOfColumns(MovingFactor):
    """``F = K(:, S) L^-T`` with ``L L^T = K(S, S)``, or ``F = K(:, S) C``.

    :ivar pivots: S ``(s,)``; :ivar coefficients: C ``(s, r)``, fixed while K moves; None for the first.
    """

    pivots: Tensor
    coefficients: Tensor | None = None

    @property
    def width(self) -> int:
        return len(self.pivots)

    @torch.no_grad()
    def made(self, matrix: Access) -> Factor:
        """Return F by blocks of rows; K(:, S) is never stored."""
        over = self.core_root if self.coefficients is None else self.coefficients
        assert over is not None
        space = Space.of(matrix.n)
        held = space.span
        factor = over.new_empty(space.height, over.shape[-1])
        for rows in spans(held.stop, max(1, ENTRIES // max(self.width, 1)), held.start):
            part = matrix.block(torch.arange(rows.start, rows.stop, device=over.device), self.pivots)
            solved = self.coefficients is None
            part = torch.linalg.solve_triangular(over, part.mT, upper=False).mT if solved else part @ over
            factor[rows.start - held.start : rows.stop - held.start] = part
        return space.factor(factor)

    def back(self, rows: Tensor) -> Tensor:
        return super().back(rows) if self.coefficients is None else rows @ self.coefficients.mT

    def gradients(self, matrix: KernelMatrix, blocks: list[slice], rows_of: Rows, core: Tensor) -> Gradients:
        x, parameters, pivots = matrix.x1, matrix.parameters, self.pivots
        of_x = torch.zeros_like(x) if x.requires_grad else None
        totals = [torch.zeros_like(p) if p.requires_grad else None for p in parameters]
        chosen = x.detach()[pivots].requires_grad_(x.requires_grad)

        def add(rows: Tensor, gradient: Tensor) -> None:
            part = x.detach()[rows].requires_grad_(x.requires_grad)
            block = matrix.pairs.of([part, chosen, *parameters], engine="tiled", same=False, centre=None)
            block.coincident = (rows.unsqueeze(1) == pivots).nonzero().mT
            of_rows, of_chosen, *result = TILED.dense_derivative(block, gradient)
            for total, value in zip(totals, result, strict=True):
                if total is not None and value is not None:
                    total += value
            if of_x is not None and of_rows is not None and of_chosen is not None:
                of_x.index_add_(0, rows, of_rows)
                of_x.index_add_(0, pivots, of_chosen)

        for rows in blocks:
            add(torch.arange(rows.start, rows.stop, device=x.device), 2 * rows_of(rows))
        if isinstance(self.factor, ShardedRows):
            of_x, *totals = summed(self.factor.shards, (of_x, *totals))
        if self.coefficients is None:
            add(pivots, self._of_core(core))
        return (of_x, None, *totals)


@dataclass
class FactorOfSketch(MovingFactor):
    """``F = K M L^-T`` with ``L L^T = M^T K M``.

    :ivar test: M ``(n, r)``, which stays as it is while K moves.
    """

    test: Factor

    @property
    def width(self) -> int:
        return self.test.shape[-1]

    def made(self, matrix: Access) -> Factor:
        return self.made_of(sketched(matrix, self.test))

    @torch.no_grad()
    def made_of(self, sketch: Tensor) -> Factor:
        """F from K M, of which a rank has its own rows."""
        rows = torch.linalg.solve_triangular(self.core_root, sketch.mT, upper=False).mT
        return space_of(self.test).factor(rows)

    def gradients(self, matrix: KernelMatrix, blocks: list[slice], rows_of: Rows, core: Tensor) -> Gradients:
        test = held_rows(self.test)
        of_sketch = torch.empty_like(test)
        for rows in blocks:
            of_sketch[rows.start - blocks[0].start : rows.stop - blocks[0].start] = 2 * rows_of(rows)
        of_sketch += test @ self._of_core(core)
        if isinstance(self.test, Tensor):
            return matrix.derivative(of_sketch, test)
        n, shards = matrix.shape[-1], self.test.shards
        totals: Gradients = (None,) * len(matrix.pairs.tensors)
        for some in spans(test.shape[-1], _TOGETHER):
            sides = (shards.gather(side[:, some], n) for side in (of_sketch, test))
            result = matrix.derivative(*sides)
            totals = tuple(b if a is None or b is None else a + b for a, b in zip(totals, result, strict=True))
        return totals


@torch.no_grad()
def sketched(matrix: Access, test: Factor) -> Tensor:
    """``K M``; where ranks work together, its rows of this one, by products with 256 columns at a time."""
    if isinstance(test, Tensor):
        return matrix.matmul(test)
    result = torch.empty_like(test.own)
    for some in spans(test.shape[-1], _TOGETHER):
        result[:, some] = matrix.matmul(test.shards.gather(test.own[:, some], test.n))[test.span]
    return result


class MovingPlusDiagonal(LowRankPlusDiagonal):
    """The preconditioner above for one float64 kernel matrix.

    :param matrix: K, differentiable in its inputs and its kernel's parameters.
    :param diagonal: ``(n,)``.
    :param moving: F and what it is made of.
    :param out_dtype: dtype of determinants and samples.

    :ivar tensors: what it is differentiated in: inputs, parameters and the diagonal.
    """

    def __init__(
        self, matrix: KernelMatrix, diagonal: Tensor, moving: MovingFactor, out_dtype: torch.dtype | None = None
    ) -> None:
        self.matrix, self.diagonal_part, self.moving, self.out_dtype = matrix, diagonal, moving, out_dtype
        self.tensors = (matrix.x1, *matrix.parameters, diagonal)
        self.known_root = None

    @property
    def factor(self) -> Factor:  # type: ignore[override]
        """F, ``(n, r)``, without gradients."""
        factor = self.moving.factor
        if factor is None:
            factor = self.moving.factor = self.moving.made(Access(self.matrix.detach()))
        return factor

    def detached(self, out_dtype: torch.dtype | None) -> MovingPlusDiagonal:
        copy = MovingPlusDiagonal(self.matrix.detach(), self.diagonal_part.detach(), self.moving, out_dtype)
        copy.known_root = self.capacitance_root()
        return copy

    @torch.no_grad()
    def pull_back(self, tensors: tuple[Tensor, ...], rows_of: Rows) -> Gradients:
        """Gradients for x and the kernel's parameters from H, half the gradient of F, given by rows.

        :param tensors: x, the parameters and the diagonal, with the flags that say which need a gradient.
        :param rows_of: ``slice -> (h, r)`` rows of H; called once for each block, whatever needs a gradient.
        """
        core = torch.zeros(self.rank, self.rank, dtype=self.factor.dtype, device=self.factor.device)

        def back(rows: slice) -> Tensor:
            h = rows_of(rows)
            core.add_(self.rows(rows).mT @ h)
            return self.moving.back(h)

        held, r = self.held, self.moving.width
        blocks = list(spans(held.stop, max(1, ENTRIES // max(r, 1)), held.start)) if r else []
        if not r or not any(t.requires_grad for t in tensors[:-1]):
            for rows in blocks:
                rows_of(rows)
            return (None,) * (len(tensors) - 1)
        x, *parameters = tensors[:-1]
        matrix = KernelMatrix.on(self.matrix.pairs.of([x, x, *parameters], same=True, centre=None))
        of_x, of_x2, *rest = self.moving.gradients(matrix, blocks, back, core)
        return (of_x if of_x is None or of_x2 is None else of_x + of_x2, *rest)

"""``P = F F^T + diag(d)``: inverse, log determinant and samples at O(n r) each, after O(n r^2) set-up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import NumericalError
from ..space import Factor, Space, held_rows, space_of, square_norms, whole
from .substitution import cholesky_solve
from .tiles import add_product, spans, thin_product

Rows = Callable[[slice], Tensor]
Gradients = tuple[Tensor | None, ...]

_ENTRIES = 2**22  # of F that are scaled at once, so that no second n x r array is made
_WIDTH = 512  # columns of the symmetric C that are made at once


class LowRankPlusDiagonal:
    """``F F^T + diag(d)``, symmetric positive definite.

    The inverse is applied by the Woodbury identity with ``C = I + F^T D^-1 F`` (r x r, Cholesky), in the factor's
    dtype; with a float64 factor a float32 caller therefore gets float64 accuracy, rounded at the end.

    :param factor: F, ``(..., n, r)``; r may be 0.  Of :class:`~sketchgp.space.ShardedRows` every rank holds its
        own rows; inverses, determinants and samples are then those of all ranks together.
    :param diagonal: d, ``(..., n)``, positive.
    :param out_dtype: dtype of determinants and samples (default: the factor's).

    :ivar tensors: what it is differentiated in: F, or this rank's rows of it, and d.
    """

    def __init__(self, factor: Factor, diagonal: Tensor, out_dtype: torch.dtype | None = None) -> None:
        self.factor, self.diagonal_part, self.out_dtype = factor, diagonal, out_dtype
        self.tensors: tuple[Tensor, ...] = (held_rows(factor), diagonal)
        self.known_root: Tensor | None = None

    @property
    def rank(self) -> int:
        """Number of columns of F."""
        return self.factor.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of determinants and samples."""
        return self.out_dtype or self.factor.dtype

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch."""
        return torch.broadcast_shapes(self.factor.shape[:-2], self.diagonal_part.shape[:-1])

    @property
    def held(self) -> slice:
        """The rows of F that are on this rank."""
        return space_of(self.factor).span

    def rows(self, rows: slice) -> Tensor:
        """Return some of the rows :attr:`held`, ``(..., h, r)``."""
        if isinstance(self.factor, Tensor):
            return self.factor[..., rows, :]
        first = self.factor.span.start
        return self.factor.own[rows.start - first : rows.stop - first]

    def detached(self, out_dtype: torch.dtype | None) -> LowRankPlusDiagonal:
        """Return the operator without gradients, shown as ``out_dtype``; it shares F, d and their factorization."""
        copy = LowRankPlusDiagonal(self.factor.detach(), self.diagonal_part.detach(), out_dtype=out_dtype)
        copy.known_root = self.capacitance_root()
        return copy

    @torch.no_grad()
    def capacitance_root(self) -> Tensor:
        """Lower Cholesky factor of ``I + F^T D^-1 F``, ``(..., r, r)``.

        :raises NumericalError: if it is not positive definite (F or d holds NaN, or d is not positive).
        """
        if self.known_root is None:
            factor, diagonal = self.factor, self.diagonal_part
            inner = torch.zeros(*self.batch_shape, self.rank, self.rank, dtype=factor.dtype, device=factor.device)
            held = self.held
            for rows in spans(held.stop, max(1, _ENTRIES // max(self.rank, 1)), held.start):
                scaled = self.rows(rows) / diagonal[..., rows, None].sqrt()
                for across in spans(self.rank, _WIDTH):  # the lower triangle is all that is read
                    add_product(inner[..., across.start :, across], scaled[..., across.start :].mT, scaled[..., across])
            inner = space_of(factor).total(inner)
            inner.diagonal(dim1=-2, dim2=-1).add_(1)
            root, info = torch.linalg.cholesky_ex(inner)
            definite = (info == 0).all() & (diagonal > 0).all() & torch.isfinite(root).all()  # false for NaN too
            if not bool(definite):
                raise NumericalError(
                    "The preconditioner F F^T + diag(d) is not positive definite in "
                    f"{factor.dtype}; check the noise (it must be positive) and the inputs for NaN.",
                    see="not-definite",
                )
            self.known_root = root
        return self.known_root

    def apply_inverse(self, rhs: Tensor) -> Tensor:
        """Return ``P^-1 rhs`` for rhs ``(..., n, t)``, computed in the factor's dtype, in that of rhs."""
        return self.apply_inverse_to_rows(rhs, Space(self.diagonal_part.shape[-1]))

    def down(self, vectors: Tensor, rows: slice) -> Tensor:
        """Return the part of ``F^T v``, ``(..., r, t)``, that these rows of v make up."""
        return thin_product(self._part(rows).mT, vectors)

    def up(self, inner: Tensor, rows: slice) -> Tensor:
        """Return these rows of ``F inner``."""
        return thin_product(self._part(rows), inner)

    def _part(self, rows: slice) -> Factor:
        """Return these rows of F: all of them, on whichever ranks, or some of those :attr:`held`."""
        return self.factor if rows == slice(0, self.factor.shape[-2]) else self.rows(rows)

    def apply_inverse_to_rows(self, own: Tensor, space: Space) -> Tensor:
        """Return the rows of ``P^-1 rhs`` that a rank holds, from those of rhs, ``(..., h, t)``; sends r t numbers.

        F may be shared out as well, or whole on every rank.
        """
        diagonal = self.diagonal_part[..., space.span].unsqueeze(-1)
        scaled = own.to(self.factor.dtype) / diagonal
        if self.rank:
            inner = cholesky_solve(space.total(self.down(scaled, space.span)), self.capacitance_root())
            scaled = scaled - self.up(inner, space.span) / diagonal
        return scaled.to(own.dtype)

    @torch.no_grad()
    def log_determinant(self) -> Tensor:
        """Return ``log det P``, ``(...)``; :meth:`sampled_derivative` has its gradient."""
        roots, diagonal = self.capacitance_root().diagonal(dim1=-2, dim2=-1), self.diagonal_part
        value = 2 * roots.log().sum(-1) + diagonal.expand(*self.batch_shape, -1).log().sum(-1)
        return value.to(self.dtype)

    def unexplained(self, prior: Tensor) -> Tensor:
        """Return what F leaves of prior variances ``(..., n)``, at least zero."""
        return (prior - square_norms(self.factor)).clamp(min=0)

    def sample(self, low_rank_noise: Tensor, full_noise: Tensor) -> Tensor:
        """Return N(0, P) samples ``F z1 + d^(1/2) z2``, ``(..., n, s)``, for normal z1 (..., r, s), z2 (..., n, s)."""
        return (self.factor @ low_rank_noise + self.diagonal_part.sqrt().unsqueeze(-1) * full_noise).to(self.dtype)

    def sampled_derivative(
        self,
        tensors: tuple[Tensor, ...],
        columns: Tensor,
        weights: Tensor,
        of_samples: Tensor,
        low_rank_noise: Tensor,
        full_noise: Tensor,
        of_determinant: Tensor,
    ) -> Gradients:
        """Return the gradients, for :attr:`tensors`, of a function of P, of samples from it and of its log determinant.

        That of the log determinant is ``g P^-1``, with ``P^-1 F = D^-1 F C^-1``.

        :param tensors: :attr:`tensors`, with the flags that say which need a gradient.
        :param columns: Y, ``(..., n, t)``; with ``weights`` w, ``(..., 1, t)``, the gradient ``Y diag(w) Y^T`` of P.
        :param of_samples: ``(..., n, s)``, of what :meth:`sample` made of the two noises.
        :param of_determinant: g, ``(...)``, of the log determinant.
        """
        columns, weights, of_samples = (v.to(self.factor.dtype) for v in (columns, weights, of_samples))
        diagonal, root = self.diagonal_part.expand(*self.batch_shape, -1), self.capacitance_root()
        a = torch.cat([columns * weights, of_samples / 2], dim=-1)
        b = torch.cat([(self.factor.mT @ columns).mT, low_rank_noise.mT], dim=-2)
        g, of_inverse = of_determinant.to(diagonal.dtype), 1 / diagonal  # right as it is for rank 0

        def rows_of(rows: slice) -> Tensor:
            part = self.rows(rows)
            part = part.expand(*self.batch_shape, *part.shape[-2:])
            half = cholesky_solve(part.mT, root).mT / diagonal[..., rows, None]  # of P^-1 F
            of_inverse[..., rows] = (1 - (part * half).sum(-1)) / diagonal[..., rows]  # of the diagonal of P^-1
            return half * g[..., None, None] + a[..., rows, :] @ b

        of_factor = self.pull_back(tensors, rows_of)
        of_inverse = space_of(self.factor).whole(of_inverse[..., self.held, None]).squeeze(-1)
        of_diagonal = of_inverse * g.unsqueeze(-1) + (columns.square() * weights).sum(-1)
        of_diagonal = of_diagonal + (of_samples * full_noise).sum(-1) / (2 * self.diagonal_part.sqrt())
        return (*of_factor, of_diagonal.sum_to_size(self.diagonal_part.shape))

    @torch.no_grad()
    def pull_back(self, tensors: tuple[Tensor, ...], rows_of: Rows) -> Gradients:
        """Return the gradient for F, ``2 G F``, of a function of P whose gradient is G.

        :param tensors: F and the diagonal, with the flags that say which need a gradient.
        :param rows_of: ``slice -> (..., h, r)`` rows of ``G F`` for each matrix of the batch; called once for each
            block, whatever needs a gradient.
        """
        factor = whole(self.factor)
        batch, (n, r) = self.batch_shape, factor.shape[-2:]
        needed = tensors[0].requires_grad
        of_factor = factor.new_zeros(*batch, n, r) if needed else None
        for rows in spans(n, max(1, _ENTRIES // max(r, 1))) if r else ():
            part = rows_of(rows)
            if of_factor is not None:
                of_factor[..., rows, :] = 2 * part
        return (None if of_factor is None else of_factor.sum_to_size(factor.shape),)

    def to_dense(self) -> Tensor:
        """Return the matrix, without gradients where F moves."""
        factor = whole(self.factor)
        return (factor @ factor.mT + torch.diag_embed(self.diagonal_part)).to(self.dtype)

"""What conjugate gradients leave behind of Lanczos's method: its matrices, and where wanted its vectors.

Golub and Van Loan, "Matrix Computations", 10.2; for log determinants Gardner et al. (arXiv:1809.11165).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...settings import memory_budget
from ...space import Space
from ..lanczos import tridiagonal

_DEPTH = 20  # vectors that are kept whatever the memory budget is; GPyTorch takes no more of them


class LanczosRecord:
    """Of the first ``columns`` of a block ``b``, float64 vectors of a space; returned vectors have ``dtype``."""

    def __init__(self, b: Tensor, space: Space, dtype: torch.dtype, columns: int, with_vectors: bool) -> None:
        self.b, self.space, self.dtype, self.columns, self.with_vectors = b, space, dtype, columns, with_vectors
        self.coefficients: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.depth = float("inf")
        if with_vectors:
            each = b.shape[:-2].numel() * space.n * columns * dtype.itemsize
            self.depth = max(_DEPTH, memory_budget.value(b.device) // max(each, 1))

    def begin(self, z: Tensor, size: Tensor) -> None:
        """The first vector, of ``z = P^-1 r`` and ``size`` its norm in the preconditioner, ``(..., t)``."""
        if self.with_vectors:
            self._keep(z, size, torch.arange(self.b.shape[-1], device=self.b.device))

    def add(self, alpha: Tensor, beta: Tensor, z: Tensor, size: Tensor, index: Tensor) -> str | None:
        """An iteration of the columns at ``index``; a note where the memory budget allows no more of them."""
        if len(self.coefficients) >= self.depth:
            return None
        full = self.b.new_zeros(2, *self.b.shape[:-2], self.b.shape[-1])
        full[0][..., index], full[1][..., index] = alpha, beta
        self.coefficients.append(full[..., : self.columns])
        if len(self.coefficients) == self.depth:
            return f"the memory budget allows {len(self.coefficients)} Lanczos vectors of a probe and no more"
        if self.with_vectors:
            self._keep(z, size, index)
        return None

    def _keep(self, z: Tensor, size: Tensor, index: Tensor) -> None:
        sign = (-1) ** len(self.vectors)
        full = torch.zeros_like(self.b)
        full[..., index] = sign * z / size.unsqueeze(-2)
        self.vectors.append(full[..., : self.columns].to(self.dtype))

    def matrices(self) -> Tensor:
        """``(columns, ..., k, k)`` float64; unit rows past a column's end."""
        like = self.b.new_zeros(*self.b.shape[:-2], self.columns)
        return tridiagonal(self.coefficients, like).movedim(-3, 0)

    def kept_vectors(self) -> Tensor:
        """``W = P^-1/2 V``, ``(columns, ..., n, k)``; zeros past a column's end."""
        zeros = torch.zeros_like(self.b[..., : self.columns], dtype=self.dtype)
        kept = self.vectors[: max(1, len(self.coefficients))] or [zeros]
        return self.space.whole(torch.stack(kept, dim=-1).movedim(-2, 0))

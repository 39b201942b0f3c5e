"""The inverse of a preconditioner with most columns of its factor in float32: less to read in each iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from ...operators import LowRankPlusDiagonal
from ...operators.tiles import thin_product
from ...random_streams import generator
from ...settings import memory_budget
from ...space import Space

_LEAST = 512  # columns from which on it pays
_ALLOWED = 0.03  # of P, that rounding may add or take; three times as much took a sixth more iterations
_POWERS = 6  # steps of the power iteration


class RoundedInverse:
    """``P^-1 v`` for ``P = F F^T + D`` by Woodbury's identity, with columns of F past the first h rounded to float32.

    Conjugate gradients in float32 spend a third of their time in reading F, n r numbers, twice an iteration.  The
    columns of a pivoted factor fall: with ``C = I + F^T D^-1 F`` rounding columns past h changes P by about
    ``eps ||C_h||`` of it, ``C_h`` the block of C of these columns.  That is to be little, and h is chosen by it.  The
    products are no exact inverse of anything, so that this is for recurrences whose residual is looked at.
    """

    def __init__(self, inverse: LowRankPlusDiagonal, factor: Tensor, head: int) -> None:
        self.inverse, self.head, self.tail = inverse, factor[:, :head], factor[:, head:].float()
        root = inverse.capacitance_root()
        self.head_root, self.across, self.tail_root = (
            root[:head, :head].clone(),
            root[head:, :head],
            root[head:, head:].float(),
        )

    @classmethod
    def of(cls, inverse: LowRankPlusDiagonal) -> RoundedInverse | None:
        """That of a preconditioner; None of one with few columns, or where they fall too slowly, or without the memory
        for another 4 n (r - h) bytes, or where several ranks work together."""
        factor, rank = inverse.factor, inverse.rank
        if Space.of(len(inverse.diagonal_part)).shared or not torch.is_tensor(factor):
            return None
        if factor.dim() > 2 or rank < _LEAST or factor.dtype != torch.float64:
            return None
        if torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32:
            return None
        root, eps = inverse.capacitance_root(), torch.finfo(torch.float32).eps
        for head in (rank // 16, rank // 8, rank // 4, rank // 2):
            if eps * _norm(root[head:]) <= _ALLOWED:
                needed = len(factor) * (8 * rank + 4 * (rank - head))
                return cls(inverse, factor, head) if needed <= memory_budget.value(factor.device) else None
        return None

    def apply_inverse(self, rhs: Tensor) -> Tensor:
        """``P^-1 rhs`` for rhs ``(n, t)`` float64."""
        diagonal = self.inverse.diagonal_part.unsqueeze(-1)
        scaled = rhs / diagonal
        head = torch.linalg.solve_triangular(self.head_root, thin_product(self.head.mT, scaled), upper=False)
        tail = thin_product(self.tail.mT, scaled.float()).to(rhs.dtype) - self.across @ head
        inner = torch.linalg.solve_triangular(self.tail_root, tail.float(), upper=False)
        inner = torch.linalg.solve_triangular(self.tail_root.mT, inner, upper=True)
        head = torch.linalg.solve_triangular(self.head_root.mT, head - self.across.mT @ inner.to(rhs.dtype), upper=True)
        low = thin_product(self.head, head) + thin_product(self.tail, inner).to(rhs.dtype)
        return scaled - low / diagonal


def _norm(rows: Tensor) -> float:
    """``||L L^T||`` for L ``(k, r)``, about, from below."""
    vector = torch.randn(len(rows), 1, dtype=torch.float64, generator=generator(0, "norm of a block")).to(rows.device)
    size = torch.zeros((), dtype=torch.float64)
    for _ in range(_POWERS):
        vector = rows @ (rows.mT @ vector)
        size = vector.norm()
        vector = vector / size
    return float(size)

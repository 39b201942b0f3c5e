"""The state of a blockwise solve that is not its method's: what a checkpoint has to bring back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....report import Reason

_TENSORS = ("base", "r", "window_squares", "best", "best_true", "true", "first", "estimate")
VECTORS = ("base", "r", "best")  # of the rows that this rank holds
_ON_CPU = ("best_true", "true", "first", "estimate")


@dataclass
class State:
    """Counters and residuals.  ``base`` is W without the method's d, and ``r = y - (K + noise) base``.

    :ivar tol: the tolerance, and ``target`` the estimated residual at which the true one is looked at.
    :ivar rows_seen: rows of all steps; ``rows_checked`` of them at the last look at rounding errors.
    :ivar verify_after: rows before the true residual is looked at again, after ``failures`` times in vain.
    :ivar shrunk: how often the step was made smaller.
    :ivar window_rows: rows since the last estimate, ``window_squares`` (t,) their squared residuals.
    :ivar best: the value with the least true residuals ``best_true`` (t,) known; without columns while that is zero.
    :ivar true: the true residuals (t,) when all rows were last looked at and found above the tolerance;
        ``fruitless`` of the ``corrections`` in a row did not help.
    :ivar least: the least estimate; ``lowest`` the least that was clearly below those before, at row ``lowest_at``.
    :ivar first: the residual ``(t,)`` of the start; ``estimate`` the last one, estimated once a window.
    """

    base: Tensor
    r: Tensor
    window_squares: Tensor
    best: Tensor
    best_true: Tensor
    true: Tensor
    first: Tensor
    estimate: Tensor
    tol: float
    target: float
    rows_seen: int = 0
    rows_checked: int = 0
    window_rows: int = 0
    verify_after: int = 0
    failures: int = 0
    shrunk: int = 0
    corrections: int = 0
    fruitless: int = 0
    lowest_at: int = 0
    lowest: float = float("inf")
    least: float = float("inf")
    reason: Reason | None = None

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Numbers and text, and tensors."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in tensors}
        return plain, tensors

    @classmethod
    def unpack(cls, plain: dict[str, Any], tensors: dict[str, Tensor]) -> State:
        """What :meth:`pack` made."""
        kept = {name: tensors[name].cpu() if name in _ON_CPU else tensors[name] for name in _TENSORS}
        reason = None if plain["reason"] is None else Reason(plain["reason"])
        return cls(**{**plain, **kept, "reason": reason})

    def keep(self, value: Tensor, residual: Tensor) -> None:
        """Remember the columns of a value whose true residuals are the least so far."""
        better = residual < self.best_true
        if bool(better.any()):
            best = self.best if self.best.numel() else torch.zeros_like(self.r)
            self.best = torch.where(better.to(best.device), value.to(torch.float64), best)
            self.best_true = torch.where(better, residual, self.best_true)

    def best_of(self, value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, int]:
        """A value and its true residuals, in whose place the best columns known stand where they are better; and how
        many do."""
        worse = residual > self.best_true
        if not bool(worse.any()):
            return value, residual, 0
        best = self.best if self.best.numel() else torch.zeros_like(self.r)
        value = torch.where(worse.to(best.device), best.to(value.dtype), value)
        return value, torch.where(worse, self.best_true, residual), int(worse.sum())

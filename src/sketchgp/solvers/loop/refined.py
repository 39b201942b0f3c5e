"""Iterative refinement: methods whose iterate is judged by its true residual, in float64.

A cycle works on ``A d = r`` from d = 0, with products in the operator's dtype; then ``w += d`` and ``r = b - A w`` in
float64, and the next cycle goes on from there.  Reference: Higham, "Accuracy and Stability of Numerical Algorithms",
chapter 12.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import NumericalError
from ...report import Reason
from ...space import Space
from .method import Method


def require_finite(finite: bool | Tensor) -> None:
    """:raises NumericalError: unless products with the kernel matrix were finite."""
    if not finite:
        message = "A product with the kernel matrix gave NaN or infinity; check inputs and kernel."
        raise NumericalError(message, see="nan")


class Refined(Method):
    """A method on ``A w = b`` for b ``(..., n, t)``, rows that ``space`` holds.

    :ivar norm: norm of each right-hand side ``(..., t)``; 1 where it is zero.
    :raises NumericalError: where b holds NaN or infinity.
    """

    def __init__(self, b: Tensor, space: Space) -> None:
        super().__init__()
        self.b, self.space, self.device = b, space, b.device
        norm = space.norm(b)
        if not bool(torch.isfinite(norm).all()):
            message = "The right-hand side of a linear solve holds NaN or infinity; check targets, inputs and kernel."
            raise NumericalError(message, see="nan")
        self.norm = torch.where(norm > 0, norm, torch.ones_like(norm))

    def relative(self, r: Tensor) -> Tensor:
        """Relative residual of each column, on the CPU.

        :raises NumericalError: for NaN or infinity.
        """
        return self.finite((self.space.norm(r) / self.norm).cpu())

    @staticmethod
    def finite(residual: Tensor) -> Tensor:
        """Return the argument.

        :raises NumericalError: for NaN or infinity.
        """
        require_finite(torch.isfinite(residual).all())
        return residual

    def iterate(self) -> Tensor:
        """Return the present iterate, rows that ``space`` holds."""
        raise NotImplementedError

    def weights(self) -> Tensor:
        return self.space.whole(self.iterate())


class Cycles(Refined):
    """Cycles of a recurrence on ``A d = r``, each from the true residual.

    :ivar value: the iterate at the end of the last cycle, rows that ``space`` holds.
    :ivar cycling: whether a cycle is open; ``verified``: whether the true residual is that of the value.
    :ivar current: relative residual by the recurrence, ``(..., t)``; ``current_on_cpu`` the same where it was fetched.
    """

    value: Tensor

    def __init__(self, b: Tensor, space: Space) -> None:
        super().__init__(b, space)
        self.cycling, self.verified = False, True
        self.current = self.norm[..., :0]
        self.current_on_cpu: Tensor | None = None

    def estimate(self) -> Tensor:
        return self.current.reshape(-1) if self.current_on_cpu is None else self.current_on_cpu

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """Where a cycle has ended, end the solve or begin the next cycle."""
        if self.cycling:
            return None
        reached = self.reached()
        if reached is not None:
            return reached
        if not self.stuck():
            self.open()
        return None if self.cycling else Reason.STAGNATED

    def moved(self) -> None:
        if self.cycling:
            self.close_cycle()
            self.open()
            self.cycling = True

    def reached(self) -> Reason | None:
        """Return why the solve ends here, if all columns are where they are to come to."""
        raise NotImplementedError

    def stuck(self) -> bool:
        """Return whether another cycle would be in vain, as the last one brought some open column hardly forward."""
        raise NotImplementedError

    def open(self) -> None:
        """Begin a cycle from d = 0."""
        raise NotImplementedError

    def close_cycle(self) -> None:
        """End the cycle: add d to the value, and find its true residual."""
        self.value, self.cycling, self.verified = self.iterate(), False, False
        self.verify()
        self.verified = True

    def verify(self) -> None:
        """Find the true residual of the value."""
        raise NotImplementedError

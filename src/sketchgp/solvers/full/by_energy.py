"""Conjugate gradients that are to come to a goal of energies (:mod:`sketchgp.solvers.energy`), not to a residual alone.

Float32 products lose energies in the directions of the least eigenvalues, which a residual hardly shows.  Whether they
did is told by the eigenvalues (:mod:`.another_matrix`), or by float64 products.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..energy import Goal, RemainingEnergy
from .kept import Kept

EXACT = 1e-10  # relative residual beyond which float64 has nothing more to say about a variance


class ByEnergy(Kept):
    """What a goal makes of the attributes that cycles of conjugate gradients have."""

    goal: Goal | None
    begun: Tensor | None  # what the solve began with, if not zero
    energy: RemainingEnergy
    exact: bool  # whether products are float64 ones
    lost: bool  # whether float32 ones were found to be with another matrix
    value: Tensor
    b: Tensor
    r: Tensor
    norm: Tensor
    residual: Tensor
    rounded_residual: Tensor
    best_residual: Tensor
    current: Tensor
    cycling: bool
    verified: bool
    before: Tensor  # the residual at which the cycle began
    taken: Tensor
    remaining: Tensor

    def _close(self) -> None:
        raise NotImplementedError

    @property
    def by_energy(self) -> bool:
        """Whether there is such a goal; one of any share at all is no more than a residual."""
        return self.goal is not None and math.isfinite(self.goal.share)

    def _explained(self, residual: Tensor) -> Tensor:
        """Which columns have come to the goal, if there is one."""
        if self.goal is None:
            return torch.ones_like(residual, dtype=torch.bool)
        return (self.goal.error(self.taken, self.remaining) <= self.goal.share) | (residual <= EXACT)

    def _doubt(self) -> None:
        """Go on with float64 products; what those of float32 say of the energy is not believed: they lose it in the
        directions of the least eigenvalues, which a residual hardly shows."""
        self.exact, self.energy, self.remaining = True, RemainingEnergy(), self._at_most()
        self.taken = self.space.dot(self.value, self.b + self.r)

    def _distrust(self) -> None:
        """End a cycle whose products were with another matrix.  To a goal of energies the solve begins anew: what comes
        of the other matrix is far off in the directions of the least eigenvalues, and takes longer to mend."""
        self.lost = True
        if not self.by_energy:
            self._close()
            return
        self.cycling, self.verified = False, True
        self.value, self.r = torch.zeros_like(self.b), self.b.clone()
        if self.begun is not None:
            self.value += self.begun
            self.r -= self.space.product(self.system.accurate_product, self.value)
        self.residual = self.rounded_residual = self.current = self.space.norm(self.r) / self.norm
        self.best, self.best_residual, self._uncertain = self.value.clone(), self.residual, self.r
        self._doubt()
        self.before = torch.full_like(self.residual, torch.inf)
        self.notes.append("float32 products were with another matrix, by its eigenvalues; went on with float64 ones")

    def _at_most(self) -> Tensor:
        """A bound of the energy that remains, of the true residual; infinite where none is known."""
        least = torch.zeros_like(self.norm[..., :1]) if self.goal is None else self.goal.least
        return torch.where(self.residual == 0, 0, (self.residual * self.norm).square() / least)

    def _follow(self, taken: Tensor, usable: Tensor, index: Tensor) -> None:
        """What an iteration took off the energy of the columns it worked on, and what is still to come."""
        full = torch.zeros_like(self.norm)
        full[..., index] = taken
        self.taken = self.taken + full
        estimate = self.energy.add(full)
        self.remaining = self.remaining.clone()
        self.remaining[..., index] = torch.where(usable, estimate[..., index], self.remaining[..., index])

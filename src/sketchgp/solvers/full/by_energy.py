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
    value: Tensor
    b: Tensor
    r: Tensor
    norm: Tensor
    residual: Tensor
    taken: Tensor
    remaining: Tensor

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

    def _begin_anew(self) -> None:
        """Leave a cycle whose products were with another matrix: what comes of that is far off in the directions of the
        least eigenvalues, and takes longer to mend than the solve does."""
        self.exact, self.energy = True, RemainingEnergy()
        self.begin(self.begun)
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

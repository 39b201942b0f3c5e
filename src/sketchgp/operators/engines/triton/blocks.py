"""Block sizes of the Triton kernels: a fixed table, so that nothing is timed at a first call.

Chosen from the compiler's reports for compute capability 9.0: tiles as large as leaves room for sums, values and what
is under way in registers (few or no spills), and for the features of the rows and some columns in shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

from .plan import Plan


class Blocks(NamedTuple):
    """Rows and columns of a tile, warps that share it, loads that are under way at once."""

    rows: int
    columns: int
    warps: int
    stages: int


def product_blocks(plan: Plan, memory: int) -> list[Blocks]:
    """What to try, best first, with so many bytes of shared memory."""
    looped = any(atom.dot and atom.looped for atom in plan.atoms)
    if plan.dot:
        choices = [Blocks(128, 64, 8, 2)]
    elif not any(atom.dot for atom in plan.atoms):
        choices = [Blocks(128, 128, 8, 2)]
    elif looped and len(plan.atoms) == 1:
        choices = [Blocks(128, 128, 8, 3), Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 2)]
    else:
        choices = [Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2)]
    if len(plan.atoms) > 2:  # each has a tile of its own
        choices = []
    if len(plan.atoms) <= 3:
        choices += [Blocks(64, 64, 4, 2)]
    return _that_fit(plan, memory, [*choices, Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)])


def gradient_blocks(plan: Plan, memory: int) -> list[Blocks]:
    """The same for gradients, which keep sums for a block of features too."""
    choices = [Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)]
    single = plan.parts == 1 and len(plan.atoms) == 1 and plan.atoms[0].k <= 64
    if single or not any(atom.dot for atom in plan.atoms):
        choices = [Blocks(64, 64, 4, 2), *choices]
    return _that_fit(plan, memory, choices)


def _that_fit(plan: Plan, memory: int, choices: list[Blocks]) -> list[Blocks]:
    """By an estimate, which leaves an eighth for what the compiler needs to rearrange tiles."""
    kept = sum(atom.k for atom in plan.atoms if atom.dot and not atom.looped)
    passing = max((atom.k for atom in plan.atoms if atom.dot and atom.looped), default=0)
    size = plan.parts * 4

    def needed(b: Blocks) -> int:
        entries = kept * (b.rows + b.columns * b.stages) + passing * (b.rows + b.columns) * b.stages
        if plan.dot:
            entries += plan.width * b.columns * b.stages
        return entries * size

    return [b for b in choices if needed(b) * 8 <= memory * 7] or choices[-1:]

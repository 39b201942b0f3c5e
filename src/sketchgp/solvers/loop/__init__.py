"""The one loop of all iterative solvers.  A method is a :class:`Method`; a solve of it is a :class:`Run`."""

from .by_epochs import ByEpochs
from .checkpoint import Checkpoint, compare_ranks, solve_marks
from .direct import concluded
from .method import Method, Outcome, Progress, largest_of
from .refined import Cycles, Refined, require_finite
from .run import HeldOut, Run, clock

__all__ = [
    "ByEpochs",
    "Checkpoint",
    "Cycles",
    "HeldOut",
    "Method",
    "Outcome",
    "Progress",
    "Refined",
    "Run",
    "clock",
    "compare_ranks",
    "concluded",
    "largest_of",
    "require_finite",
    "solve_marks",
]

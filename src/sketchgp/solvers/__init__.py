"""Floor 4: solvers, one file a method."""

from .askotch import ASkotch
from .blockwise import BlockSolver, Progress
from .cholesky import Cholesky
from .conjugate_gradients import ConjugateGradients, Iterate
from .eigenpro2 import EigenPro2
from .problem import FullProblem, Solution, System
from .skotch import Skotch

__all__ = [
    "ASkotch",
    "BlockSolver",
    "Cholesky",
    "ConjugateGradients",
    "EigenPro2",
    "FullProblem",
    "Iterate",
    "Progress",
    "Skotch",
    "Solution",
    "System",
]

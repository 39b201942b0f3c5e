"""Floor 4: solvers, one file a method."""

from .askotch import ASkotch
from .blockwise import BlockSolver, Progress
from .cholesky import Cholesky
from .conjugate_gradients import ConjugateGradients, Iterate
from .eigenpro2 import EigenPro2
from .falkon import Falkon
from .inducing import InducingPointProblem, NormalEquationsSolver
from .krill import KRILL
from .problem import FullProblem, Solution, System
from .qr import QR
from .skotch import Skotch

__all__ = [
    "KRILL",
    "QR",
    "ASkotch",
    "BlockSolver",
    "Cholesky",
    "ConjugateGradients",
    "EigenPro2",
    "Falkon",
    "FullProblem",
    "InducingPointProblem",
    "Iterate",
    "NormalEquationsSolver",
    "Progress",
    "Skotch",
    "Solution",
    "System",
]

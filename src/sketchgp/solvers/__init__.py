"""Floor 4: solvers, one file a method."""

from .askotch import ASkotch
from .blockwise import BlockSolver
from .choices import Budgeted
from .cholesky import Cholesky
from .conjugate_gradients import ConjugateGradients
from .eigenpro2 import EigenPro2
from .eigenpro3 import EigenPro3
from .eigenpro4 import EigenPro4
from .falkon import Falkon
from .inducing import InducingPointProblem, NormalEquationsSolver
from .inducing.points import InducingPoints, choose_inducing_points
from .krill import KRILL
from .loop import Progress
from .nystrom_pcg import NystromPCG
from .problem import FullProblem, Solution, System
from .qr import QR
from .sketchysaga import SketchySAGA
from .skotch import Skotch

INDUCING_POINT_SOLVERS = (QR, KRILL, Falkon, NystromPCG, SketchySAGA, EigenPro3, EigenPro4)

__all__ = [
    "INDUCING_POINT_SOLVERS",
    "KRILL",
    "QR",
    "ASkotch",
    "BlockSolver",
    "Budgeted",
    "Cholesky",
    "ConjugateGradients",
    "EigenPro2",
    "EigenPro3",
    "EigenPro4",
    "Falkon",
    "FullProblem",
    "InducingPointProblem",
    "InducingPoints",
    "NormalEquationsSolver",
    "NystromPCG",
    "Progress",
    "SketchySAGA",
    "Skotch",
    "Solution",
    "System",
    "choose_inducing_points",
]

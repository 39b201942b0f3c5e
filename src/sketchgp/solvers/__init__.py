"""Floor 4: solvers, one file a method."""

from .choices import Budgeted
from .full.askotch import ASkotch
from .full.block_solver import BlockSolver
from .full.cholesky import Cholesky
from .full.conjugate_gradients import ConjugateGradients
from .full.eigenpro2 import EigenPro2
from .full.refinement import BlockMethod
from .full.skotch import Skotch
from .inducing.eigenpro import EigenPro3, EigenPro4
from .inducing.falkon import Falkon
from .inducing.krill import KRILL
from .inducing.normal_equations import NormalEquationsSolver
from .inducing.nystrom_pcg import NystromPCG
from .inducing.problem import InducingPointProblem
from .inducing.qr import QR
from .inducing.sketchysaga import SketchySAGA
from .loop import Progress
from .problem import FullProblem, Solution
from .solver import Solver, SystemSolver
from .streams.doubly_stochastic import DoublyStochastic
from .streams.problem import RandomFeatureProblem
from .system import System

FULL_SOLVERS = (ConjugateGradients, Cholesky, ASkotch, Skotch, EigenPro2)
INDUCING_POINT_SOLVERS = (QR, KRILL, Falkon, NystromPCG, SketchySAGA, EigenPro3, EigenPro4)

__all__ = [
    "FULL_SOLVERS",
    "INDUCING_POINT_SOLVERS",
    "KRILL",
    "QR",
    "ASkotch",
    "BlockMethod",
    "BlockSolver",
    "Budgeted",
    "Cholesky",
    "ConjugateGradients",
    "DoublyStochastic",
    "EigenPro2",
    "EigenPro3",
    "EigenPro4",
    "Falkon",
    "FullProblem",
    "InducingPointProblem",
    "NormalEquationsSolver",
    "NystromPCG",
    "Progress",
    "RandomFeatureProblem",
    "SketchySAGA",
    "Skotch",
    "Solution",
    "Solver",
    "System",
    "SystemSolver",
]

"""Floor 4: solvers, one file a method."""

from .cholesky import Cholesky
from .conjugate_gradients import ConjugateGradients, Iterate
from .problem import FullProblem, Solution, System

__all__ = ["Cholesky", "ConjugateGradients", "FullProblem", "Iterate", "Solution", "System"]

"""What the solvers of the inducing-point problem share: the problem, its batches, its normal equations."""

from .normal_equations import NormalEquationsSolver
from .problem import InducingPointProblem
from .solver import InducingPointSolver

__all__ = ["InducingPointProblem", "InducingPointSolver", "NormalEquationsSolver"]

"""What the solvers of the inducing-point problem share: the problem, its batches, its normal equations."""

from .normal_equations import NormalEquationsSolver, NormalSystem
from .problem import InducingPointProblem

__all__ = ["InducingPointProblem", "NormalEquationsSolver", "NormalSystem"]

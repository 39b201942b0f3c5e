"""Solvers of the inducing-point problem."""

from .normal_equations import NormalEquationsSolver
from .problem import InducingPointProblem
from .solver import InducingPointSolver

__all__ = ["InducingPointProblem", "InducingPointSolver", "NormalEquationsSolver"]

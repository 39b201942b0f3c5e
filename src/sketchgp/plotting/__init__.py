"""Pictures, drawn by matplotlib, which is imported when the first is drawn."""

from .models import calibration, hyperparameters, posterior
from .solves import convergence, solvers, spectrum

__all__ = [
    "calibration",
    "convergence",
    "hyperparameters",
    "posterior",
    "solvers",
    "spectrum",
]

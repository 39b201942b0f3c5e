"""Pictures, drawn by matplotlib, which is imported when the first is drawn."""

from .models import calibration, hyperparameters, posterior
from .solves import Curve, convergence, plot_convergence, solvers, spectrum

__all__ = [
    "Curve",
    "calibration",
    "convergence",
    "hyperparameters",
    "plot_convergence",
    "posterior",
    "solvers",
    "spectrum",
]

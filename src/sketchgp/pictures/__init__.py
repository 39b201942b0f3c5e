"""Pictures of solves, fits and predictions: each function draws into axes and returns them."""

from .fits import hyperparameters
from .predictions import calibration, posterior
from .solves import convergence, solvers, spectrum

__all__ = ["calibration", "convergence", "hyperparameters", "posterior", "solvers", "spectrum"]

"""Floor 6: ``log p(y)`` and its gradient, one file for each way to compute it."""

from .base import LogDensity, Solutions, log_density
from .bound import Bound
from .exact import Exact
from .probes import Probes, standard_error
from .samples import Samples
from .vecchia import Vecchia

__all__ = [
    "Bound",
    "Exact",
    "LogDensity",
    "Probes",
    "Samples",
    "Solutions",
    "Vecchia",
    "log_density",
    "standard_error",
]

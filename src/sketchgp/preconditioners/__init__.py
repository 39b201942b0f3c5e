"""Floor 2: preconditioners ``P = F F^T + diag(d)`` and the low-rank approximations behind them, one file a method."""

from .automatic import AutomaticPreconditioner
from .base import Preconditioner, Selection
from .cache import PreconditionerCache
from .eigenpro import NystromEigenPro, TopEigensystem, top_eigensystem
from .full_scale import FullScale
from .low_rank import LowRank, nystrom_factor, pivoted_factor, shifted_cholesky, sketched_factor
from .nystrom import Nystrom, gaussian_nystrom, gaussian_test_matrix, scaled_test_matrix, uniform_nystrom
from .rpcholesky import RPCholesky, rpcholesky
from .smoothness import smoothness

__all__ = [
    "AutomaticPreconditioner",
    "FullScale",
    "LowRank",
    "Nystrom",
    "NystromEigenPro",
    "Preconditioner",
    "PreconditionerCache",
    "RPCholesky",
    "Selection",
    "TopEigensystem",
    "gaussian_nystrom",
    "gaussian_test_matrix",
    "nystrom_factor",
    "pivoted_factor",
    "rpcholesky",
    "scaled_test_matrix",
    "shifted_cholesky",
    "sketched_factor",
    "smoothness",
    "top_eigensystem",
    "uniform_nystrom",
]

"""Floor 2: low-rank approximations ``K ~ F F^T``, one file a method."""

from .factor import LowRank, nystrom_factor, pivoted_factor, shifted_cholesky, sketched_factor
from .greedy import greedy_cholesky
from .nystrom import gaussian_nystrom, gaussian_test_matrix, scaled_test_matrix, uniform_nystrom
from .rpcholesky import rpcholesky
from .smoothness import smoothness
from .top_eigensystem import TopEigensystem, top_eigensystem

__all__ = [
    "LowRank",
    "TopEigensystem",
    "gaussian_nystrom",
    "gaussian_test_matrix",
    "greedy_cholesky",
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

"""Floor 3: preconditioners, one file a method.  All are ``P = F F^T + diag(d)``; they differ in how F is found."""

from .base import Preconditioner, Selection
from .cache import PreconditionerCache
from .eigenpro import NystromEigenPro
from .greedy_cholesky import GreedyCholesky
from .nystrom import Nystrom
from .rpcholesky import RPCholesky

__all__ = [
    "GreedyCholesky",
    "Nystrom",
    "NystromEigenPro",
    "Preconditioner",
    "PreconditionerCache",
    "RPCholesky",
    "Selection",
]

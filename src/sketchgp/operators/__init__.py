"""Floor 1: matrices that are never stored."""

from .kernel_matrix import KernelMatrix
from .low_rank_plus_diagonal import LowRankPlusDiagonal
from .pivoted_plus_diagonal import PivotedPlusDiagonal

__all__ = ["KernelMatrix", "LowRankPlusDiagonal", "PivotedPlusDiagonal"]

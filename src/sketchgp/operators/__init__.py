"""Floor 1: matrices that are never stored."""

from .kernel_matrix import KernelMatrix
from .low_rank_plus_diagonal import LowRankPlusDiagonal
from .moving_factors import MovingPlusDiagonal

__all__ = ["KernelMatrix", "LowRankPlusDiagonal", "MovingPlusDiagonal"]

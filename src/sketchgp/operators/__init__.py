"""Floor 1: matrices that are never stored."""

from .elementwise_product import elementwise_product
from .kernel_matrix import KernelMatrix
from .low_rank_plus_diagonal import LowRankPlusDiagonal

__all__ = ["KernelMatrix", "LowRankPlusDiagonal", "elementwise_product"]

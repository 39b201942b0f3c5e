"""Floor 1: matrices that are never stored."""

from .engines import EnginePreview, preview_engine
from .kernel_matrix import KernelMatrix
from .low_rank_plus_diagonal import LowRankPlusDiagonal
from .moving_factors import MovingPlusDiagonal

__all__ = ["EnginePreview", "KernelMatrix", "LowRankPlusDiagonal", "MovingPlusDiagonal", "preview_engine"]

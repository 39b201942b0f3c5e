"""Floor 5: from solutions to uncertainties."""

from .predictive_variance import LowRankVariance

__all__ = ["LowRankVariance"]

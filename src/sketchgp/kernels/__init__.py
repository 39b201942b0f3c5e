"""Kernels that GPyTorch lacks, in its style."""

from .arc_cosine import ArcCosineKernel
from .laplace import LaplaceKernel

__all__ = ["ArcCosineKernel", "LaplaceKernel"]

"""Kernels that GPyTorch lacks, in its style."""

from .laplace import LaplaceKernel

__all__ = ["LaplaceKernel"]

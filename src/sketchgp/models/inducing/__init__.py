"""Inducing-point models: the covariances of ``InducingPointGP``, as GPyTorch's operators."""

"""Accelerated models: what ``accelerate`` swaps in for an existing GPyTorch model, its likelihood and covariance."""

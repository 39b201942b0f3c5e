"""Hyperparameters of a fit: what is minimised, by which optimiser, and from where."""

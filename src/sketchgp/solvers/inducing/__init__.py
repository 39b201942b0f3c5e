"""Solvers of the inducing-point problem."""

"""Solvers that learn from streams by random features."""

"""Solvers of the full problem, one file a method; what those by blocks of rows share is in ``blockwise``."""

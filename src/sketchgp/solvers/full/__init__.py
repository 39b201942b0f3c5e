"""Solvers of the full problem, one file a method.

Those by blocks of rows share ``block_solver`` (choices), ``refinement`` (how a method runs) and ``blocks``.
"""

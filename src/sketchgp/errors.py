"""Errors and warnings.  Every message says what was expected and names one next thing to try."""

from __future__ import annotations


class SketchGPError(Exception):
    """Base class of the errors raised by sketchgp."""


class InputError(SketchGPError, ValueError):
    """An argument has the wrong type, shape, dtype, device or value."""


class NumericalError(SketchGPError, RuntimeError):
    """A computation met NaN or infinity, or a matrix that is not positive definite."""


class ConvergenceWarning(UserWarning):
    """A linear solve ended before its tolerance was reached.

    The message gives the true relative residual, the tolerance, and one thing to try.
    """

"""Errors and warnings.  Every message says what was expected and names one next thing to try."""

from __future__ import annotations

import sys
import warnings

# Packages whose frames lie between a user's line and a warning of ours, and what calls through in the standard library.
_INSIDE = {"sketchgp", "gpytorch", "linear_operator", "torch", "botorch", "scipy", "contextlib", "functools"}


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


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that led here: of the nearest frame that is of no library in between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)

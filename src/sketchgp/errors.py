"""Errors and warnings.  Every message says what was expected and names one next thing to try.

Warnings, and errors that no single argument is to blame for, end with the name of their row in docs/troubleshooting.md:
``[troubleshooting: nan]``.  ``tests/test_catalogue.py`` holds the two together.
"""

from __future__ import annotations

import sys
import warnings

# Packages whose frames lie between a user's line and a warning of ours, and what calls through in the standard library.
_INSIDE = {"sketchgp", "gpytorch", "linear_operator", "torch", "botorch", "scipy", "contextlib", "functools"}


class SketchGPError(Exception):
    """Base class of the errors raised by sketchgp.

    :param see: name of the row in docs/troubleshooting.md; the message ends with it.
    """

    def __init__(self, message: str = "", *, see: str | None = None) -> None:
        super().__init__(marked(message, see))


class InputError(SketchGPError, ValueError):
    """An argument has the wrong type, shape, dtype, device or value."""


class NumericalError(SketchGPError, RuntimeError):
    """A computation met NaN or infinity, or a matrix that is not positive definite."""


class ConvergenceWarning(UserWarning):
    """A linear solve ended before its tolerance was reached.

    The message gives the true relative residual, the tolerance, and one thing to try.
    """


def marked(message: str, see: str | None) -> str:
    """Return a message that ends with the name of its row in docs/troubleshooting.md."""
    return message if see is None else f"{message} [troubleshooting: {see}]"


def warn(message: str, category: type[Warning] = UserWarning, see: str | None = None) -> None:
    """Warn at the line of the user's that led here: of the nearest frame that is of no library in between.

    :param see: name of the row in docs/troubleshooting.md; the message ends with it.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(marked(message, see), category, stacklevel=level)

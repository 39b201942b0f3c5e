"""The number of points up to which an accelerated model is left to GPyTorch's Cholesky factorization.

Measured on one CPU thread (``benchmarks/threshold.py``): a training step is faster by conjugate gradients from 1,200 to
3,000 points on, a mean from 2,000 to 4,000 and more, later where the noise is small.  GPyTorch's own threshold lies
below that, and is kept, as a user's setting cannot be told from it; BoTorch's lies above, and is lowered.
"""

from __future__ import annotations

import sys

from linear_operator import settings

_GPYTORCHS_POINTS = 800
_IN_PLACE_OF_BOTORCHS = 2000
_BOTORCHS_POINTS = 4096  # ``import botorch`` sets GPyTorch's default to this for the whole process


def cholesky_points() -> int:
    """Return the threshold in force: ``max_cholesky_size`` as the user set it, else the library's own.

    GPyTorch keeps one number, which does not tell who set it.  BoTorch's default is recognised by its value: a user's
    block ``max_cholesky_size(4096)`` is taken for it while BoTorch is imported.
    """
    return _IN_PLACE_OF_BOTORCHS if _botorchs_default() else settings.max_cholesky_size.value()


def threshold_untouched() -> bool:
    """Return True if nobody set ``max_cholesky_size``, so that the library chooses what is factorized."""
    return _botorchs_default() or settings.max_cholesky_size.value() == _GPYTORCHS_POINTS


def why_iterative(n: int) -> str:
    """Return the reason, for the report, why n points are not factorized although GPyTorch's setting says so, or ""."""
    if n > settings.max_cholesky_size.value():
        return ""
    return (
        f"n = {n} is solved for by iterations: models are factorized up to {_IN_PLACE_OF_BOTORCHS} points, not "
        "BoTorch's 4096"
    )


def _botorchs_default() -> bool:
    return "botorch" in sys.modules and settings.max_cholesky_size.value() == _BOTORCHS_POINTS

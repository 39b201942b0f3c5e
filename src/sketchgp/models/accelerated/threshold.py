"""Up to how many points an accelerated model is left to GPyTorch's Cholesky factorization.

Measured on one CPU thread (``benchmarks/threshold.py``): a training step is faster by conjugate gradients from 1,200 to
3,000 points on, a mean from 2,000 to 4,000 and more, later where the noise is small.  GPyTorch's own threshold lies
below that, BoTorch's above; the one is kept, as a user's cannot be told from it, the other is taken down.
"""

from __future__ import annotations

import sys

from linear_operator import settings

_GPYTORCHS_POINTS = 800
_IN_PLACE_OF_BOTORCHS = 2000
_BOTORCHS_POINTS = 4096  # what ``import botorch`` makes of GPyTorch's default, for the whole process


def cholesky_points() -> int:
    """The threshold in force: ``max_cholesky_size`` as the user set it, else the library's own.

    GPyTorch keeps one number, which does not tell who set it.  BoTorch's default is therefore known by its value: a
    block ``max_cholesky_size(4096)`` of the user's is taken for it while BoTorch is imported, and no other one is.
    """
    return _IN_PLACE_OF_BOTORCHS if _botorchs_default() else settings.max_cholesky_size.value()


def threshold_untouched() -> bool:
    """Whether nobody set ``max_cholesky_size``: what is to be factorized is then the library's own business."""
    return _botorchs_default() or settings.max_cholesky_size.value() == _GPYTORCHS_POINTS


def why_iterative(n: int) -> str:
    """For the report: why n points are not factorized although GPyTorch's setting says so; "" where it does not."""
    if n > settings.max_cholesky_size.value():
        return ""
    return (
        f"n = {n} is solved for by iterations: models are factorized up to {_IN_PLACE_OF_BOTORCHS} points, not "
        "BoTorch's 4096"
    )


def _botorchs_default() -> bool:
    return "botorch" in sys.modules and settings.max_cholesky_size.value() == _BOTORCHS_POINTS

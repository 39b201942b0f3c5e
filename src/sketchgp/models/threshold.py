"""Up to how many points an accelerated model is left to GPyTorch's Cholesky factorization.

Measured on one CPU thread (Matern kernel, 4 and 8 features, noise 0.05 and 0.001, float32 and float64; seconds of a
training step, of a mean, and of a mean with 50 variances): up to 800 points the factorization was never slower by more
than the noise of the clock; a training step is faster by conjugate gradients from 800 to 1,900 points on, a mean from
1,900 to 2,900 on.  At 3,000 points a training step took 0.6 to 1.2 s against 2.2 to 4.8 s.  The threshold is the lower
end, since training is what costs, and is GPyTorch's own default.
"""

from __future__ import annotations

import sys

from linear_operator import settings

CHOLESKY_POINTS = 800
_BOTORCHS_POINTS = 4096  # what ``import botorch`` makes of GPyTorch's default, for the whole process


def cholesky_points() -> int:
    """The threshold in force: ``max_cholesky_size`` as the user set it, else the library's own.

    GPyTorch keeps one number, which does not tell who set it.  BoTorch's default is therefore known by its value: a
    block ``max_cholesky_size(4096)`` of the user's is taken for it while BoTorch is imported, and no other one is.
    """
    return CHOLESKY_POINTS if _botorchs_default() else settings.max_cholesky_size.value()


def why_iterative(n: int) -> str:
    """For the report: why n points are not factorized although GPyTorch's setting says so; "" where it does not."""
    if n > settings.max_cholesky_size.value():
        return ""
    return (
        f"n = {n} is solved for by iterations: models are factorized up to {CHOLESKY_POINTS} points, not BoTorch's 4096"
    )


def _botorchs_default() -> bool:
    return "botorch" in sys.modules and settings.max_cholesky_size.value() == _BOTORCHS_POINTS

"""Distance of an iterate from the solution, in the norm that bounds predictions.

For the matrix ``M = T^T T + level Kzz`` of the normal equations and an iterate w with the error ``e = w* - w``,

    ``|k(x, z) e| <= (k(x, z) M^-1 k(z, x))^1/2 ||e||_M  <=  sd(x) ||e||_M / level^1/2``

for every x, since ``level k(x, z) M^-1 k(z, x)`` is a part of the posterior variance ``sd(x)^2`` of the subset of
regressors with that noise (and of DTC).  So ``||e||_M / level^1/2`` is the largest distance, in posterior deviations,
of any prediction from the one that the solution makes; it also bounds the root of the sum of squares of the distances
at the training points, over the deviation of the noise.  The residual of the normal equations bounds neither: what it
misses is multiplied by the inverse of M, whose least eigenvalues are those of Kzz.

``||e||_M`` is not known, but what is still to come can be extrapolated from what came.  Errors of ill-conditioned
problems fall as a power of the number of iterations rather than by a constant factor; over steps that grow by a factor
both are a geometric series at most, so that is what is summed here.  An estimate: directions in which nothing has
happened yet are not seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..energy import ratio, tail

_MOVED = 0.1  # posterior deviations by rounding that no solve may call converged
_SHARE = 1e-3  # of the predictions, in deviations of the prior, if that is more


def moved_by_rounding(
    inverse_t: Callable[[Tensor], Tensor], value: Tensor, kzz: Tensor, level: float
) -> tuple[Tensor, Tensor]:
    """Return how far rounding of Kzz moves any prediction, and whether that is too far, ``(t,)`` each.

    The first is in posterior deviations.  Kzz cannot be told from ``Kzz + shift I`` with the unit roundoff times its
    trace for the shift.  To first order that changes w by ``d = level shift M^-1 w``, whose norm ``||d||_M /
    level^1/2`` bounds the change of predictions.  Only where Kzz has eigenvalues near the shift that matter for the
    targets, such as for a row far from all others, is it more than nothing.  Where predictions are many deviations of
    the prior, a small share of them is not too far.

    :param inverse_t: ``v -> R^-T v`` for a root ``R^T R`` of M, or of a matrix near it.
    :param value: w ``(m, t)`` float64, of an orthogonal factorization: solved from the normal equations it holds
        rounding errors along the null space of Kzz, which predict nothing and would count here.
    :param kzz: ``(m, m)``.
    """
    shift = torch.finfo(value.dtype).eps * kzz.trace()
    moved = inverse_t(value * (level * shift)).norm(dim=0) / level**0.5
    sizes = (kzz @ value).abs().amax(dim=0) / kzz.diagonal().amax().sqrt()
    return moved, moved > (_SHARE * sizes).clamp(min=_MOVED)


def remaining_change(changes: list[Tensor]) -> Tensor | None:
    """Estimate ``||e||_M`` from the changes between iterates, norms ``(t,)``, at times that grow by a constant factor.

    The two last ratios are looked at, and the larger counts; None for fewer than three changes.
    """
    if len(changes) < 3:
        return None
    first, second, last = changes[-3:]
    return tail(last, torch.maximum(ratio(last, second), ratio(second, first)))

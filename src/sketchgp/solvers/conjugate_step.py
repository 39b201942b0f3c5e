"""One iteration of conjugate gradients on several columns, each of which stops by itself.

References: Hestenes and Stiefel (1952); preconditioned form as Algorithm 3 of arXiv:2304.12465.  A column that has
ended, or whose numbers can no longer be divided by, is frozen: its steps are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def descend(
    value: Tensor, r: Tensor, p: Tensor, product: Tensor, curvature: Tensor, energy: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``value += alpha p`` and ``r -= alpha A p`` with ``alpha = energy / curvature``, in place.

    :param value: iterate, ``r`` its residual, ``p`` the direction, ``product`` = A p: ``(..., n, t)`` each.
    :param curvature: ``p^T A p``, and ``energy`` = ``r^T P^-1 r``, ``(..., t)``.
    :param active: columns that have not ended, ``(..., t)``.
    :returns: alpha, 0 for frozen columns, and which columns are not frozen, ``(..., t)``; and whether all curvatures
        are finite, ``()``: to be looked at before anything is believed (:data:`sketchgp.solvers.loop.NAN`).
    """
    usable = active & (curvature > 0) & (energy > 0)
    alpha = torch.where(usable, energy / torch.where(usable, curvature, 1), 0)
    value.addcmul_(alpha.unsqueeze(-2), p)
    r.addcmul_(alpha.unsqueeze(-2), product, value=-1)
    return alpha, usable, torch.isfinite(curvature).all()


def turn(p: Tensor, z: Tensor, following: Tensor, energy: Tensor, usable: Tensor) -> Tensor:
    """``p = z + beta p`` with ``beta = following / energy``, in place; of frozen columns ``p = z``.

    :param z: ``P^-1 r`` after the step, ``(..., n, t)``.
    :param following: ``r^T z``, and ``energy`` what it was before the step; ``usable`` as :func:`descend` gave it.
    :returns: beta ``(..., t)``.
    """
    beta = torch.where(usable & (following > 0), following / torch.where(usable, energy, 1), 0)
    p.mul_(beta.unsqueeze(-2)).add_(z)
    return beta

"""What the EigenPro solvers compute from the top eigensystem of a subsample: how many directions, how large a step.

Reference: Ma and Belkin, "Kernel machines that adapt to GPUs for effective large batch training" (arXiv:1806.06144),
section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..lowrank import TopEigensystem

_TINY = torch.finfo(torch.float64).tiny


def step_size(beta: float, lam: float, batch: int) -> float:
    """The step of a batch: ``1 / beta`` below the critical size ``beta / lam``, ``2 / (beta + batch lam)`` above.

    :param beta: the largest diagonal entry of the preconditioned kernel.
    :param lam: the top eigenvalue of its covariance operator, that is of its matrix over the number of points.
    """
    return 1 / beta if batch < beta / max(lam, _TINY) else 2 / (beta + batch * lam)


def directions(
    top: TopEigensystem, products: Tensor, diagonal: Tensor, most: int, automatic: bool, batch: int
) -> tuple[int, float, float]:
    """The number of directions to slow down, and beta and lam of the kernel that is preconditioned so.

    With q directions the preconditioned kernel has the diagonal
    ``k(x, x) - sum_i<=q (1 / l_i - l_{q+1} / l_i^2) (e_i . K(Xs, x))^2``.

    :param products: ``E^T K(Xs, x)`` (s, p) for p points x.
    :param diagonal: ``k(x, x)`` (p,).
    :param most: the most directions; that many where not ``automatic``, and else the least for which ``batch`` is
        critical.
    """
    size, values = len(top.indices), top.values.unsqueeze(1)
    most = min(most, len(top.values))
    tails = torch.cat([top.values[1:], top.values[-1:]])[:most]  # l_{q+1}, q = 1, 2, ...
    first, second = ((products.square() / values**power)[:most].cumsum(dim=0) for power in (1, 2))
    beta = (diagonal - first + tails.unsqueeze(1) * second).amax(dim=1).clamp(min=_TINY)
    lam = tails / size
    critical = beta / lam.clamp(min=_TINY)
    rank = most
    if automatic and bool((critical >= batch).any()):
        rank = int((critical >= batch).nonzero()[0]) + 1
    return rank, float(beta[rank - 1]), float(lam[rank - 1])


def scaled_vectors(top: TopEigensystem, rank: int, ridge: float = 0.0) -> Tensor:
    """``F = E sqrt(l^-1 - l_{q+1} l^-2)``, ``(s, q)``; with a ridge, ``F = E sqrt(l^-1 (l - l_{q+1}) / (l + ridge))``.

    So ``1 - F^T K(Xs, Xs) F`` is ``(l_{q+1} + ridge) / (l + ridge)``: all directions end up equally fast.
    """
    tail = top.values[min(rank, len(top.values) - 1)]
    kept = top.values[:rank]
    return top.vectors[:, :rank] * ((kept - tail) / (kept * (kept + ridge))).clamp(min=0).sqrt()

"""Directions and step sizes of the EigenPro solvers, from the top eigensystem of a subsample.

Reference: Ma and Belkin, "Kernel machines that adapt to GPUs for effective large batch training" (arXiv:1806.06144),
section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..preconditioners import TopEigensystem

_TINY = torch.finfo(torch.float64).tiny


def step_size(beta: float, lam: float, batch: int) -> float:
    """The step of a batch: ``1 / beta`` below the critical size ``beta / lam``, ``2 / (beta + batch lam)`` above.

    :param beta: the largest diagonal entry of the preconditioned kernel.
    :param lam: the top eigenvalue of its covariance operator, that is of its matrix over the number of points.
    """
    return 1 / beta if batch < beta / max(lam, _TINY) else 2 / (beta + batch * lam)


def preconditioned(top: TopEigensystem, products: Tensor, diagonal: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """beta and lam ``(most,)`` of the kernel that is preconditioned by 1, 2, ... directions.

    With q of them it has the diagonal ``k(x, x) - sum_i<=q (1 / l_i - l_{q+1} / l_i^2) (e_i . K(Xs, x))^2``.

    :param products: ``E^T K(Xs, x)`` (most or more, p) for p points x.
    :param diagonal: ``k(x, x)`` (p,).
    :param most: at most as many as there are eigenvalues.
    """
    size, values = len(top.indices), top.values[:most].unsqueeze(1)
    tails = torch.cat([top.values[1:], top.values[-1:]])[:most]  # l_{q+1}, q = 1, 2, ...
    first, second = ((products[:most].square() / values**power).cumsum(dim=0) for power in (1, 2))
    beta = (diagonal - first + tails.unsqueeze(1) * second).amax(dim=1).clamp(min=_TINY)
    return beta, tails / size


def directions(
    top: TopEigensystem, products: Tensor, diagonal: Tensor, most: int, automatic: bool, batch: int
) -> tuple[int, float, float]:
    """The number of directions to slow down, and beta and lam of the kernel that is preconditioned so.

    :param most: the most directions; that many where not ``automatic``, and else the least for which ``batch`` is
        critical.

    The other parameters are those of :func:`preconditioned`.
    """
    most = min(most, len(top.values))
    beta, lam = preconditioned(top, products, diagonal, most)
    critical = beta / lam.clamp(min=_TINY)
    rank = most
    if automatic and bool((critical >= batch).any()):
        rank = int((critical >= batch).nonzero()[0]) + 1
    return rank, float(beta[rank - 1]), float(lam[rank - 1])


def most_directions(top: TopEigensystem, products: Tensor, diagonal: Tensor, most: int, critical: float) -> int:
    """The most directions for which the critical batch ``beta / lam`` is at most ``critical``; at least 1.

    Each epoch of n points with the step ``1 / beta`` shrinks the errors in the directions that are slowed down by
    ``exp(-n lam / beta)``, and those in the others the more, the more there are of the former, since beta falls.

    The other parameters are those of :func:`preconditioned`.
    """
    beta, lam = preconditioned(top, products, diagonal, min(most, len(top.values)))
    fast = (beta <= critical * lam).nonzero()
    return int(fast[-1]) + 1 if len(fast) else 1


def scales(top: TopEigensystem, rank: int, ridge: float = 0.0) -> Tensor:
    """``sqrt(l^-1 - l_{q+1} l^-2)``, ``(q,)``; with a ridge, ``sqrt(l^-1 (l - l_{q+1}) / (l + ridge))``.

    With ``F = E diag(scales)``, ``1 - F^T K(Xs, Xs) F`` is ``(l_{q+1} + ridge) / (l + ridge)``: all directions end up
    equally fast.
    """
    tail = top.values[min(rank, len(top.values) - 1)]
    kept = top.values[:rank]
    return ((kept - tail) / (kept * (kept + ridge))).clamp(min=0).sqrt()


def scaled_vectors(top: TopEigensystem, rank: int) -> Tensor:
    """``F = E diag(scales)``, ``(s, q)``."""
    return top.vectors[:, :rank] * scales(top, rank)

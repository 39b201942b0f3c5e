"""The smoothness constant of a preconditioned matrix, which sets the step of the methods that use it.

Reference: Rathore, Frangella, Udell (arXiv:2407.10070), Algorithm 3 (get_L): randomized powering.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..devices import queued


@torch.no_grad()
def smoothness(
    product: Callable[[Tensor], Tensor],
    inverse: Callable[[Tensor], Tensor],
    n: int,
    *,
    generator: torch.Generator,
    device: torch.device,
    iterations: int = 10,
) -> Tensor:
    """Estimate the largest eigenvalue of ``P^-1/2 H P^-1/2``, from below, by power iteration on ``P^-1 H``.

    :param product: ``v -> H v`` for ``(n, 1)`` float64, H symmetric positive definite.
    :param inverse: ``v -> P^-1 v``, P symmetric positive definite.
    :param generator: CPU generator of the random start.
    :returns: the last Rayleigh quotient ``v^T H P^-1 H v / v^T H v``, ``()``, at most the eigenvalue; 0 where H v = 0.
    """
    v = queued(torch.randn(n, 1, dtype=torch.float64, generator=generator), device)
    estimate = v.new_zeros(())
    going_on = torch.ones((), dtype=torch.bool, device=device)
    for _ in range(iterations):
        image = product(v)
        following = inverse(image)
        energy = (v * image).sum()
        going_on = going_on & (energy > 0)  # on the device, which would be waited for twice an iteration otherwise
        estimate = torch.where(going_on, (following * image).sum() / energy, estimate)  # v^T H P^-1 H v / v^T H v
        v = following / following.norm()
    return estimate

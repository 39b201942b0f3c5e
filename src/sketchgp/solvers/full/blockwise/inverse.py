"""The inverse of one block ``K_bb + noise_b``: exactly by Cholesky, or by a Nystrom approximation with a step size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....errors import NumericalError
from ....lowrank import gaussian_nystrom, smoothness
from ....operators import LowRankPlusDiagonal
from ....operators.access import Access
from ....operators.substitution import cholesky_solve
from ....space import whole


@dataclass
class BlockInverse:
    """``apply`` is ``g -> P^-1 g`` for ``(b, t)``, P close to the block A; ``smoothness`` the largest eigenvalue of
    ``P^-1 A``: a step ``P^-1 g / smoothness`` never increases the error in the norm of A.

    :ivar failed: ``()``, whether A is not positive definite, so that nothing of it is to be believed: whoever takes the
        inverse looks, when it looks at anything (:func:`refuse`); None where that is known.
    """

    apply: Callable[[Tensor], Tensor]
    smoothness: float | Tensor
    failed: Tensor | None = None

    def checked(self) -> BlockInverse:
        """:raises NumericalError: if the block is not positive definite."""
        refuse(self.failed is not None and bool(self.failed))
        return self


def refuse(failed: bool) -> None:
    """:raises NumericalError: if a block is not positive definite."""
    if failed:
        raise NumericalError(
            "A block of the kernel matrix plus noise is not positive definite in float64; raise the noise.",
            see="not-definite",
        )


def block_inverse(block: Tensor, noise: Tensor, rank: int | None, generator: torch.Generator) -> BlockInverse:
    """The inverse of ``block + diag(noise)``.

    With ``rank=None`` it is exact: a Cholesky factorization, ``b^3 / 3`` operations.  Else P is the rank-r Nystrom
    approximation of the block plus ``noise + rho``, where rho is its smallest eigenvalue, for ``r b^2`` operations
    (arXiv:2407.10070, section 3.2 and Algorithm 2); the smoothness is estimated by powering (Algorithm 3).  With
    ``rank=0`` P is the identity.

    :param block: ``K_bb`` (b, b) in float64; overwritten.
    :param noise: ``(b,)``.
    :raises NumericalError: for a Nystrom approximation of a block that is not positive definite; an exact inverse has
        ``failed`` then.
    """
    if rank is None or rank >= len(block):
        block.diagonal().add_(noise)
        root, info = torch.linalg.cholesky_ex(block)
        return BlockInverse(lambda g: cholesky_solve(g, root), 1.0, info > 0)
    apply: Callable[[Tensor], Tensor] = _identity
    if rank:
        factor = whole(gaussian_nystrom(Access.stored(block), rank, generator=generator).factor)
        least = torch.linalg.eigvalsh(factor.mT @ factor)[0].clamp(min=0)
        apply = LowRankPlusDiagonal(factor, noise + least).apply_inverse

    def product(v: Tensor) -> Tensor:
        return torch.addcmul(block @ v, noise.unsqueeze(-1), v)

    largest = smoothness(product, apply, len(block), generator=generator, device=block.device)
    return BlockInverse(apply, largest.clamp(min=torch.finfo(torch.float64).tiny))


def _identity(g: Tensor) -> Tensor:
    return g

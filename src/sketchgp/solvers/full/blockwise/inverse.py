"""The inverse of a block ``K_bb + noise_b``: exact by Cholesky, or a Nystrom approximation with a step size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....errors import NumericalError
from ....operators import LowRankPlusDiagonal
from ....operators.access import Access
from ....operators.substitution import cholesky_solve
from ....preconditioners import gaussian_nystrom, smoothness
from ....space import SharedSpace, whole
from ...system import System


@dataclass
class BlockInverse:
    """The inverse of P, which is close to a block A: a step ``P^-1 g / smoothness`` never increases the error.

    :ivar apply: ``g -> P^-1 g`` for ``(b, t)``.
    :ivar smoothness: the largest eigenvalue of ``P^-1 A``.
    :ivar failed: ``()``, whether A is not positive definite, to be looked at (:func:`refuse`) before the inverse is
        believed; None where it is known that it is.
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
    """Return the inverse of ``block + diag(noise)``.

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


def nystrom_rank(block_size: int, rank: int | None) -> int:
    """Return the rank of Nystrom approximations; 0 where blocks are solved exactly, as those of rank b are."""
    return 0 if rank is None or rank >= block_size else rank


class SharedInverses:
    """Exact inverses of blocks of b rows, of the next P blocks one on each of P ranks.

    A step then takes ``b^3 / (3 P)`` operations for its block, and to apply the inverse its rank sends ``b t`` numbers.
    The last blocks of an order, where fewer than P are left, are factorized by some ranks while the others wait.
    """

    def __init__(self, system: System, space: SharedSpace) -> None:
        self.system, self.shards = system, space.shards
        self.ahead: list[tuple[Tensor, int]] = []  # rows of blocks, and the rank that has the inverse
        self.own: BlockInverse | None = None

    def inverse(self, rows: Tensor, following: list[Tensor], generator: torch.Generator) -> BlockInverse:
        """Return the inverse of the block of ``rows`` ``(b,)``, plus noise; a collective, as applying it is.

        :param following: the rows of the next blocks, if they are known.
        :param generator: that of the solve, of which exact inverses draw nothing.
        :raises NumericalError: if a block plus noise is not positive definite.
        """
        if not self.ahead or not torch.equal(self.ahead[0][0], rows):
            self._factorize([rows, *following], generator)
        _, owner = self.ahead.pop(0)
        self.system.entries += len(rows) ** 2
        return BlockInverse(lambda g: self._apply(g, owner), 1.0)

    def _factorize(self, blocks: list[Tensor], generator: torch.Generator) -> None:
        self.ahead, self.own = [(rows, rank) for rank, rows in enumerate(blocks[: self.shards.count])], None
        entries = self.system.entries  # counted by all ranks, once a block is used
        if self.shards.rank < len(self.ahead):
            rows = self.ahead[self.shards.rank][0]
            block = self.system.square_block(rows)
            self.own = block_inverse(block, self.system.diagonal[rows, 0], None, generator).checked()
        self.system.entries = entries

    def _apply(self, g: Tensor, owner: int) -> Tensor:
        """Apply the inverse straight after g was summed, and so without words between ranks.

        If the owner of the inverse fails it first sends NaN; the other ranks learn of it with the next words.
        """
        if owner != self.shards.rank:
            return self.shards.same(g, owner, words=False)
        assert self.own is not None
        try:
            d = self.own.apply(g)
        except BaseException:
            self.shards.same(torch.full_like(g, torch.nan), owner, words=False)
            raise
        return self.shards.same(d, owner, words=False)

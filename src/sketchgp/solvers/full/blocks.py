"""Blocks of rows, the inverse of one, and the methods that invert them, which Skotch and ASkotch share.

Blocks are drawn uniformly, as parts of a random partition that is drawn anew every pass, or from a fixed partition.
The inverse of a block ``K_bb + noise_b`` is exact by Cholesky, or a Nystrom approximation with a step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...checks import count, settle, word
from ...devices import sent
from ...errors import InputError, NumericalError
from ...operators import LowRankPlusDiagonal
from ...operators.access import Access
from ...operators.substitution import cholesky_solve
from ...preconditioners import gaussian_nystrom, smoothness
from ...random_streams import generator
from ...space import SharedSpace, whole
from ..system import System
from .block_solver import BlockSolver
from .refinement import BlockMethod

SAMPLINGS = ("shuffled", "uniform")


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


def exact_inverse(block: Tensor, noise: Tensor) -> BlockInverse:
    """Return the inverse of ``block + diag(noise)`` by a Cholesky factorization: ``b^3 / 3`` operations.

    :param block: ``K_bb`` (b, b) in float64; overwritten.
    """
    block.diagonal().add_(noise)
    root, info = torch.linalg.cholesky_ex(block)
    return BlockInverse(lambda g: cholesky_solve(g, root), 1.0, info > 0)


def block_inverse(block: Tensor, noise: Tensor, rank: int | None, generator: torch.Generator) -> BlockInverse:
    """Return the inverse of ``block + diag(noise)``.

    With ``rank=None`` it is exact.  Else P is the rank-r Nystrom approximation of the block plus ``noise + rho``, where
    rho is its smallest eigenvalue, for ``r b^2`` operations (arXiv:2407.10070, section 3.2 and Algorithm 2); the
    smoothness is estimated by powering (Algorithm 3).  With ``rank=0`` P is the identity.

    :param block: ``K_bb`` (b, b) in float64; overwritten.
    :param noise: ``(b,)``.
    :raises NumericalError: for a Nystrom approximation of a block that is not positive definite; an exact inverse has
        ``failed`` then.
    """
    if rank is None or rank >= len(block):
        return exact_inverse(block, noise)
    apply: Callable[[Tensor], Tensor] = torch.nn.Identity()
    if rank:
        factor = whole(gaussian_nystrom(Access(block), rank, generator=generator).factor)
        least = torch.linalg.eigvalsh(factor.mT @ factor)[0].clamp(min=0)
        apply = LowRankPlusDiagonal(factor, noise + least).apply_inverse

    def product(v: Tensor) -> Tensor:
        return torch.addcmul(block @ v, noise.unsqueeze(-1), v)

    largest = smoothness(product, apply, len(block), generator=generator, device=block.device)
    return BlockInverse(apply, largest.clamp(min=torch.finfo(torch.float64).tiny))


class SharedInverses:
    """Exact inverses of blocks of b rows, of the next P blocks one on each of P ranks.

    A step then takes ``b^3 / (3 P)`` operations for its block, and to apply the inverse its rank sends ``b t`` numbers.
    The last blocks of an order, where fewer than P are left, are factorized by some ranks while the others wait.
    """

    def __init__(self, system: System, space: SharedSpace) -> None:
        self.system, self.shards = system, space.shards
        self.ahead: list[tuple[Tensor, int]] = []  # rows of blocks, and the rank that has the inverse
        self.own: BlockInverse | None = None

    def inverse(self, rows: Tensor, following: list[Tensor]) -> BlockInverse:
        """Return the inverse of the block of ``rows`` ``(b,)``, plus noise; a collective, as applying it is.

        :param following: the rows of the next blocks, if they are known.
        :raises NumericalError: if a block plus noise is not positive definite.
        """
        if not self.ahead or not torch.equal(self.ahead[0][0], rows):
            self._factorize([rows, *following])
        _, owner = self.ahead.pop(0)
        self.system.entries += len(rows) ** 2
        return BlockInverse(lambda g: self._apply(g, owner), 1.0)

    def _factorize(self, blocks: list[Tensor]) -> None:
        self.ahead, self.own = [(rows, rank) for rank, rows in enumerate(blocks[: self.shards.count])], None
        entries = self.system.entries  # counted by all ranks, once a block is used
        if self.shards.rank < len(self.ahead):
            rows = self.ahead[self.shards.rank][0]
            block = self.system.square_block(rows)
            self.own = exact_inverse(block, self.system.diagonal[rows, 0]).checked()
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


def next_block(
    n: int, size: int, rest: Tensor, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the next part of a random order of all rows, and the rows that are left of that order.

    :param rest: ``(m,)`` the rows not yet visited in this pass, on the CPU.
    """
    if not len(rest):
        rest = torch.randperm(n, generator=generator)
    parts = -(-len(rest) // size)  # parts of nearly equal size, so that no pass ends in a tiny one
    size = -(-len(rest) // parts)
    return sent(rest[:size], device), rest[size:]


def draw_rows(n: int, size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw ``size`` distinct numbers below n, by O(n) work for blocks of a fair share of all rows, else O(size)."""
    if size * 8 > n:
        return sent(torch.randperm(n, generator=generator)[:size], device)
    drawn = torch.randint(n, (size,), generator=generator).unique()
    while len(drawn) < size:
        more = torch.randint(n, (size - len(drawn),), generator=generator)
        drawn = torch.cat([drawn, more]).unique()
    return sent(drawn[torch.randperm(len(drawn), generator=generator)], device)


class Partition:
    """A fixed random partition of the rows into blocks, with the smoothness constant of each (arXiv:2407.10070,
    Algorithm 1, first loop).

    The inverse of a block is computed anew at every visit, from a seed of its own, so that memory stays O(n + b^2).

    :param rank: of the Nystrom approximations; None solves blocks exactly.
    """

    def __init__(self, system: System, block_size: int, rank: int | None, seed: int) -> None:
        self.system, self.rank, self.seed = system, rank, seed
        self.count = -(-system.n // block_size)

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Draw the partition and find the smoothness constants, unless ``tensors`` has them."""
        if "order" in tensors:
            return
        tensors["order"] = torch.randperm(self.system.n, generator=generator(self.seed, "fixed partition"))
        inverses = (self._inverse(number, self._rows(number, tensors)) for number in range(self.count))
        constants = [torch.as_tensor(one.checked().smoothness, dtype=torch.float64).cpu() for one in inverses]
        tensors["smoothness"] = torch.stack(constants)

    def draw(self, tensors: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, BlockInverse, float]:
        """Draw a block with probability p proportional to sqrt(smoothness); return rows, inverse and 1 / p."""
        weights = tensors["smoothness"].sqrt().cpu()
        number = int(torch.multinomial(weights, 1, generator=generator))
        return *self.block(number, tensors), float(weights.sum() / weights[number])

    def block(self, number: int, tensors: dict[str, Tensor]) -> tuple[Tensor, BlockInverse]:
        """Return rows and inverse of one block."""
        rows = self._rows(number, tensors)
        return rows, self._inverse(number, rows)

    def _rows(self, number: int, tensors: dict[str, Tensor]) -> Tensor:
        count = len(tensors["smoothness"]) if "smoothness" in tensors else self.count  # of a solve that was resumed
        return sent(tensors["order"].cpu().tensor_split(count)[number], self.system.device)

    def _inverse(self, number: int, rows: Tensor) -> BlockInverse:
        stream = generator(self.seed, f"inverse of block {number} of a fixed partition")
        return block_inverse(self.system.square_block(rows), self.system.diagonal[rows, 0], self.rank, stream)


@dataclass(frozen=True, kw_only=True)
class InvertedBlockSolver(BlockSolver):
    """Base class of Skotch and ASkotch: blocks are solved exactly, or with Nystrom approximations of rank ``rank``."""

    rank: int | None = None
    version: int = 2
    sampling: Literal["shuffled", "uniform"] = "shuffled"

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, count, "rank", least=0, optional=True)
        settle(self, count, "version", most=2)
        settle(self, word, "sampling", allowed=SAMPLINGS)
        if self.version == 1 and self.sampling != SAMPLINGS[0]:
            raise InputError(f"{self.name}: sampling is of version 2; version 1 has its own, a fixed partition.")


class InvertedBlocks(BlockMethod):
    """A method whose steps invert a block each: d, called w, and the other points that ``positions`` names begin at 0.

    :param choices: with ``rank``, ``version`` (1 for a fixed partition, 2 for fresh blocks), ``sampling`` and ``seed``.
    """

    def __init__(self, choices: Any, system: System, block_size: int) -> None:
        super().__init__(choices, system, block_size)
        exact = choices.rank is None or choices.rank >= block_size
        self.rank = 0 if exact else choices.rank
        self.partition = Partition(system, block_size, choices.rank, choices.seed) if choices.version == 1 else None
        if self.partition is not None:
            self.name += " v1"
        self.shared = SharedInverses(system, system.space) if isinstance(system.space, SharedSpace) else None
        self.failed: Tensor | None = None  # whether the block of the last step was not positive definite

    def _following(self, generator: torch.Generator) -> list[Tensor]:
        """Return the rows of the blocks left of a pass, which take nothing from the generator."""
        rest, blocks = self.tensors["rest"].cpu(), []
        while len(rest):
            rows, rest = next_block(self.system.n, self.block_size, rest, generator, self.system.device)
            blocks.append(rows)
        return blocks

    def begin(self, width: int) -> None:
        super().begin(width)
        if self.partition is None:
            self.tensors["rest"] = torch.empty(0, dtype=torch.long)
        else:
            self.partition.prepare(self.tensors)

    def describe(self) -> str:
        used = f"Nystrom rank {self.rank}" if self.rank else "exact"
        how = "not preconditioned" if self.choices.rank == 0 else used
        return f"{super().describe()}, {how}"

    def draw(self, generator: torch.Generator) -> tuple[Tensor, BlockInverse, float]:
        """Return rows ``(b,)`` of the next block, its inverse, and one over the probability of drawing it."""
        if self.partition is None:
            rows, inverse = self._fresh(generator)
            odds = self.system.n / len(rows)
        else:
            rows, inverse, odds = self.partition.draw(self.tensors, generator)
        self.failed = inverse.failed
        return rows, inverse, odds

    def asks(self) -> list[Tensor]:
        return [] if self.failed is None else [self.failed]

    def answer(self, answers: list[float]) -> None:
        """:raises NumericalError: if the block was not positive definite."""
        refuse(self.failed is not None and bool(answers[0]))

    def _fresh(self, generator: torch.Generator) -> tuple[Tensor, BlockInverse]:
        system, size, rank = self.system, self.block_size, self.choices.rank
        if self.choices.sampling == "uniform":
            rows = draw_rows(system.n, size, generator, system.device)
        else:
            rest = self.tensors["rest"].cpu()
            rows, self.tensors["rest"] = next_block(system.n, size, rest, generator, system.device)
            if self.shared is not None and not self.rank and rank != 0:
                return rows, self.shared.inverse(rows, self._following(generator))
        return rows, block_inverse(system.square_block(rows), system.diagonal[rows, 0], rank, generator)

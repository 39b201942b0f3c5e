"""What the solvers share that go through ``(K + noise) W = Y`` by blocks of rows: Skotch, ASkotch, EigenPro 2.

``system`` evaluates rows and blocks, ``blocks`` draws them, ``inverse`` inverts one; ``solver`` holds the choices that
all of these solvers have, ``method`` is what each of them adds, ``refinement`` what it is under the loop of all
solvers.
"""

from .blocks import (
    SAMPLINGS,
    InvertedBlocks,
    Partition,
    next_block,
    nystrom_rank,
    settle_blocks,
)
from .inverse import BlockInverse, block_inverse
from .method import BlockMethod
from .solver import BlockSolver
from .system import BlockSystem, automatic_block_size

__all__ = [
    "SAMPLINGS",
    "BlockInverse",
    "BlockMethod",
    "BlockSolver",
    "BlockSystem",
    "InvertedBlocks",
    "Partition",
    "automatic_block_size",
    "block_inverse",
    "next_block",
    "nystrom_rank",
    "settle_blocks",
]

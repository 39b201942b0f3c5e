"""Solvers that go through ``(K + noise) W = Y`` by blocks of rows: Skotch, ASkotch, EigenPro 2.

``solver`` holds the choices that they share, ``method`` is what each of them adds, ``refinement`` runs it under the
loop of all solvers; ``blocks`` draws blocks and ``inverse`` inverts one.
"""

from .blocks import InvertedBlocks, Partition, next_block, settle_blocks
from .inverse import BlockInverse, block_inverse
from .method import BlockMethod
from .solver import BlockSolver

__all__ = [
    "BlockInverse",
    "BlockMethod",
    "BlockSolver",
    "InvertedBlocks",
    "Partition",
    "block_inverse",
    "next_block",
    "settle_blocks",
]

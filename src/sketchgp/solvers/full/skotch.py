"""Skotch: block coordinate descent with inverted or Nystrom-preconditioned blocks, without acceleration.

Reference: Rathore, Frangella, Udell, "Have ASkotch: fast methods for large-scale, memory-constrained kernel ridge
regression" (arXiv:2407.10070), Algorithm 4 (version 1).  With blocks solved exactly it is randomized block
Gauss-Seidel (Tu et al., arXiv:1602.05310).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..system import System
from .blocks import InvertedBlocks, InvertedBlockSolver
from .refinement import BlockMethod


@dataclass(frozen=True, kw_only=True)
class Skotch(InvertedBlockSolver):
    """Block coordinate descent on ``(K + noise) W = Y``: ``n b`` entries of K and O(n + b^2) memory a step.

    A step takes a block of b rows, evaluates their residual g and moves their weights by ``P^-1 g / L``, where P is
    the block itself (``rank=None``; L = 1) or its rank-r Nystrom approximation, and L the smoothness found by
    powering.  The error in the norm of ``K + noise`` never grows.  :class:`ASkotch` needs fewer steps nearly always;
    choose this one to compare with.

    :param rank: of the Nystrom approximation of a block; None solves blocks exactly, 0 takes no preconditioner.
    :param version: 1 as in the paper, a fixed partition whose blocks are drawn with probability proportional to the
        square root of their smoothness; 2 draws blocks afresh.
    :param sampling: of version 2: ``"shuffled"``, parts of a random partition that is drawn anew every pass, or
        ``"uniform"``, independent blocks.

    The other parameters are those of :class:`sketchgp.solvers.BlockSolver`: ``tol``, ``max_passes``,
    ``max_seconds``, ``block_size``, ``seed``, ``checkpoint``, ``every``.
    """

    def method(self, system: System, block_size: int) -> BlockMethod:
        return _Skotch(self, system, block_size)


class _Skotch(InvertedBlocks):
    """``w_b -= P^-1 ((A w)_b - r_b) / L``."""

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        w = self.tensors["w"]
        rows, inverse, _ = self.draw(generator)
        here, own = self.system.space.held(rows)
        g = self.system.residual(rows, w, r)
        w[own] -= (inverse.apply(g) / inverse.smoothness)[here]
        return rows, g

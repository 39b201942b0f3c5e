"""ASkotch: accelerated block coordinate descent with inverted or Nystrom-preconditioned blocks.

References: Rathore, Frangella, Udell, "Have ASkotch: fast methods for large-scale, memory-constrained kernel ridge
regression" (arXiv:2407.10070), Algorithm 1 (version 1); version 2 is the form of the authors' later releases:
Nesterov's method on random blocks as in Tu et al., "Breaking locality accelerates block Gauss-Seidel"
(arXiv:1701.03863), Algorithm 1.

The momentum that needs no strong convexity constant is that same method with a constant that falls from step to step;
:class:`_Fresh` derives it.  It grows at the pace of Fercoq and Richtarik, "Accelerated, parallel and proximal
coordinate descent" (arXiv:1312.5799), and is not their method, which has no pull of v towards y.  The restart is that
of O'Donoghue and Candes, "Adaptive restart for accelerated gradient schemes" (arXiv:1204.3982), section 3.2, from
sampled rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checks import number, settle
from ..system import System
from .blocks import InvertedBlocks, InvertedBlockSolver
from .refinement import BlockMethod

_OLDEST = 2.0  # passes after a restart until the momentum has grown to 1/2 of what it can be
_OTHER_MU = "Leave mu to mu=None, or choose a larger one; else another seed, a larger block_size, or float64 data."
_JUDGED = 0.5  # passes over which it is judged whether the momentum still helps


@dataclass(frozen=True, kw_only=True)
class ASkotch(InvertedBlockSolver):
    """Accelerated block coordinate descent on ``(K + noise) W = Y``: ``n b`` entries of K and O(n + b^2) memory a step.

    A step takes a block of b rows, evaluates their residual at an extrapolated point, and solves for the block's
    weights: exactly (``rank=None``), or with a rank-r Nystrom approximation of the block and a step size found by
    powering.  Choose it where n is too large for conjugate gradients: from some 10^5 points on, or where the n x rank
    factor of a preconditioner no longer fits.

    Version 2 (the default) draws blocks afresh and extrapolates as if strong convexity were ``mu``.  With ``mu=None``
    nothing has to be known: momentum grows with the passes since the last restart, and starts again from nothing
    whenever the sampled residuals point against it (a heuristic: no rate is proved for it).  Version 1 is the paper's
    algorithm: a fixed partition, blocks drawn with probability proportional to the square root of their smoothness, and
    ``mu`` = noise (the least of them).

    :param rank: of the Nystrom approximation of a block; None solves blocks exactly, 0 takes no preconditioner.
    :param version: 2 or 1.
    :param mu: strong convexity constant of the preconditioned problem, for both versions; None as above.
    :param sampling: of version 2: ``"shuffled"``, parts of a random partition that is drawn anew every pass, or
        ``"uniform"``, independent blocks as in the authors' code.

    The other parameters are those of :class:`sketchgp.solvers.BlockSolver`: ``tol``, ``max_passes``,
    ``max_seconds``, ``block_size``, ``seed``, ``checkpoint``, ``every``.
    """

    mu: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, number, "mu", above=0, finite=True, optional=True)

    def method(self, system: System, block_size: int) -> BlockMethod:
        method = (_Fresh if self.version == 2 else _Fixed)(self, system, block_size)
        if self.mu is not None:
            method.advice = _OTHER_MU
        return method


class _Fresh(InvertedBlocks):
    """Version 2: at ``y = alpha v + (1 - alpha) w``, ``d = P^-1 (A y - r)_b / L``; ``w = y - d`` and
    ``v = beta v + (1 - beta) y - gamma d``, with ``nu = n / b``, ``beta = 1 - sqrt(mu / nu)``,
    ``gamma = 1 / sqrt(mu nu)``, ``alpha = 1 / (1 + gamma nu)``.

    **Why mu falls as it does.**  Let blocks be solved exactly and drawn independently, H be ``(A_bb)^-1`` in its block
    and 0 elsewhere, ``G = E[H]``, nu such that ``E[H G^-1 H] <= nu G``, ``|e|^2 = e^T G^-1 e``, ``f(e) = e^T A e``, and
    e the errors.  From H A H = H, the convexity of the squared norm and ``2 (y - w)^T A e_y >= f(e_y) - f(e_w)``:

        ``E[|e_v'|^2 + f(e_w') / mu] <= beta (|e_v|^2 + f(e_w) / mu) + (1 - beta) (|e_y|^2 - f(e_y) / mu)``.

    While mu is at most the true constant ``mu* = min f(e) / |e|^2`` the last term is not positive: with a fixed mu the
    left side falls by beta a step, and mu may fall from one step to the next by as much as beta without the potential
    growing.  The most that allows is ``theta_k^2 = (1 - theta_k / nu) theta_(k-1)^2`` for ``theta = sqrt(mu nu)``,
    which is Fercoq and Richtarik's recursion; ``theta = 2 / (2 + p)`` after p passes falls by a little less.  So then
    ``E f(e_w) <= mu V`` for the potential V at the first such step: ``O(1 / p^2)``.

    **What is not proved.**  At first mu is above mu*, and the last term adds up to ``(1 - beta) |e_y|^2`` in directions
    flatter than mu: bounded iterates would give ``O(log(p) / p^2)``, and nothing bounds them.  nu = n / b is right for
    one fixed partition; for blocks drawn afresh nu is larger (6.6 to 14 where n / b = 4, with eight points), and parts
    of a shuffled order are not independent.  With a small fixed mu it does diverge on ill-conditioned problems.
    With restarts, which nothing is proved for either, it has not, on any of the problems of the tests and benchmarks.
    """

    positions = ("w", "v")

    def begin(self, width: int) -> None:
        super().begin(width)
        self.numbers |= {"rows": 0, "judged_rows": 0}
        self.tensors["against"] = self.system.diagonal.new_zeros(())

    def evaluation_point(self) -> Tensor:
        return torch.lerp(self.tensors["w"], self.tensors["v"], self._constants()[2])

    def _constants(self) -> tuple[float, float, float]:
        """beta, gamma, alpha."""
        nu = self.system.n / self.block_size
        if self.choices.mu is not None:
            mu = min(self.choices.mu, nu, 1 / nu)
        else:
            age = self.numbers["rows"] / self.system.n
            mu = (_OLDEST / (_OLDEST + age)) ** 2 / nu
        gamma = 1 / math.sqrt(mu * nu)
        return 1 - math.sqrt(mu / nu), gamma, 1 / (1 + gamma * nu)

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tensors = self.tensors
        rows, inverse, _ = self.draw(generator)
        beta, gamma, _ = self._constants()
        w, v, y = tensors["w"], tensors["v"], self.evaluation_point()
        here, own = self.system.space.held(rows)
        g, momentum = self.system.residual_and(rows, y, r, v[own] - w[own])
        d = inverse.apply(g) / inverse.smoothness
        against = (g * momentum).sum()
        v.lerp_(y, 1 - beta)  # which leaves rows as they are where v is y: they have no slope
        v[own] -= gamma * d[here]
        y[own] -= d[here]
        tensors["w"] = y
        if self.choices.mu is None:  # the slope of the objective along the momentum, over half a pass of sampled rows
            self.numbers["rows"] += len(rows)
            self.numbers["judged_rows"] += len(rows)
            tensors["against"] += against
        return rows, g

    @property
    def _due(self) -> bool:
        return self.choices.mu is None and self.numbers["judged_rows"] >= _JUDGED * self.system.n

    def asks(self) -> list[Tensor]:
        return [*super().asks(), *([self.tensors["against"]] if self._due else [])]

    def answer(self, answers: list[float]) -> None:
        """Restart the momentum where going along it raises the objective."""
        super().answer(answers)
        if not self._due:
            return
        if answers[-1] > 0 and self.numbers["rows"] > self.system.n:
            self.tensors["v"] = self.tensors["w"].clone()
            self.numbers["rows"] = 0
        self.numbers["judged_rows"] = 0
        self.tensors["against"].zero_()


class _Fixed(InvertedBlocks):
    """Version 1, the paper's Algorithm 1 with beta = 0: a fixed partition, blocks drawn with probability
    ``p_b = sqrt(L_b) / S``; ``x = tau z + (1 - tau) w``, ``d = P_b^-1 (A x - r)_b``, ``w = x - d / L_b``,
    ``z = (z + gamma mu x - gamma d / p_b) / (1 + gamma mu)``.
    """

    positions = ("w", "z")

    def begin(self, width: int) -> None:
        super().begin(width)
        mu = float(self.system.noise.min()) if self.choices.mu is None else self.choices.mu
        total = float(self.tensors["smoothness"].sqrt().sum())
        tau = 2 / (1 + math.sqrt(4 * total**2 / mu + 1))
        self.numbers |= {"mu": mu, "tau": tau, "gamma": 1 / (tau * total**2)}

    def evaluation_point(self) -> Tensor:
        return torch.lerp(self.tensors["w"], self.tensors["z"], self.numbers["tau"])

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, z = self.evaluation_point(), self.tensors["z"]
        mu, gamma = self.numbers["mu"], self.numbers["gamma"]
        rows, inverse, odds = self.draw(generator)
        here, own = self.system.space.held(rows)
        g = self.system.residual(rows, x, r)
        d = inverse.apply(g)
        z.add_(x, alpha=gamma * mu).div_(1 + gamma * mu)
        z[own] -= ((gamma / (1 + gamma * mu) * odds) * d)[here]
        x[own] -= (d / inverse.smoothness)[here]
        self.tensors["w"] = x
        return rows, g

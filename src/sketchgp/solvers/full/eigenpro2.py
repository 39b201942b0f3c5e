"""EigenPro 2: preconditioned stochastic gradients with a step size and batch size that are computed.

References: Ma and Belkin, "Kernel machines that adapt to GPUs for effective large batch training" (arXiv:1806.06144),
sections 3 and 4 (EigenPro 2); "Diving into the shallows" (arXiv:1703.10622; EigenPro 1).  Those interpolate.  Here the
noise is part of the kernel, ``k'(x, z) = k(x, z) + noise [x is z]``: interpolating with k' is solving
``(K + noise) W = Y``, so the iteration has that solution as its fixed point, batch by batch, and no noise floor.

EigenPro 3 and 4 take their directions and step sizes from here, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import count, settle
from ...errors import InputError, NumericalError
from ...preconditioners import TopEigensystem, top_eigensystem
from ...random_streams import generator, rows_beside
from ..choices import cut
from ..system import System
from .block_solver import BlockSolver
from .blocks import next_block
from .refinement import BlockMethod

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, kw_only=True)
class EigenPro2(BlockSolver):
    """Stochastic gradient descent in function space, its top q directions slowed down: ``(n + s) m`` entries of K a
    step of m rows, O(n + s q) memory.

    With eigenpairs ``(l_i, e_i)`` of ``K'(Xs, Xs)`` on s points drawn uniformly, ``F = E sqrt(l^-1 - l_{q+1} l^-2)``: a
    batch with residual g changes its weights by ``-step g`` and those of Xs by ``step F F^T K'(Xs, Xm) g``.  With
    ``beta = max_x k'(x, x) - |F^T K'(Xs, x)|^2`` over the subsample and as many other points (on the subsample alone it
    comes out too small, and steps diverge) and ``lam = l_{q+1} / s``, the step is ``1 / beta``
    for batches below the critical size ``beta / lam`` and ``2 / (beta + m lam)`` above.  (The paper has m - 1 for m: a
    step that need not contract for the batch of all points.)
    A step that turns out to diverge is halved, with a note in the report.

    Choose it to compare with; :class:`ASkotch` solves the same problem in fewer passes wherever we measured.  EigenPro
    1, the exact eigensystem, is ``subsample_size=n``.

    :param rank: q, the directions that are slowed down, cut to n, with a note in the report, like
        ``subsample_size``; None takes the least for which the batch is critical, at
        most a quarter of the subsample.
    :param subsample_size: s; None is ``10 sqrt(n)``, at least 500, at most n and 10,000.
    :param block_size: m, the batch; None is as of :class:`sketchgp.solvers.BlockSolver`.

    The other parameters are those of :class:`sketchgp.solvers.BlockSolver`: ``tol``, ``max_passes``,
    ``max_seconds``, ``seed``, ``checkpoint``, ``every``.
    """

    rank: int | None = None
    subsample_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settle_subsample(self)

    def notes(self, n: int) -> list[str]:
        return cut("rank", self.rank, n, "points") + cut("subsample_size", self.subsample_size, n, "points")

    def method(self, system: System, block_size: int) -> BlockMethod:
        return _EigenPro2(self, system, block_size)


class _EigenPro2(BlockMethod):
    """``w_m -= step g`` and ``w_s += step F F^T K'(Xs, Xm) g`` with ``g = (K' w)_m - r_m``."""

    growth = 2.0
    advice = "Choose a larger subsample_size, or a smaller block_size."

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.tensors["vectors"].shape[1]

    @property
    def details(self) -> dict[str, float | str]:
        return {**super().details, "subsample_size": len(self.tensors["subsample"]), "step": self.numbers["step"]}

    def describe(self) -> str:
        return f"batches of {self.block_size}, {self.rank} of {len(self.tensors['subsample'])} directions"

    def begin(self, width: int) -> None:
        if "subsample" not in self.tensors:
            self._prepare()
        super().begin(width)
        self.tensors["rest"] = torch.empty(0, dtype=torch.long)

    def _prepare(self) -> None:
        system, n = self.system, self.system.n
        wanted = self.choices.subsample_size or min(10_000, max(500, math.ceil(10 * math.sqrt(n))))
        size = min(n, max(wanted, self.choices.rank or 0))
        stream = generator(self.choices.seed, "EigenPro 2: subsample and fresh rows")
        system.entries += size**2
        top = top_eigensystem(system.access, size, size, generator=stream, noise=system.diagonal[:, 0])
        require_directions(top)
        fresh = rows_beside(top.indices, n, size, stream)
        inside = top.vectors.mT * top.values.unsqueeze(1)  # E^T K'(Xs, Xs)
        products = torch.cat([inside, top.vectors.mT @ system.block(top.indices, fresh)], dim=1)
        points = torch.cat([top.indices, fresh])
        diagonal = system.access.diagonal()[points] + system.noise.max()  # of points outside the sample too
        rank, beta, lam = directions(top, products, diagonal, self.choices.rank, self.block_size)
        self.tensors["subsample"], self.tensors["vectors"] = top.indices, top.vectors[:, :rank] * scales(top, rank)
        self.numbers["step"] = step_size(beta, lam, self.block_size)

    def shrink_step(self) -> None:
        self.numbers["step"] /= 2

    def step(self, r: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        system, tensors, step = self.system, self.tensors, self.numbers["step"]
        size, some, w = self.block_size, tensors["subsample"], tensors["w"]
        rows, tensors["rest"] = next_block(system.n, size, tensors["rest"].cpu(), generator, system.device)
        g = system.residual(rows, w, r)
        correction = tensors["vectors"] @ (tensors["vectors"].mT @ system.cross(some, rows, g))
        here, own = system.space.held(rows)
        w[own] -= step * g[here]
        here, own = system.space.held(some)
        w[own] += step * correction[here]
        return rows, g


# --- directions and step sizes of all EigenPro solvers, from the top eigensystem of a subsample ------------------


def settle_subsample(choices: Any) -> None:
    """Check the ``rank`` and ``subsample_size`` of a choice of method.

    :raises InputError: for counts that are not positive, or a rank above the subsample's size.
    """
    settle(choices, count, "rank", "subsample_size", optional=True)
    rank, size = choices.rank, choices.subsample_size
    if rank is not None and size is not None and rank > size:
        raise InputError(f"{choices.name}(rank={rank}) expects a subsample_size of as many, got {size}.")


def require_directions(top: TopEigensystem) -> None:
    """:raises NumericalError: where the subsample has no positive eigenvalue."""
    if not len(top.values):
        raise NumericalError(
            "The kernel matrix of the subsample holds NaN, or is zero; check inputs and kernel.", see="nan"
        )


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
    top: TopEigensystem, products: Tensor, diagonal: Tensor, rank: int | None, batch: int
) -> tuple[int, float, float]:
    """Return the number of directions to slow down, and beta and lam of the kernel that is preconditioned so.

    :param rank: the number; None for the least for which ``batch`` is critical, at most a quarter of the subsample.

    The other parameters are those of :func:`preconditioned`.
    """
    most = min(rank or max(1, len(top.indices) // 4), len(top.values))
    beta, lam = preconditioned(top, products, diagonal, most)
    enough = (beta / lam.clamp(min=_TINY) >= batch).nonzero()
    rank = int(enough[0]) + 1 if rank is None and len(enough) else most
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

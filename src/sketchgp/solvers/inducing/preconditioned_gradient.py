"""Steps of EigenPro 3 and 4: stochastic gradients in function space, the top directions slowed down.

References: Abedsoltan, Belkin, Pandit, "Toward large kernel models" (EigenPro 3), and Abedsoltan, Ma, Pandit, Belkin,
"Fast training of large kernel models with delayed projections" (EigenPro 4).  The objective is
``sum_i (f(x_i) - y_i)^2 + noise ||f||^2`` over f in the span of the inducing points Z, and half its gradient
``K(., X)(f(X) - y) + noise f``.  With eigenpairs ``(l_i, e_i)`` of ``K(Xs, Xs)`` and
``F = E sqrt(l^-1 - l_{q+1} l^-2)`` the papers precondition by ``P f = f - K(., Xs) F F^T f(Xs)``.

That does not commute with the projection on the span, so it moves the fixed point: away from the least squares
solution (EigenPro 3, Lemma 6), and from that of the ridge.  Here the functions ``K(., Xs) F`` are projected first,
once: ``P f = f - K(., Z) N N^T f(Z)`` with ``Kzz N = K(Z, Xs) F``.  That P commutes, the fixed point is that of the
objective, however well N is known, and a step evaluates no K(Xs, .).  Where Xs are some of the inducing points
themselves, N is F in their rows, and nothing has to be solved.  The papers' P is there to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...operators import KernelMatrix
from ...operators.access import Access
from ...operators.centre import Centre
from ...operators.tall import TallMatrix
from ...preconditioners import top_eigensystem
from ...random_streams import generator
from ...row_sources import RowSource
from ..full.eigenpro2 import directions, most_directions, require_directions, scales, step_size
from .problem import InducingPointProblem
from .projection import Projection

_TINY = torch.finfo(torch.float64).tiny
_SHRINKING = 2.0  # the exponent by which an epoch shrinks errors in the directions that are slowed down, at least
_TOL = 1e-3  # of the projected directions: the less accurate, the smaller the step
_SAMPLE = 64  # points of a batch that its centre is found from, at every step


@dataclass
class Directions:
    """``P f = f - K(., C) G G^T f(C)``, and what the step rule needs to know of it.

    :ivar points: C ``(c, d)``; None for the inducing points at ``rows``, all or an index ``(c,)``.
    :ivar factor: G ``(c, q)``.
    :ivar at_points: ``K(C, C) G`` ``(c, q)``; None where C are inducing points: then it is a part of ``at_inducing``.
    :ivar at_inducing: ``K(Z, C) G`` ``(m, q)``.
    :ivar beta: the largest diagonal entry of the preconditioned kernel.
    :ivar lam: the top eigenvalue of its covariance operator.
    :ivar entries: of the kernel, evaluated to find all this, from ``sampled`` points.
    """

    points: Tensor | None
    factor: Tensor
    at_points: Tensor | None
    at_inducing: Tensor
    beta: float
    lam: float
    rows: Tensor | slice
    entries: int
    sampled: int

    def step(self, batch: int, ridge: float = 0.0) -> float:
        """The step of a batch of so many points, where the objective has ``ridge`` = noise / n for each of them.

        The eigenvalues are then from ridge to lam + ridge: 2 over their sum is best.
        """
        return step_size(self.beta, self.lam + 2 * ridge, batch)


@torch.no_grad()
def find_directions(
    problem: InducingPointProblem,
    projection: Projection,
    subsample: Tensor,
    fresh: Tensor,
    rank: int | None,
    batch: int,
    commuting: bool,
    rows: Tensor | None = None,
) -> Directions:
    """Find P from a subsample, and beta and lam on fresh points, too, where both are larger than on the subsample.

    :param subsample: ``(s, d)``; :param fresh: ``(p, d)`` other points, p may be 0.
    :param rank: q; None for as many as still converge in few epochs (without ``commuting``: the least for which
        ``batch`` is critical), at most a quarter of s.
    :param commuting: project the functions, instead of the papers' P.
    :param rows: ``(s,)`` where the subsample are inducing points: their indices.  The projection is then not used.
    """
    size, kernel = len(subsample), problem.kernel
    access = Access(KernelMatrix.of(kernel, subsample, engine="tiled").detach())
    top = top_eigensystem(access, size, size, generator=generator(0, "order of a subsample"))
    require_directions(top)
    subsample = subsample[top.indices]
    points = torch.cat([subsample, fresh])
    all_points = Access(KernelMatrix.of(kernel, points, engine="tiled").detach())
    diagonal, most = all_points.diagonal(), min(rank or max(1, size // 4), len(top.values))
    factor = top.vectors[:, :most]
    at_inducing = TallMatrix(kernel, problem.inducing_points, subsample).matmul(factor)
    projected = commuting and rows is None
    if not projected:
        images = TallMatrix(kernel, points, subsample, accurate=True).matmul(factor)
    else:
        factor, at_inducing = projection.solve(at_inducing, tol=_TOL)
        images = TallMatrix(kernel, points, problem.inducing_points).matmul(factor)
    n = max(len(points), problem.expected_rows)
    if rank is not None:
        q = most
    elif commuting:
        q = most_directions(top, images.mT, diagonal, most, n / _SHRINKING)
    else:  # whose fixed point every further direction moves
        q = directions(top, images.mT, diagonal, None, batch)[0]
    scale = scales(top, q, 0.0 if problem.streamed else problem.level * size / n)
    factor, at_inducing, images = (part[:, :q] * scale for part in (factor, at_inducing, images))
    beta = float((diagonal - images.square().sum(dim=1)).max().clamp(min=_TINY))
    judged = torch.arange(size, len(points)) if len(fresh) else torch.arange(size)
    judged = judged.to(points.device)
    block = all_points.block(judged, judged) - images[judged] @ images[judged].mT
    lam = float(torch.linalg.eigvalsh(block)[-1].clamp(min=_TINY)) / len(judged)
    entries = size * (size + len(problem.inducing_points)) + len(judged) ** 2
    entries += len(points) * (len(problem.inducing_points) if projected else size)
    if commuting:
        chosen = slice(None) if rows is None else rows[top.indices]
        return Directions(None, factor, None, at_inducing, beta, lam, chosen, entries, size)
    return Directions(subsample, factor, images[:size], at_inducing, beta, lam, slice(None), entries, size)


class Model:
    """``f = K(., Z) base + `` what was added since the last projection, which :meth:`project` brings into the span.

    All weights are float64; kernel entries are evaluated in the dtype of the inputs, products summed in float64.

    :param base: ``(m, t)`` weights of the inducing points.
    :cvar changed: attributes that steps change.
    """

    changed = ("base", "correction", "h", "h_points", "points", "weights", "entries")

    def __init__(
        self, problem: InducingPointProblem, directions: Directions, projection: Projection, base: Tensor
    ) -> None:
        self.problem, self.directions, self.projection = problem, directions, projection
        self.base = base.clone()
        self.known = isinstance(problem.x, Tensor | RowSource)  # whether all points are there
        x = problem.x if isinstance(problem.x, Tensor | RowSource) else problem.inducing_points
        self.tall = TallMatrix(problem.kernel, x, problem.inducing_points)  # that of all points, where they are there
        self.centre = None if directions.points is None else self.tall.centre_of(directions.points)
        self.entries = directions.entries  # of the kernel, evaluated so far, but for projections
        self._forget()

    def _forget(self) -> None:
        directions, columns = self.directions, self.base.shape[1]
        self.points, self.weights = list[Tensor](), list[Tensor]()  # of the batches, parts that belong together
        self.correction = self.base.new_zeros(len(directions.factor), columns)  # weights of C
        self.h = torch.zeros_like(self.base)  # recent part and correction, at Z
        self.h_points = None if directions.points is None else torch.zeros_like(self.correction)  # the same at C

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, step: float, decay: float, last: bool) -> Tensor:
        """``f -= step P (K(., x) g) + decay P f`` with ``g = f(x) - y``; returns g ``(b, t)``.

        :param y: ``(b, t)`` float64.
        :param last: whether a projection follows.
        """
        directions = self.directions
        tall = self._tall(x, self.problem.inducing_points, self.tall.centre)
        own = tall.space.span
        g = -y[own]
        for points, weights in zip(self.points, self.weights, strict=True):
            g += self._tall(x, points, self.tall.centre_of(points, _SAMPLE)).own_matmul(weights)
        weights = self.base
        if directions.points is None:
            weights = weights.clone()
            weights[directions.rows] += self.correction
        else:
            to_points = self._tall(x, directions.points, self.centre)
            g += to_points.own_matmul(self.correction)
        gradient = torch.zeros_like(self.base)
        for span, tile in tall.own_tiles():
            rows = slice(span.start - own.start, span.stop - own.start)
            g[rows] += tile @ weights
            gradient.addmm_(tile.mT, g[rows])
        g, gradient = tall.joined(g, gradient)
        at_points = gradient[directions.rows] if directions.points is None else to_points.t_matmul(g)
        slowed = step * (directions.factor.mT @ at_points)
        if decay:
            h_points = self.h[directions.rows] if self.h_points is None else self.h_points
            slowed += decay * (directions.at_inducing.mT @ self.base + directions.factor.mT @ h_points)
            self._shrink(1 - decay)
        self.correction += directions.factor @ slowed
        self.h.sub_(gradient, alpha=step).add_(directions.at_inducing @ slowed)
        if self.h_points is not None and directions.at_points is not None:
            self.h_points.sub_(at_points, alpha=step).add_(directions.at_points @ slowed)
        others = sum(len(points) for points in self.points) + (0 if directions.points is None else len(at_points))
        self.entries += len(x) * (len(self.base) + others)
        if not last:
            self._remember(x.clone(), g * -step)  # a batch of a stream is the user's
        return g

    def _tall(self, x: Tensor, points: Tensor, centre: Centre | None) -> TallMatrix:
        """``k(x, points)``, of a batch."""
        return self.tall.at(x, points, self.known, centre)

    def _remember(self, x: Tensor, weights: Tensor) -> None:
        """Keep a batch; parts of equal size become one, so that few are kept and each point is copied a few times."""
        self.points.append(x)
        self.weights.append(weights)
        while len(self.points) > 1 and len(self.points[-1]) >= len(self.points[-2]):
            for parts in (self.points, self.weights):
                parts[-2:] = [torch.cat(parts[-2:])]

    def _shrink(self, factor: float) -> None:
        for part in (self.base, self.correction, self.h, self.h_points, *self.weights):
            if part is not None:
                part.mul_(factor)

    @torch.no_grad()
    def project(self) -> None:
        """Replace f by its projection on the span of the inducing points."""
        self.base += self.projection.solve(self.h)[0]
        self._forget()

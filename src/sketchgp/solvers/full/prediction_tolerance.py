"""Tolerances that make predictions right: ``tol="posterior"``, by an estimate, and ``tol="certified"``, by a bound.

While conjugate gradients go on, the mean at some points is followed: an iteration changes ``c^T w`` by ``alpha c^T p``,
which costs n operations a point.  Between two iterations the residual has changed by ``A (w' - w)``, and the mean by
``c^T (w' - w)``: so much error of the mean comes with so much residual.  That ratio varies little, from iteration to
iteration and between what an iteration took and what rounding leaves, so that the residual that is left, times the
largest ratio of late, says how far the mean is still off.  It is an estimate: of some points, of one solve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...operators import LowRankPlusDiagonal
from ...operators.access import Access, diagonal
from ...random_streams import generator
from ...space import Space
from ..certificate import Certificate
from ..system import System

POINTS = 32  # that are followed
_NEIGHBOURS = 256  # training points that a variance is made of
_DOUBLINGS = 3.0  # of their number that its fall is extrapolated over, at the most
LEVEL = 0.01  # posterior deviations of an observation
FACTORIZED = 0.1  # the same where a factorization in float64 has made the value, which nothing makes better
CEILING = 1e-3  # of the residual that an estimate is content with: it is of some points only
_FALL = 3.0  # of the residual over the window that a ratio is of
_RECENT = 0.25  # of the iterations: the largest ratio of these counts
SAFETY = 2.0  # of an estimate by points that are followed: there are more points than those
_FIRST = 3  # iterations before it is believed
_MARGIN = 0.7  # of the bound that the recurrence aims at; it knows nothing of rounding


class RowErrors:
    """Errors of predictions at all training points, by the residual.

    The mean there is ``K w``, off by ``K e = r - D e`` where ``A e = r``.  ``P^-1 r`` stands for e where P has the
    directions; where it lacks a point, whose row of K is then much like one of the identity, the error is r's share
    ``g / (g + D)``, g what P leaves of the point's prior variance.  Points alone, of which few samples of points have
    any, are where r is large.

    :param system: of one matrix or a batch; :param preconditioner: P, or None.
    :param space: of the vectors.
    """

    def __init__(self, system: System, preconditioner: LowRankPlusDiagonal | None, space: Space) -> None:
        self.space, noise = space, system.noise.to(torch.float64).unsqueeze(-1)
        left = diagonal(system.operator).to(torch.float64).clamp(min=0)
        if preconditioner is not None:
            left = preconditioner.unexplained(left)
        left = left.unsqueeze(-1)
        self.noise, self.known = space.own(noise), preconditioner is not None
        self.share = space.own(left / (left + noise))
        self.unit = self.noise.sqrt()

    def worst(self, r: Tensor, z: Tensor) -> Tensor:
        """Bound the error at any training point, in deviations of an observation, ``(..., t)``.

        :param r: residuals, vectors of the space; :param z: ``P^-1 r``.
        """
        errors = self.share * r.abs()
        if self.known:
            errors = torch.maximum(errors, (r - self.noise * z).abs())
        return self.space.largest(errors / self.unit)


class CertifiedTolerance:
    """The tolerance of each column's residual for ``"certified"``, by its bound, worked out as the solve goes on.

    :param norm: ``(..., t)`` of the right-hand sides.
    :cvar changed: attributes that a checkpoint must bring back.
    :ivar tolerance: ``(..., t)``, of the relative residual; 0 while nothing is known.
    :ivar margin: of the bound that the recurrence is to come to; less where the true one was still too large then.
    """

    changed: tuple[str, ...] = ("tolerance", "margin")

    def __init__(self, norm: Tensor, certificate: Certificate) -> None:
        self.norm, self.certificate = norm, certificate
        self.tolerance, self.margin = torch.zeros_like(norm), _MARGIN

    def begin(self, residual: Tensor) -> None:
        """Begin a solve.

        :param residual: relative, ``(..., t)``, of the start.
        """

    def advance(
        self, alpha: Tensor, p: Tensor, s: Tensor, z: Tensor, energy: Tensor, index: Tensor, residual: Tensor
    ) -> None:
        """Set the tolerance after an iteration from w to ``w + alpha p`` in the columns ``index``.

        :param s: the residual after it; :param z: ``P^-1 s``; :param energy: ``s^T z``.
        :param residual: relative, ``(..., t)``, after it.
        """
        by_noise = self.certificate.space.total((s.square() / self.certificate.noise).sum(dim=-2))
        squared = by_noise if self.certificate.factor is None else torch.minimum(energy, by_noise)
        bound = squared.clamp(min=torch.finfo(squared.dtype).tiny).sqrt() * self.certificate.scale
        self.tolerance = self.tolerance.clone()
        self.tolerance[..., index] = self.margin * LEVEL * residual[..., index] / bound

    def deviations(self, residual: Tensor, bound: Tensor) -> Tensor:
        """Return how far any prediction is off at the most, ``(..., t)``.

        :param residual: true and relative; :param bound: :attr:`sketchgp.SolveReport.error_bound`; ``(..., t)`` each.
        """
        return bound * self.certificate.scale if self.certificate.known else torch.full_like(bound, torch.inf)

    def met(self, residual: Tensor, bound: Tensor) -> Tensor:
        """Return which columns are where they are to come to."""
        return self.deviations(residual, bound) <= LEVEL

    def facts(self, residual: Tensor, bound: Tensor) -> dict[str, Any]:
        """Return fields for the report."""
        return {"tol": LEVEL, "judged": "bound"}


class PosteriorTolerance(CertifiedTolerance):
    """The tolerance of each column's residual for ``"posterior"``, by predictions that are followed.

    :param weights: what is followed, k(X, x) over the deviation at x, p vectors of the certificate's space.
    :param rows: errors at training points.
    :ivar errors: of the value, in deviations, where a factorization of the matrix has told them.
    """

    changed = ("tolerance", "values", "residuals", "ratios")

    def __init__(self, norm: Tensor, certificate: Certificate, weights: Tensor, rows: RowErrors) -> None:
        super().__init__(norm, certificate)
        self.weights, self.rows = weights, rows
        self.errors: Tensor | None = None
        self.values = norm.new_zeros(0, weights.shape[-1], norm.numel())  # after every iteration, and 0 before
        self.residuals = self.ratios = norm.new_zeros(0, norm.numel())  # as many

    def begin(self, residual: Tensor) -> None:
        self.values = self.values.new_zeros(1, self.weights.shape[-1], self.norm.numel())
        self.residuals = (residual * self.norm).reshape(1, -1)
        self.ratios = torch.zeros_like(self.residuals)

    def advance(
        self, alpha: Tensor, p: Tensor, s: Tensor, z: Tensor, energy: Tensor, index: Tensor, residual: Tensor
    ) -> None:
        if len(self.values) and self.values.shape[1] == self.weights.shape[-1]:
            self._follow(alpha, p, index, residual)
        else:  # resumed from a solve that followed nothing, or other points
            self.begin(residual)
        ratio = torch.zeros_like(self.norm)
        of_norm = residual[..., index] * self.norm[..., index]
        ratio[..., index] = self.rows.worst(s, z) / of_norm.clamp(min=torch.finfo(of_norm.dtype).tiny)
        self.ratios[-1] = torch.maximum(self.ratios[-1], ratio.reshape(-1) / SAFETY)
        if len(self.values) > _FIRST:
            self.tolerance = (LEVEL / (self._ratio() * self.norm)).clamp(max=CEILING)

    def _follow(self, alpha: Tensor, p: Tensor, index: Tensor, residual: Tensor) -> None:
        """Add the predictions after an iteration, and the largest ratio of their change to the residual."""
        step = self.norm.new_zeros(*self.norm.shape[:-1], self.weights.shape[-1], self.norm.shape[-1])
        step[..., index] = self.certificate.space.total(self.weights.mT @ p) * alpha.unsqueeze(-2)
        now, k = (residual * self.norm).reshape(-1), len(self.values)
        value, ratio = self.values[-1] + step.movedim(-2, 0).flatten(1), torch.zeros_like(now)
        fallen = self.residuals >= _FALL * now
        since = torch.where(fallen, torch.arange(k, device=now.device).unsqueeze(-1), 0).amax(dim=0)
        columns = torch.arange(len(now), device=now.device)
        for start in (since, (2 * since - k).clamp(min=0)):
            moved = (value - self.values[start, :, columns].mT).abs().amax(dim=0)
            of_residual = (self.residuals[start, columns].square() + now.square()).sqrt()
            ratio = torch.maximum(ratio, (moved / of_residual).nan_to_num(0.0))
        self.values, self.residuals, self.ratios = (
            torch.cat([before, last.unsqueeze(0)])
            for before, last in ((self.values, value), (self.residuals, now), (self.ratios, ratio))
        )

    def _ratio(self) -> Tensor:
        """Ratio of deviations to residual, times a safety factor."""
        recent = self.ratios[-1 - int(_RECENT * (len(self.ratios) - 1)) :].amax(dim=0)
        return (SAFETY * recent).clamp(min=torch.finfo(recent.dtype).tiny).reshape(self.norm.shape)

    def deviations(self, residual: Tensor, bound: Tensor) -> Tensor:
        """Return how far any prediction is off, ``(..., t)``: as estimated, or as is certain if that is less."""
        certain = super().deviations(residual, bound)
        if self.errors is not None:
            return torch.minimum(certain, self.errors)
        return torch.minimum(certain, self._ratio() * residual * self.norm) if len(self.values) > 1 else certain

    def met(self, residual: Tensor, bound: Tensor) -> Tensor:
        enough = CEILING if self.errors is None else torch.inf
        return (self.deviations(residual, bound) <= self._level) & (residual <= enough)

    def facts(self, residual: Tensor, bound: Tensor) -> dict[str, Any]:
        deviations = self.deviations(residual, bound).reshape(-1).cpu()
        return {"tol": self._level, "judged": "predictions", "deviations": deviations}

    @property
    def _level(self) -> float:
        """Deviations that are allowed."""
        return LEVEL if self.errors is None else FACTORIZED


@dataclass
class FollowedPoints:
    """Points whose predictions are followed while a system is solved.

    :ivar covariances: k(X, x) of the points x, ``(..., n, p)`` float64.
    :ivar prior: k(x, x), ``(..., p)`` float64.
    :ivar rows: ``(q,)``, the training points that the last q are.
    """

    covariances: Tensor
    prior: Tensor
    rows: Tensor

    @classmethod
    def choose(cls, system: System, elsewhere: tuple[Tensor, Tensor] | None = None) -> FollowedPoints:
        """Choose training points, and other points in place of half of them where these are known.

        :param elsewhere: covariances ``(..., n, p)`` and prior variances ``(..., p)`` of at most 16 other points.
        """
        access = Access(system.operator)
        others = 0 if elsewhere is None else elsewhere[0].shape[-1]
        count = min(system.n, POINTS - others)
        rows = torch.randperm(system.n, generator=generator(0, "points that a solve follows"))[:count]
        rows = rows.to(system.noise.device)
        covariances, prior = access.columns(rows), access.diagonal()[..., rows]
        if elsewhere is not None:
            covariances = torch.cat([elsewhere[0], covariances], dim=-1)
            prior = torch.cat([elsewhere[1], prior], dim=-1)
        return cls(covariances, prior, rows)

    def deviations(self, system: System) -> Tensor:
        """Estimate the posterior deviations of an observation at the points, ``(..., p)``.

        Training points count as new ones.  The estimate takes the 256 training points of the largest correlation, which
        say nearly all there is to know at x.  The deviation falls with the number of points, and its fall from the
        nearer half of them to all is taken to go on for another three doublings at the most.  It is never below that of
        the noise.
        """
        access = Access(system.operator)
        n, count = system.n, self.covariances.shape[-1]
        size = min(_NEIGHBOURS, n - 1)
        batch = torch.broadcast_shapes(access.batch_shape, system.batch_shape)
        noise = system.noise.to(torch.float64).expand(*batch, n)
        if not size:
            return (self.prior + noise).sqrt().expand(*batch, count)
        scale = access.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        near = self.covariances.abs() / scale.unsqueeze(-1)
        own = torch.arange(count - len(self.rows), count, device=near.device)
        near[..., self.rows, own] = -1
        indices = near.topk(size, dim=-2).indices
        parts = []
        for j in range(count):
            index = indices[..., j].expand(*batch, size) if batch else indices[..., j]
            block = access.block(indices[..., j], indices[..., j])
            block = block + torch.diag_embed(noise.gather(-1, index))
            c = self.covariances[..., j].expand(*batch, n).gather(-1, index).unsqueeze(-1)
            root, _ = torch.linalg.cholesky_ex(block)
            explained = torch.linalg.solve_triangular(root, c, upper=False).squeeze(-1).square().cumsum(dim=-1)
            k = j - count + len(self.rows)
            of_new = noise[..., self.rows[k]] if k >= 0 else noise.gather(-1, index[..., :1]).squeeze(-1)
            latent = self.prior[..., j].unsqueeze(-1) - explained[..., [-1, (size - 1) // 2]]
            both = (latent.clamp(min=0) + of_new.unsqueeze(-1)).sqrt()
            parts.append(torch.stack([both[..., 0], both[..., 1], of_new.sqrt()]))
        deviations, half, least = torch.stack(parts, dim=-1)
        falling = (deviations / half).nan_to_num(1.0).median(dim=-1, keepdim=True).values
        doublings = min(_DOUBLINGS, max(0.0, math.log2((n - 1) / size)))
        return torch.maximum(deviations.nan_to_num(0.0) * falling**doublings, least)

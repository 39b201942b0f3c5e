"""Points whose predictions are followed while a system is solved, and about how sure the model is there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...operators.access import Access
from ...random_streams import generator
from ..problem import System

POINTS = 32  # that are followed
_NEIGHBOURS = 256  # training points that a variance is made of
_DOUBLINGS = 3.0  # of their number that its fall is extrapolated over, at the most


@dataclass
class Followed:
    """:ivar covariances: k(X, x) of the points x, ``(..., n, p)``; ``prior`` k(x, x), ``(..., p)``; both float64.

    :ivar rows: ``(q,)``, which training points the last q are.
    """

    covariances: Tensor
    prior: Tensor
    rows: Tensor

    @classmethod
    def of(cls, system: System, elsewhere: tuple[Tensor, Tensor] | None = None) -> Followed:
        """Training points, and others in place of half of them where these are known.

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
        """``(..., p)``: about the posterior deviations of an observation at the points; a training point counts as new.

        Made of the 256 training points of the largest correlation, which say nearly all there is to know at x.  What
        fewer points know is less: the deviation falls with their number, and its fall from the nearer half of them to
        all is taken to go on for another three doublings at the most.  Never below the noise's own.
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
        all_, half, floor = [], [], []
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
            all_.append(both[..., 0])
            half.append(both[..., 1])
            floor.append(of_new.sqrt())
        found, least = torch.stack(all_, dim=-1), torch.stack(floor, dim=-1)
        falling = (found / torch.stack(half, dim=-1)).nan_to_num(1.0).median(dim=-1, keepdim=True).values
        doublings = min(_DOUBLINGS, max(0.0, math.log2((n - 1) / size)))
        return torch.maximum(found.nan_to_num(0.0) * falling**doublings, least)

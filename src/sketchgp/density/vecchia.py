"""Vecchia's approximation of a Gaussian log density: each row given its nearest earlier ones.

It is the density of ``N(0, P)`` for the P of :class:`sketchgp.FullScale` without pivots: ``n m^3`` operations for m
neighbours, and no solve.  ``log det P`` is at least ``log det A``; ``y^T P^-1 y`` lies on either side.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operators.first_order import in_callers_context
from ..preconditioners import FullScale, PreconditionerCache
from .base import LogDensity


class Vecchia(LogDensity):
    """Log densities of rows given their neighbours, which are held until the cache is released.

    :param choice: of the neighbours.
    """

    cache: PreconditionerCache

    def __init__(self, choice: FullScale) -> None:
        self.cache = PreconditionerCache(choice)

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``r^T P^-1 r`` of each column and ``log det P``, float64; see :class:`LogDensity`."""
        with self.cache.holding():
            built: Any = self.cache.get(operator.latent, operator.noise, torch.is_grad_enabled())
        return _InvQuadLogdet.apply(self, built, columns.to(torch.float64), *built.tensors)


class _InvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, density: Vecchia, built: Any, given: Tensor, *parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        built, columns = built.detached(None), density.with_basis(given)
        weights = built.apply_inverse(columns)
        each, weights = density.regressed((columns * weights).sum(dim=0), weights)
        ctx.built, ctx.caller = built, copy_context()
        ctx.save_for_backward(weights, *parts)
        return each, built.log_determinant()

    @staticmethod
    @once_differentiable
    @in_callers_context
    def backward(ctx: Any, of_each: Tensor, of_determinant: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, *parts = ctx.saved_tensors
        nothing = weights[:, :0]
        of_parts = ctx.built.sampled_derivative(
            tuple(parts), weights, -of_each, nothing, weights.new_empty(ctx.built.rank, 0), nothing, of_determinant
        )
        return (None, None, 2 * weights * of_each, *of_parts)

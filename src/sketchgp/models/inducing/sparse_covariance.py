"""Covariances of an inducing-point model as LinearOperators: the prior Q with noise, and the posteriors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import AddedLossTerm
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from ...density import log_density
from ...errors import InputError
from ...inference.collapsed import Collapsed
from ...inference.pathwise import ErrorPaths
from ...lowrank import shifted_cholesky
from ...operators import KernelMatrix
from ...operators.tall import constant
from ...operators.tiles import spans
from ..converted import ConvertedWhole

_ENTRIES = 2**22  # of k(z, x) held at once
_FACTORIZED = 4096  # points whose covariance is factorized for samples

Collapse = Callable[[Tensor, Tensor], Collapsed]


class TraceTerm(AddedLossTerm):
    """``-1/2 sum_i (k_ii - q_ii) / noise_i``: with it the log density under Q + noise becomes Titsias's bound."""

    def __init__(self) -> None:
        self.collapsed: Collapsed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"collapsed": None}  # an autograd graph

    def loss(self, *params: Any) -> Tensor:
        if self.collapsed is None:
            raise InputError("The bound's trace is known once the log density was computed: mll(model(x), y).")
        return -0.5 * self.collapsed.residual.shape[1] * self.collapsed.trace_gap()


class SparsePrior(LinearOperator):
    """``Q = Kxz Kzz^-1 Kzx``, ``(n, n)``; useful once a diagonal of noise is added, for its log density.

    :param x: ``(n, d)`` training inputs.
    :param collapse: ``(noise, residual) -> Collapsed``.
    :param term: is told what was computed.
    :param noises_differ: whether the likelihood has a noise of its own for each point.
    """

    def __init__(
        self,
        x: Tensor,
        *,
        collapse: Collapse,
        term: TraceTerm,
        noise: Tensor | None = None,
        noises_differ: bool = False,
    ) -> None:
        super().__init__(x, collapse=collapse, term=term, noise=noise, noises_differ=noises_differ)
        self.x, self.collapse, self.term, self.noise, self.noises_differ = x, collapse, term, noise, noises_differ

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator) and self.noise is None:
            noise = other._diagonal().expand(len(self.x))
            return SparsePrior(
                self.x, collapse=self.collapse, term=self.term, noise=noise, noises_differ=self.noises_differ
            )
        return super().__add__(other)

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        """``(r^T (Q + noise)^-1 r, log det(Q + noise))``, differentiable; the sum over the columns of r ``(n, t)``."""
        if self.noise is None or inv_quad_rhs is None or inv_quad_rhs.dim() > 2:
            raise InputError("The covariance of an inducing-point model expects noise, and residuals (n,) or (n, t).")
        collapsed = self.collapse(self.noise, inv_quad_rhs)
        self.term.collapsed = collapsed
        return collapsed.inv_quad().to(self.dtype), collapsed.logdet().to(self.dtype)

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        raise InputError("The marginal likelihood of an InducingPointGP expects targets of the shape of its own.")

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._expand_batch(dim)

    def _diagonal(self) -> Tensor:
        return self._matmul(self.x)

    def _matmul(self, rhs: Tensor) -> Tensor:
        raise InputError(
            "The prior covariance of an inducing-point model is there for its log density (a marginal log likelihood); "
            "call model.eval() for predictions."
        )

    def _size(self) -> torch.Size:
        return torch.Size((len(self.x), len(self.x)))

    def _transpose_nonbatch(self) -> SparsePrior:
        return self


class _FastDensity:
    """Log densities are those of :class:`SparsePrior` whatever the settings say (BoTorch turns fast ones off)."""

    def log_prob(self, value: Tensor) -> Tensor:
        return log_density(self, value)


class SparseMarginal(_FastDensity, MultivariateNormal):
    """The distribution of a training step."""


class SparseMultitaskMarginal(_FastDensity, MultitaskMultivariateNormal):
    """That of several outputs, with a covariance :class:`IndependentOutputs` of the prior."""


class _Posterior(ConvertedWhole):
    """A covariance ``(..., p, p)`` of points ``(..., p, d)``."""

    x: Tensor

    def _size(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.x.shape[-2]))

    def __add__(self, other: Any) -> LinearOperator:
        return NoisyPosterior(self, other) if isinstance(other, DiagLinearOperator) else super().__add__(other)


class NoisyPosterior(AddedDiagLinearOperator):
    """A posterior with noise on its diagonal, whose samples are those of the two: a root of the sum that GPyTorch makes
    of more than 800 points has too few columns for the noise."""

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """``(num_samples, ..., p)``."""
        latent = self._linear_op.zero_mean_mvn_samples(num_samples)
        return latent + self._diag_tensor._diagonal().sqrt() * torch.randn_like(latent)


class SparsePosterior(_Posterior):
    """``K - half^T half + inner^T inner`` at points x, ``(p, p)``: the posterior covariance of DTC.

    :param x: ``(p, d)``; or ``(..., p, d)``, of which only :meth:`to_dense` can be had.
    :param collapsed: gives the :class:`Collapsed` statistics, which are computed when they are first needed.
    """

    def __init__(self, x: Tensor, *, kernel: Any, collapsed: Callable[[], Collapsed]) -> None:
        super().__init__(x, kernel=kernel, collapsed=collapsed)
        self.x, self.kernel, self.collapsed = x, kernel, collapsed

    def _prior(self) -> KernelMatrix:
        return constant(KernelMatrix.of(self.kernel, self.x, engine="tiled")).double()

    def _parts(self) -> Any:
        statistics = self.collapsed()
        for span in spans(len(self.x), max(1, _ENTRIES // len(statistics.z))):
            yield span, *statistics.half(self.x[span])

    def _diagonal(self) -> Tensor:
        prior = self._prior().diagonal(dim1=-1, dim2=-2)
        parts = [inner.square().sum(dim=0) - half.square().sum(dim=0) for _, half, inner in self._parts()]
        least = torch.finfo(prior.dtype).eps * prior
        return torch.maximum(prior + torch.cat(parts), least).to(self.dtype)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        wide = rhs.to(torch.float64)
        m = len(self.collapsed().z)
        first, second = (wide.new_zeros(*wide.shape[:-2], m, wide.shape[-1]) for _ in range(2))
        for span, half, inner in self._parts():
            first, second = first + half @ wide[..., span, :], second + inner @ wide[..., span, :]
        parts = [inner.mT @ second - half.mT @ first for _, half, inner in self._parts()]
        return (self._prior() @ wide + torch.cat(parts, dim=-2)).to(rhs.dtype)

    def to_dense(self) -> Tensor:
        """``(..., p, p)``, differentiable in x."""
        p, flat = self.x.shape[-2], self.x.reshape(-1, *self.x.shape[-2:])
        statistics = self.collapsed()
        parts = []
        for span in spans(len(flat), max(1, _ENTRIES // (p * (len(statistics.z) + p)))):
            points = flat[span]
            half, inner = (
                t.mT.reshape(len(points), p, -1) for t in statistics.half(points.reshape(-1, points.shape[-1]))
            )
            prior = constant(KernelMatrix.of(self.kernel, points, engine="tiled")).double().to_dense()
            parts.append(prior - half @ half.mT + inner @ inner.mT)
        return torch.cat(parts).reshape(*self.x.shape[:-1], p).to(self.x.dtype)

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """``(num_samples, p)``; up to 4,096 points by a Cholesky factor, beyond by GPyTorch's root of few columns."""
        if len(self.x) > _FACTORIZED:
            return super().zero_mean_mvn_samples(num_samples)
        root = shifted_cholesky(self.to_dense().to(torch.float64), torch.finfo(self.dtype).eps)
        normal = torch.randn(len(self.x), num_samples, dtype=torch.float64, device=self.device)
        return (root @ normal).mT.to(self.dtype)

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return DenseLinearOperator(self.to_dense())._expand_batch(batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return DenseLinearOperator(self.to_dense().unsqueeze(0))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if isinstance(row_index, slice) and row_index == col_index:
            return SparsePosterior(self.x[row_index], kernel=self.kernel, collapsed=self.collapsed)
        return super()._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Any) -> Tensor:
        return self.to_dense()[row_index, col_index]


class PathwisePosterior(_Posterior):
    """``E E^T / S`` of errors E ``(..., p, S)`` at points x: the covariance of a predictor's error, by samples.

    :param x: ``(..., p, d)``.
    :param errors: gives the :class:`ErrorPaths`, which are computed when they are first needed.
    """

    def __init__(self, x: Tensor, *, errors: Callable[[], ErrorPaths]) -> None:
        super().__init__(x, errors=errors)
        self.x, self.errors = x, errors
        self._kept: Tensor | None = None

    def _root(self) -> Tensor:
        """``E / sqrt(S)``, float64; differentiable in x where autograd is on, and else kept."""
        live = torch.is_grad_enabled() and self.x.requires_grad
        kept = None if live else self._kept
        if kept is None or (kept.is_inference() and not torch.is_inference_mode_enabled()):
            errors = self.errors()
            kept = errors(self.x) / errors.samples**0.5
            self._kept = None if live else kept
        return kept

    def _evaluated(self) -> RootLinearOperator:
        return RootLinearOperator(self._root().to(self.dtype))

    def _diagonal(self) -> Tensor:
        return self._root().square().sum(dim=-1).to(self.dtype)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        root = self._root()
        return (root @ (root.mT @ rhs.to(torch.float64))).to(rhs.dtype)

    def to_dense(self) -> Tensor:
        """``(..., p, p)``, differentiable in x."""
        root = self._root()
        return (root @ root.mT).to(self.dtype)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """A square root ``(..., p, p)``, as samples from given normal numbers expect: of more points than samples it is
        E with columns of zeros, where the covariance is singular."""
        root = self._root().to(self.dtype)
        p, samples = root.shape[-2:]
        if p <= samples:
            return super().root_decomposition(method=method)
        return RootLinearOperator(torch.cat([root, root.new_zeros(*root.shape[:-1], p - samples)], dim=-1))

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """``(num_samples, ..., p)``, without a p x p matrix."""
        root = self._root().to(self.dtype)
        normal = torch.randn(*root.shape[:-2], root.shape[-1], num_samples, dtype=root.dtype, device=root.device)
        return (root @ normal).movedim(-1, 0)

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return self._evaluated()._expand_batch(batch_shape)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return self._evaluated()._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Any) -> Tensor:
        return self._evaluated()._get_indices(row_index, col_index, *batch_indices)

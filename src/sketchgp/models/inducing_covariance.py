"""Covariances of an inducing-point model as LinearOperators: prior, posteriors, and those of several outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import AddedLossTerm
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    RootLinearOperator,
    ZeroLinearOperator,
)
from torch import Tensor

from ..density import log_density
from ..errors import InputError
from ..inference.collapsed import Collapsed
from ..operators import KernelMatrix
from ..operators.tall import constant
from ..operators.tiles import spans
from .lazy_covariance import Formula, positive

_ENTRIES = 2**22  # entries of k(z, x) held at once

Collapse = Callable[[Tensor, Tensor], Collapsed]


def independent(mean: Tensor, covariance: Any, several: bool) -> MultivariateNormal:
    """Return the distribution of independent outputs ``(..., p, t)`` that share a covariance.

    :param several: False for the distribution of a single output, without the last dimension.
    """
    if not several:
        return MultivariateNormal(mean.squeeze(-1), covariance)
    return MultitaskMultivariateNormal(mean, IndependentOutputs.of(covariance, mean.shape[-1]))


class TraceTerm(AddedLossTerm):
    """``-1/2 sum_i (k_ii - q_ii) / noise_i``: with it the log density under Q + noise becomes Titsias's bound."""

    def __init__(self) -> None:
        self.collapsed: Collapsed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"collapsed": None}  # the statistics hold an autograd graph

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
            noise = other.diagonal(dim1=-1, dim2=-2).expand(len(self.x))
            return SparsePrior(self.x, **{**self._kwargs, "noise": noise})
        return super().__add__(other)

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        """``(r^T (Q + noise)^-1 r, log det(Q + noise))``, differentiable; the sum over the columns of r ``(n, t)``."""
        if self.noise is None or inv_quad_rhs is None or inv_quad_rhs.dim() > 2:
            raise InputError("The covariance of an inducing-point model expects noise, and residuals (n,) or (n, t).")
        self.term.collapsed = collapsed = self.collapse(self.noise, inv_quad_rhs)
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
    """Mixin whose log densities are those of :class:`SparsePrior`; BoTorch turns fast ones off by default."""

    def log_prob(self, value: Tensor) -> Tensor:
        return log_density(self, value)


class SparseMarginal(_FastDensity, MultivariateNormal):
    """The distribution of a training step."""


class SparseMultitaskMarginal(_FastDensity, MultitaskMultivariateNormal):
    """The distribution of a training step of several outputs, whose covariance is :class:`IndependentOutputs`."""


class SparseFormula(Formula):
    """``K - half^T half + inner^T inner`` at points x ``(..., p, d)``: the posterior covariance of DTC.

    :param collapsed: gives the :class:`Collapsed` statistics, which are computed when they are first needed.
    """

    keeps_graph = False

    def __init__(self, x: Tensor, kernel: Any, collapsed: Callable[[], Collapsed]) -> None:
        self.x, self.kernel, self.collapsed, self.sources = x, kernel, collapsed, (x,)
        self.shape = torch.Size((*x.shape[:-1], x.shape[-2]))

    def _prior(self, x: Tensor) -> KernelMatrix:
        return constant(KernelMatrix.of(self.kernel, x, engine="tiled")).double()

    def diagonal(self) -> Tensor:
        """Return the variances ``(..., p)`` float64, differentiable in x."""
        if self.x.dim() > 2:
            return self.matrix().diagonal(dim1=-1, dim2=-2)
        prior, statistics, parts = self._prior(self.x).diagonal(dim1=-1, dim2=-2), self.collapsed(), []
        for rows in spans(len(self.x), max(1, _ENTRIES // len(statistics.z))):
            half, inner = statistics.half(self.x[rows])
            parts.append(inner.square().sum(dim=0) - half.square().sum(dim=0))
        return positive(prior + torch.cat(parts), prior)

    def matrix(self) -> Tensor:
        """Return the covariance ``(..., p, p)`` float64, differentiable in x."""
        p, flat = self.x.shape[-2], self.x.reshape(-1, *self.x.shape[-2:])
        statistics = self.collapsed()
        parts = []
        for span in spans(len(flat), max(1, _ENTRIES // (p * (len(statistics.z) + p)))):
            points = flat[span]
            half, inner = (
                t.mT.reshape(len(points), p, -1) for t in statistics.half(points.reshape(-1, points.shape[-1]))
            )
            parts.append(self._prior(points).to_dense() - half @ half.mT + inner @ inner.mT)
        return torch.cat(parts).reshape(self.shape)

    def select(self, rows: slice, batch: tuple[Any, ...]) -> SparseFormula | None:
        index = (*batch, rows)
        return SparseFormula(self.x[index], self.kernel, self.collapsed)


class PathwiseFormula(Formula):
    """``E E^T / S`` of errors E ``(..., p, S)`` at points x ``(..., p, d)``: a predictor's error, by samples.

    :param errors: gives the :class:`.Deviations`, or others, which are computed when they are first needed.
    :param root: ``E / sqrt(S)``, where it is known.
    """

    keeps_graph = False

    def __init__(self, x: Tensor, errors: Callable[[], Any], root: Tensor | None = None) -> None:
        self.x, self.errors, self.sources, self._root = x, errors, (x,), root
        self.shape = torch.Size((*x.shape[:-1], x.shape[-2]))

    def root(self) -> Tensor:
        """Return ``E / sqrt(S)`` in float64, differentiable in x; it is kept unless it requires gradients."""
        if self._root is not None:
            return self._root
        values = self.errors()(self.x)
        root = values / values.shape[-1] ** 0.5
        self._root = None if root.requires_grad else root
        return root

    def diagonal(self) -> Tensor:
        return self.root().square().sum(dim=-1)

    def select(self, rows: slice, batch: tuple[Any, ...]) -> PathwiseFormula:
        index = (*batch, rows)
        return PathwiseFormula(self.x[index], self.errors, None if self._root is None else self._root[index])


class IndependentOutputs(KroneckerProductLinearOperator):
    """Covariance ``C x I_t``, ``(..., p t, p t)``, of t independent outputs that share C ``(..., p, p)``.

    Outputs are interleaved as in GPyTorch's ``MultitaskMultivariateNormal`` (those of the first point, of the second,
    ...).  Everything is computed from C, with the outputs as columns.

    GPyTorch's Gaussian likelihoods take a mean ``(..., p, t)`` for a batch of p vectors.  They add a diagonal of batch
    shape ``(..., p)`` and size t, or one of size p where they were told inputs or noises.  Where the outputs have one
    noise, the sum is again of this class.

    :param linear_ops: C, and the identity as a ``DiagLinearOperator``.
    """

    @classmethod
    def of(cls, covariance: Any, outputs: int) -> IndependentOutputs:
        """Return the covariance of some outputs; :param covariance: C; :param outputs: t."""
        ones = torch.ones(*covariance.batch_shape, outputs, dtype=covariance.dtype, device=covariance.device)
        return cls(covariance, DiagLinearOperator(ones))

    @property
    def covariance(self) -> LinearOperator:
        """The covariance C of one output."""
        return self.linear_ops[0]

    @property
    def outputs(self) -> int:
        """Number of outputs, t."""
        return self.linear_ops[1].shape[-1]

    def __add__(self, other: Any) -> LinearOperator:
        """:raises InputError: for a likelihood that knows no noise of these points."""
        if isinstance(other, ZeroLinearOperator):
            raise InputError(
                "The likelihood knows no noise of these points; give it the inputs or the noises: mll(model(x), y, x), "
                "likelihood(model(x), x) or likelihood(model(x), noise=...)."
            )
        if not isinstance(other, DiagLinearOperator):
            return super().__add__(other)
        p, batch = self.covariance.shape[-1], self.covariance.batch_shape
        if other.batch_shape == (*batch, p) and other.shape[-1] == self.outputs:
            if not isinstance(other, ConstantDiagLinearOperator):
                noises = other.diagonal(dim1=-1, dim2=-2).reshape(*batch, p * self.outputs)
                return super().__add__(DiagLinearOperator(noises))
            if getattr(self.covariance, "noises_differ", False):
                raise InputError(
                    "The likelihood's noises are of the training points; give it them: mll(model(x), y, x)."
                )
            return self._with(self.covariance + DiagLinearOperator(other.diag_values.squeeze(-1)))
        if other.shape[-1] == p and len(other.batch_shape) <= len(batch):
            return self._with(self.covariance + DiagLinearOperator(other.diagonal(dim1=-1, dim2=-2)))
        of_training = p == 1 < self.outputs and not isinstance(other, ConstantDiagLinearOperator)  # as many as outputs
        if other.shape[-1] != self.shape[-1] or (of_training and not other.batch_shape):
            raise InputError(
                f"{p} points of {self.outputs} outputs expect a noise for each point (or for each of its outputs, "
                f"({p}, {self.outputs})); the likelihood has noises of shape {tuple(other.shape[:-1])}. Give it the "
                "inputs or the noises: likelihood(model(x), x) or likelihood(model(x), noise=...)."
            )
        return super().__add__(other)

    def _with(self, covariance: LinearOperator) -> IndependentOutputs:
        return IndependentOutputs.of(covariance, self.outputs)

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``r^T (C x I)^-1 r`` and the log determinant, from one of C with t columns for each of r's.

        :param inv_quad_rhs: ``(..., p t, c)``, or None.
        :param reduce_inv_quad: sum over the columns; else ``(..., c)``.
        """
        columns = inv_quad_rhs
        if columns is not None:
            c = 1 if columns.dim() == 1 else columns.shape[-1]
            batch = columns.shape[: max(columns.dim() - 2, 0)]
            columns = columns.reshape(*batch, self.covariance.shape[-1], self.outputs * c)
        forms, determinant = self.covariance.inv_quad_logdet(columns, logdet, reduce_inv_quad)
        if columns is not None and not reduce_inv_quad:
            forms = forms.reshape(*forms.shape[:-1], self.outputs, c).sum(dim=-2)
        return forms, determinant * self.outputs if logdet else determinant

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """Return the root of C, for each output."""
        root = self.covariance.root_decomposition(method=method).root
        return RootLinearOperator(KroneckerProductLinearOperator(root, self.linear_ops[1]))

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Draw samples ``(num_samples, ..., p t)``, from samples of C."""
        drawn = self.covariance.zero_mean_mvn_samples(num_samples * self.outputs)
        drawn = drawn.reshape(num_samples, self.outputs, *drawn.shape[1:]).movedim(1, -1)
        return drawn.reshape(*drawn.shape[:-2], -1)

"""The covariance of several outputs that share one and are independent, and a likelihood's noise on it."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    RootLinearOperator,
    ZeroLinearOperator,
)
from torch import Tensor

from ...errors import InputError


class IndependentOutputs(KroneckerProductLinearOperator):
    """``C x I_t``, ``(..., p t, p t)``: one covariance C ``(..., p, p)`` for each of t outputs, interleaved as
    GPyTorch's ``MultitaskMultivariateNormal`` has them (the outputs of the first point, of the second, ...).

    What is computed of it is computed of C, with the outputs as columns.

    GPyTorch's Gaussian likelihoods take a mean ``(..., p, t)`` for a batch of p vectors, so that what they add is a
    diagonal of batch shape ``(..., p)`` and size t; where they were told inputs or noises, it is one of size p.  Both
    are known here: the sum is again of this class where the outputs have one noise.

    :param linear_ops: C, and the identity as a ``DiagLinearOperator``.
    """

    @classmethod
    def of(cls, covariance: Any, outputs: int) -> IndependentOutputs:
        """:param covariance: C; :param outputs: t."""
        ones = torch.ones(*covariance.batch_shape, outputs, dtype=covariance.dtype, device=covariance.device)
        return cls(covariance, DiagLinearOperator(ones))

    @property
    def covariance(self) -> LinearOperator:
        """C."""
        return self.linear_ops[0]

    @property
    def outputs(self) -> int:
        """t."""
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
        """``r^T (C x I)^-1 r`` and the log determinant, from one of C with t columns for each of r's.

        :param inv_quad_rhs: ``(..., p t, c)``, or None.
        :param reduce_inv_quad: sum over the columns; else ``(..., c)``.
        """
        columns = inv_quad_rhs
        if columns is not None:
            c = 1 if columns.dim() == 1 else columns.shape[-1]
            batch = columns.shape[: max(columns.dim() - 2, 0)]
            columns = columns.reshape(*batch, self.covariance.shape[-1], self.outputs * c)
        found, determinant = self.covariance.inv_quad_logdet(columns, logdet, reduce_inv_quad)
        if columns is not None and not reduce_inv_quad:
            found = found.reshape(*found.shape[:-1], self.outputs, c).sum(dim=-2)
        return found, determinant * self.outputs if logdet else determinant

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """The root of C, for each output."""
        root = self.covariance.root_decomposition(method=method).root
        return RootLinearOperator(KroneckerProductLinearOperator(root, self.linear_ops[1]))

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """``(num_samples, ..., p t)``, from samples of C."""
        drawn = self.covariance.zero_mean_mvn_samples(num_samples * self.outputs)
        drawn = drawn.reshape(num_samples, self.outputs, *drawn.shape[1:]).movedim(1, -1)
        return drawn.reshape(*drawn.shape[:-2], -1)

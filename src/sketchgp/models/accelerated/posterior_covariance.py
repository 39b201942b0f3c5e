"""Formulas of an accelerated model's posterior covariance, evaluated when somebody looks at it, as far as needed.

:class:`Factorized` serves up to ``cholesky_points()`` training rows, else :class:`Solved`; the prediction strategy's
``exact_predictive_covar`` chooses.

GPyTorch's prediction strategy solves for every test point when the model is called, also where only the mean is read.
Here the training side is noted as it is at the call: the settings that solves depend on, whether autograd is on, the
tensors behind the matrix.  A later look gives what would have been computed then, or an error.
"""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from ...fingerprint import State
from ...operators import KernelMatrix
from ...operators.access import float64
from ...operators.lazies import parameters_in
from ...operators.tiles import spans
from ...settings import variance
from ..lazy_covariance import Formula, LazyCovariance, positive
from .approximate import Refusing, refuse
from .training import EXACT_ROWS, Training


class Solved(Formula):
    """``prior - cross A^-1 cross^T`` by solves; the diagonal takes some test points at a time.

    :param prior: ``(..., m, m)`` and :param cross: ``(..., m, n)``, LinearOperators, evaluated.
    :param training: A.
    """

    def __init__(self, prior: LinearOperator, cross: LinearOperator, training: Training) -> None:
        self.prior, self.cross, self.training, self.sources = prior, cross, training, (prior, cross)
        batch = torch.broadcast_shapes(prior.batch_shape, cross.batch_shape, training.noisy.batch_shape)
        self.shape = torch.Size((*batch, *prior.shape[-2:]))

    def matrix(self) -> Tensor:
        """Return the covariance ``(..., m, m)`` float64, differentiable."""
        c, prior = float64(self.cross).mT, float64(self.prior)
        self._expect()
        return prior - self.training.quadratic_forms(c, prior.diagonal(dim1=-1, dim2=-2), diagonal=False)

    def _expect(self) -> None:
        """Announce how many points are about to be solved for, of each system."""
        self.training.expect(self.shape[:-1].numel() // max(1, self.training.noisy.batch_shape.numel()))

    def diagonal(self) -> Tensor:
        """Return the variances ``(..., m)`` float64, differentiable."""
        chosen = variance.value(self.training.acceleration.variance)
        if isinstance(self.cross, KernelMatrix) and self.shape[-1]:
            x = self.cross.x1.reshape(-1, self.cross.x1.shape[-1])
            method = self.training.method(chosen, x.detach(), torch.is_grad_enabled() and x.requires_grad)
            if method != "exact":
                return self._approximate(x, method, chosen == "auto")
        elif chosen in ("low_rank", "samples"):
            raise refuse(chosen)
        return self._exact_variance()

    def _approximate(self, x: Tensor, method: str, checked: bool) -> Tensor:
        value = self.training.approximate(x, method)
        if checked:
            self.training.approximate.check(x.detach(), value.detach(), method, once=True)
        if not x.requires_grad:  # other results of the model have gradients in these tensors
            value = Refusing.apply(value, method, *self.prior.representation(), *self.cross.representation())
        return value.reshape(self.shape[:-1])

    def _exact_variance(self) -> Tensor:
        prior = float64(self.prior, diagonal=True)
        self._expect()
        lean = isinstance(self.cross, KernelMatrix)
        cross = self.cross if lean else float64(self.cross)
        parts = []
        most = min(EXACT_ROWS, self.training.columns) // max(1, self.shape[:-2].numel())
        for rows in spans(self.shape[-1], max(1, most)):
            c = float64(cross[..., rows, :]) if lean else cross[..., rows, :]
            some = prior[..., rows]
            parts.append(some - self.training.quadratic_forms(c.mT, some, diagonal=True))
        return positive(torch.cat(parts, dim=-1) if parts else prior, prior)

    def changed(self) -> bool:
        return self.training.changed

    def select(self, rows: slice, batch: tuple[Any, ...]) -> Solved | None:
        full_batch = all(isinstance(index, slice) and index == slice(None) for index in batch)
        plain = isinstance(self.prior, KernelMatrix) and isinstance(self.cross, KernelMatrix)
        if not (full_batch and plain):
            return None
        return Solved(self.prior[..., rows, rows], self.cross[..., rows, :], self.training)


class Factorized(Formula):
    """``prior - half^T half``, whose diagonal takes a diagonal.

    :param prior: ``(..., m, m)``, not evaluated.
    :param half: ``root^-1 k(X, x)``, ``(..., n, m)`` float64.
    """

    def __init__(self, prior: LinearOperator, half: Tensor) -> None:
        self.prior, self.half, self.sources = prior, half, (prior, half)
        self.shape = torch.Size((*torch.broadcast_shapes(prior.batch_shape, half.shape[:-2]), *prior.shape[-2:]))
        self._parameters = parameters_in(prior)
        self._state = State((), self._parameters)

    def changed(self) -> bool:
        return not self._state.holds((), self._parameters)

    def matrix(self) -> Tensor:
        return float64(self.prior) - self.half.mT @ self.half

    def diagonal(self) -> Tensor:
        prior = float64(self.prior, diagonal=True)
        return positive(prior - self.half.square().sum(dim=-2), prior)


def conditioned(prior: LinearOperator, cross: LinearOperator, root: Tensor) -> LazyCovariance:
    """Return the posterior covariance by the Cholesky factor ``root`` ``(..., n, n)`` of the training covariance.

    :param cross: k(x, X), ``(..., m, n)``, not evaluated.
    """
    c = float64(cross).mT
    if root.dim() == 2 < c.dim():  # one system for the columns of all elements of the batch
        columns = c.movedim(-2, 0).reshape(c.shape[-2], -1)
        half = torch.linalg.solve_triangular(root, columns, upper=False)
        half = half.reshape(c.shape[-2], *c.shape[:-2], c.shape[-1]).movedim(0, -2)
        return LazyCovariance(Factorized(prior, half))
    return LazyCovariance(Factorized(prior, torch.linalg.solve_triangular(root, c, upper=False)))

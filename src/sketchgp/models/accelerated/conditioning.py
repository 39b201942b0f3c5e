"""Exact predictive variances: one solve for each test point, whose error is of second order and below the noise.

With ``A = K + noise`` and c the covariances of the training points with a test point, any w gives
``2 c.w - w.A w = c.A^-1 c - r.A^-1 r`` for ``r = c - A w``: what a solve leaves out is at most ``|r|^2 / noise``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import LinearPredictionStrategy, SGPRPredictionStrategy
from linear_operator.operators import (
    AddedDiagLinearOperator,
)
from torch import Tensor

from ...errors import InputError
from ...inference import explained
from ...inference.calibrated import block
from ...operators import KernelMatrix
from ...operators.access import SUMS, float64, terms
from ...operators.lazies import adopt_kernels
from ...operators.rounding import entry_rounding
from ...solvers import ConjugateGradients, System
from ...solvers.certificate import summing
from ..copies import copied
from .acceleration import ATTRIBUTE, Acceleration
from .added_diag import AcceleratedAddedDiagLinearOperator, as_kernel_matrix
from .approximate import Approximate
from .missing import observed_part, observed_rows
from .mixins import AcceleratedModel
from .posterior import calls_its_own_way, strategy_of
from .posterior_covariance import TrainingSide, factors_of

_CLOSED = (LinearPredictionStrategy, SGPRPredictionStrategy)  # which condition by a formula of their own


@dataclass
class Conditioning:
    """The training side of a model: ``A = K + noise``, evaluated, and how it is solved.

    :ivar model: the model, or a float64 copy of it where its covariance cannot be evaluated in float64 by itself.
    :ivar noisy: A, ``(..., n, n)``, of the observed targets.
    :ivar observed: which they are among all ``(N,)``; None where none is missing.
    """

    model: Any
    noisy: Any
    observed: Tensor | None = None

    @classmethod
    def of(cls, model: Any) -> Conditioning | None:
        """None for a model that GPyTorch conditions by a formula of its own (linear and inducing-point kernels).

        :raises InputError: for a model whose class has a ``__call__`` of its own.
        """
        if calls_its_own_way(model):
            raise InputError(
                f"predict: variance expects None for {type(model).__name__}, whose __call__ may compute anything; use "
                "model(x).variance."
            )
        strategy = strategy_of(model)
        if isinstance(strategy, _CLOSED):
            return None
        observed = observed_rows(strategy.train_labels)
        noisy = _noisy(model, observed)
        exact = isinstance(noisy, AcceleratedAddedDiagLinearOperator) and all(
            isinstance(part, KernelMatrix) for _, part in terms(noisy._linear_op)
        )
        if not exact and noisy.dtype != torch.float64:
            model = copied(model).double()
            noisy = _noisy(model, observed)
        plain = exact and isinstance(noisy._linear_op, KernelMatrix) and not noisy.batch_shape
        return (PlainConditioning if plain and model.train_inputs[0].dim() == 2 else Conditioning)(
            model, noisy, observed
        )

    @property
    def _acceleration(self) -> Acceleration:
        return self.model.__dict__[ATTRIBUTE]

    @property
    def _ours(self) -> bool:
        return isinstance(self.noisy, AcceleratedAddedDiagLinearOperator)

    @cached_property
    def _side(self) -> TrainingSide:
        return TrainingSide(self.noisy, factors_of(strategy_of(self.model)))

    def factorizes(self, points: int) -> bool:
        """Whether so many test points are solved for by a factorization."""
        return self._ours and self._side.factorizes(self._columns(points))

    def expect(self, points: int) -> None:
        """So many test points are about to be solved for."""
        if self._ours:
            self._side.expect(self._columns(points))

    def _columns(self, points: int) -> int:
        return points * max(1, self._rows // self.model.train_inputs[0].shape[-2])

    @property
    def _rows(self) -> int:
        """Of the training covariance, those of missing targets included."""
        return self.noisy.shape[-1] if self.observed is None else len(self.observed)

    @cached_property
    def _system(self) -> System:
        """Of what GPyTorch inverts by its structure."""
        return System(self.noisy, torch.zeros(self.noisy.shape[:-1], dtype=self.noisy.dtype, device=self.noisy.device))

    def exact_variance(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Latent variances at x ``(m, d)`` in float64: ``(..., m)``, or ``(..., m, t)`` of t tasks.  And what they are
        off at the most, where that is known.

        The error is estimated to be below a hundredth of the variance and of the noise, or of a hundredth of the noise
        where that is more than the variance; or there is a :class:`sketchgp.ConvergenceWarning`.

        :raises InputError: for tasks that are not interleaved.
        """
        train = self.model.train_inputs[0]
        batch = torch.broadcast_shapes(train.shape[:-2], x.shape[:-2])
        parts = [part.expand(*batch, *part.shape[-2:]) for part in (train, x.to(train.dtype))]
        joint = _prior(self.model, torch.cat(parts, dim=-2))
        if not getattr(joint, "_interleaved", True):
            raise InputError(
                "Exact variances of several tasks expect a covariance with the tasks of a point side by side "
                "(interleaved=True)."
            )
        whole, n = joint.lazy_covariance_matrix, self._rows
        cross = whole[..., n:, :n]
        if self.observed is not None:
            cross = cross[..., :, self.observed.nonzero().squeeze(-1)]
        c, prior = float64(cross).mT, float64(whole[..., n:, n:], diagonal=True)
        variance = prior - self._explained(c, prior).diagonal(c)
        return variance.clamp_(min=0).reshape(*variance.shape[:-1], -1, *joint.event_shape[1:]), None

    def _explained(self, c: Tensor, prior: Tensor) -> explained.Explained:
        """``c.A^-1 c`` for c ``(..., n, m)`` and prior ``(..., m)``, all float64."""
        if self._ours:
            found = self._side.solve(c, prior, below_noise=True)
        else:  # GPyTorch solves by structure; the residual is looked at, and made smaller where that was not enough
            diagonal = isinstance(self.noisy, AddedDiagLinearOperator)
            noise = self.noisy._diag_tensor._diagonal() if diagonal else self._system.noise
            system, solver = self._system, self._acceleration.column_solver(evaluation=True)
            solver = solver if isinstance(solver, ConjugateGradients) else ConjugateGradients()
            initial = None if type(self.noisy) in SUMS else self.noisy.solve(c)
            found, _ = explained.solve(system, c, prior, solver, noise=noise, initial=initial)
        return found


class PlainConditioning(Conditioning):
    """Of a model with one plain kernel and no batch; it knows the covariance of any two inputs."""

    @property
    def matrix(self) -> KernelMatrix:
        """K."""
        return self.noisy._linear_op

    @property
    def noise(self) -> Tensor:
        """``(n,)``."""
        return self.noisy._noise_vector()

    @property
    def approximate(self) -> Approximate:
        """Variances of many points."""
        return self._side.approximate

    def variance_method(self, chosen: str, x: Tensor) -> str:
        """How variances at x ``(m, d)`` are computed."""
        return self._side.method(chosen, self.inputs(x), differentiated=False)

    def look(self, method: str) -> bool:
        """Whether nobody has compared such variances with exact ones; from now on somebody has."""
        checked = self._side.kept.checked
        new = method not in checked
        checked.add(method)
        return new

    def block(self, a: Tensor, b: Tensor | None) -> Tensor:
        """``k(a, b)`` in float64, or the diagonal ``k(a_i, a_i)`` where b is None; a and b as the kernel sees them."""
        return block(self.matrix, a, b)

    def inputs(self, x: Tensor) -> Tensor:
        """x as the kernel sees it (its active dimensions selected)."""
        return _prior(self.model, x, convert=True).lazy_covariance_matrix.x1

    def exact_variance(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Latent variances ``(m,)`` at x ``(m, d)``, float64, and what they are off at the most, where it is known."""
        x = self.inputs(x)
        c, prior = self.block(self.matrix.x1, x), self.block(x, None)
        found = self._explained(c, prior)
        variance = prior - found.diagonal(c)
        if found.certain is None or not self._inputs_as_given:
            return variance.clamp(min=0), None
        error, below, above = found.certain
        rounding = self._cross_rounding(x)
        if rounding is None:
            return variance.clamp(min=0), None
        of_rows, of_x = rounding
        of_rows, weights = of_rows.unsqueeze(-1), found.weights.abs()
        noise, roots, scale = self.noise.to(torch.float64).unsqueeze(-1), self._roots, prior.clamp(min=0).sqrt()
        of_product = scale * ((of_rows + of_x) * roots * weights).sum(dim=0)
        deviation = scale * ((of_rows + of_x) * roots / noise.sqrt()).norm(dim=0)  # in the norm of A^-1
        of_cross = 2 * of_product + deviation * (2 * error + deviation)
        of_prior = 2 * of_x * prior.abs() + 2 * torch.finfo(torch.float64).eps * (prior.abs() + above.abs())
        there = prior - variance
        return variance.clamp(min=0), torch.maximum(above - there, there - below) + of_cross + of_prior

    def mean_error_bound(self, x: Tensor, mean: Tensor, weights: Tensor, bound: float) -> Tensor | None:
        """How far a mean is from the exact one at the most, ``(m,)`` float64: what the weights lack, and rounding.

        None where nobody knows how the prior mean is rounded, unless it is constant, or the inputs or entries of the
        kernel.

        :param x: ``(m, d)``, with the posterior ``mean`` ``(m,)`` there as it is returned.
        :param weights: ``(n,)`` that it was made of; NaN where a target is missing.
        :param bound: at least the error of the weights in the norm of A.
        """
        means = torch.cat([strategy_of(self.model).train_prior_dist.mean, _prior(self.model, x).mean])
        if not self._inputs_as_given or not bool((means == means[:1]).all()):
            return None
        x = self.inputs(x)
        rounding = self._cross_rounding(x)
        if rounding is None:
            return None
        of_rows, of_x = rounding
        weights = weights if self.observed is None else weights[self.observed]
        sizes = self._roots.squeeze(-1) * weights.abs()
        of_product = (of_x + summing(len(weights))) * sizes.sum() + (of_rows * sizes).sum()
        of_result = torch.finfo(mean.dtype).eps * mean.to(torch.float64).abs()
        return self.block(x, None).clamp(min=0).sqrt() * (bound + of_product) + of_result

    @cached_property
    def _inputs_as_given(self) -> bool:
        """Whether the kernel sees the model's inputs, and nothing that was computed of them."""
        x, dims = self.model.train_inputs[0], self.matrix.kernel.active_dims
        x = x if self.observed is None else x[self.observed]
        return torch.equal(x if dims is None else x.index_select(-1, dims), self.matrix.x1)

    @cached_property
    def _roots(self) -> Tensor:
        """``k(x_i, x_i)^1/2`` of the training points, ``(n, 1)``."""
        return self.block(self.matrix.x1, None).clamp(min=0).sqrt().unsqueeze(-1)

    def _cross_rounding(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Errors of the entries of ``k(X, x)`` in float64 by rows ``(n,)`` and columns ``(m,)``: see
        :func:`entry_rounding`.  x is as the kernel sees it."""
        return entry_rounding(self.matrix.at(self.matrix.x1, x))


def _noisy(model: Any, observed: Tensor | None) -> Any:
    """``K + noise`` of the training data, or of those observed, evaluated."""
    prior = _prior(model, model.train_inputs[0], convert=True)
    noisy = model.likelihood(prior, list(model.train_inputs)).lazy_covariance_matrix.evaluate_kernel()
    return noisy if observed is None else observed_part(noisy, observed, model.__dict__[ATTRIBUTE])


def _prior(model: Any, x: Tensor, convert: bool = False) -> Any:
    """The prior at x; with its covariance made of kernel matrices, whatever n is, where ``convert`` says so."""
    prior = super(AcceleratedModel, model).forward(x)  # type: ignore[misc]
    acceleration: Acceleration = model.__dict__[ATTRIBUTE]
    covariance = prior.lazy_covariance_matrix
    adopt_kernels(covariance)
    if convert and type(prior) is MultivariateNormal:
        matmul = "auto" if acceleration.matmul == "gpytorch" else acceleration.matmul
        prior = MultivariateNormal(prior.mean, as_kernel_matrix(covariance, matmul, acceleration.matmul_precision))
    setattr(prior.lazy_covariance_matrix, ATTRIBUTE, acceleration)
    return prior

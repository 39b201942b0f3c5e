"""The covariance of an accelerated model's posterior, solved for when somebody looks at it, and only as far as needed.

GPyTorch's prediction strategy solves for every test point when the model is called, also where only the mean is read.
Here the training side is noted as it is at the call: the settings that solves depend on, whether autograd is on, the
tensors behind the matrix.  What is looked at later is what would have been computed then, or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from functools import cached_property
from typing import Any, TypeVar

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import (
    ConstantMulLinearOperator,
    LinearOperator,
    MulLinearOperator,
)
from torch import Tensor

from ...errors import InputError, NumericalError
from ...fingerprint import data_key, tensor_key
from ...inference import explained
from ...operators import KernelMatrix, LowRankPlusDiagonal
from ...operators.access import SUMS
from ...operators.first_order import first_order
from ...operators.marks import operator_key
from ...operators.tiles import spans
from ...settings import memory_budget
from ...solvers import Cholesky, System
from .added_diag import AcceleratedAddedDiagLinearOperator
from .lazy_covariance import LazyCovariance
from .threshold import threshold_untouched

_ROWS = 256  # test points solved for at once
_VECTORS = 8  # float64 vectors that a solve holds for each of them
_FACTOR = "_sketchgp_factor"  # of a prediction strategy
T = TypeVar("T")


def float64(operator: Any, diagonal: bool = False) -> Tensor:
    """A part of a covariance, or its diagonal, dense and differentiable; what is made of kernels is evaluated in
    float64."""
    operator = to_linear_operator(operator)
    if isinstance(operator, LazyEvaluatedKernelTensor):
        found = KernelMatrix.from_lazy(operator, "tiled")
        operator = operator.evaluate_kernel() if found is None else found
    if isinstance(operator, SUMS):
        first, *others = (float64(part, diagonal) for part in operator.linear_ops)
        return sum(others, first)
    if isinstance(operator, MulLinearOperator):
        return float64(operator.left_linear_op, diagonal) * float64(operator.right_linear_op, diagonal)
    if isinstance(operator, ConstantMulLinearOperator):
        constant = operator._constant.to(torch.float64)
        constant = constant.reshape(*constant.shape, *([1] if diagonal else [1, 1]))
        return float64(operator.base_linear_op, diagonal) * constant
    if isinstance(operator, KernelMatrix):
        operator = operator.type(torch.float64)
    return (operator.diagonal(dim1=-1, dim2=-2) if diagonal else to_dense(operator)).to(torch.float64)


def factors_of(strategy: Any) -> explained.Factors:
    """Where a prediction strategy keeps the factor of its training covariance."""
    return strategy.__dict__.setdefault(_FACTOR, explained.Factors())


class TrainingSide:
    """``A = K + noise`` of the training data, and how it is solved, as both are when this is made.

    :param noisy: A, evaluated, ``(..., n, n)``.
    :param factors: where its Cholesky factor is kept, if it comes to that: with ``solver="auto"`` once that is cheaper
        than conjugate gradients, and with :class:`~sketchgp.solvers.Cholesky`.
    """

    def __init__(self, noisy: AcceleratedAddedDiagLinearOperator, factors: explained.Factors) -> None:
        acceleration = noisy.acceleration
        assert acceleration is not None
        self.noisy, self.acceleration = noisy, acceleration
        self.solver = acceleration.column_solver()
        self.preconditioned = acceleration.preconditions()
        self.gradients, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.context: Context = copy_context()
        self._factors, self._free = factors, isinstance(acceleration.solver, str) and threshold_untouched()
        self._noted = [(tensor, data_key(tensor)) for tensor in noisy.representation()]

    @property
    def changed(self) -> bool:
        """Whether a hyperparameter, or the data, were changed in place since then."""
        return any(data_key(tensor) != key for tensor, key in self._noted)

    @cached_property
    def system(self) -> System:
        """A as solvers take it."""
        return System(self.noisy._linear_op, self.noisy._noise_vector())

    def as_then(self, compute: Callable[[], T]) -> T:
        """What ``compute`` gives with the context variables and the autograd mode of then."""

        def run() -> T:
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients):
                return compute()

        return self.context.copy().run(run)

    @cached_property
    def preconditioner(self) -> LowRankPlusDiagonal | None:
        if not self.preconditioned or isinstance(self.solver, Cholesky):
            return None
        with torch.no_grad():
            return self.acceleration.build(self.system.operator, self.system.noise, differentiable=False)

    @cached_property
    def _kept(self) -> explained.Factor:
        return self._factors.of((operator_key(self.system.operator), tensor_key(self.system.noise)))

    def factorizes(self, columns: int) -> bool:
        """Whether so many more test points will be solved for by a factorization."""
        return isinstance(self.solver, Cholesky) or (self._free and self._kept.pays(self.system, columns))

    def expect(self, columns: int) -> None:
        """So many test points are about to be solved for."""
        if self._free:
            self._kept.columns += columns

    def solve(self, c: Tensor, prior: Tensor, below_noise: bool) -> explained.Explained:
        """:param c: ``(..., n, m)`` float64; :param prior: ``(..., m)``; :param below_noise: as errors are to be."""
        if isinstance(self.solver, Cholesky):
            return self._kept.solve(self.system, c)
        if self.factorizes(0):
            try:
                return self._kept.solve(self.system, c)
            except NumericalError:
                pass  # by iterations then
        choice = None if self.preconditioner is None else self.acceleration.preconditioner
        return explained.solve(
            self.system,
            c,
            prior,
            self.solver,
            self.preconditioner,
            name="none" if choice is None else choice.name,
            below=choice is not None and choice.below,
            below_noise=below_noise,
        )

    def explained(self, c: Tensor, prior: Tensor, diagonal: bool) -> Tensor:
        """``c^T A^-1 c`` ``(..., m, m)``, or its diagonal ``(..., m)``; differentiable in c and A's parts."""
        tree, parts = self.noisy.representation_tree(), self.noisy.representation()
        return _Explained.apply(self, tree, diagonal, prior.detach(), c, *parts)

    @property
    def rows(self) -> int:
        """How many test points are solved for at once."""
        fitting = memory_budget.value(self.system.noise.device) // (8 * _VECTORS * self.noisy.shape[:-1].numel())
        return max(1, fitting if isinstance(self.solver, Cholesky) else min(_ROWS, fitting))


class _Explained(torch.autograd.Function):
    """The gradient takes no solve: by the formula of the value, the weights are where it does not depend on them."""

    @staticmethod
    def forward(
        ctx: Any, side: TrainingSide, tree: Any, diagonal: bool, prior: Tensor, c: Tensor, *parts: Tensor
    ) -> Tensor:
        found = side.solve(c.detach(), prior, below_noise=not diagonal)
        ctx.tree, ctx.diagonal, ctx.caller = tree, diagonal, copy_context()
        ctx.save_for_backward(found.weights, c, *parts)
        return found.diagonal(c) if diagonal else found.matrix(c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.no_grad():
            found = ctx.caller.copy().run(_Explained._backward, ctx, grad)
        return first_order(found, grad, *ctx.saved_tensors)

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, c, *parts = ctx.saved_tensors
        half = weights * grad.unsqueeze(-2) if ctx.diagonal else weights @ ((grad + grad.mT) / 2)
        of_parts: tuple[Tensor | None, ...] = (None,) * len(parts)
        if any(ctx.needs_input_grad[5:]):
            operator = ctx.tree(*parts)
            of_parts = operator._bilinear_derivative(-half.to(operator.dtype), weights.to(operator.dtype))
        return (None, None, None, None, (2 * half).sum_to_size(c.shape), *of_parts)


class PosteriorCovariance(LazyCovariance):
    """``prior - cross A^-1 cross^T``, ``(..., m, m)``; its diagonal takes some test points at a time.

    :param prior: ``(..., m, m)`` and :param cross: ``(..., m, n)``, LinearOperators, evaluated.
    :param side: A.
    :raises InputError: when it is looked at after hyperparameters or data were changed in place.
    """

    def __init__(self, prior: LinearOperator, cross: LinearOperator, *, side: TrainingSide) -> None:
        super().__init__(prior, cross, side=side)
        self.prior, self.cross, self.side = prior, cross, side

    def covariance(self) -> Tensor:
        """``(..., m, m)`` float64, differentiable."""
        self._check_unchanged()
        return self.side.as_then(self._covariance)

    def variances(self) -> Tensor:
        """``(..., m)`` float64, differentiable."""
        self._check_unchanged()
        return self.side.as_then(self._variance)

    def _expect(self) -> None:
        """Tell how many points are about to be solved for, of each system."""
        self.side.expect(self.shape[:-1].numel() // max(1, self.side.noisy.batch_shape.numel()))

    def _covariance(self) -> Tensor:
        c, prior = float64(self.cross).mT, float64(self.prior)
        self._expect()
        return prior - self.side.explained(c, prior.diagonal(dim1=-1, dim2=-2), diagonal=False)

    def _variance(self) -> Tensor:
        prior = float64(self.prior, diagonal=True)
        self._expect()
        lean = isinstance(self.cross, KernelMatrix)
        cross = self.cross if lean else float64(self.cross)
        parts = []
        for rows in spans(self.shape[-1], max(1, self.side.rows // max(1, self.batch_shape.numel()))):
            c = float64(cross[..., rows, :]) if lean else cross[..., rows, :]
            some = prior[..., rows]
            parts.append(some - self.side.explained(c.mT, some, diagonal=True))
        found = torch.cat(parts, dim=-1) if parts else prior
        return found.clamp(min=0)

    def _check_unchanged(self) -> None:
        if self.side.changed:
            raise InputError(
                "The model's hyperparameters or its data changed after this prediction, before its variance was "
                "computed; call the model again."
            )

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.prior.batch_shape, self.cross.batch_shape, self.side.noisy.batch_shape)
        return torch.Size((*batch, *self.prior.shape[-2:]))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        whole_batch = all(isinstance(index, slice) and index == slice(None) for index in batch_indices)
        alike = isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        plain = isinstance(self.prior, KernelMatrix) and isinstance(self.cross, KernelMatrix)
        if self._whole is None and whole_batch and alike and plain:
            part = self.prior[..., row_index, row_index], self.cross[..., row_index, :]
            return PosteriorCovariance(*part, side=self.side)
        return super()._getitem(row_index, col_index, *batch_indices)

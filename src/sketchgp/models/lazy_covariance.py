"""Covariances of posteriors that are computed when somebody looks at them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    RootLinearOperator,
)
from linear_operator.utils.generic import _to_helper
from torch import Tensor

from ..errors import InputError, NumericalError
from ..memory import enough_memory
from ..preconditioners import shifted_cholesky

_ARRAYS = 2  # m x m float64 arrays that exist at once
_FACTORIZED = 4096  # points whose covariance is factorized for samples


def positive(variance: Tensor, prior: Tensor) -> Tensor:
    """Return variances ``(..., m)`` float64, raised to what rounding leaves of the prior's."""
    return torch.maximum(variance, torch.finfo(torch.float64).eps * prior.detach())


class Formula:
    """Formula of a covariance ``(..., m, m)``, which computes its entries.

    :ivar sources: tensors or operators that it is made of; the first one has the dtype and device of the covariance.
    :ivar shape: of the covariance.
    :cvar keeps_graph: whether values that require gradients are kept, so that only one backward pass reaches them.
    """

    sources: tuple[Any, ...]
    shape: torch.Size
    keeps_graph = True

    def matrix(self) -> Tensor:
        """Return the covariance ``(..., m, m)`` in any floating-point dtype."""
        raise NotImplementedError

    def diagonal(self) -> Tensor:
        """Return the variances ``(..., m)`` in any floating-point dtype."""
        raise NotImplementedError

    def root(self) -> Tensor | None:
        """Return E ``(..., m, S)`` where the covariance is ``E E^T`` by definition, and None elsewhere."""
        return None

    def changed(self) -> bool:
        """Return True if something that the covariance depends on was changed in place."""
        return False

    def select(self, rows: slice, batch: tuple[Any, ...]) -> Formula | None:
        """Return the formula for some of the points, or None where entries are selected once all are computed."""
        return None


class LazyCovariance(LinearOperator):
    """A posterior covariance that is computed when it is looked at; its diagonal is computed by itself.

    Like GPyTorch's unevaluated kernels it represents the matrix that :meth:`evaluate_kernel` returns.  A later look
    gives what would have been computed when it was made, with the settings and the autograd mode of that time, or an
    error.  Another dtype or device is asked of the matrix alone: the kernel and the data behind it are the model's.
    """

    def __init__(self, formula: Formula) -> None:
        super().__init__(*formula.sources, formula=formula)
        self.formula = formula
        self._evaluated: LinearOperator | None = None
        self._variances: Tensor | None = None
        self._context = copy_context()
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def as_then(self, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` gives with the context variables and the autograd mode of the construction.

        :raises InputError: where hyperparameters or data were changed since.
        """
        if self.formula.changed():
            raise InputError(
                "The model's hyperparameters or its data changed after this prediction, before its variance was "
                "computed; call the model again."
            )
        inference, gradients = self._modes

        def run() -> Any:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return compute()

        return self._context.copy().run(run)

    def evaluate_kernel(self) -> LinearOperator:
        """Return the covariance as a dense operator, or one of low rank where it is of low rank; it is kept."""
        if self._evaluated is not None:
            return self._evaluated
        root = self.as_then(self.formula.root)
        if root is not None:
            value, evaluated = root, RootLinearOperator(root.to(self.dtype))
        else:
            what = f"A covariance of {self.shape[-1]} points"
            advice = "predict fewer points at once, or read .variance."
            with enough_memory(_ARRAYS * 8 * self.shape.numel(), self.device, what, advice):
                value = self.as_then(lambda: self.formula.matrix().to(self.dtype))
            evaluated = DenseLinearOperator(value)
        if self.formula.keeps_graph or not value.requires_grad:
            self._evaluated = evaluated
        return evaluated

    def _diagonal(self) -> Tensor:
        """Return the variances, those that rounding made negative as tiny ones, whose roots have finite gradients."""
        if isinstance(self._evaluated, DenseLinearOperator):
            value = self._evaluated.diagonal(dim1=-1, dim2=-2)
        elif self._variances is not None:
            value = self._variances
        else:
            value = self.as_then(lambda: self.formula.diagonal().to(self.dtype))
            if self.formula.keeps_graph or not value.requires_grad:
                self._variances = value
        return value.clamp_min(torch.finfo(self.dtype).tiny)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """Return a square root ``(..., m, m)``, which GPyTorch multiplies by given normal numbers.

        A root with fewer columns than points gets columns of zeros.
        """
        evaluated = self.evaluate_kernel()
        if not isinstance(evaluated, RootLinearOperator):
            return super().root_decomposition(method=method)
        root = evaluated.root.to_dense()
        points, samples = root.shape[-2:]
        if points <= samples:
            return super().root_decomposition(method=method)
        return RootLinearOperator(torch.cat([root, root.new_zeros(*root.shape[:-1], points - samples)], dim=-1))

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Draw samples ``(num_samples, ..., m)``, by a Cholesky factor of up to 4,096 points, or GPyTorch's root."""
        evaluated = self.evaluate_kernel()
        if self.shape[-1] > _FACTORIZED or isinstance(evaluated, RootLinearOperator):
            return evaluated.zero_mean_mvn_samples(num_samples)
        covariance = evaluated.to_dense().to(torch.float64)
        eps = torch.finfo(self.dtype).eps
        try:
            root = shifted_cholesky(covariance, eps, limit=1e3 * eps)
        except NumericalError:
            root = shifted_cholesky(_semidefinite(covariance), eps)
        normal = torch.randn(*self.shape[:-1], num_samples, dtype=torch.float64, device=self.device)
        return (root @ normal).movedim(-1, 0).to(self.dtype)

    def __add__(self, other: Any) -> LinearOperator:
        return NoisyCovariance(self, other) if isinstance(other, DiagLinearOperator) else super().__add__(other)

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        device, dtype = _to_helper(*args, **kwargs)
        same = dtype in (None, self.dtype) and device in (None, self.device)
        return self if same else DenseLinearOperator(self.to_dense().to(device=device, dtype=dtype))

    def type(self, dtype: torch.dtype) -> LinearOperator:
        return self.to(dtype=dtype)

    def cpu(self) -> LinearOperator:
        return self.to(device=torch.device("cpu"))

    def cuda(self, device_id: str | None = None) -> LinearOperator:
        return self.to(device=torch.device("cuda" if device_id is None else device_id))

    def _size(self) -> torch.Size:
        return self.formula.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        alike = isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        if self._evaluated is not None or not alike:
            index = (*batch_indices, row_index, col_index)
            return self.evaluate_kernel()[index]
        some = self.formula.select(row_index, batch_indices)
        if some is None:
            return LazyCovariance(Part(self, (*batch_indices, row_index)))
        return self.as_then(lambda: LazyCovariance(some))

    # --- methods that the evaluated operator answers ---------------------------------------------------------

    def representation(self) -> tuple[Tensor, ...]:
        return self.evaluate_kernel().representation()

    def representation_tree(self) -> Any:
        return self.evaluate_kernel().representation_tree()

    def to_dense(self) -> Tensor:
        return self.evaluate_kernel().to_dense()

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.evaluate_kernel() @ rhs

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self.evaluate_kernel().unsqueeze(dim)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self.evaluate_kernel().permute(*dims, -2, -1)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Any) -> Tensor:
        index = (*batch_indices, row_index, col_index)
        return self.evaluate_kernel()[index]

    def detach(self) -> LinearOperator:
        return self.evaluate_kernel().detach()

    def clone(self) -> LinearOperator:
        return self.evaluate_kernel().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearOperator:
        return copy.deepcopy(self.evaluate_kernel(), memo)

    def __reduce__(self) -> Any:
        return DenseLinearOperator, (self.to_dense(),)


class Part(Formula):
    """Some elements of a batch of covariances, or some of the points of each; all are computed, once.

    :param index: of the diagonal ``(..., m)``.
    """

    def __init__(self, full: LazyCovariance, index: tuple[Any, ...]) -> None:
        self.full, self.index, self.both, self.sources = full, index, (*index, index[-1]), (full,)
        self.shape = torch.empty(full.shape, device="meta")[self.both].shape

    def matrix(self) -> Tensor:
        return self.full.to_dense()[self.both]

    def diagonal(self) -> Tensor:
        return self.full.diagonal(dim1=-1, dim2=-2)[self.index]


def _semidefinite(covariance: Tensor) -> Tensor:
    """Make zero the variances, then the eigenvalues, that rounding has made negative; the latter by a constant."""
    kept = (covariance.diagonal(dim1=-2, dim2=-1) > 0).to(covariance.dtype)
    covariance = covariance * kept.unsqueeze(-1) * kept.unsqueeze(-2)
    values, vectors = torch.linalg.eigh(covariance.detach().nan_to_num())
    return covariance + (vectors * (-values).clamp(min=0).unsqueeze(-2)) @ vectors.mT


class NoisyCovariance(AddedDiagLinearOperator):
    """A covariance with noise on its diagonal.

    Samples of a posterior with noise are the sum of samples of the two: the root of the sum that GPyTorch makes of more
    than 800 points has too few columns for the noise.
    """

    @property
    def latent(self) -> Any:
        """The covariance without the noise, a linear operator ``(..., m, m)``."""
        return self._linear_op

    @property
    def noise(self) -> Tensor:
        """The noise variances ``(..., m)``."""
        return self._diag_tensor.diagonal(dim1=-1, dim2=-2)

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Draw samples ``(num_samples, ..., m)``."""
        if not isinstance(self.latent, LazyCovariance):
            return super().zero_mean_mvn_samples(num_samples)
        samples = self.latent.zero_mean_mvn_samples(num_samples)
        return samples + self.noise.sqrt() * torch.randn_like(samples)

"""A covariance that is computed when somebody looks at it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator
from torch import Tensor

from ...errors import InputError
from ...lowrank import shifted_cholesky
from ...memory import enough_memory
from ..converted import ConvertedWhole

_ARRAYS = 2  # of m x m float64 numbers at once
_FACTORIZED = 4096  # points whose covariance is factorized for samples


def positive(variance: Tensor, prior: Tensor) -> Tensor:
    """Variances ``(..., m)`` float64, no smaller than what rounding leaves of the prior's."""
    return torch.maximum(variance, torch.finfo(torch.float64).eps * prior.detach())


class LazyCovariance(ConvertedWhole):
    """A covariance ``(..., m, m)`` that is the evaluated one in everything but when it is computed; its diagonal is
    computed by itself.

    Like GPyTorch's unevaluated kernels it stands for the matrix that :meth:`evaluate_kernel` gives.  What is looked at
    later is what would have been computed when it was made, with the settings and the autograd mode of then, or an
    error.
    """

    _whole: LinearOperator | None = None
    _variances: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = copy_context()
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def changed(self) -> bool:
        """Whether something that the covariance depends on was changed in place since it was made."""
        return False

    def as_then(self, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` gives with the context variables and the autograd mode of then.

        :raises InputError: where hyperparameters or data were changed since.
        """
        if self.changed():
            raise InputError(
                "The model's hyperparameters or its data changed after this prediction, before its variance was "
                "computed; call the model again."
            )
        inference, gradients = self._modes

        def run() -> Any:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return compute()

        return self._context.copy().run(run)

    def covariance(self) -> Tensor:
        """``(..., m, m)``, of any dtype."""
        raise NotImplementedError

    def variances(self) -> Tensor:
        """``(..., m)``, of any dtype."""
        raise NotImplementedError

    def evaluate_kernel(self) -> LinearOperator:
        """The covariance as a dense operator, kept."""
        if self._whole is None:
            what, advice = (
                f"A covariance of {self.shape[-1]} points",
                "predict fewer points at once, or read .variance.",
            )
            with enough_memory(_ARRAYS * 8 * self.shape.numel(), self.device, what, advice):
                self._whole = DenseLinearOperator(self.as_then(lambda: self.covariance().to(self.dtype)))
        return self._whole

    def _diagonal(self) -> Tensor:
        if self._whole is not None:
            return self._whole._diagonal().clone()
        if self._variances is None:
            self._variances = self.as_then(lambda: self.variances().to(self.dtype))
        return self._variances.clone()  # which may be changed in place

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """``(num_samples, ..., m)``; up to 4,096 points by a Cholesky factor, beyond by GPyTorch's root."""
        if self.shape[-1] > _FACTORIZED:
            return self.evaluate_kernel().zero_mean_mvn_samples(num_samples)
        covariance = self.to_dense().to(torch.float64)
        root = shifted_cholesky(covariance, torch.finfo(self.dtype).eps)
        normal = torch.randn(*self.shape[:-1], num_samples, dtype=torch.float64, device=self.device)
        return (root @ normal).movedim(-1, 0).to(self.dtype)

    # --- what a LinearOperator must offer: all of it is the evaluated one's ----------------------------------

    def representation(self) -> tuple[Tensor, ...]:
        return self.evaluate_kernel().representation()

    def representation_tree(self) -> Any:
        return self.evaluate_kernel().representation_tree()

    def to_dense(self) -> Tensor:
        """``(..., m, m)``."""
        return self.evaluate_kernel().to_dense()

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.evaluate_kernel()._matmul(rhs)

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return self.evaluate_kernel()._expand_batch(batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self.evaluate_kernel()._unsqueeze_batch(dim)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self.evaluate_kernel()._permute_batch(*dims)

    def _sum_batch(self, dim: int) -> LinearOperator:
        return self.evaluate_kernel()._sum_batch(dim)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        alike = isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        if self._whole is None and alike:
            return Part(self, index=(*batch_indices, row_index))
        return self.evaluate_kernel()._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Any) -> Tensor:
        return self.evaluate_kernel()._get_indices(row_index, col_index, *batch_indices)

    def detach(self) -> LinearOperator:
        return self.evaluate_kernel().detach()

    def clone(self) -> LinearOperator:
        return self.evaluate_kernel().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearOperator:
        return copy.deepcopy(self.evaluate_kernel(), memo)

    def __reduce__(self) -> Any:
        return DenseLinearOperator, (self.to_dense(),)


class Part(LazyCovariance):
    """Some elements of a batch of covariances, or some of the points of each; what is computed is the whole, once.

    :param whole: ``(..., m, m)``; :param index: of its diagonal.
    """

    def __init__(self, whole: LazyCovariance, *, index: tuple[Any, ...]) -> None:
        super().__init__(whole, index=index)
        self.whole, self.index, self.both = whole, index, (*index, index[-1])
        self._shape = torch.empty(whole.shape, device="meta")[self.both].shape

    def covariance(self) -> Tensor:
        """Of these elements and points."""
        return self.whole.to_dense()[self.both]

    def variances(self) -> Tensor:
        """Of these elements and points."""
        return self.whole._diagonal()[self.index]

    def _size(self) -> torch.Size:
        return self._shape

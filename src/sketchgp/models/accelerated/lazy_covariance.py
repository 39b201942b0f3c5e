"""A covariance that is computed when somebody looks at it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator
from torch import Tensor

from ...lowrank import shifted_cholesky
from ..converted import ConvertedWhole

_FACTORIZED = 4096  # points whose covariance is factorized for samples


class LazyCovariance(ConvertedWhole):
    """A covariance ``(..., m, m)`` that is the evaluated one in everything but when it is computed; its diagonal is
    computed by itself.

    Like GPyTorch's unevaluated kernels it stands for the matrix that :meth:`evaluate_kernel` gives.
    """

    _whole: LinearOperator | None = None
    _variances: Tensor | None = None

    def covariance(self) -> Tensor:
        """``(..., m, m)``, of any dtype."""
        raise NotImplementedError

    def variances(self) -> Tensor:
        """``(..., m)``, of any dtype."""
        raise NotImplementedError

    def evaluate_kernel(self) -> LinearOperator:
        """The covariance as a dense operator, kept."""
        if self._whole is None:
            self._whole = DenseLinearOperator(self.covariance().to(self.dtype))
        return self._whole

    def _diagonal(self) -> Tensor:
        if self._whole is not None:
            return self._whole._diagonal().clone()
        if self._variances is None:
            self._variances = self.variances().to(self.dtype)
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

"""Covariances of posteriors that are computed when they are needed, and what converting one means."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator
from linear_operator.utils.generic import _to_helper


class ConvertedWhole(LinearOperator):
    """A symmetric operator of which another dtype or device is asked for the matrix alone: the kernel and the data
    behind it are the model's."""

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

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

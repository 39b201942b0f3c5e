"""The elementwise product of kernel matrices whose kernels look at different inputs, as one kernel matrix.

``covar_x.mul(covar_i)`` in a model's ``forward`` (GPyTorch's Hadamard multitask example) makes such a product.
GPyTorch multiplies with it through Lanczos approximations of both factors; here it is one kernel of joined inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn


class JoinedKernel(Kernel):
    """``k(x, z) = prod_p k_p(x[columns of p], z[columns of p])``.

    :param parts: the kernels, whose active dimensions were selected already.
    :param widths: how many columns each one looks at; they follow each other.
    :param integer: whether a part's inputs are indices.
    """

    def __init__(self, parts: list[Kernel], widths: list[int], integer: list[bool]) -> None:
        super().__init__(batch_shape=torch.broadcast_shapes(*(part.batch_shape for part in parts)))
        self.parts = nn.ModuleList(parts)
        self.widths, self.integer = widths, integer

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """The columns of each part."""
        ends = torch.tensor(self.widths).cumsum(0).tolist()
        return [tuple(range(end - width, end)) for end, width in zip(ends, self.widths, strict=True)]

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        value: Any = None
        for part, columns, integer in zip(self.parts, self.columns, self.integer, strict=True):
            a, b = (x[..., columns[0] : columns[-1] + 1] for x in (x1, x2))
            if integer:
                a, b = a.round().long(), b.round().long()
            factor = part.forward(a, b, diag=diag, **params)
            factor = factor if torch.is_tensor(factor) else factor.to_dense()
            value = factor if value is None else value * factor
        return value

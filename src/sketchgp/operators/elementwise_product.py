"""The elementwise product of kernel matrices, as one kernel matrix (see :mod:`sketchgp.operators.joined`)."""

from __future__ import annotations

import torch

from .joined import JoinedKernel
from .kernel_matrix import KernelMatrix


def elementwise_product(parts: list[KernelMatrix]) -> KernelMatrix | None:
    """``k_1(x1, x2) * k_2(z1, z2) * ...`` for kernel matrices of one shape; None where one has no input columns."""
    widths = [part.x1.shape[-1] for part in parts]
    if len({part.shape[-2:] for part in parts}) > 1 or 0 in widths:
        return None
    integer = [not part.x1.is_floating_point() for part in parts]
    batch = torch.broadcast_shapes(*(x.shape[:-2] for part in parts for x in (part.x1, part.x2)))
    dtype = next((part.x1.dtype for part in parts if part.x1.is_floating_point()), parts[0].dtype)
    x1, x2 = (
        torch.cat([x.expand(*batch, *x.shape[-2:]).to(dtype) for x in side], dim=-1)
        for side in ([part.x1 for part in parts], [part.x2 for part in parts])
    )
    same = all(part.same for part in parts)
    if same and not (x1.requires_grad or x2.requires_grad):
        x2 = x1
    kernel = JoinedKernel([part.kernel for part in parts], widths, integer)
    return KernelMatrix.assemble(kernel, x1, x2, parts[0].engine, same, parts[0].precision)

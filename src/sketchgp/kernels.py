"""Kernels that GPyTorch lacks, in its style, and kernels and means by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel
from gpytorch.means import ConstantMean, LinearMean, Mean
from gpytorch.priors import Prior
from torch import Tensor

from . import checks


class LaplaceKernel(Kernel):
    r"""The Laplace kernel of the l1 distance: :math:`k(x, z) = \exp(-\sum_i |x_i - z_i| / \ell_i)`.

    It is the kernel of choice for molecular features (Rupp et al., Phys. Rev. Lett. 108, 058301, 2012, and the
    QM9 experiments of the ASkotch paper), where its bandwidth is called sigma.  ``MaternKernel(nu=0.5)`` has the
    Euclidean distance in its place; in one dimension the two are the same.

    There is no output scale; wrap it in a ``ScaleKernel``.

    :param ard_num_dims: one lengthscale for each of so many dimensions; one for all by default.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: the dimensions that the kernel looks at.
    :param lengthscale_prior: a prior on the lengthscale.
    :param lengthscale_constraint: a constraint on the lengthscale, ``Positive()`` by default.

    :raises InputError: for what is something else.

    The ``lengthscale`` has shape ``(*batch_shape, 1, ard_num_dims or 1)``.

    Example::

        kernel = gpytorch.kernels.ScaleKernel(sketchgp.LaplaceKernel(ard_num_dims=3))
        kernel(torch.randn(10, 3))  # a 10 x 10 covariance
    """

    has_lengthscale = True
    is_stationary = True

    def __init__(
        self,
        ard_num_dims: int | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Sequence[int] | None = None,
        lengthscale_prior: Prior | None = None,
        lengthscale_constraint: Interval | None = None,
    ) -> None:
        owner = "LaplaceKernel"
        ard_num_dims = checks.count(owner, "ard_num_dims", ard_num_dims, optional=True)
        shape = checks.counts(owner, "batch_shape", () if batch_shape is None else batch_shape)
        dims = None if active_dims is None else checks.counts(owner, "active_dims", active_dims, least=0)
        checks.instance(owner, "lengthscale_prior", lengthscale_prior, Prior | None, "a gpytorch prior, or None")
        checks.instance(
            owner, "lengthscale_constraint", lengthscale_constraint, Interval | None, "a gpytorch constraint, or None"
        )
        super().__init__(ard_num_dims, torch.Size(shape), dims, lengthscale_prior, lengthscale_constraint)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        """The kernel between x1 ``(..., n, d)`` and x2 ``(..., m, d)``: ``(..., n, m)``, or ``(..., n)`` for ``diag``.

        With ``last_dim_is_batch`` each dimension is a kernel of its own: ``(..., d, n, m)``.
        """
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if last_dim_is_batch:
            x1, x2 = x1.mT.unsqueeze(-1), x2.mT.unsqueeze(-1)
        if diag:
            return (x1 - x2).abs().sum(dim=-1).neg().exp()
        return torch.cdist(x1, x2, p=1.0).neg().exp()


class ArcCosineKernel(Kernel):
    r"""The arc-cosine kernel: :math:`k(x, z) = \|x\|^q \|z\|^q J_q(\theta) / \pi` with theta the angle between x and z.

    It is the covariance of an infinitely wide layer of units :math:`\max(0, w \cdot x)^q` with normal weights w, with
    :math:`J_0 = \pi - \theta`, :math:`J_1 = \sin\theta + (\pi - \theta)\cos\theta` and
    :math:`J_2 = 3 \sin\theta\cos\theta + (\pi - \theta)(1 + 2\cos^2\theta)`.  A layer with a bias is had by a column
    of ones in x.  Cho and Saul, "Kernel methods for deep learning" (NeurIPS 2009).
    Zero vectors are at a right angle to all vectors, themselves included: a step at 0 is one half.
    Entries of order 0 are computed in float64, where angles of a few degrees are right to 1e-8.

    There is no output scale; wrap it in a ``ScaleKernel``.

    :param order: q: 0 for steps, 1 for rectified linear units, 2 for their squares.
    :param active_dims: the dimensions that the kernel looks at.
    :raises InputError: for what is something else.
    """

    is_stationary = False

    def __init__(self, order: int = 1, active_dims: Sequence[int] | None = None) -> None:
        dims = None if active_dims is None else checks.counts("ArcCosineKernel", "active_dims", active_dims, least=0)
        super().__init__(active_dims=dims)
        self.order = checks.count("ArcCosineKernel", "order", order, least=0, most=2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """The kernel between x1 ``(..., n, d)`` and x2 ``(..., m, d)``: ``(..., n, m)``, or ``(..., n)`` for
        ``diag``."""
        # acos loses half of the digits
        dtype, x1, x2 = x1.dtype, *(x.double() if self.order == 0 else x for x in (x1, x2))
        lengths = x1.norm(dim=-1), x2.norm(dim=-1)
        if diag:
            products, size = (x1 * x2).sum(dim=-1), lengths[0] * lengths[1]
        else:
            products, size = x1 @ x2.mT, lengths[0].unsqueeze(-1) * lengths[1].unsqueeze(-2)
        cosine = (products / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp(-1, 1)
        edge = 1 - torch.finfo(cosine.dtype).eps  # where the slope of acos is infinite
        angle = torch.where(cosine.abs() < edge, cosine, cosine.detach()).acos()
        sine, rest = angle.sin(), math.pi - angle
        if self.order == 0:
            result = rest
        elif self.order == 1:
            result = sine + rest * cosine
        else:
            result = 3 * sine * cosine + rest * (1 + 2 * cosine.square())
        return (size**self.order * result / math.pi).to(dtype)


BY_NAME: dict[str, Callable[..., Kernel]] = {  # without an output scale
    "rbf": RBFKernel,
    "matern12": lambda **options: MaternKernel(nu=0.5, **options),
    "exponential": lambda **options: MaternKernel(nu=0.5, **options),
    "matern32": lambda **options: MaternKernel(nu=1.5, **options),
    "matern52": lambda **options: MaternKernel(nu=2.5, **options),
    "laplacian": LaplaceKernel,
    "rational_quadratic": RQKernel,
}


MEANS = ("constant", "linear")


def mean_by_name(name: str, d: int) -> Mean:
    """Return a prior mean of ``d`` inputs, one of :data:`MEANS`, which is zero."""
    if name == "constant":
        return ConstantMean()
    mean = LinearMean(d)
    for parameter in mean.parameters():
        torch.nn.init.zeros_(parameter)
    return mean

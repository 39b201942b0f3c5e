"""The l1 Laplace kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from torch import Tensor

from .. import checks


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
        if last_dim_is_batch:
            x1, x2 = (x.mT.unsqueeze(-1) for x in (x1 / self.lengthscale, x2 / self.lengthscale))
        else:
            x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            return (x1 - x2).abs().sum(dim=-1).neg().exp()
        return torch.cdist(x1, x2, p=1.0).neg().exp()

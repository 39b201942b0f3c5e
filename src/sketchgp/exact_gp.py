"""``sketchgp.ExactGP``: a GPyTorch ``ExactGP`` that is accelerated from its construction."""

from __future__ import annotations

from typing import Any, Literal

import gpytorch
import torch
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from .accelerate import install
from .checks import instance
from .preconditioners import Preconditioner
from .settings import Variance
from .solvers import FullProblem, Solver


class ExactGP(gpytorch.models.ExactGP):
    """Base class for new models: ``gpytorch.models.ExactGP`` followed by :func:`sketchgp.accelerate`.

    Define ``mean_module``, ``covar_module`` and ``forward(x)`` as for GPyTorch's class; everything that takes one of
    its models takes this one.

    :param train_x: training inputs ``(..., n, d)``, or a tuple of tensors.
    :param train_y: training targets ``(..., n)``.
    :param likelihood: a Gaussian likelihood.
    :param solver: as for :func:`sketchgp.accelerate`, like the parameters after it.
    :raises InputError: for arguments that :func:`sketchgp.accelerate` refuses.
    """

    def __init__(
        self,
        train_x: Tensor | tuple[Tensor, ...],
        train_y: Tensor,
        likelihood: Any,
        solver: Solver[FullProblem] | Literal["auto"] = "auto",
        preconditioner: Preconditioner | Literal["auto"] | None = "auto",
        matmul: Literal["auto", "dense", "tiled", "keops", "triton", "gpytorch"] = "auto",
        matmul_precision: Literal["float32", "tf32"] = "float32",
        variance: Variance = "auto",
        variance_samples: int = 128,
        probe_seed: int | None = 0,
    ) -> None:
        owner = type(self).__name__
        parts = train_x if isinstance(train_x, tuple | list) else [train_x]
        if train_x is not None or train_y is not None:
            for name, value in [("train_x", part) for part in parts] + [("train_y", train_y)]:
                instance(owner, name, value, torch.Tensor, "a tensor" + (", or a tuple of them" * (name == "train_x")))
        instance(owner, "likelihood", likelihood, _GaussianLikelihoodBase, "a Gaussian likelihood")
        super().__init__(train_x, train_y, likelihood)
        install(
            self, preconditioner, solver, matmul, matmul_precision, variance, variance_samples, probe_seed, built=False
        )

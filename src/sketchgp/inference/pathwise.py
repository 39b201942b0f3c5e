"""Variances by samples: what the predictor of an inducing-point model makes of functions that are known.

Draw S functions f from the prior and noises e, solve the inducing-point problem for the targets ``f(x_i) + e_i`` as
for the data, and look at the errors ``f(x) - k(x, z) W`` at test points.  Their mean square estimates the mean squared
error that the predictor has under the prior, without bias and without an m x m matrix.

Wilson, Borovitskiy, Terenin, Mostowsky, Deisenroth, "Efficiently sampling functions from Gaussian process posteriors"
(ICML 2020), for functions that are corrected by a solve; Lin, Antoran, Padhy, Janz, Hernandez-Lobato, Terenin,
"Sampling from Gaussian process posteriors using stochastic gradient descent" (NeurIPS 2023), for inducing points and
solvers without a factor; Rahimi and Recht, "Random features for large-scale kernel machines" (NeurIPS 2007).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.random_features import PriorPaths
from ..operators.tall import constant
from ..operators.tiles import spans
from ..random_streams import generator
from ..solvers import InducingPointProblem, Solution

_ENTRIES = 2**22  # of k(x, z) held at once


class ErrorPaths:
    """Errors ``e_s(x) = f_s(x) - k(x, z) W_s`` of S samples; ``E e e^T`` is the covariance of the predictor's error.

    With ``G = k(., z) (Kzx D^-1 Kxz + Kzz)^-1 Kzx D^-1`` the predictor, D the noises and K the prior covariance, it is
    ``K - G Kx. - (G Kx.)^T + G (Kxx + D) G^T``: at least the covariance of the exact posterior, whose mean is the best
    linear predictor.  A solve that ends early makes a worse predictor, and the errors are then of that one.

    One solve with S columns and ``n S L`` cosines a term of the kernel (:class:`PriorPaths`); O((n + m + L d) S) memory
    beside tiles and what the solver needs.

    :param kernel: a GPyTorch kernel without batch.
    :param x: ``(n, d)``; :param z: ``(m, d)`` inducing points.
    :param noise: ``(n,)`` variances, float64.
    :param samples: S.  A variance has a relative standard deviation of ``sqrt(2 / S)``, and a larger one below a
        millionth or so of the prior's, where it hangs on frequencies that are seldom drawn.
    :param solve: gives the solution of a problem with targets ``(n, S)``.
    :param seed: of functions and noises.
    :raises InputError: for a kernel without random features.

    :ivar solution: the weights ``(m, S)`` and the report of the solve.
    """

    def __init__(
        self,
        kernel: Any,
        x: Tensor,
        z: Tensor,
        noise: Tensor,
        samples: int,
        solve: Callable[[InducingPointProblem], Solution],
        seed: int = 0,
    ) -> None:
        stream = generator(seed, "functions and noises of pathwise variances")
        self.kernel, self.z, self.samples = kernel, z, samples
        self.prior = PriorPaths(kernel, z.mean(dim=0, keepdim=True), samples, stream)
        targets = self.prior(x)
        unit = torch.randn(targets.shape, dtype=torch.float64, generator=stream).to(x.device)
        targets += unit.mul_(noise.sqrt().unsqueeze(1))
        self.solution = solve(InducingPointProblem(kernel, x, targets.to(x.dtype), noise, z))

    def __call__(self, x: Tensor) -> Tensor:
        """The errors at x ``(..., p, d)``: ``(..., p, S)``, float64, differentiable in x."""
        flat = x.reshape(-1, x.shape[-1])
        errors = self.prior(flat) - expansion(self.kernel, flat, self.z, self.solution.value)
        return errors.reshape(*x.shape[:-1], self.samples)


def expansion(kernel: Any, x: Tensor, z: Tensor, weights: Tensor) -> Tensor:
    """``k(x, z) W`` for x ``(..., p, d)``, z ``(m, d)`` and float64 W ``(m, t)``: ``(..., p, t)``, float64.

    Differentiable in x, with the kernel's parameters as constants.
    """
    parts = []
    for span in spans(x.shape[-2], max(1, _ENTRIES // (len(z) * x.shape[:-2].numel()))):
        block = constant(KernelMatrix.of(kernel, x[..., span, :], z, engine="tiled")).double().to_dense()
        parts.append(block @ weights)
    return torch.cat(parts, dim=-2)

"""Samples of posteriors, of functions that are drawn from the prior and corrected by a solve.

Draw S functions f from the prior and noises e, and solve for the targets ``f(x_i) + e_i`` as for the data.  The errors
``f - f^`` of what is predicted of them are draws of the error that a prediction has: for a full problem those of the
posterior about its mean, whatever the data are; for inducing points those of a predictor that is not the best one.
Their mean square estimates a variance without bias, at any number of test points.

Wilson, Borovitskiy, Terenin, Mostowsky, Deisenroth, "Efficiently sampling functions from Gaussian process posteriors"
(ICML 2020); Lin, Antoran, Padhy, Janz, Hernandez-Lobato, Terenin, "Sampling from Gaussian process posteriors using
stochastic gradient descent" (NeurIPS 2023), for inducing points and solvers without a factor; Rahimi and Recht, "Random
features for large-scale kernel machines" (NeurIPS 2007).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operators import KernelMatrix
from ..operators.random_features import PriorPaths
from ..operators.tall import constant
from ..random_streams import generator
from ..solvers import Solution

OF_PREDICTOR = "functions and noises of pathwise variances"  # purpose of those of inducing points


class Deviations:
    """``d_s(x) = f_s(x) - k(x, points) W_s`` of S functions from the prior; whoever solves for W puts it here.

    Of a full problem, with the training inputs X as points and ``W = (K + D)^-1 (f(X) + D^(1/2) xi)``, they are the
    deviations of S samples of the posterior from its mean: ``E d d^T`` is its covariance.  A solve that ends early adds
    to the variance the mean square of what its weights are off by there.

    Of inducing points z, they are the errors of the predictor ``G = k(., z) (Kzx D^-1 Kxz + Kzz)^-1 Kzx D^-1``.  With
    K the prior covariance, ``E d d^T`` is ``K - G Kx. - (G Kx.)^T + G (Kxx + D) G^T``: at least the covariance of the
    exact posterior, whose mean is the best linear predictor.  A solve that ends early makes a worse predictor, and the
    errors are then of that one.

    One solve with S columns and ``n S L`` cosines a term of the kernel (:class:`PriorPaths`); O((n + m + L d) S) memory
    beside tiles and what the solver needs.

    :param kernel: a GPyTorch kernel without batch.
    :param points: ``(m, d)``, whose mean phases are counted from.
    :param samples: S.  A mean square of them has a relative standard deviation of ``sqrt(2 / S)``; of inducing points a
        larger one below a millionth or so of the prior's variance, where it hangs on frequencies that are seldom drawn.
    :param seed: of functions and noises; :param frequencies: of each function, None for 1024.
    :param purpose: of the random numbers.
    :raises InputError: for a kernel without random features.

    :ivar weights: W ``(m, S)``, float64; :ivar solution: whose value they are, for inducing points.
    """

    weights: Tensor
    solution: Solution

    def __init__(
        self,
        kernel: Any,
        points: Tensor,
        samples: int,
        seed: int = 0,
        frequencies: int | None = None,
        purpose: str = "functions and noises of posterior samples",
    ) -> None:
        self._stream = generator(seed, purpose)
        self.kernel, self.points, self.samples = kernel, points, samples
        self.prior = PriorPaths(kernel, points.mean(dim=0, keepdim=True), samples, self._stream, frequencies)

    def targets(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return ``f(x) + noise^(1/2) xi``, ``(n, S)`` float64: draws of ``N(0, K + D)``."""
        targets = self.prior(x)
        unit = torch.randn(targets.shape, dtype=torch.float64, generator=self._stream).to(x.device)
        return targets + unit.mul_(noise.to(torch.float64).sqrt().unsqueeze(1))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the deviations at x ``(..., p, d)``: ``(..., p, S)``, float64, differentiable in x."""
        flat = x.reshape(-1, x.shape[-1])
        values = self.prior(flat) - expansion(self.kernel, flat, self.points, self.weights)
        return values.reshape(*x.shape[:-1], self.samples)


def expansion(kernel: Any, x: Tensor, z: Tensor, weights: Tensor) -> Tensor:
    """Return ``k(x, z) W`` for x ``(..., p, d)``, z ``(m, d)`` and float64 W ``(m, t)``: ``(..., p, t)``, float64.

    Differentiable in x, with the kernel's parameters as constants; the matrix is evaluated in float64, by tiles.
    """
    return constant(KernelMatrix.of(kernel, x, z, engine="tiled")).double() @ weights

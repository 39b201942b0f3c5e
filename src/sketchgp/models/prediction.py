"""``Prediction``, and what predictions of all kinds of models share: chunks, and the noise of new points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor
from tqdm.auto import tqdm

from ..cards import Card, Shown, seconds, shape, span, tensor_kind
from ..errors import InputError
from ..operators.tiles import spans
from ..report import SolveReport

T = TypeVar("T")


@dataclass(repr=False)
class Prediction(Shown):
    """Posterior at m points.  ``variance`` is that of the latent function, as ``model(x).variance``, and so are
    ``stddev`` and ``confidence_region()``; ``observation_variance`` has the noise added, as
    ``likelihood(model(x)).variance``, and is None where the likelihood knows no noise for new points
    (``FixedNoiseGaussianLikelihood`` without a learned one).

    ``variance_method`` is ``"exact"`` (one linear solve a point, to an error below a hundredth of the noise),
    ``"low_rank"`` or ``"samples"`` (see :func:`sketchgp.accelerate`), ``"dtc"`` (of an
    :class:`sketchgp.InducingPointGP`, whose samples' solve ``model.variance_solution.report`` is of), or ``"none"``.
    ``variance_standard_error`` is the relative one of each ``variance``, of its shape; None where they are not by
    samples or low-rank.
    ``variance_check`` compares those with exact ones at ``points`` test points (None where ``"auto"`` did so in an
    earlier prediction): ``min_ratio``, ``median_ratio``,
    ``max_ratio`` of the latent variances, and ``observation_min_ratio`` and so on with the noise added.
    ``report`` is of the solve behind the mean, also where that had been done before; None where there was none: up to
    800 points the matrix is factorized, and a saved model brings its solution.
    ``mean_error_bound`` ``(m,)`` float64 is certain: no mean is further than that from the one that exact arithmetic
    makes of the same model.  It is ``k(x, x)^1/2`` times ``report.error_bound``, and the rounding of the mean itself.
    ``variance_error_bound`` ``(m,)`` float64 is as certain of exact variances (arXiv:2102.08314).
    Both are None for all but models of one plain kernel without batch, and where ``report.error_bound`` is not there
    (docs/solvers.md, "How sure is the answer"): the rounding of kernels without a fast path is not known.  Nor is that
    of inputs that ``forward`` computes, and, for the mean, of a prior mean that is not constant.
    """

    mean: Tensor
    variance: Tensor | None
    observation_variance: Tensor | None
    variance_method: str
    variance_check: dict[str, Any] | None
    report: SolveReport | None
    variance_standard_error: Tensor | None = None
    mean_error_bound: Tensor | None = None
    variance_error_bound: Tensor | None = None

    @property
    def stddev(self) -> Tensor:
        """Square root of ``variance``: without the noise, like that of ``model(x)``.

        :raises InputError: for a prediction without variances.
        """
        if self.variance is None:
            raise InputError("Prediction: stddev expects variances, got variance=None; call predict with another one.")
        return self.variance.clamp_min(0).sqrt()

    @property
    def mean_error_bound_deviations(self) -> Tensor | None:
        """``mean_error_bound`` over the posterior deviation of an observation, where variances are exact."""
        bound, variance = self.mean_error_bound, self.observation_variance
        if bound is None or variance is None or self.variance_method != "exact":
            return None
        return bound / variance.to(torch.float64).sqrt()

    def confidence_region(self) -> tuple[Tensor, Tensor]:
        """Return ``mean - 2 stddev`` and ``mean + 2 stddev``, as GPyTorch's distributions do: without the noise.

        :raises InputError: for a prediction without variances.
        """
        twice = 2 * self.stddev
        return self.mean - twice, self.mean + twice

    def _card(self) -> Card:
        report, check, error = self.report, self.variance_check, self.variance_standard_error
        deviations = [
            None if variance is None else span(variance.clamp_min(0).sqrt())
            for variance in (self.variance, self.observation_variance)
        ]
        compared = None
        if check is not None:
            compared = "{min_ratio:.2f} to {max_ratio:.2f} of exact variances at {points} points".format(**check)
        solve = "factorized, or solved before"
        if report is not None:
            state = "converged" if report.converged else f"{report.reason}"
            solve = f"{report.solver}, {state}, {' '.join(report.fit_in_words)}, {seconds(report.seconds)}"
        return Card.of(
            f"Prediction: {shape(self.mean)} points, {tensor_kind(self.mean)}",
            mean=span(self.mean),
            error_of_mean=self._error_of_mean(),
            deviation=deviations[0],
            with_noise=deviations[1],
            variances=self.variance_method
            + ("" if error is None else f", standard error {error.median():.1%}, at most {error.max():.1%}"),
            compared=compared,
            solve=solve,
        )

    def _error_of_mean(self) -> str:
        """Describe the estimated error, and the bound where it is below a deviation or was asked for."""
        report, words = self.report, []
        if report is not None and report.max_deviations < math.inf:
            words.append(f"about {report.max_deviations:.1g} posterior deviations at the most")
        if report is not None and self.mean_error_bound is not None and report.certainty < math.inf:
            words.append(f"certainly below {self.mean_error_bound.max():.1e}")
        return ", ".join(words)


def in_chunks(compute: Callable[..., T], inputs: list[Tensor], rows: int, what: str, show: bool) -> list[T]:
    """Return what ``compute`` gives for some rows of all inputs at a time, with a progress bar named ``what``."""
    parts = list(spans(len(inputs[0]), rows))
    bar = tqdm(parts, desc=what, disable=not show or len(parts) < 2, leave=False)
    return [compute(*(x[part] for x in inputs)) for part in bar]


def of_posterior(model: Any, x: Tensor, method: str, report: SolveReport | None, rows: int, show: bool) -> Prediction:
    """Predict by a model's own posterior, some rows of x at a time.

    :param method: of variances; of ``"samples"`` there are ``model.variance_samples``.
    """

    def moments(some: Tensor) -> tuple[Tensor, ...]:
        at = model(some)
        if method == "none":
            return (at.mean,)
        diagonal = at.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)  # GPyTorch's variance has a floor
        return at.mean, diagonal.reshape(at.mean.shape)

    with torch.no_grad():
        parts = in_chunks(moments, [x], rows, "prediction", show)
        mean, *variances = map(torch.cat, zip(*parts, strict=True))
        if not variances:
            return Prediction(mean, None, None, method, None, report)
        latent, error = variances[0], None
        if method == "samples":
            error = torch.full_like(latent, math.sqrt(2 / model.variance_samples))
        observed = observation_variance(model.likelihood, [x], latent)
        return Prediction(mean, latent, observed, method, None, report, error)


def observation_variance(likelihood: Any, inputs: list[Tensor], latent: Tensor) -> Tensor | None:
    """Return variances of new observations at some inputs, or None where the likelihood does not know their noise.

    :param latent: variances without the noise.
    """
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        second = likelihood.second_noise_covar
        return None if second is None else latent + second.noise.expand_as(latent)
    noise = likelihood._shaped_noise_covar(latent.shape, inputs).diagonal(dim1=-1, dim2=-2)
    return latent + (noise.reshape(latent.shape) if noise.numel() == latent.numel() else noise.expand_as(latent))


def check_choice(kind: str, meaning: str, variance: str | None) -> None:
    """Refuse a way to compute variances for a model that has one way of its own.

    :param kind: the model's class; :param meaning: what its variance is.
    :raises InputError: unless ``variance`` is ``"auto"`` or None.
    """
    if variance not in (None, "auto"):
        raise InputError(f"The variance of {kind} is {meaning}; variance expects 'auto' or None, got {variance!r}.")

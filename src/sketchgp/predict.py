"""``predict(model, x)``: posterior mean and variance at many points, in chunks, with what the solves did."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch import settings
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.models import ExactGP
from torch import Tensor
from tqdm.auto import tqdm

from .accelerate import acceleration_of
from .cards import Card, Shown, seconds, shape, span, tensor_kind
from .checks import array, count, flag, points_like, refusal, tensor, word
from .errors import ConvergenceWarning, InputError, warn
from .inducing_point_gp import InducingPointGP
from .interactive import shows_progress
from .models.accelerated.approximate import refuse
from .models.accelerated.conditioning import Conditioning, PlainConditioning
from .models.accelerated.posterior import (
    calls_its_own_way,
    mean_at,
    solution_report,
    strategy_of,
)
from .models.accelerated.strategy import AcceleratedPredictionStrategy
from .models.transforms import Transforms
from .operators.tiles import spans
from .random_feature_gp import RandomFeatureGP
from .report import SolveReport, own_solves
from .settings import VARIANCES, Variance
from .settings import variance as variance_setting

_MEAN_ROWS = 8192
_VARIANCE_ROWS = 256
_STREAMED_ROWS = 1024


@dataclass(repr=False)
class Prediction(Shown):
    """Posterior at m points.  ``variance`` is that of the latent function, as ``model(x).variance``, and so are
    ``stddev`` and ``confidence_region()``; ``observation_variance`` has the noise added, as
    ``likelihood(model(x)).variance``, and is None where the likelihood knows no noise for new points
    (``FixedNoiseGaussianLikelihood`` without a learned one).

    ``variance_method`` is ``"exact"`` (one linear solve a point, to an error below a hundredth of the noise),
    ``"low_rank"`` or ``"samples"`` (see :func:`sketchgp.accelerate`), ``"dtc"`` (of an
    :class:`sketchgp.InducingPointGP`, whose samples' solve ``model.variance_solution.report`` is of), ``"features"``
    (of a :class:`sketchgp.RandomFeatureGP`), or ``"none"``.
    ``variance_standard_error`` is the relative one of each ``variance``, of its shape; None where they are not by
    samples or low-rank.
    ``variance_check`` compares those with exact ones at ``points`` test points (None where ``"auto"`` did so in an
    earlier prediction): ``min_ratio``, ``median_ratio``,
    ``max_ratio`` of the latent variances, and ``observation_min_ratio`` and so on with the noise added.
    ``report`` is of the solve behind the mean, also where that had been done before; None where there was none: up to
    800 points the matrix is factorized, and a saved model brings its solution.
    ``mean_error_bound`` ``(m,)`` float64 is certain: no mean is further than that from the one that exact arithmetic
    makes of the same model.  It is ``k(x, x)^1/2`` times ``report.error_bound``, and the rounding of the mean itself.
    ``mean_error_bound_deviations`` is it over the posterior deviation of an observation, where variances are exact.
    ``variance_error_bound`` ``(m,)`` float64 is as certain of exact variances (arXiv:2102.08314).
    All are None for all but models of one plain kernel without batch, and where ``report.error_bound`` is not there
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
    mean_error_bound_deviations: Tensor | None = None
    variance_error_bound: Tensor | None = None

    @property
    def stddev(self) -> Tensor:
        """Square root of ``variance``: without the noise, like that of ``model(x)``.

        :raises InputError: for a prediction without variances.
        """
        if self.variance is None:
            raise InputError("Prediction: stddev expects variances, got variance=None; call predict with another one.")
        return self.variance.clamp_min(0).sqrt()

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
        """The estimate, and the bound where it is below a deviation or was asked for."""
        report, words = self.report, []
        if report is not None and report.max_deviations < math.inf:
            words.append(f"about {report.max_deviations:.1g} posterior deviations at the most")
        if report is not None and self.mean_error_bound is not None and report.certainty < math.inf:
            words.append(f"certainly below {self.mean_error_bound.max():.1e}")
        return ", ".join(words)


def predict(
    model: ExactGP,
    x: Any,
    variance: Variance | None = "auto",
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Prediction:
    """Posterior mean and variance of an accelerated model at many test points.

    Unlike ``model(x)`` it never makes an m x n or m x m array: the mean goes by chunks of tiles, and so do variances.

    :param model: a model that :func:`accelerate` was called on, or an :class:`InducingPointGP`, whose variances are
        those of DTC or by samples as the model was told, or a :class:`RandomFeatureGP` that has learned (``variance``
        is then ``"auto"`` or None); it is put into eval mode.
    :param x: test inputs ``(m, d)``, or ``(m,)`` where d is 1: a tensor, a numpy array or a pandas table, converted to
        the training inputs' dtype and device (float64 to float32, too, for a float32 model).  A tuple of them for a
        model of several inputs, with as many rows each; variances are exact then.  Of BoTorch's models x and what is
        predicted are in units of the data, as those of ``model.posterior(x)``: see below.
    :param variance: ``"exact"``, ``"low_rank"`` or ``"samples"``, as :func:`accelerate` has them; the latter two are
        compared with exact variances at 4 test points, with a warning where they are off by more than their standard
        errors say; ``"auto"`` is what the model was told, compared once; None gives the mean alone.
    :param batch_size: test points at once (default 8192 for the mean and 256 for exact variances).
    :param progress: show a progress bar (default: in a terminal or notebook).
    :raises InputError: for a model that is not accelerated or has no data, wrong shapes, NaN, or a low-rank variance
        or samples asked of any model but one with one plain kernel and no batch.

    Transforms of BoTorch's models: inputs are transformed, and outcomes back, by those of the model.  Where outcomes
    are shifted and scaled (``Standardize``) error bounds are, too; after a ``Log`` mean and variance are those of the
    log-normal distribution, and there are no bounds.  Several outputs are ``(m, t)``.  Refused are input transforms
    that make several points of one (``InputPerturbation``), and outcomes without a mean in closed form (``Power``).

    A solve that does not reach its tolerance warns, and one behind a mean does so at every prediction that uses it.
    """
    if not isinstance(model, InducingPointGP | RandomFeatureGP):
        acceleration_of(model, "predict")
    word("predict", "variance", variance, VARIANCES, optional=True)
    batch_size = count("predict", "batch_size", batch_size, optional=True)
    flag("predict", "progress", progress, optional=True)
    show = shows_progress(progress)
    if isinstance(model, RandomFeatureGP):
        model.eval()
        learner = model._known()
        x = array("predict", "x", x) if learner is None else points_like("predict", "x", x, learner.features.origin)
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        return _streamed(model, tensor("predict", "x", x, (2,)), variance, batch_size or _STREAMED_ROWS, show)
    if model.train_inputs is None or model.train_targets is None:
        raise InputError("predict: model expects training data, got none.")
    missing = bool(torch.isnan(model.train_targets).any())
    if missing and settings.observation_nan_policy.value() != "mask":
        raise InputError('The training targets hold NaN; wrap the call in observation_nan_policy("mask").')
    transforms = None if isinstance(model, InducingPointGP) else Transforms.of("predict", model)
    if len(model.train_inputs) != 1 or (isinstance(x, tuple) and not isinstance(model, InducingPointGP)):
        if transforms is not None:
            raise InputError("predict: model expects one tensor of inputs for BoTorch's transforms; got several.")
        return _several(model, _inputs_like(x, model.train_inputs), variance, batch_size or _VARIANCE_ROWS, show)
    like = model.train_inputs[0] if transforms is None else transforms.raw
    x = _like_training("x", x, like)
    _into_eval_mode(model)
    if isinstance(model, InducingPointGP):
        return _sparse(model, x, variance, batch_size or _MEAN_ROWS, show)
    if transforms is None:
        return _accelerated(model, x, variance, batch_size, show)
    z = transforms.inputs(x)
    transforms.check(x, z, variance is not None)
    return transforms.in_units(_accelerated(model, z, variance, batch_size, show), x, z)


def _into_eval_mode(model: Any) -> None:
    """A change of mode drops what is known of a solution: not while another thread looks for it, nor after it did."""
    with model._lock if isinstance(model, InducingPointGP) else acceleration_of(model, "predict").lock:
        model.eval()


def _accelerated(model: Any, x: Tensor, variance: str | None, batch_size: int | None, show: bool) -> Prediction:
    """Of an accelerated model of one input, in its own units.

    :param x: as the model sees it.
    """
    with torch.no_grad():
        report = solution_report(model, x)
        conditioning = None if variance is None else Conditioning.of(model)
        method = "none" if variance is None else _method(model, conditioning, variance, x)
        mean = _mean(model, x, batch_size or _MEAN_ROWS, show)
        bound = _certain(model, conditioning, x, mean, report)
        if method == "none":
            return Prediction(mean, None, None, method, None, report, mean_error_bound=bound)
        check, error, off = None, None, None
        if method == "exact":
            latent, off = _exact_variance(model, conditioning, x, batch_size or _VARIANCE_ROWS, show)
        else:
            assert isinstance(conditioning, PlainConditioning)
            looked = variance != "auto" or conditioning.look(method)
            latent, check, error = _approximate_variance(
                conditioning, x, method, batch_size or _MEAN_ROWS, show, looked
            )
        noise = _noise(model, [x], latent)
        observed, relative = None if noise is None else latent + noise, None
        if method == "exact" and bound is not None and observed is not None:
            relative = bound / observed.to(torch.float64).sqrt()
        return Prediction(mean, latent, observed, method, check, report, error, bound, relative, off)


def _certain(
    model: Any, conditioning: Conditioning | None, x: Tensor, mean: Tensor, report: SolveReport | None
) -> Tensor | None:
    """``mean_error_bound`` of a :class:`Prediction`.

    :param conditioning: of the model, if it was made.
    """
    if report is None or report.error_bound is None or report.error_bound.numel() != 1 or calls_its_own_way(model):
        return None
    strategy = strategy_of(model)
    conditioning = conditioning or Conditioning.of(model)
    if not isinstance(conditioning, PlainConditioning) or not isinstance(strategy, AcceleratedPredictionStrategy):
        return None
    return conditioning.mean_error_bound(x, mean, strategy.weights, float(report.error_bound))


def _method(model: Any, conditioning: Conditioning | None, variance: str, x: Tensor) -> str:
    """How variances of test points are computed."""
    chosen = variance_setting.value(acceleration_of(model).variance) if variance == "auto" else variance
    if isinstance(conditioning, PlainConditioning):
        return conditioning.variance_method(chosen, x)
    if chosen in ("low_rank", "samples"):
        raise refuse(chosen)
    return "exact"


def _inputs_like(x: Any, train: tuple[Tensor, ...]) -> list[Tensor]:
    """A tensor for each of a model's inputs, of as many rows."""
    if not isinstance(x, tuple | list) or len(x) != len(train):
        raise refusal("predict", "x", f"a tuple of {len(train)}, one for each input of the model", x)
    found = [_like_training(f"x[{number}]", *pair) for number, pair in enumerate(zip(x, train, strict=True))]
    if len({len(part) for part in found}) > 1:
        raise InputError(f"predict: x expects as many rows of each input; got {[len(part) for part in found]}.")
    return found


def _like_training(name: str, x: Any, like: Tensor) -> Tensor:
    """Test inputs ``(m, d)`` as the training inputs are; integers, such as numbers of tasks, stay integers."""
    if like.is_floating_point():
        return points_like("predict", name, x, like)
    values = array("predict", name, x)
    values = values.unsqueeze(-1) if values.dim() == 1 else values
    if values.is_floating_point() or values.is_complex() or values.dim() != 2 or values.shape[-1] != like.shape[-1]:
        hint = (
            " Where they are numbers rather than indices, make the training inputs floating-point: "
            "model.set_train_data(model.train_inputs[0].double(), strict=False)."
        )
        raise refusal("predict", name, f"integers of shape (m, {like.shape[-1]}), as the training inputs", x, hint=hint)
    return values.to(like)


def _several(model: Any, inputs: list[Tensor], variance: str | None, rows: int, show: bool) -> Prediction:
    """Of a model of several inputs, whose posterior is asked for in parts."""
    if variance not in (None, "auto", "exact"):
        raise InputError(f"predict: variance of a model of several inputs expects 'auto', 'exact' or None, got "
                         f"{variance!r}.")  # fmt: skip
    _into_eval_mode(model)
    means, latents, noises = [], [], []
    with torch.no_grad():
        report = solution_report(model)
        parts = list(spans(len(inputs[0]), rows))
        for part in tqdm(parts, desc="prediction", disable=not show or len(parts) < 2, leave=False):
            some = [x[part] for x in inputs]
            posterior = model(*some)
            means.append(posterior.mean)
            if variance is not None:
                latents.append(posterior.variance)
                noises.append(_noise(model, some, latents[-1]))
        mean = torch.cat(means)
        if variance is None:
            return Prediction(mean, None, None, "none", None, report)
        latent = torch.cat(latents)
        known = [noise for noise in noises if noise is not None]
        observed = latent + torch.cat(known) if len(known) == len(noises) else None
        return Prediction(mean, latent, observed, "exact", None, report)


def _sparse(model: InducingPointGP, x: Tensor, variance: str | None, rows: int, show: bool) -> Prediction:
    """Of a model on inducing points, which knows how variances are computed."""
    if variance not in (None, "auto"):
        raise InputError(f"The variance of an InducingPointGP is that of DTC or by samples, as the model was told; "
                         f"variance expects 'auto' or None, got {variance!r}.")  # fmt: skip
    means, variances = [], []
    with own_solves() as solves:
        report = model.solution.report
    if not report.converged and not solves:
        warn(report.advice(), ConvergenceWarning)
    with torch.no_grad():
        for part in tqdm(list(spans(len(x), rows)), desc="prediction", disable=not show or len(x) <= rows, leave=False):
            posterior = model(x[part])  # whose variance is computed where it is looked at
            means.append(posterior.mean)
            if variance is not None:
                diagonal = posterior.lazy_covariance_matrix.diagonal(
                    dim1=-1, dim2=-2
                )  # GPyTorch's variance has a floor
                variances.append(diagonal.reshape(posterior.mean.shape))
        mean = torch.cat(means)
        if variance is None:
            return Prediction(mean, None, None, "none", None, report)
        latent = torch.cat(variances)
        noise = _noise(model, [x], latent)
        observed = None if noise is None else latent + noise
        method = model.variance_method
        error = torch.full_like(latent, math.sqrt(2 / model.variance_samples)) if method == "samples" else None
        return Prediction(mean, latent, observed, method, None, report, error)


def _streamed(model: RandomFeatureGP, x: Tensor, variance: str | None, rows: int, show: bool) -> Prediction:
    """Of a model of random features."""
    if variance not in (None, "auto"):
        raise InputError(f"The variance of a RandomFeatureGP is what the model was told; variance expects 'auto' or "
                         f"None, got {variance!r}.")  # fmt: skip
    method = "none" if variance is None else model.variance_method
    means, latent = [], []
    with torch.no_grad():
        deviations = None
        for part in tqdm(list(spans(len(x), rows)), desc="prediction", disable=not show or len(x) <= rows, leave=False):
            posterior = model(x[part])
            means.append(posterior.mean)
            if method != "none":
                deviations = deviations or model.deviations()
                latent.append(deviations(x[part]).square().mean(dim=-1).to(x.dtype))
        mean = torch.cat(means)
        if method == "none":
            return Prediction(mean, None, None, method, None, model.report)
        found = torch.cat(latent)
        found = found.unsqueeze(-1).expand_as(mean) if mean.dim() > 1 else found
        error = torch.full_like(found, math.sqrt(2 / model.variance_samples)) if method == "samples" else None
        return Prediction(mean, found, found + model.likelihood.noise, method, None, model.report, error)


def use_weights(model: ExactGP, weights: Tensor) -> None:
    """Give a model the solution of ``(K + noise) weights = y - mean``, so that its mean needs no solve.

    :param model: an accelerated model in eval mode, with its training data.
    :param weights: ``(n,)``, float64 and on its device, taken on trust.
    """
    with torch.no_grad():
        model._clear_cache()
        strategy_of(model).set_weights(weights)


def _mean(model: Any, x: Tensor, rows: int, show: bool) -> Tensor:
    parts, dims = [], 1
    for part in tqdm(list(spans(len(x), rows)), desc="mean", disable=not show or len(x) <= rows, leave=False):
        mean, dims = mean_at(model, x[part])
        parts.append(mean)
    return torch.cat(parts, dim=-dims)


def _exact_variance(
    model: Any, conditioning: Conditioning | None, x: Tensor, rows: int, show: bool
) -> tuple[Tensor, Tensor | None]:
    """Latent variances, and what they are off at the most where it is known."""
    parts, bounds, dim, dtype = [], [], -1, model.train_targets.dtype
    if conditioning is not None:
        conditioning.expect(len(x))
    for part in tqdm(list(spans(len(x), rows)), desc="variance", disable=not show, leave=False):
        if conditioning is None:
            posterior = model(x[part])
            parts.append(posterior.variance)
            dim = -len(posterior.event_shape)
        else:
            found, off = conditioning.exact_variance(x[part])
            dim = len(conditioning.noisy.batch_shape) - found.dim()
            parts.append(found.to(dtype))
            bounds += [] if off is None else [off + torch.finfo(dtype).eps * found]
    return torch.cat(parts, dim=dim), torch.cat(bounds) if len(bounds) == len(parts) > 0 else None


def _approximate_variance(
    conditioning: PlainConditioning, x: Tensor, method: str, rows: int, show: bool, looked: bool
) -> tuple[Tensor, dict[str, Any] | None, Tensor]:
    """Low-rank variances or those by samples, how they compare with exact ones at a few of the points if that is to be
    looked at, and their relative standard errors."""
    approximate, inputs, parts = conditioning.approximate, conditioning.inputs(x), []
    dtype = conditioning.model.train_targets.dtype
    approximate.prepare(inputs)
    for part in tqdm(list(spans(len(x), rows)), desc="variance", disable=not show or len(x) <= rows, leave=False):
        parts.append(approximate(inputs[part], method))
    latent = torch.cat(parts)
    error = approximate.error(method, latent).to(dtype)
    if not looked:
        return latent.to(dtype), None, error
    some, exact = approximate.check(inputs, latent, method)
    check: dict[str, Any] = {"points": len(some), **_ratios(latent[some], exact, "")}
    of_new = _noise(conditioning.model, [x[some]], latent[some])
    if of_new is not None:
        check |= _ratios(latent[some] + of_new, exact + of_new, "observation_")
    return latent.to(dtype), check, error


def _ratios(found: Tensor, exact: Tensor, prefix: str) -> dict[str, float]:
    ratio = found / exact.clamp_min(torch.finfo(exact.dtype).tiny)
    values = {"min": ratio.min(), "median": ratio.median(), "max": ratio.max()}
    return {f"{prefix}{name}_ratio": float(value) for name, value in values.items()}


def _noise(model: Any, inputs: list[Tensor], latent: Tensor) -> Tensor | None:
    """Noise variance of new observations at some inputs; None where the likelihood does not know it."""
    likelihood = model.likelihood
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        second = likelihood.second_noise_covar
        return None if second is None else second.noise.expand_as(latent)
    noise = likelihood._shaped_noise_covar(latent.shape, inputs).diagonal(dim1=-1, dim2=-2)
    return noise.reshape(latent.shape) if noise.numel() == latent.numel() else noise.expand_as(latent)

"""``predict(model, x)``: posterior mean and variance at many points, in chunks, with what the solves did."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch import settings
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import prediction_strategy
from gpytorch.utils.memoize import add_to_cache
from torch import Tensor
from tqdm.auto import tqdm

from .accelerate import acceleration_of
from .checks import count, flag, tensor, word
from .errors import InputError
from .inducing_point_gp import InducingPointGP
from .inference import LowRankVariance
from .models.acceleration import ATTRIBUTE
from .models.added_diag import AcceleratedAddedDiagLinearOperator, as_kernel_matrix
from .models.mixins import AcceleratedModel
from .operators import KernelMatrix
from .operators.tiles import spans
from .preconditioners.cache import tensor_key
from .random_streams import generator
from .report import SolveReport, record_solves
from .solvers import ConjugateGradients, System

_VARIANCES = ("auto", "exact", "low_rank")
_CHECK_POINTS = 16
_MEAN_ROWS = 8192
_VARIANCE_ROWS = 256
_EXACT_WORK = {"cpu": 1e10, "cuda": 1e13}  # n^2 m up to which "auto" solves for every test point


@dataclass
class Prediction:
    """Posterior at m points.  ``variance`` is of the latent function; ``observation_variance`` has the noise added, and
    is None where the likelihood knows no noise for new points (``FixedNoiseGaussianLikelihood`` without a learned one).

    ``variance_method`` is ``"exact"`` (one linear solve a point, to an error below a hundredth of the noise),
    ``"low_rank"`` (:class:`sketchgp.inference.LowRankVariance`), ``"dtc"`` or ``"pathwise"`` (of an
    :class:`sketchgp.InducingPointGP`; the latter by samples, whose solve ``model.variance_solution.report`` is of), or
    ``"none"``.  ``variance_check`` compares low-rank variances with exact ones at ``points`` test points:
    ``min_ratio``, ``median_ratio``, ``max_ratio`` of the latent variances, and ``observation_min_ratio`` and so on with
    the noise added.
    ``report`` is of the solve behind the mean, None where that had been done before.
    """

    mean: Tensor
    variance: Tensor | None
    observation_variance: Tensor | None
    variance_method: str
    variance_check: dict[str, Any] | None
    report: SolveReport | None


@dataclass
class _Conditioning:
    """The training side of a model with a plain kernel: ``K + noise`` and the inputs behind it."""

    model: Any
    operator: AcceleratedAddedDiagLinearOperator
    kernel_matrix: KernelMatrix

    @classmethod
    def of(cls, model: Any) -> _Conditioning | None:
        """None where the covariance has structure of its own, or a batch."""
        inputs = list(model.train_inputs)
        if inputs[0].dim() != 2 or model.train_targets.dim() != 1:
            return None
        prior = _prior(model, inputs[0])
        if prior is None:
            return None
        operator = model.likelihood(prior, inputs).lazy_covariance_matrix
        if not isinstance(operator, AcceleratedAddedDiagLinearOperator) or operator.batch_shape:
            return None
        return cls(model, operator, operator._linear_op)

    def block(self, a: Tensor, b: Tensor | None) -> Tensor:
        """``k(a, b)`` in float64, or the diagonal ``k(a_i, a_i)`` where b is None."""
        matrix = self.kernel_matrix
        if b is None:
            return matrix._with(a, a, True).type(torch.float64).diagonal(dim1=-1, dim2=-2)
        return matrix._with(a, b, False).type(torch.float64).to_dense()

    def exact_variance(self, inputs: Tensor) -> Tensor:
        """Latent variances ``(m,)`` at inputs as the kernel sees them, by one solve a point; float64.

        ``2 c.w - w.(K + noise)w`` differs from the explained variance ``c.(K + noise)^-1 c`` by ``r.(K + noise)^-1 r``
        with ``r = c - (K + noise)w``, at most ``tol^2 |c|^2 / noise``: the tolerance is set so that this is a hundredth
        of the noise.
        """
        system = System(self.kernel_matrix, self.operator._noise_vector())
        c = self.block(self.kernel_matrix.x1, inputs)
        acceleration = acceleration_of(self.model)
        solver = acceleration.column_solver()
        if isinstance(solver, ConjugateGradients):
            largest = max(float(c.norm(dim=0).max()), torch.finfo(c.dtype).tiny)
            tol = min(solver.tol or 1e-3, 0.1 * float(system.noise.min()) / largest)
            solver = dataclasses.replace(solver, tol=max(tol, 1e-12))
            built = acceleration.build(self.kernel_matrix, system.noise, differentiable=False)
            w, _, _ = solver.run(system, c, built, name=acceleration.preconditioner_name)
        else:
            w, _, _ = solver.run(system, c)
        explained = (w * (2 * c - system.accurate_product(w))).sum(dim=0)
        return (self.block(inputs, None) - explained).clamp_(min=0)

    def inputs(self, x: Tensor) -> Tensor:
        """x as the kernel sees it (its active dimensions selected)."""
        prior = _prior(self.model, x)
        assert prior is not None
        return prior.lazy_covariance_matrix.x1


def _prior(model: Any, x: Tensor) -> Any:
    """The prior at x with a KernelMatrix as its covariance, whatever n is; None for a structured covariance."""
    prior = super(AcceleratedModel, model).forward(x)  # type: ignore[misc]
    if not prior.islazy:
        return None
    choices = acceleration_of(model)
    matmul = "auto" if choices.matmul == "gpytorch" else choices.matmul
    covariance = as_kernel_matrix(prior.lazy_covariance_matrix, matmul, choices.matmul_precision)
    if not isinstance(covariance, KernelMatrix):
        return None
    setattr(covariance, ATTRIBUTE, acceleration_of(model))
    return type(prior)(prior.mean, covariance)


def predict(
    model: ExactGP,
    x: Tensor,
    variance: str | None = "auto",
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Prediction:
    """Posterior mean and variance of an accelerated model at many test points.

    Unlike ``model(x)`` it never makes an m x n or m x m array: the mean goes by chunks of tiles, and so do variances.

    :param model: a model that :func:`accelerate` was called on, or an :class:`InducingPointGP`, whose variances are
        those of DTC or pathwise as the model was told (``variance`` is then ``"auto"`` or None); it is put into eval
        mode.
    :param x: test inputs ``(m, d)``, of the training inputs' dtype and device.
    :param variance: ``"exact"`` solves for every test point; ``"low_rank"`` uses the preconditioner's pivots as
        inducing points (FITC, which lies above the exact variance nearly always) and compares it with exact ones
        at 16 test points; ``"auto"`` takes ``"exact"`` while ``n^2 m`` is at most
        1e10 (CUDA: 1e13); None gives the mean alone.
    :param batch_size: test points at once (default 8192 for the mean, 256 for exact variances).
    :param progress: show a progress bar (default: only in a terminal).
    :raises InputError: for a model that is not accelerated or has no data, wrong shapes, NaN, or a low-rank variance
        asked of a covariance with structure of its own.
    """
    if not isinstance(model, InducingPointGP):
        acceleration_of(model, "predict")
    word("predict", "variance", variance, _VARIANCES, optional=True)
    batch_size = count("predict", "batch_size", batch_size, optional=True)
    flag("predict", "progress", progress, optional=True)
    if model.train_inputs is None or model.train_targets is None:
        raise InputError("predict: model expects training data, got none.")
    if len(model.train_inputs) != 1:
        raise InputError("predict: model expects to have one tensor of inputs; call model(...) itself for several.")
    missing = bool(torch.isnan(model.train_targets).any())
    if missing and settings.observation_nan_policy.value() != "mask":
        raise InputError('The training targets hold NaN; wrap the call in observation_nan_policy("mask").')
    if missing and variance is not None:
        raise InputError(
            "Variances with missing targets would count them as observed; give the model the observed rows by "
            "set_train_data, or use variance=None."
        )
    if any(getattr(model, name, None) is not None for name in ("input_transform", "outcome_transform")):
        raise InputError("predict knows no BoTorch transforms of inputs or outcomes; use model.posterior(x).")
    train = model.train_inputs[0]
    tensor("predict", "x", x, (2,))
    if x.shape[-1] != train.shape[-1] or x.dtype != train.dtype or x.device != train.device:
        raise InputError(
            f"predict: x expects shape (m, {train.shape[-1]}), {train.dtype} on {train.device}, as the training "
            f"inputs; got {tuple(x.shape)}, {x.dtype} on {x.device}."
        )
    model.eval()
    show = sys.stderr.isatty() if progress is None else progress
    if isinstance(model, InducingPointGP):
        return _sparse(model, x, variance, batch_size or _MEAN_ROWS, show)
    _renew(model)
    with torch.no_grad(), record_solves() as solves:
        conditioning = None if variance is None else _Conditioning.of(model)
        if variance == "auto":
            small = train.shape[-2] ** 2 * len(x) <= _EXACT_WORK.get(x.device.type, 1e10)
            variance = "exact" if small or conditioning is None else "low_rank"
        if variance == "low_rank" and conditioning is None:
            raise InputError('variance="low_rank" expects a plain kernel and one set of training inputs; use "exact".')
        mean = _mean(model, x, batch_size or _MEAN_ROWS, show)
        report = solves[0] if solves else None
        if variance is None:
            return Prediction(mean, None, None, "none", None, report)
        if variance == "exact":
            latent, check = _exact_variance(model, conditioning, x, batch_size or _VARIANCE_ROWS, show), None
        else:
            assert conditioning is not None
            latent, check = _low_rank_variance(conditioning, x)
        noise = _noise(model, x, latent)
        return Prediction(mean, latent, None if noise is None else latent + noise, variance, check, report)


def _sparse(model: InducingPointGP, x: Tensor, variance: str | None, rows: int, show: bool) -> Prediction:
    """Of a model on inducing points, which knows how variances are computed."""
    if variance not in (None, "auto"):
        raise InputError(f"The variance of an InducingPointGP is that of DTC or pathwise, as the model was told; "
                         f"variance expects 'auto' or None, got {variance!r}.")  # fmt: skip
    means, variances = [], []
    with record_solves() as solves:
        solution = model.solution
    report = solution.report if solves else None
    with torch.no_grad():
        for part in tqdm(list(spans(len(x), rows)), desc="prediction", disable=not show or len(x) <= rows, leave=False):
            posterior = model(x[part])  # whose variance is computed where it is looked at
            means.append(posterior.mean)
            if variance is not None:
                variances.append(posterior.variance)
        mean = torch.cat(means)
        if variance is None:
            return Prediction(mean, None, None, "none", None, report)
        latent = torch.cat(variances)
        noise = _noise(model, x, latent)
        observed = None if noise is None else latent + noise
        return Prediction(mean, latent, observed, model.variance_method, None, report)


def _renew(model: Any) -> None:
    """Forget a cached solution that is not one for the present parameters and data."""
    acceleration = acceleration_of(model)
    key = _solution_key(model)
    if acceleration.solution_key != key:
        model._clear_cache()
        acceleration.solution_key = key


def _solution_key(model: Any) -> tuple[Any, ...]:
    tensors = (*model.parameters(), *model.buffers(), *model.train_inputs, model.train_targets)
    return (settings.observation_nan_policy.value(), *(tensor_key(t) for t in tensors))


def use_weights(model: ExactGP, weights: Tensor) -> None:
    """Give a model the solution of ``(K + noise) weights = y - mean``, so that its mean needs no solve.

    :param model: an accelerated model in eval mode, with its training data.
    :param weights: ``(n,)``, in the model's dtype and on its device, taken on trust.
    """
    with torch.no_grad():
        model.prediction_strategy = prediction_strategy(
            train_inputs=list(model.train_inputs),
            train_prior_dist=model.forward(*model.train_inputs),
            train_labels=model.train_targets,
            likelihood=model.likelihood,
        )
    add_to_cache(model.prediction_strategy, "mean_cache", weights, settings.observation_nan_policy.value())
    acceleration_of(model).solution_key = _solution_key(model)


def _mean(model: Any, x: Tensor, rows: int, show: bool) -> Tensor:
    parts = []
    with settings.skip_posterior_variances(True):
        for part in tqdm(list(spans(len(x), rows)), desc="mean", disable=not show or len(x) <= rows, leave=False):
            posterior = model(x[part])
            parts.append(posterior.mean)
    return torch.cat(parts, dim=-len(posterior.event_shape))


def _exact_variance(model: Any, conditioning: _Conditioning | None, x: Tensor, rows: int, show: bool) -> Tensor:
    parts, dim = [], -1
    for part in tqdm(list(spans(len(x), rows)), desc="variance", disable=not show, leave=False):
        if conditioning is None:
            posterior = model(x[part])
            parts.append(posterior.variance)
            dim = -len(posterior.event_shape)
        else:
            parts.append(conditioning.exact_variance(conditioning.inputs(x[part])).to(x.dtype))
    return torch.cat(parts, dim=dim)


def _low_rank_variance(conditioning: _Conditioning, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Low-rank variances, and how they compare with exact ones at a few of the points."""
    matrix, noise = conditioning.kernel_matrix, conditioning.operator._noise_vector()
    acceleration = acceleration_of(conditioning.model)
    pivots = None if acceleration.cache is None else acceleration.cache.pivots(matrix, noise)
    if pivots is None:
        count = min(matrix.shape[-1], int(10 * matrix.shape[-1] ** 0.5))
        pivots = torch.randperm(matrix.shape[-1], generator=generator(0, "rows of a low-rank variance"))[:count].to(
            x.device
        )
    low_rank = LowRankVariance(conditioning.block, matrix.x1, noise.double(), matrix.x1[pivots])
    latent = low_rank(conditioning.inputs(x))
    some = torch.randperm(len(x), generator=generator(0, "points of a variance check"))[:_CHECK_POINTS].to(x.device)
    exact = conditioning.exact_variance(conditioning.inputs(x[some]))
    check: dict[str, Any] = {"points": len(some), **_ratios(latent[some], exact, "")}
    of_new = _noise(conditioning.model, x[some], latent[some])
    if of_new is not None:
        check |= _ratios(latent[some] + of_new, exact + of_new, "observation_")
    return latent.to(x.dtype), check


def _ratios(low_rank: Tensor, exact: Tensor, prefix: str) -> dict[str, float]:
    ratio = low_rank / exact.clamp_min(torch.finfo(exact.dtype).tiny)
    values = {"min": ratio.min(), "median": ratio.median(), "max": ratio.max()}
    return {f"{prefix}{name}_ratio": float(value) for name, value in values.items()}


def _noise(model: Any, x: Tensor, latent: Tensor) -> Tensor | None:
    """Noise variance of new observations at x; None where the likelihood does not know it."""
    likelihood = model.likelihood
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        second = likelihood.second_noise_covar
        return None if second is None else second.noise.expand_as(latent)
    noise = likelihood._shaped_noise_covar(latent.shape, [x]).diagonal(dim1=-1, dim2=-2)
    return noise.reshape(latent.shape) if noise.numel() == latent.numel() else noise.expand_as(latent)

"""The posterior of an accelerated model at many test points, by chunks, with bounds of what it is off by.

Exact variances take one solve for each test point, whose error is of second order and below the noise: with
``A = K + noise`` and c the covariances of the training points with a test point, any w gives
``2 c.w - w.A w = c.A^-1 c - r.A^-1 r`` for ``r = c - A w``, so that a solve leaves out at most ``|r|^2 / noise``.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from gpytorch import settings
from gpytorch.models.exact_prediction_strategies import LinearPredictionStrategy, SGPRPredictionStrategy
from torch import Tensor

from ...checks import array, points_like, refusal
from ...errors import InputError
from ...inference.calibrated import block
from ...operators import KernelMatrix
from ...operators.access import entry_rounding, float64, terms
from ...report import SolveReport
from ...settings import variance as variance_setting
from ...solvers.certificate import summing
from ..copies import copied
from ..prediction import Prediction, in_chunks, observation_noise
from ..transforms import Transforms
from .acceleration import ATTRIBUTE
from .added_diag import AcceleratedAddedDiagLinearOperator
from .approximate import refuse
from .missing import observed_part, observed_rows
from .posterior import calls_its_own_way, mean_at, solution_report, strategy_of
from .strategy import AcceleratedPredictionStrategy
from .training import Training, remembered_by

_CLOSED = (LinearPredictionStrategy, SGPRPredictionStrategy)  # strategies that condition by a formula of their own
_MEAN_ROWS = 8192
_VARIANCE_ROWS = 256


class Conditioned:
    """An accelerated model conditioned on its training data.

    :param model: the model, or a float64 copy of it where its covariance cannot be evaluated in float64 by itself.
    :param noisy: ``K + noise`` of the observed targets, evaluated, ``(..., n, n)``.
    :param observed: which targets are observed among all ``(N,)``; None where none is missing.

    :ivar plain: whether the covariance of any two inputs is known: one plain kernel without batch.
    """

    def __init__(self, model: Any, noisy: Any, observed: Tensor | None = None) -> None:
        self.model, self.observed = model, observed
        ours = isinstance(noisy, AcceleratedAddedDiagLinearOperator)
        remembered = remembered_by(strategy_of(model)) if ours else None
        self.training = Training(noisy, model.__dict__[ATTRIBUTE], remembered)
        self.plain = self.training.plain and model.train_inputs[0].dim() == 2

    @classmethod
    def of(cls, model: Any) -> Conditioned | None:
        """Return None for a model that GPyTorch conditions by a formula of its own (linear, inducing-point kernels).

        :raises InputError: for a model whose class has a ``__call__`` of its own.
        """
        if calls_its_own_way(model):
            raise InputError(
                f"predict: variance expects None for {type(model).__name__}, whose __call__ may compute anything; use "
                "model(x).variance."
            )
        strategy = strategy_of(model)
        if isinstance(strategy, _CLOSED):
            return None
        observed = observed_rows(strategy.train_labels)
        noisy = _noisy(model, observed)
        exact = isinstance(noisy, AcceleratedAddedDiagLinearOperator) and all(
            isinstance(part, KernelMatrix) for _, part in terms(noisy.kernel_matrix)
        )
        if not exact and noisy.dtype != torch.float64:
            model = copied(model).double()
            noisy = _noisy(model, observed)
        return cls(model, noisy, observed)

    @property
    def _rows(self) -> int:
        """Rows of the training covariance, those of missing targets included."""
        return self.training.noisy.shape[-1] if self.observed is None else len(self.observed)

    def expect(self, points: int) -> None:
        """Announce that so many test points are about to be solved for."""
        if self.training.ours:
            self.training.expect(points * max(1, self._rows // self.model.train_inputs[0].shape[-2]))

    def method(self, chosen: str, x: Tensor) -> str:
        """Return how variances at x ``(m, d)`` are computed.

        :param chosen: ``"auto"``, ``"exact"``, or what only plain models have.
        :raises InputError: where the model has not what was chosen.
        """
        if self.plain:
            return self.training.method(chosen, self.inputs(x), differentiated=False)
        if chosen in ("low_rank", "samples"):
            raise refuse(chosen)
        return "exact"

    # --- any model ------------------------------------------------------------------------------------------

    def exact_variance(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return latent variances at x ``(m, d)`` in float64, ``(..., m)`` or ``(..., m, t)`` of t tasks, and bounds.

        The error is estimated to be below a hundredth of the variance and of the noise, or of a hundredth of the noise
        where that is more than the variance; or there is a :class:`sketchgp.ConvergenceWarning`.  The bounds are what
        the variances are off by at the most, or None where it is not known.

        :raises InputError: for tasks that are not interleaved.
        """
        if self.plain:
            return self._plain_variance(x)
        train = self.model.train_inputs[0]
        batch = torch.broadcast_shapes(train.shape[:-2], x.shape[:-2])
        parts = [part.expand(*batch, *part.shape[-2:]) for part in (train, x.to(train.dtype))]
        joint = self.model.prior_at(torch.cat(parts, dim=-2))
        if not getattr(joint, "_interleaved", True):
            raise InputError(
                "Exact variances of several tasks expect a covariance with the tasks of a point side by side "
                "(interleaved=True)."
            )
        full, n = joint.lazy_covariance_matrix, self._rows
        cross = full[..., n:, :n]
        if self.observed is not None:
            cross = cross[..., :, self.observed.nonzero().squeeze(-1)]
        c, prior = float64(cross).mT, float64(full[..., n:, n:], diagonal=True)
        variance = prior - self.training.solve(c, prior).diagonal(c)
        return variance.clamp_(min=0).reshape(*variance.shape[:-1], -1, *joint.event_shape[1:]), None

    # --- one plain kernel -----------------------------------------------------------------------------------

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as the kernel sees it (its active dimensions selected)."""
        return self.model.prior_at(x, convert=True).lazy_covariance_matrix.x1

    def block(self, a: Tensor, b: Tensor | None) -> Tensor:
        """Return ``k(a, b)`` in float64, or the diagonal where b is None; points as the kernel sees."""
        return block(self.training.matrix, a, b)

    def _plain_variance(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.inputs(x)
        c, prior = self.block(self.training.matrix.x1, x), self.block(x, None)
        result = self.training.solve(c, prior)
        variance = prior - result.diagonal(c)
        if result.certain is None or not self._inputs_as_given:
            return variance.clamp(min=0), None
        error, below, above = result.certain
        rounding = self._cross_rounding(x)
        if rounding is None:
            return variance.clamp(min=0), None
        of_rows, of_x = rounding
        of_rows, weights = of_rows.unsqueeze(-1), result.weights.abs()
        noise, roots = self.training.noise.to(torch.float64).unsqueeze(-1), self._roots
        scale = prior.clamp(min=0).sqrt()
        of_product = scale * ((of_rows + of_x) * roots * weights).sum(dim=0)
        deviation = scale * ((of_rows + of_x) * roots / noise.sqrt()).norm(dim=0)  # in the norm of A^-1
        of_cross = 2 * of_product + deviation * (2 * error + deviation)
        of_prior = 2 * of_x * prior.abs() + 2 * torch.finfo(torch.float64).eps * (prior.abs() + above.abs())
        there = prior - variance
        return variance.clamp(min=0), torch.maximum(above - there, there - below) + of_cross + of_prior

    def mean_error_bound(self, x: Tensor, mean: Tensor, weights: Tensor, bound: float) -> Tensor | None:
        """Return how far a mean is from the exact one at the most, ``(m,)`` float64: by its weights, and by rounding.

        None is returned where rounding is not known: of a prior mean that is not constant, or of the inputs or entries
        of the kernel.

        :param x: ``(m, d)``, with the posterior ``mean`` ``(m,)`` there as it is returned.
        :param weights: ``(n,)`` behind it; NaN where a target is missing.
        :param bound: at least the error of the weights in the norm of A.
        """
        means = torch.cat([strategy_of(self.model).train_prior_dist.mean, self.model.prior_at(x).mean])
        if not self._inputs_as_given or not bool((means == means[:1]).all()):
            return None
        x = self.inputs(x)
        rounding = self._cross_rounding(x)
        if rounding is None:
            return None
        of_rows, of_x = rounding
        weights = weights if self.observed is None else weights[self.observed]
        sizes = self._roots.squeeze(-1) * weights.abs()
        of_product = (of_x + summing(len(weights))) * sizes.sum() + (of_rows * sizes).sum()
        of_result = torch.finfo(mean.dtype).eps * mean.to(torch.float64).abs()
        return self.block(x, None).clamp(min=0).sqrt() * (bound + of_product) + of_result

    @cached_property
    def _inputs_as_given(self) -> bool:
        """True if the kernel sees the model's inputs, and nothing computed from them."""
        x, dims = self.model.train_inputs[0], self.training.matrix.kernel.active_dims
        x = x if self.observed is None else x[self.observed]
        return torch.equal(x if dims is None else x.index_select(-1, dims), self.training.matrix.x1)

    @cached_property
    def _roots(self) -> Tensor:
        """Square roots ``k(x_i, x_i)^1/2`` at the training points, ``(n, 1)``."""
        return self.block(self.training.matrix.x1, None).clamp(min=0).sqrt().unsqueeze(-1)

    def _cross_rounding(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return errors of the entries of ``k(X, x)`` in float64 by rows ``(n,)`` and columns ``(m,)``.

        See :func:`entry_rounding`; x is as the kernel sees it.
        """
        return entry_rounding(self.training.matrix.at(self.training.matrix.x1, x))


def _noisy(model: Any, observed: Tensor | None) -> Any:
    """Return ``K + noise`` of the training data, or of the observed ones, evaluated."""
    prior = model.prior_at(model.train_inputs[0], convert=True)
    noisy = model.likelihood(prior, list(model.train_inputs)).lazy_covariance_matrix.evaluate_kernel()
    return noisy if observed is None else observed_part(noisy, observed, model.__dict__[ATTRIBUTE])


# --- predict ----------------------------------------------------------------------------------------------------


def predicted(model: Any, x: Any, variance: str | None, batch_size: int | None, show: bool) -> Prediction:
    """Return the :class:`Prediction` of an accelerated model at x; see :func:`sketchgp.predict`."""
    if model.train_inputs is None or model.train_targets is None:
        raise InputError("predict: model expects training data, got none.")
    missing = bool(torch.isnan(model.train_targets).any())
    if missing and settings.observation_nan_policy.value() != "mask":
        raise InputError('The training targets hold NaN; wrap the call in observation_nan_policy("mask").')
    transforms, train = Transforms.of("predict", model), model.train_inputs
    several = len(train) != 1 or isinstance(x, tuple)
    if several and transforms is not None:
        raise InputError("predict: model expects one tensor of inputs for BoTorch's transforms; got several.")
    inputs = _inputs_like(x, train) if several else [_like(x, train[0] if transforms is None else transforms.raw)]
    if several and variance not in (None, "auto", "exact"):
        raise InputError(
            f"predict: variance of a model of several inputs expects 'auto', 'exact' or None, got {variance!r}."
        )
    with model.__dict__[ATTRIBUTE].lock:  # a change of mode drops the solution, which another thread may be looking for
        model.eval()
    with torch.no_grad():
        if several:
            return _of_several_inputs(model, inputs, variance, batch_size or _VARIANCE_ROWS, show)
        if transforms is None:
            return _of_one_input(model, inputs[0], variance, batch_size, show)
        z = transforms.inputs(inputs[0])
        transforms.check(inputs[0], z, variance is not None)
        return transforms.in_units(_of_one_input(model, z, variance, batch_size, show), inputs[0], z)


def _inputs_like(x: Any, train: tuple[Tensor, ...]) -> list[Tensor]:
    """Return a tensor for each of a model's inputs, of as many rows."""
    if not isinstance(x, tuple | list) or len(x) != len(train):
        raise refusal("predict", "x", f"a tuple of {len(train)}, one for each input of the model", x)
    values = [_like(*pair, f"x[{number}]") for number, pair in enumerate(zip(x, train, strict=True))]
    if len({len(part) for part in values}) > 1:
        raise InputError(f"predict: x expects as many rows of each input; got {[len(part) for part in values]}.")
    return values


def _like(x: Any, like: Tensor, name: str = "x") -> Tensor:
    """Return test inputs ``(m, d)`` as the training inputs are; integers, such as numbers of tasks, stay integers."""
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


def _of_several_inputs(model: Any, inputs: list[Tensor], variance: str | None, rows: int, show: bool) -> Prediction:
    """Predict by a model of several inputs, whose posterior is computed in parts."""

    def posterior(*some: Tensor) -> tuple[Tensor, ...]:
        at = model(*some)
        if variance is None:
            return (at.mean,)
        noise = observation_noise(model.likelihood, list(some), at.variance)
        return (at.mean, at.variance) if noise is None else (at.mean, at.variance, at.variance + noise)

    report = solution_report(model)
    parts = zip(*in_chunks(posterior, inputs, rows, "prediction", show), strict=False)
    mean, *others = map(torch.cat, parts)
    latent, observed = (*others, None, None)[:2]
    return Prediction(mean, latent, observed, "none" if variance is None else "exact", None, report)


def _of_one_input(model: Any, x: Tensor, variance: str | None, batch_size: int | None, show: bool) -> Prediction:
    """Predict by a model of one input, in the units that the model sees.

    :param x: as the model sees it.
    """
    report = solution_report(model, x)
    conditioned = None if variance is None else Conditioned.of(model)
    method = "none" if variance is None else _method(model, conditioned, variance, x)
    means = in_chunks(partial(mean_at, model), [x], batch_size or _MEAN_ROWS, "mean", show)
    mean = torch.cat([part for part, _ in means], dim=-means[-1][1])
    bound = _mean_error_bound(model, conditioned, x, mean, report)
    if method == "none":
        return Prediction(mean, None, None, method, None, report, mean_error_bound=bound)
    if method != "exact":
        assert conditioned is not None
        checked = conditioned.training.remembered.checked
        looked = variance != "auto" or method not in checked
        latent, check, error = _approximate_variance(conditioned, x, method, batch_size or _MEAN_ROWS, show, looked)
        if variance == "auto":
            checked.add(method)
        noise = observation_noise(model.likelihood, [x], latent)
        return Prediction(mean, latent, None if noise is None else latent + noise, method, check, report, error, bound)
    latent, off = _exact_variance(model, conditioned, x, batch_size or _VARIANCE_ROWS, show)
    noise = observation_noise(model.likelihood, [x], latent)
    observed = None if noise is None else latent + noise
    relative = None if bound is None or observed is None else bound / observed.to(torch.float64).sqrt()
    return Prediction(mean, latent, observed, method, None, report, None, bound, relative, off)


def _method(model: Any, conditioned: Conditioned | None, variance: str, x: Tensor) -> str:
    chosen = variance_setting.value(model.__dict__[ATTRIBUTE].variance) if variance == "auto" else variance
    if conditioned is not None:
        return conditioned.method(chosen, x)
    if chosen in ("low_rank", "samples"):
        raise refuse(chosen)
    return "exact"


def _mean_error_bound(
    model: Any, conditioned: Conditioned | None, x: Tensor, mean: Tensor, report: SolveReport | None
) -> Tensor | None:
    """Return ``mean_error_bound`` of a :class:`Prediction`."""
    if report is None or report.error_bound is None or report.error_bound.numel() != 1 or calls_its_own_way(model):
        return None
    strategy = strategy_of(model)
    conditioned = conditioned or Conditioned.of(model)
    if conditioned is None or not conditioned.plain or not isinstance(strategy, AcceleratedPredictionStrategy):
        return None
    return conditioned.mean_error_bound(x, mean, strategy.weights, float(report.error_bound))


def _exact_variance(
    model: Any, conditioned: Conditioned | None, x: Tensor, rows: int, show: bool
) -> tuple[Tensor, Tensor | None]:
    """Return latent variances and what they are off by at the most, where it is known."""
    dtype = model.train_targets.dtype
    if conditioned is None:

        def by_formula(some: Tensor) -> tuple[Tensor, int]:
            posterior = model(some)
            return posterior.variance, len(posterior.event_shape)

        variances = in_chunks(by_formula, [x], rows, "variance", show)
        return torch.cat([one for one, _ in variances], dim=-variances[-1][1]), None
    conditioned.expect(len(x))
    parts = in_chunks(conditioned.exact_variance, [x], rows, "variance", show)
    bounds = [off + torch.finfo(dtype).eps * value for value, off in parts if off is not None]
    dim = len(conditioned.training.noisy.batch_shape) - parts[-1][0].dim()
    latent = torch.cat([value.to(dtype) for value, _ in parts], dim=dim)
    return latent, torch.cat(bounds) if len(bounds) == len(parts) else None


def _approximate_variance(
    conditioned: Conditioned, x: Tensor, method: str, rows: int, show: bool, looked: bool
) -> tuple[Tensor, dict[str, Any] | None, Tensor]:
    """Return low-rank variances or those by samples, a comparison with exact ones, and relative standard errors.

    :param looked: whether to compare them with exact ones at a few of the points.
    """
    approximate, inputs = conditioned.training.approximate, conditioned.inputs(x)
    dtype = conditioned.model.train_targets.dtype
    approximate.prepare(inputs)
    latent = torch.cat(in_chunks(partial(approximate, method=method), [inputs], rows, "variance", show))
    error = approximate.error(method, latent).to(dtype)
    if not looked:
        return latent.to(dtype), None, error
    some, exact = approximate.check(inputs, latent, method)
    check: dict[str, Any] = {"points": len(some), **_ratios(latent[some], exact, "")}
    noise = observation_noise(conditioned.model.likelihood, [x[some]], latent[some])
    if noise is not None:
        check |= _ratios(latent[some] + noise, exact + noise, "observation_")
    return latent.to(dtype), check, error


def _ratios(values: Tensor, exact: Tensor, prefix: str) -> dict[str, float]:
    ratio = values / exact.clamp_min(torch.finfo(exact.dtype).tiny)
    ends = {"min": ratio.min(), "median": ratio.median(), "max": ratio.max()}
    return {f"{prefix}{name}_ratio": float(value) for name, value in ends.items()}

"""An accelerated model conditioned on its training data: variances at any points, and what they and means are off by.

Exact variances take one solve for each test point, whose error is of second order and below the noise: with
``A = K + noise`` and c the covariances of the training points with a test point, any w gives
``2 c.w - w.A w = c.A^-1 c - r.A^-1 r`` for ``r = c - A w``, so that a solve leaves out at most ``|r|^2 / noise``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from gpytorch.models.exact_prediction_strategies import LinearPredictionStrategy, SGPRPredictionStrategy
from torch import Tensor

from ...errors import InputError
from ...operators import KernelMatrix
from ...operators.access import entry_rounding, float64, terms
from ...solvers.certificate import summing
from ..copies import copied
from ..prediction import in_chunks, observation_variance
from ..transforms import Transforms
from .acceleration import ATTRIBUTE
from .added_diag import AcceleratedAddedDiagLinearOperator
from .approximate import refuse
from .posterior import calls_its_own_way, strategy_of
from .strategy import AcceleratedPredictionStrategy
from .targets import check_has_data, check_training_data, observed_part, observed_rows, observed_targets
from .training import EXACT_ROWS, Training, remembered_by

MEAN_ROWS = 8192  # points whose means, or approximate variances, are computed at once
_CLOSED = (LinearPredictionStrategy, SGPRPredictionStrategy)  # strategies that condition by a formula of their own


class Conditioned:
    """An accelerated model conditioned on its training data.

    :param model: the model, or a float64 copy of it where its covariance cannot be evaluated in float64 by itself.
    :param noisy: ``K + noise`` of the observed targets, evaluated, ``(..., n, n)``.
    :param observed: which targets are observed among all ``(N,)``; None where none is missing.
    :param dtype: of predictions.

    :ivar training: the training data as a linear system; None where GPyTorch needs none.
    :ivar plain: whether the covariance of any two inputs is known: one plain kernel without batch.
    """

    def __init__(self, model: Any, noisy: Any, observed: Tensor | None, dtype: torch.dtype) -> None:
        self.model, self.observed, self.dtype = model, observed, dtype
        ours = isinstance(noisy, AcceleratedAddedDiagLinearOperator)
        remembered = remembered_by(strategy_of(model)) if ours else None
        self.training: Any = Training(noisy, model.__dict__[ATTRIBUTE], remembered)
        self.plain = self.training.plain and model.train_inputs[0].dim() == 2

    @classmethod
    def of(cls, owner: str, model: Any) -> Conditioned:
        """Return a model with its training data as one linear system, or as GPyTorch's strategy knows it.

        :param owner: name of the function that asks.
        :raises InputError: for a model of one tensor of inputs whose class has a ``__call__`` of its own.
        """
        if len(model.train_inputs) > 1:
            return ByPosterior(model)
        if calls_its_own_way(model):
            raise InputError(
                f"{owner}: model expects GPyTorch's __call__; that of {type(model).__name__} may compute anything. Use "
                "model(x), or predict(model, x, variance=None) for the mean alone."
            )
        strategy = strategy_of(model)
        if isinstance(strategy, _CLOSED):
            return ByPosterior(model)
        observed = observed_rows(strategy.train_labels)
        noisy, dtype = _noisy(model, observed), model.train_targets.dtype
        exact = isinstance(noisy, AcceleratedAddedDiagLinearOperator) and all(
            isinstance(part, KernelMatrix) for _, part in terms(noisy.latent)
        )
        if not exact and noisy.dtype != torch.float64:
            model = copied(model).double()
            noisy = _noisy(model, observed)
        return cls(model, noisy, observed, dtype)

    @property
    def _rows(self) -> int:
        """Rows of the training covariance, those of missing targets included."""
        return self.training.noisy.shape[-1] if self.observed is None else len(self.observed)

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

    def variances(
        self, inputs: list[Tensor], method: str, named: bool, batch_size: int | None, show: bool
    ) -> dict[str, Any]:
        """Return latent variances, and what is known of their errors, as fields of a prediction.

        :param inputs: ``(m, d)``, as the model takes them.
        :param method: ``"exact"``, ``"low_rank"`` or ``"samples"``; :param named: whether the user chose it.
        :param batch_size: points at once, or None; :param show: whether to show progress.
        """
        x = inputs[0]
        if method != "exact":
            return self._approximate(x, method, named, batch_size or MEAN_ROWS, show)
        if self.training.ours:
            self.training.expect(len(x) * max(1, self._rows // self.model.train_inputs[0].shape[-2]))
        parts, dtype = in_chunks(self.exact_variance, [x], batch_size or EXACT_ROWS, "variance", show), self.dtype
        bounds = [off + torch.finfo(dtype).eps * value for value, off in parts if off is not None]
        dim = len(self.training.noisy.batch_shape) - parts[-1][0].dim()
        latent = torch.cat([value.to(dtype) for value, _ in parts], dim=dim)
        return {"variance": latent, "variance_error_bound": torch.cat(bounds) if len(bounds) == len(parts) else None}

    # --- any model ------------------------------------------------------------------------------------------

    def exact_variance(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return latent variances at x ``(m, d)`` in float64, ``(..., m)`` or ``(..., m, t)`` of t tasks, and bounds.

        Errors are estimated to be below a hundredth of each variance and of the least noise; they need never be below a
        ten thousandth of the noise.  Else there is a :class:`sketchgp.ConvergenceWarning`.  The bounds are what
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

    def _plain_variance(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x, matrix = self.inputs(x), self.training.matrix
        c, prior = matrix.entries(matrix.x1, x), matrix.entries(x, None)
        result = self.training.solve(c, prior)
        variance = prior - result.diagonal(c)
        if result.certain is None or (rounding := self._cross_rounding(x)) is None:
            return variance.clamp(min=0), None
        error, below, above = result.certain
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

    def _approximate(self, x: Tensor, method: str, named: bool, rows: int, show: bool) -> dict[str, Any]:
        """Return approximate variances with their standard errors, compared with exact ones at a few of the points.

        A method that the user did not name is compared once.
        """
        approximate, inputs, check = self.training.approximate, self.inputs(x), None
        approximate.prepare(inputs)
        latent = torch.cat(in_chunks(partial(approximate, method=method), [inputs], rows, "variance", show))
        error = approximate.error(method, latent).to(self.dtype)
        compared = approximate.check(inputs, latent, method, once=not named)
        if compared is not None:
            some, exact = compared
            check = {"points": len(some), **_ratios(latent[some], exact, "")}
            likelihood = self.model.likelihood
            observed = [observation_variance(likelihood, [x[some]], variance) for variance in (latent[some], exact)]
            if observed[0] is not None and observed[1] is not None:
                check |= _ratios(observed[0], observed[1], "observation_")
        return {"variance": latent.to(self.dtype), "variance_check": check, "variance_standard_error": error}

    def mean_error_bound(self, x: Tensor, mean: Tensor, bound: float) -> Tensor | None:
        """Return how far a mean is from the exact one at the most, ``(m,)`` float64: by its weights, and by rounding.

        None is returned where rounding is not known: of a prior mean that is not constant, or of the inputs or entries
        of the kernel; and for all but one plain kernel.

        :param x: ``(m, d)``, with the posterior ``mean`` ``(m,)`` there as it is returned.
        :param bound: at least the error of the weights behind it in the norm of A.
        """
        strategy = strategy_of(self.model) if self.plain else None
        if not isinstance(strategy, AcceleratedPredictionStrategy):
            return None
        means = torch.cat([strategy.train_prior_dist.mean, self.model.prior_at(x).mean])
        x = self.inputs(x)
        if not bool((means == means[:1]).all()) or (rounding := self._cross_rounding(x)) is None:
            return None
        of_rows, of_x = rounding
        weights = strategy.weights if self.observed is None else strategy.weights[self.observed]
        sizes = self._roots.squeeze(-1) * weights.abs()
        of_product = (of_x + summing(len(weights))) * sizes.sum() + (of_rows * sizes).sum()
        of_result = torch.finfo(mean.dtype).eps * mean.to(torch.float64).abs()
        return self.training.matrix.entries(x, None).clamp(min=0).sqrt() * (bound + of_product) + of_result

    @cached_property
    def _inputs_as_given(self) -> bool:
        """True if the kernel sees the model's inputs, and nothing computed from them."""
        x, dims = self.model.train_inputs[0], self.training.matrix.kernel.active_dims
        x = x if self.observed is None else x[self.observed]
        if dims is not None:
            if int(dims.max()) >= x.shape[-1]:  # they are those of features
                return False
            x = x.index_select(-1, dims)
        return torch.equal(x, self.training.matrix.x1)

    @cached_property
    def _roots(self) -> Tensor:
        """Square roots ``k(x_i, x_i)^1/2`` at the training points, ``(n, 1)``."""
        return self.training.matrix.entries(self.training.matrix.x1, None).clamp(min=0).sqrt().unsqueeze(-1)

    def _cross_rounding(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return errors of the entries of ``k(X, x)`` in float64 by rows ``(n,)`` and columns ``(m,)``.

        See :func:`entry_rounding`; x is as the kernel sees it.  None is returned where it is not known.
        """
        if not self._inputs_as_given:
            return None
        matrix = self.training.matrix
        return entry_rounding(matrix.at(matrix.x1, x, centre=matrix.pairs.centre))


def _noisy(model: Any, observed: Tensor | None) -> Any:
    """Return ``K + noise`` of the training data, or of the observed ones, evaluated."""
    prior = model.prior_at(model.train_inputs[0], convert=True)
    noisy = model.likelihood(prior, list(model.train_inputs)).lazy_covariance_matrix.evaluate_kernel()
    return noisy if observed is None else observed_part(noisy, observed, model.__dict__[ATTRIBUTE])


class ByPosterior(Conditioned):
    """A model of several inputs, or that GPyTorch conditions by a formula: with a linear or inducing-point kernel."""

    def __init__(self, model: Any) -> None:
        self.model, self.training, self.plain = model, None, False

    def variances(
        self, inputs: list[Tensor], method: str, named: bool, batch_size: int | None, show: bool
    ) -> dict[str, Any]:
        """Return the posterior's latent variances; as :meth:`Conditioned.variances`."""

        def compute(*some: Tensor) -> tuple[Tensor, int]:
            posterior = self.model(*some)
            if len(posterior.event_shape) > 1:
                return posterior.variance, len(posterior.event_shape)
            return posterior.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2).clamp(min=0), 1  # GPyTorch has a floor

        parts = in_chunks(compute, inputs, batch_size or EXACT_ROWS, "variance", show)
        return {"variance": torch.cat([one for one, _ in parts], dim=-parts[-1][1])}


def _ratios(values: Tensor, exact: Tensor, prefix: str) -> dict[str, float]:
    ratio = values / exact.clamp_min(torch.finfo(exact.dtype).tiny)
    ends = {"min": ratio.min(), "median": ratio.median(), "max": ratio.max()}
    return {f"{prefix}{name}_ratio": float(value) for name, value in ends.items()}


@dataclass
class TrainingData:
    """The observed rows of a model's training data.

    :ivar training: A, without batch; None for a model with a closed form.
    :ivar residual: targets less prior means, ``(n,)`` float64.
    :ivar observed: of all rows, whether they are observed.
    :ivar targets: of all rows, float64, in units of the data.
    :ivar scale: ``(n,)`` float64, the unit of the model (of A and residual) in units of the data: 1, or what
        BoTorch's ``Standardize`` divided by.
    """

    training: Any
    residual: Tensor
    observed: Tensor
    targets: Tensor
    scale: Tensor

    @classmethod
    def of(cls, owner: str, model: Any) -> TrainingData:
        """Return the training data of an accelerated model.

        :param owner: name of the function that asks.
        :param model: is put into eval mode.

        :raises InputError: for a model without data, with several tensors of inputs, several outputs or a batch, with
            a ``__call__`` of its own, whose matrix is inverted by its structure, or with BoTorch's transforms that have
            no way back.
        """
        check_inputs(owner, model)
        inputs, targets = model.train_inputs[0], model.train_targets
        if inputs.dim() != 2 or targets.dim() != 1:
            raise InputError(
                f"{owner}: model expects one output and no batch, training inputs (n, d) and targets (n,); got "
                f"{tuple(inputs.shape)} and {tuple(targets.shape)}. Take one model for each."
            )
        check_training_data(owner, model)
        observed = observed_targets(targets, targets.shape)
        model.eval()
        with torch.no_grad():
            transforms = Transforms.of(owner, model)
            known, scale = (targets.to(torch.float64), None) if transforms is None else transforms.training()
            training, rows = Conditioned.of(owner, model).training, int(observed.sum())
            if training is None or not training.ours or training.noisy.shape != (rows, rows):
                raise InputError(
                    f"{owner}: model expects a covariance that is solved for; that of {type(model).__name__} is "
                    "inverted by its structure (a linear, inducing-point or Kronecker kernel)."
                )
            mean = model.forward(*model.train_inputs).mean  # the strategy may hold a mean of earlier parameters
            residual = (targets.to(torch.float64) - mean.to(torch.float64))[observed]
            scale = torch.ones_like(residual) if scale is None else scale[observed]
            return cls(training, residual, observed, known, scale)

    def spread(self, values: Tensor) -> Tensor:
        """Return values ``(n,)`` of the observed rows among all rows, NaN elsewhere."""
        full = torch.full(self.observed.shape, torch.nan, dtype=values.dtype, device=values.device)
        full[self.observed] = values
        return full


def check_inputs(owner: str, model: Any) -> None:
    """:raises InputError: for a model without data, or with several tensors of inputs."""
    check_has_data(owner, model)
    if len(model.train_inputs) != 1:
        raise InputError(f"{owner}: model expects to have one tensor of inputs, got {len(model.train_inputs)}.")

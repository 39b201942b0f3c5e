"""Subclasses that replace the class of an accelerated model and its likelihood, per instance.

The technique is that of ``torch.nn.utils.parametrize``: a subclass of the instance's class is made on the fly, so
isinstance, state_dict keys and every method stay as they were.  Pickling and copying rebuild the subclass by name.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from linear_operator.operators import (
    AddedDiagLinearOperator,
    LinearOperator,
    LowRankRootAddedDiagLinearOperator,
    MulLinearOperator,
    RootLinearOperator,
)

from ...cards import Card, choice, shape, tensor_kind
from ...checks import found
from ...density import log_density
from ...devices import version
from ...errors import ConvergenceWarning, InputError, warn
from ...operators.lazies import adopt_kernels, evaluated_in, parts_of
from ...solvers import Cholesky
from ..lazy_covariance import LazyCovariance, NoisyCovariance
from .acceleration import ATTRIBUTE, Acceleration, choices_of, marked_choices
from .added_diag import AcceleratedAddedDiagLinearOperator, as_kernel_matrix, left_to_us, summands
from .posterior import call, note_strategy
from .prediction import predicted
from .strategy import adopt
from .targets import check_noise, check_reduced, check_value
from .threshold import cholesky_points

_MIN_VARIANCE = {torch.float32: 1e-6, torch.float64: 1e-10}  # GPyTorch's defaults
_subclasses: dict[tuple[type, type], type] = {}


class _Accelerated:
    """Base of the mixins, which rebuilds their instances.

    An instance of the subclass that ``accelerate`` never saw (``type(model)(x, y, likelihood)``) has no choices and
    behaves as one of its plain class.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) not in _subclasses.values():  # a subclass of the made class, which pickle finds by its name
            return super().__reduce_ex__(protocol)
        mixin, base = type(self).__bases__
        return _blank, (mixin, base), super().__reduce_ex__(2)[2]  # type: ignore[index]


class AcceleratedModel(_Accelerated):
    """A model whose prior covariance is a :class:`KernelMatrix` wherever its kernel is a plain one."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        before = _places(self)
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        if is_accelerated(self) and _places(self) != before:  # not so for model.to(x), as acquisition functions call it
            self._clear_cache()  # type: ignore[attr-defined]  # a cached solution has the old dtype and device
            self.__dict__[ATTRIBUTE].cache.clear()
        return result

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        if not is_accelerated(self):
            return text
        acceleration: Acceleration = self.__dict__[ATTRIBUTE]
        inputs = self.train_inputs or ()  # type: ignore[attr-defined]
        precise = acceleration.matmul_precision
        rows = Card.of(
            "",
            training_data="; ".join(f"{shape(x)}, {tensor_kind(x)}" for x in inputs),
            preconditioner=choice(acceleration.preconditioner),
            solver=choice(acceleration.solver),
            matmul=acceleration.matmul + ("" if precise == "float32" else f", {precise}"),
            variance=acceleration.variance,
        )
        return text + ("\n" if text else "") + rows.text().lstrip("\n")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "likelihood" and is_accelerated(self) and value is not None:
            check_likelihood(type(self).__name__, value)
            leave(self.__dict__["_modules"].get(name), self.__dict__[ATTRIBUTE])
            join(value, self.__dict__[ATTRIBUTE])
        ours = name == "prediction_strategy" and is_accelerated(self) and value is not None
        super().__setattr__(name, adopt(value) if ours else value)
        if ours:
            note_strategy(self, self.prediction_strategy)  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().__call__  # type: ignore[misc]
        if not is_accelerated(self):
            return plain(*args, **kwargs)
        acceleration, likelihood = self.__dict__[ATTRIBUTE], self.likelihood  # type: ignore[attr-defined]
        if likelihood is not None and not is_accelerated(likelihood):  # the likelihood was set without __setattr__
            check_likelihood(type(self).__name__, likelihood)
            join(likelihood, acceleration)
        return call(self, plain, args, kwargs)

    def get_fantasy_model(self, *args: Any, **kwargs: Any) -> Any:
        """Return GPyTorch's fantasy model, with a note of the parameters and data that its strategy is of."""
        model = super().get_fantasy_model(*args, **kwargs)  # type: ignore[misc]
        if is_accelerated(model) and model.prediction_strategy is not None:
            note_strategy(model, model.prediction_strategy)  # which was set before the data
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not is_accelerated(self):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        prior = self._own_forward(*args, **kwargs)
        if not isinstance(prior, MultivariateNormal):
            return prior
        acceleration: Acceleration = self.__dict__[ATTRIBUTE]
        covariance = prior.lazy_covariance_matrix
        adopt_kernels(covariance)
        small = covariance.shape[-1] <= cholesky_points() and not acceleration.density.always
        if not small and _approximates(covariance):
            warn(
                "The elementwise product of two covariances in the model's forward was approximated by GPyTorch before "
                "sketchgp saw it. Multiply the kernels instead of their covariances, with active_dims for the inputs "
                "of each.",
                ConvergenceWarning,
                see="product-of-covariances",
            )
        # what is factorized below float64 is factorized in float64, from kernels that can be evaluated in it
        factorized = small or isinstance(acceleration.solver, Cholesky)
        accurate = factorized and not self.training and covariance.dtype != torch.float64  # type: ignore[attr-defined]
        ours = accurate or (acceleration.matmul != "gpytorch" and not small)
        # GPyTorch would evaluate what it slices of a kernel for each task
        if ours and prior.islazy and type(prior) in (MultivariateNormal, MultitaskMultivariateNormal):
            prior = _like(prior, type(prior), as_kernel_matrix(covariance, acceleration))
        # by this mark the likelihood finds the choices of the model
        setattr(prior.lazy_covariance_matrix, ATTRIBUTE, acceleration)
        prior.__class__ = accelerated_class(type(prior), AcceleratedDistribution)
        return prior

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        with evaluated_in(self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def prior_at(self, x: Any, convert: bool = False) -> Any:
        """Return the prior of the model's own forward at x.

        :param convert: whether its covariance is made of kernel matrices, however few the points are.
        """
        prior, acceleration = self._own_forward(x), self.__dict__[ATTRIBUTE]
        covariance = prior.lazy_covariance_matrix
        adopt_kernels(covariance)
        if convert and type(prior) is MultivariateNormal:
            prior = MultivariateNormal(prior.mean, as_kernel_matrix(covariance, acceleration))
        setattr(prior.lazy_covariance_matrix, ATTRIBUTE, acceleration)
        return prior

    _predicted = predicted  # as ``predict`` asks every model for what it predicts


class AcceleratedLikelihood(_Accelerated):
    """A likelihood whose ``K + noise`` is solved by sketchgp; it keeps the choices of every model that uses it."""

    def marginal(self, function_dist: Any, *args: Any, **kwargs: Any) -> Any:
        marginal = self.marginal_of_all(function_dist, *args, **kwargs)
        masked = settings.observation_nan_policy.value() == "mask"
        if is_accelerated(self) and self.training and masked:  # type: ignore[attr-defined]
            check_reduced(marginal.lazy_covariance_matrix.shape[-1])
        return marginal

    def marginal_of_all(self, function_dist: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the marginal of all targets; :meth:`marginal` refuses missing ones that GPyTorch would mask."""
        if is_accelerated(self) and self.training and kwargs.get("noise") is None:  # type: ignore[attr-defined]
            check_noise(self, function_dist.mean)
        marginal = super().marginal(function_dist, *args, **kwargs)  # type: ignore[misc]
        if not is_accelerated(self):
            return marginal
        covariance = marginal.lazy_covariance_matrix
        if type(covariance) not in (AddedDiagLinearOperator, NoisyCovariance, AcceleratedAddedDiagLinearOperator):
            return marginal
        parts = summands(covariance)
        acceleration = getattr(covariance, "acceleration", None)
        acceleration = acceleration or choices_of(function_dist.lazy_covariance_matrix, self)
        assert parts is not None and acceleration is not None
        evaluation = not self.training  # type: ignore[attr-defined]
        accelerated = AcceleratedAddedDiagLinearOperator(*parts, acceleration=acceleration, evaluation=evaluation)
        return _like(marginal, accelerated_class(type(marginal), AcceleratedDistribution), accelerated)


class AcceleratedDistribution(_Accelerated):
    """A prior or posterior of an accelerated model, with or without noise.

    The noise of any likelihood makes an accelerated operator of a prior's covariance; the log density goes to that
    operator, whatever BoTorch made the default.  Variances of a posterior are not rounded up to GPyTorch's default
    ``min_variance``.
    """

    def __init__(self, mean: Any, covariance_matrix: Any, *args: Any, **kwargs: Any) -> None:
        parts = summands(covariance_matrix) if type(covariance_matrix) is AddedDiagLinearOperator else None
        if parts is not None and (acceleration := marked_choices(parts[0])) is not None:
            covariance_matrix = AcceleratedAddedDiagLinearOperator(*parts, acceleration=acceleration)
        super().__init__(mean, covariance_matrix, *args, **kwargs)  # type: ignore[call-arg]

    @property
    def variance(self) -> Any:
        """The variances, in the shape of the mean."""
        covariance = self.lazy_covariance_matrix  # type: ignore[attr-defined]
        least = settings.min_variance.value(covariance.dtype)
        latent = covariance.latent if isinstance(covariance, NoisyCovariance) else covariance
        if not isinstance(latent, LazyCovariance | RootLinearOperator) or least != _MIN_VARIANCE.get(covariance.dtype):
            return super().variance  # type: ignore[misc]
        variance = covariance.diagonal(dim1=-1, dim2=-2).expand(self.loc.shape)  # type: ignore[attr-defined]
        if not isinstance(self, MultitaskMultivariateNormal):
            return variance
        shape = self._output_shape
        return variance.view(shape) if self._interleaved else variance.view(*shape[:-2], shape[-1], shape[-2]).mT

    def log_prob(self, value: Any) -> Any:
        if isinstance(self.lazy_covariance_matrix, LazyCovariance):  # type: ignore[attr-defined]
            return super().log_prob(value)  # type: ignore[misc]
        check_value(value, self.event_shape)  # type: ignore[attr-defined]
        fast = settings.fast_computations.log_prob
        acceleration = getattr(self.lazy_covariance_matrix, "acceleration", None)  # type: ignore[attr-defined]
        asked = acceleration is not None and acceleration.density.always
        if not fast.on() and (left_to_us(fast) or asked):
            return log_density(self, value)
        evaluated = self.lazy_covariance_matrix.evaluate_kernel()  # type: ignore[attr-defined]
        if not isinstance(evaluated, LowRankRootAddedDiagLinearOperator) or evaluated.dtype == torch.float64:
            return super().log_prob(value)  # type: ignore[misc]
        exact = MultivariateNormal(self.loc.double(), evaluated.double())  # type: ignore[attr-defined]
        return exact.log_prob(value.double()).to(value.dtype)  # Woodbury's identity cancels in float32


def _like(distribution: Any, cls: type, covariance: Any) -> Any:
    """Return a distribution of a class with the mean of another, and its order of tasks."""
    tasks = isinstance(distribution, MultitaskMultivariateNormal)
    return cls(distribution.mean, covariance, **({"interleaved": distribution._interleaved} if tasks else {}))


def _places(model: Any) -> list[tuple[Any, ...]]:
    """Return where a model's parameters, buffers and data lie in memory, in which dtype, and how often they changed."""
    data = [] if model.train_inputs is None else [*model.train_inputs, model.train_targets]
    tensors = [*model.parameters(), *model.buffers(), *data]
    return [(t.device, t.dtype, t.data_ptr(), version(t)) for t in tensors]


def accelerated_class(base: type, mixin: type) -> type:
    """Return the subclass of ``base`` with ``mixin`` in front, made once."""
    if issubclass(base, mixin):
        return base
    key = (base, mixin)
    if key not in _subclasses:
        _subclasses[key] = type(f"Accelerated{base.__name__}", (mixin, base), {"__module__": base.__module__})
    return _subclasses[key]


def plain_class(accelerated: type) -> type:
    """Return the class that an accelerated instance had before, or a subclass of an accelerated class itself."""
    return accelerated.__bases__[1] if accelerated in _subclasses.values() else accelerated


def check_likelihood(owner: str, likelihood: Any) -> None:
    """:raises InputError: for one that is not Gaussian; :param owner: who asks."""
    if not isinstance(likelihood, _GaussianLikelihoodBase):
        raise InputError(f"{owner}: the model's likelihood expects to be Gaussian, got {type(likelihood).__name__}.")


def join(likelihood: Any, acceleration: Acceleration) -> None:
    """Let covariances that the likelihood makes of a model's be solved by that model's choices from now on."""
    if not is_accelerated(likelihood):  # type(likelihood)(...) makes one that has the class and no choices
        likelihood.__class__ = accelerated_class(type(likelihood), AcceleratedLikelihood)
    owners = likelihood.__dict__.setdefault(ATTRIBUTE, [])
    if not any(owner is acceleration for owner in owners):
        owners.append(acceleration)


def leave(likelihood: Any, acceleration: Acceleration) -> None:
    """Undo :func:`join`; without a model left the likelihood is an ordinary one again."""
    if not is_accelerated(likelihood):
        return
    owners = likelihood.__dict__[ATTRIBUTE]
    others = [owner for owner in owners if owner is not acceleration]
    # a likelihood that was copied without its model has one owner
    owners[:] = others if len(others) < len(owners) else []
    if not owners:
        likelihood.__class__ = plain_class(type(likelihood))
        del likelihood.__dict__[ATTRIBUTE]


def is_accelerated(instance: Any) -> bool:
    """Return True if ``accelerate`` gave this model or likelihood its choices."""
    return isinstance(instance, _Accelerated) and ATTRIBUTE in instance.__dict__


def acceleration_of(model: Any, owner: str = "sketchgp") -> Acceleration:
    """Return the choices and caches of an accelerated model.

    :param owner: name of the function that asks.
    :raises InputError: if the model is not accelerated.
    """
    if not is_accelerated(model):
        raise InputError(
            f"{owner}: model expects one that sketchgp.accelerate(model) was called on, got {found(model)}."
        )
    return model.__dict__[ATTRIBUTE]


def _blank(mixin: type, base: type) -> Any:
    """Return an empty instance of the accelerated subclass, for unpickling and copying."""
    return object.__new__(accelerated_class(base, mixin))


def _approximates(operator: Any) -> bool:
    """Return True if a product of covariances with a structure, which did not fit in memory, was cut off.

    GPyTorch factorizes both by Lanczos, with so many columns at most.  Where the kernels are rough that is another
    matrix.
    """
    if isinstance(operator, MulLinearOperator):
        sides = operator.left_linear_op, operator.right_linear_op
        roots = [side.root for side in sides if isinstance(side, RootLinearOperator)]
        return any(settings.max_root_decomposition_size.value() <= root.shape[-1] < root.shape[-2] for root in roots)
    return isinstance(operator, LinearOperator) and any(map(_approximates, parts_of(operator)))

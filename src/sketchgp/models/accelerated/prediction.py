"""Predictions of an accelerated model at many test points, by chunks."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checks import array, points_like, refusal
from ...errors import InputError
from ...settings import variance as variance_setting
from ..prediction import Prediction, in_chunks, observation_variance
from ..transforms import Transforms
from .acceleration import ATTRIBUTE
from .conditioned import MEAN_ROWS, Conditioned
from .posterior import calls_its_own_way, mean_at, solution_report
from .targets import check_training_data
from .trend import added_variance


def predicted(
    model: Any, x: Any, variance: str | None, batch_size: int | None, show: bool, trend: bool = False
) -> Prediction:
    """Return the :class:`Prediction` of an accelerated model at x; see :func:`sketchgp.predict`."""
    check_training_data("predict", model)
    transforms, train = Transforms.of("predict", model), model.train_inputs
    several = len(train) != 1 or isinstance(x, tuple)
    if several and transforms is not None:
        raise InputError("predict: model expects one tensor of inputs for BoTorch's transforms; got several.")
    inputs = _inputs_like(x, train) if several else [_like(x, train[0] if transforms is None else transforms.raw)]
    with model.__dict__[ATTRIBUTE].lock:  # a change of mode drops the solution, which another thread may be looking for
        model.eval()
    with torch.no_grad():
        if transforms is None:
            return _predicted(model, inputs, variance, batch_size, show, trend)
        z = transforms.inputs(inputs[0])
        transforms.check(inputs[0], z, variance is not None)
        return transforms.in_units(_predicted(model, [z], variance, batch_size, show, trend), inputs[0], z)


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


def _predicted(
    model: Any, inputs: list[Tensor], variance: str | None, batch_size: int | None, show: bool, trend: bool
) -> Prediction:
    """Predict in the units that the model sees.

    :param inputs: as the model sees them.
    """
    x = inputs[0]
    report, conditioned = solution_report(model, x if len(inputs) == 1 else None), None
    certain = None if report is None else report.error_bound
    certain = None if certain is None or certain.numel() != 1 else certain
    if variance is not None or (certain is not None and not calls_its_own_way(model)):
        conditioned = Conditioned.of("predict", model)
    method = "none"
    if conditioned is not None and variance is not None:
        told = variance_setting.value(model.__dict__[ATTRIBUTE].variance)
        method = conditioned.method(told if variance == "auto" else variance, x)
    means = in_chunks(partial(mean_at, model), inputs, batch_size or MEAN_ROWS, "mean", show)
    mean = torch.cat([part for part, _ in means], dim=-means[-1][1])
    prediction = Prediction(mean, None, None, method, None, report)
    if conditioned is not None and certain is not None:
        prediction.mean_error_bound = conditioned.mean_error_bound(x, mean, float(certain))
    if conditioned is None or variance is None:
        return prediction
    parts = conditioned.variances(inputs, method, variance != "auto", batch_size, show)
    if trend:
        known = parts["variance"]
        parts["variance"] = known + added_variance(conditioned, x, batch_size, show).to(known.dtype)
        parts["variance_error_bound"] = None  # of the rest alone
    observed = observation_variance(model.likelihood, inputs, parts["variance"])
    return dataclasses.replace(prediction, observation_variance=observed, **parts)

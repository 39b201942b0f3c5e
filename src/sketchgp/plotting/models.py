"""Pictures of models: the hyperparameters of a fit, a posterior of one feature, and whether deviations are right."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from .. import checks
from ..errors import InputError
from ..fitting.history import FitHistory
from ..predict import Prediction, predict
from ..style import COLORS, RING, axes_for, below_axes, finish

_POINTS = 400  # that a posterior is drawn at
_MARGIN = 0.05  # of the range of the training inputs, beyond it
_MOST = 2000  # training points that are drawn
_LEVELS = 99
_STYLES = ("-", "--", "-.")


def hyperparameters(history: Any, ax: Any = None, by: Literal["steps", "seconds"] = "steps", names: Any = None) -> Any:
    """Draw the hyperparameters during a fit, with rings at those that the model keeps.

    A hyperparameter of several numbers, such as lengthscales, has several lines of one colour.  The axis is
    logarithmic; values that are not all positive, such as constants of means, are dotted, with an axis on the right.

    :param history: what :func:`sketchgp.fit` returned.
    :param ax: matplotlib axes; None makes a figure.
    :param by: ``"steps"`` or ``"seconds"``.
    :param names: which, keys of ``history.hyperparameters`` or ends of them, such as ``["lengthscale"]``; None for all.
    :returns: the axes.
    :raises InputError: for a history without a step, or an unknown name.
    """
    owner = "hyperparameters"
    checks.instance(owner, "history", history, FitHistory, "a FitHistory")
    checks.word(owner, "by", by, ("steps", "seconds"))
    if not history.losses:
        raise InputError(f"{owner}: history expects at least one step.")
    kept = _chosen(owner, history.hyperparameters, names)
    ax = axes_for(owner, ax)
    x = history.seconds if by == "seconds" else list(range(len(history.losses)))
    best = history.best_step
    handles: list[Any] = []
    other: Any = None
    for number, (name, course) in enumerate(kept.items()):
        positive, color = all(value > 0 for values in course for value in values), COLORS[number % len(COLORS)]
        if not positive and other is None:
            other = ax.twinx()
            other.spines["top"].set_visible(False)
            other.set_ylabel("value of what is dotted", color="0.35")
        on, style = (ax, _STYLES[number // len(COLORS) % len(_STYLES)]) if positive else (other, ":")
        short = _short(name, kept)
        for which, values in enumerate(zip(*course, strict=True)):
            many = f" (each of {len(course[0])})" if len(course[0]) > 1 else ""
            lines = on.plot(x, values, color=color, linestyle=style, linewidth=1.1 if many else 1.8, label=short + many)
            on.plot([x[best]], [values[best]], color=color, **{**RING, "markersize": 6 if many else 8})
            handles += [] if which else lines
    ax.set_yscale("log")
    title = f"{history.optimizer}, {history.objective}; ring: parameters kept"
    finish(ax, title, "seconds since the fit began" if by == "seconds" else "step", "value", legend=False)
    ax.spines["right"].set_visible(other is not None)
    below_axes(ax, handles)
    return ax


def _chosen(owner: str, known: dict[str, Any], names: Any) -> dict[str, Any]:
    """Return the hyperparameters of these names, or ends of names."""
    if names is None:
        kept = known
    else:
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if not isinstance(name, str) or not any(key.endswith(name) for key in known):
                raise checks.refusal(owner, "names", f"names of {', '.join(known) or 'no hyperparameter'}", name, True)
        kept = {key: value for key, value in known.items() if any(key.endswith(name) for name in wanted)}
    if not kept:
        raise InputError(f"{owner}: history expects hyperparameters of at most 100 numbers, got none.")
    return kept


def _short(name: str, among: dict[str, Any]) -> str:
    """Return the shortest end of a name that no other name has."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in reversed(range(len(parts))))
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in among) == 1), name)


def posterior(model: Any, ax: Any = None, x: Any = None, deviations: float = 2.0) -> Any:
    """Draw the posterior of a model of one feature: the mean, and bands for the function and for observations.

    :param model: as :func:`sketchgp.predict` takes it, with inputs ``(n, 1)`` and one output.
    :param ax: matplotlib axes; None makes a figure.
    :param x: points ``(m,)`` to draw at, ascending; None is 400 over the range of the training inputs.
    :param deviations: half the width of the bands.
    :returns: the axes.
    :raises InputError: for a model of other inputs, or what :func:`sketchgp.predict` refuses.

    Of more than 2,000 training points as many are drawn, at equal steps through the data.
    """
    owner = "posterior"
    deviations = checks.number(owner, "deviations", deviations, above=0, finite=True)
    inputs = getattr(model, "train_inputs", None)
    if not inputs or len(inputs) != 1 or inputs[0].dim() != 2 or inputs[0].shape[1] != 1:
        raise checks.refusal(owner, "model", "a model with training inputs (n, 1)", model)
    train, targets = inputs[0][:, 0], model.train_targets
    if targets.dim() != 1:
        raise InputError(f"{owner}: model expects one output, got targets of shape {tuple(targets.shape)}.")
    if x is None:
        low, high = float(train.min()), float(train.max())
        margin = _MARGIN * (high - low) or 1.0
        x = torch.linspace(low - margin, high + margin, _POINTS, dtype=train.dtype, device=train.device)
    points = checks.points_like(owner, "x", x, inputs[0])
    found, ax, color = predict(model, points, progress=False), axes_for(owner, ax), COLORS[0]
    at, mean = _list(points[:, 0]), _double(found.mean)
    bands = ((found.observation_variance, 0.12, "observations"), (found.variance, 0.28, "function"))
    for variance, opacity, what in bands:
        if variance is not None:
            half = deviations * _double(variance).clamp_min(0).sqrt()
            label = f"{what}, {deviations:g} deviations"
            lower, upper = (mean - half).tolist(), (mean + half).tolist()
            ax.fill_between(at, lower, upper, color=color, alpha=opacity, linewidth=0, label=label)
    ax.plot(at, mean.tolist(), color=color, linewidth=2, label="posterior mean")
    some = slice(None, None, math.ceil(len(train) / _MOST))
    shown = _list(train[some]), _list(targets[some])
    size = 4.0 if len(shown[0]) <= 100 else 2.0
    ax.plot(*shown, ".", color="0.2", markersize=size, alpha=0.7, label=f"{len(train):,} training points", zorder=3)
    if (inducing_points := getattr(model, "inducing_points", None)) is not None:
        z = _list(inducing_points[:, 0])
        bottom = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 4}
        label = f"{len(z):,} inducing points"
        ax.plot(z, [0.0] * len(z), "|", color=COLORS[1], markersize=10, label=label, **bottom)
    finish(ax, f"variances: {found.variance_method}", "x", "y", legend=False)
    below_axes(ax, ax.get_legend_handles_labels()[0])
    return ax


def calibration(prediction: Any, y: Any, ax: Any = None) -> Any:
    """Draw how often targets lie within the central intervals of a prediction, against how often they should.

    Deviations are right on the diagonal and too small below it.  The share of as many independent targets would lie
    in the band in 95 of 100 cases.  The title has the root mean square error and the mean negative log
    density, in nats.

    :param prediction: a :class:`sketchgp.Prediction` with ``observation_variance``, of one output.
    :param y: the targets ``(m,)`` of those points: a tensor, a numpy array or a pandas column.
    :param ax: matplotlib axes; None makes a figure.
    :returns: the axes.
    :raises InputError: for a prediction without the variance of observations, or targets that do not fit.
    """
    owner = "calibration"
    checks.instance(owner, "prediction", prediction, Prediction, "a Prediction")
    if prediction.observation_variance is None:
        raise InputError(f"{owner}: prediction expects the variance of observations; predict with variance='auto'.")
    mean, variance = _double(prediction.mean), _double(prediction.observation_variance)
    given = checks.array(owner, "y", y)
    if given.is_complex() or mean.dim() != 1 or given.shape != mean.shape:
        raise InputError(f"{owner}: y expects shape {tuple(mean.shape)} of one output, got {tuple(given.shape)}.")
    given = checks.tensor(owner, "y", _double(given), (1,))
    return draw_calibration(axes_for(owner, ax, (4.8, 4.6)), mean, variance, given)


def draw_calibration(ax: Any, mean: Tensor, variance: Tensor, y: Tensor) -> Any:
    """Draw the calibration of predictions of y, all ``(m,)`` float64, and return the axes."""
    std = variance.sqrt()
    levels = torch.arange(1, _LEVELS + 1, dtype=torch.float64) / (_LEVELS + 1)
    shares = within(mean, std, y, levels)
    spread = 1.96 * (levels * (1 - levels) / len(y)).sqrt()
    at = levels.tolist()
    ax.plot([0, 1], [0, 1], color="0.45", linewidth=1, linestyle=(0, (2, 2)))
    lower, upper = ((levels + side * spread).clamp(0, 1).tolist() for side in (-1, 1))
    ax.fill_between(at, lower, upper, color="0.8", linewidth=0, label=f"chance, {len(y):,} targets")
    ax.plot(at, shares.tolist(), color=COLORS[0], linewidth=2, label="targets within the interval")
    ax.set_aspect("equal")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    density = negative_log_density(mean, variance, y)
    title = f"RMSE {rmse(mean, y):.4g}, negative log density {density:.3g} nats"
    finish(ax, title, "level of the central interval", "share of targets in it", legend=False)
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    return ax


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root mean squared error of a prediction ``(m,)``."""
    return (mean.double() - y.double()).square().mean().sqrt().item()


def negative_log_density(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    """Mean over the rows of -log N(y | mean, variance), in nats; all ``(m,)``, the noise in the variance."""
    mean, variance, y = mean.double(), variance.double(), y.double()
    return (0.5 * (2 * math.pi * variance).log() + 0.5 * (y - mean).square() / variance).mean().item()


def within(mean: Tensor, std: Tensor, y: Tensor, levels: Tensor) -> Tensor:
    """Return the share of targets inside the central intervals of normal predictions, ``(len(levels),)``.

    A target is inside an interval of level p where ``|y - mean| <= std sqrt(2) erfinv(p)``.

    :param mean: ``(m,)``; :param std: of an observation, ``(m,)``; :param y: ``(m,)``; all in float64.
    :param levels: between 0 and 1.
    """
    needed = torch.erf((y - mean).abs() / (math.sqrt(2) * std))  # the least level whose interval holds the target
    return torch.searchsorted(needed.sort().values, levels, right=True).double() / len(y)


def _double(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)


def _list(values: Tensor) -> list[float]:
    return _double(values).tolist()

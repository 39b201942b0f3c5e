"""``predict(model, x)``: posterior mean and variance at many points, in chunks, with what the solves did."""

from __future__ import annotations

from typing import Any

from gpytorch.models import ExactGP

from .accelerate import acceleration_of
from .cards import shows_progress
from .checks import count, flag, word
from .errors import InputError
from .models.accelerated.mixins import AcceleratedModel, is_accelerated
from .models.prediction import Prediction
from .settings import VARIANCES, Variance

__all__ = ["Prediction", "predict"]


def predict(
    model: ExactGP,
    x: Any,
    variance: Variance | None = "auto",
    batch_size: int | None = None,
    progress: bool | None = None,
    trend: bool = False,
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
    :param variance: ``"exact"``, ``"low_rank"`` or ``"samples"``, as
        :class:`sketchgp.settings.variance` describes them; the latter two are
        compared with exact variances at 4 test points, with a warning where they are off by more than their standard
        errors say; ``"auto"`` is what the model was told, compared once; None gives the mean alone.
    :param batch_size: test points at once (default 8192 for the mean and 256 for exact variances).
    :param progress: show a progress bar (default: in a terminal or notebook).
    :param trend: add to variances what the coefficients of a constant or linear mean are uncertain by, as universal
        kriging does: of an accelerated model with one plain kernel.  Else they count as known.
    :raises InputError: for a model that is not accelerated or has no data, wrong shapes, NaN, a low-rank variance or
        samples or a trend asked of any model but one with one plain kernel and no batch, or a trend without variances.

    Transforms of BoTorch's models: inputs are transformed, and outcomes back, by those of the model.  Where outcomes
    are shifted and scaled (``Standardize``) error bounds are, too; after a ``Log`` mean and variance are those of the
    log-normal distribution, and there are no bounds.  Several outputs are ``(m, t)``.  Refused are input transforms
    that make several points of one (``InputPerturbation``), and outcomes without a mean in closed form (``Power``).

    A solve that does not reach its tolerance warns, and one behind a mean does so at every prediction that uses it.
    """
    if not hasattr(model, "_predicted") or isinstance(model, AcceleratedModel):
        acceleration_of(model, "predict")  # raises the error for a model that is not accelerated
    word("predict", "variance", variance, VARIANCES, optional=True)
    batch_size = count("predict", "batch_size", batch_size, optional=True)
    flag("predict", "progress", progress, optional=True)
    if flag("predict", "trend", trend) and (variance is None or not is_accelerated(model)):
        raise InputError("predict: trend=True expects an accelerated model, and variances; got none of them.")
    asked = (x, variance, batch_size, shows_progress(progress))
    return model._predicted(*asked, trend) if trend else model._predicted(*asked)

"""``load_model(path)``: a model that ``python -m sketchgp fit --save`` wrote, to predict with from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from . import checks
from .accelerate import accelerate
from .errors import InputError
from .predict import Prediction, predict, use_weights
from .settings import Variance


def load_model(path: str | os.PathLike[str]) -> LoadedModel:
    """Read a model that the command ``fit --save`` wrote.  No code is run from the file.

    :raises InputError: where the file is missing, damaged or of another kind; the message names what.
    """
    from .cli.model_file import load_model as read  # the command's own modules, when they are needed

    return LoadedModel(read(Path(checks.path("load_model", "path", path))))


class LoadedModel:
    """A regression of a table's column on others, as the command line fitted it: what :func:`load_model` returns.

    :ivar features: names of the columns that it predicts from, in order.
    :ivar target: name of the column that it predicts.
    :ivar model: the accelerated ``gpytorch.models.ExactGP``, of columns less their means and over their deviations.
    """

    def __init__(self, saved: Any) -> None:
        self._saved = saved
        self.features: tuple[str, ...] = tuple(feature.name for feature in saved.features)
        self.target: str = saved.target
        self.model = accelerate(saved.model)
        use_weights(self.model, saved.weights)

    def predict(
        self,
        table: Any,
        variance: Variance | None = "auto",
        *,
        missing: Literal["error", "drop", "mean"] | None = None,
        unknown: Literal["error", "missing"] = "error",
    ) -> Prediction:
        """Mean and variances of rows, in the target's own units, float64.

        :param table: a pandas table or a dictionary of columns, which are found by name, or ``(m, d)`` numbers in the
            order of ``features``: a tensor or a numpy array.  Further columns of a table do not matter.
        :param variance: as in :func:`sketchgp.predict`.
        :param missing: of rows that lack a value: ``"error"``, ``"drop"`` (NaN is predicted) or ``"mean"`` of the
            training rows; None is what ``fit`` was told.
        :param unknown: ``"error"``, or ``"missing"`` to take a category that the model does not know for a missing
            value.
        :raises InputError: for a column that is not there, or holds what it cannot hold (the message names column and
            row, counted from 0), and where no row is complete.
        """
        from .cli.arguments import MISSING
        from .cli.features import UNKNOWN
        from .cli.inputs import expected, inputs
        from .cli.tables import table_of

        owner = "LoadedModel.predict"
        policy = checks.word(owner, "missing", missing, MISSING, optional=True) or self._saved.missing
        checks.word(owner, "unknown", unknown, UNKNOWN)
        advice = ", or say what to do with missing='drop' or missing='mean'"
        rows = table_of(self._columns(table), self.features, expected(self._saved, policy, advice))
        x, complete, *_ = inputs(self._saved, rows, policy, unknown, advice, "unknown='missing'")
        if not len(x):
            raise InputError(f"{owner}: table expects a row that lacks no value; use missing='mean' to predict others.")
        scaling = self._saved.scaling
        found = predict(self.model, scaling.scale_x(x, self.model.train_targets.dtype), variance=variance)
        unit = scaling.y_std

        def whole(value: Tensor | None, by: float = 1.0) -> Tensor | None:
            """Of all rows, NaN where nothing is predicted."""
            if value is None:
                return None
            values = torch.full((len(complete), *value.shape[1:]), torch.nan, dtype=torch.float64)
            values[complete] = value.detach().to("cpu", torch.float64) * by
            return values

        mean = whole(scaling.unscale_mean(found.mean))
        assert mean is not None
        return Prediction(
            mean,
            whole(found.variance, unit**2),
            whole(found.observation_variance, unit**2),
            found.variance_method,
            found.variance_check,
            found.report,
            found.variance_standard_error,
            whole(found.mean_error_bound, unit),
            whole(found.mean_error_bound_deviations),
            whole(found.variance_error_bound, unit**2),
        )

    def _columns(self, table: Any) -> Any:
        """Columns by name."""
        if isinstance(table, Mapping) or hasattr(table, "columns"):
            return table
        numbers = checks.points_like("LoadedModel.predict", "table", table, torch.empty(1, len(self.features)).double())
        return dict(zip(self.features, numbers.numpy().T, strict=True))

    def __repr__(self) -> str:
        rows, kernel = f"{len(self.model.train_targets):,}", self._saved.kernel
        return f"<LoadedModel of {self.target!r}, {kernel}, {rows} rows, from {', '.join(self.features)}>"

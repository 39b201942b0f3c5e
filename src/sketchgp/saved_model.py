"""``load_model(path)``: a model that ``python -m sketchgp fit --save`` wrote, to predict with from Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
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
        self.features: tuple[str, ...] = saved.features
        self.target: str = saved.target
        self.model = accelerate(saved.model)
        use_weights(self.model, saved.weights)

    def predict(self, table: Any, variance: Variance | None = "auto") -> Prediction:
        """Mean and variances of rows, in the target's own units, float64.

        :param table: a pandas table or a dictionary of columns, which are found by name, or ``(m, d)`` numbers in the
            order of ``features``: a tensor or a numpy array.  Further columns of a table do not matter.
        :param variance: as in :func:`sketchgp.predict`.
        :raises InputError: for a column that is missing, or what are no finite numbers.
        """
        scaling = self._saved.scaling
        x = scaling.scale_x(self._columns(table), self.model.train_targets.dtype)
        found = predict(self.model, x, variance=variance)
        unit = scaling.y_std
        return Prediction(
            scaling.unscale_mean(found.mean),
            _scaled(found.variance, unit**2),
            _scaled(found.observation_variance, unit**2),
            found.variance_method,
            found.variance_check,
            found.report,
            found.variance_standard_error,
            _scaled(found.mean_error_bound, unit),
            found.mean_error_bound_deviations,
            _scaled(found.variance_error_bound, unit**2),
        )

    def _columns(self, table: Any) -> Tensor:
        """``(m, d)`` float64."""
        owner = "LoadedModel.predict"
        names = list(table) if isinstance(table, dict) or hasattr(table, "columns") else None
        if names is not None:
            missing = [name for name in self.features if name not in names]
            if missing:
                raise InputError(
                    f"{owner}: table expects the columns {', '.join(self.features)}; it has no {', '.join(missing)}."
                )
            columns = [checks.array(owner, f"table[{name!r}]", _values(table[name])) for name in self.features]
            if any(column.shape != columns[0].shape or column.dim() != 1 for column in columns):
                raise InputError(f"{owner}: table expects columns of one length.")
            table = torch.stack([column.to("cpu", torch.float64) for column in columns], dim=1)
        return checks.points_like(owner, "table", table, self._saved.scaling.x_mean.unsqueeze(0))

    def __repr__(self) -> str:
        rows, kernel = f"{len(self.model.train_targets):,}", self._saved.kernel
        return f"<LoadedModel of {self.target!r}, {kernel}, {rows} rows, from {', '.join(self.features)}>"


def _values(column: Any) -> Any:
    return np.asarray(column) if isinstance(column, list | tuple) else column


def _scaled(value: Tensor | None, by: float) -> Tensor | None:
    return None if value is None else value.to(torch.float64) * by

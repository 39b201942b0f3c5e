"""``load_model(path)``: a model that ``python -m sketchgp fit --save`` wrote, to predict with from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from . import checks
from .accelerate import accelerate
from .errors import InputError
from .models.accelerated.posterior import use_weights
from .models.prediction import Prediction
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
            order of ``features``: a tensor or a numpy array.  Further columns of a table do not matter.  Columns hold
            what they held in the file: numbers, or text; dates are refused.
        :param variance: as in :func:`sketchgp.predict`.
        :param missing: of rows that lack a value: ``"error"``, ``"drop"`` (NaN is predicted) or ``"mean"`` of the
            training rows; None is what ``fit`` was told.
        :param unknown: ``"error"``, or ``"missing"`` to take a category that the model does not know for a missing
            value.
        :raises InputError: for a column that is not there, or holds what it cannot hold (the message names column and
            row, counted from 0), and where no row is complete.
        """
        from .cli.features import MISSING, UNKNOWN
        from .cli.model_file import expected, predict_rows
        from .cli.tables import in_memory

        owner = "LoadedModel.predict"
        policy = checks.word(owner, "missing", missing, MISSING, optional=True) or self._saved.missing
        checks.word(owner, "unknown", unknown, UNKNOWN)
        rules = expected(self._saved, policy, "python")
        rows = in_memory(self._columns(table), self.features, rules)
        return predict_rows(self._saved, rows, policy, unknown, rules, variance).prediction

    def _columns(self, table: Any) -> Any:
        """Return the columns by name."""
        if isinstance(table, Mapping) or hasattr(table, "columns"):
            return table
        rows = table if isinstance(table, torch.Tensor) else np.asarray(table)
        if rows.ndim != 2 or rows.shape[1] != len(self.features):
            raise InputError(
                f"LoadedModel.predict: table expects a table with names of columns, or rows of {len(self.features)} "
                f"values ({', '.join(self.features)}), got {tuple(rows.shape)}."
            )
        return {name: rows[:, column] for column, name in enumerate(self.features)}

    def __repr__(self) -> str:
        rows, kernel = f"{len(self.model.train_targets):,}", self._saved.kernel
        return f"<LoadedModel of {self.target!r}, {kernel}, {rows} rows, from {', '.join(self.features)}>"

"""A model that the command fit saved, in Python: columns in, means and deviations out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import word
from ..errors import InputError
from .arguments import MISSING
from .cells import Cells, is_missing
from .features import UNKNOWN, encode
from .model_file import SavedModel, load_model
from .regression import Regression
from .steps import predict_saved
from .tables import Table, table_of

__all__ = ["LoadedModel", "expected", "inputs", "load"]


@dataclass(frozen=True)
class LoadedModel:
    """What :func:`load` gives.

    :ivar saved: what is in the file: the columns, their scaling, the weights.
    """

    saved: SavedModel

    @property
    def model(self) -> Regression:
        """The GPyTorch model, of standardised inputs and targets, in eval mode."""
        return self.saved.model

    def predict(
        self, columns: Mapping[str, Any], missing: str | None = None, unknown: str = "error"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the target (noise included), in its own units, ``(m,)`` float64.

        :param columns: arrays, lists or tensors ``(m,)`` by the names of the columns, or a data frame; columns that the
            model does not need do no harm.
        :param missing: ``"error"``, ``"drop"`` (NaN is predicted) or ``"mean"``; None is what ``fit`` was told.
        :param unknown: ``"error"``, or ``"missing"`` to take a category that the model does not know for a missing
            value.
        :raises InputError: a column is not there, or holds what it cannot hold; the message names column and row.
        """
        word("predict", "missing", missing, MISSING, optional=True)
        word("predict", "unknown", unknown, UNKNOWN)
        missing = missing or self.saved.missing
        advice = ", or say what to do with missing='drop' or missing='mean'"
        names = [feature.name for feature in self.saved.features]
        table = table_of(columns, names, expected(self.saved, missing, advice))
        x, complete, *_ = inputs(self.saved, table, missing, unknown, advice)
        mean, std = torch.full((2, table.rows), torch.nan, dtype=torch.float64)
        if len(x):
            scaling = self.saved.scaling
            found, variance = predict_saved(self.saved, scaling.scale_x(x, self.model.train_targets.dtype))
            mean[complete], std[complete] = scaling.unscale_mean(found), scaling.unscale_std(variance)
        return mean.numpy(), std.numpy()


def load(path: str | Path) -> LoadedModel:
    """A model that ``python -m sketchgp fit --save`` wrote; unpickles nothing but tensors, and checks what it reads.

    :raises InputError: the file is missing, damaged, or of another kind or version.
    """
    return LoadedModel(load_model(path))


def expected(
    saved: SavedModel, missing: str, advice: str, known: Sequence[str] = (), text: Sequence[str] = ()
) -> Cells:
    """What the columns of a table that is predicted should hold.

    :param missing: what is done about missing values; :param advice: what could be, the end of a sentence.
    :param known: columns of numbers beside the features, :param text: and of text, which may all lack values.
    """
    features = [feature.name for feature in saved.features]
    return Cells(
        may_lack=(*(features if missing != "error" else ()), *known, *text),
        numbers=(*(feature.name for feature in saved.features if feature.kind == "number"), *known),
        text=(*(feature.name for feature in saved.features if feature.kind == "category"), *text),
        missing=advice,
        options=False,
    )


def inputs(
    saved: SavedModel, table: Table, missing: str, unknown: str, advice: str
) -> tuple[Tensor, Tensor, int, dict[str, int]]:
    """Inputs ``(m, d)`` of the rows that can be predicted, and which rows of the table these are, ``(rows,)`` boolean;
    how many rows lack a value; and in how many rows each column had a category that the model does not know."""
    encoded, strangers = encode(saved.features, table, unknown)
    x = torch.from_numpy(encoded)
    lacking = x.isnan().any(1)
    if missing == "error" and bool(lacking.any()):  # a mark such as NA in a column of categories, or an unknown one
        row = int(lacking.nonzero()[0])
        parts = np.split(encoded[row], np.cumsum([feature.width for feature in saved.features])[:-1])
        name = next(f.name for f, part in zip(saved.features, parts, strict=True) if np.isnan(part).any())
        value = table.columns[name].values[row]
        what = "the value is missing" if value is None or is_missing(value) else f"{value!r} is taken for missing"
        raise InputError(f"{table.where(row, name)} {what}; remove the row or fill the value in{advice}")
    complete = ~lacking if missing == "drop" else torch.ones_like(lacking)
    return torch.where(x.isnan(), saved.fill, x)[complete], complete, int(lacking.sum()), strangers

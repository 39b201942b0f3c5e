"""Predictions of a saved model for the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..predict import Prediction, predict
from ..settings import Variance
from .columns import Rules, Table
from .features import encode
from .model_file import SavedModel

__all__ = ["Predicted", "expected", "predict_rows"]


@dataclass(frozen=True)
class Predicted:
    """Predictions of all rows of a table, in the target's units, NaN where a row gets none.

    :param complete: which rows are predicted, ``(rows,)`` boolean.
    :param lacking: number of rows that lack a value.
    :param strangers: by column, the number of rows with a category that the model does not know.
    """

    prediction: Prediction
    complete: Tensor
    lacking: int
    strangers: dict[str, int]


def expected(
    saved: SavedModel, missing: str, caller: str, numbers: Sequence[str] = (), names: Sequence[str] = (), **more: Any
) -> Rules:
    """Return what a table that is predicted has to hold.

    :param missing: what is done about missing values.
    :param numbers: columns of numbers beside the features, :param names: and of names of rows; both may lack values.
    :param more: of :class:`Rules`.
    """
    features = [feature.name for feature in saved.features]
    return Rules(
        numbers=(*(feature.name for feature in saved.features if feature.kind == "number"), *numbers),
        text={feature.name: feature.categories for feature in saved.features if feature.kind != "number"},
        names=names,
        may_lack=(*(features if missing != "error" else ()), *numbers, *names),
        caller=caller,
        **{"marks": saved.marks, **more},
    )


def predict_rows(
    saved: SavedModel, table: Table, missing: str, unknown: str, rules: Rules, variance: Variance | None = "auto"
) -> Predicted:
    """Return the predictions of a table's rows; the saved model has to be accelerated and to know its weights.

    :raises InputError: for categories that the model does not know, and where no row can be predicted.
    """
    python, refused = rules.caller == "python", missing == "error"
    way = ("unknown='missing'" + " and missing='drop' or 'mean'" * refused) if python else (
        "--unknown missing" + " and --missing drop or mean" * refused)  # fmt: skip
    encoded, strangers = encode(saved.features, table, "error" if refused else unknown, way)
    x = torch.from_numpy(encoded)
    lacking = x.isnan().any(1)
    complete = ~lacking if missing == "drop" else torch.ones_like(lacking)
    if not complete.any():
        mean = "missing='mean'" if python else "--missing mean"
        raise InputError(f"{table.path}: a value is missing in every row; {mean} predicts them nonetheless")
    scaling, dtype = saved.scaling, saved.model.train_targets.dtype
    inputs = scaling.scale_x(torch.where(x.isnan(), saved.fill, x)[complete], dtype)
    predicted = predict(saved.model, inputs, variance=variance)

    def of_all_rows(value: Any, unit: float = 1.0) -> Any:
        """Return values of all rows, NaN where nothing is predicted."""
        if not isinstance(value, Tensor):
            return value
        values = torch.full((len(complete), *value.shape[1:]), torch.nan, dtype=torch.float64)
        values[complete] = value.detach().to("cpu", torch.float64) * unit
        return values

    unit = scaling.y_std
    prediction = replace(
        predicted,
        mean=of_all_rows(scaling.unscale_mean(predicted.mean)),
        variance=of_all_rows(predicted.variance, unit**2),
        observation_variance=of_all_rows(predicted.observation_variance, unit**2),
        mean_error_bound=of_all_rows(predicted.mean_error_bound, unit),
        mean_error_bound_deviations=of_all_rows(predicted.mean_error_bound_deviations),
        variance_standard_error=of_all_rows(predicted.variance_standard_error),
        variance_error_bound=of_all_rows(predicted.variance_error_bound, unit**2),
    )
    return Predicted(prediction, complete, int(lacking.sum()), strangers)

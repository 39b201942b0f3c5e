"""The inputs of a saved model, from the columns of a table: what they should hold, and the numbers they become."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .cells import Cells, is_missing
from .features import encode
from .model_file import SavedModel
from .tables import Table


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
    saved: SavedModel, table: Table, missing: str, unknown: str, advice: str, way: str = "--unknown missing"
) -> tuple[Tensor, Tensor, int, dict[str, int]]:
    """Inputs ``(m, d)`` of the rows that can be predicted, and which rows of the table these are, ``(rows,)`` boolean;
    how many rows lack a value; and in how many rows each column had a category that the model does not know."""
    encoded, strangers = encode(saved.features, table, unknown, way)
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

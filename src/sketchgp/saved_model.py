"""Saved regressions: tensors, numbers and text only, so that loading a file never runs code from it.

The command ``python -m sketchgp fit --save`` writes them; the command ``predict`` and :func:`load_model` read them.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import checks, tensor_file
from .accelerate import accelerate
from .cli.columns import MARKS, Rules, Table
from .cli.features import MISSING, UNKNOWN, Feature, encode
from .cli.options import Output
from .cli.regression import Regression, Scaling
from .cli.tables import in_memory, require_file
from .errors import InputError
from .models.accelerated.posterior import use_weights
from .predict import Prediction, predict
from .settings import Variance

FORMAT = "sketchgp regression"
VERSION = 5  # 1 was a pickled dictionary without a digest, 2 knew numbers only, 3 no other marks than MARKS, 4 no mean
_READ = (3, 4, VERSION)
_HYPERPARAMETER = "hyperparameter."
_WORDS = ("kernel", "mean", "target", "missing")  # fields that the file holds as the model does


@dataclass(frozen=True)
class SavedModel:
    """A fitted regression with what is needed to predict rows of a table.

    :param model: the GP, in eval mode, conditioned on the training rows.
    :param weights: ``(K + noise I)^-1 (y - mean)``, ``(n,)``, so that a mean needs no new solve.
    :param kernel: name of the kernel, a key of :data:`sketchgp.kernels.BY_NAME`.
    :param features: the columns, in the order of the model's inputs.
    :param target: column name.
    :param scaling: of the inputs and the target.
    :param fill: the inputs that stand for a missing value, their means over the training rows, ``(d,)`` float64.
    :param missing: what is done about missing values, one of ``features.MISSING``.
    :param marks: texts that stand for a missing value.
    :param mean: of the prior, one of :data:`sketchgp.kernels.MEANS`.
    """

    model: Regression
    weights: Tensor
    kernel: str
    features: tuple[Feature, ...]
    target: str
    scaling: Scaling
    fill: Tensor
    missing: str = "error"
    marks: tuple[str, ...] = MARKS
    mean: str = "constant"


def save_model(path: str | Path, saved: SavedModel, overwrite: bool = True) -> None:
    """Write the model by a temporary file and a rename, so that the path never holds half a file.

    :param overwrite: False to keep a file that is there.
    :raises InputError: the folder does not exist or cannot be written.
    """
    path = Path(path)
    described = {
        **{name: getattr(saved, name) for name in _WORDS},
        "format": FORMAT,
        "version": VERSION,
        "features": [asdict(feature) for feature in saved.features],
        "y_mean": saved.scaling.y_mean,
        "y_std": saved.scaling.y_std,
        "marks": list(saved.marks),
    }
    tensors = {
        "x_mean": saved.scaling.x_mean,
        "x_std": saved.scaling.x_std,
        "fill": saved.fill,
        "train_x": saved.model.train_inputs[0],
        "train_y": saved.model.train_targets,
        "weights": saved.weights,
        **{_HYPERPARAMETER + name: value for name, value in saved.model.state_dict().items()},
    }
    output = Output(path, overwrite)
    with output.errors():
        tensor_file.save(path, described, {name: t.detach().cpu().clone() for name, t in tensors.items()}, overwrite)


def read_model(path: str | Path) -> SavedModel:
    """Read and check a file written by ``save_model``; unpickle nothing but tensors.

    The file's digest is checked.

    :raises InputError: the file is missing, damaged, of another kind or version, or its parts do not fit together; the
        message names the file and the part.
    """
    path = Path(path)
    require_file(path)
    if not zipfile.is_zipfile(path):  # torch.save writes a zip archive; torch.load would try older formats as well
        raise InputError(f"{path}: not a model saved by sketchgp, or cut short")
    try:
        described, tensors = tensor_file.load(path)
    except (OSError, MemoryError) as error:
        raise InputError(f"{path}: cannot be read now ({error})") from error
    except ValueError as error:
        raise InputError(
            f"{path}: not a model saved by sketchgp, or damaged, or of a version before digests ({error}); make it "
            "anew with the command fit"
        ) from error
    if described.get("format") != FORMAT:
        raise InputError(f"{path}: not a model saved by sketchgp")
    version = described.get("version")
    if version not in _READ:
        newer = isinstance(version, int) and version > VERSION
        age, remedy = ("a newer", "upgrade sketchgp") if newer else ("an older", "make it anew with the command fit")
        raise InputError(
            f"{path}: written by {age} sketchgp (format version {version!r}; this one reads {_READ[0]} to {VERSION}): "
            f"{remedy}"
        )
    return _saved_model(path, {"marks": MARKS, "mean": "constant", **described, **tensors})


def _saved_model(path: Path, contents: Mapping[str, Any]) -> SavedModel:
    """Return the model of a file's fields, which fit together; the digest says that they are what was written.

    :raises InputError: the file was written by something else than :func:`save_model`.
    """
    try:
        features = tuple(Feature(**{**one, "categories": tuple(one["categories"])}) for one in contents["features"])
        scaling = Scaling(*(contents[name] for name in ("x_mean", "x_std", "y_mean", "y_std")))
        model = Regression(contents["train_x"], contents["train_y"], contents["kernel"], mean=contents["mean"])
        model.load_state_dict({name: contents[_HYPERPARAMETER + name] for name in model.state_dict()})
        saved = SavedModel(
            model=model.eval(),
            features=features,
            scaling=scaling,
            marks=tuple(contents["marks"]),
            **{name: contents[name] for name in (*_WORDS, "weights", "fill")},
        )
        width = sum(feature.width for feature in features)
        if {width} != {len(scaling.x_mean), len(scaling.x_std), len(saved.fill), contents["train_x"].shape[1]}:
            raise ValueError(f"the columns have {width} inputs, and those of the model are others")
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); make it anew with fit") from error
    return saved


@dataclass(frozen=True)
class Predicted:
    """Predictions of all rows of a table, in the target's units, NaN where a row gets none.

    :param lacking: number of rows that lack a value.
    :param strangers: by column, the number of rows with a category that the model does not know.
    """

    prediction: Prediction
    lacking: int
    strangers: dict[str, int]


def expected(saved: SavedModel, missing: str, numbers: Sequence[str] = (), **more: Any) -> Rules:
    """Return what a table that is predicted has to hold.

    :param missing: what is done about missing values.
    :param numbers: columns of numbers beside the features, which may lack values.
    :param more: of :class:`Rules`.
    """
    features = [feature.name for feature in saved.features]
    return Rules(
        numbers=(*(feature.name for feature in saved.features if feature.kind == "number"), *numbers),
        text={feature.name: feature.categories for feature in saved.features if feature.kind != "number"},
        may_lack=(*(features if missing != "error" else ()), *numbers),
        fitting=False,
        **{"marks": saved.marks, **more},
    )


def predict_rows(
    saved: SavedModel, table: Table, missing: str, unknown: str, variance: Variance | None = "auto"
) -> Predicted:
    """Return the predictions of a table's rows; the saved model has to be accelerated and to know its weights.

    :raises InputError: for categories that the model does not know, and where no row can be predicted.
    """
    encoded, strangers = encode(saved.features, table, "error" if missing == "error" else unknown)
    x = torch.from_numpy(encoded)
    lacking = x.isnan().any(1)
    complete = ~lacking if missing == "drop" else torch.ones_like(lacking)
    if not complete.any():
        raise InputError(
            f"{table.path}: a value is missing in every row; missing set to mean predicts them nonetheless"
        )
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

    powers = {"variance": 2, "observation_variance": 2, "variance_error_bound": 2, "variance_standard_error": 0}
    powers["mean_error_bound"] = 1
    scaled = {name: of_all_rows(getattr(predicted, name), scaling.y_std**power) for name, power in powers.items()}
    prediction = replace(predicted, mean=of_all_rows(scaling.unscale_mean(predicted.mean)), **scaled)
    return Predicted(prediction, int(lacking.sum()), strangers)


def load_model(path: str | os.PathLike[str]) -> LoadedModel:
    """Read a model that the command ``fit --save`` wrote.  No code is run from the file.

    :raises InputError: where the file is missing, damaged or of another kind; the message names what.
    """
    return LoadedModel(read_model(Path(checks.path("load_model", "path", path))))


class LoadedModel:
    """A regression of a table's column on others, as the command line fitted it: what :func:`load_model` returns.

    :ivar features: names of the columns that it predicts from, in order.
    :ivar target: name of the column that it predicts.
    :ivar model: the accelerated ``gpytorch.models.ExactGP``, of columns less their means and over their deviations.
    """

    def __init__(self, saved: SavedModel) -> None:
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
        owner = "LoadedModel.predict"
        policy = checks.word(owner, "missing", missing, MISSING, optional=True) or self._saved.missing
        checks.word(owner, "unknown", unknown, UNKNOWN)
        rows = in_memory(self._columns(table), self.features, expected(self._saved, policy))
        return predict_rows(self._saved, rows, policy, unknown, variance).prediction

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

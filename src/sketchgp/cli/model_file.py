"""Saved regressions: tensors, numbers and text only, so that loading a file never runs code from it."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tensor_file
from ..errors import InputError
from ..predict import Prediction, predict
from ..settings import Variance
from .columns import MARKS, Rules, Table
from .features import KINDS, MISSING, Feature, encode
from .options import Output
from .regression import KERNELS, Regression, Scaling, true_residual

FORMAT = "sketchgp regression"
VERSION = 4  # 1 was a pickled dictionary without a digest, 2 knew numbers only, 3 no other marks than MARKS
_HYPERPARAMETER = "hyperparameter."
_ENTRIES = 2**24  # of the kernel matrix, evaluated to check the weights
_LEAST_ROWS = 16
_RESIDUAL_SLACK = 1e-4  # what the rounding of another machine may change a residual by


@dataclass(frozen=True)
class SavedModel:
    """A fitted regression with what is needed to predict rows of a table.

    :param model: the GP, in eval mode, conditioned on the training rows.
    :param weights: ``(K + noise I)^-1 (y - mean)``, ``(n,)``, so that a mean needs no new solve.
    :param kernel: name of the kernel, a key of ``regression.KERNELS``.
    :param features: the columns, in the order of the model's inputs.
    :param target: column name.
    :param scaling: of the inputs and the target.
    :param residual: of ``weights``, as :func:`weights_residual` has it.
    :param fill: the inputs that stand for a missing value, their means over the training rows, ``(d,)`` float64.
    :param missing: what is done about missing values, one of ``arguments.MISSING``.
    :param id: the column that names the rows, if there is one.
    :param marks: texts that stand for a missing value.
    """

    model: Regression
    weights: Tensor
    kernel: str
    features: tuple[Feature, ...]
    target: str
    scaling: Scaling
    residual: float
    fill: Tensor
    missing: str = "error"
    id: str | None = None
    marks: tuple[str, ...] = MARKS


def save_model(path: str | Path, saved: SavedModel, overwrite: bool = True) -> None:
    """Write the model by a temporary file and a rename, so that the path never holds half a file.

    :param overwrite: False to keep a file that is there.
    :raises InputError: the folder does not exist or cannot be written.
    """
    path = Path(path)
    described = {
        "format": FORMAT,
        "version": VERSION,
        "kernel": saved.kernel,
        "features": [{"name": f.name, "kind": f.kind, "categories": list(f.categories)} for f in saved.features],
        "target": saved.target,
        "y_mean": saved.scaling.y_mean,
        "y_std": saved.scaling.y_std,
        "residual": saved.residual,
        "missing": saved.missing,
        "id": saved.id or "",
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


def load_model(path: str | Path) -> SavedModel:
    """Read and check a file written by ``save_model``; unpickle nothing but tensors.

    The file's digest is checked, and the weights are checked against the training data: their residual has to be what
    the file says.

    :raises InputError: the file is missing, damaged, of another kind or version, or its parts do not fit together; the
        message names the file and the part.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not a saved model")
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
    if version not in (3, VERSION):
        newer = isinstance(version, int) and version > VERSION
        age, remedy = ("a newer", "upgrade sketchgp") if newer else ("an older", "make it anew with the command fit")
        raise InputError(
            f"{path}: written by {age} sketchgp (format version {version!r}; this one reads {VERSION} and 3): {remedy}"
        )
    contents = {**described, **tensors}
    if version == 3:
        contents["marks"] = list(MARKS)
    saved = _saved_model(path, contents)
    residual = weights_residual(saved.model, saved.weights)
    if not residual <= 2 * saved.residual + _RESIDUAL_SLACK:
        raise InputError(
            f"{path}: its weights do not solve its training data: the residual is {residual:.1e}, where the file says "
            f"{saved.residual:.1e}; make it anew with the command fit"
        )
    return saved


def weights_residual(model: Regression, weights: Tensor) -> float:
    """Return the relative residual of weights ``(n,)`` on all rows, or on a fixed choice of rows where n is large."""
    n = len(weights)
    count = min(n, max(_LEAST_ROWS, _ENTRIES // n))
    return true_residual(model, weights, torch.linspace(0, n - 1, count, dtype=torch.float64).round().long())


def _saved_model(path: Path, contents: Mapping[str, Any]) -> SavedModel:
    """Return the model of a file's fields, each of which has its type, its shape and its dtype checked."""

    def fail(what: str) -> InputError:
        return InputError(f"{path}: damaged: {what}")

    def take(name: str, kind: type, good: Callable[[Any], bool] = lambda value: True) -> Any:
        value = contents.get(name)
        if not isinstance(value, kind) or not good(value):
            shown = f"{type(value).__name__} {value!r}"[:80] if name in contents else "missing"
            raise fail(f"the field {name!r} is {shown}, expected {kind.__name__}")
        return value

    def tensor(name: str, *shape: int, dtypes: Sequence[torch.dtype] = (torch.float64,)) -> Tensor:
        value: Tensor = take(name, Tensor)
        if value.layout != torch.strided or value.dtype not in dtypes or value.shape != shape:
            raise fail(f"the tensor {name!r} has type {value.dtype} and shape {tuple(value.shape)}, expected {shape}")
        if not bool(value.isfinite().all()):
            raise fail(f"the tensor {name!r} holds values that are not finite")
        return value

    kernel = take("kernel", str, KERNELS.__contains__)
    described = take("features", list)
    features = tuple(feature for feature in map(_feature, described) if feature is not None)
    if not 0 < len(described) == len({feature.name for feature in features}):
        raise fail("the field 'features' does not hold names, kinds and categories that are all different")
    width = sum(feature.width for feature in features)
    rows = len(take("weights", Tensor, lambda one: one.dim() == 1))
    train_x = tensor("train_x", rows, width, dtypes=(torch.float32, torch.float64))
    y_mean, y_std = (take(name, float, math.isfinite) for name in ("y_mean", "y_std"))
    scaling = Scaling(tensor("x_mean", width), tensor("x_std", width), y_mean, y_std)
    if rows < 2 or y_std <= 0 or bool((scaling.x_std <= 0).any()):
        raise fail("no training rows, or a deviation that is not positive")
    model = Regression(train_x, tensor("train_y", rows, dtypes=(train_x.dtype,)), kernel)
    expected = model.state_dict()
    state = {name: take(_HYPERPARAMETER + name, Tensor) for name in expected}
    for name, value in state.items():  # a bound of a constraint may be infinite, as it is in every model
        if value.shape != expected[name].shape or not (value.isfinite() | (value == expected[name])).all():
            raise fail(f"the hyperparameter {name!r} is not {tuple(expected[name].shape)} finite numbers")
    model.load_state_dict(state)
    return SavedModel(
        model=model.eval(),
        weights=tensor("weights", rows),
        kernel=kernel,
        features=features,
        target=take("target", str),
        scaling=scaling,
        residual=take("residual", float, math.isfinite),
        fill=tensor("fill", width),
        missing=take("missing", str, MISSING.__contains__),
        id=take("id", str) or None,
        marks=tuple(take("marks", list, lambda ones: all(isinstance(one, str) for one in ones))),
    )


def _feature(described: Any) -> Feature | None:
    """Return a feature of its name, kind and categories; None where these are none."""
    if not isinstance(described, dict) or set(described) != {"name", "kind", "categories"}:
        return None
    name, kind, categories = described["name"], described["kind"], described["categories"]
    texts = isinstance(categories, list) and all(isinstance(one, str) for one in categories)
    if not isinstance(name, str) or kind not in KINDS or not texts:
        return None
    different = len(set(categories)) == len(categories) and bool(categories) == (kind == "category")
    return Feature(name, kind, tuple(categories)) if different else None


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

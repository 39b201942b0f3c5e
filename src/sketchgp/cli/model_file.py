"""Saved regressions: tensors, numbers and text only, so that loading a file never runs code from it."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tensor_file
from ..errors import InputError
from .arguments import MISSING
from .features import KINDS, Feature
from .outputs import Output
from .regression import KERNELS, Regression, Scaling
from .results import true_residual

__all__ = ["SavedModel", "load_model", "save_model", "weights_residual"]

FORMAT = "sketchgp regression"
VERSION = 3  # 1 was a pickled dictionary without a digest, 2 knew numbers only
_HYPERPARAMETER = "hyperparameter."
_ENTRIES = 2**24  # of the kernel matrix, evaluated to check the weights
_LEAST_ROWS = 16
_RESIDUAL_SLACK = 1e-4  # what the rounding of another machine may change a residual by
_DTYPES = (torch.float32, torch.float64)


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


def save_model(path: str | Path, saved: SavedModel, overwrite: bool = True) -> None:
    """Writes the model by a temporary file and a rename, so that the path never holds half a file.

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
    """Reads and checks a file written by ``save_model``; unpickles nothing but tensors.

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
        if _is_of_version_1(path):
            raise InputError(
                f"{path}: written by an older sketchgp (format 1), without the digest that shows whether it is whole; "
                "make it anew with the command fit"
            ) from error
        raise InputError(f"{path}: not a model saved by sketchgp, or damaged ({error})") from error
    if described.get("format") != FORMAT:
        raise InputError(f"{path}: not a model saved by sketchgp")
    version = described.get("version")
    if not isinstance(version, int) or version < 1:
        raise InputError(f"{path}: damaged: the format version is {version!r}")
    if version > VERSION:
        raise InputError(
            f"{path}: written by a newer sketchgp (format {version}; this one reads {VERSION}): upgrade sketchgp"
        )
    if version < VERSION:
        raise InputError(
            f"{path}: written by an older sketchgp (format {version}; this one reads {VERSION}); make it anew with the "
            "command fit"
        )
    saved = _Checked(path, {**described, **tensors}).saved_model()
    found = weights_residual(saved.model, saved.weights)
    if not found <= 2 * saved.residual + _RESIDUAL_SLACK:
        raise InputError(
            f"{path}: its weights do not solve its training data: the residual is {found:.1e}, where the file says "
            f"{saved.residual:.1e}; make it anew with the command fit"
        )
    return saved


def weights_residual(model: Regression, weights: Tensor) -> float:
    """The true relative residual of weights ``(n,)`` on all rows, or on as many as are cheap (always the same ones)."""
    n = len(weights)
    count = min(n, max(_LEAST_ROWS, _ENTRIES // n))
    return true_residual(model, weights, torch.linspace(0, n - 1, count, dtype=torch.float64).round().long())


def _is_of_version_1(path: Path) -> bool:
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch and pickle share no base class for a damaged file
        return False
    return isinstance(contents, dict) and contents.get("format") == FORMAT


class _Checked:
    """Takes the fields of a file one by one, each with its type and shape checked."""

    def __init__(self, path: Path, contents: dict[str, Any]):
        self.path = path
        self.contents = contents

    def fail(self, what: str) -> InputError:
        return InputError(f"{self.path}: damaged: {what}")

    def take(self, name: str, kind: type) -> Any:
        if name not in self.contents:
            raise self.fail(f"the field {name!r} is missing")
        value = self.contents[name]
        if not isinstance(value, kind):
            raise self.fail(f"the field {name!r} is a {type(value).__name__}, expected {kind.__name__}")
        return value

    def number(self, name: str) -> float:
        value = float(self.take(name, float))
        if value - value != 0.0:
            raise self.fail(f"the field {name!r} is {value}")
        return value

    def tensor(self, name: str, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        value: Tensor = self.take(name, Tensor)
        self.check_tensor(name, value, dtypes)
        matches = value.dim() == len(shape) and all(
            expected is None or size == expected for size, expected in zip(value.shape, shape, strict=True)
        )
        if not matches:
            raise self.fail(f"the tensor {name!r} has shape {tuple(value.shape)}, expected {shape}")
        return value

    def check_tensor(self, name: str, value: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        if value.layout != torch.strided or value.dtype not in dtypes:
            raise self.fail(f"the tensor {name!r} has type {value.dtype}, expected one of {dtypes}")
        if not bool(torch.isfinite(value).all()):
            raise self.fail(f"the tensor {name!r} holds values that are not finite")

    def saved_model(self) -> SavedModel:
        kernel = self.take("kernel", str)
        if kernel not in KERNELS:
            raise self.fail(f"unknown kernel {kernel!r}; the known ones are {', '.join(KERNELS)}")
        features = self.features()
        width = sum(feature.width for feature in features)
        missing = self.take("missing", str)
        if missing not in MISSING:
            raise self.fail(f"the field 'missing' is {missing!r}, expected one of {', '.join(MISSING)}")
        train_x = self.tensor("train_x", (None, width), _DTYPES)
        dtype = (train_x.dtype,)
        train_y = self.tensor("train_y", (train_x.shape[0],), dtype)
        weights = self.tensor("weights", (train_x.shape[0],), (torch.float64,))
        scaling = Scaling(
            x_mean=self.tensor("x_mean", (width,), (torch.float64,)),
            x_std=self.tensor("x_std", (width,), (torch.float64,)),
            y_mean=self.number("y_mean"),
            y_std=self.number("y_std"),
        )
        if train_x.shape[0] < 2 or scaling.y_std <= 0 or bool((scaling.x_std <= 0).any()):
            raise self.fail("no training rows, or a deviation that is not positive")
        return SavedModel(
            model=self.model(train_x, train_y, kernel),
            weights=weights,
            kernel=kernel,
            features=features,
            target=self.take("target", str),
            scaling=scaling,
            residual=self.number("residual"),
            fill=self.tensor("fill", (width,), (torch.float64,)),
            missing=missing,
            id=self.take("id", str) or None,
        )

    def features(self) -> tuple[Feature, ...]:
        found = []
        for one in self.take("features", list):
            parts = (one.get("name"), one.get("kind"), one.get("categories")) if isinstance(one, dict) else (None,) * 3
            name, kind, categories = parts
            if not isinstance(name, str) or kind not in KINDS or not isinstance(categories, list):
                raise self.fail("the field 'features' is not a list of names, kinds and categories")
            texts = [category for category in categories if isinstance(category, str)]
            if len(set(texts)) < len(categories) or bool(texts) != (kind == "category"):
                raise self.fail(f"the categories of {name!r} are not different texts")
            found.append(Feature(name, kind, tuple(texts)))
        if not found or len({feature.name for feature in found}) < len(found):
            raise self.fail("the field 'features' is not a list of different names")
        return tuple(found)

    def model(self, train_x: Tensor, train_y: Tensor, kernel: str) -> Regression:
        model = Regression(train_x, train_y, kernel)
        state = {
            name.removeprefix(_HYPERPARAMETER): value
            for name, value in self.contents.items()
            if name.startswith(_HYPERPARAMETER)
        }
        expected = model.state_dict()
        if set(state) != set(expected):
            different = ", ".join(sorted(set(map(str, state)) ^ set(expected)))
            raise self.fail(f"other hyperparameters than a {kernel} model has: {different}")
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != expected[name].shape:
                raise self.fail(f"the hyperparameter {name!r} is not a tensor of shape {tuple(expected[name].shape)}")
            # The bounds of a constraint are infinite by nature; all else must be a finite number.
            if not bool(torch.isfinite(value).all()) and not torch.equal(value, expected[name]):
                raise self.fail(f"the hyperparameter {name!r} holds values that are not finite")
        model.load_state_dict(state)
        return model.eval()

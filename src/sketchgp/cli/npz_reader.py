"""NPZ archives of numpy arrays, read without unpickling anything."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import InputError
from .cells import Cells, Column, Opened, Read, numbered


def open_npz(path: Path) -> Opened:
    """Names of the columns, the default features and a reader; see ``tables.open_table``."""
    arrays = _load(path)
    rows = arrays["X"].shape[0] if "X" in arrays else _common_length(path, arrays)
    columns: dict[str, np.ndarray] = {}
    names: list[str] = []
    if "X" in arrays:
        if arrays["X"].ndim != 2:
            raise InputError(f"{path}: array 'X': expected shape (n, d), found {arrays['X'].shape}")
        _values(path, "X", arrays["X"], Cells(numbers=("X",)))
        names = _feature_names(arrays, arrays["X"].shape[1])
        columns = {name: arrays["X"][:, position] for position, name in enumerate(names)}
    default_features = list(names)
    for name, array in arrays.items():
        if name != "X" and array.ndim == 1 and array.shape[0] == rows:
            names.append(name)
            columns.setdefault(name, array)
    if "X" not in arrays:
        default_features = list(names)

    def read(wanted: Sequence[str], cells: Cells) -> Read:
        found = [Column(name, _values(path, name, columns[name], cells)) for name in wanted]
        if rows == 0:
            raise InputError(f"{path}: the arrays have no rows")
        return Read(found, numbered)

    return Opened(names, default_features, read)


def _load(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path}: not an NPZ archive, or a damaged one")
    arrays = {}
    name = ""
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = archive[name]
    except ValueError as error:
        if "allow_pickle" in str(error) or "Object arrays" in str(error):
            raise InputError(
                f"{path}: array {name!r} holds Python objects, which are not loaded because loading them "
                "can run code; save it as numbers"
            ) from error
        raise InputError(f"{path}: array {name!r} is damaged ({error})") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise InputError(f"{path}: not an NPZ archive, or a damaged one ({error})") from error
    if not arrays:
        raise InputError(f"{path}: the archive holds no arrays")
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise InputError(f"{path}: entry {key!r} is not a numpy array")
    return arrays


def _feature_names(arrays: dict[str, np.ndarray], width: int) -> list[str]:
    for key in ("features", "feature_names"):
        labels = arrays.get(key)
        if labels is not None and labels.dtype.kind == "U" and labels.shape == (width,):
            return [str(label) for label in labels]
    return [f"x{position}" for position in range(width)]


def _common_length(path: Path, arrays: dict[str, np.ndarray]) -> int:
    """Without ``X`` every one-dimensional array is a column, so all must have one length."""
    lengths = {name: array.shape[0] for name, array in arrays.items() if array.ndim == 1}
    if not lengths:
        raise InputError(
            f"{path}: expected an array 'X' (n, d), or one-dimensional arrays, one a column; found "
            + ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        )
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InputError(f"{path}: the columns have different lengths: {found}")
    return next(iter(lengths.values()))


def _values(path: Path, name: str, array: np.ndarray, cells: Cells) -> np.ndarray:
    """Numbers in float64, or an object array of text."""
    if array.dtype.kind in "fiub":
        return array.astype(np.float64)
    if array.dtype.kind == "U" and name not in cells.numbers:
        return array.astype(object)
    if array.dtype.kind in "Mm":
        raise InputError(f"{path}: column {name!r}: {cells.no_date(f'its type, {array.dtype},', name)}")
    raise InputError(f"{path}: column {name!r} is of type {array.dtype}, not numbers{cells.or_drop(name)}")

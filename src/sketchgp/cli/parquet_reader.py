"""Parquet files, by pyarrow, or by pandas where only that (with fastparquet) is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .cells import Cells, Column, Opened, Read, numbered

_NO_READER = "reading Parquet needs pyarrow: python -m pip install pyarrow (or save the table as CSV or NPZ)"


def open_parquet(path: Path) -> Opened:
    """Names of the columns, the default features (all) and a reader; see ``tables.open_table``."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        return _open_with_pandas(path)
    import pyarrow

    try:
        names = list(parquet.ParquetFile(path).schema_arrow.names)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a Parquet file, or a damaged one ({_first_line(error)})") from error

    def read(wanted: Sequence[str], cells: Cells) -> Read:
        try:
            table = parquet.ParquetFile(path).read(columns=list(wanted))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{path}: not a Parquet file, or a damaged one ({_first_line(error)})") from error
        if table.num_rows == 0:
            raise InputError(f"{path}: the table has no rows")
        return Read([Column(name, _values(path, name, table.column(name), cells)) for name in wanted], numbered)

    return Opened(names, names, read)


def _values(path: Path, name: str, column: Any, cells: Cells) -> np.ndarray:
    """One pyarrow column in float64, NaN where it has no value, or as objects: text, None where it has none."""
    from pyarrow import types

    kind = column.type
    if types.is_null(kind):
        return np.full(len(column), np.nan)
    if types.is_dictionary(kind):
        kind, column = kind.value_type, column.cast(kind.value_type)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind):
        return np.asarray(column.to_numpy(), dtype=np.float64)
    if (types.is_string(kind) or types.is_large_string(kind)) and name not in cells.numbers:
        return np.array(column.to_pylist(), dtype=object)
    raise _not_read(path, name, str(kind), types.is_temporal(kind), cells)


def _open_with_pandas(path: Path) -> Opened:
    try:
        import pandas
    except ImportError:
        raise InputError(f"{path}: {_NO_READER}") from None
    try:
        frame = pandas.read_parquet(path)
    except ImportError:
        raise InputError(f"{path}: {_NO_READER}") from None
    except Exception as error:  # the engines of pandas share no base class for a damaged file
        raise InputError(f"{path}: not a Parquet file, or a damaged one ({_first_line(error)})") from error
    names = [str(name) for name in frame.columns]
    frame.columns = names

    def read(wanted: Sequence[str], cells: Cells) -> Read:
        if len(frame) == 0:
            raise InputError(f"{path}: the table has no rows")
        return Read([Column(name, _values_of_pandas(path, name, frame[name], cells)) for name in wanted], numbered)

    return Opened(names, names, read)


def _values_of_pandas(path: Path, name: str, column: Any, cells: Cells) -> np.ndarray:
    """As :func:`_values`, of a column of pandas."""
    from pandas.api import types

    if bool(column.isna().all()):
        return np.full(len(column), np.nan)
    if types.is_numeric_dtype(column.dtype):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    present = column.dropna()
    if all(isinstance(value, str) for value in present) and name not in cells.numbers:
        return column.astype(object).where(column.notna(), None).to_numpy(dtype=object)
    temporal = types.is_datetime64_any_dtype(column.dtype) or types.is_timedelta64_dtype(column.dtype)
    raise _not_read(path, name, str(column.dtype), temporal, cells)


def _not_read(path: Path, name: str, kind: str, temporal: bool, cells: Cells) -> InputError:
    if temporal:
        return InputError(f"{path}: column {name!r}: {cells.no_date(f'its type, {kind},', name)}")
    return InputError(f"{path}: column {name!r} is of type {kind}, not numbers{cells.or_drop(name)}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

"""Parquet files, by pyarrow, or by pandas where only that (with fastparquet) is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .cells import Cells, Reader

_NO_READER = "reading Parquet needs pyarrow: python -m pip install pyarrow (or save the table as CSV or NPZ)"


def open_parquet(path: Path) -> tuple[list[str], list[str], Reader]:
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

    def read(wanted: Sequence[str], cells: Cells) -> np.ndarray:
        try:
            table = parquet.ParquetFile(path).read(columns=list(wanted))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{path}: not a Parquet file, or a damaged one ({_first_line(error)})") from error
        if table.num_rows == 0:
            raise InputError(f"{path}: the table has no rows")
        return np.stack([_numbers(path, name, table.column(name), cells) for name in wanted], axis=1)

    return names, names, read


def _numbers(path: Path, name: str, column: Any, cells: Cells) -> np.ndarray:
    """One pyarrow column in float64, NaN where it has no value."""
    from pyarrow import types

    kind = column.type
    if types.is_null(kind) and name in cells.may_lack:
        return np.full(len(column), np.nan)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind)):
        raise _not_numbers(path, name, str(kind), cells)
    return np.asarray(column.to_numpy(), dtype=np.float64)


def _open_with_pandas(path: Path) -> tuple[list[str], list[str], Reader]:
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

    def read(wanted: Sequence[str], cells: Cells) -> np.ndarray:
        if len(frame) == 0:
            raise InputError(f"{path}: the table has no rows")
        for name in wanted:
            lacking = name in cells.may_lack and bool(frame[name].isna().all())
            if not lacking and not pandas.api.types.is_numeric_dtype(frame[name]):
                raise _not_numbers(path, name, str(frame[name].dtype), cells)
        return frame[list(wanted)].to_numpy(dtype=np.float64, na_value=np.nan)

    return names, names, read


def _not_numbers(path: Path, name: str, kind: str, cells: Cells) -> InputError:
    return InputError(
        f"{path}: column {name!r} is of type {kind}, not numbers; encode it as numbers{cells.or_drop(name)}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

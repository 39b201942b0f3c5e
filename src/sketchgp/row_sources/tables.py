"""What rows can be read from: arrays of numpy, and tables and datasets of Arrow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import refusal, unmasked
from ..errors import InputError

_NO_ARROW = "reading Parquet needs pyarrow: python -m pip install 'sketchgp[arrow]', or save the rows as an .npy file"
_READING = threading.Lock()  # one thread at a time decodes Parquet


def table_of(data: Any, columns: Sequence[str | int] | None) -> tuple[Array | ArrowTable, np.ndarray | None]:
    """Return a table, and indices of the columns to select of what it reads; None for all.

    :raises InputError: for what is no table of numbers, and columns that it does not have.
    """
    if isinstance(data, str | Path):
        data = _opened(Path(data))
    if is_arrow(data):
        return ArrowTable(data, columns), None
    table = Array(data)
    return table, None if columns is None else _indices(columns, table.shape[1])


def is_arrow(data: Any) -> bool:
    """Return whether this is a table or a dataset of pyarrow."""
    return type(data).__module__.split(".")[0] == "pyarrow" and hasattr(data, "schema")


def _opened(path: Path) -> Any:
    if path.suffix == ".npy":
        try:
            return np.load(path, mmap_mode="r")
        except FileNotFoundError:
            raise InputError(f"{path}: no such file.") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not an .npy file of numbers ({error}).") from error
    try:
        import pyarrow.dataset
    except ImportError:
        raise InputError(f"{path}: {_NO_ARROW}") from None
    try:
        return pyarrow.dataset.dataset(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a dataset that pyarrow can read ({error}).") from error


def check_numbers(dtype: np.dtype[Any], what: str) -> None:
    """Check that numbers are real.

    :raises InputError: otherwise.
    """
    if dtype.kind not in "fiub":
        raise InputError(f"{what} expects real numbers, got {dtype}.")


class Array:
    """An array of numpy, such as a ``numpy.memmap``, or a tensor."""

    def __init__(self, data: Any) -> None:
        data = unmasked("RowSource", "data", data.detach().numpy() if hasattr(data, "detach") else data)
        if not isinstance(data, np.ndarray) or data.ndim != 2:
            raise refusal("RowSource", "data", "a table of shape (n, d) of numpy or pyarrow, or its path", data)
        check_numbers(data.dtype, "RowSource: data")
        self.data, self.dtype, self.shape = data, data.dtype, data.shape

    def take(self, indices: np.ndarray | slice) -> np.ndarray:
        """Rows ``(k, d)`` for a slice, or for indices ``(k,)`` that increase."""
        return np.asarray(self.data[indices])


class ArrowTable:
    """A ``pyarrow.Table`` or ``pyarrow.dataset.Dataset``: a piece of it, such as a row group of Parquet, at a time.

    The last piece is held as it was decoded.  Rows in random order decode every piece they lie in.

    :param columns: names of those to read, in this order; None for all.
    """

    dtype = np.dtype(np.float64)

    def __init__(self, data: Any, columns: Sequence[str | int] | None) -> None:
        self.names = list(data.schema.names if columns is None else columns)
        for name in self.names:
            if name not in data.schema.names:
                raise InputError(f"RowSource: columns expects names among {data.schema.names}, got {name!r}.")
            check_numbers(_dtype_of(data.schema.field(name).type), f"RowSource: column {name!r}")
        self.pieces: list[Callable[[], Any]] = []
        starts = [0]
        for count, load in _pieces(data, self.names):
            self.pieces.append(load)
            starts.append(starts[-1] + count)
        self.starts = np.asarray(starts)
        self.shape = (starts[-1], len(self.names))
        self._last: tuple[int, np.ndarray] | None = None

    def _piece(self, number: int) -> np.ndarray:
        if self._last is None or self._last[0] != number:
            self._last = None  # two of them may not fit
            table = self.pieces[number]()
            out = np.empty((table.num_rows, len(self.names)))
            for column, name in enumerate(self.names):
                out[:, column] = table.column(name).to_numpy()
            self._last = (number, out)
        return self._last[1]

    def take(self, indices: np.ndarray | slice) -> np.ndarray:
        indices = np.arange(indices.start, indices.stop) if isinstance(indices, slice) else indices
        out = np.empty((len(indices), len(self.names)))
        where = np.searchsorted(self.starts, indices, side="right") - 1
        with _READING:
            for number in np.unique(where):
                mine = where == number
                out[mine] = self._piece(int(number))[indices[mine] - self.starts[number]]
        return out


def _pieces(data: Any, names: list[str]) -> list[tuple[int, Callable[[], Any]]]:
    """Rows of each piece, and what reads it."""
    if hasattr(data, "num_rows"):
        table = data.select(names)
        return [(table.num_rows, lambda: table)]
    result: list[tuple[int, Callable[[], Any]]] = []
    for fragment in data.get_fragments():
        grouped = hasattr(fragment, "split_by_row_group")
        for part in fragment.split_by_row_group() if grouped else [fragment]:
            rows = sum(group.num_rows for group in part.row_groups) if grouped else part.count_rows()
            read = partial(part.to_table, schema=data.schema, columns=names, use_threads=False)
            result.append((rows, read))
    return result


def _dtype_of(kind: Any) -> np.dtype[Any]:
    try:
        return np.dtype(kind.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        return np.dtype(object)


def _indices(columns: Sequence[str | int], width: int) -> np.ndarray:
    try:
        result = np.asarray([int(column) for column in columns])
    except (TypeError, ValueError):
        result = np.asarray([-1])
    if not len(result) or result.min() < 0 or result.max() >= width:
        raise InputError(f"RowSource: columns expects indices from 0 to {width - 1}, got {columns!r}.")
    return result

"""Tables from CSV, Parquet and NPZ files; errors name the file, the row and the column."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .cells import Cells, Column, Opened, Reader, is_missing

__all__ = ["Source", "Table", "open_table", "suggest", "table_of"]


@dataclass(frozen=True)
class Table:
    """Columns that were read.

    :param path: the file, for messages.
    :param columns: by name; numbers are finite or, where they may be missing, NaN.
    :param rows: how many.
    :param place: names a row, such as ``line 4``, by its index.
    """

    path: Path
    columns: dict[str, Column]
    rows: int
    place: Callable[[int], str]

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers, ``(rows,)`` in float64."""
        values = self.columns[name].values
        assert values.dtype == np.float64, name
        return values

    def where(self, row: int, name: str) -> str:
        """File, row and column of a cell."""
        return f"{self.path}: {self.place(row)}, column {name!r}:"

    def missing(self, names: Sequence[str]) -> np.ndarray:
        """Whether each row lacks a value in one of some columns, ``(rows,)``."""
        return np.any([self.columns[name].missing() for name in names], axis=0)

    def take(self, keep: np.ndarray) -> Table:
        """Some of the rows."""
        rows = np.flatnonzero(keep)
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return Table(self.path, columns, len(rows), lambda row: self.place(int(rows[row])))


@dataclass(frozen=True)
class Source:
    """A file whose column names are known and whose values are read on demand.

    :param path: the file, for messages.
    :param names: the names of all its columns.
    :param default_features: the columns used as features when the user names none (the target, if among
        them, is left out).
    :param reader: reads the values of some columns.
    :param suspicion: what looks wrong with the names, a sentence; empty where nothing does.
    """

    path: Path
    names: tuple[str, ...]
    default_features: tuple[str, ...]
    reader: Reader
    suspicion: str = ""

    def require(self, wanted: Sequence[str], option: str) -> None:
        """Raises InputError unless every wanted column exists; the message offers the nearest name.

        :param wanted: column names.
        :param option: where they came from, such as ``--target``, for the message.
        """
        for name in wanted:
            if name not in self.names:
                also = f"; {self.suspicion}" if self.suspicion else ""
                raise InputError(
                    f"{self.path}: {option}: no column {name!r}{suggest(name, self.names)}; the columns are "
                    f"{_listed(self.names)}{also}"
                )

    def read(self, names: Sequence[str], cells: Cells | None = None) -> Table:
        """Reads the named columns, which must exist, and checks that every value is there and finite.

        :param cells: what else may stand in them.
        """
        cells = cells or Cells()
        read = self.reader(names, cells)
        return _checked(self.path, read.columns, read.place, cells)


def table_of(columns: Mapping[str, Any], names: Sequence[str], expected: Cells) -> Table:
    """A table of columns that are in memory: arrays, lists or tensors by name, or a data frame.

    Messages count its rows from 0, as Python does; those of files, whose rows have no index, are counted from 1.

    :raises InputError: a column is not there, is of another length, or holds what it should not.
    """
    found: list[Column] = []
    for name in names:
        if name not in columns:
            raise InputError(f"columns: no column {name!r}{suggest(name, [str(one) for one in columns])}")
        values = np.asarray(columns[name])
        if values.ndim != 1 or len(values) != len(found[0].values if found else values):
            rows = f" ({len(found[0].values)} rows)" if found else ""
            raise InputError(f"columns: column {name!r}: expected one value a row{rows}, got shape {values.shape}")
        if values.dtype.kind in "fiub":
            found.append(Column(name, values.astype(np.float64)))
            continue
        cells = [None if value is None or value != value else value for value in values.tolist()]
        if all(isinstance(cell, int | float | None) for cell in cells):
            found.append(Column(name, np.array(cells, dtype=np.float64)))  # NaN for None
        elif values.dtype.kind in "OU" and all(isinstance(cell, str | None) for cell in cells):
            found.append(Column(name, np.array(cells, dtype=object)))
        else:
            raise InputError(f"columns: column {name!r}: expected numbers or text, got {values.dtype}")
    return _checked(Path("columns"), found, lambda row: f"row {row}", expected)


def _checked(path: Path, columns: Sequence[Column], place: Callable[[int], str], cells: Cells) -> Table:
    settled = {column.name: _settled(column, cells) for column in columns}
    table = Table(path, settled, len(columns[0].values), place)
    for name, column in settled.items():
        lacking = column.missing()
        if column.is_text and name in cells.numbers:
            row = int(np.flatnonzero(~lacking)[0])
            raise InputError(f"{table.where(row, name)} {column.values[row]!r} is text, not a number")
        if not column.is_text and not np.isfinite(column.values[~lacking]).all():
            row = int(np.flatnonzero(np.isinf(column.values))[0])
            raise InputError(
                f"{table.where(row, name)} {column.values[row]} is not finite; remove the row or write a number"
            )
        if lacking.any() and name not in cells.may_lack:
            row = int(np.flatnonzero(lacking)[0])
            raise InputError(f"{table.where(row, name)} {cells.lacking('the value is missing', name)}")
    return table


def _settled(column: Column, cells: Cells) -> Column:
    """Text without blanks around it, None where it is missing; numbers as text where text is wanted."""
    forced = column.name in cells.text
    if column.is_text:
        stripped = [None if cell is None else cell.strip() for cell in column.values]
        lacks = (lambda cell: not cell) if forced else is_missing
        values = [None if cell is None or lacks(cell) else cell for cell in stripped]
        if not forced and all(value is None for value in values):
            return Column(column.name, np.full(len(values), np.nan))
    elif forced:
        values = [None if value != value else _written(value) for value in column.values.tolist()]
    else:
        return column
    return Column(column.name, np.array(values, dtype=object))


def _written(value: float) -> str:
    """A number as a table has it: 1, and not 1.0."""
    return str(int(value)) if value.is_integer() else repr(value)


def suggest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest of the names, or nothing when none is near."""
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1)
    return f" (did you mean {lowered[near[0]]!r}?)" if near else ""


def _listed(names: Sequence[str], most: int = 30) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"


def open_table(path: str | Path, encoding: str | None = None, header: bool = True, comma: bool = False) -> Source:
    """Opens a table by its extension: ``.csv``, ``.tsv``, ``.txt``, ``.parquet``, ``.pq`` or ``.npz``.

    - CSV: a header row, separated by commas, semicolons or tabs (whichever the header has most of).
    - Parquet: needs pyarrow, or pandas with fastparquet.
    - NPZ: either arrays ``X`` ``(n, d)`` (columns ``x0``, ``x1``, ... or the names in a text array
      ``features``) and one-dimensional arrays of length n beside it, or one one-dimensional array per column.
      Never unpickles.

    :param encoding: of a CSV file; None is UTF-8, or UTF-16 where the file begins with its mark.
    :param header: whether the first line of a CSV file has the names of the columns.
    :param comma: whether decimals in a CSV file have a comma.
    :raises InputError: the file is missing, empty, damaged, of another kind, or names a column twice.
    """
    from . import csv_reader, npz_reader, parquet_reader

    path = Path(path)
    texts = (".csv", ".tsv", ".txt")
    openers = {
        **dict.fromkeys(texts, lambda path: csv_reader.open_csv(path, encoding, header, comma)),
        ".parquet": parquet_reader.open_parquet,
        ".pq": parquet_reader.open_parquet,
        ".npz": npz_reader.open_npz,
    }
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not a file")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    kind = path.suffix.lower()
    if kind not in openers:
        sheet = "; save the sheet as CSV" if kind in (".xls", ".xlsx", ".ods") else ""
        raise InputError(
            f"{path}: unknown extension {path.suffix!r}; the known ones are {', '.join(sorted(openers))}{sheet}"
        )
    given_options = {"--encoding": encoding is not None, "--no-header": not header, "--decimal-comma": comma}
    for option, given in given_options.items():
        if given and kind not in texts:
            raise InputError(f"{option} is for text files ({', '.join(texts)}), not for {path}")
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        opened: Opened = openers[kind](path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    seen: set[str] = set()
    for name in opened.names:
        if name in seen:
            also = f"; {opened.suspicion}" if opened.suspicion else ""
            raise InputError(f"{path}: the column name {name!r} occurs more than once{also}")
        seen.add(name)
    return Source(path, tuple(opened.names), tuple(opened.default_features), opened.reader, opened.suspicion)

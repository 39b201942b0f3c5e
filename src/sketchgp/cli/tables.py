"""Tables of numbers from CSV, Parquet and NPZ files; errors name the file, the row and the column."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InputError
from .cells import Cells, Reader

__all__ = ["Source", "Table", "open_table", "suggest"]


@dataclass(frozen=True)
class Table:
    """Numbers by column: ``values`` is ``(rows, len(names))`` in float64, all finite but where they may be missing."""

    names: tuple[str, ...]
    values: np.ndarray

    def columns(self, names: Sequence[str]) -> np.ndarray:
        """The named columns, ``(rows, len(names))``."""
        return self.values[:, [self.names.index(name) for name in names]]


@dataclass(frozen=True)
class Source:
    """A file whose column names are known and whose values are read on demand.

    :param path: the file, for messages.
    :param names: the names of all its columns.
    :param default_features: the columns used as features when the user names none (the target, if among
        them, is left out).
    :param reader: reads the values of some columns.
    """

    path: Path
    names: tuple[str, ...]
    default_features: tuple[str, ...]
    reader: Reader

    def require(self, wanted: Sequence[str], option: str) -> None:
        """Raises InputError unless every wanted column exists; the message offers the nearest name.

        :param wanted: column names.
        :param option: where they came from, such as ``--target``, for the message.
        """
        for name in wanted:
            if name not in self.names:
                raise InputError(
                    f"{self.path}: {option}: no column {name!r}{suggest(name, self.names)}; the columns are "
                    f"{_listed(self.names)}"
                )

    def read(self, names: Sequence[str], cells: Cells | None = None) -> Table:
        """Reads the named columns, which must exist, and checks that every value is a finite number.

        :param cells: what else may stand in them.
        """
        cells = cells or Cells()
        values = self.reader(names, cells)
        right = np.isfinite(values) | (np.isnan(values) & np.isin(names, cells.may_lack))
        if not right.all():
            row, column = np.argwhere(~right)[0]
            raise InputError(
                f"{self.path}: row {row + 1}, column {names[column]!r}: missing or not finite "
                f"({values[row, column]}); remove the row or fill the value in"
            )
        return Table(tuple(names), values)


def suggest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest of the names, or nothing when none is near."""
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1)
    return f" (did you mean {lowered[near[0]]!r}?)" if near else ""


def _listed(names: Sequence[str], most: int = 30) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"


def open_table(path: str | Path) -> Source:
    """Opens a table by its extension: ``.csv``, ``.tsv``, ``.txt``, ``.parquet``, ``.pq`` or ``.npz``.

    - CSV: a header row, separated by commas, semicolons or tabs (whichever the header has most of).
    - Parquet: needs pyarrow, or pandas with fastparquet.
    - NPZ: either arrays ``X`` ``(n, d)`` (columns ``x0``, ``x1``, ... or the names in a text array
      ``features``) and one-dimensional arrays of length n beside it, or one one-dimensional array per column.
      Never unpickles.

    :raises InputError: the file is missing, empty, damaged, of another kind, or names a column twice.
    """
    from . import csv_reader, npz_reader, parquet_reader

    path = Path(path)
    openers = {
        ".csv": csv_reader.open_csv,
        ".tsv": csv_reader.open_csv,
        ".txt": csv_reader.open_csv,
        ".parquet": parquet_reader.open_parquet,
        ".pq": parquet_reader.open_parquet,
        ".npz": npz_reader.open_npz,
    }
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not a file")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    opener = openers.get(path.suffix.lower())
    if opener is None:
        raise InputError(f"{path}: unknown extension {path.suffix!r}; the known ones are {', '.join(sorted(openers))}")
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        names, default_features, reader = opener(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"{path}: the column name {name!r} occurs more than once")
        seen.add(name)
    return Source(path, tuple(names), tuple(default_features), reader)

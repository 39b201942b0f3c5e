"""CSV files: numpy's reader when all is well, the csv module to pass over text and to find a fault."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import InputError
from .cells import Cells, Reader

_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-", "."}
_ROWS_AT_ONCE = 50_000


def open_csv(path: Path) -> tuple[list[str], list[str], Reader]:
    """Names of the columns, the default features (those with a name) and a reader: see ``open_table``."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = file.readline()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    if not first.strip():
        raise InputError(f"{path}: line 1: expected a header row with the column names, found an empty line")
    delimiter = max(",;\t", key=first.count)
    with open(path, newline="", encoding="utf-8-sig") as file:
        names = [name.strip() for name in _header(path, file, delimiter)]
    default_features = [name for name in names if name]  # a column without a name is most often a row number
    names = [name or f"unnamed_{position + 1}" for position, name in enumerate(names)]

    def read(wanted: Sequence[str], cells: Cells) -> np.ndarray:
        positions = [names.index(name) for name in wanted]
        values = _fast(path, delimiter, names, positions)
        return _careful(path, delimiter, names, positions, cells) if values is None else values

    return names, default_features, read


def _header(path: Path, file, delimiter: str) -> list[str]:
    try:
        return next(csv.reader(file, delimiter=delimiter, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: line 1: {error}") from error


def _fast(path: Path, delimiter: str, names: Sequence[str], positions: Sequence[int]) -> np.ndarray | None:
    """The wanted columns by numpy's C reader; None if anything at all is not a finite number."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines_of_header = _lines_of_header(file, delimiter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a file without rows: reported by _careful
            values = np.loadtxt(
                path,
                delimiter=delimiter,
                skiprows=lines_of_header,
                comments=None,
                quotechar='"',
                ndmin=2,
                encoding="utf-8-sig",
            )
    except (ValueError, UnicodeDecodeError):
        return None
    if values.shape[0] == 0 or values.shape[1] != len(names):
        return None
    values = values[:, positions]
    return values if np.isfinite(values).all() else None


def _lines_of_header(file, delimiter: str) -> int:
    reader = csv.reader(file, delimiter=delimiter)
    next(reader)
    return reader.line_num


def _careful(path: Path, delimiter: str, names: Sequence[str], positions: Sequence[int], expected: Cells) -> np.ndarray:
    """The wanted columns row by row; raises InputError at the first fault, naming its line and column."""
    chunks: list[np.ndarray] = []
    rows: list[list[float]] = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            next(reader)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise InputError(
                        f"{path}: line {reader.line_num}: {len(cells)} cells under {len(names)} column names"
                    )
                try:
                    rows.append([_value(cells[position], names[position], expected) for position in positions])
                except ValueError:
                    first = not rows and not chunks
                    raise _fault(path, reader.line_num, cells, names, positions, first, expected) from None
                if len(rows) == _ROWS_AT_ONCE:
                    chunks.append(np.array(rows, dtype=np.float64))
                    rows = []
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from error
    if rows:
        chunks.append(np.array(rows, dtype=np.float64))
    if not chunks:
        raise InputError(f"{path}: no rows below the header")
    return np.concatenate(chunks)


def _parse(text: str) -> float:
    value = float(text)
    if "_" in text or value - value != 0.0:  # float() takes 1_000, nan and inf; a table should hold none of them
        raise ValueError(text)
    return value


def _value(cell: str, name: str, expected: Cells) -> float:
    return math.nan if name in expected.may_lack and _is_missing(cell) else _parse(cell)


def _number(text: str) -> float | None:
    try:
        return _parse(text)
    except ValueError:
        return None


def _is_missing(cell: str) -> bool:
    """Whether a cell is empty, or holds one of the usual marks of a missing value."""
    return cell.strip().lower() in _MISSING


def _is_text(cell: str) -> bool:
    """Whether a cell holds text: neither a number nor a missing value."""
    if _is_missing(cell):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return "_" in cell


def _fault(
    path: Path,
    line: int,
    cells: Sequence[str],
    names: Sequence[str],
    positions: Sequence[int],
    first: bool,
    expected: Cells,
) -> InputError:
    """What is wrong with the first bad cell of a row."""
    positions = [p for p in positions if not (names[p] in expected.may_lack and _is_missing(cells[p]))]
    bad = next(position for position in positions if _number(cells[position]) is None)
    cell, name = cells[bad].strip(), names[bad]
    where = f"{path}: line {line}, column {name!r}:"
    if not _is_text(cell):
        what = "the cell is empty" if not cell else f"{cell!r} is missing or not finite"
        drop = ", or leave the column out with --drop" if expected.drop else ""
        return InputError(f"{where} {what}; remove the row or fill the value in{drop}")
    texts = [names[position] for position in positions if _is_text(cells[position])]
    if first:  # text in the first row means columns of text, so name them all at once
        several = f" (text too: {', '.join(texts[1:])})" if len(texts) > 1 else ""
        comma = "; write decimals with a point" if _number(cell.replace(",", ".", 1)) is not None else ""
        drop = f", or leave them out with --drop {','.join(texts)}" if expected.drop else ""
        return InputError(
            f"{where} {cell!r} is text, not a number{several}{comma}; encode such columns as numbers{drop}"
        )
    return InputError(f"{where} {cell!r} is not a number")

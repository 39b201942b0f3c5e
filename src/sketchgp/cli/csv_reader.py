"""CSV files: numpy's reader when all is numbers, the csv module for text, missing values and to find a fault."""

from __future__ import annotations

import csv
import math
import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import InputError
from .cells import Cells, Column, Opened, Read, is_date, is_missing, numbered

_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # at the beginning of a file; UTF-8's is optional
_GUESSED = 4096  # bytes that are looked at


@dataclass(frozen=True)
class _File:
    """A CSV file: how its bytes become lines, its lines cells, and its cells numbers."""

    path: Path
    encoding: str
    delimiter: str
    header: bool
    comma: bool  # decimals have a comma

    def open(self) -> IO[str]:
        return open(self.path, newline="", encoding=self.encoding)

    def number(self, cell: str) -> float | None:
        """The finite number that a cell is, if it is one."""
        if self.comma:
            cell = cell.replace(".", "_").replace(",", ".")  # a point is no part of a number then
        return _number(cell)

    def undecoded(self, error: UnicodeError) -> InputError:
        """The error for bytes that are not of the encoding."""
        at = f" at byte {error.start}" if isinstance(error, UnicodeDecodeError) else ""
        reason = getattr(error, "reason", error)
        if self.encoding != "utf-8-sig":
            return InputError(f"{self.path}: not a text file in {self.encoding} ({reason}{at})")
        return InputError(
            f"{self.path}: not a text file in UTF-8 ({reason}{at}); save it as UTF-8, or name its encoding: "
            "--encoding cp1252 (Western European Windows), latin-1, ..."
        )


def open_csv(path: Path, encoding: str | None = None, header: bool = True, comma: bool = False) -> Opened:
    """Names of the columns, those with a name as default features, and a reader: see ``tables.open_table``.

    :param encoding: of the text; None is UTF-8, or UTF-16 where the file begins with its mark.
    :param header: whether the first line has the names of the columns; they are c1, c2, ... where it has not.
    :param comma: whether decimals have a comma.
    """
    file = _File(path, encoding or _encoding(path), ",", header, comma)
    try:
        with file.open() as lines:
            first = lines.readline()
    except LookupError as error:
        raise InputError(
            f"--encoding {encoding}: not an encoding of text that Python knows; utf-8, utf-16, latin-1, cp1252 are some"
        ) from error
    except UnicodeError as error:
        raise file.undecoded(error) from error
    if not first.strip():
        raise InputError(f"{path}: line 1: expected a header row with the column names, found an empty line")
    others = comma and (";" in first or "\t" in first)  # then commas are those of decimals
    file = _File(path, file.encoding, max(";\t" if others else ",;\t", key=first.count), header, comma)
    with file.open() as lines:
        cells = [name.strip().lstrip("\ufeff") for name in _first_row(file, lines)]  # "utf-8" keeps the mark
    if not header:
        cells = [f"c{position + 1}" for position in range(len(cells))]
    default_features = [name for name in cells if name]  # a column without a name is most often a row number
    names = [name or f"unnamed_{position + 1}" for position, name in enumerate(cells)]

    def read(wanted: Sequence[str], expected: Cells) -> Read:
        positions = [names.index(name) for name in wanted]
        values = None if comma or set(wanted) & set(expected.text) else _fast(file, names, positions)
        if values is None:
            return _careful(file, names, positions, expected)
        return Read([Column(name, column) for name, column in zip(wanted, values.T, strict=True)], numbered)

    return Opened(names, default_features, read, _suspicion(file, default_features) if header else "")


def _encoding(path: Path) -> str:
    with open(path, "rb") as file:
        begin = file.read(_GUESSED)
    found = _MARKS.get(begin[:2])
    if found is None and b"\0" in begin:
        which = "utf-16-be" if begin[:1] == b"\0" else "utf-16-le"
        raise InputError(f"{path}: not text in UTF-8: it holds zero bytes; if it is UTF-16, say --encoding {which}")
    return found or "utf-8-sig"


def _suspicion(file: _File, names: Sequence[str]) -> str:
    """Whether the names look like data."""
    suspects, what = list(names), "are all numbers"
    if any(file.number(name) is None for name in names):  # with columns of text; 2019 is a name, 2.019 is none
        suspects = [name for name in names if ("," if file.comma else ".") in name and file.number(name) is not None]
        what = "have numbers with decimals among them"
    if not suspects:
        return ""
    shown = ", ".join(suspects[:4]) + (", ..." if len(suspects) > 4 else "")
    return (
        f"the names of the columns, in line 1, {what} ({shown}): if this is data and the file has no line of "
        "names, use --no-header, which names the columns c1, c2, ..."
    )


def _first_row(file: _File, lines: IO[str]) -> list[str]:
    try:
        return next(csv.reader(lines, delimiter=file.delimiter, strict=True))
    except UnicodeError as error:
        raise file.undecoded(error) from error
    except csv.Error as error:
        raise InputError(f"{file.path}: line 1: {error}") from error


def _fast(file: _File, names: Sequence[str], positions: Sequence[int]) -> np.ndarray | None:
    """The wanted columns by numpy's C reader; None if anything at all is not a finite number."""
    try:
        with file.open() as lines:
            lines_of_header = _lines_of_header(file, lines) if file.header else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a file without rows: reported by _careful
            values = np.loadtxt(
                file.path,
                delimiter=file.delimiter,
                skiprows=lines_of_header,
                comments=None,
                quotechar='"',
                ndmin=2,
                encoding=file.encoding,
            )
    except (ValueError, UnicodeError):
        return None
    if values.shape[0] == 0 or values.shape[1] != len(names):
        return None
    values = values[:, positions]
    return values if np.isfinite(values).all() else None


def _lines_of_header(file: _File, lines: IO[str]) -> int:
    reader = csv.reader(lines, delimiter=file.delimiter)
    next(reader)
    return reader.line_num


class _Cells:
    """The cells of one column, numbers or text: what the first that is not missing is, unless it is known."""

    def __init__(self, file: _File, name: str, expected: Cells):
        self.file = file
        self.name = name
        self.expected = expected
        self.forced = name in expected.text
        self.text: bool | None = True if self.forced else False if name in expected.numbers else None
        self.may_lack = name in expected.may_lack
        self.numbers = array("d")
        self.texts: list[str | None] = []
        self.known: dict[str, str] = {}  # one object for each text

    def add(self, cell: str) -> None:
        """:raises ValueError: the cell is not as it should be; :meth:`fault` says why."""
        if not self.text:
            value = self.file.number(cell)
            if value is not None:
                self.text = False
                self.numbers.append(value)
                return
        cell = cell.strip()
        if self.lacks(cell):
            if not self.may_lack:
                raise ValueError(cell)
            if self.text:
                self.texts.append(None)
            else:
                self.numbers.append(math.nan)
            return
        if self.text is None and not _is_text(cell):
            raise ValueError(cell)
        if self.text is None:
            self.texts = [None] * len(self.numbers)
            self.text = True
        elif not self.text:
            raise ValueError(cell)
        self.texts.append(self.known.setdefault(cell, cell))

    def lacks(self, cell: str) -> bool:
        return not cell if self.forced else is_missing(cell)

    def column(self) -> Column:
        if self.text:
            return Column(self.name, np.array(self.texts, dtype=object))
        return Column(self.name, np.array(self.numbers, dtype=np.float64))

    def fault(self, where: str, cell: str) -> InputError:
        """What is wrong with a cell that could not be added."""
        name, expected, cell = self.name, self.expected, cell.strip()
        where = f"{where}, column {name!r}:"
        if self.lacks(cell):
            return InputError(
                f"{where} {expected.lacking(f'{cell!r} is missing' if cell else 'the cell is empty', name)}"
            )
        if cell.lower().lstrip("+-") in ("inf", "infinity"):
            return InputError(f"{where} {cell!r} is not finite; remove the row or write a number")
        if _number(cell.replace(",", "")) is not None:
            mark, other = ("comma", "") if self.file.comma else ("point", " (or say --decimal-comma)")
            return InputError(
                f"{where} {cell!r} is text, not a number; write decimals with a {mark}{other}, and thousands without a "
                "mark"
            )
        if is_date(cell):
            return InputError(f"{where} {expected.no_date(repr(cell), name)}")
        if self.text is None:
            return InputError(f"{where} {cell!r} is not a number{expected.or_drop(name)}")
        if name in expected.numbers:
            return InputError(f"{where} {cell!r} is text, not a number; only numbers are expected in this column")
        options = f", read the column as categories with --categorical {name}" if expected.options else ""
        return InputError(
            f"{where} {cell!r} is not a number, as those above it are; mend it{options}{expected.or_drop(name)}"
        )


def _careful(file: _File, names: Sequence[str], positions: Sequence[int], expected: Cells) -> Read:
    """The wanted columns row by row; raises InputError at the first fault, naming its line and column."""
    path = file.path
    columns = [_Cells(file, names[position], expected) for position in positions]
    pairs = list(zip(positions, columns, strict=True))
    line_of = array("q")
    try:
        with file.open() as lines:
            reader = csv.reader(lines, delimiter=file.delimiter, strict=True)
            if file.header:
                next(reader)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    header = "column names" if file.header else "columns"
                    raise InputError(f"{path}: line {reader.line_num}: {len(cells)} cells under {len(names)} {header}")
                for position, column in pairs:
                    try:
                        column.add(cells[position])
                    except ValueError:
                        raise column.fault(f"{path}: line {reader.line_num}", cells[position]) from None
                line_of.append(reader.line_num)
    except UnicodeError as error:
        raise file.undecoded(error) from error
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from error
    if not line_of:
        raise InputError(f"{path}: no rows below the header")
    return Read([column.column() for column in columns], lambda row: f"line {line_of[row]}")


def _number(text: str) -> float | None:
    """The finite number that a text is; float() takes 1_000, nan and inf, too, and a table should hold none of them."""
    try:
        value = float(text)
    except ValueError:
        return None
    return None if "_" in text or value - value != 0.0 else value


def _is_text(cell: str) -> bool:
    """Whether a cell holds what can be a category: no number in any writing, nor a date."""
    try:
        float(cell.replace(",", ""))
    except ValueError:
        return not is_date(cell)
    return False

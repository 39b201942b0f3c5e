"""Decide what the columns of a table are: numbers or text.  What could be either is an error, never a guess."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import InputError

__all__ = ["MARKS", "Rules", "Table", "decide", "refuse", "some"]

MARKS = ("NA", "N/A", "#N/A", "#NA", "<NA>", "NaN", "-NaN", "NaT", "null", "None", "?", "-", ".")
_KINDS = ("number", "infinite", "missing", "date", "almost", "text", "other")
_WHOLE = 2**53  # float64 tells all whole numbers below this one apart
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = (
    r"\d{4}-\d\d|\d{4}(?P<a>[-/.])\d\d?(?P=a)\d\d?|\d\d?(?P<b>[-/.])\d\d?(?P=b)(\d{4}|\d\d)|\d{4}-?W\d\d(-?\d)?"
    rf"|\d\d?[ -]{_MONTH}\.?[ -]\d{{2,4}}|{_MONTH}\.? (\d\d?,? )?\d{{4}}|\d{{8}}T\d{{4,6}}.*"
)
_TIME = r"\d\d?:\d\d(:\d\d([.,]\d+)?)?|\d\d?(:\d\d){0,2} ?[ap]\.?m\.?"
_DATE = re.compile(rf"({_DAY})([T ]+\d\d?:\d\d.*)?|{_TIME}", re.IGNORECASE)
_COMPACT = re.compile(r"(1[89]|2[01])\d\d(0[1-9]|1[0-2])((0[1-9]|[12]\d|3[01])(\d{4}|\d{6})?)?")  # 20240131, 202401
# A number with other marks between its digits, or with the sign of a limit, of a currency, of a share or of a note.
_ALMOST = re.compile(r"[<>≤≥~≈±(]*\s*[$€£¥]?\s*[-+−]?\s*[$€£¥]?\s*\.?\d[\d.,'’\s_]*(e[-+]?\d+)?\s*[%‰°$€£¥)*+†]*", re.I)
_UNIT = re.compile(r"[-+]?\d[\d.,]*\s*([^\d\s.,].*)")
_POINTS = re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+")  # decimals, or groups of thousands
_NO_DATES = "put a number in its place: days since the first one, the month, the hour; what matters only you know"


@dataclass(frozen=True)
class Rules:
    """What the columns of a table have to hold, and how their text is read.

    :param numbers: columns of numbers, and :param text: of text, each with the texts that are values of it even where
        they are marks; what other columns hold is decided by their values.
    :param names: columns that are read as they are written.
    :param may_lack: columns in which values may be missing.
    :param marks: texts that stand for a missing value, in any case; an empty cell always does.
    :param decimal: mark of decimals; None is a point, unless it could as well be a mark of thousands.
    :param thousands: mark between groups of three digits; empty where there is none.
    :param caller: ``fit``, ``predict`` or ``python``, for the advice in messages.
    """

    numbers: Collection[str] = ()
    text: Mapping[str, Collection[str]] = field(default_factory=dict)
    names: Collection[str] = ()
    may_lack: Collection[str] = ()
    marks: tuple[str, ...] = MARKS
    decimal: str | None = None
    thousands: str = ""
    caller: str = "fit"

    @cached_property
    def _marks(self) -> set[str]:
        return {"", *(mark.strip().lower() for mark in self.marks)}

    @cached_property
    def missing_numbers(self) -> set[float]:
        """Numbers among the marks, such as -999."""
        return {value for value in map(self.number, self.marks) if value is not None}

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Pattern of numbers, where more than decimals with a point are numbers."""
        if not self.thousands and self.decimal != ",":
            return None
        digits = r"\d+" if not self.thousands else rf"(\d{{1,3}}({re.escape(self.thousands)}\d{{3}})+|\d+)"
        mark = "," if self.decimal == "," else r"\."
        return re.compile(rf"[-+]?({digits}({mark}\d*)?|{mark}\d+)([eE][-+]?\d+)?")

    def lacks(self, cell: str) -> bool:
        """Return whether a cell without blanks around it stands for a missing value."""
        return cell.lower() in self._marks

    def number(self, cell: str) -> float | None:
        """Return the number that a cell is, perhaps an infinite one, or None."""
        if self._pattern is not None:
            cell = re.sub("[\u00a0\u202f]", " ", cell)
            if not self._pattern.fullmatch(cell):
                return None
            cell = (cell.replace(self.thousands, "") if self.thousands else cell).replace(",", ".")
        try:
            value = float(cell)
        except ValueError:
            return None
        return value if value == value and "_" not in cell and cell.isascii() else None

    def advice(self, name: str, *parts: str) -> str:
        """Return an advice, with the options of ``fit`` among its parts that settle what the column is."""
        meaning = {"numeric": "numbers", "categorical": "categories", "id": "names of rows", "drop": "leave it out"}
        settled = self.caller != "fit" or name in self.numbers
        named = [f"--{one} {shlex.quote(name)} ({meaning[one]})" for one in parts if one in meaning and not settled]
        return ", or ".join(
            [*(one for one in parts if one not in meaning), *([f"say {', '.join(named)}"] * bool(named))]
        )


@dataclass(frozen=True)
class Table:
    """Columns of which it is decided what they are.

    :param path: the file, for messages.
    :param columns: by name: float64, NaN where missing; or objects: text, None where missing.
    :param rows: number of rows.
    :param place: names a row, such as ``line 4``, by its index.
    :param marks: the marks of missing values that occurred.
    """

    path: Path
    columns: dict[str, np.ndarray]
    rows: int
    place: Callable[[int], str]
    marks: tuple[str, ...] = ()

    def lacking(self, names: Sequence[str]) -> np.ndarray:
        """Return which rows lack a value in one of some columns, ``(rows,)`` boolean."""
        columns = [self.columns[name] for name in names]
        return np.any([[v is None for v in c] if c.dtype == object else np.isnan(c) for c in columns], axis=0)

    def take(self, keep: np.ndarray) -> Table:
        """Return the rows where ``keep`` is True."""
        rows = np.flatnonzero(keep)
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Table(self.path, columns, len(rows), lambda row: self.place(int(rows[row])), self.marks)


def refuse(path: Path, faults: Sequence[str]) -> InputError:
    """Return the error with all faults of a file: one in a line with it, several in lines of their own."""
    return InputError(
        "\n  ".join([f"{path}: {len(faults)} faults", *faults] if faults[1:] else [f"{path}: {faults[0]}"])
    )


def some(values: Iterable[Any], most: int = 8) -> str:
    """Return the first of some values, quoted."""
    shown = [repr(value) for value in values]
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def decide(path: Path, raw: Mapping[str, Any], rules: Rules, place: Callable[[int], str], separator: str = "") -> Table:
    """Return the table of some columns, each as numbers or as text.

    :param raw: columns of one length by name: arrays, lists, tensors or columns of pandas.
    :param place: names a row by its index.
    :param separator: of a text file, in which numbers are text, too; empty for all others.
    :raises InputError: columns hold what they should not, or could be read in two ways; the message names them all.
    """
    columns = [_Column(name, values, rules, place, separator) for name, values in raw.items()]
    lengths = {one.name: len(one.cells) for one in columns}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{path}: expected one value a row in every column, got columns of lengths {lengths}")
    marks = sorted({mark for column in columns for mark in column.kinds["missing"] if mark})
    certain = rules.decimal is not None or any(map(_Column.has_decimals, columns))
    faults = [fault for column in columns for fault in column.faults(marks, certain)]
    if faults:
        raise refuse(path, faults)
    return Table(path, {one.name: one.values() for one in columns}, len(columns[0].cells), place, tuple(marks))


class _Column:
    """A column, and its distinct values by their kinds.

    :ivar cells: float64; or a list of numbers, of text without blanks around it, and of None.
    :ivar kinds: by ``number``, ``infinite``, ``missing``, ``date``, ``almost`` (a number in a notation that is not
        read), ``text`` and ``other``.
    """

    def __init__(self, name: str, values: Any, rules: Rules, place: Callable[[int], str], separator: str) -> None:
        self.name, self.rules, self.place, self.separator = name, rules, place, separator
        self.is_text = self.whole = False
        self.numbers: dict[Any, float] = {}
        self.kinds: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
        self.cells: Any = None
        if separator and name not in rules.text and name not in rules.names:
            self.cells = _plain(values.tolist(), rules)
            if self.cells is not None:
                return
        categories = str(getattr(values, "dtype", "")) == "category"  # of pandas
        array = _array(name, values)
        self.whole = array.dtype.kind in "iu"
        self.is_text = name in rules.text or name in rules.names or (categories and name not in rules.numbers)
        numbers = name in rules.numbers
        if (array.dtype.kind in "iuf" or (array.dtype.kind == "b" and numbers)) and not self.is_text:
            self.cells = array.astype(np.float64)
            self.cells[np.isin(self.cells, list(rules.missing_numbers))] = np.nan
            self.kinds["infinite"] = np.unique(self.cells[np.isinf(self.cells)]).tolist()
            self.kinds["missing"] = [None] if np.isnan(self.cells).any() else []
            return
        dates = array.dtype.kind in "mM"
        self.cells = [
            str(cell) if isinstance(cell, bool | np.bool_) and not numbers else _value(cell)
            for cell in (array.astype(str) if dates else array).tolist()
        ]
        for cell in dict.fromkeys(self.cells):
            self.kinds["date" if dates else self._kind(cell)].append(cell)

    def _kind(self, cell: Any) -> str:
        rules = self.rules
        if cell is None or cell == "":
            return "missing"
        if not isinstance(cell, str | int | float | Decimal | np.integer | np.floating | np.bool_):
            return "other" if isinstance(cell, type) else "date"
        if self.name in rules.names or cell in rules.text.get(self.name, ()):
            return "text"
        value = rules.number(cell) if isinstance(cell, str) else float(cell)
        if rules.lacks(cell) if isinstance(cell, str) else value in rules.missing_numbers:
            return "missing"
        if self.is_text:
            return "text"
        if value is not None:
            self.numbers[cell] = value
            return "infinite" if np.isinf(value) else "number"
        return "date" if _DATE.fullmatch(str(cell)) else "almost" if _ALMOST.fullmatch(str(cell)) else "text"

    def has_decimals(self) -> bool:
        """Return whether the points of a text file can only be those of decimals."""
        if isinstance(self.cells, np.ndarray):
            return bool((self.cells != np.floor(self.cells)).any())
        return any("." in cell and not _POINTS.fullmatch(cell) for cell in self.written)

    @property
    def written(self) -> list[str]:
        """Numbers as they are written in a text file."""
        return self.kinds["number"] if self.separator else []

    def values(self) -> np.ndarray:
        """Return the column as a :class:`Table` holds it."""
        if isinstance(self.cells, np.ndarray):
            return self.cells
        if self.kinds["text"]:
            texts = {cell: _text(cell) for cell in self.kinds["text"]}
            return np.array([texts.get(cell) for cell in self.cells], dtype=object)
        return np.array([self.numbers.get(cell, np.nan) for cell in self.cells], dtype=np.float64)

    def where(self, cells: Sequence[Any], most: int = 4) -> str:
        """Return some of the values, each with its first row and the number of the others."""
        parts, column = [], [None if one != one else one for one in self.cells]
        for cell in cells[:most]:
            rows = [row for row, one in enumerate(column) if one == cell]
            more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
            parts.append(f"{'no value' if cell in (None, '') else repr(cell)} in {self.place(rows[0])}{more}")
        return ", ".join(parts) + (f", ... ({len(cells):,} different ones)" if len(cells) > most else "")

    def faults(self, marks: list[str], certain: bool) -> list[str]:
        """Return what is wrong with the column, a sentence each.

        :param marks: of missing values, in all columns; :param certain: whether points are those of decimals.
        """
        rules, name, kinds, found = self.rules, self.name, self.kinds, []
        strange = [*kinds["text"], *kinds["almost"]]
        if kinds["other"]:
            types = ", ".join(sorted({cell.__name__ for cell in kinds["other"]}))
            found.append(f"holds values of type {types}; {rules.advice(name, 'give numbers or text', 'drop')}")
        if kinds["infinite"]:
            found.append(f"holds {self.where(kinds['infinite'])}: not finite; remove the row or write a number")
        if kinds["date"]:
            advice = rules.advice(name, _NO_DATES, "categorical", "drop")
            found.append(f"holds {self.where(kinds['date'])}: a date or a time; {advice}")
        elif not self.is_text and (kinds["almost"] or (kinds["text"] and (kinds["number"] or name in rules.numbers))):
            rows = sum(cell in self.numbers for cell in self.cells)
            where = f"numbers in {rows:,} row(s) and {self.where(strange)}" if rows else self.where(strange)
            advice = rules.advice(name, *self._remedies(marks), "categorical", "drop")
            found.append(f"holds {where}, where plain numbers are expected; {advice}")
        elif not self.is_text and name not in rules.numbers:
            found += self._doubts()
        pointed = [cell for cell in self.written if "." in cell]
        if pointed and not certain and (self.separator != "," or len(pointed) < len(self.written)):
            found.append(f"holds {self.where(pointed)}: decimals or thousands? Say --decimal . or --thousands .")
        if kinds["missing"] and name not in rules.may_lack:
            how = "missing='drop' or missing='mean'" if rules.caller == "python" else "--missing drop or --missing mean"
            value = [f"name the marks with --missing-marks, where {kinds['missing'][0]!r} is none"]
            value = value if any(kinds["missing"]) and rules.caller != "python" else []
            advice = rules.advice(name, "remove the row", f"fill the value in, or say {how}", *value, "drop")
            found.append(f"lacks a value: {self.where(kinds['missing'])}; {advice}")
        return [f"column {name!r} {fault}" for fault in found]

    def _remedies(self, marks: list[str]) -> list[str]:
        """Return what can be done about texts among numbers."""
        text, almost = self.kinds["text"], self.kinds["almost"]
        parts = ["write plain numbers"]
        if self.separator and any(re.fullmatch(r"[-+]?\d[\d.,'’\s]*", cell) for cell in almost):
            parts.append("say how they are written with --decimal , or --thousands MARK")
        if self.rules.caller != "python" and text and not almost and len(text) <= 4:
            parts.append(f"say --missing-marks {shlex.quote(','.join([*marks, *text]))} (missing values)")
        if (
            self.separator
            and self.numbers
            and [*text, *almost] == [self.cells[0]]
            and self.cells.count(self.cells[0]) == 1
        ):
            parts.append(f"say --skip-lines {self.place(0)[5:]} (a line of units)")
        return parts

    def _doubts(self) -> list[str]:
        """Return why a column of numbers, or one of text, could be something else."""
        advice, cells, text = self.rules.advice, self.kinds["number"], self.kinds["text"]
        if text:
            units = {match and match[1] for match in map(_UNIT.fullmatch, map(str, text))}
            if len(text) == 1 or len(units) > 1 or None in units:
                return []
            remedy = advice(self.name, "write plain numbers", "categorical", "drop")
            return [f"holds {self.where(text)}: numbers with a unit; {remedy}"]
        values = (
            [*self.numbers.values()] if isinstance(self.cells, list) else self.cells[~np.isnan(self.cells)].tolist()
        )
        whole = [cell for cell in cells if isinstance(cell, int) or str(cell).lstrip("+-").isdigit()]
        large = [cell for cell in whole if abs(self.numbers[cell]) >= _WHOLE]
        large = [value for value in values if abs(value) >= _WHOLE] if self.whole else large
        padded = [cell for cell in self.written if re.match(r"[-+]?0\d", cell)]
        if padded:
            why = f"holds numbers with leading zeros, {self.where(padded)}"
        elif large:
            why = f"holds {self.where(large)}: whole numbers of so many digits lose the last ones"
        elif values and all(_COMPACT.fullmatch(f"{value:.15g}") for value in values):
            why = f"holds {self.where([*dict.fromkeys(cells or values)])}: a date; {_NO_DATES}"
        elif not self.separator and any(isinstance(cell, str) for cell in cells):
            why = f"holds numbers as text, {self.where(cells)}"
        else:
            return []
        return [f"{why}; {advice(self.name, 'numeric', 'categorical', 'id', 'drop')}"]


def _plain(cells: list[str], rules: Rules) -> np.ndarray | None:
    """Return the numbers that cells of a text file are where a look at all of them together leaves no doubt."""
    text = "\n".join(["", *cells])
    if not text.isascii() or text.encode().translate(None, b"\n0123456789.eE+-") or re.search(r"\n[-+]?0\d", text):
        return None
    try:
        values = np.array([*map(float, cells)])
    except ValueError:
        return None
    if rules.decimal == "," or rules.thousands or np.isin(values, [*rules.missing_numbers]).any():
        return None
    if not np.abs(values).max() < _WHOLE or all(_COMPACT.fullmatch(f"{value:.15g}") for value in values.tolist()):
        return None
    decimals = "." not in text or any("." in cell and not _POINTS.fullmatch(cell) for cell in cells)
    return values if decimals or rules.decimal is not None else None


def _array(name: str, values: Any) -> np.ndarray:
    """Return a column as an array of numbers, of dates, or of objects."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    if isinstance(values, np.ma.MaskedArray):
        values = np.ma.filled(values.astype(object), None)
    try:
        array = np.asarray(values)
    except ValueError:  # of nested lists
        array = np.empty((0, 0))
    if array.ndim != 1:
        raise InputError(f"column {name!r}: expected one value a row, got shape {array.shape}")
    return array if array.dtype.kind in "iufbmM" else array.astype(object)


def _value(cell: Any) -> Any:
    """Return a cell without blanks around it, None where it has no value, and its type where it can be no value."""
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(cell, int | float | Decimal | np.integer | np.floating | np.bool_):
        return None if cell != cell else cell
    return cell if isinstance(cell, datetime.date | datetime.time | datetime.timedelta) else type(cell)


def _text(cell: Any) -> str:
    """Return a number as a table has it: 1, and not 1.0."""
    if isinstance(cell, str):
        return cell
    return str(int(cell)) if float(cell).is_integer() else repr(float(cell))

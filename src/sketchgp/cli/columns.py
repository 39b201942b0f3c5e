"""Decide whether columns hold numbers or text; a column that could be either is an error, never a guess."""

from __future__ import annotations

import importlib
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import InputError

__all__ = ["MARKS", "Rules", "Table", "decide", "refuse", "some"]

MARKS = ("NA", "N/A", "#N/A", "#NA", "<NA>", "NaN", "-NaN", "NaT", "null", "None", "?", "-", ".")
_LARGEST = 2**53  # float64 distinguishes all whole numbers below this one
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = (
    r"\d{4}-\d\d|\d{4}(?P<a>[-/.])\d\d?(?P=a)\d\d?|\d\d?(?P<b>[-/.])\d\d?(?P=b)(\d{4}|\d\d)|\d{4}-?W\d\d(-?\d)?"
    rf"|\d\d?[ -]{_MONTH}\.?[ -]\d{{2,4}}|{_MONTH}\.? (\d\d?,? )?\d{{4}}|\d{{8}}T\d{{4,6}}.*"
)
_TIME = r"\d\d?:\d\d(:\d\d([.,]\d+)?)?|\d\d?(:\d\d){0,2} ?[ap]\.?m\.?"
_DATE = re.compile(rf"({_DAY})([T ]+\d\d?:\d\d.*)?|{_TIME}", re.IGNORECASE)
_COMPACT = re.compile(r"(1[89]|2[01])\d\d(0[1-9]|1[0-2])((0[1-9]|[12]\d|3[01])(\d{4}|\d{6})?)?")  # 20240131, 202401
# A number with other marks between its digits, or with a unit or the sign of a limit, a currency, a share or a note.
_SIGNS, _UNITS = r"[<>≤≥~≈±(]*\s*[$€£¥]?\s*[-+−]?\s*[$€£¥]?", r"([%‰°$€£¥)*+†]*|[a-zµ²³/]+)"
_ALMOST = re.compile(rf"{_SIGNS}\s*\.?\d[\d.,'’\s_]*(e[-+]?\d+)?\s*{_UNITS}", re.IGNORECASE)
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+")  # decimals, or groups of thousands
_NO_DATES = "a date or a time; put a number in its place, such as the days since the first one"
_OPTIONS = {"numeric": "numbers", "categorical": "categories", "drop": "leave it out"}


@dataclass(frozen=True)
class Rules:
    """Contents that the columns of a table must have, and the notation of their text.

    :param numbers: columns of numbers, and :param text: of text, each with the texts that are values of it even where
        they are marks; other columns are decided by their values.
    :param may_lack: columns in which values may be missing.
    :param marks: texts that stand for a missing value, in any case; an empty cell always does.
    :param decimal: mark of decimals; None is a point, unless it could as well be a mark of thousands.
    :param fitting: whether the options of ``fit`` are advice in messages.
    """

    numbers: Collection[str] = ()
    text: Mapping[str, Collection[str]] = field(default_factory=dict)
    may_lack: Collection[str] = ()
    marks: tuple[str, ...] = MARKS
    decimal: str | None = None
    fitting: bool = True

    @cached_property
    def folded_marks(self) -> set[str]:
        return {mark.strip().lower() for mark in self.marks}

    @cached_property
    def missing_numbers(self) -> set[float]:
        """Numbers among the marks, such as -999."""
        return {value for value in map(self.number, self.marks) if value is not None}

    def number(self, cell: str) -> float | None:
        """Return the number that a cell is, perhaps an infinite one, or None."""
        if self.decimal == ",":
            cell = cell.replace(".", "?").replace(",", ".")  # a point is no mark of decimals then
        try:
            value = float(cell)
        except ValueError:
            return None
        return value if value == value and "_" not in cell and cell.isascii() else None

    def remedy(self, name: str, *first: str, numeric: bool = True) -> str:
        """Return what to do about a column: some advice, and the options of ``fit`` that say what the column is."""
        parts = list(first)
        if self.fitting and name not in self.numbers:
            options = [option for option in _OPTIONS if numeric or option != "numeric"]
            parts += [f"--{option} {shlex.quote(name)} ({_OPTIONS[option]})" for option in options]
        return ", or ".join(parts)


@dataclass(frozen=True)
class Table:
    """Columns of numbers and of text.

    :param path: the file, for messages.
    :param columns: by name: float64, NaN where missing; or objects: text, None where missing.
    :param marks: the marks of missing values that occurred.
    :param numbers: number of each row in messages, ``(rows,)``.
    """

    path: Path
    columns: dict[str, np.ndarray]
    numbers: np.ndarray
    marks: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def lacking(self, names: Sequence[str]) -> np.ndarray:
        """Return which rows lack a value in one of some columns, ``(rows,)`` boolean."""
        columns = [self.columns[name] for name in names]
        return np.any([[v is None for v in c] if c.dtype == object else np.isnan(c) for c in columns], axis=0)

    def take(self, keep: np.ndarray) -> Table:
        """Return the rows where ``keep`` is True."""
        columns = {name: values[keep] for name, values in self.columns.items()}
        return Table(self.path, columns, self.numbers[keep], self.marks)


def refuse(path: Path, faults: Sequence[str]) -> InputError:
    """Return the error with all faults of a file: one in a line with it, several in lines of their own."""
    return InputError(
        "\n  ".join([f"{path}: {len(faults)} faults", *faults] if faults[1:] else [f"{path}: {faults[0]}"])
    )


def some(values: Iterable[Any], most: int = 8) -> str:
    """Return the first of some values, quoted."""
    shown = [repr(value) for value in values]
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def decide(path: Path, raw: Mapping[str, Any], rules: Rules, first: int, separator: str = "") -> Table:
    """Return the table of some columns, each as numbers or as text.

    :param raw: columns of one length by name: arrays, lists, tensors or columns of pandas.
    :param first: number of the first row in messages.
    :param separator: of a text file, in which numbers are text, too; empty for all others.
    :raises InputError: columns hold what they should not, or could be read in two ways; the message names them all.
    """
    columns = [_Column(name, values, rules, first, separator) for name, values in raw.items()]
    lengths = {one.name: len(one.cells) for one in columns}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{path}: expected one value a row in every column, got columns of lengths {lengths}")
    marks = sorted({mark for column in columns for mark in column.kinds["missing"] if mark})
    written = [cell for column in columns for cell in column.written]
    decimals = rules.decimal is not None or any("." in cell and not _THOUSANDS.fullmatch(cell) for cell in written)
    faults = [f"column {one.name!r} {fault}" for one in columns for fault in one.faults(marks, decimals)]
    if faults:
        raise refuse(path, faults)
    numbers = np.arange(first, first + len(columns[0].cells))
    return Table(path, {one.name: one.values() for one in columns}, numbers, tuple(marks))


class _Column:
    """A column, and its distinct values by their kinds.

    :ivar cells: float64; or a list of numbers, of text without blanks around it, and of None.
    :ivar kinds: ``number``, ``infinite``, ``missing``, ``date``, ``almost`` (a number in a notation that is not read),
        ``text`` and ``other``.
    """

    def __init__(self, name: str, values: Any, rules: Rules, first: int, separator: str) -> None:
        self.name, self.rules, self.first, self.separator = name, rules, first, separator
        self.numbers: dict[Any, float] = {}
        self.kinds = defaultdict[str, list[Any]](list)
        self.cells: Any
        series, numeric = _series(name, values), name in rules.numbers
        dtype = series.dtype
        self.integers = dtype.kind in "iu"
        self.is_text = name in rules.text or (dtype.name == "category" and not numeric)
        if (dtype.kind in "iuf" or (dtype.kind == "b" and numeric)) and not self.is_text:
            self.cells = series.to_numpy(np.float64, na_value=np.nan).copy()
            self.cells[np.isin(self.cells, list(rules.missing_numbers))] = np.nan
            self.kinds["infinite"] = np.unique(self.cells[np.isinf(self.cells)]).tolist()
            self.kinds["missing"] = [None] if np.isnan(self.cells).any() else []
            return
        cells, missing = series.astype(object).tolist(), series.isna()
        self.cells = [None if lacks else _value(cell, numeric) for cell, lacks in zip(cells, missing, strict=True)]
        for cell in dict.fromkeys(self.cells):
            self.kinds[self._kind(cell)].append(cell)

    def _kind(self, cell: Any) -> str:
        rules = self.rules
        if cell is None or cell == "":
            return "missing"
        if isinstance(cell, date | time | timedelta):
            return "date"
        if isinstance(cell, type):
            return "other"
        if cell in rules.text.get(self.name, ()):
            return "text"
        value = rules.number(cell) if isinstance(cell, str) else float(cell)
        if cell.lower() in rules.folded_marks if isinstance(cell, str) else value in rules.missing_numbers:
            return "missing"
        if self.is_text:
            return "text"
        if value is not None:
            self.numbers[cell] = value
            return "infinite" if np.isinf(value) else "number"
        return "date" if _DATE.fullmatch(str(cell)) else "almost" if _ALMOST.fullmatch(str(cell)) else "text"

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
            rows, at = column.count(cell), column.index(cell)
            more = f" and {rows - 1:,} more" if rows > 1 else ""
            parts.append(f"{'no value' if cell in (None, '') else repr(cell)} in row {self.first + at}{more}")
        return ", ".join(parts) + (f", ... ({len(cells):,} different ones)" if len(cells) > most else "")

    def faults(self, marks: list[str], decimals: bool) -> list[str]:
        """Return what is wrong with the column, a sentence each.

        :param marks: of missing values, in all columns; :param decimals: whether points are those of decimals.
        """
        rules, name, kinds, faults = self.rules, self.name, self.kinds, []
        odd = [*kinds["text"], *kinds["almost"]]
        if kinds["other"]:
            types = ", ".join(sorted({cell.__name__ for cell in kinds["other"]}))
            faults.append(f"holds values of type {types}; {rules.remedy(name, 'give numbers or text', numeric=False)}")
        if kinds["infinite"]:
            faults.append(f"holds {self.where(kinds['infinite'])}: not finite; remove the row or write a number")
        if kinds["date"]:
            faults.append(f"holds {self.where(kinds['date'])}: {rules.remedy(name, _NO_DATES, numeric=False)}")
        elif not self.is_text and (kinds["almost"] or (kinds["text"] and (kinds["number"] or name in rules.numbers))):
            rows = sum(cell in self.numbers for cell in self.cells)
            where = f"numbers in {rows:,} row(s) and {self.where(odd)}" if rows else self.where(odd)
            advice = ["write plain numbers"]
            if self.separator and kinds["almost"]:
                advice.append("say --decimal , where decimals have a comma")
            if rules.fitting and len(odd) <= 4 and not kinds["almost"]:
                advice.append(f"say --missing-marks {shlex.quote(','.join([*marks, *odd]))} (missing values)")
            remedy = rules.remedy(name, *advice, numeric=False)
            faults.append(f"holds {where}, where plain numbers are expected; {remedy}")
        elif not self.is_text and name not in rules.numbers and (doubt := self._doubt()):
            faults.append(f"holds {doubt}; {rules.remedy(name, 'write it in another way')}")
        pointed = [cell for cell in self.written if "." in cell]
        if pointed and not decimals and (self.separator != "," or len(pointed) < len(self.written)):
            faults.append(
                f"holds {self.where(pointed)}: decimals or thousands? Say --decimal ., or leave marks of thousands out"
            )
        if kinds["missing"] and name not in rules.may_lack:
            faults.append(
                f"lacks a value: {self.where(kinds['missing'])}; fill it in, remove the row, or set the option missing "
                f"to drop or mean{' (--missing drop), or name the marks with --missing-marks' * rules.fitting}"
            )
        return faults

    def _doubt(self) -> str:
        """Return why a column of numbers could be something else; empty where it could not."""
        cells = self.kinds["number"]
        if self.kinds["text"]:
            return ""
        if isinstance(self.cells, np.ndarray):
            values = [*dict.fromkeys(self.cells[~np.isnan(self.cells)].tolist())]
            large = [value for value in values if abs(value) >= _LARGEST] if self.integers else []
        else:
            values = list(self.numbers.values())
            digits = [cell for cell in cells if isinstance(cell, int) or str(cell).lstrip("+-").isdigit()]
            large = [cell for cell in digits if abs(self.numbers[cell]) >= _LARGEST]
        if padded := [cell for cell in self.written if re.match(r"[-+]?0\d", cell)]:
            return f"numbers with leading zeros, {self.where(padded)}"
        if large:
            return f"{self.where(large)}: whole numbers of so many digits lose the last ones"
        if values and all(_COMPACT.fullmatch(f"{value:.15g}") for value in values):
            return f"{self.where(cells or values)}: {_NO_DATES}"
        if not self.separator and any(isinstance(cell, str) for cell in cells):
            return f"numbers as text, {self.where(cells)}"
        return ""


def _series(name: str, values: Any) -> Any:
    """Return a column as a Series of pandas."""
    pandas = imported(f"column {name!r}", "pandas")
    if isinstance(values, Tensor):
        values = (values.cpu().double() if values.is_floating_point() else values.cpu()).detach().numpy()
    try:
        return pandas.Series(values)
    except ValueError as error:
        raise InputError(f"column {name!r}: expected one value a row ({error})") from error


def imported(what: Any, module: str) -> Any:
    """Return a module that reads something."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{what}: {error.name or module} reads it: python -m pip install 'sketchgp[cli]'") from error


def _value(cell: Any, numeric: bool) -> Any:
    """Return a cell without blanks around it, a truth value as text, and its type where it can be no value."""
    if isinstance(cell, str):
        return cell.strip()
    if isinstance(cell, bool | np.bool_) and not numeric:
        return str(cell)
    known = int | float | Decimal | np.integer | np.floating | np.bool_ | date | time | timedelta
    return cell if isinstance(cell, known) else type(cell)


def _text(cell: Any) -> str:
    """Return a number as a table has it: 1, and not 1.0."""
    if isinstance(cell, str):
        return cell
    return str(int(cell)) if float(cell).is_integer() else repr(float(cell))

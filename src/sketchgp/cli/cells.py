"""What the readers of tables are told of the cells that they read, what they give back, and how a cell is judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Cells", "Column", "Opened", "Read", "Reader", "is_date", "is_missing"]

_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-", "."}
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = (
    r"\d{4}-\d\d|\d{4}(?P<a>[-/.])\d\d?(?P=a)\d\d?|\d\d?(?P<b>[-/.])\d\d?(?P=b)\d{2,4}"
    rf"|\d\d?[ -]{_MONTH}\.?[ -]\d{{2,4}}|{_MONTH}\.? \d\d?,? \d{{4}}"
)
_DATE = re.compile(rf"({_DAY})([T ]+\d\d?:\d\d.*)?|\d\d?:\d\d(:\d\d(\.\d+)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Column:
    """One column as it was read: float64, NaN where missing, or an object array of text, None where missing."""

    name: str
    values: np.ndarray

    @property
    def is_text(self) -> bool:
        return self.values.dtype == object

    def missing(self) -> np.ndarray:
        """Whether each row lacks its value, ``(rows,)``."""
        return np.array([v is None for v in self.values]) if self.is_text else np.isnan(self.values)

    def take(self, rows: np.ndarray) -> Column:
        """The column in some of its rows."""
        return Column(self.name, self.values[rows])


@dataclass(frozen=True)
class Cells:
    """What is expected of the cells that are read.

    A column that none of these speaks of may hold numbers or text, and no dates.

    :param may_lack: columns in which a value may be missing (an empty cell, say).
    :param numbers: columns in which text is a fault.
    :param text: columns that are text whatever is in them; only an empty cell of theirs is missing.
    :param missing: how the command can do with missing values, the end of an advice.
    :param options: whether the command has the options ``--drop`` and ``--categorical``, for messages.
    """

    may_lack: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    missing: str = ""
    options: bool = True

    def or_drop(self, name: str) -> str:
        """The end of an advice."""
        return f", or leave it out with --drop {name}" if self.options and name not in self.numbers else ""

    def no_date(self, what: str, name: str) -> str:
        """What to do about a date or a time, after a place."""
        return (
            f"{what} is a date or a time, which is not read; put a number in its place (days since the first one, the "
            f"month, the hour){self.or_drop(name)}"
        )

    def lacking(self, what: str, name: str) -> str:
        """What to do about a missing value, after a place."""
        return f"{what}; remove the row or fill the value in{self.missing}{self.or_drop(name)}"


@dataclass(frozen=True)
class Read:
    """Columns as a reader gives them.

    :param columns: all of one length.
    :param place: names a row, such as ``line 4``, by its index.
    """

    columns: list[Column]
    place: Callable[[int], str]


# Takes the names of the wanted columns.
Reader = Callable[[Sequence[str], Cells], Read]


@dataclass(frozen=True)
class Opened:
    """A table whose values are not read yet.

    :param names: of all columns.
    :param default_features: those used as features where the user names none.
    :param reader: reads the values of some.
    :param suspicion: what looks wrong with the names, a sentence; empty where nothing does.
    """

    names: list[str]
    default_features: list[str]
    reader: Reader
    suspicion: str = ""


def is_missing(cell: str) -> bool:
    """Whether a cell is empty, or holds one of the usual marks of a missing value."""
    return cell.strip().lower() in _MISSING


def is_date(cell: str) -> bool:
    """Whether a cell that is no number holds a date or a time of day."""
    return _DATE.fullmatch(cell.strip()) is not None


def numbered(row: int) -> str:
    """The place of a row in a file without lines."""
    return f"row {row + 1}"

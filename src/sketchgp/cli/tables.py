"""Tables from CSV and Parquet files, which pandas reads, and from columns in memory."""

from __future__ import annotations

import base64
import csv
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError
from .columns import Rules, Table, decide, imported, some

__all__ = ["Source", "Text", "in_memory", "open_table"]

_TEXTS = (".csv", ".tsv", ".txt")
_FAULTS = (ValueError, LookupError, NotImplementedError, csv.Error)
_SNIFFED = 50  # lines that are looked at to find the separator


@dataclass(frozen=True)
class Text:
    """Options for reading a text file.

    :param encoding: None is UTF-8.
    :param separator: between cells; None is the one that fits the first lines.
    :param skip: number of lines before the table, such as a title.
    :param header: whether the first line has the names of the columns; they are c1, c2, ... where it has not.
    :param comma: whether decimals have a comma, which then separates cells only where nothing else does.
    """

    encoding: str | None = None
    separator: str | None = None
    skip: int = 0
    header: bool = True
    comma: bool = False


@dataclass(frozen=True)
class Source:
    """A file whose columns are read, and not yet decided.

    :param path: the file, for messages.
    :param columns: the values of each column by name.
    :param default_features: the columns used as features when the user names none (the target, if among them, is
        left out).
    :param separator: of a text file, empty for all others.
    """

    path: Path
    columns: Mapping[str, Any]
    default_features: tuple[str, ...]
    separator: str = ""

    def suspicion(self, rules: Rules) -> str:
        """Return a sentence on names that look like data, empty where they do not."""
        numbers = [name for name in self.default_features if self.separator and rules.number(name) is not None]
        if len(numbers) < len(self.default_features):  # 2019 is a name, and 2.019 is none
            numbers = [name for name in numbers if (rules.decimal or ".") in name]
        return "" if not numbers else (
            f"numbers among the names of the columns ({some(numbers, 4)}): if this is data and the file has no line of "
            "names, use --no-header, which names the columns c1, c2, ...")  # fmt: skip

    def require(self, wanted: Sequence[str], option: str, rules: Rules) -> None:
        """Raise InputError unless every wanted column exists; the message offers the nearest name.

        :param option: where the names came from, such as ``--target``, for the message.
        """
        absent = [f"no column {name!r}{_suggest(name, self.columns)}" for name in wanted if name not in self.columns]
        if absent:
            also = f"; {doubt}" if (doubt := self.suspicion(rules)) else ""
            names = [*self.columns]
            raise InputError(
                f"{self.path}: {option}: {', '.join(absent)}; the columns are {', '.join(names[:30])}"
                f"{', ...' if len(names) > 30 else ''}{also}"
            )

    def read(self, names: Sequence[str], rules: Rules) -> Table:
        """Return the named columns, which must exist.

        :raises InputError: with all faults of these columns.
        """
        if not len(self.columns[names[0]]):
            raise InputError(f"{self.path}: the table has no rows")
        return decide(self.path, {name: self.columns[name] for name in names}, rules, 1, self.separator)


def in_memory(columns: Mapping[str, Any], names: Sequence[str], rules: Rules) -> Table:
    """Return the table of columns in memory: arrays, lists or tensors by name, or a data frame.

    Messages count its rows from 0, as Python does; rows of files have no index, and are counted from 1.

    :raises InputError: a column is not there, is of another length, or holds what it should not.
    """
    source = Source(Path("columns"), columns, ())
    source.require(names, "columns", rules)
    return decide(source.path, {name: columns[name] for name in names}, rules, 0)


def _suggest(name: str, names: Any) -> str:
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1)
    return f" (did you mean {lowered[near[0]]!r}?)" if near else ""


def require_file(path: Path) -> None:
    """Raise InputError unless a path is a file or a stream."""
    if path.is_dir() or not path.exists():
        raise InputError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")


def open_table(path: str | Path, text: Text | None = None) -> Source:
    """Open a table by its extension: ``.csv``, ``.tsv``, ``.txt``, ``.parquet`` or ``.pq``.

    :param text: how a text file is read.
    :raises InputError: the file is missing, empty, damaged, of another kind, or names a column twice, or what reads it
        is not installed.
    """
    path, text = Path(path), text or Text()
    kind = path.suffix.lower()
    openers = {**dict.fromkeys(_TEXTS, _open_text), ".parquet": _open_parquet, ".pq": _open_parquet}
    require_file(path)
    if kind not in openers:
        known = ", ".join(openers)
        raise InputError(f"{path}: unknown extension {path.suffix!r}; the known ones are {known}; save a sheet as CSV")
    if kind not in _TEXTS and text != Text():
        raise InputError(
            f"{path}: an option is for text files only: --encoding, --separator, --skip-lines, --no-header"
        )
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        return openers[kind](path, text)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except _FAULTS as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{path}: cannot be read ({line}){_remedy(error, kind, text)}") from error


def _remedy(error: BaseException, kind: str, text: Text) -> str:
    """Return how to mend a file that cannot be read."""
    if kind not in _TEXTS:
        return f"; damaged, or not a {kind} file"
    if isinstance(error, LookupError):
        return f"; --encoding {text.encoding}: not an encoding that Python knows; utf-8, utf-16, latin-1 are some"
    if isinstance(error, UnicodeError):
        return f" as {text.encoding or 'utf-8'}; save it as UTF-8, or name its encoding, such as --encoding cp1252"
    return "; mend the lines, or leave out a title before the table with --skip-lines"


def _open_text(path: Path, text: Text) -> Source:
    """Return the columns of a text file, as text; pandas reads it, and refuses lines with too many cells."""
    pandas = imported(path, "pandas")
    encoding = text.encoding or "utf-8-sig"
    with open(path, newline="", encoding=encoding) as file:
        separator = text.separator or _separator(path, [*islice(file, text.skip, text.skip + _SNIFFED)], text.comma)
    frame = pandas.read_csv(
        path, sep=separator, encoding=encoding, header=None, skiprows=text.skip, dtype=str, keep_default_na=False
    )
    names = [str(name).strip().lstrip("\ufeff") for name in frame.iloc[0]]
    if not text.header:
        names = [f"c{position + 1}" for position in range(len(names))]
    features = tuple(name for name in names if name)  # a column without a name is most often a row number
    names = [name or f"unnamed_{position + 1}" for position, name in enumerate(names)]
    frame = frame.iloc[int(text.header) :].fillna("")
    return _source(path, [(name, frame.iloc[:, at]) for at, name in enumerate(names)], features, separator)


def _source(path: Path, columns: list[tuple[str, Any]], features: tuple[str, ...], separator: str = "") -> Source:
    """Return the source of these columns; raise InputError where two have one name."""
    names = [name for name, _ in columns]
    source = Source(path, dict(columns), features, separator)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        also = f"; {doubt}" if (doubt := source.suspicion(Rules())) else ""
        raise InputError(f"{path}: column names that occur more than once: {some(twice)}{also}")
    return source


def _separator(path: Path, lines: list[str], comma: bool) -> str:
    """Return the separator by which the first records have the same number of cells, more than one."""
    widths = {mark: [len(cells) for cells in csv.reader(lines, delimiter=mark) if cells] for mark in ",;\t|"}
    fits = [mark for mark, counts in widths.items() if counts and counts[0] > 1]
    even = [mark for mark in fits if len(set(widths[mark])) == 1]
    best = even or fits
    if len(best) > 1 and comma and "," in best:
        best.remove(",")
    if len(best) > 1:
        raise InputError(f"{path}: cells could be separated by {some(best)}; say which with --separator")
    return best[0] if best else ","


def _open_parquet(path: Path, text: Text) -> Source:
    imported(path, "pandas")
    parquet, arrow = imported(path, "pyarrow.parquet"), imported(path, "pyarrow")
    file = parquet.ParquetFile(path)
    frame = file.read().to_pandas(ignore_metadata=True, integer_object_nulls=True)
    # pyarrow forgets that whole numbers were categories, but for the schema that it was given
    stored = (file.metadata.metadata or {}).get(b"ARROW:schema")
    schema = arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(stored))) if stored else file.schema_arrow
    categories = {field.name: "category" for field in schema if arrow.types.is_dictionary(field.type)}
    frame = frame.astype(categories)
    # pandas' numbers of rows are no column
    names = tuple(name for name in frame.columns if not re.fullmatch(r"__index_level_\d+__", name))
    return _source(path, [(name, column) for name, column in frame.items() if name in names], names)

"""Tables from CSV and Parquet files, which pandas reads, from NPZ archives, and from columns in memory."""

from __future__ import annotations

import base64
import csv
import difflib
import importlib
import re
import statistics
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .columns import Rules, Table, decide, some

__all__ = ["Source", "Text", "in_memory", "open_table"]

_TEXTS = (".csv", ".tsv", ".txt")
_SEPARATORS = ",;\t|"
_SKIP = "mend the lines, or leave out those that are no part of the table, such as --skip-lines 1-3"
_SNIFFED = 50  # records that are looked at to find the separator


@dataclass(frozen=True)
class Text:
    """How a text file is read.

    :param encoding: None is UTF-8, or UTF-16 where the file begins with its mark.
    :param separator: between cells; None is the one that fits the first lines.
    :param skip: numbers of lines, from 1, that are no part of the table.
    :param header: whether the first line has the names of the columns; they are c1, c2, ... where it has not.
    :param comma: whether decimals have a comma, which then separates cells only where nothing else does.
    """

    encoding: str | None = None
    separator: str | None = None
    skip: Collection[int] = ()
    header: bool = True
    comma: bool = False


@dataclass(frozen=True)
class Source:
    """A file whose column names are known and whose values are read on demand.

    :param path: the file, for messages.
    :param names: the names of all its columns.
    :param default_features: the columns used as features when the user names none (the target, if among them, is
        left out).
    :param load: returns the values of some columns by name.
    :param place: names a row by its index.
    :param separator: of a text file, empty for all others.
    """

    path: Path
    names: tuple[str, ...]
    default_features: tuple[str, ...]
    load: Callable[[Sequence[str]], Mapping[str, Any]]
    place: Callable[[int], str] = lambda row: f"row {row + 1}"
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
        absent = [f"no column {name!r}{_suggest(name, self.names)}" for name in wanted if name not in self.names]
        if absent:
            also = f"; {doubt}" if (doubt := self.suspicion(rules)) else ""
            raise InputError(
                f"{self.path}: {option}: {', '.join(absent)}; the columns are {', '.join(self.names[:30])}"
                f"{', ...' if len(self.names) > 30 else ''}{also}"
            )

    def read(self, names: Sequence[str], rules: Rules) -> Table:
        """Return the named columns, which must exist.

        :raises InputError: with all faults of these columns.
        """
        raw = self.load(names)
        if not len(raw[names[0]]):
            raise InputError(f"{self.path}: the table has no rows")
        return decide(self.path, {name: raw[name] for name in names}, rules, self.place, self.separator)


def in_memory(columns: Mapping[str, Any], names: Sequence[str], rules: Rules) -> Table:
    """Return the table of columns in memory: arrays, lists or tensors by name, or a data frame.

    Messages count its rows from 0, as Python does; rows of files have no index, and are counted from 1.

    :raises InputError: a column is not there, is of another length, or holds what it should not.
    """
    absent = [name for name in names if name not in columns]
    if absent:
        hint = _suggest(absent[0], [str(one) for one in columns])
        raise InputError(f"columns: no column {', '.join(map(repr, absent))}{hint}")
    return decide(Path("columns"), {name: columns[name] for name in names}, rules, lambda row: f"row {row}")


def _suggest(name: str, names: Sequence[str]) -> str:
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1)
    return f" (did you mean {lowered[near[0]]!r}?)" if near else ""


def open_table(path: str | Path, text: Text | None = None) -> Source:
    """Open a table by its extension: ``.csv``, ``.tsv``, ``.txt``, ``.parquet``, ``.pq`` or ``.npz``.

    An NPZ archive has either arrays ``X`` ``(n, d)`` (columns ``x0``, ``x1``, ... or the names in a text array
    ``features``) and one-dimensional arrays of length n beside it, or one one-dimensional array per column.

    :param text: how a text file is read.
    :raises InputError: the file is missing, empty, damaged, of another kind, or names a column twice, or what reads it
        is not installed.
    """
    path, text = Path(path), text or Text()
    kind = path.suffix.lower()
    openers = {**dict.fromkeys(_TEXTS, _TextFile(path, text).open), ".npz": _open_npz}
    openers.update(dict.fromkeys((".parquet", ".pq"), _open_parquet))
    if path.is_dir() or not path.exists():
        raise InputError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
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
        source: Source = openers[kind](path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    twice = sorted({name for name in source.names if source.names.count(name) > 1})
    if twice:
        also = f"; {doubt}" if (doubt := source.suspicion(Rules())) else ""
        raise InputError(f"{path}: column names that occur more than once: {', '.join(map(repr, twice))}{also}")
    return source


def _imported(path: Path, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{path}: {error.name or module} reads it: python -m pip install 'sketchgp[cli]' (.npz needs neither)"
        ) from error


@dataclass(frozen=True)
class _TextFile:
    """A text file with a record of cells in each line; :ivar text: how it is read, all of it known in the end."""

    path: Path
    text: Text

    def open(self, path: Path) -> Source:
        """Return its columns; their values are read by pandas."""
        pandas = _imported(path, "pandas")
        file = replace(self, text=replace(self.text, encoding=self.text.encoding or _encoding(path)))
        with file.errors():
            file = replace(file, text=replace(file.text, separator=self.text.separator or file.separator()))
            line, first = next(file.records(), (1, []))
            if len({len(cells) for _, cells in islice(file.records(), _SNIFFED) if cells}) > 1:
                file.widths()  # the names may be none
        names = [name.strip().lstrip("\ufeff") for name in first]  # Python's utf-8 keeps the mark at the beginning
        if not any(names):
            raise InputError(f"{path}: line {line}: expected the names of the columns, found an empty line; {_SKIP}")
        if not file.text.header:
            names = [f"c{position + 1}" for position in range(len(names))]
        features = tuple(name for name in names if name)  # a column without a name is most often a row number
        names = [name or f"unnamed_{position + 1}" for position, name in enumerate(names)]

        def load(wanted: Sequence[str]) -> dict[str, Any]:
            with file.errors():
                frame = file.frame(pandas)
            return {name: frame.iloc[:, names.index(name)] for name in wanted}

        return Source(path, tuple(names), features, load, file.place, file.text.separator or ",")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of Python and pandas as InputErrors that name the file."""
        try:
            yield
        except InputError:
            raise
        except LookupError as error:
            known = "utf-8, utf-16, latin-1, cp1252 are some"
            what = f"--encoding {self.text.encoding}: not an encoding that Python knows; {known}"
            raise InputError(f"{self.path}: {what}") from error
        except (ValueError, csv.Error) as error:  # those of decoders, and pandas' own
            remedy = "; save it as UTF-8, or name its encoding: --encoding cp1252, latin-1, utf-16-le, ..."
            remedy = f" as {self.text.encoding}{remedy}" if isinstance(error, UnicodeError) else ""
            raise InputError(f"{self.path}: cannot be read ({_first_line(error)}){remedy}") from error

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines that are not left out, each with its number."""
        with open(self.path, newline="", encoding=self.text.encoding) as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if number not in self.text.skip)

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the records of the file, each with the number of its last line."""
        last = [0]

        def texts() -> Iterator[str]:
            for last[0], line in self.lines():
                yield line

        for cells in csv.reader(texts(), delimiter=self.text.separator or ",", strict=True):
            yield last[0], cells

    def separator(self) -> str:
        """Return the separator by which the first records have the same number of cells, more than one."""
        fits: dict[str, tuple[bool, float]] = {}
        for separator in _SEPARATORS:
            records = replace(self, text=replace(self.text, separator=separator)).records()
            with suppress(csv.Error):
                widths = [len(cells) for _, cells in islice(records, _SNIFFED) if cells]
                if max(widths, default=1) > 1:
                    fits[separator] = min(widths) == max(widths), statistics.median(widths)
        best = [separator for separator, (even, _) in fits.items() if even]
        best = best or [separator for separator, fit in fits.items() if fit == max(fits.values())]
        if len(best) > 1 and self.text.comma and "," in best:
            best.remove(",")
        if len(best) > 1:
            raise InputError(f"{self.path}: cells could be separated by {some(best)}; say which with --separator")
        return best[0] if best else ","

    def frame(self, pandas: Any) -> Any:
        """Return the data frame of all cells, as text, without the names and without empty lines."""
        text, file = self.text, self.path if not self.text.skip else StringIO("".join(line for _, line in self.lines()))
        whole = {"header": None, "dtype": str, "keep_default_na": False, "skip_blank_lines": False}
        try:
            frame = pandas.read_csv(file, sep=text.separator, encoding=text.encoding, **whole)
        except pandas.errors.ParserError:
            self.widths()  # names all lines with too many cells
            raise
        if (frame.iloc[:, -1] == "").any():  # a line with too few cells looks like that, and so does an empty line
            blank = np.array(self.widths()) == 0
            if frame.shape[1] == 1:  # where an empty line is an empty cell, but for those at the end
                blank &= np.logical_and.accumulate(blank[::-1])[::-1]
            frame = frame[~blank]
        return frame.iloc[int(text.header) :]

    def widths(self) -> list[int]:
        """Return the number of cells of each record; raise InputError where they are not the same."""
        widths = [(line, len(cells)) for line, cells in self.records()]
        first, width = widths[0]
        wrong = [f"line {line} has {count}" for line, count in widths if count not in (0, width)]
        if wrong:
            more = f", ... ({len(wrong):,} lines)" if len(wrong) > 20 else ""
            raise InputError(f"{self.path}: line {first} has {width} cells, but {', '.join(wrong[:20])}{more}; {_SKIP}")
        return [count for _, count in widths]

    def place(self, row: int) -> str:
        """Return the line of a row, by its index."""
        one = len(next(self.records())[1]) == 1
        kept = (line for line, cells in self.records() if cells or one)
        return f"line {next(islice(kept, row + int(self.text.header), None))}"


def _encoding(path: Path) -> str:
    with open(path, "rb") as file:
        begin = file.read(4096)
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if b"\0" in begin:
        which = "utf-16-be" if begin[:1] == b"\0" else "utf-16-le"
        raise InputError(f"{path}: not text in UTF-8: it holds zero bytes; if it is UTF-16, say --encoding {which}")
    return "utf-8-sig"


def _open_parquet(path: Path) -> Source:
    _imported(path, "pandas")
    parquet, arrow = _imported(path, "pyarrow.parquet"), _imported(path, "pyarrow")

    @contextmanager
    def opened() -> Iterator[Any]:
        try:
            yield parquet.ParquetFile(path)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{path}: not a Parquet file, or a damaged one ({_first_line(error)})") from error

    def load(wanted: Sequence[str]) -> Any:
        with opened() as file:
            frame = file.read(columns=[*wanted]).to_pandas(ignore_metadata=True, integer_object_nulls=True)
            return frame.astype({name: "category" for name in wanted if name in categories})

    with opened() as file:  # pyarrow forgets that whole numbers were categories, but for the schema that it was given
        stored = (file.metadata.metadata or {}).get(b"ARROW:schema")
        schema = arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(stored))) if stored else file.schema_arrow
        categories = {field.name for field in schema if arrow.types.is_dictionary(field.type)}
        # pandas' numbers of rows are no column
        names = tuple(name for name in file.schema_arrow.names if not re.fullmatch(r"__index_level_\d+__", name))
    return Source(path, names, names, load)


def _open_npz(path: Path) -> Source:
    arrays = _arrays(path)
    columns = {name: array for name, array in arrays.items() if array.ndim == 1}
    if "X" not in arrays:
        lengths = {len(array) for array in columns.values()}
        if len(lengths) != 1:
            found = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise InputError(
                f"{path}: expected an array 'X' (n, d), or one-dimensional arrays of one length, one a column; found "
                f"{found}"
            )
        return Source(path, tuple(columns), tuple(columns), lambda wanted: columns)
    x = arrays["X"]
    if x.ndim != 2 or x.dtype.kind not in "fiub":
        raise InputError(f"{path}: array 'X': expected numbers of shape (n, d), found {x.dtype} of {x.shape}")
    labels = arrays.get("features", arrays.get("feature_names", np.zeros(0)))
    known = labels.dtype.kind == "U" and labels.shape == x.shape[1:]
    features = [str(label) for label in labels] if known else [f"x{position}" for position in range(x.shape[1])]
    beside = {name: array for name, array in columns.items() if len(array) == len(x)}
    return Source(
        path, (*features, *beside), tuple(features), lambda wanted: {**beside, **dict(zip(features, x.T, strict=True))}
    )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an archive, without unpickling anything."""
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path}: not an NPZ archive, or a damaged one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        why = ": Python objects are not loaded, since loading them can run code" if "pickle" in str(error) else ""
        raise InputError(f"{path}: not an NPZ archive of numbers and text, or a damaged one ({error}){why}") from error
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise InputError(f"{path}: expected an archive of numpy arrays, found {', '.join(arrays) or 'nothing'}")
    return arrays


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

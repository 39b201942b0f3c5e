"""Words of the command line that several commands share."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..errors import InputError
from .columns import MARKS
from .tables import Source, Text, open_table

__all__ = ["MISSING", "add_table", "fraction", "names", "notation", "opened", "positive"]

MISSING = ("error", "drop", "mean")


def add_table(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a table is read."""
    parser.add_argument(
        "--missing-marks",
        type=names,
        metavar="A,B,C",
        help=f"texts that stand for a missing value beside the empty cell (the model's, or {','.join(MARKS)})",
    )
    text = parser.add_argument_group("text files")
    text.add_argument("--encoding", metavar="NAME", help="latin-1, cp1252, ... (UTF-8, or UTF-16 with its mark)")
    text.add_argument(
        "--separator", type=_separator, metavar="MARK", help="between cells: , ; | or tab (what fits the first lines)"
    )
    text.add_argument(
        "--skip-lines", type=_lines, default=(), metavar="LINES", help="lines that are no part of the table: 1-3 or 2,4"
    )
    text.add_argument(
        "--no-header", dest="header", action="store_false", help="no line of names; the columns are c1, c2, ..."
    )
    text.add_argument("--decimal", choices=(".", ","), metavar="MARK", help="mark of decimals: . or , (a point)")
    text.add_argument("--decimal-comma", dest="decimal", action="store_const", const=",", help="same as --decimal ,")
    text.add_argument(
        "--thousands", choices=(",", ".", "'", " "), metavar="MARK", help="between groups of three digits: , . ' or ' '"
    )


def opened(options: argparse.Namespace) -> Source:
    """Return the table that the options name."""
    comma = notation(options)["decimal"] == ","
    return open_table(
        options.data, Text(options.encoding, options.separator, options.skip_lines, options.header, comma)
    )


def notation(options: argparse.Namespace) -> dict[str, Any]:
    """Return how numbers are written, by the names of :class:`~sketchgp.cli.columns.Rules`."""
    thousands = options.thousands or ""
    decimal = options.decimal or (None if not thousands else "," if thousands == "." else ".")
    if decimal is not None and decimal == thousands:
        raise InputError(f"--thousands {thousands}: this is the mark of decimals, too")
    return {"decimal": decimal, "thousands": thousands}


def names(text: str) -> list[str]:
    """Return names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text}")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a share from 0 up to, but not including, 1, not {text}")
    return value


def _separator(text: str) -> str:
    mark = "\t" if text in ("tab", "\\t") else text
    if len(mark) != 1:
        raise argparse.ArgumentTypeError(f"expected one character or tab, not {text!r}")
    return mark


def _lines(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in names(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[1]) < 1:
            raise argparse.ArgumentTypeError(f"expected numbers of lines, from 1, such as 1-3 or 2,4, not {text!r}")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)

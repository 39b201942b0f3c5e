"""Words of the command line that several commands share."""

from __future__ import annotations

import argparse

__all__ = ["MISSING", "add_table", "fraction", "names", "positive"]

MISSING = ("error", "drop", "mean")


def add_table(parser: argparse.ArgumentParser) -> None:
    """The options that say how a table is read."""
    parser.add_argument(
        "--encoding", metavar="NAME", help="of a CSV file: latin-1, cp1252, ... (UTF-8, or UTF-16 with its mark)"
    )
    parser.add_argument(
        "--no-header",
        dest="header",
        action="store_false",
        help="a CSV file without a line of names; its columns are c1, c2, ...",
    )
    parser.add_argument("--decimal-comma", action="store_true", help="a CSV file whose decimals have a comma: 3,14")


def names(text: str) -> list[str]:
    """Names with commas between them."""
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

"""Options of the commands, as tables, and the files that they name."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import InputError
from ..kernels import BY_NAME, MEANS
from ..solvers import ASkotch, Cholesky, ConjugateGradients, EigenPro2, FullProblem, Skotch, Solver
from ..tensor_file import is_stream, replacing
from .columns import MARKS
from .features import MISSING, UNKNOWN
from .tables import Source, Text, open_table

SOLVERS: dict[str, Solver[FullProblem] | str] = {
    "auto": "auto",
    "cg": ConjugateGradients(),
    "askotch": ASkotch(),
    "skotch": Skotch(),
    "eigenpro2": EigenPro2(),
    "cholesky": Cholesky(),
}


def names(text: str) -> list[str]:
    """Return names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text}")
    return value


def _fraction(text: str) -> float:
    if not 0.0 <= (value := float(text)) < 1.0:
        raise argparse.ArgumentTypeError(f"expected a share from 0 up to, but not including, 1, not {text}")
    return value


def _separator(text: str) -> str:
    mark = "\t" if text in ("tab", "\\t") else text
    if len(mark) != 1:
        raise argparse.ArgumentTypeError(f"expected one character or tab, not {text!r}")
    return mark


# The help and what argparse takes, by the name of the option; a default stands in brackets.
_Options = dict[str, tuple[str, dict[str, Any]]]
_FLAG: dict[str, Any] = {"action": "store_true"}
_NAMES: dict[str, Any] = {"type": names, "metavar": "A,B,C"}
_MARK: dict[str, Any] = {"metavar": "MARK"}
_COUNT: dict[str, Any] = {"type": _positive, "metavar": "N"}
_TABLE: _Options = {
    "data": (".csv with a header row, or .parquet", {"type": Path, "metavar": "DATA"}),
    "--missing-marks": (
        f"texts that stand for a missing value beside the empty cell (the model's, or {','.join(MARKS)})",
        _NAMES,
    ),
    "--encoding": ("of text: latin-1, cp1252, ... (utf-8)", {"metavar": "NAME"}),
    "--separator": ("between cells: , ; | or tab (what fits the first lines)", {"type": _separator, **_MARK}),
    "--skip-lines": ("lines before the table, such as a title (none)", {**_COUNT, "default": 0}),
    "--no-header": ("no line of names; the columns are c1, c2, ...", {"dest": "header", "action": "store_false"}),
    "--decimal": ("mark of decimals: . or , (a point)", {"choices": (".", ","), **_MARK}),
    "--force": ("write over files that exist (never over an input)", _FLAG),
}
_SEED: _Options = {"--seed": ("of the split, the subsets and the sketches (0)", {"type": int, "default": 0})}

# The description and the options of each command.
_COMMANDS: dict[str, tuple[str, _Options]] = {
    "demo": (
        "Tune an ordinary GPyTorch ExactGP on a random subset of the bundled diamonds data, condition it on all "
        "training rows with sketchgp, and compare it with GPyTorch's defaults: iterations, seconds, errors, and a "
        "picture. Takes 16,000 of the rows, and under a minute.",
        {
            "--output": ("folder of the picture (here)", {"type": Path, "default": Path("."), "metavar": "DIR"}),
            "--full": ("all 53,940 rows: five minutes or more", _FLAG),
            "--quick": ("2,000 rows, too few for sketchgp to matter: to see whether it runs", _FLAG),
            "--skip-gpytorch": ("leave GPyTorch's side out, about a quarter of the time", _FLAG),
            **_SEED,
        },
    ),
    "fit": (
        "Fit a GP to a CSV or Parquet file: standardise numbers and make categories of text, tune a GPyTorch "
        "ExactGP (one lengthscale an input) by marginal likelihood on a random subset, condition it on all training "
        "rows with sketchgp and report the error on held-out rows.",
        {
            "--target": ("the column to predict", {"required": True, "metavar": "COLUMN"}),
            "--features": ("columns to predict from (all others)", _NAMES),
            "--drop": ("columns to leave out", {"default": [], **_NAMES}),
            "--categorical": ("columns of categories, as those of text are", {"default": [], **_NAMES}),
            "--numeric": ("columns of numbers, where that is not certain", {"default": [], **_NAMES}),
            "--missing": (
                "missing values: end with an error (the default), leave the row out, or take the column's mean",
                {"choices": MISSING, "default": "error"},
            ),
            "--kernel": ("(%(default)s)", {"choices": list(BY_NAME), "default": "matern52"}),
            "--mean": (
                "the prior mean (%(default)s); linear for data with a trend",
                {"choices": MEANS, "default": "constant"},
            ),
            "--iterations": ("most steps of tuning (%(default)s)", {"default": 500, **_COUNT}),
            "--subset": ("most rows to tune on (%(default)s)", {"default": 2000, **_COUNT}),
            "--solver": ("of the mean on all rows (%(default)s)", {"choices": list(SOLVERS), "default": "auto"}),
            "--rank": ("columns of the preconditioner (chosen by cost)", _COUNT),
            "--test-fraction": ("share of rows held out (%(default)s)", {"type": _fraction, "default": 0.1}),
            "--float64": ("compute in float64: slower, more digits", _FLAG),
            "--save": ("write the model, for the command predict", {"type": Path, "metavar": "FILE"}),
            "--picture": (
                "draw predictions and calibration of the held-out rows",
                {"type": Path, "metavar": "PNG"},
            ),
            **_SEED,
            **_TABLE,
        },
    ),
    "predict": (
        "Predict the rows of a table with a saved model: mean and standard deviation of the target (noise included), "
        "in its own units. Where the table has the target too, in some rows or all, the error is reported.",
        {
            "model": ("a model saved by the command fit", {"type": Path, "metavar": "FILE"}),
            "--output": ("write all rows here (columns mean, std)", {"type": Path, "metavar": "CSV"}),
            "--missing": (
                "missing values: end with an error, predict nothing for the row, or take the mean (as in fit)",
                {"choices": MISSING},
            ),
            "--unknown": (
                "categories that the model has not seen: end with an error (the default), or treat as --missing says",
                {"choices": UNKNOWN, "default": "error"},
            ),
            **_TABLE,
        },
    ),
    "info": (
        "Print the versions, devices, engines, threads and memory: what a report of a fault needs. Nothing is sent "
        "anywhere, and nothing in it names you.",
        {},
    ),
}


def build_parser(version: str) -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m sketchgp",
        description="Gaussian processes on large data: a demonstration, and a regression for your own table.",
    )
    parser.add_argument("--version", action="version", version=f"sketchgp {version}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for command, (description, options) in _COMMANDS.items():
        subparser = commands.add_parser(command, help=re.split("[:.]", description)[0], description=description)
        sizes = subparser.add_mutually_exclusive_group() if command == "demo" else subparser
        for name, (text, words) in options.items():
            (sizes if name in ("--full", "--quick") else subparser).add_argument(name, help=text, **words)
    return parser


def opened(options: argparse.Namespace) -> Source:
    """Return the table that the options name."""
    text = Text(options.encoding, options.separator, options.skip_lines, options.header, options.decimal == ",")
    return open_table(options.data, text)


def notation(options: argparse.Namespace) -> dict[str, Any]:
    """Return how numbers and missing values are written, by the names of :class:`~sketchgp.cli.columns.Rules`."""
    marks = {} if options.missing_marks is None else {"marks": tuple(options.missing_marks)}
    return {"decimal": options.decimal, **marks}


@dataclass(frozen=True)
class Output:
    """A file that a command will write; made by :func:`claim` before the work begins.

    :param overwrite: whether a file that is there when it is written may be replaced.
    """

    path: Path
    overwrite: bool

    @contextmanager
    def open(self, mode: str) -> Iterator[IO[Any]]:
        """Open the file, which is written completely or not at all; see :func:`sketchgp.tensor_file.replacing`."""
        with self.errors(), replacing(self.path, mode, self.overwrite) as file:
            yield file

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of the system as InputErrors that name the file."""
        try:
            yield
        except FileExistsError as error:
            where = f"; what was to be written is in {error.filename2}" if error.filename2 else ""
            raise InputError(f"{self.path}: has come to exist meanwhile and is left as it is{where}") from error
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror or error})") from error


def claim(options: argparse.Namespace, name: str, *inputs: str) -> Output | None:
    """Check, before any work, that the file which an option names may be written; None where it names none.

    :param name: of the option, such as ``save``; :param inputs: names of those whose files the command reads.
    :raises InputError: it is one of the inputs (under any name or link), it exists and ``--force`` is not given, or
        its folder is missing or cannot be written.
    """
    path, force = vars(options)[name], options.force
    if path is None:
        return None
    where = f"--{name} {path}"
    for read in (vars(options)[one] for one in inputs):
        if os.path.exists(path) and os.path.exists(read) and os.path.samefile(path, read):
            raise InputError(f"{where}: this is {read}, which the command reads; choose another file")
    if path.is_dir():
        raise InputError(f"{where}: cannot be written: it is a folder")
    if is_stream(path):
        return Output(path, True)
    if path.exists() and not force:
        raise InputError(f"{where}: exists already; choose another name, or write over it with --force")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise InputError(f"{where}: cannot be written: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{where}: cannot be written: no permission to write into the folder {folder}")
    return Output(path, force)

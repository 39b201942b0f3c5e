"""Where commands write: never over what they read, and over anything else only with ``--force``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import InputError
from ..tensor_file import is_stream, replacing


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--force``."""
    parser.add_argument("--force", action="store_true", help="write over files that exist (never over an input)")


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


def claim(path: Path, option: str, inputs: Sequence[Path], force: bool) -> Output:
    """Check, before any work, that a file may be written.

    :param path: the file.
    :param option: what named it, such as ``--save``, for messages.
    :param inputs: the files that the command reads.
    :param force: whether files that exist may be written over.
    :raises InputError: it is one of the inputs (under any name or link), it exists and ``force`` is False, or its
        folder is missing or cannot be written.
    """
    where = f"{option} {path}"
    for read in inputs:
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

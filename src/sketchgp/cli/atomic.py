"""Files that are either written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import InputError


@contextmanager
def replacing(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Opens a temporary file beside ``path``, renamed to ``path`` once the block has ended without an error.

    :param path: the file to write; one that is there is replaced in one step, or kept if the block fails.
    :param mode: ``"w"`` or ``"wb"``.
    :yields: the open temporary file.
    :raises InputError: the folder is missing or cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)

"""Files that are whole or not there at all, and files of tensors that know when they are damaged.

A file of tensors is what ``torch.save`` makes of a flat dictionary of tensors; it is read with ``weights_only=True``,
so that reading it executes nothing.  Numbers and text are JSON in a tensor of bytes, the header, with a digest of
everything in the file: what is stored damaged or in part is not taken for what was saved.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .fingerprint import add_tensors

HEADER = "header"
_LONGEST = 45  # characters of a name, of at most 4 bytes each, that leave room for what is put behind it
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOMEM)  # which says nothing of the file

Path_ = str | os.PathLike[str]


# --- whole files ----------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path_, mode: str, overwrite: bool = True) -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path``, renamed to ``path`` once the block has ended without an error.

    Several processes may do so at once: each has a temporary file of its own, and the path holds a whole file of one
    of them.  A link is followed: what it points to is replaced.  Into a device or a pipe it is written directly.

    :param path: the file to write; one that is there is replaced in one step, and kept if the block fails.
    :param mode: ``"w"`` or ``"wb"``.
    :param overwrite: False to keep a file that is there when the block ends.
    :yields: the open temporary file.
    :raises FileExistsError: with ``overwrite=False``; its ``filename2`` is then where the new file is kept.
    :raises OSError: the folder is missing or cannot be written, or the disk is full.
    """
    if is_stream(path):
        with open(path, mode) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f"{target.name[:_LONGEST]}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    kept = False
    try:
        with open(temporary, mode.replace("w", "x")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            shutil.copymode(target, temporary)
        kept = not overwrite and os.path.lexists(target)
        if kept:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path), None, str(temporary))
        os.replace(temporary, target)
    finally:
        if not kept:
            with suppress(OSError):
                os.unlink(temporary)


def is_stream(path: Path_) -> bool:
    """Return whether a path is a device such as ``/dev/stdout``, or a pipe, which cannot be overwritten."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


# --- files of tensors -----------------------------------------------------------------------------------------


def save(path: Path_, described: Mapping[str, Any], tensors: Mapping[str, Tensor], overwrite: bool = True) -> None:
    """Write a file of tensors, whole or not at all.

    :param described: numbers and text, as JSON has them.
    :param tensors: by name; their devices are not kept.
    :param overwrite: as for :func:`replacing`.
    :raises OSError: or RuntimeError, from torch's own writer: it cannot be written.
    """
    contents = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    header = json.dumps({**described, "digest": _digest(described, contents)}).encode()
    contents[HEADER] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    with replacing(path, "wb", overwrite) as file:
        torch.save(contents, file)


def load(path: Path_) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file that :func:`save` wrote; tensors are on the CPU.

    :raises ValueError: the file is none of :func:`save`, or damaged.
    :raises OSError: or MemoryError: it cannot be read now, and may be whole.
    """
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        described = json.loads(bytes(contents.pop(HEADER).numpy()))
        digest = described.pop("digest")
        if digest != _digest(described, contents):
            raise ValueError("its digest is not that of what it holds")
        return described, {name: tensor.detach() for name, tensor in contents.items()}
    except Exception as error:  # torch and pickle share no base class for a damaged file
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _UNREADABLE):
            raise
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0][:120]) from error


def _digest(described: Mapping[str, Any], contents: Mapping[str, Tensor]) -> str:
    """Return a mark of everything in the file."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(contents):
        digest.update(name.encode())
        add_tensors(digest, contents[name])
    return digest.hexdigest()

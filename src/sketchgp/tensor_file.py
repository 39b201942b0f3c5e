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
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .errors import InputError
from .fingerprint import add_tensors

HEADER = "header"
_LONGEST = 180  # bytes of a name that leave room for what is put behind it
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOMEM)  # which says nothing of the file

Path_ = str | os.PathLike[str]


# --- whole files ----------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path_, mode: str, overwrite: bool = True) -> Iterator[IO[Any]]:
    """Opens a temporary file beside ``path``, renamed to ``path`` once the block has ended without an error.

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
    temporary = target.with_name(f"{_stem(target)}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    kept = False
    try:
        with open(temporary, mode.replace("w", "x")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            shutil.copymode(target, temporary)
        try:
            _rename(temporary, target, overwrite)
        except FileExistsError as error:
            kept = True
            raise FileExistsError(error.errno, error.strerror, str(path), None, str(temporary)) from error
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


def _stem(target: Path) -> str:
    name = os.fsencode(target.name)
    return target.name if len(name) <= _LONGEST else hashlib.sha256(name).hexdigest()


def _rename(source: Path, target: Path, overwrite: bool) -> None:
    if overwrite:
        os.replace(source, target)
        return
    try:
        os.link(source, target)  # the one way to give a name only where there is none
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(source, target)


@contextmanager
def reserved(path: Path_) -> Iterator[None]:
    """For the length of the block, ``path`` is ours among all that reserve it, in this and in other processes.

    The lock is one of the system's on a file beside it, ``path.lock``: it ends with the process, however that ends, so
    a file that a crash leaves behind is in nobody's way.  Temporary files that a crash left are removed.  Where there
    are no such locks (Windows, some network drives, a folder without permission) the block runs without.

    :raises InputError: if another has reserved it.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f"{_stem(target)}.lock")
    descriptor = _locked(lock, path)
    if descriptor is None:
        yield
        return
    try:
        pattern = re.compile(re.escape(_stem(target)) + r"\.\d+-[0-9a-f]{8}\.partial")
        for other in os.listdir(target.parent):
            if pattern.fullmatch(other):
                with suppress(OSError):
                    os.unlink(target.with_name(other))
        yield
    finally:
        with suppress(OSError):
            os.unlink(lock)
        os.close(descriptor)


def _locked(lock: Path, path: Path_) -> int | None:
    """An open descriptor of the lock file with the lock on it; None where the system gives none."""
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(lock).st_ino:  # else another has removed it just now
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()}".encode())
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise InputError(
                f"{path} is in use by another solve ({holder}), and two would write over each other's work; wait for "
                "it to end, or give each a path of its own."
            ) from None
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)


# --- files of tensors -----------------------------------------------------------------------------------------


def save(path: Path_, described: Mapping[str, Any], tensors: Mapping[str, Tensor], overwrite: bool = True) -> None:
    """Writes a file of tensors, whole or not at all.

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
    """A mark of everything in the file."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(contents):
        digest.update(name.encode())
        add_tensors(digest, contents[name])
    return digest.hexdigest()

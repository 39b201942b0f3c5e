"""Checkpoints: one file, replaced as a whole, that holds tensors only and is refused for another problem.

The file is what ``torch.save`` makes of a flat dictionary of tensors, and is read with ``weights_only=True``, so that
reading it executes nothing.  Numbers and text are JSON in a tensor of bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, warn
from ...fingerprint import add_tensors, hash_tensors
from ...operators import KernelMatrix
from ...operators.access import Access, terms

_FORMAT = 2
_HEADER = "header"
_PROBES = 16  # points at which the kernel's values are part of its fingerprint
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOMEM)  # which says nothing of the file
_SIMPLE = (bool, int, float, str, type(None))


class Checkpoint:
    """Where a solve is saved, how often, and what it is a solve of.

    :param path: the file; it is written beside itself and then renamed.
    :param every: seconds between two writes.
    :param problem: name -> fingerprint of each part of the problem.
    """

    def __init__(self, path: str | os.PathLike[str], every: float, problem: dict[str, str]) -> None:
        self.path, self.every, self.problem = Path(path), every, problem
        self.written = False  # by this process: later failures do not end the solve

    def exists(self) -> bool:
        return self.path.exists()

    def save(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the file; whenever the process dies, the path holds a whole file or the one before."""
        contents = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        described = {"format": _FORMAT, "problem": self.problem, "state": plain}
        header = json.dumps({**described, "digest": _digest(described, contents)}).encode()
        contents[_HEADER] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        beside = self.path.with_name(self.path.name + ".partial")
        try:
            with open(beside, "wb") as file:
                torch.save(contents, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter where the disk is full
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            message = f"The checkpoint {self.path} cannot be written: {error}"
            if not self.written:
                raise InputError(f"{message}.") from error
            warn(f"{message}; the solve goes on without.")
        self.written = True

    def load(self, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What was saved last.

        :raises InputError: if the file is no checkpoint, or one of another problem; the message names what changed.
        """
        try:
            contents = torch.load(self.path, map_location="cpu", weights_only=True)
            header = json.loads(bytes(contents.pop(_HEADER).numpy()))
            digest = header.pop("digest")
            if header["format"] != _FORMAT or digest != _digest(header, contents):
                raise ValueError("another format, or damaged")
        except Exception as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _UNREADABLE):
                raise InputError(f"The checkpoint {self.path} cannot be read now: {error!r}.") from error
            raise InputError(
                f"{self.path} is no checkpoint that this version of sketchgp can read; delete it or use another path."
            ) from error
        changed = [name for name, mark in self.problem.items() if header["problem"].get(name) != mark]
        if changed:
            raise InputError(
                f"The checkpoint {self.path} is of another problem: {' and '.join(changed)} changed since it was "
                "written. Delete it or use another path."
            )
        return header["state"], {name: tensor.to(device) for name, tensor in contents.items()}


def _digest(described: dict[str, Any], contents: dict[str, Tensor]) -> str:
    """A mark of everything in the file: what is stored damaged or in part is not to be gone on from."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(contents):
        digest.update(name.encode())
        add_tensors(digest, contents[name])
    return digest.hexdigest()


def fingerprint(operator: Any, noise: Tensor, rhs: Tensor, choices: str) -> dict[str, str]:
    """A mark for each part of a problem: equal marks, equal solves (on one device and number of threads)."""
    inputs, kernel = hashlib.sha256(), hashlib.sha256()
    for scale, part in terms(operator):
        kernel.update(f"{type(part).__name__} {part.dtype} {_number(scale)}".encode())
        if isinstance(part, KernelMatrix):
            add_tensors(inputs, part.x1, part.x2)
            add_tensors(kernel, *part.parameters, *part.kernel.buffers())
            kernel.update(repr(list(_structure(part.kernel))).encode())
        else:
            add_tensors(inputs, *part.representation())
    n = operator.shape[-1]
    some = torch.linspace(0, n - 1, min(n, _PROBES)).round().long().to(noise.device)
    with torch.no_grad():
        add_tensors(kernel, Access(operator).block(some, some))
    return {
        "the training inputs": inputs.hexdigest(),
        "the kernel": kernel.hexdigest(),
        "the noise": hash_tensors(noise),
        "the targets": hash_tensors(rhs),
        "the solver's choices": hashlib.sha256(choices.encode()).hexdigest(),
        "the device": noise.device.type,
    }


def _structure(kernel: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Classes of the kernel and its parts, and what they were set up with beside parameters."""
    for module in kernel.modules():
        simple = {k: v for k, v in sorted(vars(module).items()) if isinstance(v, _SIMPLE) and k != "training"}
        yield type(module).__name__, simple


def _number(scale: float | Tensor) -> str:
    return repr(scale.tolist() if torch.is_tensor(scale) else scale)

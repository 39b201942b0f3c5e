"""Checkpoints: one file, replaced as a whole, that holds tensors only and is refused for another problem.

It is a file of :mod:`sketchgp.tensor_file`: reading it executes nothing, and what is stored damaged or in part is not
gone on from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import tensor_file
from ...distributed import in_force
from ...errors import InputError, warn
from ...fingerprint import tensor_mark, text_mark

_FORMAT = 3


class Checkpoint:
    """Where a solve is saved, how often, and what it is a solve of.

    :param path: the file; it is written beside itself, under a name of this process, and then renamed.
    :param every: seconds between two writes.
    :param problem: name -> mark of each part of the problem.
    """

    def __init__(self, path: str | os.PathLike[str], every: float, problem: dict[str, str]) -> None:
        self.path, self.every, self.problem = Path(path), every, problem
        self.written = False  # by this process: later failures do not end the solve

    def exists(self) -> bool:
        return self.path.exists()

    def reserved(self) -> AbstractContextManager[None]:
        """For the length of a solve, no other may use the path; see :func:`sketchgp.tensor_file.reserved`."""
        return tensor_file.reserved(self.path)

    def save(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the file; whenever the process dies, the path holds a whole file or the one before."""
        described = {"format": _FORMAT, "problem": self.problem, "state": plain}
        try:
            tensor_file.save(self.path, described, tensors)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter where the disk is full
            message = f"The checkpoint {self.path} cannot be written: {error}"
            if not self.written:
                raise InputError(f"{message}.") from error
            warn(f"{message}; the solve goes on without.", see="checkpoint")
        self.written = True

    def load(self, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What was saved last.

        :raises InputError: if the file is no checkpoint, or one of another problem; the message names what changed.
        """
        try:
            header, contents = tensor_file.load(self.path)
            if header.get("format") != _FORMAT:
                raise ValueError("another format")
        except (OSError, MemoryError) as error:
            raise InputError(f"The checkpoint {self.path} cannot be read now: {error!r}.") from error
        except ValueError as error:
            raise InputError(
                f"{self.path} is no checkpoint that this version of sketchgp can read; delete it or use another path."
            ) from error
        names = {**self.problem, **header["problem"]}
        changed = [name for name in names if header["problem"].get(name) != self.problem.get(name)]
        if changed:
            raise InputError(
                f"The checkpoint {self.path} is of another problem: {' and '.join(changed)} changed since it was "
                "written. Delete it or use another path."
            )
        return header["state"], {name: tensor.to(device) for name, tensor in contents.items()}


def compare_ranks(owner: str, marks: Callable[[], dict[str, str]]) -> None:
    """See that all ranks solve the same problem, where several work together.

    :raises InputError: on every rank, with what differs.
    """
    shards = in_force()
    if shards is not None:
        shards.exchange.alike(owner, marks())


def solve_marks(noise: Tensor, targets: Tensor, choices: str) -> dict[str, str]:
    """Marks of what all solves have beside inputs and kernel: equal marks, equal solves (on one device and number of
    threads)."""
    return {
        "the noise": tensor_mark(noise),
        "the targets": tensor_mark(targets),
        "the solver's choices": text_mark(choices),
        "the device": targets.device.type,
    }

"""Checkpoints: one file, replaced as a whole, that holds tensors only and is refused for another problem.

It is a file of :mod:`sketchgp.tensor_file`: reading it executes nothing, and what is stored damaged or in part is not
gone on from.

Where ranks work together, rank 0 alone reads and writes the file, of the whole state: what each holds some rows of is
gathered for it, all else they have to the same bits; and it tells the others what it has read.  So there is one file of
one step, whenever whichever rank dies, it has to be seen by one machine only, and it does not hang on the number of
ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import tensor_file
from ...distributed import in_force, of_rank_0
from ...errors import InputError, warn
from ...fingerprint import tensor_mark, text_mark

_FORMAT = 9


class Checkpoint:
    """The file of a solve, how often it is written, and marks of the problem.

    :param path: the file; it is written beside itself, under a name of this process, and then renamed.
    :param every: seconds between two writes.
    :param problem: name -> mark of each part of the problem.
    :param rough: of those parts that another number of ranks rounds to other bits, what is compared in their place
        where the file was written by another number of ranks.
    :ivar ranks: how many work together.
    :ivar moved: by how many ranks the file was written, once it is read and that is another number; else None.
    """

    def __init__(
        self, path: str | os.PathLike[str], every: float, problem: dict[str, str], rough: dict[str, str] | None = None
    ) -> None:
        self.path, self.every, self.problem, self.rough = Path(path), every, problem, rough or {}
        self.written = False  # by this process: later failures do not end the solve
        self.shards = in_force()
        self.ranks = 1 if self.shards is None else self.shards.count
        self.moved: int | None = None

    @property
    def ours(self) -> bool:
        """Return whether this process is the one that reads and writes."""
        return self.shards is None or self.shards.rank == 0

    def exists(self) -> bool:
        """Return whether rank 0 finds the file."""
        there = self.ours and self.path.exists()
        return there if self.shards is None else bool(self.shards.agree(there))

    def save(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the file, by rank 0; whenever it dies, the path holds a whole file or the one before."""
        described = {"format": _FORMAT, "problem": self.problem, "state": plain}
        described |= {"ranks": self.ranks, "rough": self.rough}
        try:
            tensor_file.save(self.path, described, tensors)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter where the disk is full
            message = f"The checkpoint {self.path} cannot be written: {error}"
            if not self.written:
                raise InputError(f"{message}.") from error
            warn(f"{message}; the solve goes on without.", see="checkpoint")
        self.written = True

    def load(self, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the last saved state, on all ranks.

        :raises InputError: if the file is no checkpoint, or one of another problem; the message names what changed.
        """
        header: dict[str, Any] = {}
        contents: dict[str, Tensor] = {}
        if self.ours:
            header, contents = self._read()
        if self.shards is not None:
            header, contents = of_rank_0(self.shards, header, contents)
        written_by = header.get("ranks", 1)
        self.moved = None if written_by == self.ranks else written_by
        return header["state"], {name: tensor.to(device) for name, tensor in contents.items()}

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
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
        ours, theirs = self.problem, header["problem"]
        if header.get("ranks", 1) != self.ranks:
            ours, theirs = {**ours, **self.rough}, {**theirs, **header.get("rough", {})}
        changed = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        if changed:
            raise InputError(
                f"The checkpoint {self.path} is of another problem: {' and '.join(changed)} changed since it was "
                "written. Delete it or use another path."
            )
        return header, contents


def compare_ranks(owner: str, marks: Callable[[], dict[str, str]]) -> None:
    """Check that all ranks solve the same problem, where several work together.

    :raises InputError: on every rank, with what differs.
    """
    shards = in_force()
    if shards is not None:
        shards.exchange.alike(owner, marks())


def solve_marks(noise: float | Tensor, targets: Tensor, choices: str) -> dict[str, str]:
    """Return marks of what all solves have beside inputs and kernel."""
    return {
        "the noise": tensor_mark(noise if torch.is_tensor(noise) else torch.tensor(float(noise))),
        "the targets": tensor_mark(targets),
        "the solver's choices": text_mark(choices),
        "the device": targets.device.type,
    }

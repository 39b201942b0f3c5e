"""Checkpoints: one file, replaced as a whole, that holds tensors only and is refused for another problem.

It is a file of :mod:`sketchgp.tensor_file`: reading it executes nothing, and what is stored damaged or in part is not
gone on from.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import tensor_file
from ...errors import InputError, warn
from ...fingerprint import add_tensors, hash_tensors
from ...operators import KernelMatrix
from ...operators.access import Access, terms

_FORMAT = 3
_PROBES = 16  # points at which the kernel's values are part of its fingerprint
_SIMPLE = (bool, int, float, str, type(None))


class Checkpoint:
    """Where a solve is saved, how often, and what it is a solve of.

    :param path: the file; it is written beside itself, under a name of this process, and then renamed.
    :param every: seconds between two writes.
    :param problem: name -> fingerprint of each part of the problem.
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
            warn(f"{message}; the solve goes on without.")
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


def fingerprint(operator: Any, noise: Tensor, rhs: Tensor, choices: str) -> dict[str, str]:
    """A mark for each part of a linear system: equal marks, equal solves (on one device and number of threads)."""
    inputs, kernel = hashlib.sha256(), hashlib.sha256()
    for scale, part in terms(operator):
        kernel.update(f"{type(part).__name__} {part.dtype} {_number(scale)}".encode())
        if isinstance(part, KernelMatrix):
            add_tensors(inputs, part.x1, part.x2)
            _add_kernel(kernel, part.kernel, part.parameters)
        else:
            add_tensors(inputs, *part.representation())
    n = operator.shape[-1]
    some = _some(n).to(noise.device)
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


def kernel_mark(kernel: Any, points: Tensor) -> str:
    """A mark of a kernel: its parts and parameters, and its values at some of the points."""
    digest = hashlib.sha256()
    _add_kernel(digest, kernel, tuple(kernel.parameters()))
    some = points[_some(len(points)).to(points.device)]
    add_tensors(digest, KernelMatrix.of(kernel, some, engine="tiled").detach().to_dense())
    return digest.hexdigest()


def _some(n: int) -> Tensor:
    return torch.linspace(0, n - 1, min(n, _PROBES)).round().long()


def _add_kernel(digest: Any, kernel: Any, parameters: tuple[Tensor, ...]) -> None:
    add_tensors(digest, *parameters, *kernel.buffers())
    digest.update(repr(list(_structure(kernel))).encode())


def _structure(kernel: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Classes of the kernel and its parts, and what they were set up with beside parameters."""
    for module in kernel.modules():
        simple = {k: v for k, v in sorted(vars(module).items()) if isinstance(v, _SIMPLE) and k != "training"}
        yield type(module).__name__, simple


def _number(scale: float | Tensor) -> str:
    return repr(scale.tolist() if torch.is_tensor(scale) else scale)

"""Random numbers: a stream of its own for every purpose, so that no two draws of one seed are the same by accident.

``torch.manual_seed(0)`` gives everybody the same numbers: the rows that judge a step would be the inducing points that
seed 0 drew, and random probes the data that a user made by it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def salted(seed: int, purpose: str) -> int:
    """Return a number from 0 to 2^63 - 1: a hash of seed and purpose, the same on every platform."""
    digest = hashlib.sha256(f"sketchgp: {purpose}: {int(seed)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, purpose: str) -> torch.Generator:
    """Return the stream of a purpose, on the CPU, so that numbers do not depend on the device.

    Streams of other purposes, other seeds or ``torch.manual_seed`` are independent of it.

    :param seed: any integer.
    :param purpose: what is drawn, in words; one for each place that draws.
    """
    return torch.Generator().manual_seed(salted(seed, purpose))


def rows_beside(rows: Tensor, n: int, count: int, stream: torch.Generator) -> Tensor:
    """Draw ``(count,)`` of n rows, none twice and none of the given ones; all others where fewer are left."""
    left = torch.ones(n, dtype=torch.bool, device=rows.device).index_fill_(0, rows, False).nonzero().squeeze(1)
    return left[torch.randperm(len(left), generator=stream)[:count].to(rows.device)]

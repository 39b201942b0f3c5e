"""Ranks of gloo process groups that a test forks from one script: each runs cases and writes what they gave.

A case is a function without arguments that returns a dictionary of tensors, and of functions that give one after the
block.  What it raises is kept as text, with the
seconds that it took, so that one case which is to fail leaves the next ones alone.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from forks import fork_rank, one_thread
from sketchgp.distributed import sharded
from sketchgp.operators import tiles

Case = Callable[[], Mapping[str, Any]]
COUNTS = (2, 3)  # of ranks
OUTSIDE = "outside"  # what the case is called that opens blocks of its own
LAST = "last"  # what the last case is called, which not every rank may live through


def result_of(case: Case) -> dict[str, Any]:
    """What a case gives inside of a block: ``values``, or ``error`` and its ``kind``; and ``seconds``."""
    began = time.perf_counter()
    try:
        with sharded() as shards:
            torch.manual_seed(0)
            values = dict(case())
            found: dict[str, Any] = {"values": values, "sent": shards.bytes_sent}
        values.update({name: value() for name, value in values.items() if not torch.is_tensor(value)})
    except BaseException as error:
        found = {"kind": type(error).__name__, "error": str(error), "trace": traceback.format_exc()}
    return {**found, "seconds": time.perf_counter() - began}


def start(cases: Mapping[int, Mapping[str, Case]], outside: Case, last: Case, directory: Path) -> None:
    """Run cases on 2 and on 3 ranks at once; ``directory`` then has a file ``count-rank.pt`` of each rank.

    :param outside: a case that opens blocks of its own.
    """
    one_thread()
    children = [_fork(cases[count], outside, last, directory, count, rank) for count in COUNTS for rank in range(count)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert not any(statuses), f"a rank failed: {statuses}"


def small_tiles() -> None:
    """Matrices of a few hundred rows have many tiles."""
    for name, value in {"_CPU_WIDTH": 13, "_CPU_BYTES": 1, "_LEAST_ENTRIES": 500}.items():
        setattr(tiles, name, value)


def _fork(cases: Mapping[str, Case], outside: Case, last: Case, directory: Path, count: int, rank: int) -> int:
    def work() -> None:
        small_tiles()
        found: dict[str, Any] = {name: result_of(case) for name, case in cases.items()}
        found[OUTSIDE] = dict(outside())
        torch.save(found, directory / f"{count}-{rank}.pt")
        torch.save({**found, LAST: result_of(last)}, directory / f"{count}-{rank}.pt")

    return fork_rank(count, rank, directory / f"{count}-ranks", work, limit=280)

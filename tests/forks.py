"""Processes that a test forks, and that may be killed.

A child of a process in which torch has threads can hang: what solves there is forked by a script of one thread.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sketchgp.solvers.loop import run

CAN_FORK = hasattr(os, "fork")  # not on Windows


def one_thread() -> None:
    """What a script does before it forks."""
    gc.collect()
    gc.freeze()  # what is imported is neither looked through nor copied by each child
    torch.set_num_threads(1)
    run.tqdm.set_lock(threading.RLock())  # not the one that processes share, which a killed one may hold


def fork(work: Callable[[], Any], limit: int = 60) -> int:
    """The process id of a child that does ``work()`` and nothing else, for so many seconds at the most."""
    child = os.fork()
    if child == 0:
        signal.alarm(limit)  # no child outlives the tests
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def fork_rank(count: int, rank: int, store: Path, work: Callable[[], Any], limit: int) -> int:
    """The same as one of so many ranks of a gloo group."""

    def joined() -> None:
        dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), rank=rank, world_size=count)
        work()

    return fork(joined, limit)


def ended(child: int) -> int:
    """The signal that ended the child, 0 if it ended by itself."""
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0, "a child failed"
        return 0
    return os.WTERMSIG(status)


def die(*args: object) -> None:
    """Kill this process, as a machine that runs out of memory does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def run_script(file: str, *arguments: object, limit: float = 120) -> None:
    """A fresh process that runs this file, for so many seconds at the most."""
    command = [sys.executable, str(Path(file)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr

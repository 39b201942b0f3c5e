"""Processes of one thread that wait for tasks, as ranks of one gloo group: for ``scaling.py``, ``shares.py`` and
``projection.py``.

The script that starts them is run by each of them, too: as ``SCRIPT serve COUNT RANK STORE``, by :func:`main`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner import Benchmark, Group

_SERVE = "serve"  # the first argument of a rank
_MARK = "measured"  # what an answer begins with, among what packages print


def one_thread_environment(script: Path) -> dict[str, str]:
    """Of a process that runs a benchmark, or a part of it, in one thread.

    :param script: the benchmark, resolved.
    """
    path = f"{script.parents[1] / 'src'}{os.pathsep}{script.parent}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main(benchmark: Benchmark, measure: Callable[[str, int], Mapping[str, Any]]) -> None:
    """What a script does: the benchmark, or the part of a rank, where :class:`Ranks` started it.

    :param measure: of a rank: name of the work and rows -> numbers.
    """
    if sys.argv[1:2] == [_SERVE]:
        _serve(sys.argv[2:], measure)
    else:
        benchmark.main()


def _serve(arguments: list[str], measure: Callable[[str, int], Mapping[str, Any]]) -> None:
    """Of a rank: a task a line in; what it measured a line out.

    :param arguments: count, rank and store.
    """
    count, rank, store = int(arguments[0]), int(arguments[1]), arguments[2]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    for line in sys.stdin:
        found = measure(*json.loads(line))
        print(_MARK, json.dumps(found), flush=True)


class Ranks:
    """So many processes, each a rank of :func:`main`.

    :param script: what they run, resolved; :param folder: where they find each other.
    :param errors: where what they complain of goes; None is where this process' own goes.
    :param more: of their environment.
    """

    def __init__(self, script: Path, count: int, folder: str, errors: int | None = None, **more: str) -> None:
        pipe, environment = subprocess.PIPE, {**one_thread_environment(script), **more}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), _SERVE, str(count), str(rank), f"{folder}/{count}"],
                env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip

    def run(self, task: tuple[str, int]) -> list[dict[str, Any]]:
        """What each rank measured."""
        for process in self.processes:
            assert process.stdin is not None
            print(json.dumps(task), file=process.stdin, flush=True)
        return [self._answer(process) for process in self.processes]

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise RuntimeError("a rank ended")

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)


def served(
    script: Path, counts: Sequence[int], tasks: Sequence[tuple[str, Any]], errors: int | None = None, **more: str
) -> Iterator[Group]:
    """One group of tasks, for which so many ranks wait as each of ``counts`` says, until all are done.

    What is loaded is the ranks by their number; the rest is as :class:`Ranks` has it.
    """
    held: dict[int, Ranks] = {}
    with tempfile.TemporaryDirectory() as folder:

        def load() -> dict[int, Ranks]:
            held.update({count: Ranks(script, count, folder, errors, **more) for count in counts})
            return held

        try:
            yield Group(("runs",), tasks, load=load)
        finally:
            for ranks in held.values():
                ranks.end()

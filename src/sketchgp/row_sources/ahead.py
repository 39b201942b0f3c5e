"""Reading ahead: one thread reads the next block while the last one is computed with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def ahead(reads: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Yield the results of functions in their order, computed ahead by another thread after the first two.

    One result is in use and one waits or is computed, never more.  A single one needs no thread.  An error is raised in
    place of the result.  The thread works on the CUDA streams that are current at the first result: copies to a device
    are complete before later computations on that stream, which owns their memory.
    """
    left = iter(reads)
    first, second = next(left, None), next(left, None)
    if first is None:
        return
    if second is None:
        yield first()
        return
    with _Reader() as submit:
        waiting: deque[Future[Result]] = deque((submit(first), submit(second)))
        for read in left:
            yield waiting.popleft().result()
            waiting.append(submit(read))
        yield waiting.popleft().result()
        last = waiting.popleft().result()
    yield last  # the thread has ended, whether anybody asks for more or not


class _Reader:
    """One thread, which ends with the block, whether everything was read or not."""

    def __enter__(self) -> Callable[[Callable[[], Result]], Future[Result]]:
        streams = _streams()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="sketchgp-rows", initializer=_use, initargs=(streams,))
        return self.pool.submit

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def _streams() -> list[torch.cuda.Stream]:
    """The current streams of this thread that are not the default ones, which every thread begins with."""
    if not torch.cuda.is_initialized():
        return []
    devices = range(torch.cuda.device_count())
    pairs = [(torch.cuda.current_stream(device), torch.cuda.default_stream(device)) for device in devices]
    return [current for current, default in pairs if current != default]


def _use(streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.set_stream(stream)

"""Reading ahead: one thread reads the next block while the last one is computed with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def ahead(reads: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """What functions return, in their order, all but the first two called by one thread beside this one.

    A result is in use and one waits, or is being read: never more.  A single one is read without a thread.  What a
    function raises is raised where its result would have come.
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
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="sketchgp-rows")
        return self.pool.submit

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

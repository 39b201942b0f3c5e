"""Ctrl-C between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class DeferredInterrupt:
    """Notes the first Ctrl-C in ``seen``; the second one is noted in ``again`` and raises KeyboardInterrupt at once.

    Only the main thread can change how signals are handled, and a handler of the user's is left in place: there
    nothing changes.
    """

    def __init__(self) -> None:
        self.seen = self.again = False
        self._before: Any = None

    def __enter__(self) -> DeferredInterrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.seen:
            self.again = True
            raise KeyboardInterrupt
        self.seen = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

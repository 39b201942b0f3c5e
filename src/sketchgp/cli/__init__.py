"""The command line: ``python -m sketchgp demo | fit | predict | info``, one module a command."""

from __future__ import annotations

import importlib
import io
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from ..cards import shows_progress
from ..errors import SketchGPError

__all__ = ["main"]
EVERY = 4.0  # seconds between two lines of a command where no bar may be seen


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning as one line, without its place in the package."""
    print(f"warning: {message}", file=sys.stderr)


@contextmanager
def _signs_of_life(wanted: bool) -> Iterator[None]:
    """Print the time every few seconds of the block, above the progress bar if there is one."""
    done, start = threading.Event(), time.perf_counter()

    def repeat() -> None:
        while not done.wait(EVERY):
            tqdm.write(f"  ... {time.perf_counter() - start:.0f} s")

    thread = threading.Thread(target=repeat, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    :param arguments: the words after ``python -m sketchgp``; those of this process when None.
    :returns: 0 when all went well; 2 for bad input (one line on stderr, no traceback); 130 when stopped by
        Ctrl-C.
    """
    from .options import build_parser

    options = build_parser(str(vars(sys.modules["sketchgp"])["__version__"])).parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a line is seen when it is printed, through a pipe too
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            with _signs_of_life(options.command == "demo" or not shows_progress(None)):
                importlib.import_module(f".{options.command}", __name__).run(options)
            return 0
    except SketchGPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        sys.stderr.close()
        return 1

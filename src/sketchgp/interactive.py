"""Whether someone is watching: in a terminal or a notebook."""

from __future__ import annotations

import sys


def shows_progress(asked: bool | None) -> bool:
    """Whether to show a progress bar: as asked, or where it is None in a terminal and in a Jupyter notebook."""
    return asked if asked is not None else sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None or "ipykernel" not in sys.modules else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")

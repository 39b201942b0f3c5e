"""Detect whether someone is watching, in a terminal or a notebook."""

from __future__ import annotations

import sys


def shows_progress(asked: bool | None) -> bool:
    """Return ``asked``; where it is None, return whether this is a terminal or a Jupyter notebook."""
    return asked if asked is not None else sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, without importing anything."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None or "ipykernel" not in sys.modules else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")

"""What the readers of tables are told of the cells that they read, and what a reader is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cells:
    """What is expected of the cells that are read.

    :param may_lack: columns in which a value may be missing (an empty cell, say); it is then NaN.
    :param drop: whether the command can leave columns out by ``--drop``, for messages.
    """

    may_lack: tuple[str, ...] = ()
    drop: bool = True

    def or_drop(self, names: str) -> str:
        """The end of an advice."""
        return f", or leave it out with --drop {names}" if self.drop else ""


# A reader takes the names of the wanted columns, and returns their values, (rows, columns) in float64.
Reader = Callable[[Sequence[str], Cells], np.ndarray]

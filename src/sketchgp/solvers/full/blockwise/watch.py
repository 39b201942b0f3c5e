"""What is done where the residual of a blockwise solve grows, or no longer falls."""

from __future__ import annotations

import math

from ....errors import NumericalError
from ....report import Reason
from ...loop import largest_of
from .method import BlockMethod
from .state import State

NAN = "A product with the kernel matrix gave NaN or infinity; check inputs and kernel."

_DIVERGED = 1e3  # residual, relative to y and to that of the start
_SHRUNK = 10  # times that a step is made smaller
_PLATEAU = 1e-7  # residual below which float64 products may allow no progress
_PATIENCE = 20  # passes without progress
_PROGRESS = 0.9  # of the least residual before


def watch_growth(state: State, method: BlockMethod, tol: float, largest: float, width: int, notes: list[str]) -> None:
    """Shrink the step of a method that can, where the residual grows; a method that cannot must not diverge.

    :param largest: the residual as estimated now; :param width: right-hand sides; :param notes: of
        the report.
    :raises NumericalError: for NaN, and for growth that a smaller step does not cure; where float32 products were
        corrected before, it is them, and the solve ends.
    """
    largest, start = largest if math.isfinite(largest) else math.inf, max(1.0, largest_of(state.first))
    before = state.least if math.isfinite(state.least) else largest_of(state.first)
    if method.growth is None:
        growing, helped = largest > _DIVERGED * start, False
    else:
        growing = largest > method.growth * max(state.least, tol)
        helped = state.shrunk < _SHRUNK
    if largest == math.inf and method.growth is None:
        raise NumericalError(NAN, see="nan")
    if growing and not helped and state.corrections and largest < math.inf:
        state.reason = Reason.STAGNATED
        return
    if growing and not helped:
        raise NumericalError(
            f"{method.name} diverges: the relative residual grew from {before:.1e} to {largest:.1e}. {method.advice}",
            see="diverges",
        )
    if growing:
        notes.append(f"the residual grew from {before:.1e} to {largest:.1e}; went on with a smaller step")
        state.shrunk, state.least = state.shrunk + 1, largest
        method.shrink_step()
        if largest > start:
            method.begin(width)
            state.least = start
    state.least = min(state.least, largest)


def plateau(state: State, largest: float, n: int) -> bool:
    """Whether the residual, estimated as ``largest``, is tiny and has not fallen for many passes."""
    if largest < _PROGRESS * state.lowest:
        state.lowest, state.lowest_at = largest, state.rows_seen
    if state.lowest > _PLATEAU or state.rows_seen - state.lowest_at <= _PATIENCE * n:
        return False
    state.lowest_at = state.rows_seen  # to look again as many passes later
    return True


def stuck(true: float, before: float) -> bool:
    """Whether a true residual on a plateau is as small as it gets."""
    return true < _PLATEAU and true > _PROGRESS * before

"""Engines: the ways to multiply by a kernel matrix, one file each, behind one small interface (``base.Engine``)."""

from __future__ import annotations

import torch

from ...checks import word
from ...errors import InputError
from ..pairs import Pairs
from .automatic import Situation, automatic
from .base import Engine
from .keops import KeOps
from .tiled import Dense, Tiled
from .triton import Triton

DENSE, TILED, KEOPS, TRITON = Dense(), Tiled(), KeOps(), Triton()
_NAMED: dict[str, Engine] = {engine.name: engine for engine in (DENSE, TILED, KEOPS, TRITON)}
ENGINES = ("auto", *_NAMED)
PRECISIONS = tuple(dict.fromkeys(name for engine in _NAMED.values() for name in engine.precisions))


def check_choice(
    owner: str, engine: str, precision: str, names: tuple[str, str] = ("matmul", "matmul_precision")
) -> None:
    """Check an engine and a precision.

    :param names: their names as arguments.
    :raises InputError: for an unknown engine or precision, or two that do not go together.
    """
    word(owner, names[0], engine, ENGINES)
    word(owner, names[1], precision, PRECISIONS)
    if precision not in (Engine if engine == "auto" else _NAMED[engine]).precisions:
        raise InputError(
            f"{owner}: {names[1]}={precision!r} needs {names[0]}='triton'; {names[0]}={engine!r} has 'float32' only."
        )


def check_present(engine: str, device: torch.device, dtype: torch.dtype) -> None:
    """Check that a named engine can be used with a device and dtype.

    :raises InputError: if it cannot.
    """
    if engine in _NAMED:
        _refuse(engine, _NAMED[engine].absent(device, dtype))


def check_able(pairs: Pairs) -> None:
    """Check that the named engine can take these pairs.

    :raises InputError: if it cannot.
    """
    if pairs.engine != "auto":
        streamed = "it needs all rows in memory" if pairs.sources and pairs.engine != TILED.name else None
        _refuse(pairs.engine, streamed or _NAMED[pairs.engine].missing(pairs))


def _refuse(engine: str, reason: str | None) -> None:
    if reason is not None:
        raise InputError(f"matmul={engine!r} cannot be used here: {reason}. Use matmul='auto'.")


def choose(pairs: Pairs) -> Engine:
    """The engine of a product: the one that was named, else the fastest that applies.

    A named engine that cannot take a variant of its matrix (its float64 copy, say) is replaced by tiles.
    """
    if pairs.sources:
        return TILED
    if pairs.engine != "auto":
        engine = _NAMED[pairs.engine]
        return engine if engine.missing(pairs) is None else TILED
    square = pairs.same  # a rectangular block is used once: storing it would gain nothing
    fits = square and DENSE.fits(pairs)
    fused = None if fits or pairs.device.type != "cuda" else TRITON.missing(pairs)
    return _NAMED[automatic(Situation(pairs.device.type, square, fits, fused))[0]]

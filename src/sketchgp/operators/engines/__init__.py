"""Engines: the ways to multiply by a kernel matrix, one file each, behind one small interface (``base.Engine``)."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from ...checks import word
from ...errors import InputError
from ..pairs import Pairs
from .base import Engine
from .fused import FUSED
from .lattice import Lattice
from .near_and_far import NearAndFar
from .tiled import TILED, Dense
from .triton import Triton

DENSE, LATTICE, NEAR_AND_FAR, TRITON = Dense(), Lattice(), NearAndFar(), Triton()
NAMED: dict[str, Engine] = {e.name: e for e in (DENSE, FUSED, LATTICE, NEAR_AND_FAR, TILED, TRITON)}
FAST = (LATTICE, NEAR_AND_FAR)  # their products take far fewer than n^2 operations
Matmul = Literal["auto", "dense", "fused", "lattice", "near_and_far", "tiled", "triton"]
ENGINES: tuple[str, ...] = get_args(Matmul)
PRECISIONS = tuple(dict.fromkeys(name for engine in NAMED.values() for name in engine.precisions))


def check_choice(
    owner: str, engine: str, precision: str, names: tuple[str, str] = ("matmul", "matmul_precision")
) -> None:
    """Check an engine and a precision.

    :param names: their names as arguments.
    :raises InputError: for an unknown engine or precision, or two that do not go together.
    """
    word(owner, names[0], engine, ENGINES)
    word(owner, names[1], precision, PRECISIONS)
    if precision not in (Engine if engine == "auto" else NAMED[engine]).precisions:
        raise InputError(
            f"{owner}: {names[1]}={precision!r} needs {names[0]}='triton'; {names[0]}={engine!r} has 'float32' only."
        )


def check_present(engine: str, device: torch.device, dtype: torch.dtype) -> None:
    """Check that a named engine can be used with a device and dtype.

    :raises InputError: if it cannot.
    """
    if engine in NAMED:
        _refuse(engine, NAMED[engine].absent(device, dtype))


def check_able(pairs: Pairs) -> None:
    """Check that the named engine can take these pairs.

    :raises InputError: if it cannot.
    """
    if pairs.engine != "auto":
        streamed = "it needs all rows in memory" if pairs.sources and pairs.engine != TILED.name else None
        _refuse(pairs.engine, streamed or NAMED[pairs.engine].missing(pairs))


def _refuse(engine: str, reason: str | None) -> None:
    if reason is not None:
        raise InputError(f"matmul={engine!r} cannot be used here: {reason}. Use matmul='auto'.")


def choose(pairs: Pairs, columns: int = 1) -> Engine:
    """Return the engine of a product with some columns: the one that was named, else the fastest that applies.

    That points lie on a lattice, or in few dimensions, is found from their coordinates (``serves``).
    A named engine that cannot take a variant of its matrix (its points beside others, say) is replaced by tiles.
    Tiles and one pass, which store nothing, replace each other where the user named neither.
    """
    if pairs.sources:
        return TILED
    if pairs.engine != "auto":
        engine = NAMED[pairs.engine]
        if engine in (FUSED, TILED) and not pairs.asked:
            return FUSED if FUSED.serves(pairs, columns) else TILED
        return engine if engine.missing(pairs) is None else TILED
    for fast in FAST:
        if fast.serves(pairs, columns):
            return fast
    fits = pairs.same and DENSE.fits(pairs)  # a rectangular block is used once: storing it would gain nothing
    return DENSE if fits and not FUSED.serves(pairs, columns, stored=True) else unstored(pairs, columns)


def unstored(pairs: Pairs, columns: int = 1) -> Engine:
    """Return the fastest engine that evaluates all pairs in each product."""
    if FUSED.serves(pairs, columns):
        return FUSED
    return TRITON if pairs.device.type == "cuda" and TRITON.missing(pairs) is None else TILED

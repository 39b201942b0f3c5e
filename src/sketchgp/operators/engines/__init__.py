"""Engines: the ways to multiply by a kernel matrix, one file each, behind one small interface (``base.Engine``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from gpytorch.kernels import Kernel

from ...checks import count, number, word
from ...errors import InputError
from ...memory import available_memory, in_words
from ...settings import SHARE, memory_budget
from ..expression import recognise
from ..pairs import Pairs
from .base import Engine
from .fused import Fused
from .lattice import Lattice
from .near_and_far import NearAndFar
from .tiled import Dense, Tiled
from .triton import Triton

DENSE, FUSED, LATTICE, NEAR_AND_FAR = Dense(), Fused(), Lattice(), NearAndFar()
TILED, TRITON = Tiled(), Triton()
_ALL = (DENSE, FUSED, LATTICE, NEAR_AND_FAR, TILED, TRITON)
NAMED: dict[str, Engine] = {engine.name: engine for engine in _ALL}
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
    """The engine of a product with some columns: the one that was named, else the fastest that applies.

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
    square = pairs.same  # a rectangular block is used once: storing it would gain nothing
    fits = square and DENSE.fits(pairs)
    fused = None if fits or pairs.device.type != "cuda" else TRITON.missing(pairs)
    return NAMED[automatic(pairs.device.type, square, fits, fused, FUSED.serves(pairs, columns, fits))[0]]


def automatic(device: str, square: bool, fits: bool, fused: str | None, one_pass: bool) -> tuple[str, str]:
    """Return the name of the engine of ``matmul="auto"``, and the reason.

    :param square: whether x1 and x2 are the same points.
    :param fits: whether the matrix is stored already, or fits the memory budget.
    :param fused: why the fused kernel cannot take it, as half a sentence; None where it can.
    :param one_pass: whether the engine ``"fused"`` can take it and is faster than others.
    """
    if one_pass:
        return "fused", f"one pass in registers takes less time than {'reading a stored matrix' if fits else 'tiles'}"
    if square and fits:
        return "dense", "the matrix fits the memory budget: it is stored at the first product and read from then on"
    kept = "is too large to be stored" if square else "of two sets of points is used once and not stored"
    if device == "cuda" and fused is None:
        return "triton", f"the matrix {kept}, and the fused kernel knows the kernel"
    reason = "the fused kernel runs on CUDA only"
    if device == "cuda":
        reason = f"the fused kernel cannot be used: {fused}"
    return "tiled", f"the matrix {kept}, and {reason}"


@dataclass(frozen=True)
class EnginePreview:
    """Result of :func:`preview_engine`.

    :ivar engine: what ``matmul="auto"`` would take; :ivar reason: why, as half a sentence.
    :ivar matrix_bytes: of the stored matrix; :ivar budget: bytes that it may take.
    :ivar vector_bytes: of features, right-hand sides and results, whatever the engine.
    :ivar checked: whether the engine compares its first product of a kind with tiles in float64.
    """

    engine: str
    reason: str
    matrix_bytes: int
    budget: int
    vector_bytes: int
    checked: bool
    problem: str

    def __str__(self) -> str:
        lines = [
            self.problem,
            f"  the matrix: {in_words(self.matrix_bytes)}; budget for it: {in_words(self.budget)}; "
            f"inputs and vectors: {in_words(self.vector_bytes)}",
            f"  matmul='auto' takes {self.engine!r}: {self.reason}",
        ]
        if self.checked:
            lines.append(
                "  its first product of a kind is checked against tiles in float64, which replace it if it fails"
            )
        return "\n".join(lines)


def preview_engine(
    kernel: Kernel,
    n: int,
    d: int,
    columns: int = 1,
    dtype: torch.dtype = torch.float32,
    device: Literal["cpu", "cuda"] = "cuda",
    memory: float | None = None,
    square: bool = True,
) -> EnginePreview:
    """Return the engine that ``matmul="auto"`` would take for ``k(x, x)``, also on a device that is not there.

    Products decide from the same facts, but for two: the free memory of an absent device is given by ``memory``, and
    Triton counts as installed, as in PyTorch's CUDA builds.  Nothing is computed or timed.

    :param kernel: a GPyTorch kernel.
    :param n: rows of x; :param d: features; :param columns: of what the matrix is multiplied by.
    :param dtype: of x.
    :param device: ``"cuda"`` or ``"cpu"``.
    :param memory: bytes that are free there; None for what is free now.
    :param square: whether the matrix is that of one set of points; else ``n x n`` of two sets.
    :raises InputError: for anything else, and for an absent device without ``memory``.
    """
    for name, value in (("n", n), ("d", d), ("columns", columns)):
        count("preview_engine", name, value)
    if device not in ("cpu", "cuda"):
        raise InputError(f"preview_engine: device expects 'cpu' or 'cuda', got {device!r}.")
    there = device == "cpu" or torch.cuda.is_available()
    if memory is None and not there:
        raise InputError("preview_engine: memory expects the free bytes of the device, which is not there to be asked.")
    given = memory is not None
    free = int(number("preview_engine", "memory", memory, least=1, finite=True)) if given else available_memory(device)
    budget = free // SHARE if given else memory_budget.value(device)
    size = n * n * (4 if dtype.itemsize < 4 else dtype.itemsize)
    expression = recognise(kernel)
    fused = TRITON.unsuited(kernel, expression is not None, dtype)
    if fused is None and there:
        fused = TRITON.absent(torch.device(device), dtype)
    fits = size <= budget
    pays = FUSED.pays(expression, n * n, d, dtype, columns, fits and square)
    one_pass = pays and FUSED.absent(torch.device(device), dtype) is None
    engine, reason = automatic(device, square, fits, fused, one_pass)
    words = f"{str(dtype).removeprefix('torch.')} on {device} with {in_words(free)} free{' (as given)' * given}"
    return EnginePreview(
        engine=engine,
        reason=reason,
        matrix_bytes=size,
        budget=budget,
        vector_bytes=n * (d * (1 if square else 2) + 2 * columns) * dtype.itemsize,
        checked=engine in ("fused", "triton"),
        problem=f"{type(kernel).__name__}, {n:,} points, {d} features, {columns} columns, {words}",
    )

"""``RowSource``: rows of a table on disk, as tensors, whenever they are needed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..checks import copied
from ..checks import dtype as check_dtype
from ..devices import here, queued
from ..errors import InputError
from ..settings import memory_budget
from .tables import check_numbers, is_arrow, table_of

Result = TypeVar("Result")


def ahead(reads: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Yield the results of functions in their order, computed ahead by another thread after the first two.

    One result is in use and one waits or is computed, never more.  A single one needs no thread.  An error is raised in
    place of the result.  The thread works on the CUDA streams that are current at the first result: copies to a device
    are complete before later computations on that stream, which owns their memory.
    """
    left = iter(reads)
    if len(first := [*islice(left, 2)]) < 2:
        yield from (read() for read in first)
        return
    with ThreadPoolExecutor(1, "sketchgp-rows", _use, (_streams(),)) as thread:
        waiting = deque(map(thread.submit, first))
        for read in left:
            yield waiting.popleft().result()
            waiting.append(thread.submit(read))
        yield waiting.popleft().result()
    yield waiting.popleft().result()  # the thread has ended, whether anybody asks for more or not


def _streams() -> list[torch.cuda.Stream]:
    """The current streams of this thread that are not the default ones, which every thread begins with."""
    if not torch.cuda.is_initialized():
        return []
    devices = range(torch.cuda.device_count())
    pairs = [(torch.cuda.current_stream(device), torch.cuda.default_stream(device)) for device in devices]
    return [current for current, default in pairs if current != default]


def _use(streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.set_stream(stream)


_LEAST_BYTES, _MOST_BYTES = 2**16, 2**25  # of a block of rows
_SHARE = 8  # of the memory budget that a block is in between: about so many of its size are held, all in all
_TYPES: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


class RowSource:
    """The rows of a table ``(n, d)`` that stays where it is, read as tensors when they are needed.

    A problem reads the rows whole, once, where they are within the memory budget
    (:class:`sketchgp.settings.memory_budget`; without one a quarter of the memory that is free on the device), and
    everything is then as with a tensor.  Else it *streams*: solvers read blocks of rows (an eighth of the budget, from
    64 KiB to 32 MiB), the next one by a thread of its own while the last one is computed with.  Rows with NaN or
    infinity raise :class:`~sketchgp.InputError` when they are read, with their number.

    Problems make a source of a ``numpy.memmap`` and of whatever else they find on disk; making it oneself is for
    choosing columns, dtype or device.

    :param data: a ``numpy.memmap`` or array, a CPU tensor, a table or dataset of pyarrow's, or the path of an ``.npy``
        file or of what ``pyarrow.dataset.dataset`` opens.
    :param columns: names, of pyarrow's, or indices of the columns to read; None for all.
    :param dtype: float32 or float64, that of the rows; None for the table's own, float64 where it has neither.
    :param device: that of the rows.
    :raises InputError: for what is no table of real numbers.
    """

    requires_grad = False
    _version = 0  # of a tensor: PyTorch changed it as often

    def __init__(
        self,
        data: Any,
        columns: Sequence[str | int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._table, self._columns = table_of(data, columns)
        own = {kind: ours for ours, kind in _TYPES.items()}.get(self._table.dtype.newbyteorder("="), torch.float64)
        self.dtype = own if dtype is None else check_dtype("RowSource", "dtype", dtype)
        if self.dtype not in _TYPES:
            raise InputError(f"RowSource: dtype expects float32 or float64, got {dtype}.")
        self.device = torch.empty(0, device=device).device
        self._span = slice(0, self._table.shape[0])
        if 0 in self.shape:
            raise InputError(f"RowSource: data expects at least one row and one column, got shape {tuple(self.shape)}.")
        self._block_bytes = max(_LEAST_BYTES, min(_MOST_BYTES, memory_budget.value(self.device) // _SHARE))

    # --- what it is, in the words of a tensor ---------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """``(n, d)``."""
        d = self._table.shape[1] if self._columns is None else len(self._columns)
        return torch.Size((self._span.stop - self._span.start, d))

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """2."""
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in the dtype they are read in."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def block_rows(self) -> int:
        """Rows that are read at once."""
        return max(1, min(len(self), self._block_bytes // (self.shape[1] * self.dtype.itemsize)))

    def is_floating_point(self) -> bool:
        """Always."""
        return True

    def is_inference(self) -> bool:
        """Never."""
        return False

    def detach(self) -> RowSource:
        """The source itself: there are no gradients."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSource:
        return self

    def __repr__(self) -> str:
        return f"<RowSource {tuple(self.shape)} {self.dtype} on {self.device}>"

    def to(self, *args: Any, **kwargs: Any) -> RowSource:
        """Return the rows in another dtype, or on another device."""
        found = copy.copy(self)
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.dtype):
                found.dtype = one
            elif isinstance(one, str | torch.device):
                found.device = torch.device(one)
        return found

    # --- reading --------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        """Rows by a slice, by indices ``(k,)`` or by a mask ``(n,)``, as a tensor; also as ``[..., rows, :]``.

        :raises IndexError: for rows that are not there.
        """
        rows = index[-2] if isinstance(index, tuple) else index
        if torch.is_tensor(rows):
            return self._gathered(rows)
        if not isinstance(rows, slice):
            raise InputError(
                f"RowSource: rows are read by slices or tensors of indices, got {rows!r}; what takes tensors alone, as "
                "a model does, takes source[:], all rows."
            )
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self._gathered(torch.arange(start, stop, step))
        first = self._span.start + start
        stop = max(first, self._span.start + stop)
        return self._tensor(self._table.take(slice(first, stop)), range(first, stop))

    def index_select(self, dim: int, indices: Tensor) -> Any:
        """Rows, as a tensor, for ``dim=-2``; columns, as a source, for -1."""
        if dim in (-2, 0):
            return self._gathered(indices)
        found = copy.copy(self)
        chosen = here(indices).numpy()
        found._columns = chosen if self._columns is None else self._columns[chosen]
        return found

    def _gathered(self, indices: Tensor) -> Tensor:
        n, wanted = len(self), here(indices).numpy()
        if wanted.dtype == bool:
            if wanted.shape != (n,):
                raise IndexError(f"A mask of shape {wanted.shape} for {n} rows.")
            wanted = np.flatnonzero(wanted)
        if wanted.size and not -n <= wanted.min() <= wanted.max() < n:
            raise IndexError(f"Rows {wanted.min()} to {wanted.max()} of {n}.")
        wanted = wanted.astype(np.int64) % n + self._span.start
        order = np.argsort(wanted, kind="stable")
        found = self._table.take(wanted[order])
        return self._tensor(found, wanted[order], order)

    def _tensor(self, found: np.ndarray, numbers: Sequence[int] | np.ndarray, places: Any = slice(None)) -> Tensor:
        """:param numbers: of the rows, for the message; :param places: of the rows in the tensor."""
        found = found if self._columns is None else found[:, self._columns]
        rows = np.empty(found.shape, dtype=_TYPES[self.dtype])
        rows[places] = found  # a copy: what is mapped is read here
        if not np.isfinite(rows).all():
            bad = np.flatnonzero(~np.isfinite(rows[places]).all(axis=1))[0]
            raise InputError(f"x holds NaN or infinity, first in row {int(numbers[bad])}.")
        return queued(torch.from_numpy(rows), self.device)

    def part(self, span: slice) -> RowSource:
        """Consecutive rows, as a source."""
        found = copy.copy(self)
        found._span = slice(self._span.start + span.start, self._span.start + span.stop)
        return found

    @property
    def fits(self) -> bool:
        """Return whether all rows are within the present memory budget of their device."""
        return self.nbytes <= memory_budget.value(self.device)

    def whole(self) -> Tensor:
        """All rows, ``(n, d)``, read by blocks."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for span, rows in blocks(self):
            out[span] = rows
        return out

    def save(self, path: str | Path) -> RowSource:
        """Write the rows, by blocks, into a new ``.npy`` file, and return a source of it: rows of a file of Parquet, or
        of a compressed one, take long to find in random order.

        :raises InputError: for another ending; :raises FileExistsError: where there is a file.
        """
        path = Path(path)
        if path.suffix != ".npy":
            raise InputError(f"RowSource.save: path expects a name that ends with .npy, got {str(path)!r}.")
        path.open("xb").close()
        out = np.lib.format.open_memmap(path, mode="w+", dtype=_TYPES[self.dtype], shape=tuple(self.shape))
        for span, rows in blocks(self):
            out[span] = rows.cpu().numpy()
        out.flush()
        return RowSource(path, dtype=self.dtype, device=self.device)


def blocks(x: Tensor | RowSource, spans: Iterable[slice] | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows and the rows, in order; those of a source are read ahead.

    :param spans: the slices; None for blocks of as many as a source reads at once.
    """
    if torch.is_tensor(x):
        yield from ((span, x[span]) for span in ([slice(0, len(x))] if spans is None else spans))
        return
    if spans is None:
        step = x.block_rows
        spans = (slice(start, min(start + step, len(x))) for start in range(0, len(x), step))
    spans = list(spans)
    yield from zip(spans, ahead(partial(x.__getitem__, span) for span in spans), strict=True)


def is_source(value: Any) -> bool:
    """Return whether the rows may stay where they are: those of a :class:`RowSource`, or of what is on disk."""
    return isinstance(value, RowSource | np.memmap) or is_arrow(value)


def whole_or_source(value: Any, like: Any) -> Any:
    """A tensor of all rows where they fit, else a :class:`RowSource`; what is no source (:func:`is_source`) as it is.

    :param like: a tensor whose device the rows come to, and whose dtype where the table has neither float32 nor
        float64.
    """
    if not is_source(value):
        return value
    source = _made(value, like)
    return source.whole() if source.fits else source


def whole_targets(value: Any, like: Any) -> Any:
    """Targets ``(n,)`` or ``(n, t)`` as a tensor, where they are given as a source; what is no source as it is.

    :param like: as in :func:`whole_or_source`.
    """
    if not is_source(value):
        return value
    if not isinstance(value, np.memmap):
        return _made(value, like).whole()
    check_numbers(value.dtype, "y")
    dtype = _dtype(value, like) or (torch.float32 if value.dtype.itemsize == 4 else torch.float64)
    return copied(value, _device(like), dtype)


def _made(value: Any, like: Any) -> RowSource:
    if isinstance(value, RowSource):
        return value
    return RowSource(value, dtype=_dtype(value, like), device=_device(like))


def _dtype(value: Any, like: Any) -> torch.dtype | None:
    """Return the dtype to convert a table to; None for float32 or float64, which are kept."""
    kind = getattr(value, "dtype", None)
    floating = isinstance(kind, np.dtype) and kind.kind == "f" and kind.itemsize in (4, 8)
    return like.dtype if torch.is_tensor(like) and like.dtype in _TYPES and not floating else None


def _device(like: Any) -> torch.device | str:
    return like.device if torch.is_tensor(like) else "cpu"

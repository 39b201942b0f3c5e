"""Methods that go through their data in epochs of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...fingerprint import tensor_mark
from .checkpoint import compare_ranks
from .method import Method

_MOST = 1 - 1e-6  # of an epoch that has not ended


class ByEpochs(Method):
    """Rows of tensors come in a random order, anew in every epoch; a checkpoint holds that of the epoch under way.  A
    stream is gone through from its beginning: going on from a checkpoint skips the batches that were seen.

    What is saved: ``epoch``, ``seen``, ``rows``, ``total`` and ``order``.

    :ivar problem: with ``x``, the tensor where it is not ``streamed``.
    :ivar total: rows of an epoch, where they are known; :ivar expected: what they are taken for before.
    :ivar epoch: how many have ended; :ivar seen: batches of the one under way, ``rows`` their rows.
    :ivar order: of rows, while an epoch is under way, on the CPU.
    """

    unit = "epochs"
    expected: int | None = None

    def __init__(self, problem: Any, generator: torch.Generator, total: int | None) -> None:
        super().__init__()
        self.problem, self.generator, self.total = problem, generator, total
        self.epoch = self.seen = self.rows = 0
        self.order = torch.empty(0, dtype=torch.int64)
        self._feed: Iterator[tuple[Tensor, Tensor]] | None = None
        self._ahead: tuple[Tensor, Tensor] | None = None

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch that were not seen, by ``order`` where the data are tensors."""
        raise NotImplementedError

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch of the epoch under way, or the first one of the next epoch.

        :raises InputError: where a stream has none.
        """
        if self._feed is None:
            if not self.problem.streamed and not self.seen:
                self.order = torch.randperm(len(self.problem.x), generator=self.generator)
            self._feed = self.batches()
            self._ahead = next(self._feed, None)
        if self._ahead is None:
            if self.seen:
                raise InputError(
                    f"The stream ends within the {self.seen} batches that the checkpoint has seen of its epoch. "
                    "To go on from a checkpoint, a stream must repeat itself."
                )
            raise InputError(f"The stream gave no batch in epoch {self.epoch + 1}; it must start anew at every epoch.")
        batch = self._ahead
        if self.problem.streamed:  # a seed that was forgotten shuffles it otherwise on each rank
            where = f"batch {self.seen} of epoch {self.epoch} of the stream"
            compare_ranks(self.name, lambda: {where: tensor_mark(*batch)})
        return batch

    def batch_ends(self, rows: int) -> bool:
        """Count a batch of so many rows, fetch the next one, and return whether there is none in this epoch."""
        self.iterations += 1
        self.seen += 1
        self.rows += rows
        assert self._feed is not None
        self._ahead = next(self._feed, None)
        return self._ahead is None

    def end_epoch(self, total: int) -> None:
        """:param total: rows of an epoch, as is known now."""
        self.epoch, self.total = self.epoch + 1, total
        self.rows = self.seen = 0
        self.order, self._feed = self.order[:0].clone(), None

    @staticmethod
    def root_of_ratio(squares: Tensor, of: Tensor) -> Tensor:
        """Return the root of sums of squares over others, where these may be zero."""
        return (squares / of.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()

    @property
    def epochs(self) -> float:
        return self.epoch + self._under_way

    @property
    def work(self) -> float:
        return self.epoch + min(self._under_way, _MOST)

    @property
    def _under_way(self) -> float:
        """Share of the present epoch; 0 in the first one of a stream of unknown length."""
        return self.rows / self.data_rows if self.data_rows else 0.0

    @property
    def data_rows(self) -> int | None:  # type: ignore[override]
        return self.total or self.expected or None

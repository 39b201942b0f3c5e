"""The batches of an epoch, of tensors or of a stream, from where it was left."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...devices import sent
from ...errors import InputError
from ...row_sources import RowSource, ahead
from .problem import InducingPointProblem


def batches(
    problem: InducingPointProblem, columns: int, order: Tensor, size: int, seen: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs ``(b, d)`` and targets ``(b, columns)`` float64; a stream comes in its own batches and order.

    :param order: ``(n,)`` of the rows of tensors, or of a source, ``size`` a batch; on the CPU.
    :param seen: batches that are left out.
    :raises InputError: for a batch of a stream that does not fit.
    """
    x = problem.x
    if isinstance(x, Tensor | RowSource):
        assert problem.y is not None
        targets = problem.y.reshape(len(x), -1)
        parts = order.cpu().split(size)[seen:]
        if torch.is_tensor(x):
            for rows in (sent(part, x.device) for part in parts):
                yield x[rows], targets[rows].to(torch.float64)
            return
        inputs = ahead(partial(x.__getitem__, rows) for rows in parts)
        for rows, some in zip(parts, inputs, strict=True):
            yield some, targets[sent(rows, targets.device)].to(torch.float64)
        return
    for number, (x, y) in enumerate(problem.batches()):
        y = y.reshape(len(y), -1)
        check_columns(number, y, columns)
        if number >= seen:
            yield x, y.to(torch.float64)


def first_batch(problem: InducingPointProblem) -> tuple[Tensor, Tensor]:
    """Of a stream, as it is given.

    :raises InputError: for a stream without any, or one that does not fit.
    """
    for x, y in problem.batches():
        return x, y
    raise InputError("x expects a stream of at least one batch, got none.")


def check_columns(number: int, y: Tensor, columns: int) -> None:
    """:raises InputError: unless the targets of a batch have as many columns as those before."""
    if y.shape[1] != columns:
        raise InputError(f"y of batch {number} of the stream expects {columns} column(s) as before, got {y.shape[1]}.")

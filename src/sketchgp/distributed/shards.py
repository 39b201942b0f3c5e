"""Who holds which rows, and the four things that ranks do together: gather rows, sum, fetch rows, agree."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange


class Shards:
    """The ranks of a process group, and the consecutive rows that each of them holds of arrays of n rows.

    Of n rows the first ``n mod P`` ranks hold one more than the others; some hold none where n < P.  What is sent is
    padded to the longest share, since gloo gathers equal sizes only.  A sum is added up in an order that depends on P:
    results of as many ranks are the same to the last bit, those of another number are not.

    Every method is a collective: all ranks call it, with the same arguments but for the rows that are theirs.

    :param group: of the data, nccl or gloo; :param exchange: the words between its ranks.
    :param neighbours: how many of the ranks are on this machine.
    :ivar rank: of this process, ``count`` of how many.
    :ivar open: whether the block that they were made for has not ended.
    :ivar bytes_sent: by this rank, data alone: of a gather of N bytes in all ``N (P - 1) / P``, of a sum of N bytes
        twice that, which is what ring algorithms send.
    :ivar messages: how many collectives of data there were; before each, and elsewhere, ranks exchange words, which
        ``exchange.words`` counts.
    """

    def __init__(self, group: Any, exchange: Exchange, neighbours: int = 1) -> None:
        self.group, self.exchange, self.neighbours = group, exchange, neighbours
        self.rank, self.count = exchange.rank, exchange.count
        self.open = True
        self.bytes_sent = self.messages = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        return self

    def __reduce__(self) -> Any:  # elsewhere there are no such ranks
        return type(None), ()

    def span(self, n: int, rank: int | None = None) -> slice:
        """The rows of n that a rank holds; of this one, if none is named."""
        rank = self.rank if rank is None else rank
        share, more = divmod(n, self.count)
        start = rank * share + min(rank, more)
        return slice(start, start + share + (rank < more))

    def gather(self, own: Tensor, n: int, dim: int = -2) -> Tensor:
        """All n rows, from each rank's own: ``(..., h, t)`` to ``(..., n, t)``.

        :param dim: that of the rows, counted from the end.
        """
        if self.count == 1:
            return own
        rows = own.movedim(dim, 0)
        most = -(-n // self.count)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        whole = padded.new_empty(self.count * most, *rows.shape[1:])
        parts = list(whole.split(most)) if most else []
        self._meet("gathering", own, (*own.shape[:dim], n, *own.shape[dim:][1:]))
        if whole.numel():
            self._do(lambda: dist.all_gather(parts, padded, group=self._group_of(padded)))
            self.bytes_sent += (self.count - 1) * padded.numel() * padded.element_size()
        for rank in range(n % self.count + 1, self.count if n % self.count else 0):  # those behind shorter ones move up
            span = self.span(n, rank)
            whole[span] = parts[rank][: span.stop - span.start].clone()
        return whole[:n].movedim(0, dim)

    def sum(self, part: Tensor, spare: bool = False) -> Tensor:
        """The sum of every rank's part, the same bits on all.

        :param spare: nobody needs the part any more, so that it may become the sum; else that is a new tensor.
        """
        total = part if spare and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)
        self._meet("a sum", part, part.shape)
        if total.numel():
            self._do(lambda: dist.all_reduce(total, group=self._group_of(total)))
            self.bytes_sent += 2 * (self.count - 1) * total.numel() * total.element_size() // self.count
        return total

    def rows(self, own: Tensor, indices: Tensor, n: int) -> Tensor:
        """Rows ``(r, t)`` of an array ``(n, t)`` that ranks hold the rows ``own`` of, for indices ``(r,)``."""
        span = self.span(n)
        rows = own.new_zeros(len(indices), *own.shape[1:])
        mine = (indices >= span.start) & (indices < span.stop)
        rows[mine] = own[indices[mine] - span.start]
        return self.sum(rows)

    def agree(self, number: float, of: Callable[[list[float]], float] = lambda numbers: numbers[0]) -> float:
        """One number for all: that of rank 0, or another function of every rank's, such as ``min``."""
        return of(self.exchange.meet("a decision", float(number)))

    def same(self, tensor: Tensor, owner: int = 0, words: bool = True) -> Tensor:
        """The tensor of one rank; of one shape and dtype on all.

        :param words: False straight after another message, where no rank raises in between: all come to this one too.
        """
        copy = tensor.contiguous().clone()
        if words:
            self._meet("a broadcast", tensor, tensor.shape)
        if copy.numel():
            source = owner if self.group is None else dist.get_global_rank(self.group, owner)
            self._do(lambda: dist.broadcast(copy, source, group=self._group_of(copy)))
            self.bytes_sent += copy.numel() * copy.element_size() if self.rank == owner else 0
        return copy

    def _meet(self, what: str, tensor: Tensor, shape: Any) -> None:
        self.exchange.meet(f"{what} of {tuple(shape)} {tensor.dtype}")

    def _do(self, collective: Callable[[], Any]) -> None:
        if self.count > 1:
            self.messages += 1
            self.exchange.whole(collective)

    def _group_of(self, tensor: Tensor) -> Any:
        return self.exchange.group if tensor.device.type == "cpu" else self.group


def of_rank_0(
    shards: Shards, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Numbers and text, as JSON has them, and tensors on the CPU, by name: those of rank 0, on every rank.

    Their strides are kept, too: products of tensors that lie otherwise in memory end in other bits.  A collective; what
    the other ranks give is not looked at.  It sends all bytes once to each of them.
    """
    text = b" "
    if shards.rank == 0:
        listed = [(name, str(t.dtype).removeprefix("torch."), list(t.shape), t.stride()) for name, t in tensors.items()]
        text = json.dumps([described, listed]).encode()
    contents, listed = json.loads(_of_any_length(shards, text))
    whole = {}
    for name, kind, shape, strides in listed:
        dtype = getattr(torch, kind)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        length = last + 1 if math.prod(shape) else 0
        if shards.rank == 0:
            own = tensors[name].as_strided((length,), (1,)).view(torch.uint8)
        else:
            own = torch.empty(length * dtype.itemsize, dtype=torch.uint8, device="cpu")
        whole[name] = shards.same(own).view(dtype).as_strided(shape, strides)
    return contents, whole


def _of_any_length(shards: Shards, text: bytes) -> bytes:
    length = int(shards.agree(len(text)))
    own = torch.frombuffer(bytearray(text if shards.rank == 0 else length), dtype=torch.uint8)
    return shards.same(own).numpy().tobytes()

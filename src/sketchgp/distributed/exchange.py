"""Words that ranks exchange before they communicate: the next collective of each, or its failure.

A collective that one rank does not come to leaves the others waiting.  So before each one, every rank says in 24 bytes
that it is well, and which one it is at; a rank that raises says so instead.  All then raise, with its message.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, SketchGPError

_WELL, _FAILED = 0, 1
_KNOWN = "_sketchgp_told"  # on an error that every rank knows of
_SHOWN = 40  # characters of a fact that are shown
Result = TypeVar("Result")


class RankError(SketchGPError, RuntimeError):
    """Another rank raised, is gone, or does something else than this one."""


class Exchange:
    """The words between ranks, over a gloo group of their own on the CPU, whatever device the data are on.

    :param group: gloo; :param rank: of this process in it, :param count: of how many.
    """

    def __init__(self, group: Any, rank: int, count: int) -> None:
        self.group, self.rank, self.count = group, rank, count
        self.broken: str | None = None  # why there is nothing more to say
        self.words = 0  # how many rounds of them there were
        self.aside = 0  # a small number that this rank says with every word
        self._heard: list[int] | None = None

    def meet(self, what: str, number: float = 0.0) -> list[float]:
        """Wait until all ranks are here; the number of each.

        :param what: what comes next, which has to be the same for all.
        :raises RankError: if another rank failed, is gone, or is about to do something else.
        """
        words = self._say(_WELL, what, number)
        if all(status == _WELL and mark == _mark(what) for status, mark, _ in words):
            return [value for _, _, value in words]
        failed = [status == _FAILED for status, _, _ in words]
        texts = self._texts(what)
        if any(failed):
            why = "; ".join(f"rank {rank} raised {text}" for rank, text in enumerate(texts) if failed[rank])
        else:
            places = "; ".join(f"rank {rank} at {text}" for rank, text in enumerate(texts))
            why = f"the ranks are at different places: {places}. All have to do the same inside sharded()"
        self.broken = why
        raise mark_known(RankError(f"{why}.", see="ranks"))

    def heard(self) -> list[int] | None:
        """Return the numbers that all ranks said aside with the last word; None where they were asked for before."""
        heard, self._heard = self._heard, None
        return heard

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank raises ``error``, unless they know."""
        if getattr(error, _KNOWN, False) or self.broken is not None:
            return
        mark_known(error)
        try:
            self._say(_FAILED, "", 0.0)
            self._texts(f"{type(error).__name__}: {str(error).removesuffix('.')}")
        except RankError:  # there is nobody to tell
            pass
        self.broken = "this rank raised before"

    def alike(self, owner: str, facts: dict[str, str]) -> None:
        """:param facts: what has to be the same on all ranks, by names that a message can use.

        :raises InputError: on every rank, with what differs.
        """
        marks = self.meet(f"the comparison by {owner}", number_of("\n".join(f"{k}: {v}" for k, v in facts.items())))
        if all(mark == marks[0] for mark in marks):
            return
        texts = self._texts("\0".join(f"{name}\1{value}" for name, value in facts.items()))
        each = [dict(fact.split("\1", 1) for fact in text.split("\0")) for text in texts]
        first, differences = each[0], []
        for rank, other in enumerate(each[1:], start=1):
            names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            differing = " and ".join(_described(name, first.get(name, ""), other.get(name, "")) for name in names)
            differences += [f"rank {rank} differs from rank 0 in {differing}"] if names else []
        raise mark_known(
            InputError(f"{owner}: {'; '.join(differences)}. Every rank expects the same data, kernel and versions.")
        )

    def _say(self, status: int, what: str, number: float) -> list[tuple[int, int, float]]:
        self.words += 1
        if self.broken is not None:
            raise mark_known(RankError(f"The ranks can do nothing more together: {self.broken}.", see="ranks"))
        bits = struct.unpack("<q", struct.pack("<d", number))[0]
        own = torch.tensor([status + 2 * self.aside, _mark(what), bits], device="cpu")  # whatever the default device is
        words = [word.tolist() for word in self.gathered(own)]
        self._heard = [s // 2 for s, _, _ in words]
        return [(s % 2, mark, struct.unpack("<d", struct.pack("<q", bits))[0]) for s, mark, bits in words]

    def _texts(self, text: str) -> list[str]:
        """One text of every rank, of any length."""
        encoded = text.encode()
        lengths = [int(one) for one in self.gathered(torch.tensor([len(encoded)], device="cpu"))]
        padded = bytearray(encoded.ljust(max(1, *lengths)))
        texts = self.gathered(torch.frombuffer(padded, dtype=torch.uint8))
        return [bytes(part[:n].tolist()).decode() for part, n in zip(texts, lengths, strict=True)]

    def gathered(self, own: Tensor) -> list[Tensor]:
        """The tensor of each rank, all of one shape, on the CPU."""
        if self.count == 1:
            return [own]
        parts = [torch.empty_like(own) for _ in range(self.count)]
        self.whole(lambda: dist.all_gather(parts, own, group=self.group))
        return parts

    def whole(self, collective: Callable[[], Result]) -> Result:
        """A collective; where a rank is gone, what torch.distributed says of it.

        :raises RankError: if it fails.
        """
        try:
            return collective()
        except RuntimeError as error:
            self.broken = "communication failed"
            message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise mark_known(RankError(f"A rank is gone, or did not come in time: {message}", see="ranks")) from error


def mark_known(error: Any) -> Any:
    """Return the error, marked as one that every rank knows of."""
    setattr(error, _KNOWN, True)
    return error


def _described(name: str, first: str, other: str) -> str:
    if len(first) > _SHOWN or len(other) > _SHOWN:
        return name
    return f"{name} ({other or 'none'} and {first or 'none'})"


def _mark(text: str) -> int:
    """A hash of a text, as a signed number of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def number_of(text: str) -> float:
    """A hash of a text of 52 bits, as a whole number."""
    return float(_mark(text) & (2**52 - 1))

"""A process group for ranks that torchrun has started, whether for the first time or again.

The store through which ranks learn each other's addresses is held by torchrun's agent, and where it is shared with the
agents' own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1) it outlives them: ranks that are started again may find the
addresses of those that are gone, and cannot connect (https://github.com/pytorch/pytorch/issues/135712).  The number of
restarts, by which they could be told apart, is counted by each agent for itself.  So the ranks first find a name that
none has used before, and everything else has its place under that.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .exchange import RankError

_ROOM = "sketchgp"
_PAUSE = 0.01  # seconds between two looks


def start(limit: timedelta) -> None:
    """Initialise ``torch.distributed`` by the environment that torchrun has set.

    :raises RankError: if another rank does not come in time.
    """
    store, rank, count = next(iter(dist.rendezvous("env://", timeout=limit)))
    name = meet(store, rank, count, limit)
    dist.init_process_group(store=dist.PrefixStore(name, store), rank=rank, world_size=count)


def meet(store: Any, rank: int, count: int, limit: timedelta) -> str:
    """A name that these ranks alone know, whatever earlier ones have left in the store.

    A rank leaves a word that is new at its place, and rank 0 answers every word that it finds there with the name; only
    who lives can have the answer to its own word, and says so under the name.
    """
    own, deadline = f"{_ROOM} {secrets.token_hex(8)}", time.monotonic() + limit.total_seconds()
    if rank:
        store.set(f"{_ROOM} rank {rank}", own)
        try:
            name: str = store.get(f"answer to {own}").decode()  # waits for it
        except RuntimeError as error:
            message = f"Rank 0 is gone: it did not come within {limit.total_seconds():g} s."
            raise RankError(message, see="ranks") from error
        store.set(f"{name} has {rank}", b"1")
        return name
    answered, missing = set[str](), set(range(1, count))
    while missing:
        for other in sorted(missing):
            place = f"{_ROOM} rank {other}"
            word = store.get(place).decode() if store.check([place]) else None
            if word is not None and word not in answered:
                store.set(f"answer to {word}", own)
                answered.add(word)
        missing = {other for other in missing if not store.check([f"{own} has {other}"])}
        if missing and time.monotonic() > deadline:
            message = f"A rank is gone: {sorted(missing)} did not come within {limit.total_seconds():g} s."
            raise RankError(message, see="ranks")
        time.sleep(_PAUSE if missing else 0)
    return own

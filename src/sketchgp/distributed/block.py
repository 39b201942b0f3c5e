"""``with sketchgp.distributed.sharded():`` the block in which ranks work together, and what it holds them to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ..checks import number
from ..errors import InputError
from ..settings import agreeing_on_budgets
from .exchange import Exchange, RankError, mark_known, number_of
from .shards import Shards

_PACKAGES = ("torch", "gpytorch", "linear_operator", "sketchgp")
_ROOM = "sketchgp"  # in the store of torchrun
_PAUSE = 0.01  # seconds between two looks
_shards: ContextVar[Shards | None] = ContextVar("sketchgp_shards", default=None)


def in_force() -> Shards | None:
    """The ranks of the block that this is called in; None outside of one, and where there is one rank only.

    What runs in a copy of the block's context when the block has ended is outside of it.
    """
    shards = _shards.get()
    return shards if shards is not None and shards.open else None


@contextmanager
def sharded(group: Any = None, timeout: float = 1800.0) -> Iterator[Shards]:
    """Share out what is computed inside among the ranks of a process group: one program, run by each of them.

    Every rank builds the same model or problem from the same data and makes the same calls in the same order; each
    gets the whole result.  Products with kernel matrices and their gradients, RPCholesky factors and what is made of
    them are shared out by rows.  Nothing else changes: outside of the block, and with one rank, results are the same to
    the last bit as without it.

    Started by ``torchrun``, it initialises the process group where that was not done (and ends it again); in a plain
    ``python`` process without one it does nothing.

    A rank that raises inside makes all of them raise, with its message.  Ranks of which one is gone raise at once, or
    after ``timeout``; ``torchrun --max-restarts`` starts them again, and what has a ``checkpoint`` goes on from it.

    :param group: ``torch.distributed`` process group, None for that of all processes.
    :param timeout: seconds that a rank is waited for, wherever ranks communicate.
    :yields: the :class:`Shards`, with ``rank``, ``count`` and ``bytes_sent``.
    :raises InputError: inside of another such block; where the ranks have other versions, instruction sets or numbers
        of threads, since what all of them compute alike would then differ; where ``WORLD_SIZE`` says that there are
        other processes, and no process group was initialised.
    :raises RankError: if another rank raised, is gone, or does something else.
    """
    number("sharded", "timeout", timeout, above=0, finite=True)
    if in_force() is not None:
        raise InputError("sharded: a block inside of another one; one for the whole program is enough.")
    limit = timedelta(seconds=timeout)
    ours = _initialised(group, limit)
    try:
        alone = not dist.is_available() or not dist.is_initialized()
        count = 1 if alone else dist.get_world_size(group)
        rank = 0 if alone else dist.get_rank(group)
        if rank < 0:
            raise InputError("sharded: group expects a process group that this process is a rank of.")
        if count == 1:
            yield Shards(None, Exchange(None, 0, 1))
            return
        words = _words(group, limit)
        with _together(Shards(group, Exchange(words, rank, count))) as shards:
            yield shards
        if group is None:
            dist.destroy_process_group(words)
    finally:
        if ours:
            dist.destroy_process_group()


def _words(group: Any, limit: timedelta) -> Any:
    """A gloo group of the same ranks.

    That of a part of all processes is left to the end of the program: torch names it by its ranks, and takes the
    addresses of one that is gone for those of the next.
    """
    if group is None:
        return dist.new_group(timeout=limit, backend="gloo")
    members = dist.get_process_group_ranks(group)
    return dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=True)


def _initialised(group: Any, limit: timedelta) -> bool:
    """Initialise the process group from torchrun's environment, and return whether that had to be done."""
    if group is not None or not dist.is_available() or dist.is_initialized():
        return False
    if dist.is_torchelastic_launched():
        start(limit)
        return True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"sharded: WORLD_SIZE is {os.environ['WORLD_SIZE']}, and torch.distributed is not initialised; start the "
            "program by torchrun, or call torch.distributed.init_process_group() first."
        )
    return False


@contextmanager
def _together(shards: Shards) -> Iterator[Shards]:
    """The ranks are held to the same versions, failures and memory budgets."""
    exchange = shards.exchange
    exchange.alike("sharded", _facts())
    machines = exchange.meet("the names of machines", number_of(socket.gethostname()))
    shards.neighbours = machines.count(machines[shards.rank])

    def agreed(budget: int, measured: bool, device: torch.device) -> int:
        if not shards.open:
            return budget
        if measured and device.type == "cpu":
            budget //= shards.neighbours
        return int(shards.agree(budget, min))

    token = _shards.set(shards)
    try:
        with agreeing_on_budgets(agreed):
            yield shards
        exchange.meet("the end of sharded()")
    except BaseException as error:
        exchange.fail(error)
        mark_known(error)
        raise
    finally:
        shards.open = False
        exchange.broken = exchange.broken or "their block has ended; what was made inside of it is used up there"
        _shards.reset(token)


def _facts() -> dict[str, str]:
    facts = {f"the version of {name}": _version(name) for name in _PACKAGES}
    facts["the version of Python"] = platform.python_version()
    facts["the instruction set of the CPU"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    facts["the number of threads"] = str(torch.get_num_threads())
    if torch.cuda.is_available():
        facts["the device"] = torch.cuda.get_device_name()
    return facts


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # from a checkout
        return "unknown"


def start(limit: timedelta) -> None:
    """Initialise ``torch.distributed`` by the environment that torchrun has set, for the first time or again.

    The store through which ranks learn each other's addresses is held by torchrun's agent, and where it is shared with
    the agents' own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1) it outlives them: ranks that are started again may
    find the addresses of those that are gone, and cannot connect (https://github.com/pytorch/pytorch/issues/135712).
    Each agent counts restarts for itself, so that their number cannot tell ranks apart.  The ranks therefore first find
    a name that none has used before, and everything else has its place under that.

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

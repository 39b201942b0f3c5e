"""Devices: small numbers are fetched together, values that the CPU knows are not fetched again, float64 may be slow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Compute capabilities with half as many float64 units as float32 ones (CUDA C++ programming guide, table of
# arithmetic throughput); others, those of consumer cards among them, have a 32nd or a 64th.
_FULL = ((6, 0), (7, 0), (7, 2), (8, 0), (9, 0), (10, 0))
_SLOW = 64.0
_PINNED = 2**26  # bytes that are copied to a device from pinned memory, at the most
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of tensors on devices: their versions and values


@contextmanager
def one_thread(small: bool) -> Iterator[None]:
    """Compute on one thread of the CPU inside the block, where threads would wait for each other most of the time.

    The number belongs to the calling thread; others that run already keep theirs.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_intel() -> bool:
    """Return whether torch computes elementary functions by Intel's library, and on a processor of its maker."""
    maker = os.environ.get("PROCESSOR_IDENTIFIER", "")  # on Windows
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        maker += lines.read(2**12)
    return torch.backends.mkl.is_available() and "GenuineIntel" in maker


def version(x: Tensor) -> int:
    """Return how often torch has changed a tensor in place; 0 for one made in inference mode, which has no count."""
    return 0 if x.is_inference() else x._version


def float64_cost(device: torch.device) -> float:
    """Return how many float32 operations take the time of one in float64: 2, or 64 on consumer cards."""
    if device.type != "cuda":
        return 2.0
    return 2.0 if torch.cuda.get_device_capability(device) in _FULL else _SLOW


def fetched(*parts: Tensor) -> list[Tensor]:
    """Fetch tensors to the CPU, flattened, in float64, by one copy, so that a device is waited for once.

    Each fetch waits for all kernels in the queue, while nothing is queued.  Numbers that an iteration decides by are
    therefore fetched together at its end.

    :param parts: of any shapes; numbers that float64 holds, or bool.
    """
    flat = torch.cat([part.reshape(-1).to(torch.float64) for part in parts]).cpu()
    return list(flat.split([part.numel() for part in parts]))


def queued(values: Tensor, device: torch.device) -> Tensor:
    """Copy CPU values to a device by a queued copy; more than 64 MiB by one that is not queued.

    The copy to CUDA is from pinned memory, which torch keeps; for other memory the driver may wait first.
    """
    if device.type != "cuda" or not 0 < values.nbytes <= _PINNED:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Queue CPU values on a device; :func:`here` then knows them without waiting.  They must not be written to."""
    if device.type == "cpu":
        return values
    result = queued(values, device)
    if not result.is_inference():
        _known[result] = (version(result), values)
    return result


def here(values: Tensor) -> Tensor:
    """Return indices or a mask on the CPU.  A device is waited for once, and not at all after :func:`sent`."""
    if values.device.type == "cpu":
        return values
    if values.is_inference():  # without a version that would tell whether they changed
        return values.cpu()
    kept = _known.get(values)
    if kept is None or kept[0] != version(values):
        kept = _known[values] = (version(values), values.cpu())
    return kept[1]

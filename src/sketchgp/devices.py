"""What a computation on a device goes by: small numbers are fetched together, what the CPU knows is not fetched again,
and float64 may be slow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Compute capabilities with half as many float64 units as float32 ones (CUDA C++ programming guide, table of
# arithmetic throughput); others, those of consumer cards among them, have a 32nd or a 64th.
_FULL = ((6, 0), (7, 0), (7, 2), (8, 0), (9, 0), (10, 0))
_SLOW = 64.0
_PINNED = 2**26  # bytes that are copied to a device from pinned memory, at the most
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of tensors on devices: their versions and values


def float64_cost(device: torch.device) -> float:
    """Float32 operations that a device does in the time of one in float64: 2, or 64 on consumer cards."""
    if device.type != "cuda":
        return 2.0
    return 2.0 if torch.cuda.get_device_capability(device) in _FULL else _SLOW


def fetched(*parts: Tensor) -> list[Tensor]:
    """The parts on the CPU, flattened, in float64: by one copy, so that a device is waited for once.

    A CPU that asks for every number by itself waits for all kernels that are queued, each time, and queues nothing
    meanwhile.  So what an iteration decides by is put together and fetched where it ends.

    :param parts: of any shapes; numbers that float64 holds, or bool.
    """
    flat = torch.cat([part.reshape(-1).to(torch.float64) for part in parts]).cpu()
    return list(flat.split([part.numel() for part in parts]))


def queued(values: Tensor, device: torch.device) -> Tensor:
    """CPU values on a device, by a copy that is queued; of more than 64 MiB, by one that is not.

    On CUDA it is from pinned memory, of which torch keeps what it has: of other memory the driver may wait first.
    """
    if device.type != "cuda" or not 0 < values.nbytes <= _PINNED:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The same; :func:`here` then knows them without waiting.  Nobody may write to the values afterwards."""
    if device.type == "cpu":
        return values
    found = queued(values, device)
    if not found.is_inference():
        _known[found] = (found._version, values)
    return found


def here(values: Tensor) -> Tensor:
    """Indices or a mask on the CPU.  A device is waited for once, and not at all for what was :func:`sent`."""
    if values.device.type == "cpu":
        return values
    if values.is_inference():  # without a version that would tell whether they changed
        return values.cpu()
    kept = _known.get(values)
    if kept is None or kept[0] != values._version:
        kept = _known[values] = (values._version, values.cpu())
    return kept[1]

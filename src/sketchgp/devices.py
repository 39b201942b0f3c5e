"""What a computation on a device goes by: small numbers are fetched together, and float64 may be slow."""

from __future__ import annotations

import torch
from torch import Tensor

# Compute capabilities with half as many float64 units as float32 ones (CUDA C++ programming guide, table of
# arithmetic throughput); others, those of consumer cards among them, have a 32nd or a 64th.
_FULL = ((6, 0), (7, 0), (7, 2), (8, 0), (9, 0), (10, 0))
_SLOW = 64.0


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

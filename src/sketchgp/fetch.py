"""Several small numbers from a device at once."""

from __future__ import annotations

import torch
from torch import Tensor


def fetched(*parts: Tensor) -> list[Tensor]:
    """The parts on the CPU, flattened, in float64: by one copy, so that a device is waited for once.

    A CPU that asks for every number by itself waits for all kernels that are queued, each time, and queues nothing
    meanwhile.  So what an iteration decides by is put together and fetched where it ends.

    :param parts: of any shapes; numbers that float64 holds, or bool.
    """
    flat = torch.cat([part.reshape(-1).to(torch.float64) for part in parts]).cpu()
    return list(flat.split([part.numel() for part in parts]))

"""How a large matrix is cut into tiles that fit the cache (CPU) or the free memory (CUDA)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..settings import available_memory

_CPU_ENTRIES = 2**20  # entries a tile; measured best between 2^18 and 2^21 on CPUs with 1 to 2 MB of L2 a core
_CUDA_ENTRIES = 2**26
_CUDA_SHARE = 16  # a CUDA tile may take one part in so many of the free memory


def tile_shape(rows: int, columns: int, dtype: torch.dtype, device: torch.device, batch: int = 1) -> tuple[int, int]:
    """Rows and columns of a tile of a ``(rows, columns)`` matrix; ``batch`` matrices are cut at once."""
    entries = _CPU_ENTRIES
    if device.type == "cuda":
        entries = min(_CUDA_ENTRIES, available_memory(device) // (_CUDA_SHARE * dtype.itemsize))
    entries = max(entries // max(batch, 1), 2**12)
    width = min(columns, max(int((4 * entries) ** 0.5), 1))  # four times as wide as high
    height = min(rows, max(entries // max(width, 1), 1))
    return max(height, 1), max(width, 1)


def spans(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most ``step`` that cover ``range(length)``."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))

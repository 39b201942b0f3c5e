"""Send data that one rank has read to all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .shards import Shards


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

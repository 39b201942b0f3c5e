"""Keys that tell whether something changed: of a tensor's content, and of what a module was set up with.

A key sees every entry.  On the CPU it is a cryptographic hash of the bytes.  On other devices, where copying would cost
more than the work it saves, every 8 bytes are mixed with their place by SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014) and added up twice: 128 bits, not proof against an adversary.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

_BYTES = 2**26  # hashed at once
_MIXED = 2**22  # numbers of 8 bytes mixed at once
_PLAIN = (bool, int, float, str)  # None is what a kernel has in place of parts that it makes at its first call
_GOLDEN = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed number
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # the multipliers of SplitMix64


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """A key of shape, dtype, device and every entry of a tensor."""
    tensor = tensor.detach()
    head = (tuple(tensor.shape), str(tensor.dtype), str(tensor.device))
    for dim in reversed(range(tensor.dim())):  # what was repeated without copies is read once
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.select(dim, 0)
    if tensor.device.type != "cpu":
        return (*head, *mixed(tensor))
    digest = hashlib.blake2b(digest_size=16)
    add_bytes(digest, tensor)
    return (*head, digest.hexdigest())


def hash_tensors(*tensors: Tensor) -> str:
    """A mark of the tensors' shapes, dtypes and values, the same on every device and machine."""
    digest = hashlib.sha256()
    add_tensors(digest, *tensors)
    return digest.hexdigest()


def add_tensors(digest: Any, *tensors: Tensor) -> None:
    """Add shapes, dtypes and values to a digest of hashlib's."""
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        add_bytes(digest, tensor)


def add_bytes(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's values to a digest, some at a time."""
    flat = _flat(tensor)
    step = _BYTES // flat.dtype.itemsize
    for start in range(0, len(flat), step):
        digest.update(flat[start : start + step].cpu().view(torch.uint8).numpy())


def _flat(tensor: Tensor) -> Tensor:
    """One entry after the other; where only one is left, its stride may be 0."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def mixed(tensor: Tensor) -> tuple[int, int]:
    """Two sums mod 2^64 over the mixed bytes of a tensor, computed on its device."""
    flat = _flat(tensor).view(torch.uint8)
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), 8 * _MIXED):
        part = flat[start : start + 8 * _MIXED]
        numbers = part.new_zeros(-(-len(part) // 8) * 8)  # a copy, as it has to begin at a multiple of 8 bytes
        numbers[: len(part)] = part
        words = numbers.view(torch.int64)
        place = torch.arange(start // 8 + 1, start // 8 + 1 + len(words), device=flat.device)
        first = _mix(words + _mix(place * _GOLDEN))
        totals[0] += first.sum()
        totals[1] += _mix(first + _GOLDEN).sum()
    return int(totals[0]), int(totals[1])


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, on int64 as if unsigned."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def structure(module: Any) -> tuple[Any, ...]:
    """Types and plain settings (such as Matern's nu) of a kernel, or another module, and its parts."""
    return tuple(
        (name, type(part), *((k, v) for k, v in vars(part).items() if _is_plain(v) and k != "training"))
        for name, part in module.named_modules()
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):  # torch.Size among them
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN)


def module_key(module: Any) -> tuple[Any, ...]:
    """A key of all that a module computes from: its structure, parameters and buffers."""
    return (structure(module), *(tensor_key(t) for t in (*module.parameters(), *module.buffers())))

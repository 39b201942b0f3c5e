"""Identity of tensors and modules: keys tell whether something changed in this process, marks last in a file.

A *key* (:func:`tensor_key`, :func:`module_key`, :func:`data_key`) is compared with another of the same process.  A
*mark* (:func:`tensor_mark`, :func:`module_mark`, :func:`text_mark`) is text, the same on every device and machine.
Those of operators and kernels are in :mod:`sketchgp.operators.marks`.  A :class:`Memory` remembers values until the
tensors they were made of change.

A key of a tensor sees every entry: it is a cryptographic hash of the bytes.  Numbers of rows come from SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from .devices import version
from .row_sources import RowSource, blocks

T = TypeVar("T")
_block: ContextVar[object | None] = ContextVar("sketchgp_parameters_held", default=None)
_BYTES = 2**26  # hashed at once
_ROWS = 1024  # on disk that are part of a key
_WATCHED = 2**20  # bytes of data that are looked at at each prediction
_FUNCTIONS = (FunctionType, BuiltinFunctionType)  # such as the transform of a constraint
_PLAIN = (bool, int, float, str, *_FUNCTIONS)  # a kernel has None in place of parts that it makes at its first call
# attributes of every module, and the targets of a model
_OF_ANY = {*vars(torch.nn.Module()), "_train_targets"}
_GOLDEN = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed number
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # the multipliers of SplitMix64


def tensor_key(tensor: Tensor | RowSource) -> tuple[Any, ...]:
    """Return a key of shape, dtype, device and every entry of a tensor; of rows on disk, of evenly spaced ones."""
    head = (tuple(tensor.shape), str(tensor.dtype), str(tensor.device))
    tensor = tensor[:: -(-len(tensor) // _ROWS)] if isinstance(tensor, RowSource) else tensor.detach()
    for dim in reversed(range(tensor.dim())):  # what was repeated without copies is read once
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.select(dim, 0)
    digest = hashlib.blake2b(digest_size=16)
    add_bytes(digest, tensor)
    return (*head, digest.hexdigest())


def tensor_mark(*tensors: Tensor | RowSource) -> str:
    """Return a mark of shapes, dtypes and values of tensors; rows on disk have that of a tensor of them."""
    digest = hashlib.sha256()
    add_tensors(digest, *tensors)
    return digest.hexdigest()


def text_mark(text: str) -> str:
    """Return a mark of a text, of a fixed length."""
    return hashlib.sha256(text.encode()).hexdigest()


def add_tensors(digest: Any, *tensors: Tensor | RowSource) -> None:
    """Add shapes, dtypes and values to a digest of hashlib's."""
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        for _, rows in blocks(tensor) if isinstance(tensor, RowSource) else [(None, tensor)]:
            add_bytes(digest, rows)


def add_bytes(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's values to a digest, some at a time."""
    flat = _flat(tensor)
    step = _BYTES // flat.dtype.itemsize
    for start in range(0, len(flat), step):
        digest.update(flat[start : start + step].cpu().view(torch.uint8).numpy())


def _flat(tensor: Tensor) -> Tensor:
    """Return the entries one after the other; where there is only one, its stride may be 0."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def row_numbers(*tensors: Tensor) -> Tensor:
    """Return numbers ``(n,)``, int64 and at least 0, of what rows of tensors hold together, alike on all devices."""
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        rows = tensor.detach().to(torch.float64).reshape(len(tensor), tensor.shape[1:].numel())
        words = rows.contiguous().view(torch.int64)
        place = torch.arange(1, words.shape[1] + 1, device=words.device)
        total = _mix(total + _mix(words + _mix(place * _GOLDEN)).sum(dim=1))
    return total & (2**63 - 1)


def _mix(z: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64 as if unsigned."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def structure(module: Any) -> tuple[Any, ...]:
    """Return types and plain settings (such as Matern's nu) of a module, such as a kernel, and its parts."""
    return tuple(_plain_part(name, part)[0] for name, part in module.named_modules())


def _plain_part(name: str, part: Any) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return type and plain settings of a part, and tensors that are its plain attributes, as fixed noise is.

    What kernels cache and a model's targets are not among them.
    """
    plain, tensors = [], []
    for key, value in vars(part).items():
        if key in _OF_ANY:
            continue
        if torch.is_tensor(value):
            tensors += [] if key.startswith("_cached") else [value]
        elif _is_plain(value):
            plain.append((key, value))
    return (name, type(part), *sorted(plain, key=lambda pair: pair[0])), tensors


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):  # torch.Size among them
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN)


def module_key(module: Any, parameters: Iterable[Tensor] | None = None) -> tuple[Any, ...]:
    """Return a key of all that a module computes from: its structure, parameters and buffers.

    :param parameters: in place of its own.
    """
    tensors, parts = list(module.parameters() if parameters is None else parameters), []
    for name, part in module.named_modules():
        described, plain = _plain_part(name, part)
        parts.append(described)
        tensors += [*plain, *part.buffers(recurse=False)]
    return (*parts, *map(tensor_key, tensors))


def structure_mark(module: Any) -> str:
    """Return a mark of types and plain settings alone."""
    return text_mark(_text(structure(module)))


def module_mark(module: Any, parameters: Iterable[Tensor] | None = None) -> str:
    """Return a mark of what :func:`module_key` is a key of; classes and functions count by their names."""
    digest = hashlib.sha256(_text(structure(module)).encode())
    add_tensors(digest, *(module.parameters() if parameters is None else parameters), *module.buffers())
    return digest.hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(part) for part in value)})"
    return value.__qualname__ if isinstance(value, (type, *_FUNCTIONS)) else repr(value)


def data_key(data: Tensor) -> tuple[Any, ...]:
    """Return a key of data that are looked at often: of every entry, up to a MiB.

    Of more, whose hash would take longer than a prediction (87 ms for 40 MB), the very tensor, how often PyTorch
    changed it, and the entries of evenly spaced rows: what is written into other rows past PyTorch's counter (by
    ``.data`` or through numpy) is not seen.
    """
    size = data.numel() * data.element_size()
    if size <= _WATCHED:
        return tensor_key(data)
    return (Held(data), version(data), *tensor_key(data[:: -(-size // _WATCHED)]))


class Held:
    """Reference that equals others to the very same object, and keeps it alive."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


# --- values that are remembered until the tensors they were made of change -----------------------------------------


@contextmanager
def parameters_held() -> Iterator[None]:
    """Promise that nobody changes a kernel's parameters inside the block, as in a solve: a matrix compares them once.

    On a device each comparison would wait for its result.  Blocks may be nested; they hold for the thread they are in.
    """
    if _block.get() is not None:
        yield
        return
    token = _block.set(object())
    try:
        yield
    finally:
        _block.reset(token)


class State:
    """Versions of inputs and values of parameters, as they were when this was made.

    GPyTorch sets parameters through ``.data``, which leaves their versions as they were.
    """

    def __init__(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        self.versions, self.parameters = [*map(version, inputs)], [p.detach().clone() for p in parameters]
        self.block = _block.get()  # in which the parameters were looked at

    def holds(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
        """Return whether nothing has changed since."""
        if self.versions != [*map(version, inputs)]:
            return False
        block = _block.get()
        if block is not None and self.block is block:
            return True
        same = all(torch.equal(old, new) for old, new in zip(self.parameters, parameters, strict=True))
        if same:
            self.block = block
        return same


class Memory:
    """Values by name, each with the state of the tensors that it was made of."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[State, Any]] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._values

    def remember(
        self, name: Hashable, make: Callable[[], T], inputs: Sequence[Tensor] = (), parameters: Sequence[Tensor] = ()
    ) -> T:
        """Return the value of that name; make it where there is none, or where a tensor has changed since.

        :param inputs: tensors whose changes torch counts; :param parameters: tensors that are compared by value.
        """
        result = self._values.get(name)
        if result is None or not result[0].holds(inputs, parameters):
            self._values.pop(name, None)  # an old and a new matrix need not both fit into memory
            result = self._values[name] = (State(inputs, parameters), make())
        return result[1]

"""A device that is not there: tensors that say they are on ``cuda:0``, are computed on the CPU, and count what waits.

On a CUDA device the CPU runs ahead: it queues kernels and waits only where it needs a number.  Each such wait costs
about what a small kernel does, and while it lasts nothing is queued.  What waits: reading a value (``.item()``,
``bool``, ``.cpu()``), a shape that depends on values (boolean masks, ``nonzero``, ``unique``), a copy from the CPU
(``.to(device)``, ``torch.tensor(..., device=...)``, indices that are on the CPU), and factorizations that look at their
errors.  A computation with tensors of both devices is refused, as it is on a CUDA device.

The tensors are wrappers: whatever is computed with one is computed with the CPU tensor inside.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

import sketchgp

DEVICE = torch.device("cuda:0")
CPU = torch.device("cpu")
_PACKAGE = str(Path(sketchgp.__file__).parent)
_VALUES = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "repeat_interleave", "bincount"}
_VALUES |= {"_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
_COPIES = {"copy_", "_to_copy"}
_MAKERS = {"tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor"}
_waits: Counter[str] = Counter()


def _wait(kind: str) -> None:
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).relative_to(_PACKAGE)}:{frame.f_lineno}" if frame else "a test"
    _waits[f"{place} {kind}"] += 1


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on the device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self):
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        others: list[torch.Tensor] = []
        _each(
            lambda t: others.append(t) if isinstance(t, torch.Tensor) and not isinstance(t, OnDevice) else None,
            (args, list(kwargs.values())),
        )
        from_cpu = any(t.dim() for t in others)
        if name in _VALUES:
            _wait(name)
        elif name in _INDEXED:
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                _wait("boolean mask")
            elif from_cpu:
                _wait("copy")
        elif from_cpu and name in _COPIES:
            _wait("copy")
        elif from_cpu:
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, cuda:0 and cpu")
        found = func(*_each(_inside, args), **_each(_inside, kwargs))
        if name == "copy_" and not isinstance(args[0], OnDevice):
            return args[0]
        return return_and_correct_aliasing(func, args, kwargs, _each(_wrapped, found))


def _each(change, x):
    """The same of every part of tuples, lists and dictionaries: torch's own for trees takes half of all time here."""
    if isinstance(x, list | tuple) and not isinstance(x, torch.Size):
        return type(x)([_each(change, part) for part in x])
    if isinstance(x, dict):
        return {name: _each(change, part) for name, part in x.items()}
    return change(x)


def _inside(x):
    return x.inner if isinstance(x, OnDevice) else x


def _wrapped(x):
    return OnDevice(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) else x


class _Calls(TorchFunctionMode):
    """Calls that name a device, and those that read memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], OnDevice) else None
        if name in ("to", "cpu", "cuda", "type") and isinstance(args[0], torch.Tensor):
            return self._to(name, func, args, kwargs)
        if own is not None and name == "tolist":
            _wait(name)
            return own.inner.tolist()
        if own is not None and name in ("numpy", "data_ptr", "__array__"):
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy: {name}")
        named = kwargs.get("device")
        there = own is not None and name.startswith("new_") if named is None else torch.device(named).type == "cuda"
        if named is not None:
            kwargs["device"] = CPU
        if there and name in _MAKERS:
            if not isinstance(args[1 if own is not None and name == "new_tensor" else 0], torch.Tensor):
                _wait("copy")
            with torch._C.DisableTorchFunctionSubclass():
                return _wrapped(func(*_each(_inside, args), **kwargs))
        found = func(*args, **kwargs)
        return _each(_wrapped, found) if there else found

    def _to(self, name, func, args, kwargs):
        x, rest = args[0], list(args[1:])
        target = {"cpu": CPU, "cuda": DEVICE}.get(name)
        for given in (*rest, *kwargs.values()):
            if isinstance(given, torch.Tensor):
                target = given.device
                kwargs["dtype"] = given.dtype
            elif isinstance(given, str | torch.device) and name == "to":
                target = torch.device(given)
        rest = [r for r in rest if not isinstance(r, str | torch.device | torch.Tensor)]
        kwargs.pop("device", None), kwargs.pop("other", None)
        queued = kwargs.pop("non_blocking", False)
        here = isinstance(x, OnDevice)
        there = here if target is None else target.type == "cuda"
        if here != there:
            if here or not queued:  # a copy to the device may be queued; nothing can be read before it was copied
                _wait("copy")
            x = x.inner if here else OnDevice(x)
        elif name in ("cpu", "cuda"):
            return x
        if name in ("cpu", "cuda") or not (rest or kwargs):
            return x
        return func(x, *rest, **kwargs)


class _InPlace:
    """Reads rows where it is asked to: another thread has no simulated device."""

    def __init__(self, *_, **__):
        pass

    def submit(self, function):
        future = Future()
        future.set_result(function())
        return future

    def shutdown(self, *_, **__):
        pass


@contextmanager
def simulated_device(monkeypatch):
    """Within the block the device can be used; gives the :class:`Counter` of what waited, by place."""
    free = {"mem_get_info": (2**30, 2**31), "memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 0}
    free["get_device_capability"] = (9, 0)
    for name, answer in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    reading = sys.modules["sketchgp.row_sources.source"]
    monkeypatch.setattr(reading, "ThreadPoolExecutor", _InPlace)
    _waits.clear()
    with _Calls():
        yield _waits


def moved(x: torch.Tensor) -> torch.Tensor:
    """To the device."""
    return OnDevice(x.detach().clone())


def moved_module(module: torch.nn.Module) -> torch.nn.Module:
    """A module with its parameters and buffers on the device, in place, without gradients."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(moved(parameter), requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = moved(buffer)
    return module

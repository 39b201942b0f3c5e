"""Values that are remembered until the tensors they were made of change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..devices import version

T = TypeVar("T")
_block: ContextVar[object | None] = ContextVar("sketchgp_parameters_held", default=None)


@contextmanager
def parameters_held() -> Iterator[None]:
    """A block in which nobody changes a kernel's parameters, a solve for one: a matrix compares them once within it.

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
    """The versions of the inputs and the values of the parameters, as they were.

    GPyTorch sets parameters through ``.data``, which leaves their versions as they were.
    """

    def __init__(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        self.versions, self.parameters = _versions(inputs), [p.detach().clone() for p in parameters]
        self.block = _block.get()  # in which the parameters were looked at

    def holds(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
        """Return whether nothing has changed since."""
        if self.versions != _versions(inputs):
            return False
        block = _block.get()
        if block is not None and self.block is block:
            return True
        same = all(torch.equal(old, new) for old, new in zip(self.parameters, parameters, strict=True))
        if same:
            self.block = block
        return same


def _versions(inputs: Sequence[Tensor]) -> list[int]:
    return [version(x) for x in inputs]


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
        value: T = result[1]
        return value

"""Whether the tensors of a kernel matrix still are what they were when something was made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

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
        """Whether they are the same now."""
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
    return [0 if x.is_inference() else x._version for x in inputs]

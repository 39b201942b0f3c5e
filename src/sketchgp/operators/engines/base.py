"""Base class of engines: one way to multiply by a kernel matrix, and to differentiate such a product."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from ..pairs import Pairs

Gradients = tuple[Tensor | None, ...]


class Engine:
    """One way to compute with ``k(x1, x2)``; has no state of its own.

    :cvar name: what users type as ``matmul=``.
    :cvar precisions: the values of ``precision=`` that it knows.
    :cvar package: what :meth:`absent` says where a package is missing; None where it needs none.
    """

    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]] = ("float32",)
    package: ClassVar[str | None] = None

    def absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why no matrix of this device and dtype can be taken, as half a sentence; None where it can."""
        return None

    def missing(self, pairs: Pairs) -> str | None:
        """Return why these pairs cannot be taken, as half a sentence; None where they can."""
        return self.absent(pairs.device, pairs.dtype)

    def takes(self, pairs: Pairs) -> bool:
        """Return whether these pairs can be taken; where a package alone is missing, the log says so once."""
        missing = self.missing(pairs)
        if missing is not None and missing == self.package:
            say_missing(self.name, missing)
        return missing is None

    def resolution(self, pairs: Pairs) -> float | None:
        """Return c, where the squared distance of features a and b is wrong by at most ``c (|a|^2 + |b|^2)``.

        None stands for torch's own operations, which need no check (:mod:`.self_check`).
        """
        return None

    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        """Return ``K rhs`` for rhs ``(*b, m, t)`` of the matrix's ``compute_dtype``, without autograd.

        Here and below ``b`` is () for one matrix, and (B,) for a batch of B, however many dimensions it has.
        """
        raise NotImplementedError

    def derivative(self, pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
        """Return the gradient of ``sum_t left_t^T K right_t`` for each of the operator's tensors.

        :param left: ``(*b, n, t)``.
        :param right: ``(*b, m, t)``.
        :returns: None for each tensor that needs no gradient.
        """
        raise NotImplementedError


@cache
def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return find_spec(package) is not None


@cache
def say_missing(name: str, missing: str) -> None:
    """Say once that tiles are used in place of an engine whose package is missing."""
    logging.getLogger("sketchgp").info("Tiles take the place of the engine %r: %s", name, missing)


def folds(pairs: Pairs) -> bool:
    """Return whether a derivative may treat both sides of the matrix as one.

    K is then symmetric, and x1 and x2 are one tensor or need no gradient.
    """
    return pairs.same and (pairs.x1 is pairs.x2 or not (pairs.x1.requires_grad or pairs.x2.requires_grad))


class Live:
    """Copies of x1, x2 and the parameters (sharing memory), and what depends on them.

    :ivar tensors: the copies; where x1 is x2 they are one tensor, which then gets the gradient of both.
    :ivar needs_inputs: whether x1 or x2 needs a gradient.
    :ivar same: whether left and right features may be taken for one.
    """

    def __init__(self, pairs: Pairs) -> None:
        copies = {tensor: tensor.detach().requires_grad_(tensor.requires_grad) for tensor in pairs.tensors}
        self.tensors = [copies[tensor] for tensor in pairs.tensors]
        self.wanted = [t for t in copies.values() if t.requires_grad]
        self.needs_inputs = self.tensors[0].requires_grad or self.tensors[1].requires_grad
        self.same = folds(pairs)
        self.prepared = None
        if pairs.expression is not None and self.wanted:
            with torch.enable_grad():
                self.prepared = pairs.prepare(self.tensors, self.same)

    def pull_back(self, pairs: list[tuple[Tensor, Tensor]]) -> Gradients:
        """Return gradients for the operator's tensors, from gradients for values that depend on the copies."""
        pairs = [(value, gradient.detach()) for value, gradient in pairs if value.requires_grad]
        result: dict[Tensor, Tensor | None] = {}
        if pairs:
            values, gradients = zip(*pairs, strict=True)
            results = torch.autograd.grad(values, self.wanted, gradients, allow_unused=True)
            result = dict(zip(self.wanted, results, strict=True))
        out: list[Tensor | None] = []
        for tensor in self.tensors:  # a tensor that stands twice gets its whole gradient at the first place
            gradient = result.pop(tensor, None)
            out.append(torch.zeros_like(tensor) if gradient is None and tensor.requires_grad else gradient)
        return tuple(out)

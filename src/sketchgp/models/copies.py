"""Copies of models that share nothing with them."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch.nn import Module

from ..operators.lazies import KERNELS, take_caches

Copied = TypeVar("Copied", bound=Module)


def copied(module: Copied) -> Copied:
    """Return a deep copy.

    GPyTorch's copy of an ``InducingPointKernel`` is in training mode, and holds the likelihood of the model itself,
    which would be converted with it.  Matrices that kernels have cached are not copied.

    :raises RuntimeError, TypeError: for a module that cannot be copied.
    """
    memo: dict[int, object] = {}
    with KERNELS:
        caches = [(part, take_caches(part)) for part in module.modules()]
        try:
            twin = copy.deepcopy(module, memo)
        finally:
            for part, cached in caches:
                part.__dict__.update(cached)
    originals = {id(part) for part in module.modules()}
    for part in list(twin.modules()):
        for name, child in part._modules.items():
            if id(child) in originals and id(part) not in originals:
                part._modules[name] = copy.deepcopy(child, memo)
    modes = {name: part.training for name, part in module.named_modules(remove_duplicate=False)}
    for name, part in twin.named_modules(remove_duplicate=False):
        part.training = modes.get(name, part.training)
    return twin

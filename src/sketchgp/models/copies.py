"""Copies of models that share nothing with them."""

from __future__ import annotations

import copy
from typing import TypeVar

from gpytorch.kernels import InducingPointKernel
from torch.nn import Module

Copied = TypeVar("Copied", bound=Module)


def copied(module: Copied) -> Copied:
    """A deep copy.

    GPyTorch's copy of an ``InducingPointKernel`` is in training mode, and holds matrices that are not converted with
    it and the likelihood of the model itself, which would be.

    :raises RuntimeError, TypeError: for what is no one's to copy.
    """
    memo: dict[int, object] = {}
    twin = copy.deepcopy(module, memo)
    own = {id(part) for part in module.modules()}
    for part in list(twin.modules()):
        for name, child in part._modules.items():
            if id(child) in own and id(part) not in own:
                part._modules[name] = copy.deepcopy(child, memo)
    modes = {name: part.training for name, part in module.named_modules(remove_duplicate=False)}
    for name, part in twin.named_modules(remove_duplicate=False):
        part.training = modes.get(name, part.training)
        if isinstance(part, InducingPointKernel):
            part._clear_cache()
    return twin

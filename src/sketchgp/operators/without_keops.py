"""GPyTorch's KeOps kernels as the kernels that they stand for.

They are the same functions of the same parameters, evaluated in another way; here an engine decides that.
"""

from __future__ import annotations

from typing import Any

import gpytorch.kernels as plain
from gpytorch.kernels import keops
from torch import nn

_PLAIN: dict[type, type] = {
    keops.RBFKernel: plain.RBFKernel,
    keops.MaternKernel: plain.MaternKernel,
    keops.PeriodicKernel: plain.PeriodicKernel,
}


def without_keops(kernel: Any) -> Any:
    """The kernel with GPyTorch's KeOps kernels in it replaced by the plain ones, which share their parameters.

    A kernel that holds none is returned as it is.  Subclasses are left alone: they may compute something else.
    """
    return _without(kernel, {})


def _without(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        parts = {name: None if part is None else _without(part, made) for name, part in module._modules.items()}
        cls: Any = _PLAIN.get(type(module), type(module))
        found = module
        if cls is not type(module) or any(part is not module._modules[name] for name, part in parts.items()):
            found = object.__new__(cls)
            found.__dict__.update(module.__dict__, _modules=parts)
        made[id(module)] = found
    return made[id(module)]

"""Backward passes whose gradients can be taken once (a second time is an error, never zero), and that run with the
context variables of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *owners: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        raise NotImplementedError(
            "Second derivatives of kernel matrices and of what is solved with them are not implemented by sketchgp; "
            "sketchgp.restore(model) makes it an ordinary model, which has them. [troubleshooting: second-derivatives]"
        )


def first_order(gradients: Sequence[Tensor | None], *owners: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a backward pass that recorded nothing, such that differentiating them raises an error.

    :param owners: what they depend on; where autograd is at work on one of them (``create_graph=True``), what is
        differentiated through the gradients raises NotImplementedError.
    """
    if not torch.is_grad_enabled() or not any(owner.requires_grad for owner in owners):
        return tuple(gradients)
    return tuple(None if one is None else _FirstOrder.apply(one.detach(), *owners) for one in gradients)


def in_callers_context(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a backward pass with the context variables of ``ctx.caller``, which the forward pass has put there.

    On CUDA it is in another thread, which has none of them (the memory budget).
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        return ctx.caller.copy().run(backward, ctx, *grads)

    return run

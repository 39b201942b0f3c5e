"""Backward passes: gradients that can be taken once, where taking them again is an error and never a zero; and with the
context variables of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .pairs import Pairs


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
    """The gradients as they are to leave a backward pass that recorded nothing of how it computed them.

    :param owners: what they depend on; where autograd is at work on one of them (``create_graph=True``), what is
        differentiated through the gradients raises NotImplementedError.
    """
    if not torch.is_grad_enabled() or not any(owner.requires_grad for owner in owners):
        return tuple(gradients)
    return tuple(None if one is None else _FirstOrder.apply(one.detach(), *owners) for one in gradients)


def in_callers_context(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass with the context variables of ``ctx.caller``, which the forward pass has put there: on CUDA it is
    in another thread, which has none of them (the memory budget)."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        return ctx.caller.copy().run(backward, ctx, *grads)

    return run


class Evaluate(torch.autograd.Function):
    """The dense block of a kernel matrix with a backward pass by tiles: nothing but the block itself is kept for it."""

    @staticmethod
    def forward(ctx: Any, pairs: Pairs, tiles: Any, *tensors: Tensor) -> Tensor:
        ctx.options, ctx.coincident, ctx.tiles = pairs.options, pairs.coincident, tiles
        ctx.save_for_backward(*tensors)
        if 0 in pairs.batch_shape:
            return pairs.x1.new_zeros(pairs.shape, dtype=pairs.dtype)
        return tiles.dense(pairs).to(pairs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors  # torch raises where one was changed in place since
        with torch.no_grad():
            pairs = Pairs(tensors[0], tensors[1], tensors[2:], **ctx.options)
            pairs.coincident = ctx.coincident
            result = ctx.tiles.dense_derivative(pairs, grad)
        return (None, None, *first_order(result, grad, *tensors))

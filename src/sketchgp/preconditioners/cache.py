"""One preconditioner a matrix: built once, found again by every solve with the same kernel, inputs and noise."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from ..operators import KernelMatrix, LowRankPlusDiagonal
from ..operators.access import Access
from .base import Preconditioner, Selection

_DRIFT = 1.25  # pivots are chosen anew when they leave this many times as much of the trace as when chosen
_WHOLE = 4096  # tensors up to this many entries are compared entry by entry


class PreconditionerCache:
    """Keeps the last preconditioner of one model and what it was built from.

    A solve with unchanged kernel matrix and noise gets the same object; one with other noise reuses the factor;
    a training step (``differentiable=True``) with new hyperparameters reuses the pivots while they still serve.
    Copies and pickles start empty.

    :ivar builds: how many preconditioners have been built since the cache was made.
    """

    def __init__(self, choice: Preconditioner) -> None:
        self.choice = choice
        self._lock = threading.RLock()
        self._forget()

    def clear(self) -> None:
        """Forget the preconditioner and what it was built from."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self.builds, self._seconds = 0, 0.0
        self._selected_noise = 0.0
        self._matrix_key: Any = None
        self._noise_key: Any = None
        self._selection: Selection | None = None
        self._factor: Tensor | None = None
        self._built: LowRankPlusDiagonal | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"choice": self.choice}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.choice = state["choice"]
        self._lock = threading.RLock()
        self._forget()

    def get(self, operator: Any, noise: Tensor, differentiable: bool = False) -> LowRankPlusDiagonal:
        """The preconditioner of ``operator + diag(noise)``.

        :param operator: symmetric LinearOperator ``(..., n, n)``; :param noise: ``(..., n)``.
        :param differentiable: whether it must carry gradients to the operator's tensors and the noise (pivots fixed).
        """
        with self._lock:
            start = time.perf_counter()
            live = differentiable and (operator.requires_grad or noise.requires_grad)
            matrix_key, noise_key = fingerprint(operator), tensor_key(noise)
            if not live and self._built is not None and (matrix_key, noise_key) == (self._matrix_key, self._noise_key):
                return self._built.detached(operator.dtype)
            access = Access(operator)
            if self.choice.rank is None and float(noise.detach().min()) < 0.5 * self._selected_noise:
                self._selection = self._factor = None  # the automatic rank was for a larger noise
            factor = self._find_factor(access, noise, matrix_key, live)
            diagonal = noise.to(torch.float64) + self._shift()
            self._built = LowRankPlusDiagonal(factor.detach(), diagonal.detach())
            self._matrix_key, self._noise_key = matrix_key, noise_key
            self.builds += 1
            self._seconds += time.perf_counter() - start
            if not live:
                return self._built.detached(operator.dtype)
            built = LowRankPlusDiagonal(factor, diagonal, out_dtype=operator.dtype)
            built._root_cache = self._built.capacitance_root()
            return built

    def pivots(self, operator: Any, noise: Tensor) -> Tensor | None:
        """Indices of the training points behind the factor, (r,) or (..., r); None for a dense sketch."""
        with self._lock, torch.no_grad():
            self.get(operator, noise)
            assert self._selection is not None
            return self._selection.pivots

    def take_seconds(self) -> float:
        """Time spent building since this was last asked."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _shift(self) -> float | Tensor:
        assert self._selection is not None
        return self._selection.shift

    def _find_factor(self, access: Access, noise: Tensor, key: Any, live: bool) -> Tensor:
        unchanged = key == self._matrix_key and self._selection is not None
        if not live:
            if not unchanged or self._factor is None:
                self._select(access, noise)
            assert self._factor is not None
            return self._factor
        kept = (
            self._selection is not None
            and self._selection.factor.shape[:-1] == (*access.batch_shape, access.n)
            and self._selection.factor.device == access.device
        )
        if not kept:
            self._select(access, noise)
        selection = self._selection
        assert selection is not None
        factor = self.choice.factor(access, selection)
        if kept and not unchanged and self._drifted(access, factor, selection):
            self._select(access, noise)
            factor = self.choice.factor(access, self._selection)  # type: ignore[arg-type]
        assert self._selection is not None
        self._factor = self._selection.factor = factor.detach()
        return factor

    @torch.no_grad()
    def _select(self, access: Access, noise: Tensor) -> None:
        self._selection = self.choice.select(access, noise.detach())
        self._selected_noise = float(noise.detach().min())
        self._factor = self._selection.factor

    @staticmethod
    def _drifted(access: Access, factor: Tensor, selection: Selection) -> bool:
        with torch.no_grad():
            diagonal = access.diagonal()
            left = (diagonal - factor.square().sum(-1)).clamp_(min=0).sum(-1) / diagonal.sum(-1)
            return float(left.max()) > _DRIFT * selection.relative_trace + 1e-12


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """Something that differs, for all purposes here, between tensors of different content."""
    tensor = tensor.detach()
    head = (tuple(tensor.shape), tensor.dtype, str(tensor.device))
    if tensor.numel() <= _WHOLE:
        return (*head, tuple(tensor.reshape(-1).tolist()))
    flat = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=tensor.device).cos()
    return (*head, tuple((weights.to(tensor.dtype) @ flat).tolist()[:64]), float(flat.sum()))


def _structure(kernel: Any) -> tuple[Any, ...]:
    """Types and plain settings (such as Matern's nu) of a kernel and its parts."""
    plain = (int, float, str)
    return tuple(
        (name, type(part), *((k, v) for k, v in vars(part).items() if isinstance(v, plain) and k != "training"))
        for name, part in kernel.named_modules()
    )


def fingerprint(operator: Any) -> tuple[Any, ...]:
    """A key of the operator's values: of its inputs and parameters, or of one product where those are unknown."""
    if isinstance(operator, KernelMatrix):
        tensors = [operator.x1, *operator.parameters, *operator.kernel.buffers()]
        return (_structure(operator.kernel), *(tensor_key(t) for t in tensors))
    operator = operator.evaluate_kernel()
    vector = torch.arange(1, operator.shape[-1] + 1, dtype=operator.dtype, device=operator.device).cos()
    with torch.no_grad():
        return (type(operator), tensor_key(operator.detach() @ vector))

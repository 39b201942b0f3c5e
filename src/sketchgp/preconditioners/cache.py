"""Cache of one preconditioner, which every solve with the same kernel, inputs and noise shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..distributed import in_force
from ..fingerprint import tensor_key
from ..operators import KernelMatrix, LowRankPlusDiagonal, MovingPlusDiagonal
from ..operators.access import Access
from ..operators.marks import operator_key
from ..operators.moving_factors import MovingFactor
from ..space import Factor
from .base import Preconditioner, Selection


class PreconditionerCache:
    """Cache of the last preconditioner of one model and what it was built from.

    A solve with unchanged kernel matrix and noise gets the same object; one with other noise reuses the factor, and
    a training step (``differentiable=True``) with new hyperparameters the pivots, while they still serve
    (:meth:`Preconditioner.serves`).  Copies and pickles start empty.

    :ivar builds: how many preconditioners have been built since the cache was made.
    :ivar selections: how often pivots were chosen for them.
    """

    def __init__(self, choice: Preconditioner) -> None:
        self.choice = choice
        self._lock, self._held, self.selections = threading.RLock(), False, 0
        self._forget()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the pivots inside, however far hyperparameters move: losses are then one function of them."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def clear(self) -> None:
        """Forget the preconditioner and what it was built from."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self.builds, self._seconds = 0, 0.0
        self._matrix_key: Any = None
        self._noise_key: Any = None
        self._selection: Selection | None = None
        self._factor: Factor | None = None
        self._built: LowRankPlusDiagonal | None = None
        self._moving: MovingFactor | None = None

    def release(self) -> None:
        """Give the memory back; the preconditioner is built anew at its next use."""
        with self._lock:
            self._forget_built()
            self._moving = None

    def __getstate__(self) -> dict[str, Any]:
        return {"choice": self.choice}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.choice = state["choice"]
        self._lock, self._held, self.selections = threading.RLock(), False, 0
        self._forget()

    def get(self, operator: Any, noise: Tensor, differentiable: bool = False) -> LowRankPlusDiagonal:
        """Return the preconditioner of ``operator + diag(noise)``.

        :param operator: symmetric LinearOperator ``(..., n, n)``; :param noise: ``(..., n)``.
        :param differentiable: whether it must carry gradients to the operator's tensors and the noise (pivots fixed).
        """
        with self._lock:
            start = time.perf_counter()
            live = differentiable and (operator.requires_grad or noise.requires_grad)
            matrix_key, noise_key = (in_force(), *operator_key(operator)), tensor_key(noise)
            if not live and self._built is not None and (matrix_key, noise_key) == (self._matrix_key, self._noise_key):
                return self._built.detached(operator.dtype)
            access, keys = Access(operator), (matrix_key, noise_key)
            if live and self._lean(access, noise):
                built = self._live_lean(access, noise, keys, operator.dtype)
            else:
                factor = self._find_factor(access, noise, keys, live)
                kept, diagonal = self._keep(factor, noise, keys)
                built = LowRankPlusDiagonal(factor, diagonal, operator.dtype) if live else kept.detached(operator.dtype)
                built.known_root = kept.capacitance_root()
            self._seconds += time.perf_counter() - start
            return built

    def _keep(self, factor: Factor, noise: Tensor, keys: tuple[Any, Any]) -> tuple[LowRankPlusDiagonal, Tensor]:
        """Keep the preconditioner of this factor; return it, without gradients, and its diagonal, with them."""
        assert self._selection is not None
        diagonal = noise.to(torch.float64) + self._selection.shift
        self._built = LowRankPlusDiagonal(factor.detach(), diagonal.detach())
        self._matrix_key, self._noise_key = keys
        self.builds += 1
        return self._built, diagonal

    def _lean(self, access: Access, noise: Tensor) -> bool:
        """Return whether the derivative needs no autograd through F, as for one kernel matrix and one noise."""
        return self.choice.lean and access.exact and not access.batch_shape and noise.dim() == 1

    def _live_lean(
        self, access: Access, noise: Tensor, keys: tuple[Any, Any], out_dtype: torch.dtype
    ) -> LowRankPlusDiagonal:
        """Return the differentiable preconditioner where :meth:`_lean` holds."""
        matrix = access.operator
        assert isinstance(matrix, KernelMatrix)
        selection, unchanged = self._selection, keys[0] == self._matrix_key
        same = unchanged and keys[1] == self._noise_key
        if selection is None or selection.factor.shape[:-1] != (access.n,) or selection.factor.device != access.device:
            selection = moving = None
        else:
            moving = self._moving if unchanged and self._moving_is_of(selection) else None
            if moving is None and not (unchanged and selection.ready):
                # The old F goes before the new one comes: they are the largest arrays there are.  A loss of the step
                # before may still hold it.
                if not unchanged and self._moving is not None:
                    self._moving.factor = None
                selection = selection.without_factor()
                self._forget_built()
            moving = moving or self.choice.moving(access, selection)
            assert moving.factor is not None
            if not same and not self._serves(access, moving.factor, noise, selection):
                selection = moving = None
        if selection is None or moving is None:
            self._forget_built()
            self._select(access, noise)
            selection = self._selection
            assert selection is not None
            moving = self.choice.moving(access, selection)
        assert moving.factor is not None
        selection.factor, selection.core_root = moving.factor, moving.core_root
        self._selection, self._factor, self._moving = selection, selection.factor, moving
        kept, diagonal = self._keep(selection.factor, noise, keys)
        built = MovingPlusDiagonal(matrix, diagonal, moving, out_dtype)
        built.known_root = kept.capacitance_root()
        return built

    def _moving_is_of(self, selection: Selection) -> bool:
        return self._moving is not None and self._moving.factor is selection.factor

    def _forget_built(self) -> None:
        self._built = self._factor = self._selection = None
        self._matrix_key = self._noise_key = None

    def take_seconds(self) -> float:
        """Return the time spent building since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _find_factor(self, access: Access, noise: Tensor, keys: tuple[Any, Any], live: bool) -> Factor:
        """Return F, selected anew where the earlier selection no longer serves."""
        unchanged = keys[0] == self._matrix_key and self._selection is not None
        same = unchanged and keys[1] == self._noise_key
        if not live:
            factor = self._factor if unchanged else None
            if factor is None or not (same or self._serves(access, factor, noise)):
                factor = self._select(access, noise)
            return factor
        kept = (
            self._selection is not None
            and self._selection.factor.shape[:-1] == (*access.batch_shape, access.n)
            and self._selection.factor.device == access.device
        )
        if not kept:
            self._select(access, noise)
        assert self._selection is not None
        factor = self.choice.factor(access, self._selection)
        if kept and not same and not self._serves(access, factor.detach(), noise):
            self._select(access, noise)
            factor = self.choice.factor(access, self._selection)
        self._factor = self._selection.factor = factor.detach()
        return factor

    @torch.no_grad()
    def _select(self, access: Access, noise: Tensor) -> Factor:
        self.selections += 1
        self._selection = self.choice.select(access, noise.detach())
        self._factor = self._selection.factor
        return self._factor

    def _serves(self, access: Access, factor: Factor, noise: Tensor, selection: Selection | None = None) -> bool:
        selection = self._selection if selection is None else selection
        assert selection is not None
        return self._held or self.choice.serves(selection, access, factor, noise)

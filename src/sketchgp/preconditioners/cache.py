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
from ..operators import LowRankPlusDiagonal
from ..operators.access import Access
from ..operators.marks import operator_key
from ..operators.moving_factors import MovingFactor
from ..space import Factor
from .base import Preconditioner, Selection

Made = tuple[Factor, MovingFactor | None]  # F, and the way back from it to K where that gives its gradient


class PreconditionerCache:
    """Cache of the last preconditioner of one model and what it was built from.

    A solve with unchanged kernel matrix and noise gets the same object; one with other noise reuses the factor, and
    a training step (``differentiable=True``) with new hyperparameters the pivots, while they still serve
    (:meth:`Preconditioner.serves`).  Copies and pickles start empty.

    :ivar chosen: the choice that the present one was made by, where it was automatic.
    :ivar builds: how many preconditioners have been built since the cache was made.
    :ivar selections: how often pivots were chosen for them.
    """

    _held = False  # whether pivots stay, however far hyperparameters move

    def __init__(self, choice: Preconditioner) -> None:
        self.choice, self.chosen, self.selections, self._lock = choice, choice, 0, threading.RLock()
        self.clear()

    def __reduce__(self) -> Any:
        return type(self), (self.choice,)

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
            self.builds, self._seconds = 0, 0.0
            self.release()

    def release(self) -> None:
        """Give the memory back; the preconditioner is built anew at its next use."""
        with self._lock:
            self._keys: tuple[Any, Any] | None = None  # of the matrix and of the noise
            self._selection: Selection | None = None
            self._built: LowRankPlusDiagonal | None = None
            self._moving: MovingFactor | None = None

    def get(self, operator: Any, noise: Tensor, differentiable: bool = False) -> LowRankPlusDiagonal:
        """Return the preconditioner of ``operator + diag(noise)``.

        :param operator: symmetric LinearOperator ``(..., n, n)``; :param noise: ``(..., n)``.
        :param differentiable: whether it must carry gradients to the operator's tensors and the noise (pivots fixed).
        """
        with self._lock:
            start = time.perf_counter()
            live = differentiable and (operator.requires_grad or noise.requires_grad)
            keys = (in_force(), *operator_key(operator)), tensor_key(noise)
            if not live and self._built is not None and keys == self._keys:
                return self._built.detached(operator.dtype)
            access = Access(operator)
            factor, moving = self._factor(access, noise, keys, live)
            assert self._selection is not None
            diagonal = noise.to(torch.float64) + self._selection.shift
            self._built, built = self.chosen.assemble(access, diagonal, self._selection, factor, moving, live)
            self._keys = keys
            self.builds += 1
            self._seconds += time.perf_counter() - start
            return built

    def _factor(self, access: Access, noise: Tensor, keys: tuple[Any, Any], live: bool) -> Made:
        """Return F of the earlier selection while that serves, else of a new one.

        It serves for the same matrix, and for gradients of one that has moved.
        """
        selection = self._selection
        unchanged = self._keys is not None and keys[0] == self._keys[0]
        same = unchanged and keys == self._keys
        if selection is not None and (unchanged or (live and selection.fits(access))):
            factor, moving = self._made(access, noise, selection, live, unchanged)
            if same or self._held or self.chosen.serves(selection, access, factor.detach(), noise):
                return factor, moving
            del factor, moving  # the memory is wanted
        self.release()
        self.selections += 1
        with torch.no_grad():
            self.chosen = self.choice.resolved(access, noise.detach())
            selection = self._selection = self.chosen.select(access, noise.detach())
        return self._made(access, noise, selection, live, True)

    def _made(self, access: Access, noise: Tensor, selection: Selection, live: bool, unchanged: bool) -> Made:
        """Return F of a selection.

        :param unchanged: whether the selection's own F is that of this K.
        """
        if not live:
            return selection.factor, None
        if not self.chosen.lean or not access.exact or access.batch_shape or noise.dim() > 1:
            factor = self.chosen.factor(access, selection)
            selection.factor = factor.detach()
            return factor, None
        moving = self._moving
        if moving is None or not unchanged or moving.factor is not selection.factor:
            if not unchanged or not selection.ready:
                # The old F goes before the new one comes: they are the largest arrays there are.  A loss of the step
                # before may still hold it.
                if moving is not None:
                    moving.factor = None
                self.release()
                selection.drop_factor()
            moving = self.chosen.moving(access, selection)
        assert moving.factor is not None
        selection.factor, selection.core_root = moving.factor, moving.core_root
        self._selection, self._moving = selection, moving
        return moving.factor, moving

    def take_seconds(self) -> float:
        """Return the time spent building since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return seconds

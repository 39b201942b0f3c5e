"""What a checkpoint keeps of the parts of conjugate gradients, and what they have counted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...space import Space
from ..loop import Method
from ..problem import System
from .aim import Aim
from .lanczos_record import LanczosRecord


class Kept(Method):
    """Attributes of the parts, by the names under which they are saved.

    Vectors are whole in a checkpoint, which therefore does not hang on the number of ranks.
    """

    vectors: tuple[str, ...]  # those of the saved attributes that are vectors of the space
    space: Space
    system: System
    aim: Aim | None
    lanczos: LanczosRecord
    best: Tensor
    _uncertain: Tensor | None  # the residual of the best value, where nothing is worked out of it yet
    _of_best: Tensor

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        plain, tensors = super().state()
        for key in filter(tensors.__contains__, self._keys()):
            tensors[key] = self.space.to_write(tensors[key])
        return plain, tensors

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        own = {key: self.space.own(tensors[key]) for key in self._keys() if key in tensors}
        super().restore(plain, {**tensors, **own})

    def _keys(self) -> list[str]:
        """The names of vectors in what is saved."""
        return [f"{name}/" for name in self.vectors]

    @property
    def trail(self) -> list[Tensor]:
        """What a checkpoint keeps of the predictions that are followed."""
        return [] if self.aim is None else self.aim.trail

    @trail.setter
    def trail(self, parts: list[Tensor]) -> None:
        if self.aim is not None:
            self.aim.trail = parts

    @property
    def products(self) -> int:
        """With K, so far."""
        return self.system.products

    @property
    def tally(self) -> dict[str, float]:
        return {"products": self.products}

    @property
    def entries(self) -> float:
        return float(self.products) * self.size**2

    @property
    def matrix_entries(self) -> float:
        return float(self.size**2)

    @property
    def certain(self) -> Tensor:
        """Of the best value, :meth:`_certain`, worked out when it is asked for."""
        if self._uncertain is not None:
            self.certain = self._certain(self.best, self._uncertain)
        return self._of_best

    @certain.setter
    def certain(self, bounds: Tensor) -> None:
        self._of_best, self._uncertain = bounds, None

    def _certain(self, value: Tensor, r: Tensor) -> Tensor:
        raise NotImplementedError

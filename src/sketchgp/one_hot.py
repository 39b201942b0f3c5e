"""Classes as regression targets: least squares on one column a class, and the class of the largest mean."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from .checks import dtype as floating
from .checks import labels as checked
from .checks import refusal
from .errors import InputError


@dataclass(frozen=True, eq=False)
class OneHot:
    """Class labels to targets ``(n, c)`` and predictions back: one column a class, 1 where it is the row's and 0 else.

    .. code-block:: python

        classes = sketchgp.OneHot(train_labels)
        model = sketchgp.InducingPointGP(train_x, classes.encode(train_labels), ...).eval()
        labels = classes.decode(model(test_x).mean)

    :param labels: any tensor of integers that holds every class.
    :ivar classes: ``(c,)`` the classes, ascending.
    :raises InputError: for labels that are not integers, or none.
    """

    labels: InitVar[Tensor]
    classes: Tensor = field(init=False)

    def __post_init__(self, labels: Tensor) -> None:
        object.__setattr__(self, "classes", checked("OneHot", "labels", labels).unique())

    def encode(self, labels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(n,)`` labels as targets ``(n, c)``.

        :raises InputError: for a label that is none of the classes.
        """
        labels, dtype = checked("OneHot.encode", "labels", labels), floating("OneHot.encode", "dtype", dtype)
        hot = labels.reshape(-1, 1) == self.classes.to(labels.device)
        if not bool(hot.any(dim=1).all()):
            unknown = labels.reshape(-1)[~hot.any(dim=1)][0]
            raise InputError(f"OneHot.encode: labels expects one of {self.classes.tolist()}, got {unknown.item()}.")
        return hot.to(dtype)

    def decode(self, scores: Tensor) -> Tensor:
        """Means ``(..., c)`` as labels ``(...)``: the class of the largest.

        :raises InputError: where there is not one column a class.
        """
        count = len(self.classes)
        if not torch.is_tensor(scores) or not scores.dim() or scores.shape[-1] != count or scores.is_complex():
            raise refusal("OneHot.decode", "scores", f"a tensor of {count} columns, one a class", scores)
        return self.classes.to(scores.device)[scores.argmax(dim=-1)]

"""Classes as regression targets: least squares on one column a class, and the class of the largest mean."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import array, label_array, refusal
from .checks import dtype as floating
from .checks import labels as checked
from .errors import InputError


@dataclass(frozen=True, eq=False)
class OneHot:
    """Class labels to targets ``(n, c)`` and predictions back: one column a class, 1 where it is the row's and 0 else.

    .. code-block:: python

        classes = sketchgp.OneHot(train_labels)
        model = sketchgp.InducingPointGP(train_x, classes.encode(train_labels), ...).eval()
        scores = model(test_x).mean
        labels, shares = classes.decode(scores), classes.probabilities(scores)

    :param labels: any tensor of integers that holds every class; or a list, numpy array or pandas column of integers,
        texts or booleans.
    :ivar classes: ``(c,)`` the classes, ascending: a tensor if labels are one, else a numpy array.
    :raises InputError: for labels that are something else, or none.
    """

    labels: InitVar[Any]
    classes: Any = field(init=False)

    def __post_init__(self, labels: Any) -> None:
        if torch.is_tensor(labels):
            object.__setattr__(self, "classes", checked("OneHot", "labels", labels).unique())
        else:
            object.__setattr__(self, "classes", np.unique(label_array("OneHot", "labels", labels)))

    def encode(self, labels: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(n,)`` labels as targets ``(n, c)``: on the device of a tensor, on the CPU for what is none.

        :raises InputError: for a label that is none of the classes.
        """
        owner, dtype = "OneHot.encode", floating("OneHot.encode", "dtype", dtype)
        if torch.is_tensor(self.classes) and torch.is_tensor(labels):
            labels = checked(owner, "labels", labels).reshape(-1)
            hot = labels.unsqueeze(-1) == self.classes.to(labels.device)
        else:
            device = labels.device if torch.is_tensor(labels) else None
            labels = labels.cpu().numpy() if torch.is_tensor(labels) else labels
            known, labels = np.asarray(self.classes), label_array(owner, "labels", labels).reshape(-1)
            if (known.dtype.kind == "U") != (labels.dtype.kind == "U"):
                raise InputError(f"{owner}: labels expects one of {known.tolist()[:20]}, got {labels[0].item()!r}.")
            hot = torch.tensor(labels[:, None] == known, device=device)
        unknown = ~hot.any(dim=1)
        if bool(unknown.any()):
            first = labels[int(unknown.nonzero()[0])].item()
            raise InputError(f"{owner}: labels expects one of {self.classes.tolist()}, got {first!r}.")
        return hot.to(dtype)

    def decode(self, scores: Any) -> Any:
        """Means ``(..., c)`` as labels ``(...)``: the class of the largest; a tensor or an array, as ``classes`` is.

        :raises InputError: where there is not one column a class, or for NaN and infinity.
        """
        best = self._checked("decode", scores).argmax(dim=-1)
        return self.classes.to(best.device)[best] if torch.is_tensor(self.classes) else self.classes[best.cpu().numpy()]

    def probabilities(self, scores: Any) -> Tensor:
        """Means ``(..., c)`` of targets that were encoded as probabilities ``(..., c)``: the nearest ones.

        The squared loss of 0 and 1 is least, on the average, where a function is the probability of the class (it is
        Brier's score), so that means estimate probabilities, if not from 0 to 1.  Their Euclidean projection on what
        is sums to 1 and has no negative part, and is never further from the true probabilities than they are.  The
        largest is that of :meth:`decode`.  (Duchi, Shalev-Shwartz, Singer, Chandra, "Efficient projections onto the
        l1-ball", ICML 2008.)  Scores of other losses have probabilities of their own
        (:meth:`sketchgp.RandomFeatureClassifier.probabilities`).

        :raises InputError: where there is not one column a class, or for NaN and infinity.
        """
        scores = self._checked("probabilities", scores)
        falling = scores.sort(dim=-1, descending=True).values
        count = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype, device=scores.device)
        shifts = (falling.cumsum(dim=-1) - 1) / count
        kept = (falling > shifts).sum(dim=-1, keepdim=True)  # how many are positive; at least one
        return (scores - shifts.gather(-1, kept - 1)).clamp_min(0)

    def _checked(self, name: str, scores: Any) -> Tensor:
        owner, count = f"OneHot.{name}", len(self.classes)
        scores = array(owner, "scores", scores, f"a tensor of {count} columns, one a class")
        if not scores.dim() or scores.shape[-1] != count or scores.is_complex():
            raise refusal(owner, "scores", f"a tensor of {count} columns, one a class", scores)
        if not bool(torch.isfinite(scores).all()):
            raise InputError(
                f"{owner}: scores expects finite numbers, got NaN or infinity; look at the data and the fit."
            )
        return scores if scores.is_floating_point() else scores.to(torch.float64)

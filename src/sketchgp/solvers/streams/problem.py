"""The problem in random features: points, targets or labels, a kernel, a ridge and a loss with its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from ... import checks
from ...devices import sent
from ...errors import InputError
from ..problem import check_kernel

Batch = tuple[Tensor, Tensor]

_CALM = 1 / 16  # the curvature of losses of labels, which are flat, or nearly, at most rows and never steeper than 1
_LEAST = 0.1  # of what a row of a logistic loss counts: where it is nearly flat, a step would go too far


class Squared:
    """``(f - y)^2 / 2``, whose minimiser with a ridge of ``noise / n`` is the posterior mean of a Gaussian process."""

    name = "squared"
    steady: float | None = 1.0  # the preconditioned step where all data are in a batch; None for one that falls
    curvature = 1.0  # that a first step without preconditioner reckons with
    rest = -1.0  # the target of a class, of the rows of others

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """``dl / df`` ``(b, c)`` of f and y ``(b, c)``."""
        return f - y

    def weights(self, f: Tensor) -> Tensor | None:
        """Return bounds of the curvature of the loss at f ``(b, c)``, ``(b,)``; None where they are 1."""
        return None

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        """The sum over the rows of each column, ``(c,)``; ``(1,)`` where they belong together."""
        return (f - y).square().sum(dim=0) / 2


class Logistic(Squared):
    """``log(1 + exp(-y f))`` of every class against the rest, y = 1 or -1."""

    name, steady, curvature = "logistic", 0.5, _CALM

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return -y * torch.sigmoid(-y * f)

    def weights(self, f: Tensor) -> Tensor | None:
        share = torch.sigmoid(f)
        return (share * (1 - share)).amax(dim=1).clamp_min(_LEAST / 4)

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        return functional.softplus(-y * f).sum().reshape(1)


class Multinomial(Squared):
    """``log sum_c exp(f_c) - f_y``; y has a 1 in the column of the class, 0 else."""

    name, steady, curvature, rest = "multinomial", 0.5, _CALM, 0.0

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.softmax(dim=1) - y

    def weights(self, f: Tensor) -> Tensor | None:
        """Bound the curvature by Gershgorin, ``diag(p) - p p^T <= 2 diag(p (1 - p))``."""
        share = f.softmax(dim=1)
        return 2 * (share * (1 - share)).amax(dim=1).clamp_min(_LEAST / 4)

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.logsumexp(dim=1) - (f * y).sum(dim=1)).sum().reshape(1)


class Hinge(Squared):
    """``max(0, 1 - y f)`` of every class against the rest, y = 1 or -1: support vector machines."""

    name, steady, curvature = "hinge", None, _CALM

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.where(y * f < 1, -y, torch.zeros_like(y))

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        return (1 - y * f).clamp_min(0).sum().reshape(1)


CLASSIFICATION: dict[str, Squared] = {loss.name: loss for loss in (Logistic(), Multinomial(), Hinge())}
LOSSES: dict[str, Squared] = {"squared": Squared(), **CLASSIFICATION}


class Targets:
    """Targets of a regression as columns, ``(b, t)`` float64.

    :param mean: prior means ``(b,)`` of points ``(b, d)``, which are subtracted; None for 0.
    :ivar columns: t, None before the first batch; :ivar several: whether targets came as ``(b, t)``.
    :ivar owner: whom errors name.
    """

    def __init__(self, mean: Callable[[Tensor], Tensor] | None = None) -> None:
        self.mean, self.owner = mean, "RandomFeatureProblem"
        self.columns: int | None = None
        self.several = False

    def read(self, owner: str, y: Any, x: Tensor) -> Tensor:
        """Return targets ``(b,)`` or ``(b, t)`` of points x less their means.

        :raises InputError: for anything else than a tensor of a row each, shaped as before.
        """
        checks.tensor(owner, "y", y, (1, 2))
        if len(y) != len(x) or y.device != x.device:
            raise InputError(f"{owner}: y expects {len(x)} rows on {x.device}, got {len(y)} on {y.device}.")
        if self.columns is None:
            self.several = y.dim() > 1
        if self.several != (y.dim() > 1):
            wanted = "(b, t), as before" if self.several else "(b,), as before"
            raise InputError(f"{owner}: y expects shape {wanted}, got {tuple(y.shape)}.")
        if self.mean is None:
            return y
        mean = self.mean(x).detach()
        return y - (mean.unsqueeze(-1) if self.several else mean)

    def encode(self, owner: str, y: Tensor) -> Tensor:
        """Return the columns of targets that were read, as many as before.

        :raises InputError: for another number of columns.
        """
        y = y.reshape(len(y), -1)
        if self.columns is not None and y.shape[1] != self.columns:
            raise InputError(f"{owner}: y expects {self.columns} column(s) as before, got {y.shape[1]}.")
        self.columns = y.shape[1]
        return y.to(torch.float64)


class Labels:
    """Labels as columns, one a class, in the order in which classes first appeared: 1 for the class of a row, ``rest``
    for the others.

    :ivar classes: the known labels, integers; of texts their places in ``names``.
    :ivar owner: whom errors name.
    """

    def __init__(self, rest: float) -> None:
        self.rest, self.owner = rest, "RandomFeatureProblem"
        self.classes: list[int] = []
        self.names: list[str] = []

    @property
    def columns(self) -> int:
        return len(self.classes)

    def codes(self, owner: str, name: str, y: Any, device: torch.device) -> Tensor:
        """Labels as a tensor of integers: themselves, or of texts their places in ``names``, which new ones join.

        :raises InputError: for anything else, and for texts among integers.
        """
        values = checks.labels(owner, name, y) if torch.is_tensor(y) else checks.label_array(owner, name, y)
        texts = not torch.is_tensor(values) and values.dtype.kind == "U"
        if (self.classes or self.names) and texts != bool(self.names):
            before, now = ("texts", "integers") if self.names else ("integers", "texts")
            raise InputError(f"{owner}: {name} expects {before}, as before; got {now}.")
        if torch.is_tensor(values):
            return values
        if texts:
            different, places = np.unique(values, return_inverse=True)
            self.names += [one for one in different.tolist() if one not in self.names]
            values = np.array([self.names.index(one) for one in different.tolist()])[places.reshape(values.shape)]
        return torch.as_tensor(values.astype(np.int64), device=device)

    def read(self, owner: str, y: Any, x: Tensor) -> Tensor:
        """Return the labels of points x as integers.

        :raises InputError: for anything else than a label of a row each.
        """
        y = self.codes(owner, "y", y, x.device)
        if y.shape != (len(x),) or y.device != x.device:
            raise InputError(f"{owner}: y expects shape ({len(x)},) on {x.device}, got {tuple(y.shape)} on {y.device}.")
        return y

    def encode(self, owner: str, y: Tensor) -> Tensor:
        """Return the columns of labels that were read; a label that is new makes a new one."""
        seen = [int(one) for one in y.unique().tolist()]
        self.classes += [one for one in seen if one not in self.classes]
        hot = y.unsqueeze(1) == sent(torch.tensor(self.classes), y.device)
        return torch.where(hot, 1.0, self.rest).to(torch.float64)

    def wrong(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the share of labels y ``(p,)`` that functions f ``(p, c)`` get wrong, ``(1,)``."""
        predicted = torch.tensor(self.classes, device=f.device)[f.argmax(dim=1)]
        return (predicted != y).double().mean().reshape(1)


@dataclass
class RandomFeatureProblem:
    """Minimise ``mean_i l(f(x_i), y_i) + lambda / 2 ||f||^2``, ``lambda = noise / n``, over functions of the kernel's
    space; the squared loss makes f the posterior mean of a Gaussian process of mean zero, and kernel ridge regression.

    :param kernel: a GPyTorch kernel without batch, of a kind that has random features
        (:class:`~sketchgp.operators.feature_map.RandomFeatures`).
    :param x: ``(n, d)`` float32 or float64; or an iterable of batches ``(x, y)``, which may differ in size: y is None.
    :param y: targets ``(n,)`` or ``(n, t)`` for the squared loss, labels ``(n,)`` for the others: a tensor of integers,
        or a list, numpy array or pandas column of integers or texts.
    :param noise: of the ridge; the noise variance for the squared loss.  0 for none.
    :param loss: ``"squared"``, ``"logistic"``, ``"multinomial"`` or ``"hinge"``.
    :param rows: n, where the data are a stream: what noise is divided by.  None divides by the rows that were seen so
        far, and from the second pass over a stream on by those that it has.
    :raises InputError: for arguments of other kinds.
    """

    kernel: Any
    x: Tensor | Iterable[Batch]
    y: Tensor | None
    noise: float
    loss: Literal["squared", "logistic", "multinomial", "hinge"] = "squared"
    rows: int | None = None
    targets: Targets | Labels = field(default_factory=Targets, repr=False)

    def __post_init__(self) -> None:
        owner = self.targets.owner
        check_kernel(owner, self.kernel)
        self.noise = checks.number(owner, "noise", self.noise, least=0, finite=True)
        checks.word(owner, "loss", self.loss, tuple(LOSSES))
        self.rows = checks.count(owner, "rows", self.rows, optional=True)
        if self.loss != "squared" and isinstance(self.targets, Targets):
            self.targets = Labels(LOSSES[self.loss].rest)
        if not self.streamed:
            if self.rows is not None:
                raise InputError(f"{owner}: rows expects None for tensors, whose n is known; got {self.rows}.")
            if self.y is None:
                raise InputError(f"{owner}: y expects the targets of x, got None; it is for streams of (x, y).")
            self.x, self.y = self.checked(owner, self.x, self.y)
        elif self.y is not None or not isinstance(self.x, Iterable):
            raise InputError(
                f"{owner}: x and y expect a tensor each, or a stream of batches (x, y) and None; got "
                f"{checks.found(self.x)} and {checks.found(self.y)}."
            )

    @property
    def streamed(self) -> bool:
        """Return whether the data come in batches."""
        return not torch.is_tensor(self.x)

    @property
    def n(self) -> int | None:
        """Number of rows; None for a stream of unknown length."""
        return len(self.x) if torch.is_tensor(self.x) else self.rows

    @property
    def once(self) -> bool:
        """Return whether a stream can be gone through once only: a generator, or an object that holds one."""
        if isinstance(self.x, Iterator):
            return True
        known = isinstance(self.x, Tensor | list | tuple | DataLoader)  # whose workers would start for nothing
        return not known and iter(self.x) is iter(self.x)

    def first(self) -> Batch:
        """Return x and y, or the first batch of a stream, which is not taken from it.

        :raises InputError: where there is none, or it does not fit.
        """
        if torch.is_tensor(self.x) and self.y is not None:
            return self.x, self.y
        feed = self.x
        if self.once:
            feed, self.x = itertools.tee(self.x)
        for batch in self._looked_at(feed):
            return batch
        raise InputError("x expects a stream of at least one batch, got none.")

    def checked(self, owner: str, x: Any, y: Any) -> Batch:
        """A batch whose inputs are points ``(b, d)``, finite, and whose targets are a row each.

        :raises InputError: for anything else.
        """
        if torch.is_tensor(x) and x.dim() == 1:
            x = x.unsqueeze(-1)
        checks.tensor(owner, "x", x, (2,))
        return x, self.targets.read(owner, y, x)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of a stream from its beginning, each checked; those without rows are left out.

        :raises InputError: for one that is no pair, holds NaN, or differs in features, dtype or device.
        """
        return self._looked_at(self.x)

    def _looked_at(self, stream: Iterable[Any]) -> Iterator[Batch]:
        first: Tensor | None = None
        for number, pair in enumerate(stream):
            owner = f"batch {number} of the stream"
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise checks.refusal(owner, "it", "a pair (x, y)", pair)
            if torch.is_tensor(pair[0]) and len(pair[0]) == 0:
                continue
            x, y = self.checked(owner, *pair)
            first = x if first is None else first
            checks.same_points(owner, x, first)
            yield x, y

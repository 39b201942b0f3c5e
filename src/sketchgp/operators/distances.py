"""Squared and l1 distances of many points, tile by tile, in arithmetic that does not lose the small ones.

A tile's squared distances are one matrix product of augmented features.  Inputs are centred first (in
``Expression.prepare``), so that ``|a|^2 + |b|^2 - 2 a.b`` does not cancel when all inputs lie far from the origin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..devices import here, sent
from .expression import Features, Prepared
from .profiles import GAUSS, LAPLACE, LEAST, MATERN, Profile
from .tiles import spans

_DIRECT = 2  # features up to which differences are squared one by one;
_DIRECT_KINK = 4  # for a profile with a kink at 0;
_DIRECT_FAR = 32  # and where most pairs of points are far from the centre
_CDIST = (8, 64)  # features between which torch.cdist is the fastest way to l1 distances on CPUs
_KINK = {torch.float32: 2e-6, torch.float64: 2e-13}  # errors of a distance that a kink at 0 may leave
_SEEN = {torch.float32: 1e-3, torch.float64: 1e-8}  # errors of a squared distance above which points are far
_PAIRS = 2**22  # differences that are made at once for near pairs
_PRECISION = threading.RLock()  # a setting of the whole process is changed for the time of one product


def _multiplier(device: torch.device) -> Any:
    """The settings of what multiplies float32 matrices on a device; without ``fp32_precision`` before torch 2.9."""
    return torch.backends.cuda.matmul if device.type == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)


def _reduced(device: torch.device) -> bool:
    """Return whether the user lets torch multiply float32 matrices on this device in TF32 or bfloat16."""
    with _PRECISION:
        settings = _multiplier(device)
        if not hasattr(settings, "fp32_precision"):
            return torch.get_float32_matmul_precision() != "highest"
        chosen = [settings.fp32_precision, getattr(torch.backends, "fp32_precision", "none")]
        return next((p for p in chosen if p != "none"), "ieee") != "ieee"


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """No TF32 or bfloat16 for squared distances: their rounding of ``|a|^2`` exceeds the distance of neighbours.

    torch has this setting for the whole process only.  The lock makes one thread of ours wait for the other, so that
    each finds and puts back what the user chose; what the user changes meanwhile is left as it then is.
    """
    settings = _multiplier(device)
    with _PRECISION:
        if hasattr(settings, "fp32_precision"):
            before = settings.fp32_precision
            settings.fp32_precision = "ieee"
        else:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            if hasattr(settings, "fp32_precision"):
                if settings.fp32_precision == "ieee":
                    settings.fp32_precision = before
            elif torch.get_float32_matmul_precision() == "highest":
                torch.set_float32_matmul_precision(before)


class Distances:
    """``t = factor * q`` of one atom, tile by tile.

    With one or two features the differences themselves are squared, which is exact and takes no longer; with a few more
    that is faster than what follows where most points are far, or the profile has a kink.  l1 distances are always made
    so, by torch.cdist or feature by feature.  Else the matrix product leaves an error of about
    ``eps (|a|^2 + |b|^2)`` in q.  That is as much as the inputs' own rounding would do, but for a profile with a kink
    at 0, where it turns into the square root of eps: there the few distances that are small enough for it to be seen
    are computed from the differences too.

    Rows so far from the centre that this error would be seen in any kernel are taken apart: distances among them, be
    they copies or a cluster of their own, are made from the differences.

    :ivar near: the pairs of the last tile for which the first was done, as an index of it; None where it never is.
    :ivar far: which rows and which columns are far, on the CPU; None where there are none.
    :ivar least: what t is raised to where ``exp2(t)`` might leave the normal numbers: CPUs take four to twenty times as
        long for tiles with others; None where it cannot.
    """

    def __init__(self, profile: Profile, features: Features) -> None:
        self.profile, self.left, self.right = profile, features.left, features.right
        self.factor: float | Tensor = profile.factor
        if features.alpha is not None:
            self.factor = self.factor / features.alpha
        p = self.left.shape[-1]
        self.limits: tuple[Tensor, Tensor] | None = None
        self.far: tuple[Tensor, Tensor] | None = None
        if profile.l1:
            few = _CDIST[0] - 1 if self.left.device.type == "cpu" else _DIRECT
            self.direct = 1 <= p <= few or (p >= _CDIST[1] and self.left.device.type == "cpu")
        else:
            self.direct = 1 <= p <= (_DIRECT_KINK if profile is MATERN[0.5] else _DIRECT)
            if not self.direct and self.left.numel() and self.right.numel():
                self.direct = _far_pairs(features) is not None and p <= _DIRECT_FAR and _mostly_far(features)
        self.near: tuple[Tensor, ...] | None = None
        if self.direct:
            root = torch.as_tensor(self.factor, dtype=self.left.dtype).abs()
            root = root if profile.l1 else root.sqrt()
            # one feature after the other in memory, so that a tile's rows are read in order
            self.left = (self.left * root).mT.contiguous().mT
            self.right = self._once(features, "direct", lambda: (self.right * root).mT.contiguous().mT)
        elif not profile.l1:
            self.augmented = self._once(features, "augmented", lambda: _augmented(features.right))
            self.guarded = self.left.dtype == torch.float32 and _reduced(self.left.device)
            if self.left.numel() and self.right.numel():
                self.far = _far_pairs(features)
                if profile is MATERN[0.5]:
                    squares = self.left.square().sum(dim=-1)
                    # of each row and each column, so that one that lies far from all others makes none but its own near
                    of_columns = self._once(features, "limit", lambda: self._limit(self.augmented[..., -1]))
                    self.limits = (self._limit(squares).unsqueeze(-1), of_columns.unsqueeze(-2))
        self._rows: tuple[slice, Tensor] | None = None
        self.least = LEAST[self.left.dtype] if _leaves_the_normal(profile, features) else None

    def _limit(self, squares: Tensor) -> Tensor:
        """The t below which a pair's error of ``2 eps |a|^2`` is seen, for each ``|a|^2``; 0 for rows that are far."""
        scale = torch.finfo(squares.dtype).eps / _KINK[squares.dtype]
        return _lambert(scale * squares.masked_fill(far_points(squares), 0)).square() * self.factor

    @staticmethod
    def _once(features: Features, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return ``make()``, remembered where other parts of a matrix have the same right side."""
        if features.memo is None:
            return make()
        if name not in features.memo:
            features.memo[name] = make()
        return features.memo[name]

    def _block(self, rows: slice) -> Tensor:
        """The left side ``[-2 f a, f |a|^2, f]`` of some rows, which stays the same along a row of tiles."""
        if self._rows is None or self._rows[0] != rows:
            a = self.left[..., rows, :]
            square = a.square().sum(dim=-1, keepdim=True) * self.factor
            block = torch.cat([a * (-2 * self.factor), square, torch.ones_like(square) * self.factor], dim=-1)
            self._rows = (rows, block)
        return self._rows[1]

    def tile(self, rows: slice, columns: slice, out: Tensor, buffer: Callable[[], Tensor]) -> Tensor:
        """The tile, in ``out``; ``buffer()`` gives one more of the same shape."""
        t = self._tile(rows, columns, out, buffer)
        return t if self.least is None else t.clamp_(min=self.least)

    def _tile(self, rows: slice, columns: slice, out: Tensor, buffer: Callable[[], Tensor]) -> Tensor:
        if self.direct:
            sign = -1 if self.profile.factor < 0 else 1
            spare, total = buffer(), out.new_zeros(())
            for feature in range(self.left.shape[-1]):
                a, b = self.left[..., rows, feature], self.right[..., columns, feature]
                torch.sub(a.unsqueeze(-1), b.unsqueeze(-2), out=spare)
                if self.profile.l1:
                    total = torch.add(total, spare.abs_(), alpha=sign, out=out)
                else:
                    total = torch.addcmul(total, spare, spare, value=sign, out=out)
            return out
        if self.profile.l1:
            distances = torch.cdist(self.left[..., rows, :], self.right[..., columns, :], p=1.0)
            return torch.mul(distances, self.factor, out=out)
        with _full_precision(out.device) if self.guarded else nullcontext():
            torch.matmul(self._block(rows), self.augmented[..., columns, :].mT, out=out)
        if (pairs := self.far_pairs(rows, columns)) is not None:
            i, j = pairs
            a, b = self.left[..., rows, :][..., i, :], self.right[..., columns, :][..., j, :]
            distances = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
            out[..., i.unsqueeze(1), j] = distances.square_().mul_(self.factor)
        if self.limits is not None:
            near = (out < self.limits[0][..., rows, :]).logical_or_(out < self.limits[1][..., columns])
            self.near = near.nonzero(as_tuple=True)
            for where, difference in self.differences(rows, columns):
                out[where] = difference.square().sum(dim=-1) * self.factor
        return out

    def far_pairs(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """The rows and columns of a tile that are far, as indices of it; None where either has none."""
        if self.far is None:
            return None
        i, j = (mask[part].nonzero().squeeze(-1) for mask, part in zip(self.far, (rows, columns), strict=True))
        device = self.left.device
        return (sent(i, device), sent(j, device)) if len(i) and len(j) else None

    def differences(self, rows: slice, columns: slice) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """The near pairs of the last tile, some at a time: an index of the tile, and ``a - b`` for each pair."""
        if self.near is None:
            return
        a, b = self.left[..., rows, :], self.right[..., columns, :]
        for part in spans(len(self.near[0]), max(1, _PAIRS // a.shape[-1])):
            where = tuple(index[part] for index in self.near)
            yield where, a[where[:-1]] - b[where[:-2] + where[-1:]]


def _far_pairs(features: Features) -> tuple[Tensor, Tensor] | None:
    """Return masks of far rows and far columns, on the CPU; None where either has none.

    They are computed once for all parts of a matrix, since a device is waited for.
    """
    if features.near is None:
        if features.whole is None:
            sides = [far_points(side.square().sum(dim=-1)) for side in (features.left, features.right)]
            rows, columns = torch.cat(sides).cpu().split([len(side) for side in sides])
        elif (found := _far_pairs(features.whole)) is not None:
            indices = (features.rows, features.columns)
            rows, columns = (mask if i is None else mask[here(i)] for mask, i in zip(found, indices, strict=True))
        else:
            features.near = True
            return None
        features.near = not bool(rows.any() & columns.any())
        features.far = None if features.near else (rows, columns)
    return features.far


def _mostly_far(features: Features) -> bool:
    """Return whether half of all pairs are of two far points, for all parts of a matrix alike."""
    if features.whole is not None:
        return _mostly_far(features.whole)
    assert features.far is not None
    rows, columns = features.far
    return float(rows.double().mean() * columns.double().mean()) >= 0.5


def far_points(squares: Tensor) -> Tensor:
    """Return a mask of points whose squared distances may be wrong by more than ``_SEEN`` in some matrix of a batch."""
    return (squares > _limit_of(squares.dtype)).reshape(-1, squares.shape[-1]).any(dim=0)


def _limit_of(dtype: torch.dtype) -> float:
    return _SEEN[dtype] / (8 * torch.finfo(dtype).eps)


def surely_near(prepared: Prepared) -> bool:
    """Return whether no point of a box is far, wherever in it the centre is; False where that is not certain.

    :param prepared: features of the two corners of the box, as rows.
    """
    if any(f.weight is None for f in prepared.features):  # not linear in the inputs
        return False
    widths = [(f.left[..., 1, :] - f.left[..., 0, :]).square().sum(dim=-1).amax() for f in prepared.features]
    return not widths or bool((torch.stack(widths) <= _limit_of(widths[0].dtype)).all())


def _lambert(c: Tensor) -> Tensor:
    """The s, from above, where an error of ``c / s`` in s is one of 1 in ``exp(-s)``: ``s exp(s) = c``."""
    s = c.log1p()
    for _ in range(4):  # Newton's method, from above
        s = s - (s - c * (-s).exp()) / (1 + s)
    return s


def _leaves_the_normal(profile: Profile, features: Features) -> bool:
    """Return whether a value might be a denormal number, by a bound of all distances.

    The bound is computed once for all parts of a matrix.
    """
    if features.left.device.type != "cpu" or profile not in (GAUSS, LAPLACE):
        return False
    if features.normal is None and features.whole is not None:
        features.normal = not _leaves_the_normal(profile, features.whole)
    elif features.normal is None:
        most = -2 * LEAST[features.left.dtype]
        features.normal = bool((farthest(profile, features) * abs(profile.factor) <= most).all())
    return not features.normal


def farthest(profile: Profile, features: Features) -> Tensor:
    """Return an upper bound of q, ``(*b,)``, by boxes or balls around both sides."""
    left, right = features.left, features.right
    if not (left.numel() and right.numel()):
        return left.new_zeros(())
    if profile.l1 or left.shape[-1] <= _DIRECT:
        (a, b), (c, d) = (torch.aminmax(side, dim=-2) for side in (left, right))
        apart = torch.maximum(b - c, d - a)
        return (apart if profile.l1 else apart.square()).sum(dim=-1)
    a, b = (side.square().sum(dim=-1).amax(dim=-1).sqrt() for side in (left, right))
    return (a + b).square()


def _augmented(b: Tensor) -> Tensor:
    """``[b, 1, |b|^2]``, the right side of a squared distance."""
    square = b.square().sum(dim=-1, keepdim=True)
    return torch.cat([b, torch.ones_like(square), square], dim=-1)

"""Tiles of kernels that are functions of distances (see :mod:`sketchgp.operators.expression`), and their gradients.

A tile's squared distances are one matrix product of augmented features.  Inputs are centred first (in
``Expression.prepare``), so that ``|a|^2 + |b|^2 - 2 a.b`` does not cancel when all inputs lie far from the origin.
In-place arithmetic follows, in buffers that are reused from tile to tile.

The gradient of ``sum_ij w_ij k_ij`` has a closed form.  With ``G = W * dk/dq`` (elementwise), squared distances give a
feature vector ``a_i`` the gradient ``2 (a_i sum_j G_ij - sum_j G_ij b_j)``: one matrix product of G with ``[b, 1]``.
Where only a scaling of the inputs is wanted (a lengthscale), ``sum_ij G_ij (a_ik - b_jk)^2`` takes the same product
once instead of twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..devices import sent
from .expression import Expression, Features, Prepared, far_points
from .profiles import GAUSS, LAPLACE, LEAST, MATERN, Profile
from .tiles import padded, spans

_DIRECT = 2  # features up to which differences are squared one by one;
_DIRECT_KINK = 4  # for a profile with a kink at 0;
_DIRECT_FAR = 32  # and where most pairs of points are far from the centre
_CDIST = (8, 64)  # features between which torch.cdist is the fastest way to l1 distances on CPUs
_KINK = {torch.float32: 2e-6, torch.float64: 2e-13}  # errors of a distance that a kink at 0 may leave
_PAIRS = 2**22  # differences that are made at once for near pairs


def _reduced(device: torch.device) -> bool:
    """Return whether the user lets torch multiply float32 matrices on this device in TF32 or bfloat16."""
    backends = torch.backends
    matmul: Any = backends.cuda.matmul if device.type == "cuda" else getattr(backends.mkldnn, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):  # before torch 2.9
        return torch.get_float32_matmul_precision() != "highest"
    chosen = [matmul.fp32_precision, getattr(backends, "fp32_precision", "none")]
    return next((p for p in chosen if p != "none"), "ieee") != "ieee"


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

    :ivar near: the pairs of the last tile for which the first was done, as an index of it; None where there are none.
    :ivar far: which rows and which columns are far, on the CPU; None where there are none.
    :ivar least: what t is raised to where ``exp(t)`` might leave the normal numbers: CPUs take four to twenty times as
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
                self.direct = features.far is not None and p <= _DIRECT_FAR and _mostly_far(features)
        self.near: tuple[Tensor, ...] | None = None
        if self.direct:
            root = torch.as_tensor(self.factor, dtype=self.left.dtype).abs()
            root = root if profile.l1 else root.sqrt()
            # one feature after the other in memory, so that a tile's rows are read in order
            self.left = (self.left * root).mT.contiguous().mT
            self.right = features.once("direct", lambda: (self.right * root).mT.contiguous().mT)
        elif not profile.l1:
            self.augmented = features.once("augmented", lambda: _augmented(features.right))
            self.reduced = self.left.dtype == torch.float32 and _reduced(self.left.device)
            if self.left.numel() and self.right.numel():
                self.far = features.far
                if profile is MATERN[0.5]:
                    squares = self.left.square().sum(dim=-1)
                    # of each row and each column, so that one that lies far from all others makes none but its own near
                    of_columns = features.once("limit", lambda: self._limit(self.augmented[..., -1]))
                    self.limits = (self._limit(squares).unsqueeze(-1), of_columns.unsqueeze(-2))
        self._rows: tuple[slice, Tensor] | None = None
        self.least = LEAST[self.left.dtype] if _leaves_the_normal(profile, features) else None

    def _limit(self, squares: Tensor) -> Tensor:
        """Return the t below which a pair's error of ``2 eps |a|^2`` is seen; 0 for rows that are far."""
        scale = torch.finfo(squares.dtype).eps / _KINK[squares.dtype]
        return _lambert(scale * squares.masked_fill(far_points(squares), 0)).square() * self.factor

    def _block(self, rows: slice) -> Tensor:
        """Return the left side ``[-2 f a, f |a|^2, f]`` of some rows, which is kept for a row of tiles."""
        if self._rows is None or self._rows[0] != rows:
            a = self.left[..., rows, :]
            square = a.square().sum(dim=-1, keepdim=True) * self.factor
            block = torch.cat([a * (-2 * self.factor), square, torch.ones_like(square) * self.factor], dim=-1)
            self._rows = (rows, block)
        return self._rows[1]

    def tile(self, rows: slice, columns: slice, out: Tensor, spare: Tensor) -> Tensor:
        """Return the tile in ``out``; ``spare``, of the same shape, is overwritten."""
        if self.direct:
            sign = -1 if self.profile.factor < 0 else 1
            total = out.new_zeros(())
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
        left, right = self._block(rows), self.augmented[..., columns, :].mT
        if self.reduced:  # the rounding of |a|^2 would exceed the squared distance of neighbours
            out.copy_(left.double() @ right.double())
        else:
            torch.matmul(left, right, out=out)
        if (pairs := self.far_pairs(rows, columns)) is not None:
            i, j = pairs
            a, b = self.left[..., rows, :][..., i, :], self.right[..., columns, :][..., j, :]
            distances = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
            out[..., i.unsqueeze(1), j] = distances.square_().mul_(self.factor)
        if self.limits is not None:
            left, right, self.near = self.limits[0][..., rows, :], self.limits[1][..., columns], None
            if not bool(out.amin() >= torch.maximum(left.amax(), right.amax())):  # where it is NaN, too
                self.near = (out < left).logical_or_(out < right).nonzero(as_tuple=True)
            for where, difference in self.differences(rows, columns):
                out[where] = difference.square().sum(dim=-1) * self.factor
        return out

    def far_pairs(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """Return the far rows and columns of a tile, as indices of it; None where either has none."""
        if self.far is None:
            return None
        i, j = (mask[part].nonzero().squeeze(-1) for mask, part in zip(self.far, (rows, columns), strict=True))
        device = self.left.device
        return (sent(i, device), sent(j, device)) if len(i) and len(j) else None

    def differences(self, rows: slice, columns: slice) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Yield the near pairs of the last tile, some at a time: an index of the tile, and ``a - b`` for each pair."""
        if self.near is None:
            return
        a, b = self.left[..., rows, :], self.right[..., columns, :]
        for part in spans(len(self.near[0]), max(1, _PAIRS // a.shape[-1])):
            where = tuple(index[part] for index in self.near)
            yield where, a[where[:-1]] - b[where[:-2] + where[-1:]]


def _mostly_far(features: Features) -> bool:
    """Return whether half of all pairs are of two far points, for all parts of a matrix alike."""
    far = features.root.far
    return far is not None and float(far[0].double().mean() * far[1].double().mean()) >= 0.5


def _lambert(c: Tensor) -> Tensor:
    """Return s, from above, with ``s exp(s) = c``: there an error of ``c / s`` in s is one of 1 in ``exp(-s)``."""
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
    whole = features.root
    most = -2 * LEAST[whole.left.dtype] / abs(profile.factor)
    return whole.once("leaves the normal", lambda: not bool((farthest(profile, whole) <= most).all()))


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
    """Return ``[b, 1, |b|^2]``, the right side of a squared distance."""
    square = b.square().sum(dim=-1, keepdim=True)
    return torch.cat([b, torch.ones_like(square), square], dim=-1)


class FastTiles:
    """Tiles of ``k(x1, x2)`` for a recognised kernel.

    :param prepared: features and coefficients.
    :param shape: the largest rows and columns of a tile.
    :param coincident: ``(2, p)`` rows and columns of pairs at distance exactly 0, each once; or a number k, where these
        are all ``(i, i + k)``: 0 for the same points.
    :ivar single: whether the kernel is one function of one distance times a scale.
    :ivar outputscale: factor that the tiles still lack, ``()`` or ``(B, 1, 1)``; None where they are complete.
    """

    def __init__(
        self,
        expression: Expression,
        prepared: Prepared,
        shape: tuple[int, int],
        coincident: Tensor | int | None,
    ) -> None:
        self.expression = expression
        self.coincident = coincident if torch.is_tensor(coincident) else None
        self.diagonal = coincident if isinstance(coincident, int) else None
        self.features = prepared.features
        self.coefficients = prepared.coefficients  # (*b, T), with the constants that the profiles leave out
        self.gains = [math.prod((expression.atoms[a].profile.gain for a in t), start=1.0) for t in expression.terms]
        self.batch = self.coefficients.shape[:-1]
        self.distances = [Distances(a.profile, f) for a, f in zip(expression.atoms, self.features, strict=True)]
        self._entries = shape[0] * shape[1] * self.batch.numel()
        self._buffers: list[Tensor] = []
        self._taken = 0
        scaled = [self.coefficients[..., t] * gain for t, gain in enumerate(self.gains)]
        self.weights = [c.reshape(*self.batch, 1, 1) if len(self.batch) else c for c in scaled]
        self.single = expression.terms == ((0,),)
        self.outputscale = self.weights[0] if self.single else None

    def take(self, rows: slice, columns: slice) -> Tensor:
        """Return a buffer of a tile's shape, free until the next tile."""
        if self._taken == len(self._buffers):
            self._buffers.append(self.coefficients.new_empty(self._entries))
        shape = (*self.batch, rows.stop - rows.start, columns.stop - columns.start)
        self._taken += 1
        return self._buffers[self._taken - 1][: torch.Size(shape).numel()].view(shape)

    def free(self) -> None:
        """Let the next tile take the buffers of the last one."""
        self._taken = 0

    def distance(self, atom: int, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the tile of ``t`` of an atom, and a buffer of its shape."""
        distances, spare = self.distances[atom], self.take(rows, columns)
        t = distances.tile(rows, columns, self.take(rows, columns), spare)
        if distances.least is not None:
            t.clamp_(min=distances.least)
        if self.diagonal is not None:  # entries of the diagonal are exactly at distance 0
            t.diagonal(rows.start + self.diagonal - columns.start, dim1=-2, dim2=-1).zero_()
        if self.coincident is not None:
            i, j = self.coincident
            inside = (i >= rows.start) & (i < rows.stop) & (j >= columns.start) & (j < columns.stop)
            if t.device.type == "cpu":
                t[..., i[inside] - rows.start, j[inside] - columns.start] = 0
                return t, spare
            # a device would have to tell how many there are: so of all pairs, those elsewhere add 0 to some entry
            i, j = (i - rows.start).clamp(0, t.shape[-2] - 1), (j - columns.start).clamp(0, t.shape[-1] - 1)
            t.view(*self.batch, -1).index_add_(-1, i * t.shape[-1] + j, torch.where(inside, -t[..., i, j], 0))
        return t, spare

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Return the tile without the ``outputscale``, in a buffer that the next call overwrites."""
        self.free()
        values = []
        for number, atom in enumerate(self.expression.atoms):
            t, spare = self.distance(number, rows, columns)
            values.append(atom.profile.value(t, spare, self.features[number].alpha))
        if self.single:
            return values[0]
        out = self.take(rows, columns).zero_()
        spare = self.take(rows, columns)
        for weight, term in zip(self.weights, self.expression.terms, strict=True):
            if not term:
                out += weight
            else:
                out.addcmul_(multiply([values[a] for a in term], spare), weight)
        return out


def multiply(factors: list[Tensor], out: Tensor) -> Tensor:
    """Return the elementwise product of one or more tensors; a single one as it is."""
    return reduce(lambda product, factor: torch.mul(product, factor, out=out), factors)


_MANY = 16  # features from which torch's own backward pass of l1 distances is faster than one feature at a time
Pairs = list[tuple[Tensor, Tensor]]


class _AtomSums:
    """Sums of one atom over all tiles, in float64.

    :ivar mode: ``"isotropic"``: one common weight, from the distances; ``"differences"``: one feature after the other
        (l1 distances, few features); ``"products"``: by a matrix product.
    :ivar weight_only: whether only the weights of the features are wanted, not the features themselves.
    """

    def __init__(self, tiles: FastTiles, atom: int, live: Prepared, inputs: bool) -> None:
        f, profile = live.features[atom], tiles.expression.atoms[atom].profile
        self.left, self.right = f.left.detach(), f.right.detach()
        self.shared = f.right is f.left
        self.same = tiles.diagonal == 0
        self.wanted = f.left.requires_grad or f.right.requires_grad
        self.distances = tiles.distances[atom]
        self.factor = self.distances.factor
        self.l1 = profile.l1
        self.weight_only = not inputs and f.weight is not None
        if self.weight_only and f.weight is not None and f.weight.stride(-1) == 0:
            self.mode = "isotropic"
        else:
            self.mode = "differences" if profile.l1 or self.distances.direct else "products"
        double, p = torch.float64, self.left.shape[-1]
        columns = p + 1 if self.mode == "products" else p
        self.of_left = self.left.new_zeros(*self.left.shape[:-1], columns, dtype=double)
        if self.shared:
            self.of_right = self.of_left
        else:
            self.of_right = self.right.new_zeros(*self.right.shape[:-1], columns, dtype=double)
        self.cross = self.left.new_zeros(*self.left.shape[:-2], p, dtype=double)
        self.of_alpha, self.squares = self.left.new_zeros(2, *self.left.shape[:-2], dtype=double)
        self.right_one = _with_one(self.right)
        self.left_one = self.right_one if self.shared else _with_one(self.left)

    def add(self, rows: slice, columns: slice, g: Tensor, t: Tensor | None, spare: Tensor) -> None:
        """Take in one tile of ``G``, but for the profile's constant ``slope``.

        :param t: the distances times ``factor``, where the mode is isotropic.
        """
        if not self.wanted:
            return
        a, b = self.left[..., rows, :], self.right[..., columns, :]
        if self.mode == "isotropic":
            assert t is not None
            self.squares += dot(g, t)
        elif self.l1 and not self.weight_only and a.shape[-1] >= _MANY and a.device.type == "cpu":
            zero = torch.zeros_like(g)  # the distances, which p = 1 does not look at
            a, b = a.contiguous(), b.contiguous()
            self.of_left[..., rows, :] += torch.ops.aten._cdist_backward(g.contiguous(), a, b, 1.0, zero)
            turned = torch.ops.aten._cdist_backward(g.mT.contiguous(), b, a, 1.0, zero.mT.contiguous())
            self.of_right[..., columns, :] += turned
        elif self.mode == "differences":
            self._differences(rows, columns, g, spare)
        else:
            self._products(rows, columns, g, a)

    def _differences(self, rows: slice | Tensor, columns: slice | Tensor, g: Tensor, spare: Tensor) -> None:
        """Take in one feature after the other of these rows and columns."""
        a, b = self.left[..., rows, :], self.right[..., columns, :]
        for k in range(a.shape[-1]):
            part = torch.sub(a[..., k].unsqueeze(-1), b[..., k].unsqueeze(-2), out=spare)
            if self.weight_only:
                self.cross[..., k] += dot(g, part.abs_() if self.l1 else part.square_())
                continue
            part = (part.sign_() if self.l1 else part).mul_(g)
            self.of_left[..., rows, k] += part.sum(dim=-1)
            self.of_right[..., columns, k] -= part.sum(dim=-2)

    def _products(self, rows: slice, columns: slice, g: Tensor, a: Tensor) -> None:
        if self.same:
            # Distances on the diagonal are 0: its entries, often the largest, must not leave rounding errors behind.
            g.diagonal(rows.start - columns.start, dim1=-2, dim2=-1).zero_()
        self._far(rows, columns, g)
        for where, difference in self.distances.differences(rows, columns):  # a slope of 1/s: products would cancel
            self._near(rows, columns, where, g[where].unsqueeze(-1), difference)
            g[where] = 0
        product = (g @ self.right_one[..., columns, :])[..., : a.shape[-1] + 1]
        if self.weight_only:
            self.cross += (a * product[..., :-1]).sum(dim=-2)
            self.of_left[..., rows, -1] += product[..., -1]
            self.of_right[..., columns, -1] += g.sum(dim=-2)
        else:
            self.of_left[..., rows, :] += product
            self.of_right[..., columns, :] += (g.mT @ self.left_one[..., rows, :])[..., : a.shape[-1] + 1]

    def _far(self, rows: slice, columns: slice, g: Tensor) -> None:
        """Take in the pairs of points that are far from the centre, where products would cancel, and put 0 for them."""
        if (pairs := self.distances.far_pairs(rows, columns)) is None:
            return
        i, j = pairs
        share = -0.5 if self.weight_only else -1.0  # of what is added to the sums of products
        part = g[..., i.unsqueeze(1), j].to(self.cross.dtype) * share
        self._differences(rows.start + i, columns.start + j, part, torch.empty_like(part))
        g[..., i.unsqueeze(1), j] = 0

    def _near(self, rows: slice, columns: slice, where: tuple[Tensor, ...], g: Tensor, difference: Tensor) -> None:
        """Take in single pairs of a tile, from their differences."""
        *batch, i, j = where
        p = difference.shape[-1]
        if self.weight_only:
            part = (g * difference.square() * -0.5).to(self.cross.dtype)
            self.cross.view(-1, p).index_add_(0, batch[0] if batch else torch.zeros_like(i), part)
            return
        part = (g * difference).to(self.of_left.dtype)
        self.of_left[..., :p].index_put_((*batch, i + rows.start), -part, accumulate=True)
        self.of_right[..., :p].index_put_((*batch, j + columns.start), part, accumulate=True)

    def pairs(self, live: Prepared, atom: int, slope: Tensor | float) -> Pairs:
        """Return gradients of the features, or of their weight.

        :param slope: of the shape of a scale, ``()`` or ``(B, 1, 1)``.
        """
        f = live.features[atom]
        if not self.wanted:
            return []
        if self.weight_only:
            assert f.weight is not None
            gradient = (1 if self.l1 else 2) * slope * self._of_weight() / f.weight.detach().to(torch.float64)
            return [(f.weight, gradient.to(f.weight.dtype))]
        result = [(f.left, self._of_features(self.left, self.of_left) * slope)]
        if not self.shared:
            result.append((f.right, self._of_features(self.right, self.of_right) * slope))
        return [(value, gradient.to(value.dtype)) for value, gradient in result]

    def _of_weight(self) -> Tensor:
        """``sum_ij G_ij (a_ik - b_jk)^2`` (of ``|a_ik - b_jk|`` for l1), ``(*b, 1, p)``; its mean over k where there is
        one weight for all."""
        p = self.left.shape[-1]
        if self.mode == "isotropic":
            return (self.squares[..., None, None] / self.factor / max(p, 1)).expand(*self.squares.shape, 1, p)
        if self.mode == "differences":
            return self.cross.unsqueeze(-2)
        sums = [(self.left, self.of_left)] + ([] if self.shared else [(self.right, self.of_right)])
        total = -2 * self.cross.unsqueeze(-2)
        for x, s in sums:
            total = total + s[..., -1:].mT @ x.to(s.dtype).square()
        return total

    def _of_features(self, x: Tensor, sums: Tensor) -> Tensor:
        if self.mode == "differences":
            return sums if self.l1 else 2 * sums
        return 2 * (x * sums[..., -1:] - sums[..., :-1])


class FastGradient:
    """Gradient that is added up tile by tile; :meth:`pairs` then gives it for the tensors of ``live``.

    :param tiles: the tiles of ``live.converted(Tensor.detach)``.
    :param live: features and coefficients that depend on the operator's tensors by autograd.
    :param inputs: whether the inputs need a gradient (the features then do, not their weights alone).
    """

    def __init__(self, tiles: FastTiles, live: Prepared, inputs: bool) -> None:
        self.tiles, self.live = tiles, live
        self.sums = [_AtomSums(tiles, atom, live, inputs) for atom in range(len(tiles.expression.atoms))]
        self.of_coefficients = tiles.coefficients.new_zeros(tiles.coefficients.shape, dtype=torch.float64)

    def add(self, rows: slice, columns: slice, weights: Tensor) -> None:
        """Take in the tile of ``k`` with ``weights`` (overwritten)."""
        tiles, expression = self.tiles, self.tiles.expression
        tiles.free()
        values, slopes, alphas, kept = [], [], [], []
        for number, atom in enumerate(expression.atoms):
            t, spare = tiles.distance(number, rows, columns)
            isotropic = self.sums[number].mode == "isotropic" and self.sums[number].wanted
            kept.append(tiles.take(rows, columns).copy_(t) if isotropic else None)
            alpha = tiles.features[number].alpha
            value, slope, of_alpha = atom.profile.derivative(t, spare, alpha, lambda: tiles.take(rows, columns))
            values.append(value)
            slopes.append(slope)
            alphas.append(of_alpha)
        spare = tiles.take(rows, columns)
        if tiles.single:
            if self.live.coefficients.requires_grad:
                self.of_coefficients[..., 0] += dot(weights, values[0])
            if alphas[0] is not None:
                self.sums[0].of_alpha += dot(weights, alphas[0])
            self.sums[0].add(rows, columns, weights.mul_(slopes[0]), kept[0], spare)
            return
        adjoints = [tiles.take(rows, columns).zero_() for _ in expression.atoms]  # d k / d V of each atom
        for number, term in enumerate(expression.terms):
            if self.live.coefficients.requires_grad:
                whole = multiply([values[a] for a in term], spare) if term else torch.ones_like(weights)
                self.of_coefficients[..., number] += dot(weights, whole)
            for position, atom_ in enumerate(term):
                others = [values[a] for i, a in enumerate(term) if i != position]
                scale = tiles.weights[number]
                if others:
                    adjoints[atom_].addcmul_(multiply(others, spare), scale)
                else:
                    adjoints[atom_].add_(scale)
        for number, adjoint in enumerate(adjoints):
            adjoint.mul_(weights)
            if (of_alpha := alphas[number]) is not None:
                self.sums[number].of_alpha += dot(adjoint, of_alpha)
            self.sums[number].add(rows, columns, adjoint.mul_(slopes[number]), kept[number], spare)

    def pairs(self) -> Pairs:
        """Return ``(tensor, gradient)`` for the features, shape parameters and coefficients that need one."""
        tiles, result = self.tiles, []
        scale: Tensor | float = tiles.weights[0].to(torch.float64) if tiles.single else 1.0
        for number, (atom, sums) in enumerate(zip(tiles.expression.atoms, self.sums, strict=True)):
            result += sums.pairs(self.live, number, scale * atom.profile.slope)
            alpha = self.live.features[number].alpha
            if alpha is not None:
                gradient = sums.of_alpha.reshape(alpha.shape) * scale
                result.append((alpha, gradient.to(alpha.dtype)))
        gains = self.of_coefficients.new_tensor(tiles.gains)
        result.append((self.live.coefficients, (self.of_coefficients * gains).to(self.live.coefficients.dtype)))
        return [(value, gradient) for value, gradient in result if value.requires_grad]


def _with_one(x: Tensor) -> Tensor:
    """Return ``[x, 1]``, padded."""
    return padded(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return ``sum a * b`` over the last two dimensions."""
    if a.dim() == 2:
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return (a * b).sum(dim=(-2, -1))

"""KeOps: each entry of the kernel matrix is computed where it is used, by code compiled for the kernel at hand.

A formula is compiled at its first use, which takes seconds, and then kept on disk by KeOps.  It depends on the
structure of the kernel, the number of features, the width of the right-hand side, dtype and device; not on the number
of points nor on any hyperparameter.  Right-hand sides are padded to few widths, so that one formula serves many.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..expression import Expression, Prepared
from ..pairs import Pairs
from ..profiles import Profile
from .base import Engine, Gradients, Live

_WIDTHS = (1, 2, 4, 8, 16, 32, 48, 64)  # of right-hand sides; wider ones are cut into chunks of the last
_LOCK = threading.Lock()  # KeOps writes, loads and remembers formulas without one

Symbol = Any  # a pykeops.torch.LazyTensor: a formula of one pair of points
Gradient = list[tuple[Tensor, Tensor]]  # tensors, each with its gradient
Key = tuple[str, int]  # a tensor of Prepared: "coefficients", or "left", "right", "alpha" of one atom


class KeOps(Engine):
    """Products and derivatives by KeOps reductions, in float32 or float64.

    A derivative takes one reduction for each side of the matrix, one in all where both sides are the same points.
    The matrices of a batch are done one after the other.
    """

    name = "keops"

    def absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        try:
            import pykeops.config
            import pykeops.torch
        except ImportError:
            return "the extra sketchgp[keops] is not installed"
        if dtype not in (torch.float32, torch.float64):
            return f"it computes in float32 and float64, not in {str(dtype).removeprefix('torch.')}"
        if device.type not in ("cpu", "cuda"):
            return f"it has no code for devices of type {device.type!r}"
        if device.type == "cuda" and not pykeops.config.gpu_available:
            return "KeOps found no CUDA toolkit on this machine"
        return None

    def missing(self, pairs: Pairs) -> str | None:
        if pairs.expression is None:
            return "the kernel is not a sum of products of kernels that it knows"
        return self.absent(pairs.device, pairs.dtype)

    def resolution(self, pairs: Pairs) -> float:
        return 16 * torch.finfo(pairs.compute_dtype).eps

    def width_class(self, columns: int) -> int:
        return _width(columns)

    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        assert pairs.expression is not None
        return multiply(pairs.expression, pairs.prepared(), rhs, pairs.shape[-2])

    def derivative(self, pairs: Pairs, left: Tensor, right: Tensor) -> Gradients:
        live = Live(pairs)
        if live.prepared is None or pairs.expression is None:
            return live.pull_back([])
        return live.pull_back(differentiate(pairs.expression, live.prepared, left, right))


@torch.no_grad()
def multiply(expression: Expression, prepared: Prepared, rhs: Tensor, rows: int) -> Tensor:
    """``K rhs``, of shape ``(*b, n, t)``, for rhs ``(*b, m, t)`` and ``n = rows``; ``b`` is () or (B,)."""
    out = rhs.new_empty(*rhs.shape[:-2], rows, rhs.shape[-1])
    batched = rhs.dim() > 2
    for index in range(len(rhs) if batched else 1):
        vectors, total = (rhs[index], out[index]) if batched else (rhs, out)
        one = _One.of(expression, prepared, index)
        total.copy_(one.constant * vectors.sum(dim=0))
        if not one.terms or not total.numel() or not vectors.numel():
            continue
        for columns, chunk in _chunks(vectors):
            product = _reduce(one, _Pair(one).kernel() * _symbol(chunk, 1))
            total[:, columns] += one.scale * product[:, : columns.stop - columns.start]
    return out


@torch.no_grad()
def differentiate(expression: Expression, prepared: Prepared, left: Tensor, right: Tensor) -> Gradient:
    """Each tensor of ``prepared`` that requires a gradient, with that of ``sum_t left_t^T K right_t``.

    :param left: ``(*b, n, t)``; :param right: ``(*b, m, t)``; ``b`` is () or (B,).
    """
    tensors: dict[Key, Tensor | None] = {("coefficients", 0): prepared.coefficients}
    for a, features in enumerate(prepared.features):
        tensors["left", a] = features.left
        tensors["right", a] = None if features.right is features.left else features.right
        tensors["alpha", a] = features.alpha
    wanted = {key: tensor for key, tensor in tensors.items() if tensor is not None and tensor.requires_grad}
    result = {key: tensor.new_zeros(tensor.shape) for key, tensor in wanted.items()}
    if left.dim() == 2:
        _add_gradients(_One.of(expression, prepared, 0), left, right, result)
    else:
        for index, (u, v) in enumerate(zip(left, right, strict=True)):
            part = {key: gradient[index] for key, gradient in result.items()}
            _add_gradients(_One.of(expression, prepared, index), u, v, part)
    return [(tensor, result[key]) for key, tensor in wanted.items()]


def _add_gradients(one: _One, left: Tensor, right: Tensor, result: dict[Key, Tensor]) -> None:
    """Adds the gradient of ``sum_t left_t^T K right_t``, left ``(n, t)``, right ``(m, t)``, to those in ``found``."""
    coefficients = result.get(("coefficients", 0))
    if coefficients is not None:
        coefficients[one.empty] += left.sum(dim=0) @ right.sum(dim=0)
    # What to compute for each pair; both sides' gradients are the same formula with the sides exchanged.
    groups: list[Key] = [("term", t) for t in range(len(one.terms)) if coefficients is not None]
    groups += [("alpha", a) for a in range(len(one.left)) if ("alpha", a) in result]
    groups += [("force", a) for a in range(len(one.left)) if ("left", a) in result or ("right", a) in result]
    if not groups or not left.numel() or not right.numel():
        return
    if one.same:  # the two sides are one, whose gradient has the weights w_ij + w_ji
        left, right = torch.cat([left, right], dim=-1), torch.cat([right, left], dim=-1)
    share = 0.5 if one.same else 1.0
    for (_, u), (_, v) in zip(_chunks(left), _chunks(right), strict=True):
        for key, columns in _sweep(one, groups, u, v):
            if key[0] == "term" and coefficients is not None:
                coefficients[one.filled[key[1]]] += share * columns.sum()
            elif key[0] == "alpha":
                result[key] += share * one.scale * columns.sum()
            elif ("left", key[1]) in result:
                result["left", key[1]] -= one.scale * columns
        if any(side == "right" for side, _ in result):
            for key, columns in _sweep(replace(one, left=one.right, right=one.left), groups, v, u):
                if key[0] == "force" and ("right", key[1]) in result:
                    result["right", key[1]] -= one.scale * columns


def _sweep(one: _One, groups: list[Key], left: Tensor, right: Tensor) -> Iterator[tuple[Key, Tensor]]:
    """Yield each group with its formula times ``left_i . right_j``, summed over j: ``(n, 1)``; forces ``(n, p)``."""
    pair = _Pair(one)
    weight = _symbol(left, 0) | _symbol(right, 1)
    formulas = [getattr(pair, name)(weight, index) for name, index in groups]
    widths = [one.left[index].shape[-1] if name == "force" else 1 for name, index in groups]
    columns = _reduce(one, functools.reduce(lambda a, b: a.concat(b), formulas))
    yield from zip(groups, columns.split(widths, dim=-1), strict=True)


# --- one matrix, and the formula of one of its pairs ----------------------------------------------------------


@dataclass(frozen=True)
class _One:
    """One matrix of a batch.

    :ivar left: ``(n, p)`` for each atom, :ivar right: ``(m, p)``, :ivar alpha: ``(1,)`` or None.
    :ivar terms: those that are not empty, :ivar filled: where they are among all, :ivar empty: where the others are.
    :ivar coefficients: ``(T,)``, of ``terms``, :ivar constant: the sum of the coefficients of the others.
    :ivar same: whether left and right are the same points.
    """

    profiles: tuple[Profile, ...]
    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    alpha: tuple[Tensor | None, ...]
    terms: tuple[tuple[int, ...], ...]
    filled: list[int]
    empty: list[int]
    coefficients: Tensor
    constant: Tensor
    same: bool

    @classmethod
    def of(cls, expression: Expression, prepared: Prepared, index: int) -> _One:
        batched = prepared.coefficients.dim() > 1

        def take(x: Tensor) -> Tensor:
            return (x[index] if batched else x).detach().contiguous()

        coefficients = take(prepared.coefficients)
        filled, empty = ([t for t, term in enumerate(expression.terms) if bool(term) is full] for full in (True, False))
        return cls(
            profiles=tuple(atom.profile for atom in expression.atoms),
            left=tuple(take(f.left) for f in prepared.features),
            right=tuple(take(f.right) for f in prepared.features),
            alpha=tuple(None if f.alpha is None else take(f.alpha).reshape(1) for f in prepared.features),
            terms=tuple(expression.terms[t] for t in filled),
            filled=filled,
            empty=empty,
            coefficients=coefficients[filled],
            constant=coefficients[empty].sum(),
            same=all(f.left is f.right for f in prepared.features),
        )

    @property
    def scale(self) -> Tensor | float:
        """The coefficient of a single term, which is left out of the formula."""
        return self.coefficients[0] if len(self.terms) == 1 else 1.0


class _Pair:
    """Formulas of one pair of points, with parts that repeat: ``_reduce`` has KeOps look for these."""

    def __init__(self, one: _One) -> None:
        self.terms = one.terms
        self.coefficients = _symbol(one.coefficients, 2) if len(one.terms) > 1 else None
        self.atoms = [_phi(*part) for part in zip(one.profiles, one.left, one.right, one.alpha, strict=True)]

    def kernel(self) -> Symbol:
        """The sum of all terms, up to ``scale``."""
        return functools.reduce(operator.add, (self._product(t) for t in range(len(self.terms))))

    def term(self, weight: Symbol, t: int) -> Symbol:
        """One term without its coefficient."""
        return functools.reduce(operator.mul, (self.atoms[a].value for a in self.terms[t]), weight)

    def alpha(self, weight: Symbol, a: int) -> Symbol:
        """The derivative by one atom's shape parameter."""
        return weight * self._outer(a) * self.atoms[a].of_alpha

    def force(self, weight: Symbol, a: int) -> Symbol:
        """Minus the derivative by one atom's left features."""
        return weight * self._outer(a) * self.atoms[a].force * self.atoms[a].direction

    def _outer(self, a: int) -> Symbol:
        """The derivative of the sum of all terms by the value of one atom, up to ``scale``."""
        places = [(t, i) for t, term in enumerate(self.terms) for i, b in enumerate(term) if b == a]
        return functools.reduce(operator.add, (self._product(t, without=i) for t, i in places))

    def _product(self, t: int, without: int | None = None) -> Symbol:
        factors = [self.atoms[a].value for i, a in enumerate(self.terms[t]) if i != without]
        if self.coefficients is not None:
            factors.insert(0, self.coefficients.elem(t))
        return functools.reduce(operator.mul, factors) if factors else 1


class _Phi(NamedTuple):
    """Formulas of one atom: phi, its derivative by alpha, and by the left features as ``-force * direction``."""

    value: Symbol
    force: Symbol
    direction: Symbol
    of_alpha: Symbol = None


def _phi(profile: Profile, left: Tensor, right: Tensor, alpha: Tensor | None) -> _Phi:
    x, y = _symbol(left, 0), _symbol(right, 1)
    if profile.name == "laplace":
        value = (-(x - y).abs().sum(-1)).exp()
        return _Phi(value, value, (x - y).sign())
    q = x.sqdist(y)
    if profile.name == "gauss":
        value = (-q / 2).exp()
        return _Phi(value, value, x - y)
    if profile.name == "rational_quadratic":
        assert alpha is not None
        # log(1 + t), where 1 + t was rounded.  KeOps would reduce the correction to 0 if it knew that 1 is 1.
        half, shape, unit = (_symbol(v, 2) for v in (0.5 / alpha, alpha, torch.ones_like(alpha)))
        t = q * half
        u = unit + t
        logarithm = u.log() + (t - (u - unit)) / u
        value = (-shape * logarithm).exp()
        return _Phi(value, value / u, x - y, value * (t / u - logarithm))
    s = q.sqrt()
    decay = (-s).exp()
    if profile.name == "matern12":
        return _Phi(decay, decay * q.rsqrt(), x - y)  # KeOps takes the inverse root of 0 as 0
    if profile.name == "matern32":
        return _Phi((1 + s) * decay, decay, x - y)
    assert profile.name == "matern52"
    third = _symbol(left.new_tensor([1 / 3]), 2)  # KeOps would write it in float32
    return _Phi((1 + s + s * s * third) * decay, (1 + s) * decay * third, x - y)


# --- calls of KeOps -------------------------------------------------------------------------------------------


def _symbol(x: Tensor, axis: int) -> Symbol:
    """``x`` as a variable of i (axis 0, shape ``(n, p)``), of j (1) or of neither (2, shape ``(p,)``)."""
    from pykeops.torch import LazyTensor

    return LazyTensor(x.contiguous(), axis=axis)


def _reduce(one: _One, formula: Symbol) -> Tensor:
    """The sum over j, ``(n, p)`` for a formula of p columns."""
    backend = "GPU" if one.coefficients.device.type == "cuda" else "CPU"
    fast = all(alpha is None for alpha in one.alpha)  # CUDA's fast logarithm has too few digits for a large alpha
    with _LOCK:
        return formula.auto_factorize().sum(dim=1, backend=backend, use_fast_math=fast)


def _chunks(vectors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The columns of ``(n, t)`` in chunks of few widths, the last padded with zeros."""
    t, widest, width = vectors.shape[-1], _WIDTHS[-1], _width(vectors.shape[-1])
    for start in range(0, t, widest):
        chunk = vectors[:, start : start + widest]
        yield slice(start, start + chunk.shape[-1]), nn.functional.pad(chunk, (0, width - chunk.shape[-1]))


def _width(columns: int) -> int:
    """Return the width of the chunks of this many columns."""
    return next((w for w in _WIDTHS if w >= columns), _WIDTHS[-1])

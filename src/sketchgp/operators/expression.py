"""Kernels with fast tiles as expressions: sums of products of functions of distances.

A recognised kernel becomes an :class:`Expression`, ``k = sum_t c_t prod_{a in terms[t]} phi_a(q_a)``, where ``q_a`` is
the squared Euclidean (or l1) distance of features that are cheap to compute, once for each row of x1 and x2:

- RBF, Matern, rational quadratic, l1 Laplace: the inputs, centred and divided by the lengthscale;
- periodic: ``exp(-2 sum_i sin^2(pi d_i / p) / l_i)`` is the Gaussian of the points ``(cos, sin)(2 pi x_i / p)`` on
  circles of radius ``l_i^(-1/2)``, as ``|u - v|^2 = 4 sin^2`` of half the angle between them.

Gaussians that are multiplied become one Gaussian of the concatenated features, and so do Laplace kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    CosineKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from ..devices import here, sent
from ..errors import InputError
from ..kernels import LaplaceKernel
from .generic_tiles import BatchElement
from .lazies import check_columns
from .profiles import GAUSS, LAPLACE, MATERN, RATIONAL_QUADRATIC, WAVES, Profile

T = TypeVar("T")
_SEEN = {torch.float32: 1e-3, torch.float64: 1e-8}  # errors of a squared distance above which points are far
_MOST = 16  # terms and factors; beyond, calling the kernel is simpler and as fast


# of each atom, ``(n,)`` and ``(m,)`` bool on the CPU: which rows and columns are far from the centre; None of one where
# no pair is
Known = Sequence[tuple[Tensor, Tensor] | None]


class Leaf(NamedTuple):
    """A kernel of one distance, and the input dimensions it looks at (None for all)."""

    kernel: Kernel
    dims: tuple[int, ...] | None


@dataclass(frozen=True)
class Atom:
    """One factor ``phi(q)``: a profile, and the leaves whose features are concatenated."""

    profile: Profile
    leaves: tuple[Leaf, ...]


@dataclass
class Features:
    """Features of the inputs for one atom, left ``(*b, n, p)`` and right ``(*b, m, p)``; equal points share a tensor.

    :ivar weight: ``(*b, 1, p)`` where the features are the inputs times it, else None (periodic kernels).
    :ivar alpha: the shape parameter of a rational quadratic kernel, ``(*b, 1, 1)`` or ``()``.
    :ivar memo: values made of the right side alone, which parts of a matrix with the same one share.
    :ivar whole: for a part of a matrix, the features of all its rows and columns.
    :ivar rows: and ``columns``, for a part of a matrix: their indices in the whole; None for all.
    """

    left: Tensor
    right: Tensor
    weight: Tensor | None
    alpha: Tensor | None
    memo: dict[str, Any] = field(default_factory=dict, repr=False)
    whole: Features | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None

    @property
    def root(self) -> Features:
        """Features of all rows and columns, which these are some of."""
        return self if self.whole is None else self.whole.root

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return ``make()``, remembered for other parts of a matrix with the same right side."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]

    @cached_property
    def far(self) -> tuple[Tensor, Tensor] | None:
        """Masks of far rows and far columns, on the CPU; None where either has none.

        They are computed once for all parts of a matrix, since a device is waited for.
        """
        if self.whole is None:
            sides = [far_points(side.square().sum(dim=-1)) for side in (self.left, self.right)]
            rows, columns = torch.cat(sides).cpu().split([len(side) for side in sides])
        elif self.whole.far is None:
            return None
        else:
            indices = zip(self.whole.far, (self.rows, self.columns), strict=True)
            rows, columns = (mask if i is None else mask[here(i)] for mask, i in indices)
        return (rows, columns) if bool(rows.any() & columns.any()) else None


def far_points(squares: Tensor) -> Tensor:
    """Return a mask of points whose squared distances may be wrong by more than ``_SEEN`` in some matrix of a batch."""
    limit = _SEEN[squares.dtype] / (8 * torch.finfo(squares.dtype).eps)
    return (squares > limit).reshape(-1, squares.shape[-1]).any(dim=0)


@dataclass
class Prepared:
    """Features of every atom and the coefficients ``(*b, T)`` of the terms; ``b`` is () or (B,), the flattened batch.

    All of it depends differentiably on the inputs and parameters it was made of.
    """

    features: tuple[Features, ...]
    coefficients: Tensor

    def converted(self, convert: Callable[[Tensor], Tensor]) -> Prepared:
        """Return the same values, converted: detached, or of another dtype."""
        parts = []
        for f in self.features:
            left = convert(f.left)
            right = left if f.right is f.left else convert(f.right)
            weight, alpha = (None if t is None else convert(t) for t in (f.weight, f.alpha))
            parts.append(Features(left, right, weight, alpha, whole=f))
        return Prepared(tuple(parts), convert(self.coefficients))

    def part(self, rows: Tensor | None, columns: Tensor | None) -> Prepared:
        """Return the features of some rows of x1 and x2 (all where None)."""

        def take(x: Tensor, index: Tensor | None) -> Tensor:
            return x if index is None else x.index_select(-2, index)

        features = []
        for f in self.features:
            memo = f.memo if columns is None else {}
            sides = take(f.left, rows), take(f.right, columns)
            features.append(Features(*sides, f.weight, f.alpha, memo, f, rows=rows, columns=columns))
        return Prepared(tuple(features), self.coefficients)


@dataclass(frozen=True)
class Expression:
    """``k = sum_t c_t prod_{a in terms[t]} phi_a``; ``scales[t]`` are the modules whose scales make up ``c_t``.

    :ivar element: which kernel of a batch it is; None for the kernel, or the batch, itself.
    """

    atoms: tuple[Atom, ...]
    terms: tuple[tuple[int, ...], ...]
    scales: tuple[tuple[Kernel, ...], ...]
    element: BatchElement | None = None

    def own(self, parameter: Tensor, trailing: int) -> Tensor:
        """Return a parameter with ``trailing`` dimensions behind its batch, or that of the one kernel of the batch."""
        return parameter if self.element is None else self.element.own(parameter, trailing)

    def prepare(
        self,
        x1: Tensor,
        x2: Tensor,
        same: bool,
        batch: torch.Size,
        dtype: torch.dtype,
        centre: Tensor,
        known: Known | None = None,
    ) -> Prepared:
        """Return features and coefficients for x1 ``(..., n, d)`` and x2 ``(..., m, d)``, computed in ``dtype``.

        :param centre: ``(..., 1, d)``, a constant: what inputs are counted from.
        :param known: of each atom, which rows and columns are far from the centre; None where that is not known.
        """
        x1 = x1.to(dtype)
        x2 = x1 if same else x2.to(dtype)
        centre = centre.to(x1)
        features = []
        for number, atom in enumerate(self.atoms):
            left, weight = self._features(atom, x1, centre)
            left = _flat(left, batch)
            right = left if same else _flat(self._features(atom, x2, centre)[0], batch)
            alpha = None
            if atom.profile is RATIONAL_QUADRATIC:
                alpha = self.own(atom.leaves[0].kernel.alpha, 1).to(dtype)  # (*b, 1)
                alpha = _flat(alpha.unsqueeze(-1), batch) if len(batch) else alpha.reshape(())
            weight = None if weight is None else _flat(weight, batch)
            features.append(Features(left, right, weight, alpha))
            if known is not None:
                features[-1].far = known[number]
        coefficients = []
        for scales in self.scales:
            c = torch.ones((), dtype=dtype, device=x1.device)
            for kernel in scales:
                c = c * self.own(_scale(kernel), 0)
            coefficients.append(c.to(dtype).expand(batch).flatten() if len(batch) else c.to(dtype).reshape(()))
        return Prepared(tuple(features), torch.stack(coefficients, dim=-1))

    def _features(self, atom: Atom, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features ``(..., n, p)`` and, where they are ``x - centre`` times a weight, that weight ``(..., 1, p)``."""
        parts: list[Tensor] = []
        weights: list[Tensor | None] = []
        for leaf in atom.leaves:
            z, c = x, centre
            if leaf.dims is not None:
                dims = sent(torch.tensor(leaf.dims, dtype=torch.long, device="cpu"), x.device)
                z, c = x[..., dims], centre[..., dims]
            if atom.profile is WAVES:
                parts.append(z - c)
                weights.append(None)
                continue
            check_columns(leaf.kernel, z)
            lengthscale = self.own(leaf.kernel.lengthscale, 2)
            if type(leaf.kernel) is PeriodicKernel:
                # The fraction of a period is taken in float64: an angle of many turns has few digits left for it.
                turns = (z.to(torch.float64) - c) / self.own(leaf.kernel.period_length, 2).to(torch.float64)
                angle = (turns - turns.detach().round()) * (2 * math.pi)
                radius = lengthscale.to(torch.float64).rsqrt()
                parts.append((torch.cat([angle.cos() * radius, angle.sin() * radius], dim=-1)).to(x.dtype))
                weights.append(None)
                continue
            sharpness = math.sqrt(2 * leaf.kernel.nu) if type(leaf.kernel) is MaternKernel else 1.0
            weight = sharpness / lengthscale.to(x.dtype)
            parts.append((z - c) * weight)
            weights.append(weight.expand(*weight.shape[:-1], z.shape[-1]))
        if len(parts) == 1:
            return parts[0], weights[0]
        known = [w for w in weights if w is not None]
        return _beside(parts), _beside(known) if len(known) == len(weights) else None


def _beside(parts: list[Tensor]) -> Tensor:
    """Return matrices ``(..., n, p)``, whose batches are broadcast, side by side."""
    batch = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
    return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in parts], dim=-1)


def _scale(kernel: Kernel) -> Tensor:
    """Return the factor of a term that a module stands for, ``(*b,)``."""
    if isinstance(kernel, ScaleKernel):
        return kernel.outputscale
    if isinstance(kernel, SpectralMixtureKernel):  # a product over dimensions of sums over mixtures
        return kernel.mixture_weights.sum(dim=-1) ** kernel.mixture_means.shape[-1]
    return kernel.constant.squeeze(-1)


def recognise(kernel: Kernel, waves: bool = False) -> Expression | None:
    """Return the expression of a kernel; None for one that is not recognised.

    Recognised are scaled RBF, Matern, rational quadratic, periodic, l1 Laplace and constant kernels, and their sums and
    products.

    Exact types only: a subclass may compute something else.

    :param waves: whether spectral mixture and cosine kernels are as good, as atoms of the profile ``WAVES``: of these
        only frequencies are known (:mod:`.spectrum`), no tiles.
    """
    if type(kernel) is BatchElement:
        whole = recognise(kernel.whole, waves)
        return None if whole is None else replace(whole, element=kernel)
    terms = _terms(kernel, None, waves)
    if terms is None or len(terms) > _MOST:
        return None
    merged = [_merge(leaves) for _, leaves in terms]
    atoms = tuple(dict.fromkeys(atom for term in merged for atom in term))
    if len(atoms) > _MOST:
        return None
    indices = tuple(tuple(sorted(map(atoms.index, term))) for term in merged)
    return Expression(atoms, indices, tuple(scales for scales, _ in terms))


def recognise_waves(kernel: Kernel, advice: str = "", owner: str = "") -> Expression:
    """Return the expression of a kernel that has random features.

    :param advice: what else a caller may do; :param owner: what the message begins with.
    :raises InputError: for another kernel.
    """
    expression = recognise(kernel, waves=True)
    if expression is None:
        head = f"{owner}: " if owner else ""
        raise InputError(
            f"{head}{type(kernel).__name__} has no random features here; they are known of RBF, Matern, rational "
            "quadratic, periodic, LaplaceKernel, spectral mixture, cosine and constant kernels, scaled, added and "
            f"multiplied.{advice}"
        )
    return expression


Term = tuple[tuple[Kernel, ...], tuple[Leaf, ...]]  # what scales it, what it is a product of


def _terms(kernel: Kernel, dims: tuple[int, ...] | None, waves: bool) -> list[Term] | None:
    """Multiply the kernel out; None where a part is not recognised."""
    if type(kernel) is ScaleKernel:  # calls its base kernel's forward: active dimensions were selected already
        inner = _terms(kernel.base_kernel, dims, waves)
        return None if inner is None else [((kernel, *scales), leaves) for scales, leaves in inner]
    if type(kernel) is ConstantKernel:
        return [((kernel,), ())]
    if type(kernel) in (AdditiveKernel, ProductKernel):
        parts = [_terms(part, _select(dims, part.active_dims), waves) for part in kernel.kernels]
    elif waves and type(kernel) is SpectralMixtureKernel:
        return [((kernel,), (Leaf(kernel, dims),))]
    else:
        known = profile_of(kernel) is not None or (waves and type(kernel) is CosineKernel)
        return [((), (Leaf(kernel, dims),))] if known else None
    if any(part is None for part in parts):
        return None
    if type(kernel) is AdditiveKernel:
        return [term for part in parts for term in part or []]
    product: list[Term] = [((), ())]
    for part in parts:
        product = [(s1 + s2, l1 + l2) for s1, l1 in product for s2, l2 in part or []]
        if len(product) > _MOST:
            return None
    return product


def profile_of(kernel: Kernel) -> Profile | None:
    """Return the profile of a kernel of one distance; None for other kernels."""
    if type(kernel) in (RBFKernel, PeriodicKernel):
        return GAUSS
    if type(kernel) is MaternKernel:
        return MATERN[kernel.nu]
    if type(kernel) is RQKernel:
        return RATIONAL_QUADRATIC
    return LAPLACE if type(kernel) is LaplaceKernel else None


def _select(dims: tuple[int, ...] | None, active: Tensor | None) -> tuple[int, ...] | None:
    if active is None:
        return dims
    indices = here(active).tolist()
    return tuple(indices) if dims is None else tuple(dims[i] for i in indices)


def _merge(leaves: tuple[Leaf, ...]) -> list[Atom]:
    """One atom for all Gaussians of a product, one for all Laplace kernels, one for each of the rest."""
    atoms: list[Atom] = []
    for profile in (GAUSS, LAPLACE):
        merged = tuple(leaf for leaf in leaves if profile_of(leaf.kernel) is profile)
        if merged:
            atoms.append(Atom(profile, merged))
    for leaf in leaves:
        own = profile_of(leaf.kernel) or WAVES
        if own not in (GAUSS, LAPLACE):
            atoms.append(Atom(own, (leaf,)))
    return atoms


def _flat(x: Tensor, batch: torch.Size) -> Tensor:
    """Expand the batch dimensions of x (..., n, p) to ``batch``, and flatten them (to none where it is empty)."""
    return (
        x.expand(*batch, *x.shape[-2:]).reshape(batch.numel(), *x.shape[-2:]) if len(batch) else x.reshape(x.shape[-2:])
    )

"""The one sampler of spectral densities: frequencies of a kernel's factors from uniform numbers, by inverse CDFs.

By Bochner's theorem a stationary kernel with ``k(0) = 1`` is ``k(u - v) = E cos(w . (u - v))`` over frequencies w of
its spectral density.  Those are known of what :mod:`~sketchgp.operators.expression` makes of kernels: a factor is a
function of features of the inputs, Gaussian (normal frequencies), Matern (multivariate t with 2 nu degrees of freedom:
normal over the root of a gamma variable), rational quadratic (normal times the root of one) or l1 Laplace (Cauchy, one
for each dimension).  A periodic kernel is a Gaussian of points on circles.  A spectral mixture's are normal about the
means of its components, in each dimension for itself; a cosine has one.  Frequencies of factors add, functions of terms
are independent.

A row of uniform numbers makes a frequency, by monotone functions of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import CosineKernel
from scipy.special import gammaincinv
from torch import Tensor

from ..errors import InputError
from ..random_streams import salted
from .expression import Expression, Features
from .profiles import GAUSS, LAPLACE, RATIONAL_QUADRATIC, WAVES


def numbers(expression: Expression, term: Sequence[int], features: Sequence[Features]) -> list[int]:
    """Return how many uniform numbers a frequency of each factor of a term takes."""
    factors = [(expression.atoms[index].profile, features[index].left.shape[-1]) for index in term]
    return [{GAUSS: width, LAPLACE: width, WAVES: 3 * width}.get(profile, width + 1) for profile, width in factors]


def heavy(expression: Expression, index: int) -> bool:
    """Return whether frequencies are heavy-tailed, so that phases need float64."""
    return expression.atoms[index].profile not in (GAUSS, WAVES)


def draw_frequencies(
    expression: Expression, term: Sequence[int], features: Sequence[Features], uniforms: Tensor
) -> list[Tensor]:
    """Return frequencies ``(count, width)`` of each factor of a term, in turns, float64 on the device of the uniforms.

    :param features: of all factors, at any point; :param uniforms: ``(count, sum(numbers(...)))`` in (0, 1).
    """
    parts = uniforms.split(numbers(expression, term, features), dim=1)
    drawn = [_frequencies(expression, index, features[index], own) for index, own in zip(term, parts, strict=True)]
    return [w.div_(2 * math.pi) for w in drawn]


def _frequencies(expression: Expression, index: int, features: Features, uniforms: Tensor) -> Tensor:
    """Return frequencies of the factor ``phi(q)`` of this index."""
    width, alpha = features.left.shape[-1], features.alpha
    atom = expression.atoms[index]
    if atom.profile is LAPLACE:
        return uniforms.sub(0.5).mul_(math.pi).tan_()
    if atom.profile is WAVES:
        return _waves_of(expression, atom.leaves[0].kernel, uniforms, width)
    normal = torch.special.ndtri(uniforms[:, :width])
    if atom.profile is GAUSS:
        return normal
    if atom.profile is RATIONAL_QUADRATIC:
        assert alpha is not None
        shape = float(alpha.detach())
        return normal * (_gamma(shape, uniforms[:, width:]) / shape).sqrt()
    # Matern: features are sqrt(2 nu) x / lengthscale, so that the t with 2 nu degrees of freedom is a normal over the
    # root of a chi square, which is twice a gamma variable of the shape nu
    return normal / (2 * _gamma(float(atom.leaves[0].kernel.nu), uniforms[:, width:])).sqrt()


def _gamma(shape: float, uniforms: Tensor) -> Tensor:
    """Gamma variables of scale 1."""
    return torch.as_tensor(gammaincinv(shape, uniforms.cpu().numpy())).to(uniforms)


def _waves_of(expression: Expression, kernel: Any, uniforms: Tensor, p: int) -> Tensor:
    """Return frequencies of a spectral mixture or a cosine kernel, of either sign in every dimension.

    :raises InputError: for a cosine of the distance in several dimensions, which is no covariance.
    """
    first, second, third = uniforms.split(p, dim=1)
    signs = torch.where(first < 0.5, -1.0, 1.0).to(uniforms)
    if isinstance(kernel, CosineKernel):
        if p > 1:
            raise InputError(f"A CosineKernel of {p} dimensions is no covariance; give each its own by active_dims.")
        period = expression.own(kernel.period_length, 2).detach().to(uniforms)
        return math.pi / period * signs
    means, scales = (
        expression.own(t, 3).detach().to(uniforms).reshape(-1, p) for t in (kernel.mixture_means, kernel.mixture_scales)
    )
    weights = expression.own(kernel.mixture_weights, 1).detach().to(uniforms)
    steps = (weights.cumsum(0) / weights.sum())[:-1]
    which = torch.searchsorted(steps.contiguous(), third.contiguous(), right=True)
    normal = torch.special.ndtri(second)
    return (means.gather(0, which) + scales.gather(0, which) * normal) * signs * (2 * math.pi)


_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_NUMBERS = 2**15  # made at once, in the cache of a processor; ten times as fast as all at once
_CUDA_NUMBERS = 2**24


class Philox:
    """Independent numbers: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
    3" (SC 2011), its counter the place, its key the seed; a number is one word of 32 bits, ``(w + 1/2) / 2^32``.

    :param seed: any integer; :param purpose: as for :func:`sketchgp.random_streams.generator`.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        key = salted(seed, purpose)
        self._key = key & _MASK, key >> 32

    def __call__(self, rows: Tensor, columns: int) -> Tensor:
        """Return numbers ``(r, columns)`` in (0, 1), float64, for int64 ``rows`` ``(r,)``, at least 0."""
        fours = -(-columns // 4)
        most = _CUDA_NUMBERS if rows.device.type == "cuda" else _NUMBERS
        place = torch.arange(fours, device=rows.device)
        parts = [
            torch.stack(philox((part & _MASK).unsqueeze(1), (part >> 32).unsqueeze(1), place, 0, *self._key), dim=-1)
            .reshape(len(part), 4 * fours)[:, :columns]
            .to(torch.float64)
            for part in rows.split(max(1, most // max(1, 4 * fours)))
        ]
        result = torch.cat(parts) if parts else rows.new_zeros(0, columns, dtype=torch.float64)
        return result.add_(0.5).mul_(2.0**-32)


def philox(
    c0: Tensor, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, k0: int, k1: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits of a counter of four and a key of two, all int64; tensors broadcast.

    The high word of a product of 64 bits is right whatever its sign bit says.
    """
    x0, x1, x2, x3 = torch.broadcast_tensors(*(torch.as_tensor(c, device=c0.device) for c in (c0, c1, c2, c3)))
    for _ in range(_ROUNDS):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((p1 >> 32) & _MASK) ^ x1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ x3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3

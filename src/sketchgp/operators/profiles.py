"""The functions of one distance that fast tiles are made of: value and slope, in place, in few passes.

A profile is a function ``phi(q)`` of the squared Euclidean distance ``q`` of two scaled inputs (of their l1 distance
for ``LAPLACE``).  A tile holds ``t = factor * q`` to begin with; constants are left out where they can be put into the
output scale.  On an Intel processor everything is done by ``exp`` and ``sqrt``, which torch calls Intel's library for:
in float64 they take a half and a quarter of the time of ``exp2`` and ``pow(-0.5)``.  Elsewhere that library takes four
and two times as long as these, so that base 2 and inverse roots are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..devices import by_intel

LOG2E = math.log2(math.e)
_NATURAL = by_intel()
RATE = 1.0 if _NATURAL else LOG2E  # exponents of exponential functions are in units of 1 / RATE
_power = torch.exp if _NATURAL else torch.exp2

Buffer = Callable[[], Tensor]
Slopes = tuple[Tensor, Tensor, Tensor | None]  # V, S and, with a shape parameter, the derivative in it
# Exponents below which a value counts as much as any: its square, and its products with vectors, are still normal
# numbers.  What CPUs make of others takes them up to a hundred times as long.
LEAST = {torch.float32: -60 * RATE / LOG2E, torch.float64: -500 * RATE / LOG2E}


@dataclass(frozen=True)
class Profile:
    """One function ``phi``.  With ``V`` and ``S`` from the functions below, ``phi = gain V``, ``phi' = gain slope S``.

    :ivar name: what other engines know it by.
    :ivar l1: whether ``q`` is the l1 distance instead of the squared Euclidean one.
    :ivar factor: ``t / q``; where there is a shape parameter alpha, ``factor / alpha`` is.
    :ivar value: ``value(t, spare, alpha)`` overwrites both and returns the one that holds V.
    :ivar derivative: ``derivative(t, spare, alpha, more)`` overwrites both and returns V, S and, with a shape
        parameter, ``(d phi / d alpha) / gain``; ``more()`` gives further buffers.
    """

    name: str
    l1: bool
    factor: float
    gain: float
    slope: float
    value: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    derivative: Callable[[Tensor, Tensor, Tensor | None, Buffer], Slopes]

    def at(self, q: Tensor, alpha: Tensor | None) -> Tensor:
        """Return ``phi(q)``; q stays as it is."""
        t = q * (self.factor if alpha is None else self.factor / alpha)
        return self.gain * self.value(t, torch.empty_like(t), alpha)

    def __reduce__(self) -> tuple[Callable[[str], Profile], tuple[str]]:
        return _by_name, (self.name,)  # one object each: copies and unpickled ones too


def _gauss(t: Tensor, spare: Tensor, alpha: Tensor | None) -> Tensor:
    return _power(t, out=t)  # a rounding error that makes q slightly negative is as harmless as one that does not


def _gauss_derivative(t: Tensor, spare: Tensor, alpha: Tensor | None, more: Buffer) -> Slopes:
    value = _power(t, out=t)
    return value, value, None


def _tiny(t: Tensor) -> float:
    """Return a substitute for t = 0 in inverse roots; its root is so small that ``1 - root`` rounds to 1."""
    return 1e-60 if t.dtype == torch.float64 else 1e-30


def _inverse_root(t: Tensor, spare: Tensor) -> Tensor:
    """Return ``t^(-1/2)`` for ``t = (s RATE)^2``, limited so that it and ``exp(-s)`` stay normal numbers."""
    return torch.pow(t.clamp_(min=_tiny(t), max=LEAST[t.dtype] ** 2), -0.5, out=spare)


def _exponent(t: Tensor, spare: Tensor, shift: float = RATE) -> Tensor:
    """Return ``-sqrt(t) - shift`` in ``spare``: with ``t = (s RATE)^2`` this is ``-(1 + s) RATE`` by default."""
    start = t.new_full((), -shift)
    if _NATURAL:
        return torch.sub(start, torch.sqrt(t.clamp_(min=0, max=LEAST[t.dtype] ** 2), out=spare), out=spare)
    return torch.addcmul(start, t, _inverse_root(t, spare), value=-1, out=spare)


def _matern12(t: Tensor, spare: Tensor, alpha: Tensor | None) -> Tensor:
    return _power(_exponent(t, spare, 0), out=spare)


def _matern12_derivative(t: Tensor, spare: Tensor, alpha: Tensor | None, more: Buffer) -> Slopes:
    inverse = _inverse_root(t, spare)
    value = _power(torch.addcmul(t.new_zeros(()), t, inverse, value=-1, out=t), out=t)
    # phi' = -phi / (2 s); at s = 0 the kernel has a kink, and the slope is taken as 0
    return value, inverse.masked_fill_(inverse > 0.9 * _tiny(t) ** -0.5, 0).mul_(value), None


def _matern32(t: Tensor, spare: Tensor, alpha: Tensor | None) -> Tensor:
    u = _exponent(t, spare)
    return u.mul_(_power(u, out=t))  # -(1 + s) exp(-s)


def _matern32_derivative(t: Tensor, spare: Tensor, alpha: Tensor | None, more: Buffer) -> Slopes:
    u = _exponent(t, spare)
    decay = _power(u, out=t)
    return u.mul_(decay), decay, None  # phi' = -exp(-s) / 2


def _matern52(t: Tensor, spare: Tensor, alpha: Tensor | None) -> Tensor:
    u = _exponent(t, spare)
    polynomial = t.sub_(u, alpha=3 * RATE)  # (s^2 + 3 s + 3) RATE^2
    return polynomial.mul_(_power(u, out=u))


def _matern52_derivative(t: Tensor, spare: Tensor, alpha: Tensor | None, more: Buffer) -> Slopes:
    u = _exponent(t, spare)
    polynomial, decay = t.sub_(u, alpha=3 * RATE), _power(u, out=more())
    return polynomial.mul_(decay), u.mul_(decay), None  # phi' = -(1 + s) exp(-s) / 6


def _rational_quadratic(t: Tensor, spare: Tensor, alpha: Tensor | None) -> Tensor:
    assert alpha is not None
    value = torch.log1p(t.clamp_(min=0), out=spare).mul_(alpha * -RATE)
    return _power(value, out=value)  # (1 + t)^-alpha, t = q / (2 alpha)


def _rational_quadratic_derivative(t: Tensor, spare: Tensor, alpha: Tensor | None, more: Buffer) -> Slopes:
    assert alpha is not None
    logarithm = torch.log1p(t.clamp_(min=0), out=spare)
    value = torch.mul(logarithm, alpha * -RATE, out=more())
    value = _power(value, out=value)
    inverse = torch.add(t, 1, out=more()).reciprocal_()
    of_alpha = t.mul_(inverse).sub_(logarithm).mul_(value)  # phi (t / (1 + t) - log(1 + t))
    return value, inverse.mul_(value), of_alpha  # phi' = -phi / (2 (1 + t))


GAUSS = Profile("gauss", False, -RATE / 2, 1.0, -0.5, _gauss, _gauss_derivative)
MATERN = {
    0.5: Profile("matern12", False, RATE**2, 1.0, -RATE / 2, _matern12, _matern12_derivative),
    1.5: Profile("matern32", False, RATE**2, -math.e / RATE, RATE / 2, _matern32, _matern32_derivative),
    2.5: Profile("matern52", False, RATE**2, math.e / (3 * RATE**2), RATE / 2, _matern52, _matern52_derivative),
}
RATIONAL_QUADRATIC = Profile(
    "rational_quadratic", False, 0.5, 1.0, -0.5, _rational_quadratic, _rational_quadratic_derivative
)
LAPLACE = Profile("laplace", True, -RATE, 1.0, -1.0, _gauss, _gauss_derivative)


def _refused(*_: object) -> NoReturn:
    raise NotImplementedError("A kernel that is known by its random features has no tiles of its own.")


WAVES = Profile("waves", False, 1.0, 1.0, 1.0, _refused, _refused)  # what only random features are made of
_ALL = {profile.name: profile for profile in (GAUSS, *MATERN.values(), RATIONAL_QUADRATIC, LAPLACE, WAVES)}


def _by_name(name: str) -> Profile:
    return _ALL[name]

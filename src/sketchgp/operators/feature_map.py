"""Random features that are made anew wherever they are needed: ``k(u, v) ~ 1/N sum_i phi_i(u) phi_i(v)``."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import sent
from .expression import Prepared, recognise_waves
from .spectrum import Philox, draw_frequencies, heavy, numbers

_PATTERN = 64  # pairs of features among which the terms of a kernel have their shares
_CHUNK = 256  # numbers of a term for which frequencies are made together
_KEPT = 2**26  # bytes of frequencies that are kept, whatever the kernel and the data


class Made(NamedTuple):
    """Values that the features of points are made of.

    :ivar parts: of each factor ``(p, width)``, float64 where its frequencies are heavy-tailed; :ivar coefficients: of
        each term ``(T,)``, of the dtype of features.
    :ivar points: p.
    """

    parts: list[Tensor]
    coefficients: Tensor
    points: int


class _Term(NamedTuple):
    """One summand of the kernel.

    :ivar factors: indices; none of a constant.
    :ivar slots: ``(s,)`` places in a pattern of ``_PATTERN`` pairs that are this term's.
    :ivar uniforms: where its random numbers come from.
    """

    factors: tuple[int, ...]
    slots: Tensor
    uniforms: Philox


class RandomFeatures:
    """Pairs of features ``(phi_2l, phi_2l+1)``, ``E phi(u) phi(v) = k(u, v)``, by their number l.

    For a stationary term ``c k`` a pair is ``(2 c)^1/2 (cos w.u, sin w.u)``, w from the spectral density
    (:mod:`~sketchgp.operators.spectrum`): Rahimi and Recht (NeurIPS 2007); without a random phase, whose variance is
    larger (Sutherland and Schneider, "On the error of random Fourier features", UAI 2015).  A product's features are
    products.  Terms of a sum take turns, so that each has its share of any 64 consecutive pairs.

    A pair hangs on the seed, its number and the kernel alone: nothing is stored but the first 64 MiB of frequencies,
    which are then not made anew.  Evaluating N features at p points takes ``p N d`` operations and p N cosines.

    :param kernel: a GPyTorch kernel without batch, of which a copy is kept.
    :param origin: ``(1, d)``, where phases are counted from; amid the points.
    :raises InputError: for a kernel without random features.
    """

    def __init__(self, kernel: Any, origin: Tensor, seed: int) -> None:
        self.origin, self.seed = origin.detach(), seed
        self.kernel = copy.deepcopy(kernel).requires_grad_(False)  # whose parameters nobody changes
        self._expression = recognise_waves(self.kernel)
        with torch.no_grad():
            at_origin = self._prepared(self.origin)
        self._factors = at_origin.features
        terms = zip(self._expression.terms, _shares(at_origin.coefficients), strict=True)
        self._terms = [
            _Term(term, slots, Philox(seed, f"random features of term {number}"))
            for number, (term, slots) in enumerate(terms)
        ]
        self._kept: dict[tuple[Any, ...], list[Tensor]] = {}
        self._kept_bytes = 0

    def prepare(self, x: Tensor) -> Made:
        """Return the values that features of x ``(p, d)`` are made of, in float64 where large phases need it."""
        made = self._prepared(x)
        parts = [
            f.left if heavy(self._expression, index) else f.left.to(x.dtype) for index, f in enumerate(made.features)
        ]
        return Made(parts, made.coefficients.to(x.dtype), len(x))

    def _prepared(self, x: Tensor) -> Prepared:
        z, origin = x, self.origin.to(x)
        if self.kernel.active_dims is not None:
            z, origin = (t.index_select(-1, self.kernel.active_dims.to(x.device)) for t in (z, origin))
        return self._expression.prepare(z, z, True, torch.Size(), torch.float64, origin)

    def __call__(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Features of x ``(p, d)``: of the pairs from start to stop, all that come first in their pair before all that
        come second, ``(p, 2 (stop - start))``; differentiable in x."""
        return torch.cat(self.pairs(self.prepare(x), start, stop), dim=1)

    def pairs(self, made: Made, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Both members of the pairs from start to stop, each ``(p, stop - start)``.

        :param made: of :meth:`prepare`.
        """
        like = made.coefficients.new_empty(0)
        numbers = torch.arange(start, stop)
        result = [like.new_empty(made.points, stop - start) for _ in range(2)] if len(self._terms) > 1 else []
        for number, term in enumerate(self._terms):
            share = _PATTERN / len(term.slots)
            height = (made.coefficients[number] * (2 * share if term.factors else share)).sqrt()
            if len(self._terms) == 1:
                return self._members(number, made, start, stop, height)
            mine = torch.isin(numbers % _PATTERN, term.slots)
            if not bool(mine.any()):
                continue
            first = start // _PATTERN * len(term.slots) + int((term.slots < start % _PATTERN).sum())
            members = self._members(number, made, first, first + int(mine.sum()), height)
            places = sent(mine.nonzero().squeeze(1), like.device)
            result = [old.index_copy(1, places, new) for old, new in zip(result, members, strict=True)]
        return result[0], result[1]

    def _members(self, number: int, made: Made, start: int, stop: int, height: Tensor) -> tuple[Tensor, Tensor]:
        """Both members of the pairs of one term, by their numbers in it."""
        chunks = [
            self._chunk(number, made, chunk, height, max(start, chunk) - chunk, min(stop, chunk + _CHUNK) - chunk)
            for chunk in range(start // _CHUNK * _CHUNK, stop, _CHUNK)
        ]
        if len(chunks) == 1:
            return chunks[0]
        first, second = (torch.cat(members, dim=1) for members in zip(*chunks, strict=True))
        return first, second

    def _chunk(
        self, number: int, made: Made, chunk: int, height: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Return the pairs from ``chunk + start`` to ``chunk + stop`` of a term."""
        term, parts, like = self._terms[number], made.parts, made.coefficients
        weights = [w[start:stop] for w in self._weights(number, chunk, like)]
        turns: Tensor | None = None
        for index, w in zip(term.factors, weights, strict=True):
            u = parts[index].to(w.dtype)
            turns = u @ w.mT if turns is None else torch.addmm(turns, u, w.mT)
        if turns is None:
            constant = height.expand(made.points, stop - start)
            return constant, constant
        angles = ((turns - turns.detach().round()).to(like.dtype)).mul(2 * math.pi)
        return angles.cos() * height, angles.sin() * height

    def _weights(self, number: int, chunk: int, like: Tensor) -> list[Tensor]:
        """Frequencies in turns of the pairs from ``chunk`` on of a term, for each factor."""
        key = number, chunk, like.dtype, like.device
        kept = self._kept.get(key)
        if kept is None:
            with torch.no_grad():
                kept = self._drawn(self._terms[number], chunk, like)
            size = sum(w.nbytes for w in kept)
            if self._kept_bytes + size <= _KEPT:
                self._kept[key], self._kept_bytes = kept, self._kept_bytes + size
        return kept

    def _drawn(self, term: _Term, chunk: int, like: Tensor) -> list[Tensor]:
        rows = torch.arange(chunk, chunk + _CHUNK, device=like.device)
        uniforms = term.uniforms(rows, sum(numbers(self._expression, term.factors, self._factors)))
        drawn = draw_frequencies(self._expression, term.factors, self._factors, uniforms)
        return [w if heavy(self._expression, i) else w.to(like.dtype) for i, w in zip(term.factors, drawn, strict=True)]


def _shares(coefficients: Tensor) -> list[Tensor]:
    """The places ``(s,)`` of each term in a pattern of ``_PATTERN``: at least one each, else in proportion to the
    coefficients, and spread evenly."""
    c = coefficients.detach().to("cpu", torch.float64)
    spare = _PATTERN - len(c)
    wanted = c / c.sum() * spare if float(c.sum()) > 0 else torch.full_like(c, spare / len(c))
    counts = wanted.floor()
    left = (wanted - counts).argsort(descending=True)[: spare - int(counts.sum())]
    counts[left] += 1
    ends = (counts + 1).cumsum(0)
    reversed_bits = torch.tensor([int(f"{place:06b}"[::-1], 2) for place in range(_PATTERN)])
    owner = torch.searchsorted(ends, reversed_bits.double(), right=True)
    return [(owner == number).nonzero().squeeze(1) for number in range(len(c))]

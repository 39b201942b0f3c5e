"""Functions drawn from a Gaussian process of mean zero, as sums of waves: random Fourier features.

With frequencies w of the spectral density of a stationary kernel (:mod:`~sketchgp.operators.spectrum`),
``f(u) = sqrt(2 / L) sum_l cos(w_l . u + b_l)``, b uniform on a circle, has mean 0 and covariance k for every L.
Rahimi and Recht, "Random features for large-scale kernel machines" (NeurIPS 2007); Shinozuka (1971) for waves of one
height, whose covariances vary less than with random heights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .expression import Expression, Features, Prepared, recognise_waves
from .kernel_matrix import KernelMatrix
from .spectrum import Philox, draw_frequencies, numbers
from .tall import constant
from .tiles import spans

_FREQUENCIES = 1024  # L, of one function and term
_ROWS = 1024  # points at once
_ENTRIES = 2**20  # waves at points at once
_INPUTS = 2**22  # numbers of x that features are made of at once


class PriorPaths:
    """S functions ``f ~ GP(0, k)``, each of L frequencies of its own: their covariance is k exactly, and they are
    normal as L grows.

    A call costs ``p S L`` cosines a term of the kernel and O(p S) memory beside one tile; the frequencies take
    ``S L d`` numbers.  Phases are float64, so that those of many turns keep their digits; the cosine of what is left of
    a turn is of the dtype of x, which takes a fraction of the time in float32.

    :param kernel: a GPyTorch kernel without batch.  Its parameters are read at every call and must not change.
    :param origin: ``(1, d)``, where phases are counted from; amid the points.
    :param samples: S.
    :param generator: of the CPU.
    :param frequencies: L; None is 1024.
    :raises InputError: for a kernel whose spectral density is not known here.
    """

    def __init__(
        self, kernel: Any, origin: Tensor, samples: int, generator: torch.Generator, frequencies: int | None = None
    ) -> None:
        self.kernel, self.origin, self.samples = kernel, origin.detach(), samples
        self.frequencies = _FREQUENCIES if frequencies is None else frequencies
        advice = " Variances by samples need them; the mean needs none: predict(model, x, variance=None)."
        self._expression = expression = recognise_waves(kernel, advice)
        prepared = self._prepare(self.origin)
        self.terms = [
            _Waves.drawn(expression, term, prepared, samples, self.frequencies, generator) for term in expression.terms
        ]

    def part(self, which: slice) -> PriorPaths:
        """Return some of the functions, which share memory with all."""
        result = copy.copy(self)
        result.terms = [waves.part(which) for waves in self.terms]
        result.samples = result.terms[0].samples
        return result

    def _prepare(self, x: Tensor) -> Prepared:
        """Prepare the features of x, counted from the origin, on the left side; differentiable in x only."""
        pairs = constant(KernelMatrix.of(self.kernel, x, self.origin, engine="tiled")).double().pairs
        pairs.expression = self._expression
        return pairs.prepare(pairs.tensors, False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the functions at x ``(p, d)``: ``(p, S)``, float64, differentiable in x.

        Paths of rough kernels have rough gradients, which do not exist in the limit for Matern 1/2 and Laplace.
        """
        parts = [x.new_zeros(0, self.samples, dtype=torch.float64)]
        for span in spans(len(x), max(_ROWS, _INPUTS // max(1, x.shape[1]))):
            parts.append(self._summed(x[span], (span.stop - span.start, self.samples), _Waves.__call__))
        return torch.cat(parts)

    def each(self, x: Tensor) -> Tensor:
        """Return each function at points of its own, x ``(S, p, d)``: ``(S, p)``, float64, differentiable in x."""
        parts = [x.new_zeros(self.samples, 0, dtype=torch.float64)]
        for span in spans(x.shape[1], max(1, _INPUTS // (self.samples * max(1, x.shape[2])))):
            points = x[:, span].reshape(-1, x.shape[2])
            parts.append(self._summed(points, (self.samples, span.stop - span.start), _Waves.each))
        return torch.cat(parts, dim=1)

    def _summed(self, x: Tensor, shape: tuple[int, int], values: Callable[..., Tensor]) -> Tensor:
        """Return the sum of all terms at points ``(p, d)``, of a given shape.

        :param values: of the waves of one term, from the features.
        """
        prepared = self._prepare(x)
        total = x.new_zeros(shape, dtype=torch.float64)
        for coefficient, waves in zip(prepared.coefficients, self.terms, strict=True):
            total = total + coefficient.sqrt() * values(waves, prepared.features, x.dtype)
        return total


@dataclass(frozen=True)
class _Waves:
    """S functions of one term, ``prod_a phi_a``; constants where there is no factor.

    :ivar length: L, of one function.
    :ivar weights: of each factor its index and ``(S L, features)`` frequencies, in turns.
    :ivar phases: ``(S L,)`` in turns; of constants ``(S,)``, their values.
    """

    samples: int
    length: int
    weights: tuple[tuple[int, Tensor], ...]
    phases: Tensor

    @classmethod
    def drawn(
        cls,
        expression: Expression,
        term: tuple[int, ...],
        prepared: Prepared,
        samples: int,
        frequencies: int,
        generator: torch.Generator,
    ) -> _Waves:
        """:param term: indices of its factors; :param prepared: features at any point."""
        seed = int(torch.randint(2**62, (), generator=generator))
        uniforms = Philox(seed, "frequencies and phases of functions")
        features, device = prepared.features, prepared.coefficients.device
        if not term:
            phases = torch.special.ndtri(uniforms(torch.arange(samples), 1).squeeze(1))
            return cls(samples, frequencies, (), phases.to(device))
        count = sum(numbers(expression, term, features))
        made = uniforms(torch.arange(samples * frequencies), count + 1)
        weights = [w.to(device) for w in draw_frequencies(expression, term, features, made[:, :count])]
        phases = made[:, count].contiguous().to(device)
        return cls(samples, frequencies, tuple(zip(term, weights, strict=True)), phases)

    def part(self, which: slice) -> _Waves:
        """Return some of the functions."""
        start, stop, _ = which.indices(self.samples)
        waves = slice(start * self.length, stop * self.length)
        weights = tuple((index, of_all[waves]) for index, of_all in self.weights)
        return _Waves(stop - start, self.length, weights, self.phases[waves if weights else which])

    def __call__(self, features: tuple[Features, ...], dtype: torch.dtype) -> Tensor:
        """Return the functions at all rows, ``(p, S)``; of constants ``(S,)``."""
        if not self.weights:
            return self.phases
        sums = _Sums.apply(self, dtype, *(features[index].left for index, _ in self.weights))
        return sums * math.sqrt(2 / self.length)

    def each(self, features: tuple[Features, ...], dtype: torch.dtype) -> Tensor:
        """Return each function at rows of its own, one function's after the other's: ``(S, p)``, or ``(S, 1)``."""
        if not self.weights:
            return self.phases.unsqueeze(1)
        points = [features[index].left.unflatten(0, (self.samples, -1)).unbind() for index, _ in self.weights]
        sums = [
            _Sums.apply(self.part(slice(s, s + 1)), dtype, *own).squeeze(1)
            for s, own in enumerate(zip(*points, strict=True))
        ]
        return torch.stack(sums) * math.sqrt(2 / self.length)

    def tiles(self, points: tuple[Tensor, ...]) -> Iterator[tuple[slice, slice, slice, Tensor]]:
        """Yield rows, functions, their waves, and the turns ``(rows, waves)`` less whole ones, float64."""
        p = len(points[0])
        group = max(1, min(self.samples, _ENTRIES // (min(p, _ROWS) * self.length)))
        rows = max(1, min(_ROWS, _ENTRIES // (group * self.length)))
        for span in spans(p, rows):
            for samples in spans(self.samples, group):
                which = slice(samples.start * self.length, samples.stop * self.length)
                turns = self.phases[which].unsqueeze(0)
                for u, (_, weights) in zip(points, self.weights, strict=True):
                    turns = torch.addmm(turns, u[span], weights[which].mT)
                yield span, samples, which, turns.frac_()


class _Sums(torch.autograd.Function):
    """Sums over the waves of each function, by tiles forward and backward: ``(p, S)``, float64."""

    @staticmethod
    def forward(ctx: Any, waves: _Waves, dtype: torch.dtype, *points: Tensor) -> Tensor:  # type: ignore[override]
        out = points[0].new_empty(len(points[0]), waves.samples)
        for rows, samples, _, turns in waves.tiles(points):
            heights = turns.to(dtype).mul_(2 * math.pi).cos_()
            out[rows, samples] = heights.reshape(len(turns), -1, waves.length).sum(dim=-1).to(torch.float64)
        ctx.waves, ctx.dtype = waves, dtype
        ctx.save_for_backward(*points)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        points, waves = ctx.saved_tensors, ctx.waves
        result = [torch.zeros_like(u) for u in points]
        for rows, samples, which, turns in waves.tiles(points):
            slopes = turns.to(ctx.dtype).mul_(2 * math.pi).sin_().to(torch.float64).mul_(-2 * math.pi)
            slopes = slopes.reshape(len(turns), -1, waves.length) * grad[rows, samples].unsqueeze(-1)
            for total, (_, weights) in zip(result, waves.weights, strict=True):
                total[rows] += slopes.reshape(len(turns), -1) @ weights[which]
        return (None, None, *result)

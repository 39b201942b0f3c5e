"""The engine ``"fused"``: one pass over the pairs on CPUs, that keeps nothing of the matrix, not even a tile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import PeriodicKernel
from torch import Tensor

from ....settings import memory_budget
from ...expression import Atom, Expression, Features, Prepared
from ...nearby import nearby
from ...pairs import Pairs
from ...profiles import GAUSS, LAPLACE, MATERN, Profile
from ...tiles import Piece, spans
from ..base import Engine, installed
from ..tiled import TILED, cut
from .source import GROUP, Layout, Plan, compiled, unit

_SHAPE = (512, 2048)  # rows and columns that a call of a compiled function takes
_WIDEST = 32  # right-hand sides in one pass, which is faster up to as many
_MOST = 32  # features, beyond which tiles are faster
_PAYS = 12  # features up to which it is at least 1.2 times as fast as tiles
_GAINS = 20  # features up to which it is faster at all
_CHEAP = (3, 8)  # features up to which it is faster than a stored matrix, with one right-hand side and with more
_LEAST = 512  # columns, so that a pass is not mostly beyond the last one
_SMALL = 2**22  # pairs below which a product takes a few milliseconds, whatever the engine
_LARGE = 2**27  # pairs from which on some tens of products pay for the compilation
_ONCE = 16  # times as many for one or two products (checks, for which the library names tiles), and where it gains less


class Fused(Engine):
    """Products in one pass over the pairs, in registers; memory O((n + m)(p + t)).  Derivatives go by tiles.

    Distances are sums of squared differences, so that far rows lose nothing.  Where x1 is x2, each pair is evaluated
    once and used twice.  Sums are in the dtype of the inputs for some hundred pairs, and in float64 beyond.  Up to 32
    right-hand sides take one pass, as far as the memory budget holds the sums of each thread.  The functions are
    compiled by numba, 0.2 to 2 s for each kind: kernel, number of features, one right-hand side or more, dtype.
    """

    name = "fused"
    package = "numba is not installed (python -m pip install numba)"

    def absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if not installed("numba"):
            return self.package
        return None if device.type == "cpu" else f"it runs on CPUs, and the inputs are on {device}"

    def missing(self, pairs: Pairs) -> str | None:
        if pairs.expression is None:
            return f"{type(pairs.kernel).__name__} is none of the kernels, nor a sum or product of them, that it knows"
        features = count_features(pairs.expression, pairs.x1.shape[-1])
        if features > _MOST:
            return f"it takes up to {_MOST} features, and the kernel has {features}"
        return self.absent(pairs.device, pairs.dtype)

    def serves(self, pairs: Pairs, columns: int = 1, stored: bool = False) -> bool:
        """Return whether products can be made and are faster, as in :meth:`pays`."""
        whole = pairs
        while whole.whole is not None:  # its parts are multiplied one after the other
            whole = whole.whole[0]
        size = whole.shape.numel() if pairs.engine != TILED.name else whole.shape.numel() // _ONCE
        small = pairs.shape[-1] < _LEAST or pairs.shape.numel() < _SMALL
        what = pairs.expression, size, pairs.x1.shape[-1], pairs.dtype, columns, stored
        return not small and self.pays(*what) and self.takes(pairs)

    def pays(
        self, expression: Expression | None, size: int, d: int, dtype: torch.dtype, columns: int, stored: bool
    ) -> bool:
        """Return whether products take less time than those of other engines, by their measured costs.

        :param size: pairs of the matrix; :param d: columns of its inputs; :param dtype: theirs.
        :param columns: right-hand sides.
        :param stored: whether the other way is to read a stored matrix.
        """
        if expression is None or size < _LARGE:
            return False
        features = count_features(expression, d)
        most = _CHEAP[columns > 1] if stored else _GAINS if size >= _ONCE * _LARGE else _PAYS
        few = features <= most and columns <= _WIDEST
        quick = [GAUSS, LAPLACE] if dtype == torch.float64 and columns == 1 else [GAUSS, LAPLACE, *MATERN.values()]
        return few and (not stored or (expression.terms == ((0,),) and expression.atoms[0].profile in quick))

    def share(self, pairs: Pairs) -> float:
        """Return the time of products with one column over that by tiles: measured from 2 to 20 features."""
        assert pairs.expression is not None
        return 0.2 + 0.025 * count_features(pairs.expression, pairs.x1.shape[-1])

    def resolution(self, pairs: Pairs) -> float:
        return torch.finfo(pairs.compute_dtype).eps

    @torch.no_grad()
    def product(self, pairs: Pairs, rhs: Tensor) -> Tensor:
        near = nearby(pairs)
        if near is not None:
            return near.back(self.product(near.pairs, rhs.index_select(-2, near.right)))
        if not pairs.flat_batch:
            return _product(pairs, pairs.prepared(), rhs)
        items = (pairs.prepared().converted(partial(torch.select, dim=0, index=b)) for b in range(len(rhs)))
        return torch.stack([_product(pairs, item, v) for item, v in zip(items, rhs, strict=True)])


FUSED = Fused()


def count_features(expression: Expression, d: int) -> int:
    """Return how many features the distances of a kernel are made of.

    :param d: columns of the inputs.
    """
    return sum(size for atom in expression.atoms for size, _ in _layout(atom, d))


def _layout(atom: Atom, d: int) -> Layout:
    """Return the layout of an atom, one part for each leaf."""
    circles = [type(leaf.kernel) is PeriodicKernel for leaf in atom.leaves]
    sizes = [d if leaf.dims is None else len(leaf.dims) for leaf in atom.leaves]
    return tuple((size * (1 + circle), circle) for size, circle in zip(sizes, circles, strict=True))


def _product(pairs: Pairs, prepared: Prepared, rhs: Tensor) -> Tensor:
    """``K rhs`` ``(n, t)`` of one matrix, for rhs ``(m, t)``."""
    assert pairs.expression is not None
    atoms, terms = pairs.expression.atoms, pairs.expression.terms
    layouts = [(atom.profile, _layout(atom, pairs.x1.shape[-1])) for atom in atoms]
    both = list(zip(prepared.features, layouts, strict=True))
    right = _joined([f.once("fused", partial(_packed, f.right, f, *of)) for f, of in both], pairs.shape[-1], rhs.dtype)
    left = right if pairs.same else _joined([_packed(f.left, f, *of) for f, of in both], pairs.shape[-2], rhs.dtype)
    alphas = [0.0 if f.alpha is None else float(f.alpha) for f in prepared.features]
    numbers = np.array([*prepared.coefficients.tolist(), *alphas], dtype=right.dtype)
    kinds = tuple((profile.name, layout) for profile, layout in layouts)
    pieces = list(cut(pairs, _SHAPE, pairs.same))
    result = rhs.new_empty(pairs.shape[-2], rhs.shape[-1])
    # right-hand sides whose sums, in float64 on each thread, take half of the memory budget
    most = memory_budget.value(pairs.device) // (16 * max(1, len(result)) * torch.get_num_threads())
    for some in spans(rhs.shape[-1], min(_WIDEST, max(GROUP, most))):
        v = rhs[:, some].mT
        vectors = torch.nn.functional.pad(v, (0, 0, 0, -len(v) % GROUP if len(v) > 1 else 0)).contiguous().numpy()
        plan = Plan(kinds, terms, len(v) == 1, pairs.same, right.dtype.name)
        sums = _summed(plan, (left, right, vectors, vectors), numbers, pieces)[: len(v)]
        result[:, some] = torch.from_numpy(sums).mT * (prepared.coefficients[0] if len(terms) == 1 else 1.0)
    return result


def _packed(x: Tensor, features: Features, profile: Profile, layout: Layout) -> Tensor:
    """Return features ``(n, p)`` in the units of the compiled functions, ``(p, n)``.

    Points on a circle are given by half of their angle, since ``|a - z| = 2 r |sin(angle / 2)|`` takes fewer operations
    and loses no digits.
    """
    factor = unit(profile) * (1.0 if features.alpha is None else float(features.alpha) ** -0.5)
    packed = (x * factor).mT.contiguous()
    packed.masked_fill_(packed.isnan(), torch.nan)  # other NaNs have bits that would count as an exponent
    for part, (_, circle) in zip(packed.split([size for size, _ in layout]), layout, strict=True):
        if circle:
            cosines, sines = part.double().chunk(2)
            half, root = torch.atan2(sines, cosines) / 2, (2 * torch.hypot(cosines, sines)).sqrt()
            part.copy_(torch.cat([half.cos() * root, half.sin() * root]))
    return packed


def _joined(parts: list[Tensor], rows: int, dtype: torch.dtype) -> np.ndarray:
    return (torch.cat(parts) if parts else torch.empty(0, rows, dtype=dtype)).numpy()


def _summed(plan: Plan, arrays: tuple[np.ndarray, ...], numbers: np.ndarray, pieces: list[Piece]) -> np.ndarray:
    """Return the products ``(t, n)`` in float64, by as many threads as torch has.

    Each has sums of its own, and the same pieces each time, so that the same call gives the same result.
    """
    function, stop = compiled(plan), threading.Event()
    pieces = sorted(pieces, key=_entries, reverse=True)
    threads = max(1, min(torch.get_num_threads(), len(pieces)))

    def work(number: int) -> np.ndarray:
        out = np.zeros((len(arrays[2]), arrays[0].shape[1]))
        back = out if plan.both else np.zeros((1, 1))
        dtype = getattr(torch, plan.dtype)
        buffer = torch.empty(plan.buffer(len(arrays[2])), dtype=dtype).numpy()  # aligned to cache lines
        for rows, columns, mirror in pieces[number::threads]:
            if stop.is_set():
                break
            place = (rows.start, rows.stop, columns.start, columns.stop)
            function(*arrays, out, back, numbers, *place, float(mirror), buffer)
        return out

    with ThreadPoolExecutor(max(1, threads - 1)) as pool:
        others = [pool.submit(work, number) for number in range(1, threads)]
        try:
            return sum((other.result() for other in others), work(0))
        finally:
            stop.set()  # where this thread was interrupted, the others end as well


def _entries(piece: Piece) -> int:
    return (piece[0].stop - piece[0].start) * (piece[1].stop - piece[1].start)
